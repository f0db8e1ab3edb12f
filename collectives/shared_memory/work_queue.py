"""Runs the works of shared memory in order, in the thread that needs them first.

There are two queues of works: the collectives of one communicator (`Lane`), and its messages
(messages.py). Both say here which thread drives:

- Issuing a work runs the part that needs no waiting, in the caller's thread. By then a small
  operation has published its part, and the other ranks can continue.
- `wait()` drives the queue in the waiting thread, up to its own work. This needs no hand-over
  between threads, only a short spin.
- A background thread, which sleeps when nothing is pending, drives all other works. A timer wakes
  it after a short delay, unless `wait()` stops the timer: a thread that wakes and finds the work
  done takes the interpreter's lock twice, a quarter of the time of a sync all_reduce of 1 MiB.

One thread drives at a time; the others wait for their turn or for their work. The thread that ends
a work runs its callbacks, without the lock, and remains the driver meanwhile: a callback that waits
for another work drives the queue from within.

An operation's body is a generator: it writes its part, publishes a tick, and yields that tick; the
lane resumes it when all ranks have published the tick.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Generator
from typing import Any

from ..contract.errors import (
    CollectiveError,
    GroupAborted,
    GroupClosed,
    PeerLost,
    fresh_copy,
)
from ..contract.modes import outside_modes
from ..contract.operation import STARTED, Operation
from ..contract.work import SettledWork
from .compiled import ABORTED, DONE, Task, compiled
from .end_record import apart
from .segment import SharedSegment
from .wake_timer import WakeTimer

WAKE_DELAY_S = 0.0001
_UNSURE_DELAY_S = 0.001  # for a work of an unknown number of ticks; most have one
_LOOK_YIELDS = 8  # of the core, in one look; 0.4 us each on an idle core
_LOOK_TICKS = 4  # works with more ticks are large: their copying would block an event loop
_HELD_S = 0.2
FIRST_TICK = 2  # SharedSegment.meet used 1

Body = Generator[int, bool, None]
"""It is sent whether this thread may spin, which only a body in C needs to know."""


class DrivenWork(SettledWork):
    """A work in a `DrivenQueue`, which settles it and calls it back."""

    _queue: DrivenQueue

    def _block(self) -> None:
        if not self.done:
            self._check_process()
            self._queue.run_until(self)
        self._raise_failure()

    def is_completed(self) -> bool:
        if not self.done:
            self._check_process()
            self._queue.poll(self)
        return self.done

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        super().add_done_callback(callback)
        if not self.done:
            self._queue.call_background(0)

    def _end_generation(self, reason: str) -> None:
        rank = self._queue.segment.rank
        self._queue.abort(GroupAborted(self.operation.generation, [rank], reason))


class DrivenQueue(ABC):
    """Works of one rank, driven by one thread at a time. thread_name: of the background thread."""

    def __init__(self, segment: SharedSegment, thread_name: str) -> None:
        self.segment = segment
        self.lock = threading.Lock()
        self._turn = threading.Condition(self.lock)  # notified when a work ends or a driver stops
        self._waiting = 0  # threads that wait for their turn; mostly none, and notifying costs
        self._driven = False  # whether a thread drives; it ends that with _release
        self._driver = 0  # the identity of that thread, once it has begun
        self._thread_name = thread_name
        self._thread: threading.Thread | None = None  # None: until works need one
        self._wake_up: WakeTimer | None = None  # None: as `_thread`
        self._is_set = False  # whether the timer may be set; cancelling it is a system call
        self._called = False  # whether the background thread was called since it last began
        self._end: CollectiveError | None = None  # None: the generation lives
        self._ended: list[DrivenWork] = []  # works whose callbacks are due

    def run_until(self, work: DrivenWork) -> None:
        """Block until `work` is done, driving the queue if no other thread does."""
        while True:
            mine = False
            try:
                with self.lock:
                    # A callback of a work, in the thread that drives, waits for another work.
                    nested = self._driven and self._driver == threading.get_ident()
                    while self._driven and not work.done and not nested:
                        self._wait_for_turn()
                    if work.done:
                        return
                    mine = not nested
                    self._driven = True
                    # The background thread was to drive; this one does it without a switch of
                    # threads.
                    if self._is_set and self._wake_up is not None:
                        self._is_set = False
                        self._wake_up.cancel()
                if mine:
                    self._driver = threading.get_ident()
                self._drive(work)
            except BaseException as error:
                # An interrupt, or one while waiting for the turn: the other ranks wait for this
                # one.
                self.abort(self._interrupted(work.operation, error))
                raise
            finally:
                if mine:
                    self._release()

    def poll(self, work: DrivenWork) -> None:
        """Run what needs no waiting. If `work` is not done then, the background thread watches for
        a dead or late peer, because the caller may never wait."""
        self._run_what_can()
        if not work.done:
            # Short of threads or files, it is the next look that tries again.
            with contextlib.suppress(RuntimeError, OSError):
                self.call_background()

    def call_background(self, delay_s: float = WAKE_DELAY_S) -> None:
        """Wake the background thread in `delay_s` seconds, unless a waiting thread stops that."""
        with self.lock:
            if self._end is not None:
                return  # The driver ends the works, and the timer may be closed already.
            if self._wake_up is None:
                timer = WakeTimer()
                thread = threading.Thread(
                    target=self._background_loop,
                    args=(timer,),
                    name=self._thread_name,
                    daemon=True,
                )
                try:
                    thread.start()
                # Short of threads: the next work tries again, and `close` waits for no thread.
                except BaseException:
                    timer.close()
                    raise
                self._thread, self._wake_up = thread, timer
            self._called = True
            self._set_timer(self._wake_up, delay_s)

    def _watch_over(self, work: DrivenWork, delay_s: float = WAKE_DELAY_S) -> None:
        """`call_background` for a new work, which its caller gets only if this returns."""
        try:
            self.call_background(delay_s)
        # Short of threads or files. Other ranks may have its data already, and take part in it.
        except BaseException as error:
            self.abort(self._interrupted(work.operation, error))
            raise

    def abort(self, error: CollectiveError) -> None:
        """End the generation on all ranks, and every work of this queue."""
        self.end(self.segment.abort(error))

    def end(self, error: CollectiveError) -> None:
        """End every work with `error`, because the generation has ended."""
        if self.is_interrupted():
            apart(lambda: self._end_works(error))
        else:
            self._end_works(error)

    def is_interrupted(self) -> bool:
        """Whether a signal handler asks, which has interrupted its thread while that held the lock:
        waiting for the lock there would never end. No thread holds it for long."""
        # Handlers run in the main thread. Elsewhere the lock may be held for longer, by a thread
        # that copies a large message.
        if threading.current_thread() is not threading.main_thread():
            return False
        taken = self.lock.acquire(timeout=_HELD_S)
        if taken:
            self.lock.release()
        return not taken

    # -- implemented by a queue ------------------------------------------------------------------

    @abstractmethod
    def _end_works(self, error: CollectiveError) -> None:
        """`end`, in a thread that does not hold the lock."""

    @abstractmethod
    def _run_what_can(self) -> None:
        """Run what needs no waiting, and run the callbacks."""

    @abstractmethod
    def _drive(self, until: DrivenWork | None) -> None:
        """Run the works until `until` is done; for None, until no work is left. Only the driver
        calls it."""

    @abstractmethod
    def _pending(self) -> Collection[DrivenWork]:
        """The works that have not ended. The caller holds the lock."""

    def _needs_background(self) -> bool:
        """Whether a thread that stops driving leaves works to the background thread. The caller
        holds the lock."""
        return bool(self._pending())

    # -- with the lock held ----------------------------------------------------------------------

    def _finish(self, work: DrivenWork, failure: CollectiveError | None) -> None:
        """Settle `work`. The calling thread calls `_call_back` after it releases the lock."""
        work.settle(failure)
        if work.callbacks:
            self._ended.append(work)
        self._notify()

    def _finish_all(self, error: CollectiveError) -> None:
        if self._end is None:
            self._end = fresh_copy(error)  # The frames of its traceback keep what they have.
        for work in self._pending():
            # One that an interrupt kept in the queue after its end.
            if not work.done:
                self._finish(work, self._end)
        self._notify()

    def _notify(self) -> None:
        if self._waiting:
            self._turn.notify_all()

    def _wait_for_turn(self) -> None:
        self._waiting += 1
        try:
            self._turn.wait()
        finally:
            self._waiting -= 1

    def _set_timer(self, timer: WakeTimer, delay_s: float) -> None:
        self._is_set = True
        timer.set(delay_s)

    # --------------------------------------------------------------------------------------------

    def _call_back(self) -> None:
        """Run the callbacks that are due, without the lock."""
        if self._ended:
            with self.lock:
                ended, self._ended = self._ended, []
            for work in ended:
                work.call_back()

    def _release(self) -> None:
        with self.lock:
            self._driven = False
            self._driver = 0
            self._notify()
            # What is left is a work that a task awaits, or one that holds up the others.
            timer = self._wake_up
            if timer is not None and self._end is None and self._needs_background():
                self._set_timer(timer, WAKE_DELAY_S)

    def _background_loop(self, wake_up: WakeTimer) -> None:
        while self._end is None:
            wake_up.wait()
            with self.lock:
                self._is_set = False
                if self._driven or not self._pending():
                    continue
                self._driven = True
                self._called = False
            self._driver = threading.get_ident()
            try:
                self._drive(None)
            except BaseException as error:
                # Without this thread, works would wait for their deadlines, on all ranks.
                self.abort(self._interrupted(self._thread_name, error))
                raise
            finally:
                self._release()

    def _let_go(self, error: CollectiveError) -> None:
        """Finish a close: wait until no thread drives; pending works fail with `error`."""
        with self.lock:
            # A callback of a work, or a signal handler, may close in the thread that drives. It
            # cannot wait for itself, and finds its works ended when it gets the control back.
            while self._driven and self._driver != threading.get_ident():
                self._wait_for_turn()
            self._finish_all(error)
        self._call_back()
        if self._thread is not None and self._wake_up is not None:
            # Closed by a callback that the background thread runs: it cannot wait for itself.
            if self._thread is not threading.current_thread():
                self._wake_up.set(0)
                self._thread.join()
            self._wake_up.close()

    def _interrupted(self, what: object, error: BaseException) -> GroupAborted:
        reason = f"{type(error).__name__} during {what}"
        if str(error):
            reason = f"{reason}: {error}"
        return GroupAborted(self.segment.generation, [self.segment.rank], reason)


class LaneWork(DrivenWork):
    """An operation in a lane.

    make_body: makes the body from its first tick and `arguments`, when all earlier works have
        ended.
    num_ticks: how many ticks it publishes; 0 if only the ranks' tables will show it.
    task: the same for compiled.py, which then runs it; None where `body` has to.
    """

    _queue: Lane
    body: Body | None = None  # None: before its turn, or a task
    first_tick = 0  # before its turn
    awaited_tick = 0  # the body continues when all ranks have published this tick

    def __init__(
        self,
        lane: Lane,
        operation: Operation,
        make_body: Callable[..., Body],
        arguments: tuple[Any, ...],
        num_ticks: int,
        task: Task | None,
    ) -> None:
        super().__init__(operation, lane.lock)
        self._queue = lane
        self.make_body = make_body
        self.arguments = arguments
        self.num_ticks = num_ticks
        self.task = task

    def start(self, first_tick: int) -> None:
        self.first_tick = first_tick
        self.awaited_tick = first_tick - 1
        if self.task is None:
            self.body = self.make_body(first_tick, *self.arguments)

    def has_said_all(self) -> bool:
        """Whether this rank has published its last tick, so that no rank waits for it."""
        if not self.first_tick:
            return False  # It waits for a work before it.
        return self.num_ticks > 0 and self.awaited_tick == self.first_tick + self.num_ticks - 1

    def _look(self) -> bool:
        return self.done or self._queue.look(self)


class Lane(DrivenQueue):
    """The queue of one communicator's works."""

    def __init__(self, segment: SharedSegment) -> None:
        super().__init__(segment, "chorusline-lane")
        self._queue: deque[LaneWork] = deque()
        self._next_tick = FIRST_TICK  # only the driver uses it
        self.compiled = compiled(segment)
        """None: bodies run in Python."""

    def submit(self, work: LaneWork) -> None:
        """Append `work` and run what needs no waiting."""
        if not self._run_alone(work):
            self._run_what_can(work)
        # A work that has published its last tick delays no rank; a waiter may drive it later.
        if not work.done and not work.has_said_all():
            self._watch_over(work, WAKE_DELAY_S if work.num_ticks else _UNSURE_DELAY_S)

    def _run_alone(self, work: LaneWork) -> bool:
        """As `_run_what_can(work)` for little data in C, with the lock taken once; False, and
        nothing was done, if it cannot."""
        task, operation, compiled = work.task, work.operation, self.compiled
        if compiled is None or task is None or not task[1] or operation.finish is not None:
            return False
        try:
            with self.lock:
                if self._driven or self._queue or self._end is not None:
                    return False
                compiled.begin(task, operation, self._next_tick)
                tick = compiled.advance_quickly()
                if tick == DONE:
                    self._next_tick += 1
                    work.settle(None)  # It has no callbacks yet.
                    return True
                self._queue.append(work)
                work.first_tick, work.awaited_tick = self._next_tick, tick
                if tick == work.first_tick:
                    operation.state = STARTED
        except BaseException as error:  # An interrupt: other ranks would wait for this one.
            self.abort(self._interrupted(operation, error))
            raise
        if tick < 0:
            self._run_what_can()
        return True

    def look(self, work: LaneWork) -> bool:
        """`poll` for a few yields of the core, for a caller that will call again, or wait."""
        if work.num_ticks <= _LOOK_TICKS:  # Also 0, an unknown number.
            for _ in range(_LOOK_YIELDS):
                self._run_what_can()
                if work.done:
                    return True
                os.sched_yield()
        return work.done

    def _end_works(self, error: CollectiveError) -> None:
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
        try:
            # The first tick is known only now: works before it take as many as their sizes need.
            if not work.first_tick:
                work.start(self._next_tick)
                if work.task is not None and self.compiled is not None:
                    self.compiled.begin(work.task, work.operation, self._next_tick)
            continues = self._run_body if work.task is None else self._run_task
            if not continues(work, block, spin):
                return False
            self._next_tick = work.awaited_tick + 1
            with self.lock:
                self._queue.popleft()
                self._finish(work, None)
        except CollectiveError as error:
            with self.lock:
                self._finish_all(error)
        except BaseException as error:
            # A bug, or an interrupt in the waiting thread: other ranks would wait for this one.
            failure = self.segment.abort(self._interrupted(work.operation, error))
            with self.lock:
                self._finish_all(failure)
            self._call_back()
            raise
        self._call_back()
        return True

    def _run_body(self, work: LaneWork, block: bool, spin: bool) -> bool:
        segment, body = self.segment, work.body
        assert body is not None
        while True:
            tick = work.awaited_tick
            started = tick >= work.first_tick
            if not segment.reached(tick) and not self._wait(work, block, spin):
                return False
            if not started:
                # Ticks from before the generation's end must not let this work succeed.
                segment.raise_failure()
                work.operation.state = STARTED
                segment.sign(work.operation)
            elif tick == work.first_tick:
                segment.check_signatures(work.operation)
            try:
                work.awaited_tick = body.send(block and spin) if started else next(body)
            except StopIteration:
                return True

    def _run_task(self, work: LaneWork, block: bool, spin: bool) -> bool:
        assert self.compiled is not None
        operation = work.operation
        while (tick := self.compiled.advance(block and spin)) != DONE:
            if tick == ABORTED:
                self.segment.raise_failure()
            if tick < 0:  # The ranks are at different operations: this raises, and names them.
                self.segment.check_signatures(operation)
            work.awaited_tick = tick
            if tick >= work.first_tick:
                operation.state = STARTED
            if not self._wait(work, block, spin=False):
                return False
        work.awaited_tick = work.first_tick + work.num_ticks - 1
        if operation.finish is not None:
            operation.finish()
        return True

    def _wait(self, work: LaneWork, block: bool, spin: bool) -> bool:
        """Wait for the tick that `work` needs, if this thread may; whether all have come."""
        if not block:
            # No wait follows, in which the end of the generation would be noticed.
            self.segment.raise_failure()
            return False
        self.segment.wait(work.awaited_tick, work.operation, self._overdue, spin)
        # A signal handler has closed the group in this thread meanwhile.
        if work.done and work.failure is not None:
            raise fresh_copy(work.failure)
        return True

    def _overdue(self) -> tuple[str, float] | None:
        # Of all: one that was issued later may have less time.
        now = time.monotonic()
        with self.lock:
            for operation in (work.operation for work in self._queue):
                if now >= operation.issued_at + operation.timeout_s:
                    return str(operation), operation.timeout_s
        return None

    # --------------------------------------------------------------------------------------------

    def _pending(self) -> deque[LaneWork]:
        return self._queue

    def _finish_all(self, error: CollectiveError) -> None:
        super()._finish_all(error)
        for work in self._queue:
            # A signal handler that closes the group may have interrupted the body itself.
            body = work.body
            if body is not None and inspect.getgeneratorstate(body) != inspect.GEN_RUNNING:
                body.close()
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
