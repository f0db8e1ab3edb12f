"""Histories of benchmarks/proofs/invariance.py end with the bits of one worker, or it is seen."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch

import chorusline as cl
from benchmarks.faults.chaos import fill
from benchmarks.faults.chaos_faults import ENDS_A_WORKER, PHASES, Fault, append
from benchmarks.proofs import invariance_training
from benchmarks.proofs.invariance import History, References, Stage, report, said
from benchmarks.proofs.invariance_histories import TRAININGS, draw
from benchmarks.proofs.invariance_training import (
    ACTS,
    EPOCHS,
    GLOBAL_BATCH,
    IN_THE_LOOP,
    MICRO_BATCH,
    MODELS,
    NUM_SAMPLES,
    OPTIMIZERS,
    Plan,
    Told,
    Training,
    complaints,
    deal_in,
    digest,
)
from tests.harness.programs import figures_of

ENDS = (*ENDS_A_WORKER, "leave")

# -- what is drawn ---------------------------------------------------------------------------------


def test_a_hundred_seeds_draw_all_trainings_faults_and_phases() -> None:
    plans = [draw(seed) for seed in range(100)]
    assert plans == [draw(seed) for seed in range(100)]
    assert {plan.training for plan in plans} == set(TRAININGS)
    cases = {(one.model, one.optimizer, one.sharded) for one in TRAININGS}
    assert len(cases) == len(MODELS) * len(OPTIMIZERS) * 2
    assert {plan.num_workers for plan in plans} == {1, 2, 3, 4}
    faults = [fault for plan in plans for fault in plan.faults]
    assert {fault.kind for fault in faults} == set(ACTS)
    many = [fault for seed in range(400) for fault in draw(seed).faults]
    assert {fault.phase for fault in many} == {*IN_THE_LOOP, *PHASES}
    assert any(plan.throttled for plan in plans)
    assert any(plan.saves_at and plan.resumes_with != plan.num_workers for plan in plans)
    assert any(plan.training.max_norm for plan in plans)


def test_somebody_is_left_in_every_history_and_can_go_on() -> None:
    for plan in (draw(seed, has_nodes=bool(seed % 2)) for seed in range(400)):
        ended = [fault.seat for fault in plan.faults if fault.kind in ENDS]
        assert len(set(ended)) == len(ended) < plan.num_workers
        assert plan.registers or plan.training.sharded
        if plan.training.needs_whole_parameters:
            assert not {"kill", "stop"} & {fault.kind for fault in plan.faults}
        if not plan.training.sharded:
            assert {fault.phase for fault in plan.faults} <= set(IN_THE_LOOP)


# -- what has to be true ---------------------------------------------------------------------------

ALONE = Told(0, 17, 12, "parameters", "state", "noise", [0.1], 0, (1,))


def parts() -> list[tuple[int, int, list[int]]]:
    """Epoch, step and samples of the micro-batches of one worker."""
    found = []
    for epoch in range(EPOCHS):
        for first in range(0, NUM_SAMPLES, GLOBAL_BATCH):
            ids = list(range(first, min(first + GLOBAL_BATCH, NUM_SAMPLES)))
            for at in range(0, len(ids), MICRO_BATCH):
                found.append((epoch, first // GLOBAL_BATCH, ids[at : at + MICRO_BATCH]))
    return found


def note(
    folder: Path, pid: int, entries: list[tuple[int, int, list[int]]], attempt: int = 0
) -> str:
    for entry in entries:
        append(folder / f"0-{pid}.diary", (attempt, *entry))
    return str(folder)


def test_a_difference_in_anything_is_told(tmp_path: Path) -> None:
    folder = note(tmp_path, 17, parts())
    deal = deal_in(folder)
    assert complaints([ALONE], ALONE, folder, deal) == []
    for name, other in (("parameters", "x"), ("noise", "x"), ("rates", [0.2]), ("num_steps", 11)):
        told = [ALONE, dataclasses.replace(ALONE, rank=1, pid=18, state="", **{name: other})]
        [wrong] = complaints(told, ALONE, folder, deal)
        assert wrong == f"{name} of rank 1 of 2 are not those of one worker"
    [wrong] = complaints([dataclasses.replace(ALONE, state="x")], ALONE, folder, deal)
    assert wrong == "the optimizer's state is not that of one worker"


def test_a_ledger_tells_what_was_never_computed_and_what_counts_twice(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    deal = deal_in(note(whole, 17, parts()))
    told = [ALONE, dataclasses.replace(ALONE, rank=1, pid=18, state="")]

    def wrong(**by_pid: list[tuple[int, int, list[int]]]) -> list[str]:
        folder = tmp_path / "_".join(f"{pid}{len(of_pid)}" for pid, of_pid in by_pid.items())
        folder.mkdir()
        for pid, entries in by_pid.items():
            note(folder, int(pid[1:]), entries)
        return complaints(told, ALONE, str(folder), deal)

    assert wrong(p17=parts()[::2], p18=parts()[1::2]) == []
    assert wrong(p17=parts(), p99=parts()[:3]) == [], "99 is gone: others computed its part"
    [missing] = wrong(p17=parts()[:-1])
    assert missing == "not computed: [(2, 3, (51, 52))]"
    [twice] = wrong(p17=parts(), p18=parts()[4:5])
    assert twice.startswith("(0, 0, (12, 13, 14)) was computed by [17, 18]")
    [other] = wrong(p17=[*parts(), (0, 0, [5])])
    assert other == "computed, and no part of any step: [(0, 0, (5,))]"


def test_what_was_computed_before_the_function_began_again_does_not_count(tmp_path: Path) -> None:
    first_step = [part for part in parts() if part[:2] == (0, 0)]
    note(tmp_path, 18, first_step[:2])
    folder = note(tmp_path, 17, parts(), attempt=1)
    told = [ALONE, dataclasses.replace(ALONE, rank=1, pid=18, state="")]
    assert complaints(told, ALONE, folder, deal_in(folder)) == []


def test_a_history_that_differs_prints_the_command_that_repeats_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    plan = draw(7)
    history = History(plan, 1.0, [], [ALONE], ["the parameters differ"])
    again = "python -m benchmarks.proofs.invariance --seed 7 --histories 1"
    assert f"WRONG ({again}): the parameters differ" in said(history)
    assert f"WRONG ({again} --no-nodes)" in said(history, no_nodes=True)
    assert report(7, [history, History(draw(8), told=[ALONE])])["differ"] == 1
    assert "WRONG: seed 7: the parameters differ" in capsys.readouterr().out


def test_a_digest_tells_one_bit_a_shape_and_a_name() -> None:
    values = {"a": torch.ones(6), "b": [1.0, "x"]}
    other = {**values, "a": torch.nextafter(torch.ones(6), torch.zeros(6))}
    names = {"c": values["a"], "b": values["b"]}
    shaped = {**values, "a": torch.ones(2, 3)}
    assert len({digest(one) for one in (values, other, names, shaped, {**values, "b": []})}) == 5
    assert digest(values) == digest({"b": [1.0, "x"], "a": torch.ones(6)})


# -- histories -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
async def _stage_that_goes_on(
    cluster: None, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[Stage, cl.Session]]:
    checkpoints = tmp_path_factory.mktemp("invariance") / "checkpoints"
    few = {"CPU": 0.1}
    async with (
        cl.Session(1, resources_per_worker=few, timeout_s=20) as alone,
        cl.Session(
            (1, 3),
            resources_per_worker=few,
            timeout_s=20,
            max_failures=None,
            checkpoint=cl.CheckpointConfig(checkpoints),
        ) as session,
    ):
        yield Stage(session, References(alone), checkpoints), session


@pytest.fixture
async def stage(_stage_that_goes_on: tuple[Stage, cl.Session]) -> AsyncIterator[Stage]:
    """Three workers; and three again when the test is over."""
    stage, session = _stage_that_goes_on
    yield stage
    await fill(session, None, 3)


def plan_of(training: Training, *faults: Fault, **options: object) -> Plan:
    return dataclasses.replace(Plan(0, training, 3, 2, 0.004, faults), **options)


HISTORIES = {
    "a transformer whose ranks die in one step, and in the recovery": plan_of(
        Training("transformer", "adamw", sharded=True, max_norm=0.5),
        Fault(1, 2, "kill", "between forward and backward"),
        Fault(2, 2, "kill", "recovery (e)"),
        replicas=3,
    ),
    "buffers, a plain optimizer, and workers that come": plan_of(
        Training("convolution", "adafactor", sharded=False),
        Fault(2, 3, "kill", "after the loop"),
        Fault(0, 7, "kill", "soon"),
        registers=True,
        step_s=0.1,
    ),
    "parameters that are used in some micro-batches, and a checkpoint": plan_of(
        Training("sometimes", "sgd", sharded=True, weighs=True),
        Fault(1, 6, "kill", "(3) after"),
        registers=True,
        saves_at=5,
        resumes_with=3,
    ),
    "a recurrent net beside a slow rank": plan_of(
        Training("recurrent", "adamw", sharded=True),
        Fault(0, 4, "kill", "after optimizer.step()"),
        throttled=(1,),
    ),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if number else [], id=name)
        for number, name in enumerate(HISTORIES)
    ],
)
async def test_a_history_ends_with_the_bits_of_one_worker(
    stage: Stage, cluster: None, name: str
) -> None:
    plan = HISTORIES[name]
    history = await stage.play(plan)
    assert history.wrong == []
    assert sorted(history.struck, key=str) == sorted(plan.faults, key=str)


async def test_a_rank_that_computes_something_else_is_found(stage: Stage, cluster: None) -> None:
    """The reference of another training is that of nobody."""
    training = Training("perceptron", "sgd", sharded=True)
    other, deal = await stage._references.of(dataclasses.replace(training, max_norm=0.5))
    stage._references._known[training] = other, deal
    history = await stage.play(plan_of(training))
    del stage._references._known[training]
    assert history.wrong == [
        "parameters of ranks [0, 1, 2] of 3 are not those of one worker",
        "the optimizer's state is not that of one worker",
    ]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_twelve_histories_on_nodes_end_with_the_bits_of_one_worker() -> None:
    flags = ("--seed", "0", "--histories", "12")
    figures = figures_of("proofs.invariance", *flags, timeout_s=880)
    assert figures["histories"] == 12 and figures["faults"] > 0 and figures["differ"] == 0


def test_the_steps_of_an_epoch_are_more_than_one_and_the_last_is_smaller() -> None:
    assert invariance_training.STEPS_OF_EPOCH == 4
    assert NUM_SAMPLES % GLOBAL_BATCH and GLOBAL_BATCH % MICRO_BATCH
