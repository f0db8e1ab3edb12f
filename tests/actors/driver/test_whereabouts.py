"""The driver's story of a timeout: pure, then from real workers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch

from chorusline.actors.driver.events import RankEnded, RanksAnswered, RunStarted, WorkerRegistered
from chorusline.actors.driver.instructions import AbortRank, AskRanks, EndRun, StartGrace
from chorusline.actors.driver.membership import Membership
from chorusline.actors.messages.messages import Failure, RunFailed, WorkerInfo
from chorusline.actors.messages.whereabouts import Whereabouts, describe
from chorusline.collectives.contract.errors import CollectiveMismatch, CollectiveTimeout
from chorusline.collectives.contract.operation import State
from chorusline.collectives.diagnosis.debug import DebugLevel, get_debug_level, set_debug_level
from chorusline.collectives.diagnosis.flight_recorder import FlightRecording, RecordedCollective
from chorusline.collectives.group import Group
from chorusline.runtime.program.context import Context
from chorusline.runtime.session.session import Session
from tests.references.driver_events import request

DONE, FAILED, STARTED = State.DONE, State.FAILED, State.STARTED


def recording(
    *collectives: tuple[str, State, float],
    name: str = "default",
    ranks: tuple[int, ...] = (0, 1, 2),
) -> FlightRecording:
    """(place, state, issued_at); what failed, failed at 130."""
    recorded = tuple(
        RecordedCollective(
            sequence=115 + i,
            description=place,
            place=place,
            file="train.py",
            line=1,
            state=state,
            issued_at=at,
            ended_at=None if state is STARTED else 130.0 if state is FAILED else at + 0.1,
        )
        for i, (place, state, at) in enumerate(collectives)
    )
    return FlightRecording(0, len(ranks), name, 0, 131.0, 118, recorded, ranks)


GATHER, REDUCE = "all_gather #117, train.py:41", "all_reduce #118, train.py:57"
WAITING = Whereabouts((recording((GATHER, DONE, 99), (REDUCE, FAILED, 100)),), "", False)
STACK = '  File "train.py", line 44, in load\n    time.sleep(9)\n'


def test_the_sentence_names_the_rank_that_is_behind_and_its_stack() -> None:
    late = Whereabouts((recording((GATHER, STARTED, 99)),), STACK, False)
    assert describe({0: WAITING, 1: WAITING, 2: late}, [2]) == (
        f"rank 2 is at {GATHER}, the others at {REDUCE}\n"
        f"rank 2 is in {GATHER}; its Python stack:\n" + STACK.rstrip()
    )


def test_what_a_rank_issued_after_the_end_does_not_hide_where_it_was() -> None:
    late = Whereabouts((recording((GATHER, DONE, 99), (REDUCE, FAILED, 130.5)),), "", True)
    assert describe({0: WAITING, 1: WAITING, 2: late}, [2]) == (
        f"rank 2 is at {GATHER}, the others at {REDUCE}\n"
        f"rank 2 has finished {GATHER}, and issued nothing since; its function is over"
    )


def test_a_rank_that_says_nothing_is_told_with_the_others() -> None:
    new = Whereabouts((), STACK, False)
    told = describe({0: WAITING, 1: "did not answer within 2 s", 2: new}, [1, 2])
    assert told.splitlines()[:3] == [
        f"rank 0 is at {REDUCE}",
        "rank 1 did not answer within 2 s; its process may be stopped, or stuck in a loop",
        "rank 2 has not met the other ranks; its Python stack:",
    ]


def test_the_story_is_of_the_group_that_failed_first_and_of_its_ranks() -> None:
    pair = ("pair", (2, 0))

    def said(*in_pair: tuple[str, State, float], above: FlightRecording) -> Whereabouts:
        return Whereabouts((above, recording(*in_pair, name=pair[0], ranks=pair[1])), "", False)

    idle, busy = recording((GATHER, DONE, 99)), recording((GATHER, STARTED, 99))
    waits = said((REDUCE, FAILED, 100), above=idle)
    outside = Whereabouts((busy,), "", False)
    assert describe({0: waits, 1: outside, 2: said(above=busy)}, [2]) == (
        f"in group 'pair', of ranks [2, 0]: rank 2 is at nothing yet, the other at {REDUCE}\n"
        f"rank 2 has issued nothing in group 'pair'; in group 'default' it is in {GATHER}"
    )


def test_all_are_asked_before_any_is_stopped_and_the_run_waits_for_the_answers() -> None:
    membership = Membership()
    for seat in range(2):
        info = WorkerInfo(f"worker-{seat}", seat, "node", "host", 100 + seat, "cpu")
        membership.handle(WorkerRegistered(info))
    membership.handle(RunStarted(request(0)))
    late = Failure(0, None, "CollectiveTimeout", "", (1,), False, asks_all=True)
    ask, abort, grace = membership.handle(RankEnded(late))
    assert ask == AskRanks(("worker-0", "worker-1"))
    assert isinstance(abort, AbortRank) and isinstance(grace, StartGrace)
    echo = Failure(1, None, "CollectiveTimeout", "", (1,), False, asks_all=True)
    assert membership.handle(RankEnded(echo)) == [], "asked once; the answers are on their way"
    (end,) = membership.handle(RanksAnswered({0: WAITING, 1: "is gone"}))
    assert isinstance(end, EndRun) and isinstance(end.outcome, RunFailed)
    assert end.outcome.story.startswith(f"rank 0 is at {REDUCE}")
    assert membership.handle(RanksAnswered({})) == []


# -- with real workers -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
async def session(cluster: None) -> AsyncIterator[Session]:
    async with Session(num_workers=3, timeout_s=30, resources_per_worker={"CPU": 0.5}) as session:
        yield session


def notes_of(error: BaseException) -> str:
    return "\n".join(error.__notes__)


def load(group: Group) -> None:
    """Slower than the others' deadline, and asleep when the driver asks, however late that is."""
    while group.failure() is None:
        time.sleep(0.05)
    time.sleep(1)


async def test_run_says_who_is_behind_at_which_line_with_its_stack(session: Session) -> None:
    def train(ctx: Context) -> None:
        part, whole = torch.ones(2), torch.ones(6)
        ctx.group.all_gather(whole, part).wait()
        if ctx.rank == 2:
            load(ctx.group)
        ctx.group.all_reduce(part, timeout_s=1).wait()

    with pytest.raises(CollectiveTimeout, match=r"rank 2 did not arrive") as caught:
        await session.run(train)
    first = train.__code__.co_firstlineno
    gather, reduce = (
        f"all_gather #1, test_whereabouts.py:{first + 2}",
        f"all_reduce #2, test_whereabouts.py:{first + 5}",
    )
    assert f"rank 2 is at {gather}, the others at {reduce}" in str(caught.value)
    told = notes_of(caught.value)
    assert f"rank 2 is at {gather}, the others at {reduce}" in told
    assert f"rank 2 has finished {gather}, and issued nothing since; its Python stack:" in told
    assert f"line {first + 4}, in train" in told
    assert "in load\n    time.sleep(" in told
    assert "training_thread.py" not in told


async def test_a_timeout_in_a_subgroup_is_told_with_the_sessions_ranks(session: Session) -> None:
    def train(ctx: Context) -> None:
        with ctx.group.new_group([2, 1], name="pair") or contextlib.nullcontext() as pair:
            if pair is not None:
                pair.barrier().wait()
                if ctx.rank == 2:
                    load(pair)
                pair.all_reduce(torch.ones(2), timeout_s=1).wait()
        ctx.group.barrier().wait()

    # Rank 1 raises it as the pair counts; that rank 0 hears of it and raises first is possible.
    with pytest.raises(CollectiveTimeout, match=r"rank (0|2) did not arrive") as caught:
        await session.run(train)
    first = train.__code__.co_firstlineno
    barrier, reduce = (
        f"barrier #0, test_whereabouts.py:{first + 3}",
        f"all_reduce #1, test_whereabouts.py:{first + 6}",
    )
    told = notes_of(caught.value)
    assert "in group 'pair', of ranks [2, 1]: " in told
    assert f"rank 2 is at {barrier}, the other at {reduce}" in told
    assert f"rank 2 has finished {barrier}, and issued nothing since in group 'pair'" in told
    assert "its Python stack:" in told
    assert f"line {first + 5}, in train\n    load(pair)" in told
    assert "in load\n    time.sleep(" in told
    by = {0: 1, 2: 0}[caught.value.ranks[0]]
    assert f"raised by rank {by} of 3" in told


async def test_a_suspended_coroutine_has_a_stack_too(session: Session) -> None:
    async def fetch() -> None:
        await asyncio.sleep(600)

    async def train(ctx: Context) -> None:
        if ctx.rank == 1:
            await fetch()
        await ctx.group.barrier(timeout_s=1)

    with pytest.raises(CollectiveTimeout, match=r"rank 1 did not arrive") as caught:
        await session.run(train)
    told = notes_of(caught.value)
    assert "rank 1 has issued nothing; its Python stack:" in told
    assert "in train\n    await fetch()" in told
    assert "in fetch\n    await asyncio.sleep(600)" in told


async def test_a_mismatch_is_told_with_the_lines_of_both_sides(session: Session) -> None:
    def train(ctx: Context) -> None:
        if ctx.rank == 1:
            ctx.group.broadcast(torch.ones(3)).wait()
        ctx.group.all_reduce(torch.ones(3)).wait()

    with pytest.raises(CollectiveMismatch) as caught:
        await session.run(train)
    first = train.__code__.co_firstlineno
    there = f"broadcast #1, test_whereabouts.py:{first + 2}"
    here = f"all_reduce #1, test_whereabouts.py:{first + 3}"
    assert f"rank 1 is at {there}, the others at {here}" in notes_of(caught.value)


@pytest.mark.slow
async def test_the_sessions_debug_level_holds_in_the_workers(cluster: None) -> None:
    before = get_debug_level()
    set_debug_level(DebugLevel.DETAIL)

    def train(ctx: Context) -> DebugLevel:
        ctx.group.barrier().wait()
        ctx.group.all_reduce(torch.ones((2, 3) if ctx.rank else 6), timeout_s=5).wait()
        return get_debug_level()

    try:
        async with Session(num_workers=2, resources_per_worker={"CPU": 0.5}) as session:
            with pytest.raises(CollectiveMismatch) as caught:
                await session.run(train)
    finally:
        set_debug_level(before)
    line = train.__code__.co_firstlineno + 2
    for shape in ("(2, 3)", "(6,)"):
        told = f"with SUM of shape {shape} on cpu in group 'default' at test_whereabouts.py:{line}"
        assert told in str(caught.value)


@pytest.mark.slow
async def test_a_stopped_process_is_told_as_silent(cluster: None) -> None:
    def train(ctx: Context) -> None:
        ctx.group.barrier().wait()
        if ctx.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(1)  # Another thread may be the one that takes the signal.
        ctx.group.all_reduce(torch.ones(3), timeout_s=0.5).wait()

    async with Session(num_workers=2, timeout_s=30) as session:
        pids: list[Any] = await session.run(lambda ctx: os.getpid())
        try:
            with pytest.raises(CollectiveTimeout, match=r"rank 1 did not arrive") as caught:
                await session.run(train)
        finally:
            os.kill(pids[1], signal.SIGCONT)
    assert "rank 1 did not answer within 2 s; its process may be stopped" in notes_of(caught.value)
