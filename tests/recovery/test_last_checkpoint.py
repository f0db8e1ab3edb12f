"""A run that is given up saves what its survivors hold: the next one goes on where it was.

Every rank notes the samples of each step in a file that outlives it. One process then takes the
steps of both runs over the same samples: what the second run ends with is that, bit by bit.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import chorusline as cl
from benchmarks.faults.chaos_training import loss_of, network, take_step
from chorusline.actors.errors import WorkerLost
from chorusline.runtime.checkpoint.format.manifest import read_manifest
from chorusline.runtime.checkpoint.format.storage import Folder
from chorusline.runtime.zero.zero_redundancy_optimizer import optimizer_engine_of
from tests.references.killed_runs import wrap
from tests.references.training_to_kill import BATCH_SIZE, LEARNING_RATE, NUM_SAMPLES, Samples, die

NUM_EPOCHS = 2
DIES_AT = 3


@dataclass
class Told:
    resumed_from: str | None
    first_step: int
    num_steps: int
    learning_rate: float
    parameters: list[torch.Tensor]


@dataclass(frozen=True)
class Note:
    """Taken for a step that may count; in the first run the last one may not."""

    is_first_run: bool
    step: int
    epoch: int
    rank: int
    numbers: list[int]


calls: list[int] = []


def train(
    ctx: cl.Context,
    folder: str,
    where: str,
    replicas: int = 3,
    dtype: torch.dtype = torch.float64,
    plain: bool = False,
) -> Told:
    """In the first run ranks 0 and 1 die at a step. where: "step": in it; "outside": and the third
    waits in a collective of its own; "top": rank 0 dies like that, and rank 1 when its function
    runs again; "counted": rank 0 dies in a step that counts, whose parameters the others lack."""
    calls.append(ctx.rank)
    is_first_run = ctx.resumed_from is None
    if where == "top" and is_first_run and calls == [1, 0]:
        die()
    model = cl.DistributedDataParallel(network().to(dtype), bucket_cap_mb=0.001)
    optim: Any = (
        torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        if plain
        else cl.ZeroRedundancyOptimizer(
            model, torch.optim.AdamW, lr=LEARNING_RATE, replicas=replicas
        )
    )
    schedule = torch.optim.lr_scheduler.ExponentialLR(optim, gamma=0.9)
    ctx.register("model", model)
    ctx.register("optim", optim)
    ctx.register("schedule", schedule)
    ctx.register("random", cl.RandomState())
    first_step = ctx.step
    victims = {"top": [0], "counted": [0], "never": []}.get(where, [0, 1])
    for epoch in ctx.epochs(NUM_EPOCHS):
        joinables, along = ([model], [optim, schedule]) if plain else ([model, optim], [schedule])
        with cl.Join(joinables, step_along=along, divide_by_initial_world_size=False):
            for numbers, inputs, targets in ctx.shard(Samples(), BATCH_SIZE, epoch=epoch):
                dies = is_first_run and ctx.step == DIES_AT and calls[0] in victims
                if dies and where in ("outside", "top"):
                    die()
                if where in ("outside", "top") and ctx.step <= DIES_AT:
                    ctx.reduce(1.0)
                loss_of(model, inputs.to(dtype), targets.to(dtype)).backward()
                if dies and where == "step":
                    die()
                if dies:
                    wrap(optimizer_engine_of(optim).shard, "apply", then=die)
                note = Note(is_first_run, ctx.step + 1, epoch, ctx.rank, numbers.tolist())
                with (Path(folder) / f"{os.getpid()}.notes").open("a") as file:
                    print(json.dumps(asdict(note)), file=file, flush=True)
                optim.step()
                schedule.step()
                optim.zero_grad()
    return Told(
        ctx.resumed_from,
        first_step,
        ctx.step,
        optim.param_groups[0]["lr"],
        [p.detach().clone() for p in model.parameters()],
    )


def notes_in(folder: Path, num_steps: int) -> list[Note]:
    """Of the steps that count; num_steps: of the first run."""
    lines = [line for path in folder.glob("*.notes") for line in path.read_text().splitlines()]
    notes = [Note(**json.loads(line)) for line in lines]
    return [note for note in notes if note.is_first_run == (note.step <= num_steps)]


def reference(notes: list[Note]) -> list[torch.Tensor]:
    """One process that takes the same steps, and adds in the same order."""
    model, samples = network(), Samples()
    optim = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optim, gamma=0.9)
    for step in range(1, max(note.step for note in notes) + 1):
        taken = sorted((n.rank, n.numbers) for n in notes if n.step == step)
        take_step(model, optim, samples, [numbers for _, numbers in taken])
        schedule.step()
    return [p.detach() for p in model.parameters()]


def session_of(
    num_workers: tuple[int, int], place: Path, max_failures: int | None = None
) -> cl.Session:
    return cl.Session(
        num_workers,
        resources_per_worker={"CPU": 0.1},
        timeout_s=20,
        checkpoint=cl.CheckpointConfig(place),
        max_failures=max_failures,
        pause_s=0.1,  # No worker starts in so short a time.
    )


async def assert_nothing_is_lost(
    session: cl.Session, place: Path, notes: Path, where: str, why: str, plain: bool = False
) -> None:
    notes.mkdir()
    with pytest.raises(WorkerLost) as raised:
        await session.run(train, folder=str(notes), where=where, plain=plain)
    (saved,) = [path for path in place.iterdir() if path.name.startswith("step-")]
    assert read_manifest(Folder(place), saved.name).tied == {"model": {}}  # For an export.
    assert why in str(raised.value)
    assert f"is saved as of the last step that counts, in {saved}" in str(raised.value)
    told = await session.run(train, folder=str(notes), where=where, plain=plain)
    num_steps = DIES_AT + (where == "counted")
    assert {(one.resumed_from, one.first_step) for one in told} == {(str(saved), num_steps)}
    counted = notes_in(notes, num_steps)
    for epoch in range(NUM_EPOCHS):
        taken = [n for note in counted if note.epoch == epoch for n in note.numbers]
        assert sorted(taken) == [*range(NUM_SAMPLES)], f"epoch {epoch}"
    expected = reference(counted)
    for one in told:
        assert one.num_steps == max(note.step for note in counted)
        assert one.learning_rate == pytest.approx(LEARNING_RATE * 0.9**one.num_steps)
        assert all(map(torch.equal, one.parameters, expected))


@pytest.mark.parametrize(
    ("where", "fewest"),
    [
        ("step", 2),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("outside", 2), ("top", 2), ("counted", 3))
        ),
    ],
)
async def test_below_the_fewest_the_next_run_goes_on_where_the_survivors_were(
    cluster: None, tmp_path: Path, where: str, fewest: int
) -> None:
    place = tmp_path / "checkpoints"
    async with session_of((fewest, 3), place) as session:
        why = f"no new workers started, and fewer than {fewest} are left"
        await assert_nothing_is_lost(session, place, tmp_path / "notes", where, why)


@pytest.mark.slow
async def test_a_loss_more_than_allowed_loses_no_step_either(cluster: None, tmp_path: Path) -> None:
    place = tmp_path / "checkpoints"
    async with session_of((1, 3), place, max_failures=1) as session:
        why = "max_failures=1 does not allow more lost workers"
        await assert_nothing_is_lost(session, place, tmp_path / "notes", "step", why)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["outside", "top"])
async def test_a_plain_optimizer_is_saved_as_well(
    cluster: None, tmp_path: Path, where: str
) -> None:
    place = tmp_path / "checkpoints"
    async with session_of((2, 3), place) as session:
        why = "no new workers started, and fewer than 2 are left"
        await assert_nothing_is_lost(session, place, tmp_path / "notes", where, why, plain=True)


@pytest.mark.slow
async def test_the_float32_copies_of_a_model_in_half_precision_are_saved(
    cluster: None, tmp_path: Path
) -> None:
    arguments = {"folder": str(tmp_path), "where": "step", "dtype": torch.bfloat16}
    async with session_of((2, 3), tmp_path / "checkpoints") as session:
        with pytest.raises(WorkerLost, match="is saved as of the last step"):
            await session.run(train, **arguments)
        told = await session.run(train, **arguments)
    assert {one.first_step for one in told} == {DIES_AT}
    assert all(map(torch.equal, told[0].parameters, told[-1].parameters))


@pytest.mark.slow
async def test_what_nobody_holds_any_more_is_named_and_the_run_ends_all_the_same(
    cluster: None, tmp_path: Path
) -> None:
    place = tmp_path / "checkpoints"
    async with session_of((2, 3), place) as session:
        with pytest.raises(WorkerLost, match=r"could not be saved: .*no rank holds bucket 0"):
            await session.run(train, folder=str(tmp_path), where="step", replicas=1)
        assert [path.name for path in place.iterdir()] == []
        told = await session.run(train, folder=str(tmp_path), where="never")
    assert {one.resumed_from for one in told} == {None}
