"""The thread in which the user's function runs, with an event loop of its own.

The function may block; the worker's control loop continues. The end of the thread is delivered to
the loop that started it.
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import logging
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable, Iterator
from types import FrameType
from typing import Generic, TypeVar

from ..messages.whereabouts import users_stack
from .memory import give_back_device_memory

LEADS_TO_USERS_CODE = True  # Tracebacks leave out the frames of this file (outcomes.py).

Outcome = TypeVar("Outcome")


_IMPORTING = "<frozen importlib"
"""Begins the file names of Python's own code that imports modules."""


class TrainingThread(Generic[Outcome]):
    """Runs a function once; an awaitable that it returns is awaited on the thread's own loop.

    The thread is a daemon: a function that never returns does not keep the process alive.

    function: what is run.
    conclude: makes the outcome of the value, or of the error (then the value is None). It runs in
    the thread too, since pickling a large result takes time; `run` raises what it raises.
    may_interrupt: False while the function must not be interrupted.
    num_threads: of torch's operators in this thread. OpenMP counts them per thread, so the number
    is set here and not once for the process.
    """

    def __init__(
        self,
        function: Callable[[], object],
        conclude: Callable[[object, BaseException | None], Outcome],
        *,
        name: str,
        num_threads: int,
        may_interrupt: Callable[[], bool] = lambda: True,
    ) -> None:
        self._function = function
        self._may_interrupt = may_interrupt
        self._conclude = conclude
        self._num_threads = num_threads
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None  # None: no coroutine runs yet
        self._task: asyncio.Task[object] | None = None  # None: as `_loop`, and after its end
        self._has_returned = False
        """Whether the function is over; its outcome may still be in the making."""
        self._has_ended = threading.Event()

    async def run(self) -> Outcome:
        """Start the thread and suspend until it has ended. Cancelling this leaves it running."""
        self._caller = asyncio.get_running_loop()
        self._delivered: asyncio.Future[Outcome] = self._caller.create_future()
        self._thread.start()
        return await self._delivered

    async def stop(self, grace_s: float) -> None:
        """End the function, first as a coroutine, then wherever it runs Python. grace_s: seconds
        that it gets before each of the two."""
        for stop_harder in (self._cancel, self._interrupt):
            while not await asyncio.to_thread(self.wait_ended, grace_s):
                # False: it could not be interrupted now, for example while it imports. Tried once
                # more.
                if stop_harder():
                    break

    def _cancel(self) -> bool:
        """Cancel the coroutine, if there is one. A call that blocks continues."""
        with self._lock:
            # A plain function has no coroutine, and one that has ended no open loop.
            if self._loop is not None and self._task is not None and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._task.cancel)
        return True

    def _interrupt(self) -> bool:
        """Raise CancelledError in the function, wherever it runs Python. A single call into C
        continues until it returns. False, and nothing is raised, while it imports a module: modules
        that were left half-way would stay so for all later runs of this process."""
        if not self._may_interrupt():
            return False
        frame = sys._current_frames().get(self._thread.ident or 0)
        if any(
            each.f_code.co_filename.startswith(_IMPORTING)
            for each, _ in traceback.walk_stack(frame)
        ):
            return False
        # The outcome of a function that has returned is made without an interrupt.
        if not self._has_returned:
            self._raise_in_thread(ctypes.py_object(asyncio.CancelledError))
            if self._has_returned:  # Meanwhile, in the other thread.
                self._raise_in_thread(None)  # type: ignore[unreachable]
        return True

    def _raise_in_thread(self, error: ctypes.py_object[type[BaseException]] | None) -> None:
        """None: nothing, and what is still to be raised is not raised either."""
        if self._thread.ident is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread.ident), error)

    def _end_interrupts(self) -> None:
        # Without the lock: an interrupt in the instant in which it is taken would leave it taken.
        self._has_returned = True
        self._raise_in_thread(None)

    def wait_ended(self, timeout_s: float) -> bool:
        """Block until the function is over. Returns whether it is."""
        return self._has_ended.wait(timeout_s)

    def stack(self) -> str:
        """Where the user's function is now, as text; empty if it is over. For any thread."""
        if self._has_ended.is_set():
            return ""
        with self._lock:
            task = self._task
        if task is not None:
            coroutine = task.get_coro()
            # One that runs is on the thread's own stack.
            if not getattr(coroutine, "cr_running", True):
                # Suspended: the thread's own frames are those of an idle event loop.
                return users_stack(_suspended(coroutine))
        frame = sys._current_frames().get(self._thread.ident or 0)
        if frame is None:
            return ""
        return users_stack(reversed(list(traceback.walk_stack(frame))))

    def _main(self) -> None:
        import torch  # Not at the top of the file: see Worker.__init__, which has imported it.

        logging.getLogger("ray._private.worker").addFilter(_blocks_a_loop)
        torch.set_num_threads(self._num_threads)
        # What the function refers to, the user's data, goes with its end.
        function, self._function = self._function, _over
        value: object = None
        error: BaseException | None = None
        try:
            try:
                value = function()
                if inspect.isawaitable(value):
                    value = self._run_async(value)
            finally:
                self._end_interrupts()
        except BaseException as raised:
            # BaseException: a SystemExit or KeyboardInterrupt of the function is an ending, too.
            value, error = None, raised
            self._end_interrupts()  # An interrupt may have come first in `finally`.
        outcome: Outcome | BaseException
        try:
            outcome = self._conclude(value, error)
        except BaseException as raised:
            outcome = raised  # A thread that died and reported nothing would leave the run waiting.
        if error is None:
            value = None  # It may be on the GPU.
            give_back_device_memory()
        self._has_ended.set()
        # The control loop may be closed: the process is on its way out.
        if not self._caller.is_closed():
            self._caller.call_soon_threadsafe(self._deliver, outcome)

    def _run_async(self, awaitable: Awaitable[object]) -> object:
        async def main() -> object:
            with self._lock:
                self._loop = asyncio.get_running_loop()
                self._task = asyncio.current_task()
            return await awaitable

        with asyncio.Runner() as runner:
            try:
                return runner.run(main())
            finally:
                with self._lock:
                    self._task = None

    def _deliver(self, outcome: Outcome | BaseException) -> None:
        # The call was cancelled, and nobody waits for the outcome.
        if self._delivered.done():
            return
        if isinstance(outcome, BaseException):
            self._delivered.set_exception(outcome)
        else:
            self._delivered.set_result(outcome)


def _blocks_a_loop(record: logging.LogRecord) -> bool:
    """Whether Ray's warning of a `ray.get` in an async actor is true: it comes in every thread of
    the worker, and only a loop of the calling thread would be blocked."""
    # The thread itself; get_running_loop() would raise where there is none.
    return "inside async actor" not in str(record.msg) or asyncio._get_running_loop() is not None


def _over() -> object:
    raise RuntimeError("this thread has called its function")


def _suspended(awaited: object) -> Iterator[tuple[FrameType, int]]:
    """The frames of a suspended coroutine, and of the coroutines that it awaits."""
    while awaited is not None:
        frame = getattr(awaited, "cr_frame", None) or getattr(awaited, "gi_frame", None)
        if frame is not None:
            yield frame, frame.f_lineno
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "gi_yieldfrom", None)
