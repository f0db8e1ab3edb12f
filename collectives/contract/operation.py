"""One collective of one group, as data, for errors, statistics and the flight recorder."""

from __future__ import annotations

import enum
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, Protocol

from .call_site import SITE_BYTES, encoded, padded_site, short_site


class ReduceOp(enum.IntEnum):
    """Reduction of a collective, with torch.distributed's names.

        tensor = torch.tensor([float(group.rank)])
        group.all_reduce(tensor, cl.ReduceOp.MAX).wait()
        assert tensor.item() == group.size - 1

    Host transports add in rank order, so every rank gets the same bits; float16 and bfloat16 are
    accumulated in float32 and rounded once. AVG of integers truncates toward zero, as NCCL does.

    BAND, BOR and BXOR are for integers and bool. For bool, SUM is "or", PRODUCT is "and", and there
    is no AVG. Complex numbers have SUM, AVG and PREMUL_SUM only. PREMUL_SUM multiplies each rank's
    tensor by `factor`, an argument of the operation that may differ between ranks, and sums.
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
    """The kinds of operations. Numbers travel between ranks, so they never change their meaning."""

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
    BROADCAST_OBJECT_LIST = 65  # From here on, of objects: each consists of several kinds above.
    ALL_GATHER_OBJECT = 66
    GATHER_OBJECT = 67
    SCATTER_OBJECT_LIST = 68
    SEND_OBJECT_LIST = 69
    RECV_OBJECT_LIST = 70
    COMPARISON = 100
    """Ranks compare their next operations, at debug level DETAIL: transports/comparing.py."""


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
"""The dtypes of the contract, and the bytes of an element. Positions travel between ranks, so new
dtypes are appended. dtypes.py has torch's objects for them."""

DTYPE_NAMES = tuple(DTYPE_BYTES)


class State(enum.Enum):
    """ISSUED: the operation waits for its turn. STARTED: this rank takes part; others may not yet.
    DONE: the tensors hold the result. FAILED: the operation's error was, or will be, raised.
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


class Finish(Protocol):
    """Copies to where results belong. tensors: the ones that it writes."""

    @property
    def tensors(self) -> Sequence[Any]: ...

    def __call__(self) -> None: ...


UNEVEN = 16
"""Added to the detail of an all_gather or a reduce_scatter whose parts differ in size."""

ANY_RANK = -1

FIRST_OBJECT_TAG = 1 << 29
"""The first tag of messages that carry objects (objects/messages.py)."""

WATCHING_TAG = FIRST_OBJECT_TAG + (1 << 21)
"""Tag of the messages by which a transport watches its peers; above the tags of objects."""

_SENDS = (Kind.SEND, Kind.SEND_OBJECT_LIST)
_RECEIVES = (Kind.RECV, Kind.RECV_OBJECT_LIST)


@dataclass
class Operation:
    """A collective as it was issued, and its state.

    sequence: position in its group, from 0, equal on all ranks. A send or recv, which only two
        ranks know of, has the position of the collective issued before it, or -1.
    numel: elements of the larger buffer, which must agree between ranks; -1 where every pair of
        ranks agrees separately (gather, scatter, all_to_all).
    dtype: position in DTYPE_NAMES of the caller's dtype (complex and bool travel as reals and
        uint8); -1 without data.
    detail: reduce op, or root rank, or both (`root_and_op`); -1 for none.
    issued_at, ended_at: time.monotonic() in seconds; None until it has ended.
    caller, caller_at: the code object of the user that issued it, and the offset in it; None if no
        frame of the user's was found.
    span: its range in a profiler; None if none runs.
    shapes: of the caller's tensors, at debug level DETAIL.
    peer, tag: of a send or recv. A recv from any source has ANY_RANK until the source is known.
    relied_on: a stream was ordered after it, for a program that continues before its end is known.
    finish: copies from staging memory to tensors that could not be used directly. The transport
        calls it between the arrival of the data and the end of the work; on CUDA, with the
        communicator's stream current, which it records on `finish.tensors`. None after the end:
        the flight recorder keeps operations, and must not keep the memory they worked on.
    """

    kind: Kind
    sequence: int
    generation: int
    numel: int
    dtype: int
    detail: int
    timeout_s: float
    issued_at: float = field(default_factory=time.monotonic)
    peer: int = ANY_RANK
    tag: int = 0
    finish: Finish | None = None

    state: State = field(default=State.ISSUED, init=False)
    ended_at: float | None = field(default=None, init=False)
    caller: CodeType | None = field(default=None, init=False)
    caller_at: int = field(default=-1, init=False)
    span: Span | None = field(default=None, init=False)
    shapes: tuple[tuple[int, ...], ...] = field(default=(), init=False)
    relied_on: bool = field(default=False, init=False)

    def end(self, failure: object | None) -> None:
        """Record the end; the transport calls it once, with the error if there is one."""
        self.state = _DONE if failure is None else _FAILED
        self.ended_at = time.monotonic()
        self.finish = None
        if self.span is not None:
            self.span.end()
            self.span = None

    @property
    def is_between_two(self) -> bool:
        """Whether it is a send or a recv, which only two ranks see."""
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
        """The calling line, `train.py:41`; empty if it is not known."""
        return short_site(self.caller, self.caller_at)

    def padded_site(self) -> bytes:
        """The calling line, in the form in which shared memory holds it."""
        return padded_site(self.caller, self.caller_at)

    def place(self) -> str:
        """The name and the calling line, `all_gather #117, train.py:41`."""
        name = f"{Kind(self.kind).name.lower()} #{self.sequence}"
        site = self.site()
        return f"{name}, {site}" if site else name


class OnBehalf(Operation):
    """A part of another operation, `whole`. Errors and recordings show the name of `whole`."""

    whole: Operation | str

    def __str__(self) -> str:
        return str(self.whole)

    def place(self) -> str:
        return self.whole if isinstance(self.whole, str) else self.whole.place()

    def padded_site(self) -> bytes:
        """The place of `whole`, so that peers can show it."""
        return encoded(self.place())[:SITE_BYTES].ljust(SITE_BYTES, b"\0")


def describe(kind: int, sequence: int, numel: int, dtype: int) -> str:
    """The name of an operation with its elements, `all_reduce #118 (1048576 float32)`."""
    if not kind:
        return "nothing yet"
    name = f"{Kind(kind).name.lower()} #{sequence}"
    if dtype < 0:
        return name
    return f"{name} ({DTYPE_NAMES[dtype]})" if numel < 0 else f"{name} ({elements(numel, dtype)})"


def described(operation: Operation) -> str:
    """The operation with its detail, `all_reduce #118 (1048576 float32) with SUM`."""
    return with_detail(str(operation), operation.kind, operation.detail)


def with_detail(name: str, kind: int, detail: int) -> str:
    """`name`, followed by the reduce op or the root if there is one."""
    if detail < 0:
        return name
    if kind in (Kind.BROADCAST, Kind.SCATTER):
        return f"{name} from rank {detail}"
    if kind == Kind.GATHER:
        return f"{name} to rank {detail}"
    if kind == Kind.REDUCE:
        return f"{name} with {ReduceOp(detail % 16).name} to rank {detail // 16}"
    if kind == Kind.ALL_GATHER:
        return f"{name} in parts of different sizes"
    uneven = " in parts of different sizes" if detail & UNEVEN else ""
    return f"{name} with {ReduceOp(detail % UNEVEN).name}{uneven}"


def elements(numel: int, dtype: int) -> str:
    """A count with its dtype, `1048576 float32`."""
    return f"{numel} {DTYPE_NAMES[dtype]}"


def root_and_op(root: int, op: int) -> int:
    """`Operation.detail` of a reduce."""
    return 16 * root + op
