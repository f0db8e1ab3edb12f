"""Saves by `every_n_steps` that fail: nobody can wait for them, so training goes on."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest
import torch

import chorusline as cl
from chorusline.runtime.program.context import call_of
from tests.references.checkpoint_runs import in_run, make_model


def _train(group: cl.Group, place: Path, comes_back: bool) -> list[int]:
    """Six steps, with a save behind every second one; the place is away at the save of step 4."""
    aside = place.with_name("aside")

    def swap(ctx: cl.Context, is_away: bool) -> None:
        while ctx._call.checkpoints.is_saving:
            time.sleep(0.01)
        ctx.barrier()
        if ctx.rank == 0 and is_away:
            place.rename(aside)
            place.write_bytes(b"a file is in the folder's place")
        elif ctx.rank == 0:
            place.unlink()
            aside.rename(place)
        ctx.barrier()

    def body(ctx: cl.Context) -> list[int]:
        model = ctx.register("model", cl.DistributedDataParallel(make_model()))
        optim = ctx.register("optim", cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.1))
        given = []
        for ids in ctx.shard(list(range(24)), batch_size=2, shuffle=False):
            if ctx.step == 3:
                swap(ctx, is_away=True)
            if ctx.step == 5 and comes_back:
                swap(ctx, is_away=False)
            model(ids[:, None] / 24 * torch.ones(7)).square().mean().backward()
            optim.step()
            optim.zero_grad()
            given += ids.tolist()
        return given

    return in_run(group, body, cl.CheckpointConfig(place, every_n_steps=2))


def test_a_training_goes_on_and_makes_the_next_checkpoint(ranks_of, tmp_path):
    place = tmp_path / "place"
    place.mkdir()
    given = ranks_of(2).run(_train, place, True)
    assert sorted(given[0] + given[1]) == list(range(24))
    whole = sorted(int(path.parent.name.split("-")[1]) for path in place.glob("*/chorusline.json"))
    assert whole == [2, 6]


def test_the_run_raises_if_its_last_checkpoint_failed(ranks_of, tmp_path):
    place = tmp_path / "place"
    place.mkdir()
    with pytest.raises(AssertionError, match=r"CheckpointWriteFailed.*step-00000006.*not written"):
        ranks_of(2).run(_train, place, False)


def test_a_save_of_accumulated_batches_that_was_given_up_is_due_when_the_function_runs_again(
    alone, tmp_path
):
    """Every third batch, and so after the fourth, which has the step."""

    def body(ctx: cl.Context) -> None:
        model = ctx.register("model", cl.DistributedDataParallel(make_model()))
        optim = ctx.register("optim", torch.optim.SGD(model.parameters(), lr=0.1))
        call = call_of(ctx)
        for number, ids in enumerate(ctx.shard(list(range(24)), batch_size=2, shuffle=False)):
            if number == 4:
                break
            model(ids[:, None] / 24 * torch.ones(7)).square().mean().backward()
            if number == 3:
                optim.step()
        call.checkpoints.finish()
        (folder,) = tmp_path.iterdir()
        shutil.rmtree(folder)
        call.checkpoints.last_step = -1
        call.resume_data([call.data_state(committed=True)])
        call.at_first_batch()

    in_run(alone, body, cl.CheckpointConfig(tmp_path, every_n_steps=3))
    assert [path.name[:13] for path in tmp_path.iterdir()] == ["step-00000004"]
