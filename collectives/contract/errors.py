"""Everything that can go wrong between ranks, as one tree.

    ChoruslineError
    ├── StoreTimeout               a key that a rendezvous needs was never written
    ├── StoreLost                  what holds the store is gone or silent
    ├── StaleStore                 a store's file was left behind by an earlier run
    └── CollectiveError            a collective, or the group it belongs to
        ├── CollectiveTimeout      a rank did not arrive before the deadline; it may still live
        ├── CollectiveMismatch     ranks met in different operations, shapes or dtypes
        ├── PeerLost               a rank's process is gone
        ├── GroupAborted           somebody ended the generation on purpose: an exception, a
        │                          cancellation, an interrupt, the driver
        ├── GroupClosed            this rank closed the group itself
        ├── PayloadUnreadable      what a rank sent could not be unpickled; the group lives on
        └── UnsupportedOperation   the backend lacks the operation or the dtype

A mistake of the caller's on one rank alone (a wrong shape, a root out of range) is a `ValueError`
or a `TypeError`, as in torch, and is raised before anything is enqueued.

These errors travel: through pickle between actors, and as JSON inside a group's shared memory, so
that every rank raises the same one. Therefore every field is positional, made of numbers, strings
and lists of them, and among the arguments of the exception; and the text is made in `__str__`.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, field, fields


class ChoruslineError(Exception):
    """Root of all errors that are not the caller's own mistake."""

    def __post_init__(self) -> None:
        """A subclass is a dataclass; pickle, and a rank that reads JSON, make it anew of `args`."""
        for name, value in vars(self).items():
            if isinstance(value, list | tuple):
                setattr(self, name, list(value))  # A list of its own, as JSON gives it back.
        kinds = fields(self)  # type: ignore[arg-type]
        self.args = tuple(getattr(self, kind.name) for kind in kinds if kind.init)


@dataclass(eq=False, repr=False)
class StoreTimeout(ChoruslineError):
    """A key did not appear in a store in time: a rank never came to the rendezvous.

    keys: the keys that are missing. waited_s: seconds. detail: who is meant, and the mend.
    """

    keys: list[str]
    waited_s: float
    detail: str = ""

    def __str__(self) -> str:
        text = f"{', '.join(self.keys)} did not appear in the store within {self.waited_s:g} s"
        return f"{text}; {self.detail}" if self.detail else text


@dataclass(eq=False, repr=False)
class StoreLost(ChoruslineError):
    """What holds the store is gone or silent; `StoreTimeout` is a key that nobody wrote."""

    operation: str
    detail: str

    def __str__(self) -> str:
        return f"{self.operation}: {self.detail}"


@dataclass(eq=False, repr=False)
class StaleStore(ChoruslineError):
    """A store's file was left behind by a run that is over. Nothing in it was used or changed.

    made_by: the process that made it, and when.
    """

    path: str
    made_by: str

    def __str__(self) -> str:
        return (
            f"{self.path} was left behind by an earlier run, made by {self.made_by}: no process "
            "that used it is alive, and its keys would mislead this run. Remove it "
            f"(rm {shlex.quote(self.path)}) and start all ranks again, or give every run a path of "
            "its own"
        )


@dataclass(eq=False, repr=False)
class CollectiveError(ChoruslineError, RuntimeError):
    """An operation of a group failed. `ranks` are the culprits, as far as known.

    A RuntimeError too, as torch's own are: scripts that catch those catch these.
    """

    operation: str
    generation: int
    ranks: list[int]


@dataclass(eq=False, repr=False)
class CollectiveTimeout(CollectiveError):
    """Ranks did not arrive before the deadline. Their processes exist (else: `PeerLost`)."""

    timeout_s: float
    whereabouts: str = ""

    def __str__(self) -> str:
        where = f"; {self.whereabouts}" if self.whereabouts else ""
        return (
            f"{self.operation} in generation {self.generation}: ranks {self.ranks} did not arrive "
            f"within {self.timeout_s:g} s{where}. Ranks that may run out of data at different "
            "steps belong inside Join(); if steps are only slow, raise the timeout (timeout_s)."
        )


@dataclass(eq=False, repr=False)
class CollectiveMismatch(CollectiveError):
    """Ranks met in one place with different operations. No rank's tensor was changed."""

    detail: str

    def __str__(self) -> str:
        return (
            f"{self.operation} in generation {self.generation} does not match on ranks "
            f"{self.ranks}: {self.detail}. Every rank must issue the same collectives in the same "
            "order, with equal sizes and dtypes."
        )


@dataclass(eq=False, repr=False)
class PeerLost(CollectiveError):
    """The process of a rank is gone, or it closed the group while others still need it."""

    detail: str

    def __str__(self) -> str:
        return (
            f"{self.operation} in generation {self.generation}: ranks {self.ranks} are gone "
            f"({self.detail}). The group cannot be used any more; form a new one of those that "
            "are left."
        )


@dataclass(eq=False, repr=False)
class GroupAborted(CollectiveError):
    """Somebody ended the generation: `ranks` says who, `reason` why, `traceback` where."""

    operation: str = field(default="group", init=False)
    reason: str
    traceback: str = ""

    def __str__(self) -> str:
        by = f" by ranks {self.ranks}" if self.ranks else ""
        text = f"generation {self.generation} was aborted{by}: {self.reason}"
        return f"{text}\n\n{self.traceback}" if self.traceback else text


@dataclass(eq=False, repr=False)
class GroupClosed(CollectiveError):
    """The group was closed on this rank; nothing can be issued on it any more."""

    ranks: list[int] = field(default_factory=list, init=False)  # No rank is to blame.

    def __str__(self) -> str:
        return (
            f"{self.operation}: this group (generation {self.generation}) is closed on this rank; "
            "make a new one with Group.create."
        )


@dataclass(eq=False, repr=False)
class PayloadUnreadable(CollectiveError):
    """`ranks` could not unpickle what they were sent. Raised on all ranks, of a message between two
    on the one that receives it; the group lives on.

    detail: who could not read whose payload, and why. traceback: of the first of `ranks`.
    """

    detail: str
    traceback: str = ""

    def __str__(self) -> str:
        text = (
            f"{self.operation} in generation {self.generation}: {self.detail}. Send objects whose "
            "classes every rank can import, in equal versions."
        )
        return f"{text}\n\n{self.traceback}" if self.traceback else text


@dataclass(eq=False, repr=False)
class UnsupportedOperation(CollectiveError):
    """The backend has no such operation, or not for this dtype. Raised before anything is sent."""

    generation: int = field(default=-1, init=False)
    ranks: list[int] = field(default_factory=list, init=False)  # No rank is to blame.
    backend: str
    detail: str

    def __str__(self) -> str:
        return f"{self.operation} is not supported by the {self.backend} backend: {self.detail}"


_BY_NAME: dict[str, type[CollectiveError]] = {
    kind.__name__: kind
    for kind in (
        CollectiveTimeout,
        CollectiveMismatch,
        PeerLost,
        GroupAborted,
        GroupClosed,
        PayloadUnreadable,
        UnsupportedOperation,
    )
}


def error_to_json(error: CollectiveError) -> str:
    """The error as text that `error_from_json` turns back into an equal error.

    Of a subclass that only a higher layer knows, the class above it that all ranks know.
    """
    name = next(kind.__name__ for kind in type(error).__mro__ if kind.__name__ in _BY_NAME)
    return json.dumps([name, *error.args])


def error_from_json(text: str) -> CollectiveError:
    name, *fields = json.loads(text)
    return _BY_NAME[name](*fields)


def fresh_copy(error: CollectiveError) -> CollectiveError:
    """An equal error without a traceback, for a thread that raises it anew."""
    return type(error)(*error.args)
