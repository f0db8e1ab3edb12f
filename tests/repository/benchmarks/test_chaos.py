"""benchmarks/faults/chaos.py runs, the same seed faults the same, and what goes wrong is seen."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import chorusline as cl
from benchmarks.faults import chaos_kinds, chaos_outside, chaos_training
from benchmarks.faults.chaos import Nodes, play
from benchmarks.faults.chaos_faults import (
    BATCH,
    ENDS_A_WORKER,
    EPOCHS,
    FAULTS,
    NUM_SAMPLES,
    PHASES,
    Fault,
    Plan,
    append,
    draw,
)
from benchmarks.faults.chaos_training import Told, complaints
from tests.harness.programs import figures_of


def test_a_seed_draws_the_same_faults_again() -> None:
    plans = [draw(seed) for seed in range(300)]
    assert plans == [draw(seed) for seed in range(300)]
    faults = [fault for plan in plans for fault in plan.faults]
    assert {fault.kind for fault in faults} == set(FAULTS)
    assert {fault.phase for fault in faults} == set(PHASES)
    for plan in plans:
        ended = [fault.seat for fault in plan.faults if fault.kind in ENDS_A_WORKER]
        assert len(set(ended)) == len(ended) < plan.num_workers, "somebody is left"
    without_nodes = {
        fault.kind for seed in range(99) for fault in draw(seed, has_nodes=False).faults
    }
    assert without_nodes == {"kill", "stop", "driver"}


class Added(Nodes):
    """Nodes that are only counted."""

    def __init__(self) -> None:
        self.count = 0

    def add(self) -> None:
        self.count += 1


async def test_what_a_run_has_asked_for_is_not_granted_in_the_next_one(tmp_path: Path) -> None:
    nodes, wishes = Added(), tmp_path / "wishes"
    for number in (1, 2):
        async with nodes.granting(wishes), asyncio.timeout(30):
            append(wishes, ("add", ""))
            while nodes.count < number:
                await asyncio.sleep(0.05)
    assert nodes.count == 2


@pytest.mark.slow
async def test_three_workers_of_which_two_die_end_as_one_process_would(cluster: None) -> None:
    faults = (Fault(1, 3, "kill", "(3) after"), Fault(0, 3, "kill", "after the recovery"))
    plan = Plan(0, 3, 3, 0.001, faults)
    few = {"CPU": 0.1}
    async with cl.Session((1, 3), resources_per_worker=few, timeout_s=20) as session:
        played = await play(session, plan)
    assert played.wrong == []
    assert sorted(played.struck, key=lambda fault: -fault.seat) == list(faults)
    assert played.recoveries == 2


def alone(folder: Path, epochs: list[list[list[int]]]) -> tuple[list[Told], str]:
    """One process that took these batches, and the parameters that they lead to."""
    ballots = 0
    with (folder / "0-17.diary").open("wb") as diary:
        for epoch, batches in enumerate(epochs):
            for numbers in batches:
                pickle.dump((epoch, ballots, numbers), diary)
                ballots += 1
    told = Told(0, 17, [], ballots, 0)
    (steps,) = chaos_training.possible_steps([told], str(folder))
    parameters = chaos_training.reference(steps)
    assert all(torch.isfinite(p).all() for p in parameters)
    return [dataclasses.replace(told, parameters=parameters)], str(folder)


def batches() -> list[list[int]]:
    numbers = list(range(NUM_SAMPLES))
    return [numbers[at : at + BATCH] for at in range(0, len(numbers), BATCH)]


def test_what_goes_wrong_is_told(tmp_path: Path) -> None:
    whole = [batches() for _ in range(EPOCHS)]
    (told,), folder = alone(tmp_path, whole)
    assert complaints([told], folder) == []
    other = dataclasses.replace(told, parameters=[p + 1e-15 for p in told.parameters])
    (differs,) = complaints([other], folder)
    assert differs == "the parameters are not those of one process that took the same steps"
    assert "differ" in complaints([told, other], folder)[0]
    (again,) = complaints(*alone(tmp_path, [whole[0] + [[5]], *whole[1:]]))
    assert again == "epoch 0: samples [] not used, [5] more than once"
    (missing,) = complaints(*alone(tmp_path, [*whole[:-1], whole[-1][1:]]))
    assert missing == f"epoch {EPOCHS - 1}: samples [0, 1, 2, 3] not used, [] more than once"


@pytest.mark.parametrize("counts", [True, False])
def test_whether_the_last_batch_of_a_lost_process_counts_is_found_out(
    tmp_path: Path, counts: bool
) -> None:
    whole = [batches() for _ in range(EPOCHS)]
    last = whole[-1][-1]
    if counts:
        del whole[-1][-1]
    (told,), folder = alone(tmp_path, whole)
    # The other has taken it in one of the last steps, or died before that was decided.
    chaos_training.append(tmp_path / "1-18.diary", (EPOCHS - 1, told.num_steps - 3, last))
    with_it, without = chaos_training.possible_steps([told], folder)
    assert bool(chaos_training.holes(without)) is counts
    right, wrong = (with_it, without) if counts else (without, with_it)
    taken = dataclasses.replace(told, parameters=chaos_training.reference(right))
    assert complaints([taken], folder) == []
    mistaken = dataclasses.replace(told, parameters=chaos_training.reference(wrong))
    (differs,) = complaints([mistaken], folder)
    assert differs == "the parameters are not those of one process that took the same steps"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_minutes_of_chaos_have_the_faults_that_were_drawn_and_leave_no_complaint() -> None:
    seed = 542
    figures = figures_of("faults.chaos", "--seed", str(seed), "--minutes", "4", timeout_s=500)
    plans = [draw(seed * 1_000_003 + number) for number in range(figures["rounds"])]
    struck = [Fault(*fault) for fault in figures["struck"]]
    assert set(struck) <= {fault for plan in plans for fault in plan.faults}
    # Some wait for a recovery, a step or a seat that does not come any more.
    assert len(struck) >= figures["rounds"]
    assert figures["recoveries"] >= figures["rounds"]
    assert {fault.kind for fault in struck} == set(FAULTS), "of all kinds in the first four rounds"
    assert figures["faults"] == len(struck) and figures["wrong"] == 0


# -- from outside ----------------------------------------------------------------------------------


def test_a_seed_draws_the_same_faults_from_outside_for_all_kinds_of_functions() -> None:
    plans = [chaos_outside.draw(seed) for seed in range(200)]
    assert plans == [chaos_outside.draw(seed) for seed in range(200)]
    assert {plan.kind.name for plan in plans} == set(chaos_kinds.KINDS)
    assert {plan.num_workers for plan in plans} == {2, 3, 4}
    assert {len(plan.faults) for plan in plans} == {1, 2, 3, 4, 5}
    for is_stream in (True, False):
        few = [plan for plan in plans if (plan.kind.name == "stream") == is_stream]
        drawn = {fault.kind for plan in few for fault in plan.faults}
        readers = chaos_outside.READER_FAULTS if is_stream else ()
        assert drawn == {*chaos_outside.FAULTS, *readers}


def ledger(num_steps: int = 30) -> list[torch.Tensor]:
    """The parameters of a run in which steps were shared by one, two, three and four ranks."""
    ranks = torch.arange(chaos_kinds.EPOCHS * chaos_kinds.NUM_SAMPLES) % chaos_kinds.MOST + 1
    used = (chaos_kinds.RATE / ranks.double()).view(chaos_kinds.EPOCHS, chaos_kinds.NUM_SAMPLES)
    return [used, torch.tensor([chaos_kinds.clock_values()[num_steps - 1]], dtype=torch.float64)]


def test_a_ledger_tells_what_was_used_again_or_never_and_steps_that_were_taken_back() -> None:
    def said(used: torch.Tensor, clock: torch.Tensor) -> list[str]:
        told = [chaos_kinds.Told(rank, 17, [used, clock], 2, None) for rank in range(2)]
        return chaos_kinds.complaints(chaos_kinds.Kind("zero"), told)

    used, clock = ledger()
    assert said(used, clock) == []
    assert len(said(used, clock * 1.001)) == 1 and "clock" in said(used, clock * 1.001)[0]
    for first, second in itertools.product(range(1, 5), repeat=2):
        rate = chaos_kinds.RATE
        used[1, 7] = rate / first + (1 - rate / first) * rate / second
        assert said(used, clock) == ["epoch 1: samples [] not used, [7] more than once"]
    used[1, 7] = 0
    assert said(used, clock) == ["epoch 1: samples [7] not used, [] more than once"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kills_from_outside_leave_nothing_to_complain_about() -> None:
    """A seed for each kind of function."""
    flags = ("--outside", "--seed", "104", "--rounds", "8", "--minutes", "12")
    # It knows its workers by their parents, which forked ones do not have.
    figures = figures_of("faults.chaos", *flags, timeout_s=880, is_forked=False)
    # Each round has a fault at least, of which one for a newcomer may find none.
    assert figures["rounds"] == 8 and figures["faults"] >= 8 and figures["wrong"] == 0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_that_is_interrupted_says_what_it_has_seen() -> None:
    command = (sys.executable, "-m", "benchmarks.faults.chaos", "--outside", "--json")
    running = subprocess.Popen(
        (*command, "--seed", "8", "--rounds", "100", "--minutes", "60"),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert running.stdout is not None
    try:
        while not running.stdout.readline().startswith("8: "):
            assert running.poll() is None
        running.terminate()
        *_, last = running.stdout.read().splitlines()
        figures = json.loads(last)["figures"]
        assert figures["interrupted"] and figures["rounds"] == 1 and figures["wrong"] == 0
        assert running.wait(60) == 1
    finally:
        running.kill()
        running.wait()
