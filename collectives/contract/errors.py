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
that every rank raises the same one. Therefore every field is positional, handed to
`super().__init__`, made of numbers, strings and lists of them, and the text is made in `__str__`.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence


class ChoruslineError(Exception):
    """Root of all errors that are not the caller's own mistake."""


class StoreTimeout(ChoruslineError):
    """A key did not appear in a store in time: a rank never came to the rendezvous.

    keys: the keys that are missing. waited_s: seconds. detail: who is meant, and the mend.
    """

    def __init__(self, keys: Sequence[str], waited_s: float, detail: str = "") -> None:
        super().__init__(list(keys), waited_s, detail)
        self.keys = list(keys)
        self.waited_s = waited_s
        self.detail = detail

    def __str__(self) -> str:
        text = f"{', '.join(self.keys)} did not appear in the store within {self.waited_s:g} s"
        return f"{text}; {self.detail}" if self.detail else text


class StoreLost(ChoruslineError):
    """What holds the store is gone or silent; `StoreTimeout` is a key that nobody wrote."""

    def __init__(self, operation: str, detail: str) -> None:
        super().__init__(operation, detail)
        self.operation = operation
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.operation}: {self.detail}"


class StaleStore(ChoruslineError):
    """A store's file was left behind by a run that is over. Nothing in it was used or changed.

    made_by: the process that made it, and when.
    """

    def __init__(self, path: str, made_by: str) -> None:
        super().__init__(path, made_by)
        self.path = path
        self.made_by = made_by

    def __str__(self) -> str:
        return (
            f"{self.path} was left behind by an earlier run, made by {self.made_by}: no process "
            "that used it is alive, and its keys would mislead this run. Remove it "
            f"(rm {shlex.quote(self.path)}) and start all ranks again, or give every run a path of "
            "its own"
        )


class CollectiveError(ChoruslineError, RuntimeError):
    """An operation of a group failed. `ranks` are the culprits, as far as known.

    A RuntimeError too, as torch's own are: scripts that catch those catch these.
    """

    operation: str
    generation: int
    ranks: list[int]


class CollectiveTimeout(CollectiveError):
    """Ranks did not arrive before the deadline. Their processes exist (else: `PeerLost`)."""

    def __init__(
        self,
        operation: str,
        generation: int,
        ranks: Sequence[int],
        timeout_s: float,
        whereabouts: str = "",
    ) -> None:
        super().__init__(operation, generation, list(ranks), timeout_s, whereabouts)
        self.operation = operation
        self.generation = generation
        self.ranks = list(ranks)
        self.timeout_s = timeout_s
        self.whereabouts = whereabouts

    def __str__(self) -> str:
        where = f"; {self.whereabouts}" if self.whereabouts else ""
        return (
            f"{self.operation} in generation {self.generation}: ranks {self.ranks} did not arrive "
            f"within {self.timeout_s:g} s{where}. Ranks that may run out of data at different "
            "steps belong inside Join(); if steps are only slow, raise the timeout (timeout_s)."
        )


class CollectiveMismatch(CollectiveError):
    """Ranks met in one place with different operations. No rank's tensor was changed."""

    def __init__(self, operation: str, generation: int, ranks: Sequence[int], detail: str) -> None:
        super().__init__(operation, generation, list(ranks), detail)
        self.operation = operation
        self.generation = generation
        self.ranks = list(ranks)
        self.detail = detail

    def __str__(self) -> str:
        return (
            f"{self.operation} in generation {self.generation} does not match on ranks "
            f"{self.ranks}: {self.detail}. Every rank must issue the same collectives in the same "
            "order, with equal sizes and dtypes."
        )


class PeerLost(CollectiveError):
    """The process of a rank is gone, or it closed the group while others still need it."""

    def __init__(self, operation: str, generation: int, ranks: Sequence[int], detail: str) -> None:
        super().__init__(operation, generation, list(ranks), detail)
        self.operation = operation
        self.generation = generation
        self.ranks = list(ranks)
        self.detail = detail

    def __str__(self) -> str:
        return (
            f"{self.operation} in generation {self.generation}: ranks {self.ranks} are gone "
            f"({self.detail}). The group cannot be used any more; form a new one of those that "
            "are left."
        )


class GroupAborted(CollectiveError):
    """Somebody ended the generation: `ranks` says who, `reason` why, `traceback` where."""

    operation = "group"

    def __init__(
        self, generation: int, ranks: Sequence[int], reason: str, traceback: str = ""
    ) -> None:
        super().__init__(generation, list(ranks), reason, traceback)
        self.generation = generation
        self.ranks = list(ranks)
        self.reason = reason
        self.traceback = traceback

    def __str__(self) -> str:
        by = f" by ranks {self.ranks}" if self.ranks else ""
        text = f"generation {self.generation} was aborted{by}: {self.reason}"
        return f"{text}\n\n{self.traceback}" if self.traceback else text


class GroupClosed(CollectiveError):
    """The group was closed on this rank; nothing can be issued on it any more."""

    ranks: list[int] = []  # noqa: RUF012  # Nobody is to blame; never mutated.

    def __init__(self, operation: str, generation: int) -> None:
        super().__init__(operation, generation)
        self.operation = operation
        self.generation = generation

    def __str__(self) -> str:
        return (
            f"{self.operation}: this group (generation {self.generation}) is closed on this rank; "
            "make a new one with Group.create."
        )


class PayloadUnreadable(CollectiveError):
    """`ranks` could not unpickle what they were sent. Raised on all ranks, of a message between two
    on the one that receives it; the group lives on.

    detail: who could not read whose payload, and why. traceback: of the first of `ranks`.
    """

    def __init__(
        self,
        operation: str,
        generation: int,
        ranks: Sequence[int],
        detail: str,
        traceback: str = "",
    ) -> None:
        super().__init__(operation, generation, list(ranks), detail, traceback)
        self.operation = operation
        self.generation = generation
        self.ranks = list(ranks)
        self.detail = detail
        self.traceback = traceback

    def __str__(self) -> str:
        text = (
            f"{self.operation} in generation {self.generation}: {self.detail}. Send objects whose "
            "classes every rank can import, in equal versions."
        )
        return f"{text}\n\n{self.traceback}" if self.traceback else text


class UnsupportedOperation(CollectiveError):
    """The backend has no such operation, or not for this dtype. Raised before anything is sent."""

    generation = -1
    ranks: list[int] = []  # noqa: RUF012  # Nobody is to blame; never mutated.

    def __init__(self, operation: str, backend: str, detail: str) -> None:
        super().__init__(operation, backend, detail)
        self.operation = operation
        self.backend = backend
        self.detail = detail

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
