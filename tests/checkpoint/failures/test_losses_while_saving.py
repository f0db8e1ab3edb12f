"""A rank or the driver is killed while `ctx.save().wait()` waits: the run goes on."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

import chorusline as cl
from tests.harness.arrivals import ready
from tests.references.checkpoint_places import steps_in

STEPS, SAVES_AT = 6, 3


class _Ballast:
    """Enough to be caught while it is written."""

    def state_dict(self) -> dict[str, Any]:
        return {"ballast": torch.zeros(8_000_000)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def train(
    ctx: cl.Context, dies: bool, sharded: bool, folder: Path | None = None
) -> tuple[int, list[int], torch.Tensor]:
    """With `dies`, rank 1 is killed while it writes its part. folder: the ranks wait before the
    save until `go on` stands there."""
    torch.manual_seed(0)
    model = cl.DistributedDataParallel(torch.nn.Linear(4, 2))
    optim: Any
    if sharded:
        optim = cl.ZeroRedundancyOptimizer(model, torch.optim.AdamW, lr=0.1, replicas=2)
    else:
        optim = torch.optim.AdamW(model.parameters(), lr=0.1)
    for name, one in (("model", model), ("optim", optim)):
        ctx.register(name, one)
    ctx.register("ballast", _Ballast(), per_rank=True)
    taken = []
    for epoch in ctx.epochs(1):
        rows = torch.arange(48.0 * STEPS).view(12 * STEPS, 4) / 100
        for step in ctx.steps(rows, 12, 4, epoch=epoch):
            for batch in step:
                model(batch).square().mean().backward()
            optim.step()
            optim.zero_grad()
            taken.append(step.number)
            if step.number == SAVES_AT:
                if folder is not None:
                    (folder / f"waits-{ctx.rank}").touch()
                    ready(folder / "go on")
                saving = ctx.save()
                if dies and ctx.rank == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                saving.wait()
    return os.getpid(), taken, model.module.weight.detach().clone()


@pytest.mark.promise("a death while a checkpoint is written")
@pytest.mark.parametrize("sharded", [True, pytest.param(False, marks=pytest.mark.slow)])
async def test_a_rank_dies_in_a_save_that_the_others_wait_for(
    cluster: None, tmp_path: Path, sharded: bool
) -> None:
    few = {"CPU": 0.1}
    config = cl.CheckpointConfig(tmp_path / "kept", resume="never")
    options: dict[str, Any] = {"max_failures": None, "resources_per_worker": few}
    async with cl.Session((2, 3), checkpoint=config, **options) as session:
        undisturbed = await session.run(train, dies=False, sharded=sharded)
        assert len(steps_in(tmp_path / "kept")) == 1
        (tmp_path / "kept").rename(tmp_path / "before")
        told = await session.run(train, dies=True, sharded=sharded)
    assert steps_in(tmp_path / "kept") == [], "the save was not completed"
    survivors = {pid for pid, *_ in undisturbed} & {pid for pid, *_ in told}
    assert len(survivors) == 2
    for pid, taken, weight in told:
        if pid in survivors:  # From the top, where they were.
            assert taken == list(range(SAVES_AT + 1, STEPS))
        assert torch.equal(weight, undisturbed[0][2])


@pytest.mark.promise("the death of the driver")
async def test_the_driver_dies_before_a_save_of_a_later_run(cluster: None, tmp_path: Path) -> None:
    few = {"CPU": 0.1}
    config = cl.CheckpointConfig(tmp_path / "kept", resume="never")
    options: dict[str, Any] = {"max_failures": None, "resources_per_worker": few}
    async with cl.Session(2, checkpoint=config, **options) as session:
        await session.run(lambda ctx: None)  # The ranks' group lives on.
        folder = tmp_path / "folder"
        folder.mkdir()
        run = asyncio.create_task(session.run(train, dies=False, sharded=True, folder=folder))
        while len(list(folder.glob("waits-*"))) < 2:
            await asyncio.sleep(0.05)
        assert session._holder.worker_group is not None
        ray.kill(session._holder.worker_group._driver)
        (folder / "go on").touch()
        told = await run
    assert [taken for _, taken, _ in told] == [list(range(STEPS))] * 2, "in one call"
    assert steps_in(tmp_path / "kept") == [SAVES_AT + 1]
