"""What a session host answers to several programs that call it in an unlucky order."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import chorusline as cl
from chorusline.actors.parcels.parcel import Parcel
from chorusline.collectives.diagnosis.debug import DebugLevel
from chorusline.runtime.session.detached.session_host import SessionHost


class Memory:
    """What the head remembers of a session."""

    def __init__(self, **saved: object) -> None:
        self.values = saved
        self.save, self.saved = self.values.__setitem__, self.values.get


def host_of(local: Any, memory: Memory) -> Any:
    """A session host that has begun, and has had no run yet."""
    host: Any = object.__new__(SessionHost)
    host._name, host._id, host._ended, host._again = "night", "a", "", None
    host._local, host._detached = local, memory
    host._run, host._clients, host._tasks = None, {}, set()
    host._is_up = asyncio.Event()
    host._is_up.set()
    return host


async def begun(host: Any, token: str) -> int:
    number = await host.begin(token, Parcel(b""), DebugLevel.OFF)
    assert isinstance(number, int)
    return number


async def test_a_run_that_two_programs_interrupt_ends_by_the_first_interrupt() -> None:
    asked, may_answer = asyncio.Event(), asyncio.Event()

    async def ask_workers(timeout_s: float) -> tuple[SimpleNamespace]:
        asked.set()
        await may_answer.wait()
        return (SimpleNamespace(generation=3),)

    async def run(*_: object) -> None:
        await asyncio.Event().wait()

    host = host_of(SimpleNamespace(run=run, ask_workers=ask_workers), Memory())
    number = await begun(host, "first")
    waits = asyncio.create_task(host.ending(number))
    await asyncio.sleep(0)  # The run is in progress.
    first = asyncio.create_task(host.interrupt("of the first"))
    await asked.wait()
    second = asyncio.create_task(host.interrupt("of the second"))
    for _ in range(5):
        await asyncio.sleep(0)
    may_answer.set()
    ending = await waits
    assert isinstance(ending, cl.GroupAborted)
    assert "of the first" in str(ending) and ending.generation == 3
    assert await first and await second
