"""A program in which Ray's memory monitor kills an actor, or a worker of a session; it prints what
the others are told.

python -m tests.references.low_memory actor|session
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ["RAY_AUTH_MODE"] = "disabled"
os.environ["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"] = "0"

import ray
import torch

import chorusline as cl
from chorusline.actors.ray_calls.calls import ActorGone, actor_class, answer

MB = 2**20
LIMIT = 4096 * MB  # of the group of processes in which `session` runs (tests/harness)
KILLS_FROM, NEEDED = 0.75, 0.85  # parts of it


def with_ray(threshold: float, num_cpus: int) -> None:
    ray.init(
        address="local",
        num_cpus=num_cpus,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=80 * MB,
        _system_config={"memory_usage_threshold": threshold, "memory_monitor_refresh_ms": 100},
    )


class Waiting:
    def wait(self) -> None:
        time.sleep(60)


def actor() -> str:
    """On a node whose memory is full from the beginning."""
    with_ray(0.001, num_cpus=1)

    async def told() -> str:
        try:
            await answer(actor_class(Waiting).remote().wait.remote())
        except ActorGone as gone:
            return gone.detail
        raise AssertionError("it was not killed")

    return asyncio.run(told())


def memory_used() -> int:
    group = Path("/sys/fs/cgroup")
    files = group / "memory/memory.usage_in_bytes", group / "memory.current"
    return int(next(file for file in files if file.exists()).read_text())


def fill_memory() -> None:
    """Beyond what the monitor allows; it looks ten times a second."""
    held = []
    while memory_used() < NEEDED * LIMIT:
        held.append(torch.ones(16 * MB))
    time.sleep(60)


def train(ctx: cl.Context, hog: int, fill: Callable[[], None]) -> tuple[int, int, list[float]]:
    """Ten steps over numbers that all ranks share. hog: the process that fills its memory before
    the fourth."""
    torch.manual_seed(0)
    model = cl.DistributedDataParallel(torch.nn.Linear(3, 1))
    optim = cl.ZeroRedundancyOptimizer(model, torch.optim.Adam, lr=0.1, replicas=3)
    while optim.num_steps < 10:
        optim.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        if optim.num_steps == 3 and os.getpid() == hog:
            fill()
        optim.step()
    return os.getpid(), optim.num_steps, model.module.weight.detach().flatten().tolist()


def steps_of_one_process() -> list[float]:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optim = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(10):
        optim.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        optim.step()
    return model.weight.detach().flatten().tolist()


def session() -> tuple[int, list[tuple[int, int, list[float]]]]:
    """The process that was killed, and what the survivors end with."""
    with_ray(KILLS_FROM, num_cpus=3)

    async def runs() -> tuple[int, list[tuple[int, int, list[float]]]]:
        async with cl.Session((1, 3), timeout_s=40) as session:
            # Ray kills the youngest first, and others until there is memory enough.
            hog = max(await session.run(lambda ctx: os.getpid()))
            return hog, await session.run(train, hog=hog, fill=fill_memory)

    return asyncio.run(runs())


if __name__ == "__main__":
    print(json.dumps(session() if sys.argv[1] == "session" else actor()))
    ray.shutdown()
