"""A table in the shared memory: for which ranks each rank waits, in messages and subgroups."""

from __future__ import annotations

import time
from collections.abc import Sequence

from .layout import ELSEWHERE, RECEIVER_WAITS, SENDER_WAITS, channel_at


class Waits:
    """words: all words of the segment. rank, size: as in the group."""

    def __init__(self, words: memoryview, rank: int, size: int) -> None:
        self._words = words
        self._rank = rank
        self._size = size

    def show(self, at: int, since: float) -> None:
        """Write to word `at` of a channel since when this rank waits for the other rank."""
        self._words[at] = _milliseconds(since)

    def hide(self, at: int) -> None:
        self._words[at] = 0

    def show_elsewhere(self, ranks: Sequence[int], since: float) -> None:
        """Show that this rank waits for `ranks` in a subgroup; empty `ranks` end that."""
        for other in range(self._size):
            if other != self._rank:
                at = channel_at(self._size, self._rank, other) + ELSEWHERE
                self._words[at] = _milliseconds(since) if other in ranks else 0

    def of_all(self, timeout_s: float) -> dict[int, list[int]]:
        """The ranks that each rank waits for, apart from the ticks.

        timeout_s: of the caller's operation; waits that began in its second half are left out.
        """
        until = _milliseconds(time.monotonic() - timeout_s / 2)
        found: dict[int, list[int]] = {}
        for rank in range(self._size):
            for other in range(self._size):
                out = channel_at(self._size, rank, other)
                back = channel_at(self._size, other, rank)
                for at in (out + SENDER_WAITS, out + ELSEWHERE, back + RECEIVER_WAITS):
                    # A wait that has begun a moment ago explains nobody's lateness.
                    if 0 < self._words[at] <= until and other not in found.get(rank, ()):
                        found.setdefault(rank, []).append(other)
        return found


def _milliseconds(monotonic_s: float) -> int:
    """Whole milliseconds, at least 1, since 0 means no wait. A host has one monotonic clock."""
    return max(1, int(monotonic_s * 1000))
