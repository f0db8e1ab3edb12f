"""A barrier that says who is missing."""

from __future__ import annotations

from collections.abc import Callable

from ..contract.errors import CollectiveTimeout
from ..contract.work import Work


class MonitoredBarrier(Work):
    """A transport's barrier, whose deadline names as many missing ranks as it was asked for."""

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
            first = min(error.ranks, default=None)
            if first is not None:
                # "rank 1 is at …; rank 2 is at …", one clause per missing rank
                clauses = error.whereabouts.split("; ")
                mine = [told for told in clauses if told.startswith(f"rank {first} ")]
                where = "; ".join(mine)
                return CollectiveTimeout(
                    error.operation, error.generation, [first], error.timeout_s, where
                )
        return error

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        self._barrier.add_done_callback(callback)

    def _end_generation(self, reason: str) -> None:
        self._barrier._end_generation(reason)

    def _look(self) -> bool:
        return self._barrier._look()
