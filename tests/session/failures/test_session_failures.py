"""Ranks, workers and drivers that fail: what the caller is told, and how soon others are free."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import pytest
import ray

from chorusline.actors.errors import RankFailed, WorkerLost
from chorusline.actors.messages.messages import WorkerSnapshot, WorkerState
from chorusline.actors.worker_group import worker_group
from chorusline.collectives.contract.errors import CollectiveMismatch, GroupAborted, PeerLost
from chorusline.runtime.program.context import Context
from chorusline.runtime.session.session import Session
from tests.harness.sessions import WITHIN_S, assert_usable, blocked_by_others


@pytest.mark.promise("an exception in your function")
async def test_an_exception_reaches_the_caller_as_itself_while_others_block(
    session: Session,
) -> None:
    class OutOfCheese(Exception):
        def __init__(self, left: int, detail: str) -> None:
            super().__init__(left, detail)
            self.left = left

    def train(ctx: Context) -> None:
        if ctx.rank == 1:
            ctx.barrier()
            raise OutOfCheese(3, "the shop is closed")
        blocked_by_others(ctx)

    began_at = time.monotonic()
    with pytest.raises(OutOfCheese, match="the shop is closed") as caught:
        await session.run(train)
    assert time.monotonic() - began_at < WITHIN_S
    assert caught.value.left == 3
    (note,) = caught.value.__notes__
    assert "raised by rank 1 of 2 in generation" in note
    shown = "".join(traceback.format_exception(caught.value))
    assert 'raise OutOfCheese(3, "the shop is closed")' in shown
    assert "training_thread.py" not in shown, "the traceback begins in the user's function"
    await assert_usable(session)


async def test_an_exception_frees_async_functions_that_wait_for_something_else(
    session: Session,
) -> None:
    async def train(ctx: Context) -> None:
        if ctx.rank == 0:
            raise KeyError("missing")
        await asyncio.Event().wait()

    began_at = time.monotonic()
    with pytest.raises(KeyError, match="missing") as caught:
        await session.run(train)
    assert time.monotonic() - began_at < WITHIN_S
    assert all("did not stop" not in note for note in caught.value.__notes__)
    await assert_usable(session)


async def test_a_wrapped_echo_does_not_hide_the_cause(session: Session) -> None:
    def train(ctx: Context) -> None:
        if ctx.rank == 1:
            time.sleep(0.2)
            raise ValueError("the cause")
        try:
            blocked_by_others(ctx)
        except GroupAborted as error:
            raise RuntimeError("training failed") from error

    with pytest.raises(ValueError, match="the cause"):
        await session.run(train)


async def test_an_exception_before_the_ranks_have_met_frees_the_others(session: Session) -> None:
    class Bomb:
        """Goes off where it is unpickled, on the rank that comes first."""

        def __reduce__(self) -> Any:
            return explode, ()

    def explode() -> None:
        raise ImportError("no module named bomb")

    began_at = time.monotonic()
    with pytest.raises(ImportError, match="no module named bomb"):
        await session.run(lambda ctx, bomb: None, bomb=Bomb())
    assert time.monotonic() - began_at < WITHIN_S
    await assert_usable(session)


async def test_sys_exit_on_a_rank_does_not_end_the_caller(session: Session) -> None:
    with pytest.raises(RankFailed, match=r"rank 0 of generation \d+ raised SystemExit: 3"):
        await session.run(lambda ctx: sys.exit(3) if ctx.rank == 0 else blocked_by_others(ctx))
    await assert_usable(session)


async def test_an_exception_that_cannot_be_rebuilt_still_tells_its_story(session: Session) -> None:
    class Stubborn(Exception):
        def __init__(self, a: int, b: int) -> None:
            super().__init__(f"{a} and {b}")

    def train(ctx: Context) -> None:
        raise Stubborn(1, 2)

    with pytest.raises(RankFailed, match="Stubborn: 1 and 2") as caught:
        await session.run(train)
    assert "raise Stubborn(1, 2)" in "".join(traceback.format_exception(caught.value))
    await assert_usable(session)


async def test_a_rank_that_returns_early_is_named_to_those_that_wait(session: Session) -> None:
    def train(ctx: Context) -> None:
        if ctx.rank == 1:
            ctx.group.barrier().wait()

    with pytest.raises(CollectiveMismatch, match=r"rank 0: their function has ret") as caught:
        await session.run(train)
    assert any("rank 0 had returned" in note for note in caught.value.__notes__)
    await assert_usable(session)


async def test_a_killed_worker_is_named_and_replaced(session: Session) -> None:
    def train(ctx: Context) -> None:
        ctx.barrier()
        if ctx.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        blocked_by_others(ctx)

    before = await session.run(lambda ctx: (ctx.generation, os.getpid()))
    began_at = time.monotonic()
    with pytest.raises(WorkerLost, match=r"rank 1 .*died") as caught:
        await session.run(train)
    assert time.monotonic() - began_at < WITHIN_S
    assert isinstance(caught.value, PeerLost)
    assert f"pid {before[1][1]}" in str(caught.value)
    assert "was killed, or crashed" in str(caught.value)
    assert "Session(num_workers=(1, 2)) and ZeroRedundancyOptimizer(..., replicas=2)" in str(
        caught.value
    )
    after = await session.run(lambda ctx: (ctx.generation, os.getpid()))
    assert after[0] == (before[0][0] + 1, before[0][1]), "the survivor's process goes on"
    assert after[1][1] != before[1][1]


async def test_a_worker_killed_between_runs_costs_the_next_run_nothing(
    session: Session, tmp_path: Path
) -> None:
    def begins(ctx: Context, folder: Path) -> int:
        (folder / f"{ctx.rank}-{os.getpid()}").touch()
        return os.getpid()

    pids = await session.run(lambda ctx: os.getpid())
    os.kill(pids[0], signal.SIGKILL)
    after = await session.run(begins, folder=tmp_path)
    assert after[0] != pids[0] and after[1] == pids[1]
    begun = sorted(path.name for path in tmp_path.iterdir())
    assert begun == [f"{rank}-{pid}" for rank, pid in enumerate(after)], "it began once"
    await assert_usable(session)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("num_workers", [3, (1, 3)])
async def test_no_run_is_lost_to_workers_that_die_while_idle(
    cluster: None, num_workers: int | tuple[int, int]
) -> None:
    few = {"CPU": 0.1}
    async with Session(num_workers, resources_per_worker=few, timeout_s=20) as session:
        pids = await session.run(lambda ctx: os.getpid())
        for turn in range(8):
            victims = {pids[turn % 3], pids[0]} if turn % 4 == 3 else {pids[turn % 3]}
            if turn % 2:  # News of the death may be anywhere on its way.
                await session.run(lambda ctx: None)
            for victim in victims:
                os.kill(victim, signal.SIGKILL)
            await asyncio.sleep(turn % 3 * 0.01)
            after = await session.run(lambda ctx: os.getpid())
            assert len(after) == 3 and set(after) & set(pids) == set(pids) - victims
            pids = after


async def test_a_stuck_worker_is_told_and_replaced(session: Session) -> None:
    def train(ctx: Context) -> None:
        ctx.barrier()
        if ctx.rank == 0:
            time.sleep(600)
        time.sleep(0.5)  # Till the other sleeps, where nothing reaches it.
        raise ValueError("somebody had to")

    before = await session.run(lambda ctx: os.getpid())
    began_at = time.monotonic()
    with pytest.raises(ValueError, match="somebody had to") as caught:
        await session.run(train)
    assert time.monotonic() - began_at < 9
    assert any("rank 0 did not stop" in note for note in caught.value.__notes__)
    after = await session.run(lambda ctx: os.getpid())
    assert after[0] != before[0]
    assert after[1] == before[1]


@pytest.mark.promise("the death of the driver")
async def test_a_killed_driver_is_replaced_and_training_does_not_stop(session: Session) -> None:
    before = await session.run(lambda ctx: (os.getpid(), ctx.generation))
    running = asyncio.create_task(session.run(loop_until_told, seconds=4.0))
    await asyncio.sleep(1.0)
    assert session._holder.worker_group is not None
    for _ in range(2):
        ray.kill(session._holder.worker_group._driver)
        await asyncio.sleep(1.0)
    results = await running
    assert [pid for pid, _, _ in results] == [pid for pid, _ in before]
    # Nobody waited for a driver.
    assert all(longest_s < 1.0 for _, _, longest_s in results)
    assert results[0][1] == results[1][1] > 100
    after = await session.run(lambda ctx: (os.getpid(), ctx.generation))
    assert [pid for pid, _ in after] == [pid for pid, _ in before]
    assert after[0][1] >= before[0][1], "numbers of generations never repeat"


async def test_a_driver_that_dies_between_two_runs_costs_nothing(session: Session) -> None:
    before = await session.run(lambda ctx: os.getpid())
    assert session._holder.worker_group is not None
    for is_assembled in (True, False):
        ray.kill(session._holder.worker_group._driver)
        session._holder.worker_group.is_assembled = (
            is_assembled  # Not, where a worker was lost in the last run.
        )
        assert await session.run(lambda ctx: os.getpid()) == before


def loop_until_told(ctx: Context, seconds: float) -> tuple[int, int, float]:
    """Its process, how many rounds it took, and the longest of them, in seconds."""
    began_at = time.monotonic()
    rounds, longest_s = 0, 0.0
    while ctx.reduce(float(time.monotonic() - began_at < seconds), "min"):
        last = time.monotonic()
        ctx.barrier()
        longest_s = max(longest_s, time.monotonic() - last)
        rounds += 1
        time.sleep(0.01)
    return os.getpid(), rounds, longest_s


def naps(ctx: Context) -> None:
    while True:
        ctx.barrier()
        time.sleep(0.05)


async def states(session: Session) -> set[WorkerState]:
    seen = (await session.snapshot()).workers
    return {one.state for one in seen if isinstance(one, WorkerSnapshot)}


async def until_idle(session: Session) -> None:
    async with asyncio.timeout(WITHIN_S):
        while await states(session) != {WorkerState.IDLE}:
            await asyncio.sleep(0.05)


async def in_naps(session: Session) -> asyncio.Task[Any]:
    running = asyncio.create_task(session.run(naps))
    while await states(session) != {WorkerState.TRAINING}:
        assert not running.done(), running.result()
        await asyncio.sleep(0.05)
    return running


async def test_a_run_that_is_cancelled_while_another_driver_starts_leaves_no_rank_in_it(
    session: Session,
) -> None:
    running = await in_naps(session)
    group = session._holder.worker_group
    assert group is not None
    before = group._incarnation
    ray.kill(group._driver)
    while group._incarnation == before:
        await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await until_idle(session)
    await assert_usable(session)


async def test_a_run_that_is_cancelled_twice_at_once_leaves_no_rank_in_it(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_asked = asyncio.Event()

    async def slowly(timeout_s: float) -> bool:
        is_asked.set()
        await asyncio.sleep(0.3)
        return False

    running = await in_naps(session)
    with monkeypatch.context() as patch:
        patch.setattr(worker_group, "head_stays_gone", slowly)
        running.cancel()
        await is_asked.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    await until_idle(session)
    await assert_usable(session)


async def test_a_run_that_has_lost_its_drivers_is_ended_on_its_ranks(session: Session) -> None:
    """A `close` may meet it there."""
    running = await in_naps(session)
    group = session._holder.worker_group
    assert group is not None
    driver, group._driver = group._driver, None
    await group.cancel(session._holder._next_run - 1, "the session was closed")
    await until_idle(session)
    group._driver = driver
    with pytest.raises(GroupAborted):
        await running
    await assert_usable(session)


async def test_a_worker_that_dies_when_its_rank_has_returned_costs_the_next_run_nothing(
    session: Session,
) -> None:
    def returns_first(ctx: Context) -> int:
        if ctx.rank == 1:
            time.sleep(4)
        return os.getpid()

    pids = await session.run(lambda ctx: os.getpid())
    running = asyncio.create_task(session.run(returns_first))
    await asyncio.sleep(1)
    os.kill(pids[0], signal.SIGKILL)
    assert await running == pids
    after = await session.run(lambda ctx: os.getpid())
    assert after[0] != pids[0] and after[1] == pids[1]
