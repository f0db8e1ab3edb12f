"""Which rank is far behind the others, and for how long. Pure: no clock of its own.

In the steps of `ctx.steps` a slow rank gets fewer micro-batches, so it does not hold the others up;
but a rank that stays far behind is worth a word: its machine is throttled, shared or broken.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

FAR = 2.0
"""A rank is far behind when it takes this many times as long as the median of the others."""

LONG_S = 30.0
"""It is a straggler when it has been far behind for so long."""


def slowness(paces: Sequence[float], rank: int) -> float:
    """How many times as long as the median of the others this rank takes; 0 if it is not known.

    paces: by rank, seconds per micro-batch; 0: not known."""
    others = [pace for other, pace in enumerate(paces) if other != rank and pace > 0]
    return paces[rank] / statistics.median(others) if others else 0.0


@dataclass(slots=True)
class Stragglers:
    """The ranks that are far behind, step by step. A new one begins when the ranks change.

    now: those that are stragglers."""

    now: set[int] = field(default_factory=set)
    _since: dict[int, float] = field(default_factory=dict)

    def note(self, paces: Sequence[float], now_s: float) -> list[int]:
        """Note the paces of a step. Returns the ranks that have become stragglers."""
        far = [rank for rank in range(len(paces)) if slowness(paces, rank) >= FAR]
        self._since = {rank: self._since.get(rank, now_s) for rank in far}
        before = self.now
        self.now = {rank for rank, since_s in self._since.items() if now_s - since_s >= LONG_S}
        return sorted(self.now - before)
