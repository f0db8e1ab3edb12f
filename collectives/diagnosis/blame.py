"""Who is to blame where several ranks are late: not those that are kept waiting themselves.

A rank that waits for another one, in a send, a recv or a group of few, is late for everybody
else. Whose deadline ends first is chance, and no answer to the question who has stopped.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping


def to_blame(
    late: Collection[int], waits_for: Mapping[int, Collection[int]], here: Collection[int]
) -> list[int]:
    """The ranks at the ends of the chains of waiting that begin at those who are late.

    waits_for: by rank, those that it has been waiting for. here: the ranks that wait for `late`;
    who waits for one of them is itself to blame, since they disagree on what comes next. All of
    `late` where they wait for each other in a circle.
    """
    ends: set[int] = set()
    seen: set[int] = set()
    todo = list(late)
    while todo:
        rank = todo.pop()
        if rank in seen:
            continue
        seen.add(rank)
        further = set(waits_for.get(rank, ()))
        if not further or further & set(here):
            ends.add(rank)
        else:
            todo += further
    return sorted(ends or late)


def tell_waits(waits_for: Mapping[int, Collection[int]], late: Collection[int]) -> str:
    """`; rank 2 waits for rank 0`, for those of `late` that wait; empty without."""
    return "".join(
        f"; rank {rank} waits for {_ranks(sorted(waits_for[rank]))}"
        for rank in sorted(late)
        if waits_for.get(rank)
    )


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks}"
