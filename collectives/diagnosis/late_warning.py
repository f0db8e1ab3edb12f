"""A warning about ranks that are late, long before the deadline ends the generation.

A program that has just been written hangs because a rank has left a loop early, or reduces by
itself. Its author need not wait for the deadline to learn which rank, and where.
"""

from __future__ import annotations

import time
from collections.abc import Collection

from ..contract.errors import name_ranks
from ..contract.operation import Operation
from .debug import logger

TOLD_AFTER_S = 5.0


class Lateness:
    """How often one rank warns in one group: of the first late arrival only, and only if it is the
    lowest rank that waits. A group whose ranks often wait for each other logs it once."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._is_over = False

    def is_due(self, operation: Operation | str) -> bool:
        """Whether it is time to look who is late."""
        if self._is_over or not isinstance(operation, Operation) or operation.is_between_two:
            return False  # A message may come at any time.
        return TOLD_AFTER_S < time.monotonic() - operation.issued_at < operation.timeout_s

    def tell(self, operation: Operation, late: Collection[int], whereabouts: str) -> None:
        """late: ranks of the group. whereabouts: of the ranks, in words."""
        if not late:
            return
        self._is_over = True
        if self._rank != min(set(range(self._size)).difference(late), default=-1):
            return
        at = f" at {site}" if (site := operation.site()) else ""
        logger.warning(
            "%s%s has waited %.0f s for %s: %s. After %g s (timeout_s) it fails. If your "
            "steps are only slow, ignore this; it is logged once",
            operation,
            at,
            time.monotonic() - operation.issued_at,
            name_ranks(sorted(late)),
            whereabouts,
            operation.timeout_s,
        )
