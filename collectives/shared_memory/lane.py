"""Runs the operations of one communicator in order, on whichever thread needs them first.

An operation's body is a generator: it writes its part, publishes a tick, and yields that tick; it
is resumed when all ranks have published it. How to wait is decided here, not in the algorithms:

- Issuing an operation runs it as far as it goes without waiting, in the caller's thread. A small
  one has by then shown its part to the others, who can go on.
- How the rest is driven, and by which thread, is told in driving.py.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Generator

from ..contract.errors import CollectiveError, GroupClosed, PeerLost
from ..contract.inference import outside_inference_mode
from ..contract.operation import STARTED, Operation
from .driving import WAKE_DELAY_S, DrivenQueue, DrivenWork
from .segment import SharedSegment

_UNSURE_DELAY_S = 0.001  # of a work that does not know its ticks: most have but one
_LOOK_YIELDS = 8  # of the core, in one look; 0.4 us each on an idle one
_LOOK_TICKS = 4  # works with more of them are large: their copying would hold up an event loop
FIRST_TICK = 2  # SharedSegment.meet used 1

Body = Generator[int, None, None]


class LaneWork(DrivenWork):
    """An operation in a lane.

    make_body: makes the body, given its first tick, when all before it have ended. num_ticks: how
    many it publishes; 0 if that is not known before, for only then is it known who comes when.
    """

    def __init__(
        self, lane: Lane, operation: Operation, make_body: Callable[[int], Body], num_ticks: int
    ) -> None:
        super().__init__(operation, lane)
        self.lane = lane
        self.make_body = make_body
        self.num_ticks = num_ticks
        self.body: Body | None = None
        self.first_tick = 0
        self.awaited_tick = 0  # goes on when all ranks have published this

    def start(self, first_tick: int) -> None:
        self.first_tick = first_tick
        self.awaited_tick = first_tick - 1
        self.body = self.make_body(first_tick)

    def has_said_all(self) -> bool:
        """Whether it only waits for the others, none of whom waits for it."""
        return self.num_ticks > 0 and self.awaited_tick == self.first_tick + self.num_ticks - 1

    def _look(self) -> bool:
        return self.done or self.lane.look(self)


class Lane(DrivenQueue):
    """The queue of one communicator's works."""

    def __init__(self, segment: SharedSegment) -> None:
        super().__init__(segment, "chorusline-lane")
        self._queue: deque[LaneWork] = deque()
        self._next_tick = FIRST_TICK  # of the thread that drives

    def submit(self, work: LaneWork) -> None:
        """Put `work` at the end and run what can run at once."""
        with self.lock:
            if self._end is not None:
                self._finish(work, self._end)
                return
            self._queue.append(work)
        self._run_what_can()
        # A work that has published all it has to say holds nobody up; it may wait to be waited for.
        if not work.done and not work.has_said_all():
            self.call_background(WAKE_DELAY_S if work.num_ticks else _UNSURE_DELAY_S)

    def look(self, work: LaneWork) -> bool:
        """`poll` with a little patience, for a caller that will call again, or wait."""
        if work.num_ticks <= _LOOK_TICKS:  # 0: not known before it has begun
            for _ in range(_LOOK_YIELDS):
                self._run_what_can()
                if work.done:
                    return True
                os.sched_yield()
        return work.done

    def end(self, error: CollectiveError) -> None:
        with self.lock:
            if self._driven:
                return  # The thread that drives is woken, and ends the works itself.
            self._finish_all(error)
        self._call_back()

    def close(self, error: GroupClosed, lost: Callable[[Operation], PeerLost]) -> None:
        """No more works; those in the queue fail: with `error` here, with `lost` elsewhere.

        Waits for the thread that drives to let go.
        """
        self._run_what_can()
        with self.lock:
            if self._end is None:
                self._end = error  # Also for a thread that drives, and is told another one.
            head = self._queue[0] if self._queue else None
        if head is not None:
            self.segment.abort(lost(head.operation))
        self._let_go(error)

    # -- only the thread that drives -------------------------------------------------------------

    def _advance(self) -> None:
        queue = self._queue
        while queue and self._run(queue[0], block=False, spin=False):
            pass

    def _drive(self, until: DrivenWork | None) -> None:
        queue = self._queue
        spin = until is not None
        while queue:
            self._run(queue[0], block=True, spin=spin)
            if (until is not None and until.done) or self._end is not None:
                return

    @outside_inference_mode
    def _run(self, work: LaneWork, block: bool, spin: bool) -> bool:
        """Run `work` to its end, or to where it would have to wait; whether it ended."""
        segment = self.segment
        body = work.body
        if body is None:
            work.start(self._next_tick)
            body = work.body
            assert body is not None
        try:
            while True:
                tick = work.awaited_tick
                if not segment.reached(tick):
                    if not block:
                        failure = segment.failure()
                        if failure is not None:
                            raise failure
                        return False
                    operation = work.operation
                    give_up_at = operation.issued_at + operation.timeout_s
                    segment.wait(tick, operation, give_up_at, spin)
                if tick < work.first_tick:
                    # What the others published before the end must not let this one succeed.
                    failure = segment.failure()
                    if failure is not None:
                        raise failure
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
            # Ours, or an interrupt in the waiting thread: either way the others wait for us.
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

    def _run_what_can(self) -> None:
        mine = False
        try:
            with self.lock:
                mine = not self._driven
                self._driven = True
            if mine:
                self._driver = threading.get_ident()
                self._advance()
        finally:
            if mine:
                self._release()
