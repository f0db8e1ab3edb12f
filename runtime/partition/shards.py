"""Which rank owns which elements: pure arithmetic, no tensors.

A bucket's content is cut into `num_ranks` equal shards, one per rank. The length of the content
depends on the model alone; slack after it, which no rank owns, makes the shards equal. Cuts fall
on multiples of ALIGNMENT elements: fused optimizer kernels treat the tail of a vector differently,
and give the same bits for any number of ranks only if all tails are those of the parameters.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

ALIGNMENT = 64


def aligned(numel: int) -> int:
    return -(-numel // ALIGNMENT) * ALIGNMENT


def shard_numel(content: int, num_ranks: int) -> int:
    """Number of elements in each rank's shard of a bucket with `content` elements."""
    return aligned(-(-content // num_ranks))


def padded_numel(content: int, num_ranks: int) -> int:
    """Number of elements in a bucket with its slack: the size of a reduce-scatter's input."""
    return shard_numel(content, num_ranks) * num_ranks


def room_for(content: int, num_ranks: int) -> int:
    """Number of elements to allocate for a bucket, so that it need not move when ranks come and go:
    enough for the slack of up to 64 ranks, or up to twice `num_ranks`. Where more come, the
    functions run again from the top (recovery/state_transfer.py)."""
    return aligned(content) + ALIGNMENT * max(64, 2 * num_ranks)


def whole_parameter_spans(
    numels: Sequence[int], num_ranks: int, owned: list[int] | None = None
) -> tuple[list[tuple[int, int, int]], int]:
    """Lay parameters out so that no cut between equal shards goes through a parameter.

    In descending order of size, each parameter goes to the rank with the fewest elements so far.

    owned: elements that each rank has in other buckets; updated in place.
    Returns the spans, as `pieces_of` takes them, and the content: `num_ranks` times the elements of
    the fullest rank.
    """
    load = [0] * num_ranks
    owned = owned if owned is not None else [0] * num_ranks
    placed: list[tuple[int, int, int]] = []  # (rank, offset in its shard, parameter)
    for parameter in sorted(range(len(numels)), key=lambda p: (-numels[p], p)):
        rank = min(range(num_ranks), key=lambda r: (owned[r], r))
        placed.append((rank, load[rank], parameter))
        load[rank] += aligned(numels[parameter])
        owned[rank] += aligned(numels[parameter])
    length = max(load)
    spans = [(p, rank * length + offset, numels[p]) for rank, offset, p in sorted(placed)]
    return spans, num_ranks * length


@dataclass(frozen=True, slots=True)
class Piece:
    """The elements of one parameter that lie in one shard.

    parameter: number of the parameter.
    parameter_start: offset of the piece in the flattened parameter.
    shard_start: offset of the piece in the shard.
    numel: length; 0 for a parameter without elements, which has a state all the same.
    """

    parameter: int
    parameter_start: int
    shard_start: int
    numel: int


def pieces_of(
    rank: int,
    num_ranks: int,
    content: int,
    spans: Sequence[tuple[int, int, int]],
    max_numel: int = sys.maxsize,
) -> list[Piece]:
    """The pieces of a bucket that `rank` owns.

    spans: (parameter, offset in the bucket, numel), ascending.
    max_numel: longer pieces are cut at multiples of it; a multiple of ALIGNMENT.
    """
    length = shard_numel(content, num_ranks)
    start, end = rank * length, (rank + 1) * length
    pieces = []
    for parameter, offset, numel in spans:
        # A parameter without elements is the rank's in whose part it lies.
        if numel == 0 and rank == (min(offset, content - 1) // length if content else 0):
            pieces.append(Piece(parameter, 0, offset - start, 0))
        first, last = max(start, offset), min(end, offset + numel)
        for begin in range(first, last, max_numel):
            numel = min(max_numel, last - begin)
            pieces.append(Piece(parameter, begin - offset, begin - start, numel))
    return pieces
