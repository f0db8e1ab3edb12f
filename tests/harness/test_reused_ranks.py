"""Ranks that stay answer the call that they were asked."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from chorusline.collectives.group import Group
from tests.harness.reused_ranks import ReusedRanks


def fails() -> None:
    raise ValueError("cannot be read")


class Unreadable:
    def __reduce__(self) -> tuple[Any, ...]:
        return fails, ()


def unreadable(group: Group) -> Any:
    return Unreadable() if group.rank == 0 else "stale"


def rank_of(group: Group) -> int:
    return group.rank


def test_what_a_call_that_was_given_up_left_is_no_answer_to_the_next() -> None:
    ranks = ReusedRanks(2)
    try:
        with pytest.raises(ValueError, match="cannot be read"):
            ranks.run(unreadable)
        assert ranks.run(rank_of) == [0, 1]
    finally:
        ranks.stop()


def num_imported(group: Group) -> int:
    return sum(name in sys.modules for name in ("tests.harness.preloaded", "torch._dynamo"))


def test_ranks_are_forked_with_everything_imported() -> None:
    """multiprocessing has one list of what to import, which any imported module may change: then
    each rank of the suite would take half a second of a CPU to start."""
    ranks = ReusedRanks(1)
    try:
        assert ranks.run(num_imported) == [2]
    finally:
        ranks.stop()
