"""Workers that are told to end (SIGTERM) leave first: nothing is lost, also without replicas."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import chorusline as cl
from chorusline.actors.errors import StateLost
from chorusline.runtime.program.context import call_of
from chorusline.runtime.zero.zero_redundancy_optimizer import optimizer_engine_of
from tests.harness.arrivals import FEW
from tests.references.killed_runs import Kind, assert_as_if_nothing_was, die, train, wrap


def slowly(
    told_at: int = -1, then: Callable[[Any], None] = lambda optim: None
) -> Callable[[cl.Context, Any], None]:
    """Steps that take a while; the process is told to end when it has taken `told_at` of them."""

    def act(ctx: cl.Context, optim: Any) -> None:
        step = optim.step

        def stepped(*args: Any) -> Any:
            if optimizer_engine_of(optim).progress.ballots == told_at:
                os.kill(os.getpid(), signal.SIGTERM)
                then(optim)
                time.sleep(2.0)  # The driver hears of it in this epoch, also on a busy machine.
            time.sleep(0.1)
            return step(*args)

        optim.step = stepped

    return act


KINDS = {
    "AdamW": Kind(replicas=1, num_epochs=3),
    "SGD with momentum, many buckets": Kind(
        torch.optim.SGD,
        {"lr": 0.05, "momentum": 0.9},
        replicas=1,
        bucket_cap_mb=0.001,
        num_epochs=3,
    ),
    "bfloat16 and masters": Kind(dtype=torch.bfloat16, replicas=1, num_epochs=3),
    "accumulation": Kind(accumulate=2, replicas=1, num_epochs=4),
    "two replicas": Kind(num_epochs=3),
}


@pytest.mark.promise("a worker that receives SIGTERM, a node that is drained")
@pytest.mark.parametrize(
    ("name", "leaver"),
    [
        pytest.param(name, i % 3, marks=[pytest.mark.slow] if i else [], id=name)
        for i, name in enumerate(KINDS)
    ],
)
async def test_a_worker_that_is_told_to_end_hands_over_what_it_keeps_and_leaves(
    session: cl.Session, tmp_path: Path, name: str, leaver: int
) -> None:
    kind = KINDS[name]
    told_at = 2 - kind.accumulate  # An epoch has fewer steps then, and it leaves in the first one.
    acts = {seat: slowly(told_at if seat == leaver else -1) for seat in range(3)}
    victims = {leaver: (-1, "")}
    told = await session.run(train, kind=kind, folder=str(tmp_path), victims=victims, acts=acts)
    assert {one.world_size for one in told} == {2}
    assert_as_if_nothing_was(kind, str(tmp_path), told, victims)


def dies_handing_over(is_done: bool) -> Callable[[cl.Context, Any], None]:
    leaves = slowly(1)

    def act(ctx: cl.Context, optim: Any) -> None:
        leaves(ctx, optim)
        wrap(
            call_of(ctx).recovery.in_place,
            "hand_over",
            first=None if is_done else die,
            then=die if is_done else None,
        )

    return act


@pytest.mark.slow
async def test_a_worker_that_dies_when_it_has_handed_over_has_left_nothing_to_lose(
    session: cl.Session, tmp_path: Path
) -> None:
    kind = KINDS["AdamW"]
    acts = {0: slowly(), 1: dies_handing_over(is_done=True), 2: slowly()}
    victims = {1: (-1, "")}
    told = await session.run(train, kind=kind, folder=str(tmp_path), victims=victims, acts=acts)
    assert {one.world_size for one in told} == {2}
    assert_as_if_nothing_was(kind, str(tmp_path), told, victims)


@pytest.mark.slow
async def test_a_worker_that_dies_before_it_has_handed_over_takes_its_shard_along(
    session: cl.Session, tmp_path: Path
) -> None:
    acts = {0: slowly(), 1: dies_handing_over(is_done=False), 2: slowly()}
    with pytest.raises(StateLost, match="no rank holds bucket"):
        await session.run(
            train, kind=KINDS["AdamW"], folder=str(tmp_path), victims={1: (-1, "")}, acts=acts
        )


def told_late(ctx: cl.Context, told_at: int, num_steps: int) -> tuple[int, int]:
    """It registers nothing, and ends with a collective of its own, which cannot be repeated."""
    model = cl.DistributedDataParallel(torch.nn.Linear(1, 1))
    optim = cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.01, replicas=2)
    rows = torch.ones(6 * num_steps, 1)
    for step in ctx.steps(rows, 6, 1, epoch=0):
        if (ctx.rank, step.number, ctx.world_size) == (1, told_at, 3):
            os.kill(os.getpid(), signal.SIGTERM)
        for batch in step:
            model(batch).sum().backward()
        optim.step()
        optim.zero_grad()
    time.sleep(0.5)  # By then the notice is heard.
    optim.consolidate_state_dict(0)
    return optim.num_steps, ctx.world_size


@pytest.mark.parametrize(
    ("told_at", "num_steps", "world_size"),
    [pytest.param(7, 8, 3, id="in the last step"), pytest.param(3, 500, 2, id="in quick steps")],
)
async def test_a_worker_that_is_told_to_end_leaves_before_a_step_and_not_behind_the_last(
    session: cl.Session, told_at: int, num_steps: int, world_size: int
) -> None:
    told = await session.run(told_late, told_at=told_at, num_steps=num_steps)
    assert told == [(num_steps, world_size)] * world_size


def steps_after_its_loop(ctx: cl.Context, told: Path) -> int:
    """Rank 1 is told to end inside the loop that accumulates the gradients of the second step."""
    model = ctx.register("model", cl.DistributedDataParallel(torch.nn.Linear(1, 1)))
    optim = cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.01)
    ctx.register("optim", optim)
    for epoch in ctx.epochs(3):
        for number, batch in enumerate(ctx.shard(torch.ones(24, 1), 2, epoch=epoch)):
            if (ctx.rank, epoch, number) == (1, 1, 0) and not told.exists():
                told.write_text(str(os.getpid()))
                os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.2)  # The notice is heard in the loop, and comes again in the next one.
            with model.no_sync():
                model(batch).sum().backward()
        model(torch.ones(1, 1)).sum().backward()
        optim.step()
        optim.zero_grad()
    return os.getpid()


async def test_a_step_after_its_loop_hands_over_what_has_no_copy(
    session: cl.Session, tmp_path: Path
) -> None:
    pids = await session.run(steps_after_its_loop, told=tmp_path / "told")
    assert int((tmp_path / "told").read_text()) not in pids


def told_in_the_last_step(ctx: cl.Context, folder: Path) -> tuple[int, int]:
    """It can begin again, and only the rank that leaves has its shard."""
    with (folder / f"{ctx.rank}").open("a") as beginnings:
        beginnings.write("begun ")
    model = ctx.register("model", cl.DistributedDataParallel(torch.nn.Linear(1, 1)))
    optim = cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.01)
    ctx.register("optim", optim)
    for step in ctx.steps(torch.ones(18, 1), 6, 1, epoch=0):
        if (ctx.rank, step.number) == (1, 2):
            os.kill(os.getpid(), signal.SIGTERM)
        for batch in step:
            model(batch).sum().backward()
        optim.step()
        optim.zero_grad()
    time.sleep(1.5)  # By then it was told three times.
    optim.consolidate_state_dict(0)
    return optim.num_steps, ctx.world_size


async def test_a_notice_does_not_begin_a_function_again_that_has_no_step_left_to_hand_over_in(
    session: cl.Session, tmp_path: Path
) -> None:
    assert await session.run(told_in_the_last_step, folder=tmp_path) == [(3, 3)] * 3
    assert [(tmp_path / f"{rank}").read_text() for rank in range(3)] == ["begun "] * 3


HEARING = """
import os, signal, sys, threading
from chorusline.actors.worker.sigterm import watch_sigterm
heard = threading.Event()
watch_sigterm(heard.set)
read, write = os.pipe()
child = os.fork()
if not child:
    os.write(write, b"ready")
    signal.pause()
os.read(read, 5)
os.kill(child, signal.SIGTERM)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
assert not heard.is_set()
os.kill(os.getpid(), signal.SIGTERM)
assert heard.wait(10)
os.kill(os.getpid(), signal.SIGTERM)  # Told once.
assert signal.getitimer(signal.ITIMER_REAL) == (0, 0), "it does not end by itself"
"""


def told_by_the_worker_that_comes(ctx: cl.Context, folder: Path) -> int:
    """Rank 1 is lost. The first worker that comes tells rank 0 to end when it has made its
    optimizer, and before it has any state of it."""
    model = ctx.register("model", cl.DistributedDataParallel(torch.nn.Linear(1, 1)))
    optim = cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.01, momentum=0.9, replicas=2)
    if (ctx.generation, ctx.rank) == (0, 0):
        (folder / "last").write_text(str(os.getpid()))
    ctx.group.barrier().wait()
    last = int((folder / "last").read_text())
    if ctx.generation > 0 and os.getpid() != last and not (folder / "told").exists():
        os.kill(last, signal.SIGTERM)
        (folder / "told").touch()
        time.sleep(2.0)  # By then rank 0 has asked several times whether it may leave.
    ctx.register("optim", optim)
    for _ in ctx.epochs(1):
        with cl.Join([model, optim]):
            for numbers in ctx.shard(range(300), 1):
                if (ctx.generation, ctx.rank, optim.num_steps) == (0, 1, 2):
                    die()
                if is_alive(last):
                    time.sleep(0.1)
                (folder / f"latest of {os.getpid()}").write_text(str(int(numbers)))
                model(numbers.float()[:, None]).sum().backward()
                optim.step()
                optim.zero_grad()
                (folder / f"sample {int(numbers)} of {os.getpid()}").touch()
    return os.getpid()


@pytest.mark.slow
async def test_the_last_worker_with_state_leaves_only_when_another_one_has_it(
    cluster: None, tmp_path: Path
) -> None:
    async with cl.Session((1, 2), resources_per_worker=FEW) as session:
        pids = await session.run(told_by_the_worker_that_comes, folder=tmp_path)
    last = int((tmp_path / "last").read_text())
    assert last not in pids
    taken = [int(path.name.split()[1]) for path in tmp_path.glob("sample *")]
    # The last step of the worker that leaves may count; what the body does after it is not run.
    left_in = {int((tmp_path / f"latest of {last}").read_text())}
    assert len(set(taken)) == len(taken)
    assert {*range(300)} - left_in <= {*taken} <= {*range(300)}


def test_sigterm_is_heard_by_the_process_and_ends_those_that_it_has_forked() -> None:
    done = subprocess.run([sys.executable, "-c", HEARING], timeout=60, check=False)
    assert done.returncode == 0


def pid_of(ctx: cl.Context) -> int:
    return os.getpid()


@pytest.mark.slow
async def test_an_idle_worker_that_is_told_to_end_does_so_and_the_others_stay(
    session: cl.Session,
) -> None:
    before = await session.run(pid_of)
    os.kill(before[1], signal.SIGTERM)
    deadline = time.monotonic() + 20
    while is_alive(before[1]) and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    assert not is_alive(before[1])
    after = await session.run(pid_of)
    assert before[1] not in after and {before[0], before[2]} <= set(after)
    assert len(await session.run(pid_of)) == 3


def is_alive(pid: int) -> bool:
    """Not one that its parent has only to bury yet."""
    status = Path(f"/proc/{pid}/status")
    return status.exists() and "State:\tZ" not in status.read_text()
