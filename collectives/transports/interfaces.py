"""The network interfaces that a group's transport uses, and the variables that choose them."""

from __future__ import annotations

import os
import socket

GLOO_VARIABLE = "GLOO_SOCKET_IFNAME"
NCCL_VARIABLE = "NCCL_SOCKET_IFNAME"


def check_gloo_interfaces() -> None:
    """Raise ValueError if GLOO_SOCKET_IFNAME names an interface that this host does not have.

    Gloo itself reads the variable, a list of interface names separated by commas.
    """
    here = [name for _, name in socket.if_nameindex()]
    wanted = [name.strip() for name in os.environ.get(GLOO_VARIABLE, "").split(",") if name]
    missing = [name for name in wanted if name not in here]
    if missing:
        raise ValueError(
            f"the environment variable {GLOO_VARIABLE} names {', '.join(missing)}, but this host "
            f"has {', '.join(here)}; name one of these, or unset it"
        )


def network_of(backend: str) -> str:
    """A description of the network through which a group of `backend` reaches the other ranks."""
    if backend == "shared-memory":
        return "none: the memory of this host"
    variable = {"gloo": GLOO_VARIABLE, "nccl": NCCL_VARIABLE}.get(backend)
    # A backend that a user has registered.
    if variable is None:
        return f"chosen by the backend {backend!r}"
    chosen = os.environ.get(variable, "")
    if chosen:
        return f"{chosen} ({variable})"
    if backend == "nccl":
        return f"chosen by NCCL; {variable} names another"
    return f"{_address_of_this_host()}; {variable} names another"


def _address_of_this_host() -> str:
    name = socket.gethostname()
    try:
        return f"the one of {socket.gethostbyname(name)}, the address of this host's name {name}"
    except OSError:
        return f"the loopback, because this host's name {name} has no address"
