"""Works composed of other works: several operations as one, and a barrier that names ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import torch

from ..contract.callback_thread import CallbackThread
from ..contract.errors import CollectiveTimeout
from ..contract.operation import Operation
from ..contract.work import Work


class Coalesced(Work):
    """The work of all operations issued inside its block; each of those operations returns it.

    NCCL launches the operations as one group call when the block ends, so a send and a recv that
    wait for each other may stand in any order. Between CPUs each operation starts when it is
    issued. Waiting inside the block raises RuntimeError. After an error in the block, the
    operations issued before it still run, because the other ranks depend on them.

    thread: the thread whose block it is. Between CPUs, what other threads issue is not in it.
    """

    def __init__(self, operation: Operation, end: Callable[[], None]) -> None:
        super().__init__(operation)
        self._end = end
        self._works: list[Work] = []
        self.is_open = True  # operations are still being added
        self.thread = threading.get_ident()

    def add(self, work: Work) -> None:
        if not any(work is other for other in self._works):
            self._works.append(work)

    def _block(self) -> None:
        """Block until all works are done; raises the first of their errors."""
        self._check_ended()
        for work in self._works:
            # The future must be complete when wait() returns.
            work.wait() if self._future is None else work.wait_on_host()

    def _block_host(self) -> None:
        self._check_ended()
        for work in self._works:
            work.wait_on_host()

    def is_completed(self) -> bool:
        return not self.is_open and all(work.is_completed() for work in self._works)

    def error(self) -> BaseException | None:
        return next((e for e in (work.error() for work in self._works) if e is not None), None)

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        self._check_ended()
        if not self._works:
            callback()
            return
        lock = threading.Lock()
        left = len(self._works)

        def count() -> None:
            nonlocal left
            with lock:
                left -= 1
                is_last = left == 0
            if is_last:
                callback()

        for work in self._works:
            work.add_done_callback(count)

    def _cuda_devices(self) -> list[torch.device]:
        return [device for work in self._works for device in work._cuda_devices()]

    def _callback_thread(self) -> CallbackThread | None:
        return self._works[0]._callback_thread() if self._works else None

    def _end_generation(self, reason: str) -> None:
        for work in self._works:
            if not work.is_completed():
                work._end_generation(reason)

    def _check_ended(self) -> None:
        if self.is_open:
            raise RuntimeError(
                "the coalesced operations are launched when their block ends; wait after it"
            )

    def _close(self) -> None:
        self.is_open = False
        self._end()

    def __enter__(self) -> Coalesced:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    async def __aenter__(self) -> Coalesced:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._close()
        if error is None:
            await self


class MonitoredBarrier(Work):
    """A transport's barrier, whose CollectiveTimeout names one missing rank, or all of them."""

    def __init__(self, barrier: Work, wait_all_ranks: bool) -> None:
        super().__init__(barrier.operation)
        self._barrier = barrier
        self._wait_all_ranks = wait_all_ranks

    def _block(self) -> None:
        try:
            self._barrier._block()
        except CollectiveTimeout:
            error = self.error()
            assert error is not None
            raise error from None

    def is_completed(self) -> bool:
        return self._barrier.is_completed()

    def error(self) -> BaseException | None:
        error = self._barrier.error()
        if isinstance(error, CollectiveTimeout) and not self._wait_all_ranks:
            first = sorted(error.ranks)[:1]
            clauses = error.whereabouts.split("; ")
            # Gloo and NCCL write a clause for each missing rank, shared memory one for several.
            mine = [one for one in clauses if any(one.startswith(f"rank {n} ") for n in first)]
            return replace(error, ranks=first, whereabouts="; ".join(mine or clauses))
        return error

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        self._barrier.add_done_callback(callback)

    def _callback_thread(self) -> CallbackThread | None:
        return self._barrier._callback_thread()

    def _end_generation(self, reason: str) -> None:
        self._barrier._end_generation(reason)

    def _look(self) -> bool:
        return self._barrier._look()
