"""A family: a group and its subgroups, which share one generation and end together.

A thread that waits in one group does not see what happens in another. So one thread per family and
process polls all of its groups; when one has failed, the thread ends the others, which carries the
failure to their other ranks. A parent ends its children and a child its parent: a rank lost to one
group is lost to all, and a rank that stopped in one group will not come to the next operation of
another. For groups that fail independently, call `Group.create` once for each.

Closing a group is not a failure: it closes the groups made of it, and no others.
"""

from __future__ import annotations

import threading
from typing import NamedTuple, Protocol

from .contract.errors import (
    CollectiveError,
    CollectiveMismatch,
    CollectiveTimeout,
    GroupAborted,
    GroupClosed,
    PeerLost,
    fresh_copy,
)
from .diagnosis.flight_recorder import FlightRecorder, FlightRecording

_LOOK_S = 0.05


class OpenGroup(Protocol):
    """A group of the family. ranks: the global number of each of its ranks."""

    @property
    def name(self) -> str: ...
    @property
    def generation(self) -> int: ...
    @property
    def ranks(self) -> tuple[int, ...]: ...
    @property
    def recorder(self) -> FlightRecorder: ...

    def failure(self) -> CollectiveError | None: ...
    def end_with(self, error: CollectiveError) -> None: ...


class ClosedGroup(NamedTuple):
    """What is left of a group that has failed and was closed since. The group itself refers to its
    family, so its memory would stay until garbage collection finds both."""

    name: str
    generation: int
    ranks: tuple[int, ...]
    recorder: FlightRecorder


Known = OpenGroup | ClosedGroup


class Family:
    """The groups of one generation in this process."""

    def __init__(self) -> None:
        self._members: list[OpenGroup] = []
        self._failed: list[tuple[Known, CollectiveError]] = []  # failures passed on to the others
        self._lock = threading.Lock()
        self._left = threading.Event()  # set when fewer than two members are left
        self._watcher: threading.Thread | None = None  # None: until there are two groups

    def add(self, member: OpenGroup) -> None:
        with self._lock:
            self._members.append(member)
            if len(self._members) == 2:
                self._left = threading.Event()
                self._watcher = threading.Thread(
                    target=self._watch, args=(self._left,), name="chorusline-family", daemon=True
                )
                self._watcher.start()

    def remove(self, member: OpenGroup) -> None:
        with self._lock:
            if member in self._members:
                self._members.remove(member)
                left = ClosedGroup(*(getattr(member, field) for field in ClosedGroup._fields))
                self._failed = [(left if m is member else m, error) for m, error in self._failed]
            if len(self._members) < 2:
                self._left.set()

    def end(self, source: OpenGroup, error: CollectiveError) -> None:
        """End all other members, because `source` has failed with `error`."""
        with self._lock:
            if source in self._members and all(one is not source for one, _ in self._failed):
                self._failed.append((source, fresh_copy(error)))
            others = [member for member in self._members if member is not source]
        for member in others:
            member.end_with(as_seen_from(member, source, error))

    def recordings(self) -> list[FlightRecording]:
        """The recordings of all open groups, and of those that failed and were closed since."""
        return [one.recorder.read(one.ranks) for one in self._known()]

    @property
    def has_misled(self) -> bool:
        """Whether an operation of one of its groups was relied on, and has not succeeded."""
        return any(one.recorder.has_misled for one in self._known())

    def as_seen_from(self, target: Known, error: CollectiveError) -> CollectiveError:
        """`error`, which one of the groups raised, with `target`'s numbers of the ranks."""
        with self._lock:
            ends: list[tuple[Known, CollectiveError | None]] = list(self._failed)
            members = list(self._members)
        ends += [(member, member.failure()) for member in members]
        for source, end in ends:
            if type(end) is type(error) and end is not None and end.args == error.args:
                is_own = (source.name, source.ranks) == (target.name, target.ranks)
                return error if is_own else as_seen_from(target, source, error)
        return error

    def _known(self) -> list[Known]:
        with self._lock:
            return [*self._members, *(one for one, _ in self._failed if one not in self._members)]

    def _watch(self, left: threading.Event) -> None:
        while not left.wait(_LOOK_S):
            with self._lock:
                members = list(self._members)
            for member in members:
                error = member.failure()
                if error is not None and not isinstance(error, GroupClosed):
                    self.end(member, error)
                    return


def as_seen_from(target: Known, source: Known, error: CollectiveError) -> CollectiveError:
    """The error of `source` with `target`'s numbers of the ranks, and the name of `source`.

    If no culprit is a rank of `target`, the result is GroupAborted without ranks.
    """
    guilty = [source.ranks[rank] for rank in error.ranks]
    here = [target.ranks.index(rank) for rank in guilty if rank in target.ranks]
    if here and isinstance(error, GroupAborted):
        # An error that has come from a third group names that one.
        within = "" if "(in group " in error.reason else f" (in group {source.name!r})"
        return GroupAborted(target.generation, here, error.reason + within, error.traceback)
    if here and isinstance(error, CollectiveTimeout | CollectiveMismatch | PeerLost):
        _, _, _, *rest = error.args
        within = "" if " of group " in error.operation else f" of group {source.name!r}"
        return type(error)(error.operation + within, target.generation, here, *rest)
    reason = f"group {source.name!r}, of global ranks {list(source.ranks)}, ended: {error}"
    return GroupAborted(target.generation, here, reason)
