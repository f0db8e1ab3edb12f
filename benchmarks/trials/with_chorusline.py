"""Chorusline's own ranks: zero|plain|steps SPARES WORKLOAD are its arguments."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", "0")

import ray
import torch
from ray import cloudpickle

import chorusline as cl
from benchmarks.trials import workload as workload_module
from benchmarks.trials.cluster import connect
from benchmarks.trials.workload import Ledger, Workload

cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(workload_module)


def train(ctx: cl.Context, way: str, workload: Workload) -> None:
    torch.set_num_threads(1)
    workload.log("process", ctx.rank)
    module = Ledger(workload.num_samples)
    model = cl.DistributedDataParallel(module)
    optim: Any
    if way == "plain":
        optim = torch.optim.SGD(module.groups())
    else:
        optim = cl.ZeroRedundancyOptimizer(module.groups(), torch.optim.SGD, lr=0.001, replicas=2)
    ctx.register("model", model)
    ctx.register("optim", optim)
    for epoch in ctx.epochs(1):
        if way == "steps":
            _steps(ctx, workload, model, optim, epoch)
        else:
            _shard(ctx, workload, model, optim, epoch)
    workload.finish(ctx.rank, module)


def _shard(ctx: cl.Context, workload: Workload, model: Any, optim: Any, epoch: int) -> None:
    is_plain = isinstance(optim, torch.optim.SGD)
    joined: list[Any] = [model] if is_plain else [model, optim]
    along: list[Any] = [optim] if is_plain else []
    with cl.Join(joined, divide_by_initial_world_size=False, step_along=along):
        for numbers in ctx.shard(range(workload.num_samples), workload.batch, epoch=epoch):
            workload.work(ctx.rank, model.module)
            model(numbers).backward()
            optim.step()
            optim.zero_grad()
            workload.log("step", ctx.rank, ctx.step)


def _steps(ctx: cl.Context, workload: Workload, model: Any, optim: Any, epoch: int) -> None:
    size, data = workload.batch, range(workload.num_samples)
    for step in ctx.steps(data, workload.global_batch, size, epoch=epoch):
        for numbers in step:
            workload.work(ctx.rank, model.module)
            model(numbers, scale=1 / len(numbers)).backward()
        optim.step()
        optim.zero_grad()
        workload.log("step", ctx.rank, ctx.step)


async def main() -> None:
    way, spares, workload = sys.argv[1], int(sys.argv[2]), Workload.of(sys.argv[3])
    number = workload.num_workers
    connect(number + 2)
    kept = cl.CheckpointConfig(workload.disk, num_to_keep=2, every_n_steps=workload.save_every)
    async with cl.Session(
        (1, number),
        spares=spares,
        max_failures=None,
        resources_per_worker={"CPU": 0.5},
        timeout_s=10.0,
        checkpoint=kept,
    ) as session:
        await session.run(train, way=way, workload=workload)
    ray.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
