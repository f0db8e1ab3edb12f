"""A resume from the checkpoint of an epoch's end begins with the next epoch, and from no other."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import chorusline as cl
from chorusline.runtime.checkpoint.format.epoch_end import NOTE
from chorusline.runtime.checkpoint.format.manifest import MANIFEST
from tests.harness.log_lines import LogLines
from tests.harness.reused_ranks import ReusedRanks
from tests.references.checkpoint_runs import in_run, make_model, same

DATA = torch.randn(24, 7, generator=torch.Generator().manual_seed(5))
EVERY = 6
"""Steps of an epoch on two ranks, with batches of two."""


class Killed(Exception):
    """The run ends here; the disk is as after a kill."""


def epochs_entered(
    ctx: cl.Context, epochs: int, tail: str, stop_in: int = -1
) -> tuple[list[tuple[int, int]], dict[str, torch.Tensor]]:
    """Each epoch that was entered, with the number of its batches; and the model at the end.

    tail: what the epoch's body does when its batches are taken. stop_in: an epoch whose body ends
    after the save."""
    ctx.seed(3)
    model = cl.DistributedDataParallel(make_model())
    optim = cl.ZeroRedundancyOptimizer(model, torch.optim.AdamW, lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optim, 1, 0.5)
    for name, stateful in (("model", model), ("optim", optim), ("schedule", schedule)):
        ctx.register(name, stateful)
    entered = []

    def train_on(epoch: int) -> int:
        with cl.Join([model, optim]):
            batches = 0
            for batch in ctx.shard(DATA, 2, epoch=epoch):
                (model(batch).square().mean() * (1 + torch.rand(()))).backward()
                optim.step()
                optim.zero_grad()
                batches += 1
        return batches

    for epoch in ctx.epochs(epochs):
        batches = train_on(epoch)
        if tail not in ("steps behind", "by steps"):
            schedule.step()
        if tail not in ("by steps", "after the loop"):
            saving = ctx.save()
        if tail == "draws on rank 1 between saves":
            if ctx.rank == 1:
                torch.rand(1)
            ctx.save()
        if tail == "named":
            saving.wait()
            ctx.save(Path(saving.path).parent / f"named-{epoch}")
        if epoch == stop_in:
            saving.wait()
            raise Killed
        if tail == "steps behind":
            schedule.step()
        if tail == "two shards":
            batches += train_on(epoch + 100)
        if tail == "through .data":
            next(model.parameters()).data.mul_(0.5)
        if tail == "draws on rank 1" and ctx.rank == 1:
            torch.rand(1)
        entered.append((epoch, batches))
    if tail == "after the loop":
        ctx.save()
    return entered, {name: value.clone() for name, value in model.module.state_dict().items()}


def in_run_of(
    ranks: ReusedRanks, config: cl.CheckpointConfig, epochs: int, tail: str, stop_in: int = -1
) -> tuple[list[tuple[int, int]], dict[str, torch.Tensor], list[str]]:
    """What rank 0 tells."""
    first, *_ = ranks.run(_run_epochs, config, epochs, tail, stop_in)
    return first  # type: ignore[no-any-return]


def _run_epochs(
    group: cl.Group, config: cl.CheckpointConfig, epochs: int, tail: str, stop_in: int
) -> Any:
    ear = LogLines()
    logging.getLogger("chorusline").addHandler(ear)
    kwargs = {"epochs": epochs, "tail": tail, "stop_in": stop_in}
    try:
        return *in_run(group, epochs_entered, config, **kwargs), ear.lines
    except Killed:
        return [], {}, ear.lines
    finally:
        logging.getLogger("chorusline").removeHandler(ear)


Ranks = Callable[[int], ReusedRanks]


def test_a_finished_epoch_is_not_entered_again(ranks_of: Ranks, tmp_path: Path) -> None:
    whole, state, _ = in_run_of(ranks_of(2), cl.CheckpointConfig(tmp_path / "a"), 3, "saves last")
    assert whole == [(0, EVERY), (1, EVERY), (2, EVERY)]
    config = cl.CheckpointConfig(tmp_path / "b")
    assert in_run_of(ranks_of(2), config, 2, "saves last")[0] == whole[:2]
    rest, resumed, (told,) = in_run_of(ranks_of(2), config, 3, "saves last")
    assert rest == whole[2:]
    assert f"of step {2 * EVERY}, before epoch 2 (" in told
    assert same(resumed, state)
    # It was the last one: nothing is left, whatever the number of ranks.
    assert in_run_of(ranks_of(3), config, 3, "saves last")[0] == []
    rest, *_ = in_run_of(ranks_of(3), config, 4, "saves last")
    assert rest == [(3, EVERY - 2)]


@pytest.mark.parametrize("tail", ["named", "by steps", "after the loop"])
def test_it_is_over_however_it_was_saved(ranks_of: Ranks, tmp_path: Path, tail: str) -> None:
    every = EVERY if tail == "by steps" else None
    config = cl.CheckpointConfig(tmp_path, every_n_steps=every)
    in_run_of(ranks_of(2), config, 2, tail)
    places = [tmp_path, tmp_path / "named-1"] if tail == "named" else [tmp_path]
    for number, place in enumerate(places):
        resumed = cl.CheckpointConfig(tmp_path / f"again-{number}", resume=place)
        assert in_run_of(ranks_of(2), resumed, 3, "saves last")[0] == [(2, EVERY)]


@pytest.mark.parametrize("tail", ["steps behind", "through .data", "draws on rank 1"])
def test_an_epoch_is_entered_again_if_anything_has_changed_behind_the_save(
    ranks_of: Ranks, tmp_path: Path, tail: str
) -> None:
    config = cl.CheckpointConfig(tmp_path)
    in_run_of(ranks_of(2), config, 1, tail)
    entered, _, (told,) = in_run_of(ranks_of(2), config, 2, tail)
    assert entered == [(0, 0), (1, EVERY)]
    assert "in epoch 0 after its batches, so the rest of its body runs now" in told


def test_two_saves_of_one_step_may_differ_on_one_rank_alone(
    ranks_of: Ranks, tmp_path: Path
) -> None:
    config = cl.CheckpointConfig(tmp_path, num_to_keep=None)
    entered, *_ = in_run_of(ranks_of(2), config, 2, "draws on rank 1 between saves")
    assert entered == [(0, EVERY), (1, EVERY)]
    assert len(list(tmp_path.glob("step-*"))) == 4
    # Only beside the second one of each epoch.
    noted = [note.parent.name.rpartition("-")[2] for note in tmp_path.glob(f"*/{NOTE}")]
    assert sorted(noted) == ["1", "3"]


def test_an_epoch_whose_run_was_killed_behind_the_save_is_entered_again(
    ranks_of: Ranks, tmp_path: Path
) -> None:
    config = cl.CheckpointConfig(tmp_path)
    in_run_of(ranks_of(2), config, 2, "saves last", 1)
    entered, *_ = in_run_of(ranks_of(2), config, 2, "saves last")
    assert entered == [(1, 0)]
    # Now its body has come to its end.
    assert in_run_of(ranks_of(2), config, 2, "saves last")[0] == []


def test_a_save_between_two_shards_of_an_epoch_is_not_its_end(
    ranks_of: Ranks, tmp_path: Path
) -> None:
    config = cl.CheckpointConfig(tmp_path)
    whole, *_ = in_run_of(ranks_of(2), config, 2, "two shards")
    assert whole == [(0, 2 * EVERY), (1, 2 * EVERY)]
    assert in_run_of(ranks_of(2), config, 2, "two shards")[0] == [(1, EVERY)]


def test_a_note_that_is_damaged_or_of_another_checkpoint_does_not_count(
    ranks_of: Ranks, tmp_path: Path
) -> None:
    config = cl.CheckpointConfig(tmp_path / "a")
    in_run_of(ranks_of(1), config, 2, "saves last")
    by_step = sorted(path for path in (tmp_path / "a").iterdir())
    first, second = (folder / NOTE for folder in by_step)
    assert (second.parent / MANIFEST).exists()
    whole = second.read_bytes()
    for other in (whole[:-3], first.read_bytes(), b""):
        second.write_bytes(other)
        copy = tmp_path / "copy"
        shutil.copytree(tmp_path / "a", copy)
        resumed = cl.CheckpointConfig(copy)
        assert in_run_of(ranks_of(1), resumed, 2, "saves last")[0] == [(1, 0)]
        shutil.rmtree(copy)
    second.write_bytes(whole)
    assert in_run_of(ranks_of(1), config, 2, "saves last")[0] == []


def test_an_epoch_ends_with_a_model_that_holds_a_conjugate_view(alone, tmp_path: Path) -> None:
    def train(ctx: cl.Context) -> list[int]:
        model, wave = torch.nn.Linear(1, 1), torch.tensor([1 + 2j, 3 - 1j])
        model.register_buffer("wave", wave.conj())
        model.register_buffer("part", wave.conj().imag)
        ctx.register("model", model)
        entered = []
        for epoch in ctx.epochs(2):
            entered.append(epoch)
            ctx.save()
        return entered

    config = cl.CheckpointConfig(tmp_path)
    assert [in_run(alone, train, config) for _ in range(2)] == [[0, 1], []]


def _dies_in_epoch(ctx: cl.Context, place: str, dies: str) -> list[tuple[int, int]]:
    model = cl.DistributedDataParallel(make_model())
    optim = cl.ZeroRedundancyOptimizer(model, torch.optim.AdamW, lr=0.01)
    ctx.register("model", model)
    ctx.register("optim", optim)
    entered = []
    for epoch in ctx.epochs(3):
        if dies == "in the next epoch" and epoch == 2:
            while not list(Path(place).glob(f"*/{NOTE}"))[1:]:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        batches = 0
        with cl.Join([model, optim]):
            for batch in ctx.shard(DATA, 2, epoch=epoch):
                model(batch).square().mean().backward()
                optim.step()
                optim.zero_grad()
                batches += 1
        entered.append((epoch, batches))
        saving = ctx.save()
        if dies == "after the save" and epoch == 1:
            saving.wait()
            os.kill(os.getpid(), signal.SIGKILL)
    return entered


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dies", "expected"),
    [("after the save", [(1, 0), (2, EVERY)]), ("in the next epoch", [(2, EVERY)])],
)
async def test_killed_workers_leave_the_epoch_where_they_were(
    cluster: None, tmp_path: Path, dies: str, expected: list[tuple[int, int]]
) -> None:
    config = cl.CheckpointConfig(tmp_path)
    few = {"CPU": 0.1}
    async with cl.Session(2, resources_per_worker=few, checkpoint=config) as session:
        with pytest.raises(cl.WorkerLost):
            await session.run(_dies_in_epoch, place=str(tmp_path), dies=dies)
        async with asyncio.timeout(60):
            entered = await session.run(_dies_in_epoch, place=str(tmp_path), dies="never")
    assert entered == [expected] * 2
