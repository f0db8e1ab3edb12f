"""Where a rank waits for the end of its generation, as the driver sees to."""

import threading
from typing import Any

from chorusline.actors.messages.messages import Assignment, RunRequest
from chorusline.actors.worker.lifeline import Lifeline
from chorusline.collectives.contract.errors import GroupAborted


def lifeline() -> Lifeline:
    driver: Any = None
    return Lifeline(
        RunRequest(0, 5.0, keep_reports=False), driver, Assignment(3, 0, 1, 0, 1, 0), dict
    )


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


def test_a_rank_whose_generation_does_not_end_goes_on() -> None:
    one = lifeline()
    held = one.hold()
    assert one.hold() is held
    thread = before_a_step(one)
    thread.join(5)
    assert held.done() and not thread.is_alive()
    one.before_step()  # It waits once.


def test_nobody_waits_for_a_rank_whose_function_is_over() -> None:
    one = lifeline()
    held = one.hold()
    one.let_go()
    assert held.done()
    assert one.hold().done()
