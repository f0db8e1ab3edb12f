"""Uneven training that is interrupted, and goes on in the next run bit by bit alike."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
import torch

import chorusline as cl

SIZES = (60, 24)  # Samples by rank, as the epoch deals them: 15 and 6 batches of 4.
EPOCHS = 3


def train(
    ctx: cl.Context, kind: str, pause_s: float, stuck_at: int = -1, fail_at: int = -1
) -> dict[str, Any]:
    """Uneven training that takes its time; what it ends with, and the batches of this run."""

    def make() -> tuple[Any, Any]:
        torch.manual_seed(0)
        module = torch.nn.Sequential(
            torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7), torch.nn.Linear(7, 1)
        )
        model = cl.DistributedDataParallel(module.to(ctx.device))
        if kind == "zero":
            return model, cl.ZeroRedundancyOptimizer(model, torch.optim.AdamW, lr=1e-2)
        return model, torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)

    model, optim = ctx.keep("both", make)
    joined = [model, optim] if kind == "zero" else [model]
    along = [] if kind == "zero" else [optim]
    keys = [0] * SIZES[0] + [1] * SIZES[1]
    dataset = torch.randn(len(keys), 5, generator=torch.Generator().manual_seed(1))
    taken = 0
    for epoch in ctx.epochs(EPOCHS, resume="training"):
        with cl.Join(joined, step_along=along, skew_warning=None):
            for batch in ctx.shard(dataset, 4, epoch=epoch, keep_together=keys):
                if ctx.rank == 1 and taken == stuck_at:
                    time.sleep(3.5)
                if ctx.rank == 0 and taken == fail_at:
                    raise LookupError("a slip of the user's")
                model.weigh(model(batch.to(ctx.device)).square().mean(), len(batch)).backward()
                optim.step()
                optim.zero_grad()
                taken += 1
                time.sleep(pause_s)
    state = {name: value.cpu() for name, value in model.module.state_dict().items()}
    return {"state": state, "taken": taken, "generation": ctx.generation}


async def uninterrupted(session: cl.Session, kind: str) -> list[dict[str, Any]]:
    results = await session.run(train, kind=kind, pause_s=0.0)
    await session.run(lambda ctx: ctx.forget())
    return results


async def interrupted_after(session: cl.Session, wait_s: float, **arguments: Any) -> None:
    """wait_s: from the first step. A run that has taken no step does not stop after one."""
    running = asyncio.create_task(session.run(train, **arguments))
    while not all(
        one.rank is not None and one.status.taken > 0
        for one in (await session.snapshot()).workers
        if not isinstance(one, str)
    ):
        assert not running.done()
        await asyncio.sleep(0.02)
    await asyncio.sleep(wait_s)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


def assert_same(results: list[dict[str, Any]], reference: list[dict[str, Any]]) -> None:
    for result, expected in zip(results, reference, strict=True):
        for name, tensor in expected["state"].items():
            assert torch.equal(result["state"][name], tensor), name
