"""Futures whose callbacks run in one order on all ranks, in a thread on which no transfer depends.

torch runs a callback in the thread that completes the future or, if the future is complete already,
in the thread that adds the callback. Which of the two applies differs between ranks, and so would
the order of operations that callbacks issue. Here completing a future and running a callback are
tasks of one queue, in the order in which they were added.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from ..contract.callback_thread import CallbackThread, callback_thread, report_uncaught

_here = threading.local()


def current_depth() -> int:
    """0 in the program, 1 in a callback, 2 in a callback of an operation that a callback issued."""
    depth: int = getattr(_here, "depth", 0)
    return depth


def thread_at(depth: int) -> CallbackThread:
    """The thread for the callbacks of operations issued at `depth`, for all process groups."""
    deeper = functools.partial(setattr, _here, "depth", depth + 1)
    return callback_thread(f"chorusline-torch-callbacks-{depth}", deeper)


class _FailedTensor(torch.Tensor):
    """The value of a failed future; every computation with it raises the error.

    A torch future keeps no Python exception, only values. torch's Python raises through
    `_set_unwrap_func`. torch's C++ (DDP's reducer) takes the value for tensors and slices the
    gradients out of it, and so raises the same error.
    """

    error: BaseException

    @staticmethod
    def __new__(cls, error: BaseException) -> _FailedTensor:
        tensor: _FailedTensor = torch.Tensor._make_wrapper_subclass(cls, (0,))
        tensor.error = error
        return tensor

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> NoReturn:
        raise next(value.error for value in args if isinstance(value, _FailedTensor))

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"<failed: {self.error}>"


class _Failure:
    """The value of a failed future on GPUs. torch pickles it at once to find tensors; this fails,
    and torch keeps the text as the future's error."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __reduce__(self) -> NoReturn:
        raise self.error


class OrderedFuture(torch.futures.Future):  # type: ignore[type-arg]
    """devices: the GPUs on which the tensors of the value live.
    complete: completes this future in the thread that waits; None: another thread will.

    has_its_turn: whether the thread of the callbacks has come to the end of this future. The value
        may be there before.
    """

    def __init__(
        self,
        thread: CallbackThread,
        devices: list[torch.device],
        complete: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(devices=list(devices))
        self.has_its_turn = False
        self._complete = complete
        self._callbacks = thread
        self._devices = devices

    def wait(self) -> Any:
        # Not in the order of the callbacks: an earlier operation may need what this rank does next.
        complete = self._complete  # Another thread may drop it meanwhile.
        if complete is not None:
            complete()
        return super().wait()

    def set_result(self, result: Any) -> None:
        self._complete = None  # It refers to the work, and the work to this.
        super().set_result(result)

    def then(self, callback: Callable[[Any], Any]) -> OrderedFuture:
        result = OrderedFuture(self._callbacks, self._devices)
        self._queue(lambda: self._call(callback, result))
        return result

    def add_done_callback(self, callback: Callable[[Any], Any]) -> None:
        self._queue(lambda: self._call(callback, None))

    def fail(self, error: BaseException) -> None:
        def unwrap(_: object) -> NoReturn:
            raise error

        self._set_unwrap_func(unwrap)
        self.set_result(_Failure(error) if self._devices else _FailedTensor(error))

    def set_exception(self, result: BaseException) -> None:
        self.fail(result)

    def _queue(self, task: Callable[[], None]) -> None:
        # A callback that adds another one to a complete future may wait for it at once. Only in
        # this thread is the same set of futures complete on all ranks.
        if self._callbacks.is_here() and self.has_its_turn:
            task()
        else:
            self._callbacks.add(task)

    def _call(self, callback: Callable[[Any], Any], result: OrderedFuture | None) -> None:
        try:
            with self._callbacks.streams(self._devices):
                with contextlib.suppress(BaseException):
                    super().wait()  # On GPUs this orders the stream after the value.
                value = callback(self)
                if result is not None:
                    result.set_result(value)  # On a GPU it refuses what does not pickle.
        except BaseException as error:
            if result is not None:
                result.fail(error)
            else:
                report_uncaught(error)
        if result is not None:
            result.has_its_turn = True
