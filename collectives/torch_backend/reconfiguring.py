"""Process groups whose members change: `reconfigure` of torch 2.14 and newer.

A process group that was initialised with enable_reconfigure=True connects to no rank. Each rank has
a handle, which names it. Something outside of the process group (torchft's lighthouse, a script)
decides who is a member, and gives every member the handles of all and a number that was not used
before, the uuid. The members then meet in the store of the process group, as a new `Group` whose
generation is the uuid. Nothing is read from an earlier group; so it does not matter how that one
ended, or whether this rank was in it.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from typing import Any

from ..group import Group
from ..stores.store import Store
from .registration import NAME


class GroupMembership:
    """Connects this rank to the members of the process group, each time that these change.

    store: the store of the process group. A new rank must reach it under the same prefix.
    rank, size: as they were passed to init_process_group.
    handle: this rank's name until it is next connected.
    """

    def __init__(self, store: Store, name: str, rank: int, size: int, timeout_s: float) -> None:
        self._store = store
        self.name = name
        self.rank, self.size, self.timeout_s = rank, size, timeout_s
        self.handle = _new_handle(rank)

    def members(self, handles: Iterable[str]) -> list[str]:
        """The handles by new rank: as they are listed; those of a set, by former rank.

        Raises RuntimeError, as torch's Gloo does, for a handle that is not one of this backend or
        comes twice, and if this rank's handle is not among them.
        """
        members = list(handles) if isinstance(handles, list) else sorted(handles, key=_former_rank)
        for handle in members:
            _former_rank(handle)
        if len(set(members)) != len(members):
            raise RuntimeError(f"handles must name each rank once, got {members}")
        if self.handle not in members:
            raise RuntimeError(
                f"handles must have this rank's own, {self.handle!r}, got {members}; a handle is "
                "good for one reconfigure(), so take it from get_reconfigure_handle() each time"
            )
        return members

    def connect(self, members: list[str], number: int, timeout_s: float) -> Group:
        """The group of `members`. Blocks until all have come.

        number: the uuid. Raises RuntimeError if ranks have met under it before.
        """
        rank = members.index(self.handle)
        claim = f"reconfigured/{number}/{rank}"
        # Each rank looks, so that none waits for ranks that have noticed it. A rank that calls
        # again after a timeout has the handle that it had.
        if self._store.compare_set(claim, "", self.handle).decode() != self.handle:
            raise RuntimeError(
                f"uuid {number} was already used; each reconfigure() requires a unique uuid"
            )
        group = Group.create(
            self._store,
            rank,
            len(members),
            generation=number % 2**63,
            timeout_s=timeout_s,
            name=self.name,
        )
        self.handle = _new_handle(rank)
        return group


class Unconnected:
    """In the place of `DeviceGroups`: the groups of a process group that has no members yet."""

    @property
    def host(self) -> Any:
        raise RuntimeError(
            "the process group is not connected: it was initialised with enable_reconfigure=True, "
            "and its ranks meet in reconfigure(), which has not succeeded"
        )

    def group(self, device: object) -> Any:
        return self.host

    def set_timeout(self, timeout_s: float) -> None:
        """Do nothing: there is no group to have it."""

    def abort(self, reason: str) -> None:
        """Do nothing: nothing is in flight."""

    def close(self) -> None:
        """Do nothing: nothing is held."""


def _new_handle(rank: int) -> str:
    return f"{NAME}:{rank}:{uuid.uuid4().hex}"


def _former_rank(handle: str) -> tuple[int, str]:
    """The rank of a handle, and the handle, which orders new ranks of the same number."""
    backend, _, rest = handle.partition(":")
    rank, _, token = rest.partition(":")
    if backend != NAME or not rank.isdecimal() or not token:
        raise RuntimeError(
            f"{handle!r} is not a handle of the backend {NAME}, as get_reconfigure_handle() gives"
        )
    return int(rank), handle
