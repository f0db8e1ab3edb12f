"""Sessions where a program is more than one script: inside a Ray task, and two at once in one
asyncio program, of which one is cancelled or runs out of time. (Inside an actor of a placement
group: test_trials.py.)"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

import chorusline as cl
from tests.harness.programs import last_line_of

FEW = {"CPU": 0.1}


def train(ctx: cl.Context, learning_rate: float) -> list[float]:
    model = ctx.register("model", cl.DistributedDataParallel(torch.nn.Linear(1, 1, bias=False)))
    torch.nn.init.ones_(model.module.weight)
    optim = ctx.register(
        "optim", cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=learning_rate)
    )
    for _ in ctx.epochs(2):
        with cl.Join([model, optim]):
            for batch in ctx.shard(torch.ones(5, 1), 1):
                optim.zero_grad()
                model(batch).sum().backward()
                optim.step()
                ctx.report(weight=model.module.weight.item())
    return [p.item() for p in model.parameters()]


def go_on_for_ever(ctx: cl.Context) -> None:
    while True:
        ctx.barrier()
        ctx.report(alive=1.0)


def expected(learning_rate: float) -> list[float]:
    """Three steps an epoch, of which the last has one rank's gradient of two."""
    return [1.0 - 2 * 2.5 * learning_rate]


@pytest.mark.slow
def test_a_ray_task_may_run_a_session(cluster: None) -> None:
    @ray.remote(num_cpus=0.1)
    def task() -> Any:
        reports: list[float] = []
        results = cl.run(
            train,
            num_workers=2,
            resources_per_worker=FEW,
            on_report=lambda report: reports.append(report.values["weight"]),
            learning_rate=0.25,
        )
        return results, reports

    results, reports = ray.get(task.remote())
    assert results == [pytest.approx(expected(0.25))] * 2
    assert len(reports) == 10 and min(reports) == pytest.approx(expected(0.25)[0])


@pytest.mark.slow
async def test_two_sessions_at_once_do_not_notice_each_other(cluster: None) -> None:
    """While the one is cancelled, or its time is over, the other trains; and both go on."""
    is_alive = asyncio.Event()
    loop = asyncio.get_running_loop()

    def heard(report: Any) -> None:
        if "alive" in report.values:
            loop.call_soon_threadsafe(is_alive.set)

    first = cl.Session(2, resources_per_worker=FEW, on_report=heard)
    second = cl.Session(2, resources_per_worker=FEW)
    async with first, second:
        endless = asyncio.create_task(first.run(go_on_for_ever))
        await is_alive.wait()
        beside = asyncio.create_task(second.run(train, learning_rate=0.25))
        endless.cancel()
        with pytest.raises(asyncio.CancelledError):
            await endless
        assert await beside == [pytest.approx(expected(0.25))] * 2

        beside = asyncio.create_task(second.run(train, learning_rate=0.5))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(first.run(go_on_for_ever), 0.5)
        assert await beside == [pytest.approx(expected(0.5))] * 2

        both = await asyncio.gather(
            first.run(train, learning_rate=0.125), second.run(train, learning_rate=0.25)
        )
        assert both == [[pytest.approx(expected(rate))] * 2 for rate in (0.125, 0.25)]


IN_THREADS = """
import json, threading, time
import ray, chorusline as cl

def wait(ctx, s):
    time.sleep(s)
    return ctx.rank

def one(s):
    told[s] = cl.run(wait, s=s, num_workers=2, resources_per_worker={"CPU": 0.1})

told = {}
threads = [threading.Thread(target=one, args=(s,)) for s in (0, 3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(json.dumps([told[0], told[3], ray.is_initialized()]))
"""


@pytest.mark.slow
def test_sessions_that_begin_in_two_threads_share_a_cluster_and_the_last_one_stops_it(
    tmp_path: Path,
) -> None:
    program = tmp_path / "threads.py"
    program.write_text(IN_THREADS)
    assert last_line_of(program, timeout_s=110) == [[0, 1], [0, 1], False]


@pytest.mark.slow
async def test_a_service_runs_sessions_in_its_loop_and_in_its_threads(cluster: None) -> None:
    """As a service does: `cl.run` in threads of its executor, beside a session of its own whose run
    is cancelled or out of time; a thread is not disturbed by that, and its result is its own."""
    is_alive = asyncio.Event()
    loop = asyncio.get_running_loop()

    def in_thread(learning_rate: float) -> Any:
        return cl.run(train, num_workers=2, resources_per_worker=FEW, learning_rate=learning_rate)

    def heard(report: Any) -> None:
        loop.call_soon_threadsafe(is_alive.set)

    async with cl.Session(2, resources_per_worker=FEW, on_report=heard) as own:
        for ends_by in ("cancel", "time"):
            is_alive.clear()
            rates = (0.125, 0.25)
            threads = [asyncio.create_task(asyncio.to_thread(in_thread, rate)) for rate in rates]
            endless = asyncio.create_task(own.run(go_on_for_ever))
            await is_alive.wait()
            if ends_by == "cancel":
                endless.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await endless
            else:
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(endless, 0.5)
            results = await asyncio.gather(*threads, own.run(train, learning_rate=0.5))
            assert results == [[pytest.approx(expected(rate))] * 2 for rate in (*rates, 0.5)]
