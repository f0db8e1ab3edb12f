"""Which workers form the replicas of the next generation, where each has several ranks. Pure.

With `replica_size=k` the ranks r * k to r * k + k - 1 are replica r, and each holds one of k shards
of the model: rank r * k + n the shard with number n, as every other rank with that number does. A
replica that has lost a rank cannot compute anything. Its other ranks take a place in another
replica, or wait without a rank until workers have come.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")


def whole_replicas(
    survivors: Mapping[int, T], newcomers: Sequence[T], size: int
) -> tuple[list[tuple[T, int]], list[T]]:
    """The workers of as many whole replicas as there can be, and the survivors that wait.

    survivors: by their rank in the generation that has ended.
    newcomers: workers that hold no shard.
    size: ranks of a replica.

    Returns by new rank the worker and its former rank, -1 for a newcomer. A survivor keeps the
    number of its shard if any order of them allows it, and its replica if that is among the
    fullest.
    """
    num_replicas = (len(survivors) + len(newcomers)) // size
    rows: dict[int, dict[int, int]] = {}  # by former replica, the former rank of each shard
    for rank in sorted(survivors):
        rows.setdefault(rank // size, {})[rank % size] = rank
    fullest = sorted(rows, key=lambda row: (-len(rows[row]), row))
    kept = [rows[row] for row in sorted(fullest[:num_replicas])]
    kept += [{} for _ in range(num_replicas - len(kept))]
    left = [rank for row in sorted(fullest[num_replicas:]) for rank in rows[row].values()]
    # First those that have the shard already; then newcomers, before survivors with another one.
    for row in kept:
        for number in sorted(set(range(size)) - row.keys()):
            holder = next((rank for rank in left if rank % size == number), None)
            if holder is not None:
                left.remove(holder)
                row[number] = holder
    waiting = list(newcomers)
    members = []
    for row in kept:
        for number in range(size):
            if number not in row and not waiting:
                row[number] = left.pop(0)
            former = row.get(number, -1)
            members.append((survivors[former] if former >= 0 else waiting.pop(0), former))
    return members, [survivors[rank] for rank in left]
