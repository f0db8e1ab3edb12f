"""Everything that can go wrong between ranks, as one tree.

    ChoruslineError
    ├── StoreTimeout               a key that a rendezvous needs was never written
    ├── StoreLost                  the store's server or file is gone, or silent
    ├── StaleStore                 a store's file was left behind by an earlier run
    ├── SecretMismatch             what came from a store or a rank lacks the secret's signature
    └── CollectiveError            a collective, or the group it belongs to
        ├── CollectiveTimeout      a rank did not arrive before the deadline; it may still live
        ├── CollectiveMismatch     ranks met in different operations, shapes or dtypes
        ├── PeerLost               a rank's process is gone
        ├── GroupAborted           a rank or the driver ended the generation on purpose: after an
        │                          exception, a cancellation, an interrupt
        ├── GroupClosed            this rank closed the group itself
        ├── PayloadUnreadable      a rank could not unpickle an object it received; the group lives
        └── UnsupportedOperation   the backend lacks the operation or the dtype

Errors of stores and of collectives are RuntimeErrors as well, as torch's are.

A caller's mistake on one rank (a wrong shape, a root out of range) is a `ValueError` or a
`TypeError`, as in torch, and is raised before anything is enqueued.

These errors travel: through pickle between actors, and as JSON inside a group's shared memory, so
that every rank raises the same error. Therefore every field is positional, consists of numbers,
strings and lists of them, and is an argument of the exception; `__str__` makes the text.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, fields


class ChoruslineError(Exception):
    """Root of all errors except a caller's own mistakes.

    Example:

        try:
            group.barrier().wait()
        except cl.ChoruslineError as error:  # A wrong argument is a ValueError or a TypeError.
            print(error)
    """

    def __post_init__(self) -> None:
        """Set `args` from the dataclass fields: pickle and `error_from_json` rebuild from them."""
        for name, value in vars(self).items():
            if isinstance(value, list | tuple):
                setattr(self, name, list(value))  # A copy, and a list, as JSON gives it back.
        kinds = fields(self)  # type: ignore[arg-type]
        self.args = tuple(getattr(self, kind.name) for kind in kinds if kind.init)


def with_article(name: str | type) -> str:
    """For example "an AdamW", "a Linear" or "an SGD". name: or the class of that name."""
    name = name.__name__ if isinstance(name, type) else name
    is_spelt = name[:2].isupper()  # Read letter by letter, as the S of SGD.
    begins_with_vowel = name[:1].lower() in ("a", "e", "i", "o") or (
        name[:1] in "FHLMNRSX" if is_spelt else name[:2].lower() in ("up", "un", "ul")
    )
    return f"{'an' if begins_with_vowel else 'a'} {name}"


def listed(items: Sequence[object], most: int = 16) -> str:
    """A list as a sentence has it: the first `most` of its items, and how many more there are."""
    more = len(items) - most
    return ", ".join(map(str, items[:most])) + (f" and {more:,} more" if more > 0 else "")


def plain(text: str) -> str:
    """A text of another process or of a file, without what a terminal would take for an order."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def chain_of(error: BaseException) -> Iterator[BaseException]:
    """The error, and those that it was raised from or during."""
    link: BaseException | None = error
    seen = set()  # A program can make a circle of causes.
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def name_ranks(ranks: Collection[int], one: str = "", many: str = "") -> str:
    """`rank 2` or `ranks [0, 2]`, with the verb that fits: `one` for a single rank, else `many`."""
    who = f"rank {next(iter(ranks))}" if len(ranks) == 1 else f"ranks {list(ranks)}"
    return " ".join(filter(None, [who, one if len(ranks) == 1 else many]))


@dataclass(eq=False, repr=False)
class StoreTimeout(ChoruslineError, RuntimeError):
    """A key did not appear in a store in time: a rank never came to the rendezvous.

        store = cl.HashStore()
        try:
            store.get("address", timeout_s=0.1)
        except cl.StoreTimeout as error:
            print(error.keys, error.waited_s)

    keys: the missing keys. waited_s: seconds. detail: the ranks concerned, and the remedy.
    """

    keys: list[str]
    waited_s: float
    detail: str = ""

    def __str__(self) -> str:
        text = f"{listed(self.keys)} did not appear in the store within {self.waited_s:g} s"
        return f"{text}; {self.detail}" if self.detail else text


@dataclass(eq=False, repr=False)
class StoreLost(ChoruslineError, RuntimeError):
    """The store itself is gone or silent; `StoreTimeout` is a key that no rank wrote.

    Example:

        try:
            meeting = cl.store_from_url("tcp://10.0.0.5:29500", rank=1, size=2)
        except cl.StoreLost as error:
            print(error.operation, error.detail)
    """

    operation: str
    detail: str

    def __str__(self) -> str:
        return f"{self.operation}: {self.detail}"


@dataclass(eq=False, repr=False)
class StaleStore(ChoruslineError, RuntimeError):
    """A store's file was left behind by a run that is over. Its content was not used or changed.

        try:
            store = cl.FileStore(folder + "/store")
        except cl.StaleStore as error:
            print(f"remove {error.path}, made by {error.made_by}")

    made_by: the process that made the file, and when.
    """

    path: str
    made_by: str

    def __str__(self) -> str:
        return (
            f"{self.path} was left behind by an earlier run, made by {self.made_by}: no process "
            "that used it is alive, and its keys would mislead this run. Remove it (rm "
            f"{shlex.quote(self.path)}) and start all ranks again, or give every run a path of "
            "its own"
        )


@dataclass(eq=False, repr=False)
class SecretMismatch(ChoruslineError, RuntimeError):
    """A value of a store is not signed with this rank's secret.

        unsigned = cl.HashStore()
        unsigned.set("address", "10.0.0.5")
        try:
            cl.SignedStore(unsigned, secret="at least 16 bytes").get("address")
        except cl.SecretMismatch as error:
            print(error.what, error.detail)

    It was not used: whoever reaches the port may have written it. An object of another rank without
    the signature ends the group: all ranks raise GroupAborted, with the text of this error.
    what: the key or the object. detail: what is wrong with it.
    """

    what: str
    detail: str

    def __str__(self) -> str:
        return (
            f"{self.what} {self.detail}, so it was not read. Pass the same secret on all ranks "
            "(CHORUSLINE_SECRET, or secret=); if all have it, somebody else has reached the port "
            "of the store or of a rank"
        )


@dataclass(eq=False, repr=False)
class CollectiveError(ChoruslineError, RuntimeError):
    """An operation of a group failed. `ranks` are the culprits, as far as known.

        try:
            group.all_reduce(torch.ones(4)).wait()
        except cl.CollectiveError as error:
            print(error.operation, error.generation, error.ranks)

    It is also a RuntimeError, as torch's errors are, so scripts that catch those catch this.
    """

    operation: str
    generation: int
    ranks: list[int]


SAME_ORDER = (
    "Every rank must issue the same collectives in the same order, with equal sizes and dtypes."
)
ALL_ARRIVE = (
    "If ranks may run out of data at different steps, put the loop inside Join(); if steps are "
    "only slow, raise the timeout (timeout_s)."
)

ALL_OR_NONE = (
    "Every rank must make the same collective calls, including those of backward(). Put a loop "
    "over uneven batches inside Join(), and call ctx.reduce, ctx.save and ctx.barrier outside of "
    "`if ctx.rank == 0:`."
)


@dataclass(eq=False, repr=False)
class CollectiveTimeout(CollectiveError):
    """Ranks did not arrive before the deadline. Their processes exist; else it is `PeerLost`.

        try:
            group.all_reduce(torch.ones(4), timeout_s=30).wait()
        except cl.CollectiveTimeout as error:
            print(error.ranks, error.whereabouts)

    remedy: a sentence.
    """

    timeout_s: float
    whereabouts: str = ""
    remedy: str = ALL_ARRIVE

    def __str__(self) -> str:
        where = f"; {self.whereabouts}" if self.whereabouts else ""
        late = (
            f"{name_ranks(self.ranks)} did not arrive within {self.timeout_s:g} s"
            if self.ranks
            else f"it did not end within {self.timeout_s:g} s"
        )
        return f"{self.operation} in generation {self.generation}: {late}{where}. {self.remedy}"


@dataclass(eq=False, repr=False)
class CollectiveMismatch(CollectiveError):
    """Ranks issued different operations in one place, or gave one operation different arguments.
    No rank's tensor was changed.

        try:
            group.all_reduce(torch.ones(4 + group.rank)).wait()  # Not the same size on all ranks.
        except cl.CollectiveMismatch as error:
            print(error.ranks, error.detail)

    remedy: a sentence.
    """

    detail: str
    remedy: str = SAME_ORDER

    def __str__(self) -> str:
        differs = f"does not match on {name_ranks(self.ranks)}" if self.ranks else "does not match"
        return (
            f"{self.operation} in generation {self.generation} {differs}: {self.detail}. "
            f"{self.remedy}"
        )


def waits_for_resting(operation: object, generation: int, ranks: list[int]) -> CollectiveMismatch:
    """The error of an operation that waits for ranks that take part in nothing more."""
    detail = "their function has returned, so they will never take part in it"
    return CollectiveMismatch(str(operation), generation, ranks, detail, ALL_OR_NONE)


@dataclass(eq=False, repr=False)
class PeerLost(CollectiveError):
    """The process of a rank is gone, or the rank closed the group while others still need it.

    `ranks` is empty where the store has gone as well, with the rank that hosts it for example, so
    that the others cannot tell which ranks are left.

    Example:

        try:
            group.all_reduce(torch.ones(4)).wait()
        except cl.PeerLost as error:
            survivors = [rank for rank in range(group.size) if rank not in error.ranks]
    """

    detail: str

    def __str__(self) -> str:
        gone = name_ranks(self.ranks, "is", "are") if self.ranks else "other ranks are"
        return (
            f"{self.operation} in generation {self.generation}: {gone} gone ({self.detail}). "
            "This group can no longer be used; make a new one of the ranks that are left."
        )


@dataclass(eq=False, repr=False)
class GroupAborted(CollectiveError):
    """Raised on every rank when a rank (or the driver: `ranks` is empty) ends the group.

        try:
            if group.rank == 0:
                group.abort("the loss is not finite")
            group.barrier().wait()
        except cl.GroupAborted as error:
            print(error.ranks, error.reason)  # On all ranks: [0] the loss is not finite

    `reason` says why; `traceback` shows where.
    """

    operation: str = field(default="group", init=False)
    reason: str
    traceback: str = ""

    def __str__(self) -> str:
        by = f" by {name_ranks(self.ranks)}" if self.ranks else ""
        text = f"generation {self.generation} was aborted{by}: {self.reason}"
        return f"{text}\n\n{self.traceback}" if self.traceback else text


@dataclass(eq=False, repr=False)
class GroupClosed(CollectiveError):
    """The group was closed on this rank; nothing can be issued on it any more.

    Example:

        group.close()
        try:
            group.barrier()
        except cl.GroupClosed as error:
            print(error)
    """

    ranks: list[int] = field(default_factory=list, init=False)  # No rank is to blame.

    def __str__(self) -> str:
        return (
            f"{self.operation}: this group (generation {self.generation}) is closed on this rank; "
            "make a new one with Group.create."
        )


@dataclass(eq=False, repr=False)
class PayloadUnreadable(CollectiveError):
    """`ranks` could not unpickle what they were sent. The group stays usable.

        try:
            settings = group.all_gather_object({"lr": 0.1}).wait()
        except cl.PayloadUnreadable as error:
            print(error.ranks, error.detail)

    All ranks raise it; of a message between two ranks, only the receiver does.
    detail: which rank could not read whose payload, and why. traceback: from the first of `ranks`.
    """

    detail: str
    traceback: str = ""

    def __str__(self) -> str:
        text = (
            f"{self.operation} in generation {self.generation}: {self.detail}. Send objects whose "
            "classes every rank can import, in the same versions."
        )
        return f"{text}\n\n{self.traceback}" if self.traceback else text


@dataclass(eq=False, repr=False)
class UnsupportedOperation(CollectiveError):
    """The backend lacks the operation, or lacks it for this dtype. Raised before data is sent.

    Example:

        try:
            group.all_reduce(torch.ones(4), cl.ReduceOp.BAND)
        except cl.UnsupportedOperation as error:
            print(error.detail)  # bitwise operations are for integers and bool
    """

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

    A subclass that only a higher layer knows is written as the base class that all ranks know.
    """
    name = next(kind.__name__ for kind in type(error).__mro__ if kind.__name__ in _BY_NAME)
    return json.dumps([name, *error.args])


def error_from_json(text: str) -> CollectiveError:
    name, *fields = json.loads(text)
    return _BY_NAME[name](*fields)


def fresh_copy(error: CollectiveError) -> CollectiveError:
    """An equal error without a traceback, for a thread that raises it again."""
    return type(error)(*error.args)
