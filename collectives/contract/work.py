"""The handle of a collective in flight."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

import torch

from .callback_thread import CallbackThread, report_uncaught
from .errors import CollectiveError, fresh_copy
from .operation import Operation
from .torch_hints import instead_of_attribute

_LOOKS = 4
"""Turns of the event loop in which an awaited work is polled before its task sleeps.

Between ranks in step a small operation ends within a few microseconds, and sleeping costs 100 us:
a thread has to be woken, and has to wake the loop. all_reduce of 4 B on two busy cores, variants
alternating in one run: 2 ranks took 124 us without polls, 27 us with 2, 4, 8 or 32; 4 ranks took
727 us without, 500 to 700 us with any number, within the noise. So a few polls are enough; for a
late rank the task sleeps.

Measured likewise, and no better: polling from a timer of the loop every 100 us instead of sleeping
(2 ranks as fast, 4 ranks 830 us against 270 us, and the timer never stops); an eventfd that the
thread writes and the loop reads, in place of call_soon_threadsafe (89 us against 90 us, both
without polls)."""

_forked_at = float("-inf")  # time.monotonic() at the beginning of this process, if it is a fork


def _note_fork() -> None:
    global _forked_at
    _forked_at = time.monotonic()


os.register_at_fork(after_in_child=_note_fork)

_futures = threading.Lock()  # held while a thread claims the settling of a future


class Work(ABC):
    """A collective that was issued and may not have ended.

        work = group.all_reduce(torch.ones(4))
        work.add_done_callback(lambda: print("reduced"))
        total = work.wait()  # In an async def function: await work
        assert work.is_completed() and work.error() is None

    A work makes progress although no thread waits for it. `wait()` blocks the thread, `await`
    suspends the task; both return what `result()` returns. `is_completed()` asks. Both ways of
    waiting raise the operation's error. The tensors are undefined until the work is done, and
    after an error.

    On CUDA `wait()` orders the current stream after the work, as in torch, and returns before
    the GPU has finished; `wait_on_host()` and `await` return when the host may read the data.

    Collectives of objects (`ObjectWork`), messages of objects and a block of `group.coalesce()`
    (`Coalesced`) are works as well, with these methods.

    A transport implements the methods at the end. A thread that ends works must hold no lock of
    the transport while it runs callbacks.
    """

    # Of the class until they are set, which takes time: most works end without.
    _output: Any = None
    _future: torch.futures.Future[Any] | None = None  # None: unless it was asked for
    _future_taken = False  # whether a thread settles the future, or has done so

    def __init__(self, operation: Operation) -> None:
        self.operation = operation

    # Not for type checkers: for them a mistyped name stays an error.
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            text = f"{type(self).__name__!r} object has no attribute {name!r}"
            raise AttributeError(text + instead_of_attribute(name), name=name, obj=self)

    @property
    def source_rank(self) -> int:
        """The rank whose data a recv received; -1 before it is known, and of other operations."""
        return self.operation.peer if self.operation.receives else -1

    def wait(self, timeout: None = None) -> Any:
        """Block until done and return the result. The operation's deadline counts from its issue.

        timeout: not supported, since a rank cannot give up alone; pass timeout_s to the operation.

        Raises CollectiveTimeout, CollectiveMismatch, PeerLost, GroupAborted or GroupClosed.
        """
        # torch has it there, and a number would be taken for seconds that this rank waits alone.
        if timeout is not None:
            raise TypeError(
                "wait() takes no timeout: the deadline of an operation starts when it is issued, "
                "on all ranks. Pass timeout_s=, in seconds, to the operation, or to the group"
            )
        try:
            self._block()
        finally:
            # Its owner may look as soon as this returns.
            if self._future is not None:
                self._complete_future()
        return self._output

    def wait_on_host(self) -> Any:
        """`wait()`, after which the host may read the data: on CUDA too it returns when the work is
        done. After `wait()` alone, a read such as `tolist()` would return even when a failure has
        ended the GPU's kernel, with undefined values and no error.

        Raises what `wait()` raises.
        """
        try:
            self._block_host()
        finally:
            if self._future is not None:
                self._complete_future()
        return self._output

    def order_stream(self) -> None:
        """`wait()`, for a caller that learns in another way how the work has ended, before anything
        that was computed after it is used (`Group.has_misled`)."""
        self._block()

    def _check_process(self) -> None:
        """Raise in a fork of the process that issued the work, in which no thread would end it."""
        if self.operation.issued_at < _forked_at:
            raise RuntimeError(
                f"{self.operation}: its group belongs to the process that issued it, and this is a "
                f"fork of that, process {os.getpid()}, which is not a rank and has none of its "
                "threads; wait for it before the fork, and call Group.create after the fork"
            )

    def _complete_future(self) -> None:
        # The thread that ended the work may not have run the callbacks yet.
        if self.is_completed():
            self._settle_future()

    def result(self) -> Any:
        """The written tensor, the list of written tensors, or the objects; None for a barrier.

        Raises RuntimeError while the work is in flight, and the work's error if it failed.
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
        """A future of what `result()` returns; tensors are always in a list, as in torch.

        The future is complete, or has the work's error, before `wait()` returns. Callbacks run in
        the thread that ends the work, on CUDA in one of their own, or in that which waits. They
        return tensors of the work's GPU or of the CPU, as in torch. On CUDA, `wait()` blocks the
        host once a future was made.
        """
        thread, devices = self._callback_thread(), self._cuda_devices()
        with _futures:
            made = self._future is None
            if self._future is None:
                self._future = torch.futures.Future(devices=list(devices))
            future = self._future
        # Outside the lock: a work that has ended calls back at once, and takes it.
        if made:
            if thread is None or self.is_completed():
                self.add_done_callback(self._settle_future)
            else:

                def settle() -> None:
                    error = self.error()
                    with contextlib.ExitStack() as stack:
                        if error is None:
                            try:
                                # The program's stream may wait for later works.
                                stack.enter_context(thread.streams(devices))
                            except Exception as failure:  # The GPU has failed.
                                error = failure
                        self._settle_future(error)

                self.add_done_callback(lambda: thread.add(settle))
        return future

    def cancel(self) -> bool:
        """End the group's generation on all ranks, because this rank gives up this work.

        The other ranks issue the operation too, and cannot finish it without this rank. All of
        them raise GroupAborted that names this rank, the operation and the calling line.
        Returns False, and does nothing, if the work has ended already; on CUDA it may end after
        `wait()` has returned.
        """
        # There is nothing left to give up; the other ranks have it as well.
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
        return self.result()

    def _until_done(self) -> Generator[object, None, None]:
        try:
            for _ in range(_LOOKS):
                yield None  # Each other task that is ready runs once.
                if self._look():
                    return
            loop = asyncio.get_running_loop()
            done = loop.create_future()

            def settle() -> None:
                if not done.done():
                    done.set_result(None)

            def wake() -> None:
                with contextlib.suppress(RuntimeError):  # The loop may be closed by then.
                    loop.call_soon_threadsafe(settle)

            self.add_done_callback(wake)
            yield from done.__await__()
        except asyncio.CancelledError:
            if not self.is_completed():
                self._end_generation(f"the task that awaited {self.operation} was cancelled")
            raise

    def _settle_future(self, error: BaseException | None = None) -> None:
        """Complete the future, or wait until another thread has. The work must have ended.

        error: None: that of the work, if it has one."""
        future = self._future
        assert future is not None
        with _futures:
            mine = not self._future_taken
            self._future_taken = True
        if not mine:
            while not future.done():  # Another thread is executing the lines below.
                time.sleep(0)
            return
        error = error or self.error()
        if error is not None:
            future.set_exception(error)
        else:
            output = self._output
            future.set_result([output] if isinstance(output, torch.Tensor) else output)

    def _cuda_devices(self) -> list[torch.device]:
        """Those of the result: a future refuses tensors on devices that were not named at its
        making, and opens a context on each that was when it has a callback."""
        tensors = self._output if isinstance(self._output, list) else [self._output]
        return [one.device for one in tensors if isinstance(one, torch.Tensor) and one.is_cuda]

    def _callback_thread(self) -> CallbackThread | None:
        """That completes the future; None: the thread that ends the work does."""
        return None

    # -- implemented by a transport ---------------------------------------------------------------

    @abstractmethod
    def _block(self) -> None:
        """`wait()` without the result: block, and raise the error if there is one.

        An interrupt, or any exception other than the work's error, ends the generation.
        """

    def _block_host(self) -> None:
        """`_block`, until the host may read the data: the same, except on a GPU."""
        self._block()

    @abstractmethod
    def is_completed(self) -> bool:
        """Whether the work has ended, with success or an error. Never blocks, and raises only in a
        fork, where a work in flight never ends."""

    @abstractmethod
    def error(self) -> BaseException | None:
        """Why the work failed; None while in flight and after success."""

    @abstractmethod
    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call `callback` once when the work ends, from the thread that detects the end first.

        The call is immediate if the work has ended. A callback must be short. What it raises in
        the thread that ends the work goes to threading.excepthook.
        """

    @abstractmethod
    def _end_generation(self, reason: str) -> None:
        """Abort in this rank's name: its waiter gave up, and peers would wait for this rank."""

    def _look(self) -> bool:
        """`is_completed()` for a caller that will ask again at once, or wait."""
        return self.is_completed()


class SettledWork(Work):
    """A work that a thread of this process settles: once, with the error if there is one.

    lock: guards done, failure and callbacks. `done` may be read without the lock.
    """

    done = False
    failure: CollectiveError | None = None  # None: in flight, or done
    callbacks: tuple[Callable[[], None], ...] = ()

    def __init__(
        self, operation: Operation, lock: contextlib.AbstractContextManager[object]
    ) -> None:
        super().__init__(operation)
        self._lock = lock

    def settle(self, failure: CollectiveError | None) -> None:
        """End the work, with the lock held. The caller calls `call_back` after releasing it."""
        self.failure = failure
        # `done` last: whoever reads it without the lock finds the rest.
        self.operation.end(failure)
        self.done = True

    def call_back(self) -> None:
        """Run the callbacks, without any lock: they may query works, issue and wait for them."""
        # Taken out: a callback that adds another one is called by that at once.
        callbacks, self.callbacks = self.callbacks, ()
        for callback in callbacks:
            try:
                callback()
            # The others may be what tasks sleep on, and the thread is needed for other works.
            except Exception as error:
                report_uncaught(error)

    def is_completed(self) -> bool:
        if not self.done:
            self._check_process()
        return self.done

    def error(self) -> BaseException | None:
        return None if self.failure is None else fresh_copy(self.failure)

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        with self._lock:
            if not self.done:
                self.callbacks += (callback,)
                return
        callback()

    def _raise_failure(self) -> None:
        """The last line of `_block` in subclasses."""
        if self.failure is not None:
            raise fresh_copy(self.failure)


def every_cuda_device() -> list[torch.device]:
    """For a future of objects, which may bring tensors of any."""
    if not torch.cuda.is_initialized():
        return []
    return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
