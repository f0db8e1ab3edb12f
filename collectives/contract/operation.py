"""One collective of one group, as data: what errors, statistics and debuggers speak about."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import CodeType
from typing import Protocol

from .call_site import padded_site, short_site


class ReduceOp(enum.IntEnum):
    """Reduction of a collective, with torch.distributed's names.

    Host transports add in rank order, so every rank gets the same bits; float16 and bfloat16 are
    accumulated in float32 and rounded once. AVG of integers truncates toward zero, as NCCL does.

    BAND, BOR and BXOR are for integers and bool. Of bool, SUM is "or" and PRODUCT is "and"; it has
    no AVG. Complex numbers have SUM, AVG and PREMUL_SUM only. PREMUL_SUM multiplies what this rank
    brings by `factor`, an argument of the operation that may differ between ranks, and sums.
    """

    SUM = 0
    PRODUCT = 1
    MIN = 2
    MAX = 3
    AVG = 4
    BAND = 5
    BOR = 6
    BXOR = 7
    PREMUL_SUM = 8


class Kind(enum.IntEnum):
    """The collectives. The number travels between ranks, so it never changes its meaning."""

    BARRIER = 1
    BROADCAST = 2
    ALL_REDUCE = 3
    REDUCE_SCATTER = 4
    ALL_GATHER = 5
    REDUCE = 6
    GATHER = 7
    SCATTER = 8
    ALL_TO_ALL = 9
    SEND = 10
    RECV = 11
    COALESCED = 12
    BROADCAST_OBJECT_LIST = 65  # Those of objects: each is several of those above.
    ALL_GATHER_OBJECT = 66
    GATHER_OBJECT = 67
    SCATTER_OBJECT_LIST = 68
    SEND_OBJECT_LIST = 69
    RECV_OBJECT_LIST = 70
    COMPARISON = 100
    """Of what ranks are about to do, at debug level DETAIL: transports/comparing.py."""


DTYPE_BYTES = {
    "float32": 4,
    "float64": 8,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "int64": 8,
    "int8": 1,
    "uint8": 1,
    "int16": 2,
    "bool": 1,
    "complex64": 8,
    "complex128": 16,
}
"""The dtypes of the contract, and the bytes of an element. The position travels between ranks:
append only. Torch's own objects for them: dtypes.py."""

DTYPE_NAMES = tuple(DTYPE_BYTES)


class State(enum.Enum):
    """ISSUED: waits for its turn. STARTED: this rank takes part; the others may not yet.
    DONE: the tensors hold the result. FAILED: its error was, or will be, raised.
    """

    ISSUED = "issued"
    STARTED = "started"
    DONE = "done"
    FAILED = "failed"


STARTED = State.STARTED  # An enum's members are slow to look up.
_DONE, _FAILED = State.DONE, State.FAILED


class Span(Protocol):
    """A named range of a profiler, which ends with the operation."""

    def end(self) -> None: ...


UNEVEN = 16
"""Added to the detail of an all_gather or a reduce_scatter whose parts differ in size."""

ANY_RANK = -1

FIRST_OBJECT_TAG = 1 << 29
"""Tags of messages from here on are those of objects (objects/messages.py)."""

WATCHING_TAG = FIRST_OBJECT_TAG + (1 << 21)
"""Of the messages by which a transport watches its peers; behind those of objects."""

_SENDS = (Kind.SEND, Kind.SEND_OBJECT_LIST)
_RECEIVES = (Kind.RECV, Kind.RECV_OBJECT_LIST)


@dataclass(slots=True)
class Operation:
    """A collective as it was issued, and how far it has come.

    sequence: position in its group, from 0, equal on all ranks; of a send or recv, which only two
    ranks know of, the position of the collective issued before it, or -1.
    numel: elements of the whole problem (of the larger buffer): what must agree between ranks. -1
    where every pair of ranks agrees for itself: gather, scatter, all_to_all.
    dtype: position in DTYPE_NAMES, as the caller has it; complex and bool travel as reals and
    uint8. -1 without data. detail: reduce op, or root rank, or both (`root_and_op`); -1 without.
    issued_at, ended_at: time.monotonic() in seconds. caller, caller_at: the user's code that
    issued it, and the offset in it. span: its range in a profiler, if one runs. shapes: of the
    caller's tensors, at debug level DETAIL.
    peer, tag: of a send or recv. A recv from any source has ANY_RANK until the source is known.
    finish: what the transport calls when the data has arrived, before the work is done: it copies
    from staging memory to tensors that could not be used as they are. On CUDA, with the
    communicator's stream current.
    """

    kind: Kind
    sequence: int
    generation: int
    numel: int
    dtype: int
    detail: int
    timeout_s: float
    issued_at: float = field(default_factory=time.monotonic)
    state: State = State.ISSUED
    ended_at: float | None = None
    caller: CodeType | None = None
    caller_at: int = -1
    span: Span | None = None
    shapes: tuple[tuple[int, ...], ...] = ()

    peer: int = ANY_RANK
    tag: int = 0
    finish: Callable[[], None] | None = None

    def end(self, failure: object | None) -> None:
        """Note the end; the transport calls it once, with the error if there is one."""
        self.state = _DONE if failure is None else _FAILED
        self.ended_at = time.monotonic()
        if self.span is not None:
            self.span.end()
            self.span = None

    @property
    def is_between_two(self) -> bool:
        """Whether it is a send or a recv, which other ranks do not see."""
        return self.kind in _SENDS or self.kind in _RECEIVES

    @property
    def receives(self) -> bool:
        """Whether it is a recv, whose `peer` is then the rank that sent."""
        return self.kind in _RECEIVES

    def __str__(self) -> str:
        if not self.is_between_two:
            return describe(self.kind, self.sequence, self.numel, self.dtype)
        way = f"{self.kind.name.lower()} {'from' if self.receives else 'to'}"
        whom = "any rank" if self.peer == ANY_RANK else f"rank {self.peer}"
        tag = f", tag {self.tag}" if self.tag else ""
        what = "objects" if self.dtype < 0 else DTYPE_NAMES[self.dtype]
        return f"{way} {whom}{tag} ({self.numel} {what})"

    def site(self) -> str:
        """`train.py:41`; empty if it is not known."""
        return short_site(self.caller, self.caller_at)

    def padded_site(self) -> bytes:
        """The same, as shared memory holds it."""
        return padded_site(self.caller, self.caller_at)

    def place(self) -> str:
        """`all_gather #117, train.py:41`"""
        name = f"{Kind(self.kind).name.lower()} #{self.sequence}"
        site = self.site()
        return f"{name}, {site}" if site else name


class OnBehalf(Operation):
    """A part of something else. To persons it goes by the name of that: `whole`."""

    whole: Operation | str

    def __str__(self) -> str:
        return str(self.whole)

    def place(self) -> str:
        return self.whole if isinstance(self.whole, str) else self.whole.place()


def describe(kind: int, sequence: int, numel: int, dtype: int) -> str:
    """`all_reduce #118 (1048576 float32)`"""
    name = f"{Kind(kind).name.lower()} #{sequence}"
    if dtype < 0:
        return name
    return f"{name} ({DTYPE_NAMES[dtype]})" if numel < 0 else f"{name} ({elements(numel, dtype)})"


def named(operation: Operation) -> str:
    """`all_reduce #118 (1048576 float32) with SUM`"""
    return with_detail(str(operation), operation.kind, operation.detail)


def with_detail(told: str, kind: int, detail: int) -> str:
    """`told`, and the reduce op or the root if there is one."""
    if detail < 0:
        return told
    if kind in (Kind.BROADCAST, Kind.SCATTER):
        return f"{told} from rank {detail}"
    if kind == Kind.GATHER:
        return f"{told} to rank {detail}"
    if kind == Kind.REDUCE:
        return f"{told} with {ReduceOp(detail % 16).name} to rank {detail // 16}"
    if kind == Kind.ALL_GATHER:
        return f"{told} in parts of different sizes"
    uneven = " in parts of different sizes" if detail & UNEVEN else ""
    return f"{told} with {ReduceOp(detail % UNEVEN).name}{uneven}"


def elements(numel: int, dtype: int) -> str:
    """`1048576 float32`"""
    return f"{numel} {DTYPE_NAMES[dtype]}"


def root_and_op(root: int, op: int) -> int:
    """The detail of a reduce."""
    return 16 * root + op
