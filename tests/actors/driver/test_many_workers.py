"""The driver's decisions with ten thousand workers, as benchmarks/simulation/scale.py has them."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.simulation.scale import Scale, measure
from tests.harness.programs import figures_of


def assert_counts(small: Scale, large: Scale) -> None:
    for one in (small, large):
        others = one.workers - 1
        # The death, and for each of the others: freeze, frozen, resume.
        assert one.messages_change == 1 + 3 * others
        assert one.messages_start == one.workers
        assert one.messages_end == 3 * others  # finished, release, ended
        assert one.memory_bytes > 0
    # Each rank is told of all others in words, and costs the driver memory, that do not grow with
    # their number.
    per_rank = large.resume_bytes / (large.workers - 1), small.resume_bytes / (small.workers - 1)
    assert per_rank[0] < 1.1 * per_rank[1]
    assert large.memory_bytes / large.workers < small.memory_bytes / small.workers


def test_a_change_of_ten_thousand_workers_takes_three_messages_for_each() -> None:
    assert_counts(measure(3), measure(10_000))


@pytest.mark.slow
def test_the_program_prints_the_same_counts() -> None:
    told: list[dict[str, Any]] = figures_of(
        "simulation.scale", "--workers", "3,10000", timeout_s=100
    )["scales"]
    assert_counts(*(Scale(**one) for one in told))
