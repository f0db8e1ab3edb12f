"""A driver that dies when it has told only some ranks of the next generation."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import ray
import torch

import chorusline as cl
from chorusline.actors.messages.messages import Resumption
from chorusline.actors.ray_calls.actor_store import ActorStore
from chorusline.actors.worker.current_run import CurrentRun
from chorusline.actors.worker.worker import Worker
from chorusline.collectives.contract.errors import CollectiveError
from chorusline.collectives.group import Group
from chorusline.runtime.program.context import call_of
from tests.harness.arrivals import FEW


def ends_the_driver_before_it_meets(ctx: cl.Context) -> None:
    """It has been told, and meets the others when it answers to the next driver."""
    recovery = call_of(ctx).recovery
    assert recovery is not None
    lifeline, connect = recovery._lifeline, recovery._lifeline.connect

    def connected() -> Group:
        lifeline.connect = connect  # type: ignore[method-assign]
        before = lifeline._driver
        ray.kill(before)
        while lifeline._driver is before:
            time.sleep(0.02)
        return connect()

    lifeline.connect = connected  # type: ignore[method-assign]


def does_not_hear_the_first_driver() -> None:
    continues_in = CurrentRun.continues_in

    def not_yet(run: CurrentRun, resumption: Resumption, store: ActorStore) -> bool:
        CurrentRun.continues_in = continues_in  # type: ignore[method-assign]
        return False

    CurrentRun.continues_in = not_yet  # type: ignore[method-assign]


def train(ctx: cl.Context) -> tuple[int, int, int, list[list[float]]]:
    torch.manual_seed(0)
    model = cl.DistributedDataParallel(torch.nn.Linear(4, 2))
    optim = cl.ZeroRedundancyOptimizer(model, torch.optim.AdamW, lr=0.1, replicas=2)
    if ctx.rank == 0:
        ends_the_driver_before_it_meets(ctx)
    if ctx.rank == 1:
        does_not_hear_the_first_driver()
    dies = ctx.rank == 2
    for _ in ctx.epochs(1):
        with cl.Join([model, optim]):
            for batch in ctx.shard(torch.arange(96.0).view(24, 4), 1):
                if dies and optim.num_steps == 2:
                    os.kill(os.getpid(), signal.SIGKILL)
                model(batch).square().mean().backward()
                optim.step()
                optim.zero_grad()
    return ctx.world_size, ctx.generation, optim.num_steps, model.module.weight.tolist()


async def test_ranks_that_two_drivers_have_told_meet_in_the_same_generation(
    cluster: None,
) -> None:
    async with cl.Session((1, 3), resources_per_worker=FEW, timeout_s=30) as session:
        first, second = await session.run(train)
    assert first == second
    assert first[:2] == (2, 1), "no further generation was needed"


def does_not_hear_the_first_driver_say_to_rest() -> None:
    # Ray makes a class of its own of it.
    [worker] = ray._private.worker.global_worker.actors.values()
    kind = type(worker)
    abort = kind._abort

    async def not_yet(self: Worker, run: int, error: CollectiveError) -> None:
        kind._abort = abort

    kind._abort = not_yet


def wait_until_all_are_there_again(ctx: cl.Context, folder: Path) -> tuple[int, int]:
    model = torch.nn.Linear(4, 2)
    for name, one in (
        ("model", cl.DistributedDataParallel(model)),
        ("optim", torch.optim.SGD(model.parameters())),
    ):
        ctx.register(name, one)
    if ctx.generation == 0:
        (folder / str(ctx.rank)).write_text(str(os.getpid()))
        if ctx.rank == 0:
            ends_the_driver_before_it_meets(ctx)
        if ctx.rank == 2:
            does_not_hear_the_first_driver_say_to_rest()
        ctx.barrier()
        if ctx.rank == 3:
            os.kill(os.getpid(), signal.SIGKILL)
    while ctx.generation == 0 or ctx.world_size < 4:
        ctx.barrier()
        time.sleep(0.05)
    return ctx.world_size, os.getpid()


async def test_a_rank_that_only_the_second_driver_tells_to_rest_comes_again(
    cluster: None, tmp_path: Path
) -> None:
    async with cl.Session(
        (2, 4), replica_size=2, resources_per_worker=FEW, timeout_s=30
    ) as session:
        told = await session.run(wait_until_all_are_there_again, folder=tmp_path)
    first = [int((tmp_path / str(rank)).read_text()) for rank in range(4)]
    assert [size for size, _ in told] == [4] * 4
    assert {*first} - {pid for _, pid in told} == {first[3]}, "nobody else was lost"
