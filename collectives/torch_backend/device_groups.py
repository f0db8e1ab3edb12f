"""The groups of one process group: one for each device and depth, made when needed."""

from __future__ import annotations

import threading

import torch

from ..group import Group
from .ordered_future import current_depth

_CPU = torch.device("cpu")


class DeviceGroups:
    """The groups of one process group, by device and depth.

    host: the CPU group, the parent of all others. It is made first, so that the error of a missing
    rank appears at initialisation, and two ranks may exchange messages while the others do not.
    Groups on GPUs, and groups of callbacks, are made by the first operation that needs them, in
    which all ranks take part.
    """

    def __init__(self, host: Group) -> None:
        self.host = host
        self._groups: dict[tuple[torch.device, int], Group] = {(_CPU, 0): host}
        self._making: dict[tuple[torch.device, int], threading.Lock] = {}
        self._guard = threading.Lock()

    def group(self, device: torch.device) -> Group:
        """The group for tensors on `device`, at the depth of the calling thread."""
        depth = current_depth()
        found = self._groups.get((device, depth))
        return self._make(device, depth) if found is None else found

    def all(self) -> list[Group]:
        return list(self._groups.values())

    def set_timeout(self, timeout_s: float) -> None:
        for group in self.all():
            group.timeout_s = timeout_s

    def abort(self, reason: str) -> None:
        self.host.abort(reason)

    def close(self) -> None:
        self.host.close()

    def _make(self, device: torch.device, depth: int) -> Group:
        if str(device) == "cuda":
            return self.group(torch.device("cuda", torch.cuda.current_device()))
        # Each has a lock: the rendezvous of one depth must not wait for that of another.
        with self._guard:
            lock = self._making.setdefault((device, depth), threading.Lock())
        with lock:
            if (device, depth) not in self._groups:
                self._groups[device, depth] = self._made(device, depth)
            return self._groups[device, depth]

    def _made(self, device: torch.device, depth: int) -> Group:
        host = self.host
        name = host.name if depth == 0 else f"{host.name}, callbacks {depth}"
        return host.connect_child(
            range(host.size),
            f"{device.type}/{depth}",
            name=name,
            device=device,
            timeout_s=host.timeout_s,
            what=f"the making of group {name!r} on {device}",
        )
