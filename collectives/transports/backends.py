"""The transports by name, built-in and registered, and the default for each type of device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..contract.argument_kinds import check_kinds, checked_device
from ..contract.communicator import Communicator
from ..stores.store import Store

Factory = Callable[[Store, int, int, torch.device, int], Communicator]
"""factory(store, rank, size, device, generation): meet the other ranks in `store` and connect.

Blocks until all ranks have come. Only this group uses `store`, whose timeout is the group's. A key
that a rank must write ends in `/<rank>`, so that a StoreTimeout names the missing ranks."""


@dataclass(frozen=True)
class Backend:
    """name: as in `Group.create(backend=...)`. devices: types of torch.device that it serves."""

    name: str
    factory: Factory
    devices: tuple[str, ...]


_backends: dict[str, Backend] = {}


def register_backend(name: str, factory: Factory, devices: Sequence[str]) -> None:
    """Make a transport available to `Group.create(..., backend=name)`, in this process.

        def connect(store, rank, size, device, generation):
            return Transport(store, rank, size)  # A Communicator.
        cl.register_backend("mine", connect, devices=["cpu"])  # Group.create(..., backend="mine")

    factory: called as factory(store, rank, size, device, generation) on every rank; returns a
        `Communicator` that fulfils the contract of collectives/contract/communicator.py.
    devices: the types of devices whose tensors it moves, such as ("cpu",). The backend that is
        registered first for a type is the default for that type.

    Every rank's process registers it. Raises ValueError if the name belongs to another factory.
    """
    check_kinds(register_backend, locals())
    if not devices:
        raise ValueError(
            f"devices must be a sequence of device types such as ('cpu',), got {devices!r}"
        )
    types = tuple(checked_device(device).type for device in devices)
    backend = Backend(name, factory, types)
    if _backends.setdefault(name, backend) != backend:
        raise ValueError(
            f"backend {name!r} is registered already, with {_backends[name].factory}; "
            "choose another name"
        )


def backend_for(name: str | None, device: torch.device) -> Backend:
    """The backend `name`; for None, the first one registered for the device's type."""
    able = [backend for backend in _backends.values() if device.type in backend.devices]
    if name is None:
        if able:
            return able[0]
        raise ValueError(
            f"device must be a cpu or cuda device, got {device}; no backend is registered for "
            f"{device.type!r}, register_backend adds one"
        )
    if name not in _backends:
        raise ValueError(
            f"backend must be one of {', '.join(map(repr, _backends))}, got {name!r}; "
            "register_backend adds one, in every rank's process"
        )
    if _backends[name] not in able:
        raise ValueError(
            f"backend {name!r} moves tensors on {', '.join(_backends[name].devices)}, but the "
            f"device of this group is {device}; choose backend=None, or another device"
        )
    return _backends[name]


# A transport is imported when it is chosen: CuPy may be missing, and Gloo takes a second to import.


def _host(store: Store, rank: int, size: int, _: object, generation: int) -> Communicator:
    from .host import connect

    return connect(store, rank, size, generation)


def _shared_memory(store: Store, rank: int, size: int, _: object, generation: int) -> Communicator:
    from .host import connect

    return connect(store, rank, size, generation, between_hosts=False)


def _gloo(store: Store, rank: int, size: int, _: object, generation: int) -> Communicator:
    from .gloo import GlooCommunicator

    return GlooCommunicator(store, rank, size, generation)


def _nccl(
    store: Store, rank: int, size: int, device: torch.device, generation: int
) -> Communicator:
    from .nccl import connect

    return connect(store, rank, size, device, generation)


register_backend("host", _host, ["cpu"])  # shared memory on one host, else Gloo
register_backend("shared-memory", _shared_memory, ["cpu"])
register_backend("gloo", _gloo, ["cpu"])
register_backend("nccl", _nccl, ["cuda"])
