"""The reports of one run as series to draw, evenly spaced and in bounded memory."""

from __future__ import annotations

from itertools import pairwise
from statistics import median
from typing import Generic, TypeVar

from chorusline.actors.messages.messages import Report, numbers_of

_MOST_POINTS = 480  # of one rank: as many as the pixels of a chart can show
_MOST_BINS = 512
_FIRST_BIN_S = 0.01
_MOST_RATES = 60
_REPORTS_A_RATE = 6  # With fewer reports the rate would jump between two values.
_MOST_NAMES = 64  # of which curves are kept

T = TypeVar("T")

BOOKKEEPING = frozenset({"epoch", "batch", "step", "batches_left", "tokens", "samples"})
"""Numbers of reports that say where a rank is, or how much it has done. They are shown as such, and
not as curves of their own."""


class Thinned(Generic[T]):
    """Keeps each n-th of numbered items; n doubles when there are more than `most`: so they go back
    to the beginning of a run of any length."""

    def __init__(self, most: int) -> None:
        self.items: list[tuple[int, T]] = []  # with their numbers
        self.num_added = 0
        self._most = most
        self._every = 1

    def add(self, number: int, item: T) -> None:
        self.num_added += 1
        if number % self._every == 0:
            self.items.append((number, item))
        if len(self.items) > self._most:
            self._every *= 2
            self.items = [one for one in self.items if one[0] % self._every == 0]


class History:
    """The reports of one run. unit: what the rate counts: "tokens" or "samples" if reports have
    them, of all ranks together, else "steps". began_at: the time of the first report; None before
    it."""

    def __init__(self) -> None:
        self.unit = "steps"
        self._curves: dict[str, dict[int, Thinned[tuple[float, float]]]] = {}  # by name and rank
        self.began_at: float | None = None  # None: before the first report
        self._length_s = 0.0
        self._num_reports = 0
        self._step_of: dict[int, int] = {}  # by rank, the last one
        self._step = 0  # of the rank that is furthest
        self._bins: list[float] = []  # the amount of each interval of _bin_s since the beginning
        self._bin_s = _FIRST_BIN_S

    @property
    def has_curves(self) -> bool:
        return bool(self._curves)

    @property
    def names(self) -> list[str]:
        """The names of the curves: the loss first, then in the order in which they were reported
        first."""
        return sorted(self._curves, key=lambda name: name != "loss")

    def add(self, report: Report) -> None:
        values, at = report.values, report.global_step
        if at < self._step_of.get(report.rank, at) or self.began_at is None:
            self._step = at  # The first report, or the function runs again, on all ranks.
            self._step_of.clear()
        num_steps = max(0, at - self._step)
        self._step += num_steps
        self._step_of[report.rank] = at
        for name, value in numbers_of(values).items():
            if name in BOOKKEEPING or (
                name not in self._curves and len(self._curves) >= _MOST_NAMES
            ):
                continue
            by_rank = self._curves.setdefault(name, {})
            curve = by_rank.setdefault(report.rank, Thinned(_MOST_POINTS))
            # Not by step: a number of every 100th step would vanish from a curve of even ones.
            curve.add(curve.num_added, (float(at), value))
        self.unit = next((name for name in ("tokens", "samples") if name in values), self.unit)
        amount = num_steps if self.unit == "steps" else values.get(self.unit, 0)
        self._num_reports += 1
        if self.began_at is None:
            self.began_at = report.time  # The length of the first step is unknown: do not count.
        elif isinstance(amount, int | float):
            # Clocks of hosts differ, so a report may have an earlier time than the first one.
            self._done(max(0.0, report.time - self.began_at), float(amount))

    def lines(self, name: str = "loss") -> dict[int, list[tuple[float, float] | None]]:
        """By rank, (optimizer step, number), with None where a rank took no step for a while, since
        it had joined."""
        by_rank = self._curves.get(name, {})
        return {
            rank: _broken([point for _, point in curve.items])
            for rank, curve in sorted(by_rank.items())
        }

    def rates(self) -> list[tuple[float, float]]:
        """(seconds since the first report, amount per second), over intervals of equal length."""
        most = max(1, min(_MOST_RATES, self._num_reports // _REPORTS_A_RATE))
        together = -(-len(self._bins) // most) if self._bins else 1
        found = []
        for first in range(0, len(self._bins), together):
            start_s = first * self._bin_s
            end_s = min(self._length_s, (first + together) * self._bin_s)
            # The last interval is not over, and a short part of it would give a random rate.
            if end_s - start_s > 0.5 * together * self._bin_s:
                rate = sum(self._bins[first : first + together]) / (end_s - start_s)
                found.append(((start_s + end_s) / 2, rate))
        return found

    def _done(self, at_s: float, amount: float) -> None:
        self._length_s = max(self._length_s, at_s)
        while at_s >= _MOST_BINS * self._bin_s:
            if len(self._bins) % 2:
                self._bins.append(0.0)
            self._bins = [a + b for a, b in zip(self._bins[::2], self._bins[1::2], strict=True)]
            self._bin_s *= 2
        number = int(at_s / self._bin_s)
        self._bins += [0.0] * (number + 1 - len(self._bins))
        self._bins[number] += amount


def _broken(points: list[tuple[float, float]]) -> list[tuple[float, float] | None]:
    if len(points) < 3:
        return list(points)
    steps = [later[0] - earlier[0] for earlier, later in pairwise(points)]
    usual = max(1.0, median(steps))
    line: list[tuple[float, float] | None] = [points[0]]
    for step, point in zip(steps, points[1:], strict=True):
        if step > 3 * usual:
            line.append(None)
        line.append(point)
    return line
