"""One collective of one group, as data: what errors, statistics and debuggers speak about."""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass, field
from types import CodeType
from typing import Protocol

import torch

from .call_site import padded_site, short_site
from .reduce_op import ReduceOp


class Kind(enum.IntEnum):
    """The collectives. The number travels between ranks, so it never changes its meaning."""

    BARRIER = 1
    BROADCAST = 2
    ALL_REDUCE = 3
    REDUCE_SCATTER = 4
    ALL_GATHER = 5
    BROADCAST_OBJECT_LIST = 65  # Those of objects: each is several of those above.
    ALL_GATHER_OBJECT = 66
    GATHER_OBJECT = 67
    SCATTER_OBJECT_LIST = 68
    COMPARISON = 100
    """Of what ranks are about to do, at debug level DETAIL: comparison.py."""


DTYPES: tuple[torch.dtype, ...] = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int32,
    torch.int64,
)
"""The dtypes of the contract. The position travels between ranks: append only."""

_DTYPE_NAMES = tuple(str(dtype).removeprefix("torch.") for dtype in DTYPES)


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


@dataclass(slots=True)
class Operation:
    """A collective as it was issued, and how far it has come.

    sequence: position in its group, from 0, equal on all ranks.
    numel: elements of the whole problem (of the larger buffer): what must agree between ranks.
    dtype: position in DTYPES; -1 without data. detail: reduce op, or root rank; -1 without.
    issued_at, ended_at: time.monotonic() in seconds. caller, caller_at: the user's code that
    issued it, and the offset in it. span: its range in a profiler, if one runs. shapes: of the
    caller's tensors, at debug level DETAIL.
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

    def end(self, failure: object | None) -> None:
        """Note the end; the transport calls it once, with the error if there is one."""
        self.state = _DONE if failure is None else _FAILED
        self.ended_at = time.monotonic()
        if self.span is not None:
            self.span.end()
            self.span = None

    def __str__(self) -> str:
        return describe(self.kind, self.sequence, self.numel, self.dtype)

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


def describe(kind: int, sequence: int, numel: int, dtype: int) -> str:
    """`all_reduce #118 (1048576 float32)`"""
    name = f"{Kind(kind).name.lower()} #{sequence}"
    return name if dtype < 0 else f"{name} ({numel} {_DTYPE_NAMES[dtype]})"


def named(operation: Operation) -> str:
    """`all_reduce #118 (1048576 float32) with SUM`"""
    return with_detail(str(operation), operation.kind, operation.detail)


def with_detail(told: str, kind: int, detail: int) -> str:
    """`told`, and the reduce op or the root if there is one."""
    if detail < 0:
        return told
    if kind == Kind.BROADCAST:
        return f"{told} from rank {detail}"
    return f"{told} with {ReduceOp(detail).name}"
