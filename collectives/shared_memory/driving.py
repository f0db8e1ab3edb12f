"""Which thread drives the works of shared memory: its collectives (lane.py) and its messages.

- Issuing a work runs the part that needs no waiting, in the caller's thread.
- `wait()` drives the queue in the waiting thread, up to its own work. This needs no hand-over
  between threads, only a short spin.
- A background thread, which sleeps when nothing is pending, drives all other works. A timer wakes
  it after a short delay, unless `wait()` stops the timer: a thread that wakes and finds the work
  done takes the interpreter's lock twice, a quarter of the time of a sync all_reduce of 1 MiB.

One thread drives at a time; the others wait for their turn or for their work. The thread that ends
a work runs its callbacks, without the lock, and remains the driver meanwhile: a callback that waits
for another work drives the queue from within.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection

from ..contract.errors import CollectiveError, GroupAborted, fresh_copy
from ..contract.operation import Operation
from ..contract.work import SettledWork
from .segment import SharedSegment
from .wake_timer import WakeTimer

WAKE_DELAY_S = 0.0001


class DrivenWork(SettledWork):
    """A work in a `DrivenQueue`, which settles it and calls it back."""

    def __init__(self, operation: Operation, queue: DrivenQueue) -> None:
        super().__init__(operation, queue.lock)
        self._queue = queue

    def _block(self) -> None:
        if not self.done:
            self._queue.run_until(self)
        self._raise_failure()

    def is_completed(self) -> bool:
        if not self.done:
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
            self.call_background()

    def call_background(self, delay_s: float = WAKE_DELAY_S) -> None:
        """Wake the background thread in `delay_s` seconds, unless a waiting thread stops that."""
        with self.lock:
            if self._end is not None:
                return  # The driver ends the works, and the timer may be closed already.
            if self._wake_up is None:
                self._wake_up = WakeTimer()
                self._thread = threading.Thread(
                    target=self._background_loop,
                    args=(self._wake_up,),
                    name=self._thread_name,
                    daemon=True,
                )
                self._thread.start()
            self._called = True
            self._set_timer(self._wake_up, delay_s)

    def abort(self, error: CollectiveError) -> None:
        """End the generation on all ranks, and every work of this queue."""
        self.end(self.segment.abort(error))

    # -- implemented by a queue ------------------------------------------------------------------

    @abstractmethod
    def end(self, error: CollectiveError) -> None:
        """End every work with `error`, because the generation has ended."""

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
            while self._driven:
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
