"""Works that a thread of their communicator ends, and the one error that all of them share.

For transports in which one thread waits and another works. Each work is settled once, under one
lock. The first failure settles every work in flight, and every later one.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any, Generic, TypeVar

from .errors import CollectiveError, GroupAborted, fresh_copy
from .operation import Operation
from .work import SettledWork


class PendingWork(SettledWork):
    """A work that its communicator's thread settles, not the thread that waits."""

    def __init__(self, operation: Operation, in_flight: InFlight[Any]) -> None:
        super().__init__(operation, in_flight.changed)
        self.in_flight = in_flight

    def operations(self) -> Sequence[Operation]:
        """All operations that end with this work, in the order of issue."""
        return [self.operation]

    def _block(self) -> None:
        if not self.done:
            self._check_process()
        if threading.current_thread() in self.in_flight.workers and not self.done:
            raise RuntimeError(
                f"a callback waits for {self.operation} in a thread that ends works of the "
                "group, perhaps this one; wait in another thread, or give that work a callback of "
                "its own"
            )
        try:
            self._wait_until_done()
        except BaseException as error:  # An interrupt: the other ranks wait for this one.
            self._end_generation(f"{type(error).__name__} during {self.operation}")
            raise
        self._raise_failure()

    def _wait_until_done(self) -> None:
        """Not forever: the communicator enforces the deadline."""
        changed = self.in_flight.changed
        with changed:
            while not self.done:
                changed.wait()

    def _end_generation(self, reason: str) -> None:
        rank = self.in_flight.rank
        self.in_flight.abort(GroupAborted(self.operation.generation, [rank], reason))


AnyWork = TypeVar("AnyWork", bound=PendingWork)


class InFlight(Generic[AnyWork]):
    """The unsettled works of one communicator, in the order of issue.

    abort: the communicator's, for waiters that give up.
    changed: guards all fields; no thread holds it while it waits for anything else.
    workers: the threads that end works and run callbacks; they can wait for none of them.
    failure: the error that ended the generation.
    last_done: the collective that succeeded last.
    settled_at: time.monotonic() of the last success, in seconds.
    """

    def __init__(self, rank: int, abort: Callable[[CollectiveError], None]) -> None:
        self.rank = rank
        self.abort = abort
        self.changed = threading.Condition()
        self.works: deque[AnyWork] = deque()
        self.workers: Collection[threading.Thread] = ()
        self.failure: CollectiveError | None = None  # None: the generation lives
        self.last_done: Operation | None = None  # None: none is done yet
        self.settled_at = float("-inf")

    def add(self, work: AnyWork) -> None:
        with self.changed:
            if self.failure is None:
                self.works.append(work)
                self.changed.notify_all()
            else:
                work.settle(self.failure)

    def head(self) -> AnyWork | None:
        with self.changed:
            return self.works[0] if self.works else None

    def next(self) -> AnyWork | None:
        """Wait for the first work, if there is none; None when the generation has ended."""
        with self.changed:
            while not self.works and self.failure is None:
                self.changed.wait()
            return self.works[0] if self.works else None

    def in_order(self) -> list[AnyWork]:
        with self.changed:
            return list(self.works)

    def settle_if_head(self, work: AnyWork) -> bool:
        """Settle `work`, which has succeeded, if it is the first; the caller then calls back.
        False if the generation ended first, or another thread was faster."""
        with self.changed:
            if not self.works or self.works[0] is not work:
                return False
            self.settle_head()
            return True

    def settle_head(self) -> None:
        """Settle the first work, with the lock held; the caller then releases it and calls back."""
        work = self.works.popleft()
        work.settle(None)
        if work.operation.sequence >= 0:  # -1: a message before the first collective.
            self.last_done = work.operation
        self.settled_at = time.monotonic()
        self.changed.notify_all()

    def settle(self, work: AnyWork) -> None:
        """Settle `work`, which has succeeded, whatever its place, and call back."""
        with self.changed:
            if work.done:
                return  # The generation ended first.
            self.works.remove(work)
            work.settle(None)
            self.settled_at = time.monotonic()
            self.changed.notify_all()
        work.call_back()

    def fail(self, error: CollectiveError) -> None:
        """Settle all works with `error` if it is the first one, and call them back."""
        for work in self.settle_all(error) or ():
            work.call_back()

    def settle_all(self, error: CollectiveError) -> list[AnyWork] | None:
        """Settle all works with `error` if it is the first one; returns them, or None if it was
        not. The caller then releases its locks and calls them back."""
        with self.changed:
            if self.failure is not None:
                return None
            self.failure = fresh_copy(error)  # The frames of its traceback keep what they have.
            works = list(self.works)
            self.works.clear()
            for work in works:
                work.settle(self.failure)
            self.changed.notify_all()
        return works

    def overdue(self, margin: Callable[[Operation], float]) -> Operation | None:
        """The first operation that should have ended `margin` seconds ago."""
        now = time.monotonic()
        with self.changed:
            for operation in (one for work in self.works for one in work.operations()):
                if now > operation.issued_at + operation.timeout_s + margin(operation):
                    return operation
        return None

    def operations_done(self) -> int:
        return 0 if self.last_done is None else self.last_done.sequence + 1
