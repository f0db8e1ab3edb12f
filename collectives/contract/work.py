"""The handle of a collective in flight."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from typing import Any

import torch

from .errors import CollectiveError, fresh_copy
from .operation import Operation

_LOOKS = 4
"""Turns of the event loop in which an awaited work is looked at before its task goes to sleep.

Between ranks in step a small operation ends within a few microseconds, and going to sleep costs
100: a thread has to be woken, and has to wake the loop. all_reduce of 4 B on two busy cores, in
turns within one run: 2 ranks 124 us without looks, 27 with 2, 4, 8 or 32; 4 ranks 727 without, 500
to 700 with any number, within the noise. So few are enough, and they end: a late rank is slept for.

What did not win, likewise in turns: to look on from a timer of the loop every 100 us instead of
sleeping (2 ranks as fast, 4 ranks 830 us against 270, and it never stops asking); an eventfd that
the thread writes and the loop reads, in place of call_soon_threadsafe (89 us against 90, both
without looks)."""

_futures = threading.Lock()  # held for the moment in which it is decided who settles a future


class Work(ABC):
    """A collective that was issued and may not have ended.

    It makes progress by itself; nobody has to wait for it. `wait()` blocks the thread, `await`
    suspends the task; both give what `result()` gives. `is_completed()` asks. Waiting, in either
    way, raises the operation's error; the tensors are undefined until the work is done, and after
    an error.

    On CUDA `wait()` orders the current stream behind the work, as in torch, and returns before
    the GPU has finished; `await` returns when the host may read the data.

    A transport implements the methods at the end. A thread that ends works must hold no lock of
    the transport's while it calls callbacks.
    """

    def __init__(self, operation: Operation) -> None:
        self.operation = operation
        self._output: Any = None
        self._future: torch.futures.Future[Any] | None = None
        self._future_taken = False  # somebody settles it, or has

    @property
    def source_rank(self) -> int:
        """The rank that a recv got its data from; -1 before it is known, and otherwise."""
        return self.operation.peer if self.operation.receives else -1

    def wait(self) -> Any:
        """Block until done; the result. The deadline is the operation's own, from its issue.

        Raises CollectiveTimeout, CollectiveMismatch, PeerLost, GroupAborted or GroupClosed.
        """
        try:
            self._block()
        finally:
            # Whoever ended the work may not have come to call back yet.
            if self._future is not None and self.is_completed():
                self._settle_future()
        return self._output

    def result(self) -> Any:
        """The tensor that was written, or a list of them, or the objects; None of a barrier.

        Raises RuntimeError while the work is in flight, and its error if it failed.
        """
        if not self.is_completed():
            raise RuntimeError(
                f"{self.operation} is still in flight and has no result; wait() for it or await it"
            )
        error = self.error()
        if error is not None:
            raise error
        return self._output

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of what `result()` gives, tensors always in a list, as torch has it.

        It is complete, or has the work's error, before `wait()` returns. Callbacks run in
        whichever thread ends the work. On CUDA, once it was asked for, `wait()` blocks the host.
        """
        with _futures:
            made = self._future is None
            if self._future is None:
                self._future = torch.futures.Future(devices=_cuda_devices())
            future = self._future
        if made:
            self.add_done_callback(self._settle_future)
        return future

    def cancel(self) -> bool:
        """End the group's generation, on all ranks, because this rank wants this work no more.

        The other ranks are in it, or will be: they cannot go on without us. All of them raise
        GroupAborted that names this rank, the operation and the calling line.
        Returns False, and does nothing, if the work has ended already.
        """
        if self.is_completed():
            return False
        caller = sys._getframe(1)
        where = f"{caller.f_code.co_filename}:{caller.f_lineno}"
        self._end_generation(f"{self.operation} was cancelled at {where}")
        return True

    def __await__(self) -> Generator[object, None, Any]:
        if not self.is_completed():
            yield from self._until_done()
        if self._future is not None:
            self._settle_future()
        error = self.error()
        if error is not None:
            raise error
        return self._output

    def _until_done(self) -> Generator[object, None, None]:
        try:
            for _ in range(_LOOKS):
                yield None  # The other tasks run, once each.
                if self._look():
                    return
            loop = asyncio.get_running_loop()
            done = loop.create_future()

            def settle() -> None:
                if not done.done():
                    done.set_result(None)

            def wake() -> None:
                with contextlib.suppress(RuntimeError):  # It may be closed when a peer arrives.
                    loop.call_soon_threadsafe(settle)

            self.add_done_callback(wake)
            yield from done.__await__()
        except asyncio.CancelledError:
            if not self.is_completed():
                self._end_generation(f"the task that awaited {self.operation} was cancelled")
            raise

    def _giving(self, output: Any) -> Work:
        """`output` is what the work gives when it has succeeded."""
        self._output = output
        return self

    def _settle_future(self) -> None:
        """Return when the future is complete. The work has ended."""
        future = self._future
        assert future is not None
        with _futures:
            mine = not self._future_taken
            self._future_taken = True
        if not mine:
            while not future.done():  # Another thread is between the lines below.
                time.sleep(0)
            return
        error = self.error()
        if error is not None:
            future.set_exception(error)
        else:
            output = self._output
            future.set_result([output] if isinstance(output, torch.Tensor) else output)

    # -- what a transport says ---------------------------------------------------------------------

    @abstractmethod
    def _block(self) -> None:
        """`wait()` without the result: block, and raise the error if there is one.

        Interrupted by anything else than the work's own error, end the generation.
        """

    @abstractmethod
    def is_completed(self) -> bool:
        """Whether the work has ended, well or not. Never blocks, never raises."""

    @abstractmethod
    def error(self) -> BaseException | None:
        """Why it failed; None while in flight and after success."""

    @abstractmethod
    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call `callback` once when the work ends, from whichever thread sees it first.

        At once if it has ended. The callback must be short and must not raise.
        """

    @abstractmethod
    def _end_generation(self, reason: str) -> None:
        """Abort, as this rank: who waited for the work gives it up, and peers wait for us."""

    def _look(self) -> bool:
        """`is_completed()` for somebody who will ask again at once, or wait."""
        return self.is_completed()


class SettledWork(Work):
    """A work that a thread of this process settles: once, with the error if there is one.

    lock: guards done, failure and callbacks. `done` may be read without it.
    """

    def __init__(
        self, operation: Operation, lock: contextlib.AbstractContextManager[object]
    ) -> None:
        super().__init__(operation)
        self._lock = lock
        self.done = False
        self.failure: CollectiveError | None = None
        self.callbacks: list[Callable[[], None]] = []

    def settle(self, failure: CollectiveError | None) -> None:
        """With the lock held. The caller calls `call_back` after it has given the lock back."""
        self.failure = failure
        self.operation.end(failure)
        self.done = True

    def call_back(self) -> None:
        """Without any lock: a callback may ask for works, issue them, and wait for them."""
        callbacks, self.callbacks = self.callbacks, []
        for callback in callbacks:
            callback()

    def is_completed(self) -> bool:
        return self.done

    def error(self) -> BaseException | None:
        return None if self.failure is None else fresh_copy(self.failure)

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        with self._lock:
            if not self.done:
                self.callbacks.append(callback)
                return
        callback()

    def _raise_failure(self) -> None:
        """The end of `_block`."""
        if self.failure is not None:
            raise fresh_copy(self.failure)


def _cuda_devices() -> list[int | str | torch.device] | None:
    """A future refuses tensors on a device that it was not told of."""
    if not torch.cuda.is_initialized():
        return None
    return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
