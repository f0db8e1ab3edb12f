"""Spare workers: a lost worker's seat is taken by one that has started before."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import chorusline as cl
from chorusline.actors.driver.driver import Driver
from chorusline.actors.ray_calls.actor_store import STORE_CONCURRENCY
from chorusline.actors.ray_calls.calls import actor_class, answers
from chorusline.actors.worker_group.spare_workers import SpareWorkers
from tests.harness.arrivals import (
    FEW,
    at_full_size,
    has_ended,
    pids_of_spares,
    ready,
    spares_ready,
    train_until_stopped,
)

Told = tuple[int, int, torch.Tensor]
"""The pid, the number of ranks, and parameters."""


class NotesOpening:
    """An argument that notes which processes have opened the program."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Callable[[Path], None], tuple[Path]]:
        return opened, (self.folder,)


def opened(folder: Path) -> None:
    (folder / f"opened by {os.getpid()}").touch()


def train(ctx: cl.Context, folder: Path, dies: bool, opens: None = None) -> Told:
    """Six steps; with `dies`, rank 1 is killed before its fourth, when a spare worker is ready."""
    torch.manual_seed(0)
    model = cl.DistributedDataParallel(torch.nn.Linear(4, 2))
    optim = cl.ZeroRedundancyOptimizer(model, torch.optim.AdamW, lr=0.1, replicas=2)
    ctx.register("model", model)
    ctx.register("optim", optim)
    for _ in ctx.epochs(1):
        with cl.Join([model, optim]):
            for batch in ctx.shard(torch.arange(48.0).view(12, 4), 1, shuffle=False):
                if dies and optim.num_steps == 3 and ctx.generation == 0:
                    ready(folder / "has_spares")
                    if ctx.rank == 1:
                        os.kill(os.getpid(), signal.SIGKILL)
                model(batch).square().mean().backward()
                optim.step()
                optim.zero_grad()
                # In a file: the function runs again where the newcomer does not come in a step.
                (folder / f"step {optim.num_steps} sample {int(batch[0, 0]) // 4}").touch()
    return os.getpid(), ctx.world_size, model.module.weight.detach().clone()


async def test_a_spare_worker_takes_the_seat_of_a_lost_one(cluster: None, tmp_path: Path) -> None:
    # Two workers are the fewest: without a spare worker the run would wait for a new process.
    async with cl.Session(2, spares=1, max_failures=None, resources_per_worker=FEW) as session:
        assert session.num_spares == 0, "it is started beside the first run, not before it"
        opens: Any = NotesOpening(tmp_path)
        run = asyncio.create_task(session.run(train, folder=tmp_path, dies=True, opens=opens))
        await spares_ready(session, 1)
        waited = await pids_of_spares(session)
        opened_by = {int(path.name.split()[-1]) for path in tmp_path.glob("opened by *")}
        assert waited <= opened_by, "it has loaded the program while it waits"
        (tmp_path / "has_spares").touch()
        told = await run
        assert {pid for pid, *_ in told} & waited == waited, "it has taken the seat"
        assert [size for _, size, _ in told] == [2, 2]
        assert torch.equal(told[0][2], told[1][2])
        taken = [path.name.split()[1::2] for path in tmp_path.glob("step *")]
        assert sorted(int(sample) for _, sample in taken) == [*range(12)]
        samples = Counter(int(step) for step, _ in taken)
        sizes = [samples[step] for step in range(4, max(samples) + 1)]
        # Of the six samples that are left, rank 0 has one in hand. The fourth step is of this one
        # alone if rank 0 has voted before the newcomer is there, else of one sample of each.
        assert sizes in ([1, 2, 2, 1], [2, 2, 2])
        assert session.num_workers == 2


def rest(ctx: cl.Context, seconds: float) -> None:
    time.sleep(seconds)


@pytest.mark.timeout(240)  # A hundred runs, on a busy machine.
async def test_a_spare_worker_answers_after_a_hundred_runs(cluster: None, tmp_path: Path) -> None:
    """As many calls as a worker's control loop takes at a time."""
    async with cl.Session(2, spares=1, max_failures=None, resources_per_worker=FEW) as session:
        while not session.num_spares:
            await session.run(rest, seconds=0.5)
        waited = await pids_of_spares(session)
        for _ in range(110):
            await session.run(rest, seconds=0)
        (tmp_path / "has_spares").touch()
        told = await session.run(train, folder=tmp_path, dies=True)
    assert waited <= {pid for pid, _, _ in told}


async def test_a_spare_worker_takes_the_seat_in_the_next_run_if_a_loss_ends_this_one(
    cluster: None, tmp_path: Path
) -> None:
    async with cl.Session(2, spares=1, max_failures=0, resources_per_worker=FEW) as session:
        run = asyncio.create_task(session.run(train, folder=tmp_path, dies=True))
        await spares_ready(session, 1)
        waited = await pids_of_spares(session)
        (tmp_path / "has_spares").touch()
        with pytest.raises(cl.WorkerLost):
            await run
        assert waited < {*await a_look(session, tmp_path)}


class DriverThatBeginsLate(Driver):
    """Its calls of `run` come behind those that were sent after them."""

    async def run(self, *arguments: Any) -> Any:
        await asyncio.sleep(1)
        return await super().run(*arguments)


async def test_a_lost_worker_is_replaced_where_the_question_after_losses_overtook_the_run(
    cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = actor_class(DriverThatBeginsLate, concurrency_groups=STORE_CONCURRENCY, num_cpus=0)
    monkeypatch.setattr("chorusline.actors.worker_group.worker_group.driver_class", lambda: made)
    (tmp_path / "has_spares").touch()
    async with cl.Session((2, 2), max_failures=None, resources_per_worker=FEW) as session:
        told = await session.run(train, folder=tmp_path, dies=True)
        assert session.num_workers == 2
    assert [size for _, size, _ in told] == [2, 2]
    assert torch.equal(told[0][2], told[1][2])


async def a_look(session: cl.Session, folder: Path) -> list[int]:
    return [pid for pid, *_ in await session.run(train, folder=folder, dies=False)]


@pytest.mark.slow
async def test_spare_workers_are_replaced_also_between_runs_and_leave_nothing_behind(
    cluster: None, tmp_path: Path
) -> None:
    def wait(ctx: cl.Context, folder: Path) -> None:
        ctx.register("nothing", cl.RandomState())
        ready(folder / "go_on")

    async with cl.Session(2, spares=2, max_failures=None, resources_per_worker=FEW) as session:
        run = asyncio.create_task(session.run(wait, folder=tmp_path))
        await spares_ready(session, 2)
        first = await pids_of_spares(session)
        for pid in first:  # The spare workers die: others take their places.
            os.kill(pid, signal.SIGKILL)
        give_up_at = time.monotonic() + 60
        while len(await pids_of_spares(session) - first) < 2:
            assert time.monotonic() < give_up_at
            await asyncio.sleep(0.2)
        await spares_ready(session, 2)
        (tmp_path / "go_on").touch()
        await run

        waiting = await pids_of_spares(session)
        before = await a_look(session, tmp_path)
        assert not waiting & set(before)
        os.kill(before[0], signal.SIGKILL)
        await has_ended(before[0])
        began_at = time.monotonic()
        after = await a_look(session, tmp_path)
        assert after[1] == before[1] and after[0] in waiting, "one of them has sat down"
        assert time.monotonic() - began_at < 20
        everybody = {*after, *await pids_of_spares(session)}
    await has_ended(*everybody)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"spares": -1, "max_failures": None}, "spares must be a number of workers, .* got -1"),
        ({"spares": 1.0, "max_failures": None}, r"got 1\.0"),
        ({"spares": 1}, "would wait for nothing: max_failures is 0"),
        (
            {"spares": 1, "max_failures": 2, "placement_strategy": "STRICT_PACK"},
            "use 'PACK'",
        ),
    ],
)
def test_spare_workers_that_could_never_help_are_refused(
    options: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        cl.Session(2, **options)
    with pytest.raises(ValueError, match=says):
        cl.run(train, num_workers=2, **options)


@pytest.mark.slow
@pytest.mark.parametrize("who", ["two", "the newcomer", "the spare", "one in the swap"])
async def test_kills_around_a_swap_never_cost_a_deadline(
    cluster: None, tmp_path: Path, who: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sit = SpareWorkers._seat_worker
    swapping: list[int] = []  # pids to be killed when a worker sits down
    newcomers: list[int] = []

    async def sit_and_die(self: SpareWorkers, worker: Any, seat: int, node_id: str) -> None:
        newcomers.append((await answers({0: worker.snapshot.remote()}, 10))[0].info.pid)
        while swapping:
            os.kill(swapping.pop(), signal.SIGKILL)
        await sit(self, worker, seat, node_id)

    monkeypatch.setattr(SpareWorkers, "_seat_worker", sit_and_die)
    draw = random.Random(0)
    async with cl.Session((1, 4), spares=1, resources_per_worker=FEW) as session:
        run = asyncio.create_task(session.run(train_until_stopped, folder=tmp_path))
        for _ in range(3):
            there = sorted(await at_full_size(tmp_path, 4, run, within_s=50))
            await spares_ready(session, 1)
            first, second = draw.sample(there, 2)
            if who == "one in the swap":
                swapping.append(second)
            if who == "the spare":
                os.kill(min(await pids_of_spares(session)), signal.SIGKILL)
            await asyncio.sleep(draw.random() * 0.05)
            for pid in (first, second) if who == "two" else (first,):
                os.kill(pid, signal.SIGKILL)
            if who == "the newcomer":
                newcomers.clear()
                while not newcomers:
                    await asyncio.sleep(0.005)
                await asyncio.sleep(draw.random() * 0.2)
                os.kill(newcomers[0], signal.SIGKILL)
            for path in tmp_path.glob("[0-9]*"):
                path.unlink()
        await at_full_size(tmp_path, 4, run, within_s=50)
        (tmp_path / "stop").touch()
        told = await run
    assert {size for size, _, _ in told} == {4}
    assert all(torch.equal(told[0][2], weight) for _, _, weight in told)
