"""A worker is killed while other kinds of training than the plainest go on (test_recovery.py)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import chorusline as cl
from tests.references.killed_runs import SIX_PHASES, Kind, assert_as_if_nothing_was, train

KINDS = {
    "AdamW": Kind(),
    "SGD with momentum": Kind(torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "Adam with amsgrad": Kind(torch.optim.Adam, {"lr": 0.02, "amsgrad": True}),
    "Adagrad": Kind(torch.optim.Adagrad, {"lr": 0.05, "initial_accumulator_value": 0.1}),
    "NAdam": Kind(torch.optim.NAdam, {"lr": 0.02}),
    "RAdam": Kind(torch.optim.RAdam, {"lr": 0.02}),
    "Rprop": Kind(torch.optim.Rprop, {"lr": 0.02}),
    "ASGD": Kind(torch.optim.ASGD, {"lr": 0.02}),
    "fused AdamW": Kind(options={"lr": 0.05, "fused": True}),
    "a norm with buffers": Kind(batch_norm=True),
    "bfloat16 and masters": Kind(dtype=torch.bfloat16),
    "clipping": Kind(zero={"max_norm": 0.5}, tolerance=1e-9),
    "a scaled loss": Kind(scaler=True),
    "accumulation": Kind(accumulate=2),
    "a schedule": Kind(schedule=True),
    "samples kept together": Kind(keys=True),
    "one bucket": Kind(bucket_cap_mb=25.0),
}


FAST = {"bfloat16 and masters": 2, "a scaled loss": 3}
CASES = [
    pytest.param(
        name,
        phase,
        (i + j) % 3,
        marks=[] if FAST.get(name) == j else [pytest.mark.slow],
        id=f"{name}-{phase}",
    )
    for i, name in enumerate(KINDS)
    for j, phase in enumerate(SIX_PHASES)
]


@pytest.mark.parametrize(("name", "phase", "victim"), CASES)
async def test_a_death_costs_nothing_in_any_kind_of_training(
    session: cl.Session, tmp_path: Path, name: str, phase: str, victim: int
) -> None:
    kind = KINDS[name]
    victims = {victim: (3 // kind.accumulate, phase)}  # In the first epoch.
    told = await session.run(train, kind=kind, folder=str(tmp_path), victims=victims)
    assert {one.world_size for one in told} == {2}
    assert_as_if_nothing_was(kind, str(tmp_path), told, victims)
