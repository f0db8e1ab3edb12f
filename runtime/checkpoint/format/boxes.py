"""Ranges of a flattened tensor as boxes, and who writes which range. Pure arithmetic.

Ranks own ranges of flattened tensors. The format of torch.distributed.checkpoint knows boxes only
(an offset and a length in each dimension), so a range is written as the few boxes that it is made
of. Each of our boxes is contiguous in the flattened tensor, so a range says it all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

MAX_ITEM_BYTES = 4 << 20
"""The largest piece that is written, checked and read as one. A rank reads whole pieces, so this
is what it may read in vain at either end of a range."""

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and lengths, by dimension."""


def boxes_of(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[int, int, Box]]:
    """Elements [start, stop) of a tensor of `shape` as (start, stop, box), in order."""
    if start >= stop:
        return
    if len(shape) == 0:
        yield 0, 1, ((), ())
        return
    if len(shape) == 1:
        yield start, stop, ((start,), (stop - start,))
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows
    if first > last:  # within one row
        yield from _in_row(shape, last, start, stop)
        return
    yield from _in_row(shape, first - 1, start, first * row)
    if first < last:
        zeros = (0,) * (len(shape) - 1)
        yield first * row, last * row, ((first, *zeros), (last - first, *shape[1:]))
    yield from _in_row(shape, last, last * row, stop)


def _in_row(
    shape: Sequence[int], number: int, start: int, stop: int
) -> Iterator[tuple[int, int, Box]]:
    base = number * math.prod(shape[1:])
    for first, last, (offsets, lengths) in boxes_of(shape[1:], start - base, stop - base):
        yield base + first, base + last, ((number, *offsets), (1, *lengths))


def items_of(
    shape: Sequence[int], start: int, stop: int, itemsize: int
) -> Iterator[tuple[int, int, Box]]:
    """The boxes of a range, none larger than MAX_ITEM_BYTES."""
    most = max(1, MAX_ITEM_BYTES // itemsize)
    for begin in range(start, stop, most):
        yield from boxes_of(shape, begin, min(stop, begin + most))


def split_evenly(
    sizes: Sequence[tuple[int, int]], part: int, num_parts: int
) -> list[tuple[int, int]]:
    """The elements of each tensor that `part` of `num_parts` writes, so that every element is
    written once and all parts have about the same number of bytes.

    sizes: (elements, bytes of an element) of each tensor. Returns (start, stop) for each.
    """
    total = sum(numel * itemsize for numel, itemsize in sizes)
    low, high = (total * p // num_parts for p in (part, part + 1))
    ranges, at = [], 0
    for numel, itemsize in sizes:
        # Rounding up at both ends: where one part stops the next one starts.
        start, stop = (min(numel, max(0, -(-(byte - at) // itemsize))) for byte in (low, high))
        ranges.append((start, stop))
        at += numel * itemsize
    return ranges
