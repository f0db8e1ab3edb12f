"""Works that a thread of their communicator sees through to the end, and the one error of them all.

For transports in which the thread that waits is not the one that works. A verdict is written once,
under one lock. The first failure is the verdict of every work in flight, and of every later one.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from .errors import CollectiveError, GroupAborted
from .operation import Operation
from .work import SettledWork


class PendingWork(SettledWork):
    """A work whose verdict another thread writes than the one that waits."""

    def __init__(self, operation: Operation, in_flight: InFlight[Any]) -> None:
        super().__init__(operation, in_flight.changed)
        self.in_flight = in_flight

    def _block(self) -> None:
        changed = self.in_flight.changed
        if threading.current_thread() is self.in_flight.worker and not self.done:
            raise RuntimeError(
                f"a callback waits for {self.operation} in the thread that would have to end it; "
                "wait in another thread, or give that work a callback of its own"
            )
        try:
            with changed:
                while not self.done:  # Not for ever: the communicator holds the deadline.
                    changed.wait()
        except BaseException as error:  # An interrupt: the others wait for us.
            self._end_generation(f"{type(error).__name__} during {self.operation}")
            raise
        self._raise_failure()

    def _end_generation(self, reason: str) -> None:
        rank = self.in_flight.rank
        self.in_flight.abort(GroupAborted(self.operation.generation, [rank], reason))


AnyWork = TypeVar("AnyWork", bound=PendingWork)


class InFlight(Generic[AnyWork]):
    """The works of one communicator that have no verdict yet, in the order of issue.

    changed: guards everything here; never held while anything waits.
    worker: the thread that ends works, and runs callbacks; it can wait for none.
    failure: what ended the generation. abort: the communicator's, for waiters that give up.
    last_done: the operation that succeeded last, at settled_at (time.monotonic(), in seconds).
    """

    def __init__(self, rank: int, abort: Callable[[CollectiveError], None]) -> None:
        self.rank = rank
        self.abort = abort
        self.changed = threading.Condition()
        self.works: deque[AnyWork] = deque()
        self.worker: threading.Thread | None = None
        self.failure: CollectiveError | None = None
        self.last_done: Operation | None = None
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

    def settle_head(self) -> None:
        """With the lock: the first work has succeeded. The caller calls it back, without."""
        work = self.works.popleft()
        work.settle(None)
        if work.operation.sequence >= 0:  # Else a message before the first collective.
            self.last_done = work.operation
        self.settled_at = time.monotonic()
        self.changed.notify_all()

    def settle(self, work: AnyWork) -> None:
        """`work` has succeeded, whatever its place; calls it back."""
        with self.changed:
            if work.done:
                return  # The generation ended first.
            self.works.remove(work)
            work.settle(None)
            self.settled_at = time.monotonic()
            self.changed.notify_all()
        work.call_back()

    def fail(self, error: CollectiveError) -> bool:
        """Settle all works with `error`, if it is the first; whether it was."""
        with self.changed:
            if self.failure is not None:
                return False
            self.failure = error
            works = list(self.works)
            self.works.clear()
            for work in works:
                work.settle(error)
            self.changed.notify_all()
        for work in works:
            work.call_back()
        return True

    def overdue(self, margin: Callable[[Operation], float]) -> Operation | None:
        """The first operation that should have ended `margin` seconds ago."""
        now = time.monotonic()
        with self.changed:
            for work in self.works:
                operation = work.operation
                if now > operation.issued_at + operation.timeout_s + margin(operation):
                    return operation
        return None

    def operations_done(self) -> int:
        return 0 if self.last_done is None else self.last_done.sequence + 1
