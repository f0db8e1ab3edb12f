"""Runs the operations of one communicator in order, on whichever thread needs them first.

An operation's body is a generator: it writes its part, publishes a tick, and yields that tick; it
is resumed when all ranks have published it. How to wait is decided here, not in the algorithms:

- Issuing an operation runs it as far as it goes without waiting, in the caller's thread. A small
  one has by then shown its part to the others, who can go on.
- `wait()` runs the queue in the waiting thread, up to its own work: no hand-over between threads,
  a short spin, and nearly the speed of the machine.
- Everything else (a large operation in flight, one behind another, an `await`) is driven by a
  background thread that sleeps when there is nothing to do. It is woken a moment late, by a timer
  that `wait()` stops: a thread that wakes only to find the work driven already takes the
  interpreter's lock twice, which costs a sync all_reduce of 1 MiB a quarter of its time.

One thread drives at a time; the others wait for their turn or for their work. Callbacks are called
by whichever thread ended the work, without the lock. That thread still drives: a callback that
waits for another work drives on by itself, from within.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Generator

from ..contract.errors import CollectiveError, GroupAborted, GroupClosed, PeerLost
from ..contract.inference import outside_inference_mode
from ..contract.operation import STARTED, Operation
from .driving import DrivenWork, call_back
from .segment import SharedSegment
from .wake_timer import WakeTimer

_WAKE_DELAY_S = 0.0001
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

    def _end_generation(self, reason: str) -> None:
        rank = self.lane.segment.rank
        self.lane.abort(GroupAborted(self.operation.generation, [rank], reason))

    def _look(self) -> bool:
        return self.done or self.lane.look(self)


class Lane:
    """The queue of one communicator's works, and who drives it."""

    def __init__(self, segment: SharedSegment) -> None:
        self.segment = segment
        self._lock = threading.Lock()
        self._turn = threading.Condition(self._lock)  # a work ended, or nobody drives
        self._queue: deque[LaneWork] = deque()
        self._driven = False  # a thread drives, until it calls _release
        self._driver = 0  # that thread, as soon as it has begun
        self._thread: threading.Thread | None = None
        self._wake_up = WakeTimer()
        self._end: CollectiveError | None = None
        self._next_tick = FIRST_TICK  # of whoever drives

    def submit(self, work: LaneWork) -> None:
        """Put `work` at the end and run what can run at once."""
        mine = False
        try:
            with self._lock:
                if self._end is not None:
                    work.failure, work.done = self._end, True
                    work.operation.end(self._end)
                    return
                self._queue.append(work)
                mine = not self._driven
                self._driven = True
            if mine:
                self._driver = threading.get_ident()
                self._advance()
        finally:
            if mine:
                self._release()
        # A work that has published all it has to say holds nobody up; it may wait to be waited for.
        if not work.done and not work.has_said_all():
            with self._lock:
                self._call_background(_WAKE_DELAY_S if work.num_ticks else _UNSURE_DELAY_S)

    def run_until(self, work: LaneWork) -> None:
        """Block until `work` is done, driving the queue if no other thread does."""
        while True:
            mine = False
            try:
                with self._lock:
                    nested = self._driven and self._driver == threading.get_ident()
                    while self._driven and not work.done and not nested:
                        self._turn.wait()
                    if work.done:
                        return
                    mine = not nested
                    self._driven = True
                if mine:
                    self._driver = threading.get_ident()
                if self._thread is not None:
                    self._wake_up.cancel()
                self._drive(work, spin=True)
            except BaseException as error:
                # An interrupt, also of a thread that waited for its turn: the others wait for us.
                self.abort(self._interrupted(work, error))
                raise
            finally:
                if mine:
                    self._release()

    def poll(self, work: LaneWork) -> None:
        """Run what can run without waiting. Who only asks still needs somebody to see that a peer
        died or is late: if `work` is not done, that is the background thread."""
        self._run_what_can()
        if not work.done:
            with self._lock:
                self._call_background(_WAKE_DELAY_S)

    def look(self, work: LaneWork) -> bool:
        """`poll` with a little patience, for somebody who will call again, or wait."""
        if work.num_ticks <= _LOOK_TICKS:  # 0: not known before it has begun
            for _ in range(_LOOK_YIELDS):
                self._run_what_can()
                if work.done:
                    return True
                os.sched_yield()
        return work.done

    def call_when_done(self, work: LaneWork, callback: Callable[[], None]) -> None:
        with self._lock:
            if not work.done:
                work.callbacks.append(callback)
                self._call_background(0)
                return
        callback()

    def abort(self, error: CollectiveError) -> None:
        """End the generation on all ranks, and every work of this lane."""
        error = self.segment.abort(error)
        ended: list[LaneWork] = []
        with self._lock:
            if not self._driven:  # Whoever drives is woken, and ends the works itself.
                ended = self._finish_all(error)
        call_back(ended)

    def close(self, error: GroupClosed, lost: Callable[[Operation], PeerLost]) -> None:
        """No more works; those in the queue fail: with `error` here, with `lost` elsewhere.

        Waits for the thread that drives to let go.
        """
        self._run_what_can()
        with self._lock:
            if self._end is None:
                self._end = error  # Also for a thread that drives, and is told another one.
            head = self._queue[0] if self._queue else None
        if head is not None:
            self.segment.abort(lost(head.operation))
        with self._lock:
            while self._driven:
                self._turn.wait()
            ended = self._finish_all(error)
        call_back(ended)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._wake_up.set(0)
            self._thread.join()
        self._wake_up.close()

    # -- only the thread that drives -------------------------------------------------------------

    def _advance(self) -> None:
        queue = self._queue
        while queue and self._run(queue[0], block=False, spin=False):
            pass

    def _drive(self, until: LaneWork | None, spin: bool) -> None:
        queue = self._queue
        while queue:
            work = queue[0]
            self._run(work, block=True, spin=spin)
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
            with self._lock:
                self._queue.popleft()
                ended = [self._finish(work, None)]
        except CollectiveError as error:
            with self._lock:
                ended = self._finish_all(error)
        except BaseException as error:
            # Ours, or an interrupt in the waiting thread: either way the others wait for us.
            failure = segment.abort(self._interrupted(work, error))
            with self._lock:
                ended = self._finish_all(failure)
            call_back(ended)
            raise
        call_back(ended)
        return True

    # -- with the lock held ----------------------------------------------------------------------

    def _finish(self, work: LaneWork, failure: CollectiveError | None) -> LaneWork:
        """Settle `work`; whoever does owes it its callbacks, after the lock."""
        work.failure = failure
        work.operation.end(failure)
        work.done = True
        if work.body is not None:
            work.body.close()
        self._turn.notify_all()
        return work

    def _finish_all(self, error: CollectiveError) -> list[LaneWork]:
        if self._end is None:
            self._end = error
        ended = [self._finish(work, self._end) for work in self._queue]
        self._queue.clear()
        self._turn.notify_all()
        return ended

    def _call_background(self, delay_s: float) -> None:
        if self._end is not None:
            return  # Whoever drives ends the works, and the timer may be closed already.
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._background_loop, name="chorusline-lane", daemon=True
            )
            self._thread.start()
        self._wake_up.set(delay_s)

    # --------------------------------------------------------------------------------------------

    def _run_what_can(self) -> None:
        mine = False
        try:
            with self._lock:
                mine = not self._driven
                self._driven = True
            if mine:
                self._driver = threading.get_ident()
                self._advance()
        finally:
            if mine:
                self._release()

    def _interrupted(self, work: LaneWork, error: BaseException) -> GroupAborted:
        what = f"{type(error).__name__} during {work.operation}"
        if str(error):
            what = f"{what}: {error}"
        return GroupAborted(work.operation.generation, [self.segment.rank], what)

    def _release(self) -> None:
        with self._lock:
            self._driven = False
            self._driver = 0
            self._turn.notify_all()
            # What is left is a work that somebody awaits, or one that holds up the others.
            if self._queue and self._thread is not None and self._end is None:
                self._wake_up.set(_WAKE_DELAY_S)

    def _background_loop(self) -> None:
        while self._end is None:
            self._wake_up.wait()
            with self._lock:
                if self._driven or not self._queue:
                    continue
                self._driven = True
            self._driver = threading.get_ident()
            try:
                self._drive(None, spin=False)
            finally:
                self._release()
