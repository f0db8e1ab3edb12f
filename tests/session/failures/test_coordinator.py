"""The coordinator is lost: the driver alone, with workers, or in a save; the head; the session."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ray
import torch

import chorusline as cl
from chorusline.actors.messages.messages import MemberState

FEW = {"CPU": 0.2}


def processes(session: cl.Session) -> dict[str, int]:
    """Pids of the session's actors: of the driver, and of the workers by seat."""
    assert session._holder.worker_group is not None
    workers = {str(seat): worker for seat, worker in session._holder.worker_group._workers.items()}
    return {
        name: ray.get(actor.__ray_call__.remote(lambda _: os.getpid()))
        for name, actor in {"driver": session._holder.worker_group._driver, **workers}.items()
    }


async def test_a_run_whose_driver_and_workers_have_all_died_is_not_begun_again(
    cluster: None, tmp_path: Path
) -> None:
    def train(ctx: cl.Context) -> int:
        (tmp_path / f"{ctx.rank}-{os.getpid()}").touch()
        time.sleep(3)
        return os.getpid()

    async with cl.Session(2, resources_per_worker=FEW, timeout_s=20) as session:
        await session.run(lambda ctx: None)
        pids = processes(session)
        running = asyncio.create_task(session.run(train))
        while len(list(tmp_path.iterdir())) < 2:
            await asyncio.sleep(0.05)
        for pid in pids.values():
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(cl.DriverLost, match="no process is left that knows how far"):
            await running
        assert len(list(tmp_path.iterdir())) == 2, "no function was called again"
        assert not set(await session.run(train)) & set(pids.values())


async def test_all_reports_arrive_of_a_run_that_ends_while_a_worker_starts(cluster: None) -> None:
    def train(ctx: cl.Context) -> None:
        if ctx.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        for number in range(40):
            ctx.report(number=number)
            time.sleep(0.02)

    heard = []
    session = cl.Session((1, 2), resources_per_worker=FEW, timeout_s=20, on_report=heard.append)
    async with session:
        assert session.num_workers == 2
        assert await session.run(train) == [None]
    assert [report.values["number"] for report in heard if report.rank == 0] == list(range(40))


def one_epoch(
    ctx: cl.Context,
    model: cl.DistributedDataParallel,
    optim: torch.optim.Optimizer,
    epoch: int,
    folder: str,
) -> None:
    """Each rank that has taken a step has a file in the folder, named by its process."""
    with cl.Join([model], step_along=[optim]):
        for batch in ctx.shard(torch.ones(8, 1), 1, epoch=epoch):
            model(batch).sum().backward()
            optim.step()
            optim.zero_grad()
            (Path(folder) / str(os.getpid())).touch()
            time.sleep(0.02)


def train_until_two(ctx: cl.Context, folder: str) -> int:
    """On one rank, and then on two."""
    model = ctx.register("model", cl.DistributedDataParallel(torch.nn.Linear(1, 1)))
    optim = ctx.register("optim", torch.optim.SGD(model.parameters(), lr=0.1))
    for epoch in ctx.epochs(1000):
        one_epoch(ctx, model, optim, epoch, folder)
        if ctx.world_size == 2 and epoch > 3:
            break
    return ctx.world_size


@pytest.mark.slow
async def test_a_worker_that_starts_while_the_driver_dies_gets_into_the_run(
    cluster: None, tmp_path: Path
) -> None:
    async with cl.Session((1, 2), resources_per_worker=FEW, timeout_s=20) as session:
        pids = processes(session)
        running = asyncio.create_task(session.run(train_until_two, folder=str(tmp_path)))
        while len(list(tmp_path.iterdir())) < 2:
            await asyncio.sleep(0.05)
        os.kill(pids["1"], signal.SIGKILL)
        assert session._holder.worker_group is not None
        while not session._holder.worker_group._starting:  # Another one, in its place.
            await asyncio.sleep(0.01)
        os.kill(pids["driver"], signal.SIGKILL)
        async with asyncio.timeout(40):
            assert await running == [2, 2]


@pytest.mark.slow
async def test_a_worker_that_is_stopped_as_the_driver_dies_is_replaced(
    cluster: None, tmp_path: Path
) -> None:
    """The new driver continues without it, and nothing else would ever end it: its own driver is
    dead. Two workers are the fewest, so the run waits for the one in its place."""
    async with cl.Session(
        2, max_failures=1, resources_per_worker=FEW, timeout_s=20, startup_timeout_s=30
    ) as session:
        pids = processes(session)
        running = asyncio.create_task(session.run(train_until_two, folder=str(tmp_path)))
        while len(list(tmp_path.iterdir())) < 2:
            await asyncio.sleep(0.05)
        os.kill(pids["1"], signal.SIGSTOP)
        try:
            os.kill(pids["driver"], signal.SIGKILL)
            async with asyncio.timeout(60):
                assert await running == [2, 2]
            assert processes(session)["0"] == pids["0"]
            assert not Path(f"/proc/{pids['1']}").exists()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pids["1"], signal.SIGCONT)


def keeps_newcomers_waiting(ctx: cl.Context, folder: str) -> int:
    """When it is alone, by a model that it does not register."""
    model = ctx.register("model", cl.DistributedDataParallel(torch.nn.Linear(1, 1)))
    optim = ctx.register("optim", torch.optim.SGD(model.parameters(), lr=0.1))
    unregistered = None
    for epoch in ctx.epochs(1000):
        may_come = (Path(folder) / "may come").exists()
        if ctx.world_size == 1 and not may_come:
            unregistered = unregistered or cl.DistributedDataParallel(torch.nn.Linear(1, 1))
        else:
            unregistered = None
        one_epoch(ctx, model, optim, epoch, folder)
        if ctx.world_size == 2 and may_come:
            break
    return ctx.world_size


@pytest.mark.slow
async def test_a_worker_that_dies_before_it_has_a_rank_is_replaced_and_no_loss(
    cluster: None, tmp_path: Path
) -> None:
    async def newcomer(but: int = 0) -> int:
        """The pid of the worker that waits for a rank. but: of another one."""
        worker_group = session._holder.worker_group
        assert worker_group is not None and worker_group._driver is not None
        while True:
            assert not running.done()
            members = (await worker_group._driver.snapshot.remote()).members
            for one, state in members:
                if state is MemberState.READY and one.pid != but:
                    return one.pid
            await asyncio.sleep(0.1)

    async with cl.Session(
        (1, 2), max_failures=1, resources_per_worker=FEW, timeout_s=20
    ) as session:
        pids = processes(session)
        running = asyncio.create_task(session.run(keeps_newcomers_waiting, folder=str(tmp_path)))
        while len(list(tmp_path.iterdir())) < 2:
            await asyncio.sleep(0.05)
        os.kill(pids["1"], signal.SIGKILL)
        first = await newcomer()
        os.kill(first, signal.SIGKILL)
        async with asyncio.timeout(40):
            await newcomer(but=first)
        (tmp_path / "may come").touch()
        assert await running == [2, 2]


def save_often(ctx: cl.Context) -> int:
    model = ctx.register("model", cl.DistributedDataParallel(torch.nn.Linear(64, 64)))
    optim = ctx.register("optim", cl.ZeroRedundancyOptimizer(model, torch.optim.Adam, lr=0.1))
    for epoch in ctx.epochs(1):
        with cl.Join([model, optim]):
            for batch in ctx.shard(torch.ones(120, 64), 1, epoch=epoch):
                model(batch).sum().backward()
                optim.step()
                optim.zero_grad()
                time.sleep(0.1)
    return ctx.step


@pytest.mark.slow
async def test_drivers_that_die_during_saves_cost_neither_the_run_nor_the_checkpoint(
    cluster: None, tmp_path: Path
) -> None:
    config = cl.CheckpointConfig(tmp_path, every_n_steps=1, num_to_keep=2)
    async with cl.Session(2, resources_per_worker=FEW, timeout_s=20, checkpoint=config) as session:
        running = asyncio.create_task(session.run(save_often))
        worker_group, killed = session._holder.worker_group, set()
        assert worker_group is not None
        while not list(tmp_path.glob("step-*")):
            await asyncio.sleep(0.1)
        while not running.done() and len(killed) < 3:
            await asyncio.sleep(1.5)
            if worker_group._driver is not None and worker_group._driver not in killed:
                killed.add(worker_group._driver)
                ray.kill(worker_group._driver)
        assert await running == [60, 60]
        assert len(killed) == 3
    newest = max(tmp_path.glob("step-*"))
    assert newest.name.startswith("step-00000060") and (newest / "chorusline.json").exists()


def slow_to_go_back(ctx: cl.Context, folder: str) -> tuple[int, float]:
    """When it has gone back to a checkpoint, it is long before its first step."""
    model = ctx.register("model", cl.DistributedDataParallel(torch.nn.Linear(64, 1).double()))
    optim = ctx.register("optim", cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.001))
    if ctx.resumed_from:
        (Path(folder) / f"back-{os.getpid()}").touch()
        while not (Path(folder) / "a third has come").exists():
            time.sleep(0.1)
        time.sleep(3)
    for epoch in ctx.epochs(2):
        with cl.Join([model, optim]):
            for batch in ctx.shard(torch.ones(80, 64).double(), 1, epoch=epoch):
                model(batch).sum().backward()
                optim.step()
                optim.zero_grad()
                time.sleep(0.1)
                if ctx.rank == 1 and ctx.step == 12 and not list(Path(folder).glob("back-*")):
                    os.kill(os.getpid(), signal.SIGKILL)
    return ctx.world_size, float(next(model.parameters())[0, 0])


@pytest.mark.slow
async def test_a_worker_that_comes_when_a_run_has_gone_back_to_a_checkpoint_gets_into_it(
    cluster: None, tmp_path: Path
) -> None:
    config = cl.CheckpointConfig(tmp_path / "saved", every_n_steps=4)
    async with cl.Session(
        (1, 3), resources_per_worker=FEW, timeout_s=30, checkpoint=config
    ) as session:
        running = asyncio.create_task(session.run(slow_to_go_back, folder=str(tmp_path)))
        while not list(tmp_path.glob("back-*")) or session.num_workers < 3:
            assert not running.done(), running.result()
            await asyncio.sleep(0.1)
        (tmp_path / "a third has come").touch()
        told = await running
    assert len(told) == 3 and {one[0] for one in told} == {3}
    assert len(set(told)) == 1


LEAVES = """
import asyncio, json, os, signal, subprocess, sys, time
import ray
import chorusline as cl

def train(ctx):
    ctx.report(began=1)
    time.sleep(100)

def begun(report):
    global killed_at
    loop, killed_at = asyncio.get_running_loop(), time.monotonic()
    if report.rank == 0 and sys.argv[1] == "group":
        loop.call_later(0.1, os.killpg, 0, signal.SIGTERM)
    elif report.rank == 0:
        processes = ray._private.worker._global_node.all_processes["gcs_server"]
        loop.call_later(0.1, os.kill, processes[0].process.pid, signal.SIGKILL)

async def main():
    async with cl.Session(2, on_report=begun) as session:
        try:
            await session.run(train)
        except BaseException as error:
            print(type(error).__name__, error, flush=True)
            raise

try:
    asyncio.run(main())
finally:
    print("over", time.monotonic() - killed_at, flush=True)
"""


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("what", "said", "within_s"), [("group", "CancelledError", 40), ("head", "HeadLost", 75)]
)
def test_a_session_ends_without_its_cluster(what: str, said: str, within_s: float) -> None:
    """SIGTERM to the process group, as `timeout` sends it, takes Ray's processes along; or the head
    dies by itself."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", LEAVES, what],
        start_new_session=True,
        capture_output=True,
        text=True,
        env=environment,
        check=False,
        timeout=220,
    )
    lines = done.stdout.splitlines()
    assert any(line.startswith(said) for line in lines), done.stdout + done.stderr
    (over,) = [line for line in lines if line.startswith("over")]
    assert float(over.split()[1]) < within_s, done.stdout + done.stderr
