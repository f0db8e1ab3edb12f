"""Where a rank waits for the end of its generation, as the driver sees to."""

import os
import threading
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from chorusline.actors.messages.messages import (
    Assignment,
    FormerRanks,
    Resumption,
    RunRequest,
)
from chorusline.actors.messages.run_status import MOST_CHANGES, Gone, RunStatus
from chorusline.actors.ray_calls import calls
from chorusline.actors.ray_calls.calls import ENDED, HEAD_S
from chorusline.actors.worker import lifeline as lifeline_module
from chorusline.actors.worker.lifeline import Lifeline
from chorusline.collectives.contract.errors import GroupAborted


def lifeline(num_ranks: int = 1) -> Lifeline:
    driver: Any = None
    assignment = Assignment(3, 0, num_ranks, 0, 1, 0)
    return Lifeline(RunRequest(0, 5.0, keep_reports=False), driver, assignment, dict)


def before_a_step(one: Lifeline) -> threading.Thread:
    thread = threading.Thread(target=one.before_step)
    thread.start()
    return thread


def test_a_rank_waits_before_its_step_until_the_generation_ends() -> None:
    one = lifeline()
    one.before_step()  # Nobody has asked for it.
    held = one.hold()
    assert not held.done()
    thread = before_a_step(one)
    held.result(timeout=5)
    one.freeze(3, GroupAborted(3, [], "ranks leave"))
    thread.join(5)
    assert not thread.is_alive()


def test_the_end_of_an_earlier_generation_does_not_end_the_one_that_a_rank_is_in() -> None:
    one = lifeline()
    held = one.hold()
    thread = before_a_step(one)
    held.result(timeout=5)
    one.freeze(2, GroupAborted(2, [], "rank 1 was lost"))
    assert one._freeze_error is None, "this rank has left that one"
    thread.join(5)
    assert not thread.is_alive()


def test_a_rank_whose_generation_does_not_end_goes_on() -> None:
    one = lifeline()
    held = one.hold()
    assert one.hold() is held
    thread = before_a_step(one)
    thread.join(5)
    assert held.done() and not thread.is_alive()
    one.before_step()  # It waits once.


def test_the_reason_of_a_loss_comes_before_or_after_the_next_generation() -> None:
    former = FormerRanks.of((0, 3))
    gone = (Gone(1, 51, ENDED), Gone(2, 52, ENDED))
    for comes_first in (True, False):
        one, status = lifeline(num_ranks=4), RunStatus()
        one._status = status
        one.has_entered(runs_again=False)
        one.leave_generation(GroupAborted(3, [], "two ranks are lost"))
        if comes_first:
            one.explain_loss(52, "it was killed")
        one.assignment = Assignment(4, 0, 2, 0, 1, 0)
        one._changes.attempted(Resumption(one.assignment, former, (), 3, gone=gone))
        one.has_entered(runs_again=False)
        if not comes_first:
            one.explain_loss(52, "it was killed")
        (change,) = status.generation_changes
        assert [who.why for who in change.gone] == [ENDED, "it was killed"]


def test_every_loss_of_a_run_is_counted_though_only_the_last_changes_are_remembered() -> None:
    one, status = lifeline(num_ranks=21), RunStatus()
    one._status = status
    one.has_entered(runs_again=False)
    for generation in range(4, 24):
        one.leave_generation(GroupAborted(generation - 1, [], "a rank is lost"))
        num_ranks = 24 - generation
        one.assignment = Assignment(generation, 0, num_ranks, 0, 1, 0)
        former = FormerRanks.of(tuple(range(num_ranks)))
        one._changes.attempted(Resumption(one.assignment, former, (), generation - 1))
        one.has_entered(runs_again=False)
    assert status.num_lost == 20
    assert len(status.generation_changes) == MOST_CHANGES


def test_nobody_waits_for_a_rank_whose_function_is_over() -> None:
    one = lifeline()
    held = one.hold()
    one.let_go()
    assert held.done()
    assert one.hold().done()


class Driver:
    """It notes what it is asked, and answers nothing."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.is_asked = threading.Event()

    def __getattr__(self, method: str) -> Any:
        def remote(*arguments: object) -> None:
            self.asked.append(method)
            self.is_asked.set()

        return SimpleNamespace(remote=remote)


def until_asked(ask: Any, one: Lifeline) -> tuple[threading.Thread, Driver]:
    """A rank that waits for its driver's answer."""
    driver = Driver()
    one.attach(driver)
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    assert driver.is_asked.wait(5)
    return thread, driver


def test_what_a_rank_waits_for_is_asked_of_the_driver_that_takes_over() -> None:
    one = lifeline()
    frozen = one.leave_generation(GroupAborted(3, [], "a rank is lost"))
    resumption = Resumption(Assignment(4, 0, 1, 0, 1, 0), FormerRanks.of((0,)), (), 3)
    one.group = SimpleNamespace(rest=lambda: None, turn=lambda: None)  # type: ignore[assignment]
    for ask, method, decide in (
        (one.finish, "finished", one.release),
        (lambda: one.regenerate(frozen), "froze", lambda: one.resume(resumption)),
    ):
        thread, first = until_asked(ask, one)
        second, third = Driver(), Driver()
        one.attach(second)
        one.attach(third)
        assert first.asked == second.asked == third.asked == [method]
        decide()
        thread.join(5)
        assert not thread.is_alive()
        one.attach(after := Driver())
        assert after.asked == [], "it waits for nothing any more"


def test_a_rank_that_neither_driver_nor_head_answers_ends_its_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A head that is back in time is waited for."""
    ended: list[int] = []
    looks = iter([True, False, True, True, True])
    now = [0.0]

    def is_gone(timeout_s: float) -> bool:
        now[0] += 0.6 * HEAD_S
        return next(looks)

    def leave(status: int) -> NoReturn:
        ended.append(status)
        raise SystemExit

    monkeypatch.setattr(calls, "head_is_gone", is_gone)
    monkeypatch.setattr(calls.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(lifeline_module, "HEAD_WATCH_S", 0.0)
    monkeypatch.setattr(os, "_exit", leave)
    one = lifeline()
    one.attach(Driver())
    token: Any = None
    with pytest.raises(SystemExit):
        one.dry_run_ready(token)
    assert ended == [1] and not [*looks], "after the third refusal in a row"
