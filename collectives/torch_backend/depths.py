"""The groups beneath one process group: one for each device and depth, made when needed."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from ..errors import CollectiveError, fresh_copy
from ..group import Group
from ..store import PrefixStore, Store
from ..subgroups import adopt
from .ordered_future import current_depth

_CPU = torch.device("cpu")


class Depths:
    """Hands out the group that an operation runs on.

    The group on the host is made at once, so that who does not come is named here, and two ranks
    may exchange messages while the others do not. One on a GPU, and those of callbacks, are made by
    the first operation that needs them, in which all ranks take part.

    parent, members: the group whose fate they share, and its ranks that these are.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        *,
        name: str,
        generation: int,
        timeout_s: float,
        parent: Group | None,
        members: Sequence[int],
    ) -> None:
        self.rank = rank
        self.size = size
        self.name = name
        self.generation = generation
        self.timeout_s = timeout_s
        self._store = store
        self._groups: dict[tuple[torch.device, int], Group] = {}
        self._making: dict[tuple[torch.device, int], threading.Lock] = {}
        self._guard = threading.Lock()
        self._closed = False
        self.host = self._made(_CPU, 0)
        if parent is not None:
            adopt(parent, self.host, members)
        self._groups[_CPU, 0] = self.host

    def group(self, device: torch.device) -> Group:
        """For tensors on `device`, at the depth of the calling thread."""
        depth = current_depth()
        found = self._groups.get((device, depth))
        return self._make(device, depth) if found is None else found

    def all(self) -> list[Group]:
        return list(self._groups.values())

    def set_timeout(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        for group in self.all():
            group.timeout_s = timeout_s

    def abort(self, reason: str | CollectiveError) -> None:
        self.host.abort(reason)

    def close(self) -> None:
        with self._guard:
            self._closed = True
        for group in reversed(self.all()):
            group.close()

    def _make(self, device: torch.device, depth: int) -> Group:
        if str(device) == "cuda":
            return self.group(torch.device("cuda", torch.cuda.current_device()))
        # One lock for each: a rendezvous of one depth must not wait for that of another.
        with self._guard:
            lock = self._making.setdefault((device, depth), threading.Lock())
        with lock:
            if (device, depth) in self._groups:
                return self._groups[device, depth]
            failure = self.host.failure()
            if failure is not None:
                raise fresh_copy(failure)
            group = self._made(device, depth)
            adopt(self.host, group, range(self.size))
            with self._guard:
                is_late = self._closed
                if not is_late:
                    self._groups[device, depth] = group
            if is_late:
                group.close()
            return group

    def _made(self, device: torch.device, depth: int) -> Group:
        name = self.name if depth == 0 else f"{self.name}, callbacks {depth}"
        return Group.create(
            PrefixStore(f"{device.type}/{depth}", self._store),
            self.rank,
            self.size,
            device,
            generation=self.generation,
            timeout_s=self.timeout_s,
            name=name,
        )
