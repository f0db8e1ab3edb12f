"""What is said while something takes long, and no deadline has come."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable

import pytest

import chorusline as cl
from chorusline.runtime.session.holding.resource_holders import who_holds
from tests.harness.log_lines import LogLines
from tests.harness.reused_ranks import ReusedRanks

pytestmark = pytest.mark.slow  # They wait for what takes long.


def all_reduce_late(group: cl.Group, late_s: float) -> list[str]:
    import torch

    heard = LogLines()
    logging.getLogger("chorusline").addHandler(heard)
    try:
        for _ in range(2):
            if group.rank == 1:
                time.sleep(late_s)
            group.all_reduce(torch.ones(3)).wait()
    finally:
        logging.getLogger("chorusline").removeHandler(heard)
    return heard.lines


@pytest.mark.parametrize("transport", ["shared_memory", "gloo"])
def test_the_first_late_arrival_is_told_once_with_the_rank_and_the_line(
    ranks_of: Callable[[int], ReusedRanks], transport: str
) -> None:
    ranks = ranks_of(3) if transport == "shared_memory" else ReusedRanks(3, transport)
    try:
        first, second, third = ranks.run(all_reduce_late, 7.0)
    finally:
        if transport == "gloo":
            ranks.stop()
    assert (second, third) == ([], [])
    (told,) = first
    assert "all_reduce" in told
    assert "at test_told_in_time.py:" in told
    assert "for rank 1" in told
    assert "After 30 s" in told


async def test_a_session_that_waits_for_a_full_cluster_says_at_once_who_holds_it(
    cluster: None, caplog: pytest.LogCaptureFixture
) -> None:
    async with cl.Session(1, resources_per_worker={"CPU": 4}) as first:
        second = cl.Session(2, resources_per_worker={"CPU": 2}, startup_timeout_s=30)
        with caplog.at_level(logging.WARNING, "chorusline"):
            starting = asyncio.create_task(second.start())
            async with asyncio.timeout(5):
                while not any("no room" in record.getMessage() for record in caplog.records):
                    await asyncio.sleep(0.1)
            starting.cancel()
            await asyncio.wait([starting])
    (told,) = [r.getMessage() for r in caplog.records if "no room" in r.getMessage()]
    assert "there is no room for 2 workers with CPU 2 now, the cluster has CPU" in told
    assert re.search(r"session-\w{8}, which this program has open, holds 1 worker;", told)
    assert "close it with `await session.close()`" in told
    assert first.name == ""


def test_a_session_of_another_program_is_told_with_the_command_that_shows_it() -> None:
    class Open:
        name, num_workers = "session-b", 3

    told = who_holds(["session-a", "session-b"], [("mine", Open())])
    assert told == (
        "session-a belongs to another program; see `chorusline status`. session-b, which "
        "this program has open, holds 3 workers; close it with `await mine.close()`, or let its "
        "`async with` end first"
    )


def test_a_detached_session_is_told_with_what_ends_it() -> None:
    class Open:
        name, num_workers = "night", 1

    told = who_holds(["day", "night"], [("mine", Open())])
    assert told == (
        "day is a detached session; `chorusline stop day` ends it. night, which this program has "
        "open, holds 1 worker; end it with `await mine.stop()`"
    )


async def test_a_start_that_takes_long_says_what_it_waits_for(
    cluster: None, caplog: pytest.LogCaptureFixture
) -> None:
    async with cl.Session(1, resources_per_worker={"CPU": 4}):
        second = cl.Session(2, resources_per_worker={"CPU": 2}, startup_timeout_s=30)
        with caplog.at_level(logging.WARNING, "chorusline"):
            starting = asyncio.create_task(second.start())
            await asyncio.sleep(10)
            starting.cancel()
            await asyncio.wait([starting])
    (told,) = [r.getMessage() for r in caplog.records if r.msg.startswith("still ")]
    assert told.startswith("still waiting for room in the cluster for 2 workers (8 s; gives up")
    assert "startup_timeout_s" in told
