"""The half of `Group` that makes groups of its ranks, and ends together with them.

Subgroups meet in the store in which their group met. All of them are one family, with one
generation, and end together: see family.py.
"""

from __future__ import annotations

import os
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, Self

import torch

from .contract.communicator import Communicator
from .contract.errors import (
    CollectiveError,
    CollectiveMismatch,
    CollectiveTimeout,
    GroupAborted,
    GroupClosed,
    PeerLost,
    StoreTimeout,
    fresh_copy,
)
from .contract.modes import outside_modes
from .contract.operation import Operation
from .contract.plain_numbers import whole
from .contract.torch_words import says
from .contract.work import Work
from .diagnosis.blame import usual_and_blamed
from .diagnosis.flight_recorder import FlightRecorder, FlightRecording
from .family import Family
from .meeting import WatchedStore, ranks_of_keys
from .objects.channel import ObjectChannel, RecorderOnBehalf
from .stores.store import PrefixStore, Store


class Subgroups(ABC):
    """Making subgroups, and ending and closing a group together with them."""

    name: str
    rank: int
    size: int
    device: torch.device
    generation: int
    timeout_s: float
    ranks: tuple[int, ...]
    parent: Self | None
    _communicator: Communicator
    _recorder: FlightRecorder
    _store: Store
    _asked_backend: str | None
    _pid: int
    _closed: bool
    _family: Family
    _children: list[Self]
    _children_made: Iterator[int]  # equal on all ranks, because making a group is a collective
    _channel: ObjectChannel | None

    @classmethod
    @abstractmethod
    def create(
        cls,
        store: Store,
        rank: int,
        size: int,
        device: torch.device | str = "cpu",
        *,
        generation: int,
        timeout_s: float,
        name: str,
        backend: str | None,
    ) -> Self: ...

    @abstractmethod
    def all_gather_object(self, value: Any) -> Work: ...

    # -- made ------------------------------------------------------------------------------------

    @says(
        timeout="a new group has the timeout_s of its group; pass timeout_s= to an operation",
        backend=(
            "a new group has the backend of its group; Group.create(store, rank, size, "
            "backend=...) makes an independent group"
        ),
        pg_options="there are none; leave it out",
        use_local_synchronization="all ranks of this group call new_group(); leave it out",
        group_desc="write name=",
        device_id="a new group has the device of its group; leave it out",
    )
    def new_group(self, ranks: Sequence[int], name: str | None = None) -> Self | None:
        """A group of `ranks` of this group, in that order; None on the other ranks.

        All ranks of this group call it with the same arguments. It blocks; in a coroutine, use
        asyncio.to_thread. The groups share a generation: if either fails, so does the other.
        name: for errors and `describe`; by default this group's name with a number.

        Raises ValueError for ranks that are out of range or named twice, CollectiveMismatch on all
        ranks if they pass different arguments.
        """
        ranks = [_whole(rank, "ranks must be whole numbers") for rank in ranks]
        outside = [rank for rank in ranks if not 0 <= rank < self.size]
        if outside:
            raise ValueError(
                f"ranks must be in [0, {self.size}), the ranks of group {self.name!r}; "
                f"got {outside}"
            )
        if not ranks:
            raise ValueError("ranks must name at least one rank, got none")
        if len(set(ranks)) != len(ranks):
            raise ValueError(f"ranks must name each rank once, got {ranks}")
        number, said = self._agree((ranks, name))
        _, blamed = usual_and_blamed(said)
        if blamed:
            passed = ", ".join(
                f"rank {r} passed {what[0]}, name {what[1]!r}" for r, what in enumerate(said)
            )
            remedy = "Every rank must call new_group with the same ranks and name, in one order."
            raise CollectiveMismatch(
                f"new_group #{number}", self.generation, blamed, passed, remedy
            )
        return self._make(ranks, name, f"{number}")

    def split(
        self, color: int | None, key: int | None = None, name: str | None = None
    ) -> Self | None:
        """One group for each color, of the ranks that pass that color; None if color is None.

        All ranks of this group call it, and it blocks, as `new_group`. key: orders the ranks of
        the new group; ranks with equal keys keep their order. See MPI_Comm_split.
        """
        if color is not None:
            color = _whole(color, "color must be a whole number or None")
        place = 0 if key is None else _whole(key, "key must be a whole number or None")
        number, said = self._agree((color, place))
        if color is None:
            return None
        members = [rank for rank in range(self.size) if said[rank][0] == color]
        members.sort(key=lambda rank: (said[rank][1], rank))
        return self._make(members, name, f"{number}.{color}")

    @outside_modes
    def connect_child(
        self,
        members: Sequence[int],
        prefix: str,
        *,
        name: str,
        device: torch.device,
        timeout_s: float,
        what: str | None = None,
        limit_s: float | None = None,
    ) -> Self:
        """Connect `members` of this group, after all of them have agreed to connect.

        If a member does not come, this group's generation ends as well.

        members: ranks of this group, in the order of the new group; this rank is among them.
        prefix: where they meet, within the store in which this group met.
        what, timeout_s: for errors; `what` is by default the making of a group.
        limit_s: seconds until all members have met; by default timeout_s.
        """
        what = what or f"the making of group {name!r}"
        group: Self | None = None
        try:
            limit_s = timeout_s if limit_s is None else limit_s
            with self._communicator.watching(members, what, limit_s):
                group = self.create(
                    self._meeting_place(prefix, members),
                    members.index(self.rank),
                    len(members),
                    device,
                    generation=self.generation,
                    timeout_s=limit_s,
                    name=name,
                    # The backend that the caller chose serves only the device of this group.
                    backend=self._asked_backend if device.type == self.device.type else None,
                )
                self._adopt(group, members)  # From here on a failure of it ends this group.
        except (CollectiveError, StoreTimeout) as error:
            if group is not None and self._closed:
                group.close()
            failure = self.failure()
            if failure is None:
                failure = self._not_met(error, what, members, timeout_s)
                self.abort(failure)
            raise fresh_copy(failure) from error
        if self._closed:  # Another thread closed this group and could not know the new one.
            group.close()
            raise GroupClosed(what, self.generation)
        return group

    def another_store(self) -> Store:
        """A part of this group's store with keys of its own, for other agreements between ranks.
        All ranks call it in the same order, also relative to `new_group` and `split`."""
        return PrefixStore(f"others/{next(self._children_made)}", self._store)

    def global_rank(self, group_rank: int) -> int:
        """The root group's number of rank `group_rank` of this group."""
        if not 0 <= group_rank < self.size:
            raise ValueError(f"group_rank must be a rank in [0, {self.size}), got {group_rank}")
        return self.ranks[group_rank]

    def group_rank(self, global_rank: int) -> int:
        """This group's number of rank `global_rank` of the root group."""
        if global_rank not in self.ranks:
            raise ValueError(
                f"global_rank {global_rank} is not in group {self.name!r}, whose global ranks are "
                f"{list(self.ranks)}"
            )
        return self.ranks.index(global_rank)

    def _agree(self, mine: Any) -> tuple[int, list[Any]]:
        """The number of the group to be made, and the arguments of all ranks."""
        said = self.all_gather_object(mine).wait()
        return next(self._children_made), said

    def _make(self, members: Sequence[int], name: str | None, key: str) -> Self | None:
        """members: ranks of this group, in the order of the new group."""
        if self.rank not in members:
            return None
        return self.connect_child(
            members,
            f"children/{key}",
            name=name or f"{self.name}.{key}",
            device=self.device,
            timeout_s=self.timeout_s,
        )

    def _channel_group(self, operation: Operation) -> tuple[Self, RecorderOnBehalf]:
        """The CPU group of the same ranks for the `ObjectChannel`, and its recorder.

        operation: the first operation that needs the group; its deadline applies.
        """
        left_s = operation.issued_at + operation.timeout_s - time.monotonic()
        group = self.connect_child(
            range(self.size),
            "objects",
            name=f"{self.name}, objects",
            device=torch.device("cpu"),
            timeout_s=operation.timeout_s,
            what=str(operation),
            limit_s=max(left_s, 0.001),
        )
        recorder = RecorderOnBehalf(group.rank, group.size, group.name, group.generation)
        group._recorder = recorder
        return group, recorder

    def _meeting_place(self, prefix: str, members: Sequence[int]) -> WatchedStore:
        """The part of this group's store in which a group of `members` meets.

        A rank that waits there raises at once if a member is lost or this group ends; with the
        store alone it would wait until the deadline.
        """

        def look() -> None:
            failure = self.failure()
            if failure is not None:
                raise fresh_copy(failure)
            gone = self._communicator.gone()
            lost = [number for number, rank in enumerate(members) if rank in gone]
            if lost:
                how = "; ".join(gone[members[number]] for number in lost)
                raise PeerLost("rendezvous", self.generation, lost, how)

        return WatchedStore(prefix, self._store, look)

    def _adopt(self, child: Self, members: Sequence[int]) -> None:
        """Add `child`, a group of `members` of this group in order, to this family."""
        child.parent = self
        child.ranks = tuple(self.ranks[rank] for rank in members)
        child._family.remove(child)
        child._family = self._family
        self._children.append(child)
        child._family.add(child)
        child._communicator.on_wait(
            lambda ranks, since: self._communicator.show_waits([members[r] for r in ranks], since)
        )

    def _not_met(
        self,
        error: CollectiveError | StoreTimeout,
        what: str,
        members: Sequence[int],
        timeout_s: float,
    ) -> CollectiveError:
        """Why `members` did not meet, with this group's numbers of the ranks."""
        if isinstance(error, StoreTimeout):
            late = sorted(members[number] for number in ranks_of_keys(error.keys))
            return CollectiveTimeout(what, self.generation, late, timeout_s)
        ranks = sorted(members[rank] for rank in error.ranks)
        match error:
            case CollectiveTimeout():
                return CollectiveTimeout(what, self.generation, ranks, timeout_s, error.whereabouts)
            case PeerLost():
                return PeerLost(what, self.generation, ranks, error.detail)
            case _:
                return GroupAborted(self.generation, ranks, f"{what} failed: {error}")

    # -- ended -----------------------------------------------------------------------------------

    def abort(self, reason: str | BaseException | CollectiveError) -> None:
        """End this generation on all ranks; may be called from any thread.

        Every pending and later work raises on all ranks: a CollectiveError unchanged, any other
        reason as GroupAborted by this rank, with the traceback if it is an exception. Groups made
        of this group, and its parent, end as well.
        """
        if isinstance(reason, CollectiveError):
            error = reason
        elif isinstance(reason, BaseException):
            text = "".join(traceback.format_exception_only(reason)).strip()
            trace = "".join(traceback.format_exception(reason))
            error = GroupAborted(self.generation, [self.rank], text, trace)
        else:
            error = GroupAborted(self.generation, [self.rank], reason)
        if os.getpid() != self._pid or self._closed:
            return
        self.end_with(error)
        self._family.end(self, error)

    def end_with(self, error: CollectiveError) -> None:
        """Abort this group and its object channel. Its family, which calls this, ends the rest."""
        self._communicator.abort(error)
        channel = self._channel
        if channel is not None:
            channel.fail(error)

    def failure(self) -> CollectiveError | None:
        """The error that ended this generation, as far as this rank knows; None while it lives."""
        return self._communicator.failure()

    def close(self) -> None:
        """Free memory and threads; peers that still wait for this rank raise PeerLost.

        Closes the groups made of this one first.
        """
        if self._closed or os.getpid() != self._pid:  # A fork shares the rank's memory segment.
            return
        self._closed = True
        for child in list(self._children):
            child.close()
        failure = self._communicator.failure()
        if failure is not None and not isinstance(failure, GroupClosed):
            self._family.end(self, failure)  # The family does not poll a group that has left.
        self._family.remove(self)
        if self.parent is not None and self in self.parent._children:
            self.parent._children.remove(self)
        if self._channel is not None:
            self._channel.close(GroupClosed("close", self.generation))
            self._channel = None  # It refers to this group, whose memory would outlive its users.
        self._communicator.close()

    @property
    def flight_recorder(self) -> FlightRecording:
        """The last collectives of this rank and their current states; print it when a run hangs."""
        return self._recorder.read(self.ranks)

    @property
    def has_misled_here(self) -> bool:
        """Of this group alone, as `has_misled`."""
        return self._recorder.has_misled

    def flight_recorders(self) -> list[FlightRecording]:
        """The recordings of this group, its family and their object channels."""
        return self._family.recordings()

    def as_counted_here(self, error: CollectiveError) -> CollectiveError:
        """`error`, which a group of this family may have raised, with this group's rank numbers."""
        return self._family.as_seen_from(self, error)


def _whole(number: object, rule: str) -> int:
    if (plain := whole(number)) is None:
        raise TypeError(f"{rule}, got {number!r}")
    return plain
