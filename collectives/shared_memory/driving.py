"""Works that whoever waits for them drives: those of shared memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from ..contract.errors import CollectiveError, fresh_copy
from ..contract.operation import Operation
from ..contract.work import Work


class Driver(Protocol):
    """The queue that a work is in. One thread at a time drives it; the others wait."""

    def run_until(self, work: Any) -> None:
        """Block until `work` is done, driving if no other thread does."""

    def poll(self, work: Any) -> None:
        """Do what can be done without waiting; see to it that somebody does the rest."""

    def call_when_done(self, work: Any, callback: Callable[[], None]) -> None: ...


class DrivenWork(Work):
    """done, failure, callbacks: the driver's, who owes the callbacks to a work that it ends."""

    def __init__(self, operation: Operation, driver: Driver) -> None:
        super().__init__(operation)
        self._driver = driver
        self.done = False
        self.failure: CollectiveError | None = None
        self.callbacks: list[Callable[[], None]] = []

    def _block(self) -> None:
        if not self.done:
            self._driver.run_until(self)
        if self.failure is not None:
            raise fresh_copy(self.failure)

    def is_completed(self) -> bool:
        if not self.done:
            self._driver.poll(self)
        return self.done

    def error(self) -> BaseException | None:
        return None if self.failure is None else fresh_copy(self.failure)

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        self._driver.call_when_done(self, callback)


def call_back(ended: Iterable[DrivenWork]) -> None:
    """Without any lock: what is called may ask, issue, and wait."""
    for work in ended:
        callbacks, work.callbacks = work.callbacks, []
        for callback in callbacks:
            callback()
