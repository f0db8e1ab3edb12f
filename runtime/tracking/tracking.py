"""The trackers of one run, each in a thread of its own, with a queue.

The event loop, which pulls from the workers, only puts into the queues. A tracker that blocks or
raises delays nobody: its queue fills, and from then on steps are left out of it, and told once.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import queue
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

from chorusline.actors.messages.messages import Report
from chorusline.actors.messages.run_status import RunStatus

from .configs import plain_config
from .run_events import RunEvents, begun
from .step_numbers import Logged, StepNumbers
from .tracker import TrackedEvent, TrackedRun, Tracker

MOST_WAITING = 10_000
"""Steps and events that may wait for one tracker."""

END_S = 20.0
"""For all trackers to write what they have when a run is over. Then the run returns without."""

_log = logging.getLogger("chorusline")

_Call = Callable[[Tracker], None]

_latest: WeakValueDictionary[int, threading.Thread] = WeakValueDictionary()
"""The thread of each tracker's latest run, by the tracker's id: a user's tracker may have no hash.
A living thread holds its tracker, so that no other object has this id."""


class Tracking:
    """One run, on its way to the trackers. `look` and `end` are called in the event loop.

    name: of the train function.
    arguments: of the function, by name.
    session: what is added to the config.
    """

    def __init__(
        self,
        trackers: Sequence[Tracker],
        name: str,
        arguments: Mapping[str, Any],
        session: Mapping[str, Any],
    ) -> None:
        self._lines = [_Line(one) for one in trackers]
        self._name = name
        self._config = plain_config(arguments, session)
        self._began_at = time.time()
        self._numbers = StepNumbers()
        self._events = RunEvents()
        self._statuses: tuple[RunStatus, ...] = ()
        self._has_begun = False

    def look(self, reports: Sequence[Report], statuses: Mapping[int, RunStatus]) -> None:
        """Take what a pull has brought. statuses: by seat."""
        now_s = time.monotonic()
        if statuses:
            self._statuses = tuple(statuses.values())
        if not self._has_begun and (first := begun(statuses)) is not None:
            self._begin(first)
        back = [logged for report in reports for logged in self._numbers.add(report, now_s)]
        self._put_all(
            [*back, *self._numbers.settled(self._statuses, now_s)],
            self._events.look(self._statuses),
        )

    async def end(self, error: BaseException | None) -> None:
        """The run is over. error: what it has raised."""
        # No rank has answered: a tracker still gets a beginning and an end.
        if not self._has_begun:
            self._begin(RunStatus(origin=uuid.uuid4().hex))
        self._put_all(self._numbers.rest(), self._events.look(self._statuses, is_over=True))
        if self._numbers.num_late:
            _log.warning(
                "%d reported numbers came too late for the mean over the ranks, and the trackers "
                "do not have them",
                self._numbers.num_late,
            )
        status, text = ending(error)
        give_up_at = time.monotonic() + END_S
        for line in self._lines:
            line.close(lambda tracker: tracker.end(status, text))
        for line in self._lines:
            await asyncio.to_thread(line.wait, max(0.0, give_up_at - time.monotonic()))

    def _begin(self, status: RunStatus) -> None:
        self._has_begun = True
        run = TrackedRun(
            status.origin,
            self._name,
            self._began_at,
            self._config,
            status.resumed_from or None,
            status.resumed_step,
        )
        for line in self._lines:
            line.open(run)

    def _put_all(self, logged: Sequence[Logged], events: Sequence[TrackedEvent]) -> None:
        """Each event goes before the steps that came after it."""
        steps = list(logged)
        for event in events:
            num_before = sum(one.step <= event.step for one in steps)
            self._put(*map(_logging, steps[:num_before]), _telling(event))
            steps = steps[num_before:]
        self._put(*map(_logging, steps))

    def _put(self, *calls: _Call) -> None:
        for line in self._lines:
            for call in calls:
                line.put(call)


def ending(error: BaseException | None) -> tuple[str, str]:
    """The status with which a run ends, and the text of its error."""
    if error is None:
        return "finished", ""
    if isinstance(error, asyncio.CancelledError | KeyboardInterrupt | SystemExit):
        return "interrupted", ""
    return "failed", f"{type(error).__name__}: {error}"


def _logging(one: Logged) -> _Call:
    return lambda tracker: tracker.log(one.step, one.numbers, one.time)


def _telling(one: TrackedEvent) -> _Call:
    return lambda tracker: tracker.event(one)


class _Line:
    """The queue and the thread of one tracker, for one run."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker
        self._queue: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        # OpenTelemetry, for one, keeps the span that the caller of `run` is in as a context
        # variable, which a new thread does not have.
        context = contextvars.copy_context()
        self._thread = threading.Thread(
            target=context.run, args=(self._main,), name=f"tracker-{self._name}", daemon=True
        )
        self._has_begun = False
        self._has_told_error = False
        self._num_left_out = 0

    @property
    def _name(self) -> str:
        return type(self._tracker).__name__

    def open(self, run: TrackedRun) -> None:
        before = _latest.get(id(self._tracker))

        def begin(tracker: Tracker) -> None:
            # A server that hangs may hold back the end of the run before: else that end, and what
            # is logged before it, would go into this run's record.
            if before is not None:
                before.join()
            tracker.begin(run)

        self._queue.put(begin)
        _latest[id(self._tracker)] = self._thread
        self._thread.start()

    def put(self, call: _Call) -> None:
        # A tracker whose server hangs must not fill the memory of the program.
        if self._queue.qsize() < MOST_WAITING:
            self._queue.put(call)
            return
        if not self._num_left_out:
            _log.warning(
                "the tracker %s is slower than the reports arrive: it misses some steps, and "
                "training continues",
                self._name,
            )
        self._num_left_out += 1

    def close(self, call: _Call) -> None:
        self._queue.put(call)
        self._queue.put(None)

    def wait(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            _log.warning(
                "the tracker %s has not written everything within %g s after the end of the run; "
                "the run returns without it",
                self._name,
                END_S,
            )
        elif self._num_left_out:
            _log.warning(
                "%d steps or events were left out of the tracker %s, which was slower than the "
                "reports",
                self._num_left_out,
                self._name,
            )

    def _main(self) -> None:
        has_begun = self._call(self._queue.get(), "it does not record this run")
        while (call := self._queue.get()) is not None:
            if not has_begun:
                continue  # Else what waits for it would look like the steps of a slow tracker.
            self._call(call, "it still receives later steps")
            # Not after each call: a tracker that writes files would write each number by itself.
            if self._queue.empty():
                self._call(lambda tracker: tracker.flush(), "it still receives later steps")

    def _call(self, call: _Call | None, what_follows: str) -> bool:
        assert call is not None
        try:
            call(self._tracker)
        except Exception as error:
            if not self._has_told_error:
                self._has_told_error = True
                _log.warning(
                    "tracker %s raised %s: %s. Training continues, and %s",
                    self._name,
                    type(error).__name__,
                    error,
                    what_follows,
                )
            return False
        return True
