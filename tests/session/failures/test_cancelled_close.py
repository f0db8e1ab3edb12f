"""A close that is cancelled while it waits leaves nothing behind."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
import ray
from ray.util import placement_group_table

import chorusline as cl
from chorusline.actors.ray_calls.detached_actors import INCARNATION, names_of
from chorusline.actors.worker_group.worker_group import WorkerGroup
from chorusline.runtime.session.holding import local_session


def hangs(ctx: cl.Context) -> None:
    time.sleep(60)


@pytest.mark.parametrize("waits_for", ["the head", "the end of the run"])
async def test_a_close_that_is_cancelled_ends_the_actors_and_gives_their_place_back(
    cluster: None, monkeypatch: pytest.MonkeyPatch, waits_for: str
) -> None:
    is_waiting = asyncio.Event()

    async def forever(*_: object) -> Any:
        is_waiting.set()
        await asyncio.Event().wait()

    async def slowly(*_: object) -> bool:
        is_waiting.set()
        await asyncio.sleep(1)
        return False

    session = await cl.Session(1, resources_per_worker={"CPU": 0.1})
    holder: Any = session._holder
    [group], name = holder._seats.groups, holder.name
    running = asyncio.create_task(session.run(hangs))
    while not holder._is_running:
        await asyncio.sleep(0.01)
    with monkeypatch.context() as patch:
        if waits_for == "the head":
            patch.setattr(local_session, "head_stays_gone", slowly)
        else:
            patch.setattr(WorkerGroup, "cancel", forever)
        closing = asyncio.create_task(session.close())
        await is_waiting.wait()
        closing.cancel()
        await asyncio.wait([closing])
    assert closing.cancelled()
    async with asyncio.timeout(30):
        while placement_group_table(group)["state"] != "REMOVED" or names_of(INCARNATION, name):
            await asyncio.sleep(0.1)
    running.cancel()
    await asyncio.wait([running])
    assert ray.is_initialized()
