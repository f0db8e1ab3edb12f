"""The arithmetic of reductions, for transports that add on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from .operation import ReduceOp

_COMBINE: dict[ReduceOp, Callable[..., torch.Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.AVG: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}

_HALF = (torch.float16, torch.bfloat16)
_NARROW = (torch.int8, torch.uint8, torch.int16, torch.int32)


def reduce_into(output: torch.Tensor, parts: Sequence[torch.Tensor], op: ReduceOp) -> None:
    """output[i] = op over parts[r][i], in rank order, so that every rank gets the same bits.

    output: (n,), overlapping no part. parts: one (n,) per rank, same dtype.
    """
    combine = _COMBINE[op]
    if len(parts) == 1:
        output.copy_(parts[0])
        return
    if output.dtype in _HALF and (len(parts) > 2 or op is ReduceOp.AVG):
        # Rounding after every addition loses half the bits over 8 ranks, and the sum after an
        # average overflows float16 long before the average does.
        total = parts[0].float()
        for part in parts[1:]:
            combine(total, part, out=total)
        if op is ReduceOp.AVG:
            total.div_(len(parts))
        output.copy_(total)
        return
    if op is ReduceOp.AVG and output.dtype in _NARROW:  # The sum may overflow; the average cannot.
        total = torch.stack(tuple(parts)).sum(0, dtype=torch.int64)
        output.copy_(total.div_(len(parts), rounding_mode="trunc"))
        return
    if op is ReduceOp.AVG and output.dtype == torch.int64:
        output.copy_(_average_of_int64(parts))
        return
    combine(parts[0], parts[1], out=output)
    for part in parts[2:]:
        combine(output, part, out=output)
    if op is ReduceOp.AVG:
        rounding = None if output.is_floating_point() else "trunc"
        output.div_(len(parts), rounding_mode=rounding)


def _average_of_int64(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Truncated towards zero, as the division of a sum that does not overflow."""
    size, zero = len(parts), torch.zeros_like(parts[0])
    # Of each part, floor(part / size) and what is left: sums of these do not overflow.
    whole = sum((part.div(size, rounding_mode="floor") for part in parts), zero)
    left = sum((part.remainder(size) for part in parts), zero)
    whole, left = whole + left.div(size, rounding_mode="floor"), left.remainder(size)
    # Of a negative number the floor lies below.
    return whole + ((whole < 0) & (left > 0)).to(torch.int64)
