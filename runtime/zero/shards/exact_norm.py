"""A sum of squares that has the same bits however the elements are cut over the ranks.

    (1) Squares are added in float64 within blocks of 64 elements, in one order, as no cut between
        two shards goes through a block (partition/shards.py).
    (2) The sums of the blocks are added without rounding, as integers: each is a mantissa of 53
        bits at an exponent, and lands in limbs of 32 bits that together span all of float64. The
        ranks add their limbs, which stay below 2**53 in float64.
    (3) The integer is rounded once.

Source: Kulisch and Miranker, Computer Arithmetic in Theory and Practice, 1981, for the long
accumulator of (2).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from ...partition.shards import ALIGNMENT

_LIMB_BITS = 32
_LOWEST = 1074 + 52
"""The exponent of bit 0 is -_LOWEST: no bit of a float64 lies below."""
_NUM_LIMBS = (_LOWEST + 1024) // _LIMB_BITS + 3
NUMEL = _NUM_LIMBS + 1
"""Length of a partial sum: the limbs, and how many blocks are not finite."""
_TILE_NUMEL = 1 << 16  # The float64 squares of a tile stay in the cache.


def as_reals(tensor: torch.Tensor) -> torch.Tensor:
    """Complex numbers as their real and imaginary parts, whose squares make the norm."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def partial_sum(parts: Iterable[torch.Tensor]) -> list[float]:
    """(1) and (2) on one rank: NUMEL whole numbers, to be added over the ranks.

    parts: (n,) each; each but the last of a parameter or bucket has a multiple of 64 elements.
    """
    limbs = torch.zeros(NUMEL, dtype=torch.int64, device="cpu")
    for part in parts:
        for tile in as_reals(part.detach()).reshape(-1).split(_TILE_NUMEL):
            _add_blocks(limbs, _sums_of_blocks(tile).cpu())
    total = sum(int(limb) << (_LIMB_BITS * i) for i, limb in enumerate(limbs[:_NUM_LIMBS].tolist()))
    mask = (1 << _LIMB_BITS) - 1
    carried = [float(total >> (_LIMB_BITS * i) & mask) for i in range(_NUM_LIMBS)]
    return [*carried, float(limbs[_NUM_LIMBS])]


def total_of(sums: Sequence[float]) -> float:
    """(3): the sum of squares; NaN if an element was not finite, or a square too large."""
    if sums[_NUM_LIMBS]:
        return math.nan
    total = sum(int(limb) << (_LIMB_BITS * i) for i, limb in enumerate(sums[:_NUM_LIMBS]))
    try:
        # Python rounds the quotient of two integers once, and correctly.
        return total / (1 << _LOWEST)
    except OverflowError:
        return math.inf


def _sums_of_blocks(tile: torch.Tensor) -> torch.Tensor:
    """(num_blocks,) float64."""
    missing = -tile.numel() % ALIGNMENT
    squares = torch.nn.functional.pad(tile.double(), (0, missing)).square_()
    blocks = squares.view(-1, ALIGNMENT)
    if blocks.device.type == "cpu":  # A row's sum does not depend on the other rows; on a GPU the
        return blocks.sum(dim=1)  # kernel is chosen by their number.
    while blocks.shape[1] > 1:
        half = blocks.shape[1] // 2
        blocks = blocks[:, :half] + blocks[:, half:]
    return blocks[:, 0]


def _add_blocks(limbs: torch.Tensor, sums: torch.Tensor) -> None:
    is_finite = torch.isfinite(sums)
    limbs[_NUM_LIMBS] += int((~is_finite).sum())
    mantissa, exponent = torch.frexp(sums[is_finite & (sums != 0)])
    # Below 2**53, exactly.
    whole = torch.ldexp(mantissa, torch.tensor(53, device="cpu")).to(torch.int64)
    place = exponent.to(torch.int64) - 53 + _LOWEST
    limb, shift = place // _LIMB_BITS, place % _LIMB_BITS
    mask = (1 << _LIMB_BITS) - 1
    low, high = (whole & mask) << shift, (whole >> _LIMB_BITS) << shift  # Both below 2**63.
    limbs.index_add_(0, limb, low & mask)
    limbs.index_add_(0, limb + 1, (low >> _LIMB_BITS) + (high & mask))
    limbs.index_add_(0, limb + 2, high >> _LIMB_BITS)
