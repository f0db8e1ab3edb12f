"""Cuts ranges of a flattened tensor into boxes, and divides ranges between ranks.

Ranks own ranges of flattened tensors. The format of torch.distributed.checkpoint knows only boxes
(an offset and a length in each dimension), so a range is written as a few boxes. Each of these
boxes is contiguous in the flattened tensor, so a range describes it completely.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

MAX_ITEM_BYTES = 4 << 20
"""The largest piece that is written, checked and read at once. A rank reads whole pieces, so it
may read up to this many unneeded bytes at either end of a range."""

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
    """The elements of each tensor that `part` of `num_parts` writes. Every element is in one part,
    and all parts have about the same number of bytes.

    sizes: (elements, bytes per element) of each tensor. Returns (start, stop) for each tensor.
    """
    total = sum(numel * itemsize for numel, itemsize in sizes)
    low, high = (total * p // num_parts for p in (part, part + 1))
    ranges, at = [], 0
    for numel, itemsize in sizes:
        # Both ends are rounded up, so that a part starts where the part before it stops.
        start, stop = (min(numel, max(0, -(-(byte - at) // itemsize))) for byte in (low, high))
        ranges.append((start, stop))
        at += numel * itemsize
    return ranges
