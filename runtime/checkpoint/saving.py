"""`Saving`: a checkpoint on its way to the storage, as something to wait for."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Generator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SavingTimes:
    """Where the time of one checkpoint went, on this rank.

    waited_s: for the checkpoint before it. paused_s: copying to the host; both hold training up.
    wrote_s: this rank's own file. total_s: until all ranks had written and it was whole.
    num_bytes: of this rank's file.
    """

    waited_s: float
    paused_s: float
    wrote_s: float
    total_s: float
    num_bytes: int


class Saving:
    """What `ctx.save()` returns, when the state is copied: training may go on. Nobody has to wait
    for it; a failure that nobody saw is raised at the next save, or at the end of the run.

    path: of the checkpoint. step: whose state it holds.
    """

    def __init__(self, path: str, step: int) -> None:
        self.path = path
        self.step = step
        self.is_observed = False
        self._future: concurrent.futures.Future[SavingTimes] = concurrent.futures.Future()

    @property
    def is_ready(self) -> bool:
        """Whether it is whole, or was given up."""
        return self._future.done()

    def wait(self, timeout_s: float | None = None) -> SavingTimes:
        """Block until the checkpoint is whole on the storage, written by all ranks.

        Raises CheckpointWriteFailed, on all ranks, if it was given up; TimeoutError if it is still
        on its way after `timeout_s`.
        """
        try:
            return self._future.result(timeout_s)
        finally:
            self.is_observed = self._future.done()

    def __await__(self) -> Generator[object, None, SavingTimes]:
        try:
            return (yield from asyncio.wrap_future(self._future).__await__())
        finally:
            self.is_observed = self._future.done()

    def check(self) -> None:
        """Raise its failure, if it has failed and nobody has seen that yet."""
        if self._future.done() and not self.is_observed:
            self.is_observed = True
            self._future.result()

    def end(self, outcome: SavingTimes | BaseException) -> None:
        """End the wait: the checkpoint is whole, or this is why it is not."""
        if isinstance(outcome, BaseException):
            self._future.set_exception(outcome)
        else:
            self._future.set_result(outcome)

    def __repr__(self) -> str:
        state = "ready" if self.is_ready else "on its way"
        return f"Saving(step={self.step}, path={self.path!r}, {state})"
