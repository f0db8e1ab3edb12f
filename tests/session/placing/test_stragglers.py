"""A worker far behind for long is replaced, if the session says so; the bits are the same."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

import chorusline as cl
from benchmarks.proofs.invariance_training import digest
from chorusline.actors.worker_group.worker_group import WorkerGroup
from chorusline.runtime.data import stragglers
from tests.harness.arrivals import FEW

_MOST_EPOCHS = 500


def train(ctx: cl.Context, folder: Path, epochs: int | None = None) -> tuple[int, str, str, int]:
    """Epochs until the first worker of rank 1, which is slow, is replaced; or so many of them.
    Returns the pid, digests of the parameters and the optimizer's state, and the epochs."""
    stragglers.LONG_S = 0.5
    torch.manual_seed(0)
    model = cl.DistributedDataParallel(torch.nn.Linear(4, 2))
    replicas = min(2, ctx.world_size)
    optim = cl.ZeroRedundancyOptimizer(model, torch.optim.AdamW, lr=0.01, replicas=replicas)
    ctx.register("model", model)
    ctx.register("optim", optim)
    slow = folder / "slow"
    if ctx.rank == 1 and not slow.exists():
        slow.write_text(str(os.getpid()))
    is_slow = slow.exists() and slow.read_text() == str(os.getpid())
    num_epochs = 0
    for epoch in ctx.epochs(epochs or _MOST_EPOCHS):
        num_epochs = epoch + 1
        for step in ctx.steps(torch.arange(96.0).view(24, 4), 8, 2, epoch=epoch):
            for batch in step:
                time.sleep(0.05 if is_slow else 0.005)
                model(batch).square().mean().backward()
            optim.step()
            optim.zero_grad()
        is_replaced = ctx.rank == 1 and not is_slow
        if epochs is None and ctx.reduce(float(is_replaced), "max"):
            break
    optim.consolidate_state_dict(0)
    state = digest(optim.state_dict()) if ctx.rank == 0 else ""
    return os.getpid(), digest(dict(model.module.state_dict())), state, num_epochs


@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": 2, "spares": 1, "max_failures": None},
        pytest.param({"num_workers": (1, 2)}, marks=pytest.mark.slow),
    ],
    ids=["by a spare", "by a new worker"],
)
async def test_a_straggler_leaves_and_another_worker_has_its_seat(
    cluster: None, tmp_path: Path, options: dict[str, Any]
) -> None:
    async with cl.Session(
        **options, replace_stragglers=True, resources_per_worker=FEW, timeout_s=20
    ) as session:
        told = await session.run(train, folder=tmp_path)
    slow = int((tmp_path / "slow").read_text())
    assert len(told) == 2 and slow not in {pid for pid, *_ in told}
    epochs = told[0][-1]
    assert epochs < _MOST_EPOCHS
    async with cl.Session(1, resources_per_worker=FEW) as alone:
        [(_, parameters, state, _)] = await alone.run(train, folder=tmp_path, epochs=epochs)
    assert {one[1] for one in told} == {parameters}
    assert told[0][2] == state


@pytest.mark.slow
async def test_a_straggler_is_replaced_although_the_driver_that_dismissed_it_is_killed(
    cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take, killed = WorkerGroup._take_spare, []

    async def killed_before(worker_group: WorkerGroup, seat: int) -> Any:
        """The straggler's seat is about to be filled when the driver is killed."""
        if not killed and (tmp_path / "slow").exists():
            await asyncio.sleep(1.0)  # By then it is idle: nothing says that it has left.
            killed.append(worker_group._driver)
            ray.kill(worker_group._driver)
            await asyncio.sleep(60)  # It is cancelled, since the driver is gone.
        return await take(worker_group, seat)

    monkeypatch.setattr(WorkerGroup, "_take_spare", killed_before)
    async with cl.Session(
        2, spares=1, max_failures=None, replace_stragglers=True, resources_per_worker=FEW
    ) as session:
        told = await session.run(train, folder=tmp_path)
    slow = int((tmp_path / "slow").read_text())
    assert killed
    assert len(told) == 2 and slow not in {pid for pid, *_ in told}
    assert told[0][-1] < _MOST_EPOCHS


def test_replacing_needs_runs_that_go_on() -> None:
    with pytest.raises(ValueError, match="max_failures is 0, so the first lost worker ends a run"):
        cl.Session(2, replace_stragglers=True)
    with pytest.raises(TypeError, match="must be True or False, got 1"):
        cl.run(train, num_workers=(1, 2), replace_stragglers=1)  # type: ignore[arg-type]
