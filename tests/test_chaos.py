"""benchmarks/chaos.py runs, the same seed faults the same, and what goes wrong is seen."""

from __future__ import annotations

import dataclasses
import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import chorusline as cl
from benchmarks import chaos
from benchmarks.chaos import FAULTS, PHASES, Fault, Plan, Told, complaints, draw, play

ROOT = Path(__file__).resolve().parents[1]


def test_a_seed_draws_the_same_faults_again() -> None:
    plans = [draw(seed) for seed in range(300)]
    assert plans == [draw(seed) for seed in range(300)]
    faults = [fault for plan in plans for fault in plan.faults]
    assert {fault.kind for fault in faults} == set(FAULTS)
    assert {fault.phase for fault in faults} == set(PHASES)
    for plan in plans:
        seats = {fault.seat for fault in plan.faults}
        assert len(seats) == len(plan.faults) < plan.num_workers, "somebody is left"


async def test_three_workers_of_which_two_die_end_as_one_process_would(cluster: None) -> None:
    faults = (Fault(1, 3, "kill", "(3) after"), Fault(0, 3, "kill", "after the recovery"))
    plan = Plan(0, 3, 3, 0.001, faults)
    few = {"CPU": 0.1}
    async with cl.Session((1, 3), resources_per_worker=few, timeout_s=20) as session:
        played = await play(session, plan)
    assert played.wrong == []
    assert sorted(played.struck, key=lambda fault: -fault.seat) == list(faults)
    assert played.recoveries == 2


def alone(folder: Path, epochs: list[list[list[int]]]) -> tuple[Plan, Told]:
    """One seat that took these batches, and the parameters that they lead to."""
    plan = Plan(0, 1, 1, 1.0, ())
    ballots = 0
    with (folder / "0.diary").open("wb") as diary:
        for epoch, batches in enumerate(epochs):
            for numbers in batches:
                pickle.dump((epoch, ballots, numbers), diary)
                ballots += 1
    told = Told(0, [], [[] for _ in epochs], ballots, 0)
    parameters = chaos.reference(chaos.steps_that_count(plan, [told], str(folder)))
    return plan, dataclasses.replace(told, parameters=parameters)


def batches() -> list[list[int]]:
    numbers = list(range(chaos.NUM_SAMPLES))
    return [numbers[at : at + chaos.BATCH] for at in range(0, len(numbers), chaos.BATCH)]


def test_what_goes_wrong_is_told(tmp_path: Path) -> None:
    whole = [batches() for _ in range(chaos.EPOCHS)]
    plan, told = alone(tmp_path, whole)
    assert complaints(plan, [told], str(tmp_path)) == []
    other = dataclasses.replace(told, parameters=[p + 1e-15 for p in told.parameters])
    (differs,) = complaints(plan, [other], str(tmp_path))
    assert differs == "the parameters are not those of one process that took the same steps"
    assert "differ" in complaints(plan, [told, other], str(tmp_path))[0]
    (again,) = complaints(*_with(tmp_path, [whole[0] + [[5]], *whole[1:]]))
    assert again == "epoch 0: samples [] not used, [5] more than once"
    (missing,) = complaints(*_with(tmp_path, [*whole[:-1], whole[-1][1:]]))
    assert missing == f"epoch {chaos.EPOCHS - 1}: samples [0, 1, 2, 3] not used, [] more than once"


def _with(folder: Path, epochs: list[list[list[int]]]) -> tuple[Plan, list[Told], str]:
    plan, told = alone(folder, epochs)
    assert all(torch.isfinite(p).all() for p in told.parameters)
    return plan, [told], str(folder)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_two_minutes_of_chaos_leave_nothing_to_complain_about() -> None:
    command = [sys.executable, str(ROOT / "benchmarks/chaos.py"), "--seed", "7"]
    command += ["--minutes", "2", "--json"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=380, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    figures = json.loads(ran.stdout.splitlines()[-1])["figures"]
    assert figures["faults"] > 0 and figures["wrong"] == 0
