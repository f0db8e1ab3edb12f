"""One collective of one group, as data: what errors, statistics and debuggers speak about."""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass, field

import torch


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


@dataclass(slots=True)
class Operation:
    """A collective as it was issued.

    sequence: position in its group, from 0, equal on all ranks.
    numel: elements of the whole problem (of the larger buffer): what must agree between ranks.
    dtype: position in DTYPES; -1 without data. detail: reduce op, or root rank; -1 without.
    issued_at: time.monotonic() in seconds.
    """

    kind: Kind
    sequence: int
    generation: int
    numel: int
    dtype: int
    detail: int
    timeout_s: float
    issued_at: float = field(default_factory=time.monotonic)

    def __str__(self) -> str:
        return describe(self.kind, self.sequence, self.numel, self.dtype)


def describe(kind: int, sequence: int, numel: int, dtype: int) -> str:
    """`all_reduce #118 (1048576 float32)`"""
    name = f"{Kind(kind).name.lower()} #{sequence}"
    return name if dtype < 0 else f"{name} ({numel} {_DTYPE_NAMES[dtype]})"
