"""The contract of transports on a stand-in GPU: NCCL's transport, streams and memory, on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from chorusline.collectives.group import Group
from tests.contracts.group import CONTRACT, name_of
from tests.harness.stand_in_gpu.ranks import StandInRanks, needs_stand_in, seeds

pytestmark = needs_stand_in

Check = Callable[[Group], Any]

BETWEEN_THREE = ("all_to_all", "gather_and_scatter", "a_slow_rank_is_waited_for")
"""Checks of which the fast suite has also one with a rank in the middle."""
CASES = [
    pytest.param(
        check,
        2 + (seed + 1) % 3,
        seed,
        marks=[]
        if seed == 2 or (seed == 3 and name_of(check) in BETWEEN_THREE)
        else pytest.mark.slow,
        id=f"{name_of(check)}-{2 + (seed + 1) % 3}-{seed}",
    )
    for seed in range(1, max(4, len(seeds(11))))
    for check in CONTRACT
]
"""A check, ranks, and the seed of the jitter of their kernels."""


@pytest.fixture(scope="module")
def standing() -> Iterator[Callable[[int, int], StandInRanks]]:
    """standing(size, seed): ranks with one group, kept from one check to the next."""
    started: dict[tuple[int, int], StandInRanks] = {}

    def of(size: int, seed: int) -> StandInRanks:
        key = size, seed
        if key not in started:
            started[key] = StandInRanks(size, seed=seed)
        return started[key]

    yield of
    for ranks in started.values():
        ranks.stop()


@pytest.mark.parametrize(("check", "size", "seed"), CASES)
def test_nccl_keeps_the_contract_on_a_stand_in(
    check: Check, size: int, seed: int, standing: Callable[[int, int], StandInRanks]
) -> None:
    results = standing(size, seed).check(check)
    assert results == [results[0]] * size, "the ranks have different bits"
