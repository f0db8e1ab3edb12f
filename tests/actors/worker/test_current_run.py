"""Orders against a generation may come before its group, and before the order to go on in it."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from chorusline.actors.messages.messages import (
    Assignment,
    FormerRanks,
    Resumption,
    RunRequest,
    WorkerState,
)
from chorusline.actors.ray_calls.actor_store import ActorStore
from chorusline.actors.reporting.report_buffer import ReportBuffer
from chorusline.actors.worker.current_run import CurrentRun, EarlyOrders
from chorusline.actors.worker.worker import Worker
from chorusline.collectives.contract.errors import GroupAborted
from tests.references.driver_events import worker as info

THIRD = Assignment(3, 0, 2, 0, 2, 0)


def run_in(assignment: Assignment, resumption: Resumption | None = None) -> CurrentRun:
    request = RunRequest(0, timeout_s=60.0, keep_reports=False, max_failures=None)
    nobody = object()  # No call is made.
    reports = ReportBuffer(keep=False)
    return CurrentRun(
        assignment, request, ActorStore(nobody), reports, nobody, resumption=resumption
    )


def test_an_order_to_freeze_stands_until_the_group_of_its_generation_is_made() -> None:
    run, error = run_in(THIRD), GroupAborted(3, [], "a newcomer has come")
    assert run.ends_with(3) is None
    assert run.notes_freeze(3, error), "it is in that generation"
    assert run.notes_freeze(3, GroupAborted(3, [], "the same, again"))
    assert run.ends_with(3) is error, "the first one stands"
    assert run.ends_with(4) is None


def test_an_order_to_freeze_may_overtake_the_order_to_go_on() -> None:
    run, error = run_in(THIRD), GroupAborted(4, [], "a newcomer has come")
    assert not run.notes_freeze(4, error), "there is nothing to end yet"
    assert run.ends_with(3) is None
    run.assignment = replace(THIRD, generation=4)
    assert run.ends_with(4) is error


def test_an_order_to_freeze_that_comes_late_is_void() -> None:
    run = run_in(THIRD)
    assert not run.notes_freeze(2, GroupAborted(2, [], "long ago"))
    assert run.ends_with(2) is None and run.ends_with(3) is None


def test_the_order_to_stop_stands_against_every_generation() -> None:
    run, stop = run_in(THIRD), GroupAborted(3, [], "the session was closed")
    run.notes_freeze(3, GroupAborted(3, [], "a newcomer has come"))
    run.stop_error = stop
    assert run.ends_with(3) is stop and run.ends_with(4) is stop


def order(generation: int) -> Resumption:
    return Resumption(replace(THIRD, generation=generation), FormerRanks.of((0, 1)), ())


def test_an_order_to_continue_that_two_drivers_give_counts_once() -> None:
    run, first, second = run_in(THIRD), ActorStore(object()), ActorStore(object())
    fourth = order(4)
    assert run.continues_in(fourth, first)
    assert not run.continues_in(order(4), second)
    assert not run.continues_in(order(3), second), "it comes late"
    assert run.resumption is fourth and run.store is first
    assert run.continues_in(order(5), second)
    assert run.store is second


async def test_a_worker_tells_a_new_driver_how_its_generation_came_about_before_it_is_in_it() -> (
    None
):
    """Its training thread still opens the program, or has not woken up yet."""
    worker: Any = object.__new__(Worker)
    worker._lock, worker._info, worker._ended = threading.Lock(), info(0), None
    called_with = order(4)
    worker._run = run_in(called_with.assignment, called_with)
    assert (await Worker.place_in_run(worker, 0)).resumption is called_with
    told_next = order(5)
    worker._run.continues_in(told_next, ActorStore(object()))
    place = await Worker.place_in_run(worker, 0)
    assert (place.assignment, place.resumption) == (told_next.assignment, told_next)


async def test_a_new_driver_does_not_wait_until_a_dry_run_has_stopped() -> None:
    has_stopped, is_asked = asyncio.Event(), asyncio.Event()

    async def stop(grace_s: float) -> None:
        is_asked.set()
        await has_stopped.wait()

    worker: Any = object.__new__(Worker)
    worker._lock, worker._info, worker._ended = threading.Lock(), info(0), None
    worker._group = None
    worker._run = run = run_in(THIRD)
    run.is_dry_run, run.thread = True, SimpleNamespace(stop=stop)  # type: ignore[assignment]
    assert await asyncio.wait_for(Worker.place_in_run(worker, 0), 5) is None
    await is_asked.wait()
    assert run.state is WorkerState.STOPPING and "its driver is gone" in str(run.stop_error)
    assert not run.continues_in(order(4), ActorStore(object())), "an order of that driver"
    has_stopped.set()
    await worker._stopping


def test_an_order_that_overtakes_the_first_call_of_a_run_stands_against_it() -> None:
    early, stop, freeze = EarlyOrders(), GroupAborted(3, [], "closed"), GroupAborted(3, [], "lost")
    early.note_stop(0, stop)
    early.note_freeze(0, 3, freeze)
    early.note_freeze(0, 2, GroupAborted(2, [], "before it"))
    assert early.taken_by(0, 3) == (stop, freeze)
    assert early.taken_by(1, 3) == (None, None), "another run in the same generation"


def test_an_order_that_overtakes_another_call_of_the_same_run_stands_against_it() -> None:
    """After a dry run, or a rest, of the worker: to wait for it would cost the run the worker."""
    early, stop, freeze = EarlyOrders(), GroupAborted(4, [], "closed"), GroupAborted(4, [], "lost")
    assert early.taken_by(0, 3) == (None, None)
    early.note_freeze(0, 3, GroupAborted(3, [], "this generation is over for it"))
    early.note_freeze(0, 4, freeze)
    early.note_stop(0, stop)
    assert early.taken_by(0, 4) == (stop, freeze)


def test_an_order_for_what_a_worker_did_before_in_a_run_is_void() -> None:
    early = EarlyOrders()
    assert early.taken_by(0, 3) == (None, None)
    early.note_stop(0, GroupAborted(3, [], "the dry run is over"))
    assert early.taken_by(0, 3) == (None, None), "another dry run in the same generation"
    early.note_stop(0, GroupAborted(4, [], "it rests"))  # It was a rank in generation 4, too.
    assert early.taken_by(0, 5) == (None, None)
