"""The handle of a collective in flight."""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator

from .operation import Kind, Operation


class Work(ABC):
    """A collective that was issued and may not have ended.

    It makes progress by itself; nobody has to wait for it. `wait()` blocks the thread, `await`
    suspends the task, `is_completed()` asks. All three raise the operation's error; the tensors
    are undefined until the work is done, and after an error.

    On CUDA `wait()` orders the current stream behind the work, as in torch, and returns before
    the GPU has finished; `await` returns when the host may read the data.
    """

    def __init__(self, operation: Operation) -> None:
        self.operation = operation

    @property
    def source_rank(self) -> int:
        """The rank that a recv got its data from; -1 before it is known, and otherwise."""
        return self.operation.peer if self.operation.kind is Kind.RECV else -1

    @abstractmethod
    def wait(self) -> None:
        """Block until done. The deadline is the operation's own, counted from its issue.

        Raises CollectiveTimeout, CollectiveMismatch, PeerLost, GroupAborted or GroupClosed.
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
    def _abandon(self) -> None:
        """The task that awaited the work was cancelled: end the generation, peers wait for us."""

    def __await__(self) -> Generator[object, None, None]:
        if not self.is_completed():
            loop = asyncio.get_running_loop()
            done = loop.create_future()

            def settle() -> None:
                if not done.done():
                    done.set_result(None)

            def wake() -> None:
                with contextlib.suppress(RuntimeError):  # It may be closed when a peer arrives.
                    loop.call_soon_threadsafe(settle)

            self.add_done_callback(wake)
            try:
                yield from done.__await__()
            except asyncio.CancelledError:
                self._abandon()
                raise
        error = self.error()
        if error is not None:
            raise error
