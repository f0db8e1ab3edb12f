"""Which ranks are to blame when ranks are late, or disagree.

A rank that waits for another rank, in a send, a recv or a subgroup, is late for all other ranks.
Which deadline ends first is chance, and does not show which rank has stopped.

When ranks disagree, the majority is right. When the others take over what one rank has, such as
rank 0's model, that rank is right.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TypeVar

from ..contract.errors import CollectiveMismatch, name_ranks

Value = TypeVar("Value")


def to_blame(
    late: Collection[int], waits_for: Mapping[int, Collection[int]], here: Collection[int]
) -> list[int]:
    """The ranks at the ends of the chains of waiting that begin at `late`.

    waits_for: by rank, the ranks that it waits for. here: the ranks that wait for `late`; a rank
    that waits for one of them is to blame, because the two disagree on the next operation.
    Returns all of `late` if they wait for each other in a circle.
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
        # A rank that waits for nobody is at the end of its chain: it computes, hangs or is gone.
        if not further or further & set(here):
            ends.add(rank)
        else:
            todo += further
    return sorted(ends or late)


def describe_waits(waits_for: Mapping[int, Collection[int]], late: Collection[int]) -> str:
    """`; rank 2 waits for rank 0` for each rank of `late` that waits; empty if none does."""
    return "".join(
        f"; rank {rank} waits for {name_ranks(sorted(waits_for[rank]))}"
        for rank in sorted(late)
        if waits_for.get(rank)
    )


def usual_and_blamed(values: Sequence[Value]) -> tuple[Value, list[int]]:
    """The value that most ranks have, and the ranks to blame: none if all ranks agree.

    values: by rank. If more than half of the ranks agree, the others are to blame; otherwise all.
    """
    if values.count(values[0]) == len(values):
        return values[0], []
    usual = max(values, key=values.count)
    majority = 2 * values.count(usual) > len(values)
    return usual, [r for r, what in enumerate(values) if not majority or what != usual]


def describe_issued(values: Sequence[object]) -> str:
    """For example `ranks [0, 2] issued all_reduce #3 (8 float32), rank 1 issued barrier #3`."""
    return ", ".join(
        f"{name_ranks([r for r, other in enumerate(values) if other == what])} issued {what}"
        for rank, what in enumerate(values)
        if values.index(what) == rank
    )


def check_like_rank_0(
    operation: str, generation: int, values: Sequence[object], detail: str, remedy: str
) -> None:
    """Raise CollectiveMismatch that names the ranks whose value differs from rank 0's, if any.

    values: by rank. operation, generation, detail, remedy: for the error.
    """
    unlike = [rank for rank, what in enumerate(values) if what != values[0]]
    if unlike:
        raise CollectiveMismatch(operation, generation, unlike, detail, remedy)
