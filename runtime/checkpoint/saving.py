"""`Saving`: a checkpoint in flight to the storage, for which a caller can wait."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Generator
from dataclasses import dataclass

from chorusline.collectives.contract.deadlines import Seconds, checked_seconds


@dataclass(frozen=True, slots=True)
class SavingTimes:
    """The times of one checkpoint on this rank, in seconds.

        times = ctx.save().wait()
        print(f"{times.num_bytes} bytes in {times.total_s:.1f} s")

    waited_s: training waited for the checkpoint before it.
    paused_s: training waited for the copy to the host.
    wrote_s: this rank wrote its own file.
    total_s: from the copy until all ranks had written and the checkpoint was complete.
    num_bytes: the size of this rank's file.
    """

    waited_s: float
    paused_s: float
    wrote_s: float
    total_s: float
    num_bytes: int


class Saving:
    """The result of `ctx.save()`, which returns once the state is copied: training may continue.
    You need not wait for it: a failure that no caller has seen is a warning at the next save, and
    an error at the end of the run.

        saving = ctx.save()  # On all ranks, after optimizer.step().
        print(saving.path, saving.is_ready)
        saving.wait()

    Only the wait ends when it is cancelled or times out: the checkpoint stays in flight.

    path: of the checkpoint. step: the step whose state it holds.
    """

    def __init__(self, path: str, step: int) -> None:
        self.path = path
        self.step = step
        self.is_observed = False
        self._future: concurrent.futures.Future[SavingTimes] = concurrent.futures.Future()
        # asyncio cancels with a task what the task waits for. The files are written all the same,
        # and the next save must wait for them: only the wait may end.
        self._future.set_running_or_notify_cancel()

    @property
    def is_ready(self) -> bool:
        """Whether the checkpoint is complete, or was given up."""
        return self._future.done()

    def wait(self, timeout_s: Seconds | None = None) -> SavingTimes:
        """Block until all ranks have written, and the checkpoint is complete in the storage.

        Raises CheckpointWriteFailed, on all ranks, if the checkpoint was given up; TimeoutError if
        it is still in flight after `timeout_s`. If it was given up because ranks were lost, and the
        run continues, the function runs again from the top, as after a rank is lost in any
        collective.
        """
        try:
            limit_s = None if timeout_s is None else checked_seconds(timeout_s, may_be_zero=True)
            return self._future.result(limit_s)
        finally:
            self.is_observed = self._future.done()

    def __await__(self) -> Generator[object, None, SavingTimes]:
        try:
            return (yield from asyncio.wrap_future(self._future).__await__())
        finally:
            self.is_observed = self._future.done()

    def is_whole_at_the_end(self) -> bool:
        """Block until the checkpoint is complete, or given up; whether it is complete. This is not
        a wait of the user, who has yet to see a failure."""
        return self._future.exception() is None

    def end(self, outcome: SavingTimes | BaseException) -> None:
        """End all waits. outcome: the times of a complete checkpoint, or the error."""
        if isinstance(outcome, BaseException):
            self._future.set_exception(outcome)
        else:
            self._future.set_result(outcome)

    def __repr__(self) -> str:
        state = "ready" if self.is_ready else "on its way"
        return f"Saving(step={self.step}, path={self.path!r}, {state})"
