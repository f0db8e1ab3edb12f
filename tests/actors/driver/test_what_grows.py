"""What a session that lives for weeks keeps of what is over."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import Any

from chorusline.actors.driver.driver import _InstructionTasks
from chorusline.actors.ray_calls.actor_store import StoreActor
from chorusline.runtime.session.detached.session_host import _LINES, SessionHost, _Collecting


async def test_the_store_forgets_the_generations_before_the_last_two() -> None:
    actor = StoreActor()
    for generation in (2, 9, 10, 11):
        await actor.store_call("set", f"group/default/{generation}/1/card/0", "x")
        await actor.store_call("append", f"group/default/{generation}/1/others/1/group/a/0/b", "x")
    await actor.store_call("set", "group/mine/2/1/card/0", "x")
    await actor.store_wait(["group/default/2/1/never"], 0)
    await actor.store_forget(10)
    assert await actor.store_call("num_keys") == 5
    assert await actor.store_call("check", ["group/default/10/1/card/0", "group/mine/2/1/card/0"])
    assert not actor._written, "what was waited for in vain is forgotten, too"


async def test_a_driver_forgets_an_instruction_that_is_done() -> None:
    instruction_tasks = object.__new__(_InstructionTasks)
    instruction_tasks._tasks = set()
    async with asyncio.TaskGroup() as instruction_tasks._group:
        for number in range(100):
            instruction_tasks._start(asyncio.sleep(0), f"errand-{number}")
        waits = asyncio.Event()
        instruction_tasks._start(_until(waits), "waits")
        while len(instruction_tasks._tasks) > 1:
            await asyncio.sleep(0)
        waits.set()
    await asyncio.sleep(0)
    assert not instruction_tasks._tasks


async def _until(event: asyncio.Event) -> None:
    await event.wait()


async def test_a_session_host_keeps_the_newest_of_its_records() -> None:
    host: Any = object.__new__(SessionHost)
    host._start_lines = deque(maxlen=_LINES)
    collecting = _Collecting(host._start_lines)
    for number in range(10 * _LINES):
        collecting.emit(logging.makeLogRecord({"msg": f"warning {number}"}))
    assert len(host._start_lines) == _LINES
    last = 10 * _LINES - 1
    assert (
        await host.start_lines(last) == [f"warning {last}"]
        and await host.start_lines(last + 1) == []
    )
