"""The seats of a session by themselves, without workers."""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise

import pytest
import ray

from chorusline.runtime.session.placing import seats as seats_module
from chorusline.runtime.session.placing.placement import Needs
from chorusline.runtime.session.placing.seats import PlacedSeats

NOWHERE = Needs({"a resource of no node": 1.0}, "PACK", {})


async def test_empty_seats_share_their_looks_at_the_cluster(
    cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[float] = []
    nodes = ray.nodes

    def noted() -> object:
        found = nodes()
        ends.append(time.monotonic())
        return found

    monkeypatch.setattr(ray, "nodes", noted)
    seats = PlacedSeats((), NOWHERE, 64)
    waits = [asyncio.create_task(seats.wait_for(seat)) for seat in range(64)]
    try:
        async with asyncio.timeout(30):
            while len(ends) < 4:
                await asyncio.sleep(0.05)
    finally:
        for wait in waits:
            wait.cancel()
        await asyncio.wait(waits)
        await seats.give_back()
    assert all(later - earlier >= seats_module._SHARED_S for earlier, later in pairwise(ends))
