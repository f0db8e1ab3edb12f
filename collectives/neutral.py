"""Contributions to an operation that change no result, for a rank that has no data.

The neutral element of a sum is 0, of a product 1, of a minimum the largest number; where ranks
exchange parts, it is the empty part. An operation has none if its result counts the ranks (AVG), if
the rank without data is its root, or if only two ranks know of it.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from .contract.dtypes import DTYPES
from .contract.operation import UNEVEN, Kind, ReduceOp
from .group import Group

_ROOTED = (Kind.BROADCAST, Kind.SCATTER, Kind.GATHER, Kind.REDUCE)


def neutral_element(op: ReduceOp, dtype: torch.dtype) -> complex:
    """The number that changes no result of `op`. Raises ValueError for AVG, which has none."""
    if op in (ReduceOp.SUM, ReduceOp.PREMUL_SUM, ReduceOp.BOR, ReduceOp.BXOR):
        return 0
    if op is ReduceOp.PRODUCT:
        return 1
    if op is ReduceOp.AVG:
        raise ValueError(
            "AVG counts the ranks, so a rank without data cannot take part in it; use SUM, and "
            "divide by the SUM of ones"
        )
    if dtype == torch.bool:
        return op in (ReduceOp.BAND, ReduceOp.MIN)
    if op is ReduceOp.BAND:  # All bits are set.
        return torch.iinfo(dtype).max if dtype == torch.uint8 else -1
    if dtype.is_floating_point:  # A finite number would replace the infinities of others.
        return float("inf") if op is ReduceOp.MIN else float("-inf")
    limits = torch.iinfo(dtype)
    return limits.max if op is ReduceOp.MIN else limits.min


def why_not_without(kind: Kind, detail: int, absent: Collection[int]) -> str | None:
    """Why an operation is impossible while the ranks `absent` contribute nothing; None: it is not.

    detail: `Operation.detail`.
    """
    if kind is Kind.COALESCED:
        return "a coalesced block is one work; issue its operations one by one"
    if kind >= Kind.BROADCAST_OBJECT_LIST:
        return "objects have no neutral element; send tensors"
    if kind in (Kind.SEND, Kind.RECV):
        return "a message is known to its two ranks only; use a collective"
    # The root's own data is what the others are to get, or it is the rank that gets theirs.
    root = detail // UNEVEN if kind is Kind.REDUCE else detail
    if kind in _ROOTED and root in absent:
        return f"rank {root}, its root, is one of them; choose the root among the others"
    if kind in (Kind.ALL_REDUCE, Kind.REDUCE_SCATTER, Kind.REDUCE) and (
        detail % UNEVEN == ReduceOp.AVG
    ):
        return "AVG counts them; use SUM, and divide by the SUM of ones, which counts the others"
    if kind in (Kind.ALL_GATHER, Kind.REDUCE_SCATTER) and detail >= UNEVEN:
        return "they cannot know the sizes of the parts; use parts of one size, with a count"
    return None


def take_part(group: Group, kind: Kind, numel: int, dtype: int, detail: int) -> None:
    """Issue the operation that other ranks issue, contribute nothing, and wait for it.

    kind, numel, dtype, detail: as in `Operation`. This rank's part is zeros in an all_gather, and
    empty in gather, scatter and all_to_all.
    """

    def filled(count: int, op: ReduceOp) -> torch.Tensor:
        of = DTYPES[dtype]
        return torch.full((count,), neutral_element(op, of), dtype=of, device=group.device)

    def zeros(count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=DTYPES[dtype], device=group.device)

    # Of zeros: whatever the others multiply by.
    factor = 1 if detail % UNEVEN == ReduceOp.PREMUL_SUM else None
    nothing = [zeros(0)] * group.size if dtype >= 0 else []
    match kind:
        case Kind.BARRIER:
            work = group.barrier()
        case Kind.BROADCAST:
            work = group.broadcast(zeros(numel), detail)
        case Kind.ALL_REDUCE:
            op = ReduceOp(detail)
            work = group.all_reduce(filled(numel, op), op, factor=factor)
        case Kind.REDUCE:
            op = ReduceOp(detail % UNEVEN)
            work = group.reduce(filled(numel, op), detail // UNEVEN, op, factor=factor)
        case Kind.REDUCE_SCATTER:
            op = ReduceOp(detail)
            part = zeros(numel // group.size)
            work = group.reduce_scatter(part, filled(numel, op), op, factor=factor)
        case Kind.ALL_GATHER:
            work = group.all_gather(zeros(numel), zeros(numel // group.size))
        case Kind.GATHER:
            work = group.gather(zeros(0), None, detail)
        case Kind.SCATTER:
            work = group.scatter(zeros(0), None, detail)
        case Kind.ALL_TO_ALL:
            work = group.all_to_all(nothing, nothing)
        case _:
            raise AssertionError(f"no rank announces {kind.name}")
    work.wait()
