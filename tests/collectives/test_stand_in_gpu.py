"""The contract of transports on a stand-in GPU: NCCL's transport, streams and memory, on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from collectives.group import Group
from tests.contracts.group import CONTRACT, name_of
from tests.harness.stand_in_gpu.ranks import StandInRanks, needs_stand_in

pytestmark = needs_stand_in

Check = Callable[[Group], Any]

MORE = [pytest.param(2 + seed % 3, seed, marks=pytest.mark.slow) for seed in range(3, 11)]
"""Ranks and seeds of the jitter of their kernels."""


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


@pytest.mark.parametrize(("size", "seed"), [(2, 1), (3, 2), *MORE])
@pytest.mark.parametrize("check", CONTRACT, ids=name_of)
def test_nccl_keeps_the_contract_on_a_stand_in(
    check: Check, size: int, seed: int, standing: Callable[[int, int], StandInRanks]
) -> None:
    results = standing(size, seed).check(check)
    assert results == [results[0]] * size, "the ranks have different bits"
