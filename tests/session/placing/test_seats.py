"""The seats of a session by themselves, without workers."""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections import Counter
from itertools import pairwise

import pytest
import ray
from ray.util import placement_group_table
from ray.util.placement_group import PlacementGroup, remove_placement_group

from chorusline.actors.errors import StartupError
from chorusline.actors.ray_calls.detached_actors import DetachedActors
from chorusline.runtime.session.placing import placement, seats as seats_module
from chorusline.runtime.session.placing.placement import Needs
from chorusline.runtime.session.placing.seats import PlacedSeats

NOWHERE = Needs({"a resource of no node": 1.0}, "PACK", {})
FEW = {"CPU": 0.01}


def states_of(name: str) -> Counter[str]:
    """How many groups of the detached session `name` are in each state."""
    begins = f"chorusline/{name}/"
    entries = placement_group_table().values()
    return Counter(entry["state"] for entry in entries if entry["name"].startswith(begins))


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


async def test_a_group_that_is_made_while_the_seats_are_given_back_is_removed(
    cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that makes it goes on when the run that waits for it is cancelled."""
    asks, is_given_back = threading.Event(), threading.Event()
    made: list[PlacementGroup] = []
    asked_for = PlacedSeats._asked_for

    def slowly(self: PlacedSeats, taken: set[str]) -> PlacementGroup:
        asks.set()
        assert is_given_back.wait(30)
        made.append(asked_for(self, taken))
        return made[-1]

    monkeypatch.setattr(PlacedSeats, "_asked_for", slowly)
    notes: list[object] = []
    seats = PlacedSeats((), Needs(FEW, "PACK", {}), 1)
    seats.whenever_changed(lambda: notes.append(seats.state()))
    wait = asyncio.create_task(seats.wait_for(0))
    assert await asyncio.to_thread(asks.wait, 30)
    wait.cancel()
    await asyncio.wait([wait])
    await seats.give_back()
    is_given_back.set()
    async with asyncio.timeout(30):
        while not made or placement_group_table(made[0])["state"] != "REMOVED":
            await asyncio.sleep(0.05)
    assert len(notes) == 1, "the session that has ended is not remembered again"


@pytest.mark.parametrize("strategy", ["PACK", "STRICT_SPREAD"])
async def test_a_restarted_session_host_replaces_a_group_that_was_removed(
    cluster: None, strategy: str
) -> None:
    """The one before has died between the removal and the note of the next group."""
    needs = Needs(FEW, strategy, {}, f"restarted-{strategy}-{uuid.uuid4().hex[:8]}")
    before = PlacedSeats([needs.group()], needs, 1)
    unknown = needs.group()
    remove_placement_group(before.groups[0])
    seats = PlacedSeats.recalled(before.state())
    DetachedActors(needs.detached).remove_groups(kept=seats.groups)
    try:
        await asyncio.wait_for(seats.wait_for(0), 30)
        assert seats.groups != before.groups and unknown not in seats.groups
        assert states_of(needs.detached) == {"REMOVED": 2, "CREATED": 1}
    finally:
        await seats.give_back()


async def test_a_seat_in_the_place_of_a_spare_worker_asks_for_room_again(cluster: None) -> None:
    """The node is gone that the spare worker had: with STRICT_SPREAD its group is only removed."""
    needs = Needs(FEW, "STRICT_SPREAD", {})
    seats = PlacedSeats([needs.group()], needs, 1, spares=1)
    seats.swap(0, 1)
    before = seats.groups
    try:
        assert await asyncio.to_thread(seats.vacant, ()) == []
        assert len(seats.groups) == len(before) + 1
    finally:
        await seats.give_back()


async def test_a_session_whose_room_others_took_says_how_long_it_has_tried_in_all(
    cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[PlacementGroup] = []

    async def divided(group: PlacementGroup, needs: Needs) -> tuple[PlacementGroup, ...]:
        remove_placement_group(group)
        taken.append(needs.group())
        await taken[0].ready()
        return ()

    monkeypatch.setattr(placement, "_divided", divided)
    all_of_it = Needs({"CPU": ray.cluster_resources()["CPU"]}, "PACK", {})
    try:
        with pytest.raises(StartupError, match="not placed within 5 s"):
            await placement.place(all_of_it, 1, 1, 5.0, may_grow=False, survives_loss=True)
    finally:
        await placement.give_back(taken)
