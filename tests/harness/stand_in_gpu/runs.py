"""A run of a train function on ranks of the stand-in GPU, without Ray."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import chorusline as cl
from chorusline.actors.messages.messages import Assignment, Frozen, RunRequest
from chorusline.actors.messages.run_status import RunStatus
from chorusline.actors.reporting.report_buffer import ReportBuffer
from chorusline.actors.worker.lifeline import Lifeline
from chorusline.runtime.program.program import Program


class Driver:
    """The driver of one rank: it lets the rank go at the end, and ends the run at the first loss.

    frozen: what the rank has reported then, at first.
    """

    def __init__(self) -> None:
        self.lifeline: Lifeline | None = None
        self.frozen: Frozen | None = None

    @property
    def finished(self) -> _Call:
        assert self.lifeline is not None
        return _Call(lambda *_: self.lifeline.release())

    @property
    def froze(self) -> _Call:
        return _Call(self._froze)

    def _froze(self, run: int, frozen: Frozen) -> None:
        self.frozen = self.frozen or frozen
        assert self.lifeline is not None
        self.lifeline.stop(frozen.error)


class _Call:
    def __init__(self, remote: Callable[..., Any]) -> None:
        self.remote = remote


def in_run(
    group: cl.Group,
    train: Callable[[cl.Context], Any],
    *,
    goes_on: bool,
    driver: Driver | None = None,
) -> Any:
    """What a session's worker does with a train function. goes_on: in a session that survives
    losses."""
    place = group.rank, group.size
    assignment = Assignment(group.generation, *place, *place, 0)
    request = RunRequest(0, group.timeout_s, False, max_failures=None if goes_on else 0)
    driver = driver or Driver()
    lifeline = driver.lifeline = Lifeline(request, driver, assignment, lambda: group)  # type: ignore[arg-type]
    lifeline.begin()
    program = Program(train, {}, None)
    return program(assignment, group, ReportBuffer(keep=False), lifeline, RunStatus(), None)
