"""Ranks that stay answer the call that they were asked."""

from __future__ import annotations

from typing import Any

import pytest

from chorusline.collectives import Group
from tests.harness.standing_ranks import StandingRanks


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
    ranks = StandingRanks(2)
    try:
        with pytest.raises(ValueError, match="cannot be read"):
            ranks.run(unreadable)
        assert ranks.run(rank_of) == [0, 1]
    finally:
        ranks.stop()
