"""Runs the operations of one communicator in order, in the thread that needs them first.

An operation's body is a generator: it writes its part, publishes a tick, and yields that tick; the
lane resumes it when all ranks have published the tick. The lane decides how to wait:

- Issuing an operation runs it in the caller's thread up to the first wait. By then a small
  operation has published its part, and the other ranks can continue.
- driving.py says which thread drives the rest.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Generator
from typing import Any

from ..contract.errors import CollectiveError, GroupClosed, PeerLost
from ..contract.modes import outside_modes
from ..contract.operation import STARTED, Operation
from .driving import WAKE_DELAY_S, DrivenQueue, DrivenWork
from .segment import SharedSegment

_UNSURE_DELAY_S = 0.001  # for a work of an unknown number of ticks; most have one
_LOOK_YIELDS = 8  # of the core, in one look; 0.4 us each on an idle core
_LOOK_TICKS = 4  # works with more ticks are large: their copying would block an event loop
FIRST_TICK = 2  # SharedSegment.meet used 1

Body = Generator[int, None, None]


class LaneWork(DrivenWork):
    """An operation in a lane.

    make_body: makes the body from its first tick and `arguments`, when all earlier works have
        ended.
    num_ticks: how many ticks it publishes; 0 if only the ranks' tables will show it.
    """

    def __init__(
        self,
        lane: Lane,
        operation: Operation,
        make_body: Callable[..., Body],
        arguments: tuple[Any, ...],
        num_ticks: int,
    ) -> None:
        super().__init__(operation, lane)
        self.lane = lane
        self.make_body = make_body
        self.arguments = arguments
        self.num_ticks = num_ticks
        self.body: Body | None = None  # None: before its turn
        self.first_tick = 0
        self.awaited_tick = 0  # the body continues when all ranks have published this tick

    def start(self, first_tick: int) -> None:
        self.first_tick = first_tick
        self.awaited_tick = first_tick - 1
        self.body = self.make_body(first_tick, *self.arguments)

    def has_said_all(self) -> bool:
        """Whether this rank has published its last tick, so that no rank waits for it."""
        if self.body is None:
            return False  # It waits for a work before it.
        return self.num_ticks > 0 and self.awaited_tick == self.first_tick + self.num_ticks - 1

    def _look(self) -> bool:
        return self.done or self.lane.look(self)


class Lane(DrivenQueue):
    """The queue of one communicator's works."""

    def __init__(self, segment: SharedSegment) -> None:
        super().__init__(segment, "chorusline-lane")
        self._queue: deque[LaneWork] = deque()
        self._next_tick = FIRST_TICK  # only the driver uses it

    def submit(self, work: LaneWork) -> None:
        """Append `work` and run what needs no waiting."""
        self._run_what_can(work)
        # A work that has published its last tick delays no rank; a waiter may drive it later.
        if not work.done and not work.has_said_all():
            self.call_background(WAKE_DELAY_S if work.num_ticks else _UNSURE_DELAY_S)

    def look(self, work: LaneWork) -> bool:
        """`poll` for a few yields of the core, for a caller that will call again, or wait."""
        if work.num_ticks <= _LOOK_TICKS:  # Also 0, an unknown number.
            for _ in range(_LOOK_YIELDS):
                self._run_what_can()
                if work.done:
                    return True
                os.sched_yield()
        return work.done

    def end(self, error: CollectiveError) -> None:
        with self.lock:
            if self._driven:
                return  # `abort` has woken the driver, which ends the works itself.
            self._finish_all(error)
        self._call_back()

    def close(self, error: GroupClosed, lost: Callable[[Operation], PeerLost]) -> None:
        """Accept no more works. Queued works fail with `error` on this rank, with `lost` elsewhere.

        Waits until the driver has stopped.
        """
        self._run_what_can()
        with self.lock:
            if self._end is None:
                self._end = error  # Also for the driver, which the segment gives another error.
            head = self._queue[0] if self._queue else None
        if head is not None:
            self.segment.abort(lost(head.operation))
        self._let_go(error)

    # -- only the driver calls these -------------------------------------------------------------

    def _advance(self) -> None:
        queue = self._queue
        while queue and self._run(queue[0], block=False, spin=False):
            pass

    def _drive(self, until: DrivenWork | None) -> None:
        queue = self._queue
        spin = until is not None
        while queue:
            self._run(queue[0], block=True, spin=spin)
            # The works after it are not this thread's: their waiters, or the background thread, run
            # them.
            if (until is not None and until.done) or self._end is not None:
                return

    @outside_modes
    def _run(self, work: LaneWork, block: bool, spin: bool) -> bool:
        """Run `work` to its end or, unless `block`, to its first wait; whether it ended."""
        segment = self.segment
        body = work.body
        # The first tick is known only now: works before it take as many as their sizes need.
        if body is None:
            work.start(self._next_tick)
            body = work.body
            assert body is not None
        try:
            while True:
                tick = work.awaited_tick
                if not segment.reached(tick):
                    if not block:
                        # No wait follows, in which the end of the generation would be noticed.
                        segment.raise_failure()
                        return False
                    operation = work.operation
                    give_up_at = operation.issued_at + operation.timeout_s
                    segment.wait(tick, operation, give_up_at, spin)
                if tick < work.first_tick:
                    # Ticks from before the generation's end must not let this work succeed.
                    segment.raise_failure()
                    work.operation.state = STARTED
                    segment.sign(work.operation)
                elif tick == work.first_tick:
                    segment.check_signatures(work.operation)
                work.awaited_tick = next(body)
        except StopIteration:
            self._next_tick = work.awaited_tick + 1
            with self.lock:
                self._queue.popleft()
                self._finish(work, None)
        except CollectiveError as error:
            with self.lock:
                self._finish_all(error)
        except BaseException as error:
            # A bug, or an interrupt in the waiting thread: other ranks would wait for this one.
            failure = segment.abort(self._interrupted(work.operation, error))
            with self.lock:
                self._finish_all(failure)
            self._call_back()
            raise
        self._call_back()
        return True

    # --------------------------------------------------------------------------------------------

    def _pending(self) -> deque[LaneWork]:
        return self._queue

    def _finish_all(self, error: CollectiveError) -> None:
        super()._finish_all(error)
        for work in self._queue:
            if work.body is not None:
                work.body.close()
        self._queue.clear()

    def _needs_background(self) -> bool:
        # A thread that issues a work, or polls one, has called the background thread if it has to
        # watch over it. Other works have published all they have, and end when they are waited for.
        if not self._queue:
            self._called = False
        return self._called

    def _run_what_can(self, new: LaneWork | None = None) -> None:
        """new: a work to append first; it fails at once if the generation has ended."""
        mine = False
        try:
            with self.lock:
                if new is not None:
                    if self._end is not None:
                        # A work appended now would wait for a thread that drives, and none does
                        # any more.
                        self._finish(new, self._end)
                        return
                    self._queue.append(new)
                # Another thread drives: it comes to the new work by itself.
                mine = not self._driven
                self._driven = True
            if mine:
                self._driver = threading.get_ident()
                self._advance()
        finally:
            if mine:
                self._release()
