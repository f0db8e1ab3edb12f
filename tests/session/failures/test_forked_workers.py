"""Workers that come after the first ones, in processes as users have them: forks of a server."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import ray
import torch

import chorusline as cl
from benchmarks.faults.chaos_outside import actors
from chorusline.actors.forking.command import forked
from tests.harness.forked_workers import STARTED_BY_RAY

_WITHIN_S = 30.0


@pytest.fixture
async def session(cluster: None) -> AsyncIterator[cl.Session]:
    async with cl.Session(2, timeout_s=30, env_vars=STARTED_BY_RAY) as session:
        yield session


def who(ctx: cl.Context, rows: torch.Tensor | None = None) -> dict[str, Any]:
    """Of the process of a rank."""
    parent = os.getppid()
    seen = {
        "pid": os.getpid(),
        "parent": parent,
        "is_forked": b"/actors/forking/serve.py" in Path(f"/proc/{parent}/cmdline").read_bytes(),
        "group": os.getpgid(0),
        "random": numpy.random.random(),
        "environment": {name: os.environ.get(name) for name in (*STARTED_BY_RAY, "MARK")},
        "threads": os.environ.get("OMP_NUM_THREADS"),
    }
    if rows is not None:
        address = rows.untyped_storage().data_ptr()
        for line in Path("/proc/self/maps").read_text().splitlines():
            begin, end = (int(part, 16) for part in line.split()[0].split("-"))
            if begin <= address < end:
                seen["mapping"] = line
    return seen


def in_a_task(ctx: cl.Context) -> bool:
    """Whether a task that a rank starts, which has its environment, is forked as well."""

    @ray.remote(num_cpus=0)
    def task() -> bool:
        return b"/actors/forking/serve.py" in Path(f"/proc/{os.getppid()}/cmdline").read_bytes()

    return bool(ray.get(task.remote()))


async def killed_and_replaced(session: cl.Session, pid: int, **arguments: Any) -> Any:
    os.kill(pid, signal.SIGKILL)
    return await session.run(who, **arguments)


async def test_a_later_worker_is_forked_and_differs_from_others_only_by_chance(
    session: cl.Session,
) -> None:
    first = await session.run(who)
    assert not any(one["is_forked"] for one in first)
    second = await killed_and_replaced(session, first[0]["pid"])
    assert [one["is_forked"] for one in second] == [True, False]
    rows = torch.zeros(200_000)
    third = await killed_and_replaced(session, second[1]["pid"], rows=rows)
    assert [one["is_forked"] for one in third] == [True, True]
    assert len({one["parent"] for one in third}) == 1
    assert len({one["random"] for one in third}) == 2
    # A signal to the group of one reaches no other.
    assert [one["group"] for one in third] == [one["pid"] for one in third]
    # They share the memory of arguments, as workers do that Ray has started.
    assert all(" rw-p " in one["mapping"] and "plasma" in one["mapping"] for one in third), third
    for name in ("environment", "threads"):
        assert [one[name] for one in third] == [one[name] for one in first]
    assert await session.run(in_a_task) == [False, False]
    # The kills from outside reach them (benchmarks/faults/chaos_outside.py).
    assert {one["pid"] for one in third} <= actors("ray::Worker")
    server = Path(f"/proc/{third[0]['parent']}")
    await session.close()
    give_up_at = time.monotonic() + _WITHIN_S
    while server.exists() and time.monotonic() < give_up_at:
        await asyncio.sleep(0.05)
    assert not server.exists()


async def test_a_rank_does_not_die_with_the_server(session: cl.Session) -> None:
    def train(ctx: cl.Context) -> tuple[int, float]:
        total = torch.zeros(1)
        for step in range(3):
            if ctx.rank == 0 and step == 1:
                os.kill(os.getppid(), signal.SIGKILL)
                time.sleep(1.0)
            total += 1
            ctx.group.all_reduce(total).wait()
        return os.getpid(), total.item()

    first = await session.run(who)
    second = await killed_and_replaced(session, first[0]["pid"])
    assert second[0]["is_forked"]
    (pid, total), (other, _) = await session.run(train)
    assert (pid, other, total) == (second[0]["pid"], second[1]["pid"], 14.0)
    # The next one has a server of its own.
    third = await killed_and_replaced(session, pid)
    assert third[0]["is_forked"]
    assert third[0]["parent"] != second[0]["parent"]


@pytest.mark.parametrize("name", ["py_executable", "pip", "image_uri"])
def test_who_brings_another_python_is_not_forked(cluster: None, name: str) -> None:
    environment = {name: "anything", "env_vars": {"A": "1"}}
    assert forked(environment, 1.0, ("torch",)) == environment
    del environment[name]
    assert forked(environment, 1.0, ("torch",)).keys() == {
        "env_vars",
        "py_executable",
    }
