"""Which rank computes which micro-batches of a step. Pure: every rank computes the same.

A rank gets micro-batches that follow each other, as many as its speed allows. The result of the
step does not depend on it; the number of sums that a rank keeps does, so cuts between equally fast
ranks fall where they would for powers of two (partition/summation_tree.py).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

SIMILAR = 1.3
"""Ranks whose paces differ by less than this factor get equal parts: times are noisy, and a deal
that changes from step to step gains nothing."""


def sizes_of_step(num_samples: int, micro_batch_size: int) -> list[int]:
    """The numbers of samples of the micro-batches of a step; the last one may be smaller."""
    whole, rest = divmod(num_samples, micro_batch_size)
    return [micro_batch_size] * whole + [rest] * (rest > 0)


def deal_micro_batches(num_micro_batches: int, paces: Sequence[float]) -> list[int]:
    """By micro-batch, its rank. paces: by rank, seconds per micro-batch; 0: not known yet."""
    num_ranks = len(paces)
    known = [pace for pace in paces if pace > 0]
    if not known or max(known) < SIMILAR * min(known):
        # Rank r begins at num_micro_batches * r / num_ranks.
        return [number * num_ranks // num_micro_batches for number in range(num_micro_batches)]
    counts = _counts(num_micro_batches, [0] * num_ranks, _filled(paces))
    return [rank for rank, count in enumerate(counts) for _ in range(count)]


def deal_again(
    holders: Sequence[int], former_ranks: Sequence[int], paces: Sequence[float]
) -> list[int]:
    """The same for the ranks of the next generation: those that stay keep their micro-batches, and
    share those of lost ranks.

    holders: by micro-batch, its rank in the generation that ended.
    former_ranks: by new rank, its former rank; -1 for a newcomer.
    paces: by new rank, as in `deal_micro_batches`.
    """
    new_rank = {old: new for new, old in enumerate(former_ranks) if old >= 0}
    # -1: a micro-batch of a lost rank, which nobody has.
    dealt = [new_rank.get(holder, -1) for holder in holders]
    held = [dealt.count(rank) for rank in range(len(former_ranks))]
    lost = [number for number, rank in enumerate(dealt) if rank < 0]
    # Where no pace is known yet, all ranks count as equally fast.
    filled = _filled(paces) if any(paces) else [1.0] * len(paces)
    counts = _counts(len(lost), held, filled)
    takers = [rank for rank, count in enumerate(counts) for _ in range(count)]
    for number, rank in zip(lost, takers, strict=True):
        dealt[number] = rank
    return dealt


def _filled(paces: Sequence[float]) -> list[float]:
    known = [pace for pace in paces if pace > 0]
    return [pace or sum(known) / len(known) for pace in paces]


def _counts(num: int, held: Sequence[int], paces: Sequence[float]) -> list[int]:
    """How many of `num` each rank takes, so that the last one is done as early as it can be. A rank
    without any gets one first: else its pace would never be known again."""
    counts = [0] * len(paces)
    for rank in range(len(paces)):
        if held[rank] == 0 and sum(counts) < num:
            counts[rank] = 1
    # When each rank would be done with one more than it has; the earliest gets the next.
    done_at = [((held[rank] + counts[rank] + 1) * pace, rank) for rank, pace in enumerate(paces)]
    heapq.heapify(done_at)
    for _ in range(num - sum(counts)):
        _, rank = done_at[0]
        counts[rank] += 1
        heapq.heapreplace(done_at, ((held[rank] + counts[rank] + 1) * paces[rank], rank))
    return counts
