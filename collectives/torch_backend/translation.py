"""torch's arguments, converted to those of `Group`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..contract.deadlines import LONGEST_S
from ..contract.dtypes import DTYPE_INDEX
from ..contract.operation import ReduceOp

_TORCH = dist.ReduceOp
_OPS = {
    _TORCH.SUM: ReduceOp.SUM,
    _TORCH.AVG: ReduceOp.AVG,
    _TORCH.PRODUCT: ReduceOp.PRODUCT,
    _TORCH.MIN: ReduceOp.MIN,
    _TORCH.MAX: ReduceOp.MAX,
    _TORCH.BAND: ReduceOp.BAND,
    _TORCH.BOR: ReduceOp.BOR,
    _TORCH.BXOR: ReduceOp.BXOR,
    _TORCH.PREMUL_SUM: ReduceOp.PREMUL_SUM,
}


def reduction(options: Any) -> tuple[ReduceOp, complex | None]:
    """The reduction, and the factor of PREMUL_SUM.

    options: torch's options of an operation, or its ReduceOp itself; None is SUM.
    """
    if options is None:
        return ReduceOp.SUM, None
    op = getattr(options, "reduceOp", options)
    kind = getattr(op, "op", op)
    reduce_op = _OPS[kind]
    if reduce_op is not ReduceOp.PREMUL_SUM:
        return reduce_op, None
    factor = factor_of(op)
    return reduce_op, factor.item() if isinstance(factor, torch.Tensor) else factor


def factor_of(op: Any) -> Any:
    """The factor of a PREMUL_SUM. torch 2.11 shows that of its own only where it pickles it."""
    return op.factor if hasattr(op, "factor") else op.__getstate__()[1]


MOST_S = LONGEST_S / 4
"""The longest timeout that is taken from torch, where years mean that there is none. Some waits
take twice as long."""


def seconds(timeout: Any) -> float | None:
    """A timedelta, or that of options, in seconds; None for no timeout.

    torch means no timeout by a negative one in options, and by zero in Work.wait.
    """
    timeout = getattr(timeout, "timeout", timeout)
    if not isinstance(timeout, timedelta):
        return None
    total = min(timeout.total_seconds(), MOST_S)
    return total if total > 0 else None


def group_timeout_s(timeout: timedelta | None, default_s: float) -> float:
    """The timeout of a process group in seconds; None: default_s."""
    return default_s if timeout is None else min(timeout.total_seconds(), MOST_S)


_OF_THE_SAME_WIDTH = {
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
    torch.complex32: torch.int32,
}
"""Seen as one of these, a tensor keeps its shape and its strides. Others have one byte."""


def moved(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` for an operation that only moves it; as integers if `Group` lacks its dtype.

    By `.data`, torch's autograd does not count what is written: torch's collectives do not count as
    changes in place either, and programs reduce activations that a backward pass has kept.
    """
    # Quantized tensors are refused as Group refuses them: their scale is not in their bytes.
    moves_whole = tensor.dtype in DTYPE_INDEX or tensor.is_quantized
    if moves_whole:
        return tensor.data
    return tensor.data.view(_OF_THE_SAME_WIDTH.get(tensor.dtype, torch.uint8))


def all_moved(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [moved(tensor) for tensor in tensors]
