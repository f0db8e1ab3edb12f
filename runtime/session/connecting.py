"""The cluster that a session connects to, or starts."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from typing import Any

import ray

from actors.errors import StartupError

from ..notebook import in_kernel
from ..process.running import is_running
from .interrupts import show_in_one_line

_CONNECT_S = 5.0  # for a TCP connection to the cluster's head


def connect(address: str | None, log_to_driver: bool = True) -> bool:
    """Connect this process to Ray; return True if it started a local cluster, which the caller
    must stop.

    An existing connection is used first; else `address`; else RAY_ADDRESS (set in each Ray job);
    else a new cluster on this machine.

    It blocks the calling thread for seconds: Ray installs its SIGTERM handler only from the main
    thread, and a start in another thread could not be cancelled.
    """
    before = signal.getsignal(signal.SIGTERM)
    try:
        return _connect(address, log_to_driver)
    finally:
        _restore_sigterm(before)
        show_in_one_line()


def would_be_local(address: str | None) -> bool:
    """Whether the cluster that `connect` would connect to ends with this process."""
    if ray.is_initialized():
        node: Any = ray._private.worker._global_node  # No public call says who has started it.
        return bool(node is not None and node.head)
    return (address or os.environ.get("RAY_ADDRESS") or "local") == "local"


def _check_not_on_a_rank() -> None:
    if is_running():
        raise RuntimeError(
            "a Session was started inside a train function: its workers would wait for the "
            "resources that the workers of this one hold. Start sessions in the program, and call "
            "what this function should run directly, as other(ctx)"
        )


def _connect(address: str | None, log_to_driver: bool) -> bool:
    _check_not_on_a_rank()
    if ray.is_initialized():
        return False
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    options: dict[str, Any] = {"log_to_driver": log_to_driver}
    if in_kernel():  # A notebook shows what Ray says of the connection as if it were an error.
        options["logging_level"] = logging.WARNING
    if address == "local":
        ray.init(address="local", include_dashboard=False, **options)
        return True
    join(address, **options)
    return False


def join(address: str, **options: Any) -> None:
    """Connect to a running cluster. options: those of ray.init. Raises StartupError."""
    if "://" in address:
        raise StartupError(
            f"address={address!r}",
            "a session connects as a part of the cluster, to host:port (6379 as a rule) or 'auto'. "
            "From outside, submit the script: ray job submit --address ... -- python ...",
        )
    try:
        _check_reachable(address)
        ray.init(address=address, **options)
    except OSError as error:  # Ray's ConnectionError is an OSError.
        raise StartupError(
            f"no Ray cluster answers at {address!r}",
            f"{error}. Start one with `ray start --head`, correct address or RAY_ADDRESS, or leave "
            "both out to have a local cluster started",
        ) from error
    except RuntimeError as error:
        if "ersion mismatch" not in str(error):
            raise
        raise StartupError(
            f"the cluster at {address!r} runs other versions than this process",
            f"{' '.join(str(error).split())} Use the cluster's Python and Ray here (its image, or "
            "a job that runs on it), or start the cluster with these",
        ) from None


def _restore_sigterm(before: Any) -> None:
    """Make SIGTERM unwind this process, so that sessions are closed, as after an interrupt.

    ray.init replaces the handler with its own, which ends the process with a stack dump.
    before: the handler before ray.init; a handler of the user is put back.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    is_rays = getattr(before, "__module__", "").startswith("ray.")
    is_users = callable(before) and before is not signal.SIG_DFL and not is_rays
    signal.signal(signal.SIGTERM, before if is_users else _end_by_signal)


def _end_by_signal(number: int, frame: object) -> None:
    sys.exit(128 + number)


def _check_reachable(address: str) -> None:
    """Fail at once where nothing listens: Ray itself retries for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
