"""Workers that come while the others train with `ctx.steps`: the others go on where they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import chorusline as cl
from tests.references.arriving_runs import STEPS_OF_EPOCH, Told, noted, train
from tests.references.stepped_training import MODELS

FEW = {"CPU": 0.1}
_ALONE: dict[Any, Told] = {}


async def told_alone(tmp_path: Path, **options: Any) -> Told:
    """What one worker ends with."""
    key = tuple(sorted(options.items()))
    if key not in _ALONE:
        folder = tmp_path / "alone"
        folder.mkdir()
        async with cl.Session(1, resources_per_worker=FEW) as session:
            [_ALONE[key]] = await session.run(train, folder=folder, replicas=1, **options)
    return _ALONE[key]


async def told_by_three(
    folder: Path, victims: tuple[int, ...] = (1,), **options: Any
) -> list[Told]:
    """What three workers end with, of which these ranks die, and others come."""
    async with cl.Session((1, 3), resources_per_worker=FEW) as session:
        return await session.run(train, folder=folder, full=3, victims=victims, **options)


def assert_same(told: list[Told], alone: Told) -> None:
    assert {one.parameters for one in told} == {alone.parameters}
    assert {one.learning_rate for one in told} == {alone.learning_rate}
    assert {one.average for one in told} == {alone.average}
    assert {one.shown for one in told} == {alone.shown}
    # A worker that comes has taken a part of the steps, and a run that began again the rest.
    assert all(one.drawn.items() <= alone.drawn.items() for one in told)
    assert told[0].state == alone.state


def assert_came(told: list[Told], alone: Told) -> None:
    """One worker of three came, and the others went on where they were."""
    assert [one.began for one in told] == [1, 1, 1]
    assert len([one for one in told if one.num_steps < alone.num_steps]) == 1
    assert_same(told, alone)


@pytest.mark.timeout(240)  # The steps wait for a process to start, on a busy machine for minutes.
@pytest.mark.parametrize("model_name", ["transformer"])
async def test_a_worker_comes_in_and_the_others_go_on_where_they_are(
    cluster: None, tmp_path: Path, model_name: str
) -> None:
    alone = await told_alone(tmp_path, model_name=model_name)
    # And the others train while it makes its dry run.
    scenario = "waits for steps in its dry run"
    told = await told_by_three(tmp_path, model_name=model_name, scenario=scenario)
    assert noted(tmp_path, "struck") and not noted(tmp_path, "held up")
    [came] = [one for one in told if one.num_steps < alone.num_steps]
    stayed = [one for one in told if one is not came]
    assert len(stayed) == 2 and [one.began for one in stayed] == [1, 1]
    for one in stayed:  # All steps in one call, with its local variables.
        assert one.num_steps == 2 * STEPS_OF_EPOCH
        assert sorted(set(one.sizes)) == [2, 3] and one.sizes[-1] == 3
    assert set(came.sizes) == {3} and came.num_steps > 0
    assert len(noted(tmp_path, "began")) == 4
    assert_same(told, alone)


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("victim", [0, 1])
async def test_a_worker_that_comes_hears_what_the_others_have_heard_at_their_beginning(
    cluster: None, tmp_path: Path, victim: int
) -> None:
    """Also in the place of rank 0, which had sent some of it."""
    alone = await told_alone(tmp_path)
    told = await told_by_three(tmp_path, victims=(victim,), scenario="asks the others")
    [came] = [one for one in told if one.num_steps < 2 * STEPS_OF_EPOCH]
    first, second = (one for one in told if one is not came)
    assert first.began == second.began == 1
    # The worker that comes has begun in the epoch that was under way, with what stood before it.
    assert first.heard == second.heard and came.heard[:3] == first.heard[:3]
    assert set(came.heard) <= set(first.heard)
    assert_same(told, alone)


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_what_nobody_can_give_a_worker_lets_all_run_again(
    cluster: None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    alone = await told_alone(tmp_path)
    told = await told_by_three(tmp_path, scenario="needs a part of its own")
    assert sorted(one.began for one in told) == [
        2,
        2,
        2,
    ]  # The newcomer has made its dry run before.
    assert_same(told, alone)


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_a_worker_comes_while_checkpoints_are_written(cluster: None, tmp_path: Path) -> None:
    alone = await told_alone(tmp_path)
    kept = tmp_path / "kept"
    checkpoint = cl.CheckpointConfig(kept, num_to_keep=2, every_n_steps=3)
    async with cl.Session((1, 3), resources_per_worker=FEW, checkpoint=checkpoint) as session:
        told = await session.run(train, folder=tmp_path, full=3, victims=(1,))
    assert_came(told, alone)
    # The newest one has what the three have ended with: one worker resumes from it.
    again, folder = cl.CheckpointConfig(kept, num_to_keep=2), tmp_path / "again"
    folder.mkdir()
    async with cl.Session(1, resources_per_worker=FEW, checkpoint=again) as session:
        resumed = await session.run(train, folder=folder, replicas=1)
    assert resumed[0].num_steps < 3, "the epochs were nearly over"
    assert_same(resumed, alone)


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_a_worker_comes_right_after_the_body_has_dropped_the_state(
    cluster: None, tmp_path: Path
) -> None:
    alone = await told_alone(tmp_path, scenario="drops its state")
    told = await told_by_three(tmp_path, scenario="drops its state")
    assert_came(told, alone)


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_a_worker_comes_where_digests_are_compared(cluster: None, tmp_path: Path) -> None:
    alone = await told_alone(tmp_path, check_every=1)
    told = await told_by_three(tmp_path, check_every=1)
    assert_came(told, alone)


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_a_worker_comes_to_the_steps_of_a_stream(cluster: None, tmp_path: Path) -> None:
    _, data, _ = MODELS["perceptron"]
    rows = data(16 * STEPS_OF_EPOCH)

    async def run(num_workers: int | tuple[int, int], folder: Path, **options: Any) -> list[Told]:
        folder.mkdir()
        with cl.Stream([rows[number] for number in range(len(rows))]) as stream:
            async with cl.Session(num_workers, resources_per_worker=FEW) as session:
                return await session.run(train, folder=folder, epochs=1, stream=stream, **options)

    [alone] = await run(1, tmp_path / "alone", replicas=1)
    assert_came(await run((1, 3), tmp_path / "three", full=3, victims=(1,)), alone)


SCENARIOS = [
    "in its dry run",
    "at its entry",
    "a rank at the entry",
    "a rank behind the vote",
    "the driver in the dry run",
]


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("scenario", SCENARIOS)
async def test_a_death_while_a_worker_comes_costs_no_step(
    cluster: None, tmp_path: Path, scenario: str
) -> None:
    alone = await told_alone(tmp_path)
    told = await told_by_three(tmp_path, scenario=scenario)
    assert noted(tmp_path, "struck")
    assert len(told) == 3
    stayed = [one for one in told if one.num_steps == 2 * STEPS_OF_EPOCH]
    assert len(stayed) == (1 if scenario.startswith("a rank") else 2)
    assert [one.began for one in stayed] == [1] * len(stayed)
    assert_same(told, alone)


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_a_worker_that_hangs_in_its_dry_run_is_ended_and_the_next_one_comes(
    cluster: None, tmp_path: Path
) -> None:
    alone = await told_alone(tmp_path)
    async with cl.Session((1, 3), resources_per_worker=FEW, pause_s=4.0) as session:
        told = await session.run(
            train, folder=tmp_path, full=3, victims=(1,), scenario="hangs in its dry run"
        )
    assert len(told) == 3 and not {one.pid for one in told} & {*noted(tmp_path, "struck")}
    assert sorted(one.began for one in told) == [1, 1, 1]
    assert_same(told, alone)


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_a_worker_comes_in_the_second_loop_of_an_epoch(cluster: None, tmp_path: Path) -> None:
    """Its dry run passes by the first one, which is over."""
    alone = await told_alone(tmp_path, epochs=1, scenario="in the second loop")
    told = await told_by_three(tmp_path, epochs=1, scenario="in the second loop")
    assert_came(told, alone)


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_two_workers_come_at_once(cluster: None, tmp_path: Path) -> None:
    alone = await told_alone(tmp_path)
    told = await told_by_three(tmp_path, (0, 2), replicas=3)
    [stayed] = [one for one in told if one.num_steps == 2 * STEPS_OF_EPOCH]
    assert stayed.began == 1 and stayed.sizes[-1] == 3
    assert_same(told, alone)
