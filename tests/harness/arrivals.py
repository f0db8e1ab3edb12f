"""Sessions whose workers die and come: what tests wait for, and a function that they can stop."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import torch

import chorusline as cl
from chorusline.actors.messages.messages import WorkerSnapshot
from chorusline.actors.ray_calls.calls import answers

FEW = {"CPU": 0.1}


def ready(path: Path) -> None:
    give_up_at = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < give_up_at
        time.sleep(0.02)


def train_until_stopped(ctx: cl.Context, folder: Path) -> tuple[int, int, torch.Tensor]:
    """Steps until the folder says stop, on all ranks equally many. Notes who has come how far."""
    torch.manual_seed(0)
    model = cl.DistributedDataParallel(torch.nn.Linear(4, 2))
    # Two of four ranks may die at once, whichever they are.
    optim = cl.ZeroRedundancyOptimizer(model, torch.optim.AdamW, lr=0.1, replicas=3)
    ctx.register("model", model)
    ctx.register("optim", optim)
    for _ in ctx.epochs(1):
        with cl.Join([model, optim]):
            while not (folder / "stop").exists():
                time.sleep(0.02)
                model(torch.ones(1, 4)).square().mean().backward()
                optim.step()
                optim.zero_grad()
                (folder / f"{os.getpid()}").write_text(f"{ctx.world_size} {optim.num_steps}")
    return ctx.world_size, optim.num_steps, model.module.weight.detach().clone()


async def at_full_size(
    folder: Path, size: int, run: asyncio.Task[Any], within_s: float = 120
) -> set[int]:
    """The pids of the ranks, when `size` living processes train together."""
    give_up_at = time.monotonic() + within_s
    while True:
        assert time.monotonic() < give_up_at and not run.done()
        told = {int(path.name): path.read_text().split() for path in folder.glob("[0-9]*")}
        there = {pid for pid in told if Path(f"/proc/{pid}").exists()}
        if sum(told[pid][:1] == [str(size)] for pid in there) == size:
            return there
        await asyncio.sleep(0.02)


async def pids_of_spares(session: cl.Session) -> set[int]:
    assert session._holder.worker_group is not None
    workers = session._holder.worker_group._spares._workers
    said = await answers({seat: one.snapshot.remote() for seat, one in workers.items()}, 60)
    return {word.info.pid for word in said.values() if isinstance(word, WorkerSnapshot)}


async def spares_ready(session: cl.Session, number: int) -> None:
    give_up_at = time.monotonic() + 60
    while session.num_spares < number:
        assert time.monotonic() < give_up_at
        await asyncio.sleep(0.05)


async def has_ended(*pids: int) -> None:
    give_up_at = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < give_up_at
        await asyncio.sleep(0.05)
