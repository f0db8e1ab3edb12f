"""The steps of `ctx.steps` on a stand-in GPU: the same bits on any number of ranks there, too."""

from __future__ import annotations

from typing import Any

import pytest

import chorusline as cl
from tests.harness.stand_in_gpu import nccl, streams
from tests.harness.stand_in_gpu.ranks import StandInRanks, needs_stand_in, seeds
from tests.references.stepped_training import stepped

pytestmark = needs_stand_in

CASES: dict[str, dict[str, Any]] = {
    "sharded, clipped": {"max_norm": 0.05},
    "plain": {"sharded": False, "optimizer_name": "sgd"},
    "buffers": {"model_name": "normalised", "micro_batch_size": 4, "num_samples": 54},
}


def run(group: cl.Group, case: str) -> tuple[str, str]:
    streams.machine().strict = True
    nccl.settings.kernel_s = 0.003
    parameters, state, _ = stepped(group, epochs=1, **CASES[case])
    return parameters, state


@pytest.mark.parametrize(
    ("case", "seed"),
    [
        pytest.param(case, seed, marks=[] if (case, seed) == ("plain", 0) else pytest.mark.slow)
        for case in CASES
        for seed in seeds(5)
    ],
)
def test_any_number_of_ranks_gives_the_bits_of_one(case: str, seed: int) -> None:
    told = []
    for size in (1, 2) if seed == 0 else (1, 2, 3):
        with StandInRanks(size, seed=seed, jitter_s=0.002) as ranks:
            results = ranks.check(run, case)
        assert len({parameters for parameters, _ in results}) == 1
        told.append(results[0])
    assert len(set(told)) == 1
