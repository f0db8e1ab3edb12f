"""What the reports of one run add up to: series to draw, in bounded memory."""

from __future__ import annotations

from itertools import pairwise
from statistics import median

from actors.messages import Report

_MOST_POINTS = 2000  # Of a rank; beyond that every other one is dropped.
_MOST_RATES = 60
_REPORTS_A_RATE = 6  # Fewer in one bin, and the rate would jump between two values.


class History:
    """losses: by rank, (optimizer step, loss). unit: of the rate: "tokens" or "samples" if the
    reports hold them, else "batches"."""

    def __init__(self) -> None:
        self.losses: dict[int, list[tuple[float, float]]] = {}
        self.unit = "batches"
        self._amounts: list[tuple[float, float]] = []  # (time, what was done since the one before)
        self._num_reports = 0

    def add(self, report: Report) -> None:
        values = report.values
        loss = values.get("loss")
        if isinstance(loss, int | float):
            points = self.losses.setdefault(report.rank, [])
            points.append((float(report.taken or report.step + 1), float(loss)))
            if len(points) > _MOST_POINTS:
                del points[1:-1:2]
        self.unit = next((name for name in ("tokens", "samples") if name in values), self.unit)
        amount = values.get(self.unit, 1)
        self._num_reports += 1
        self._amounts.append((report.time, float(amount) if not isinstance(amount, str) else 0.0))
        if len(self._amounts) > _MOST_POINTS:
            pairs = zip(self._amounts[::2], self._amounts[1::2], strict=False)
            self._amounts = [(second, a + b) for (_, a), (second, b) in pairs]

    def loss_lines(self) -> dict[int, list[tuple[float, float] | None]]:
        """By rank, with a break where a rank took no step for a while: it had joined."""
        return {rank: _broken(points) for rank, points in sorted(self.losses.items())}

    def rates(self) -> list[tuple[float, float]]:
        """(seconds since the first report, amount per second), over bins of equal length."""
        amounts = sorted(self._amounts)
        if len(amounts) < 2 or amounts[-1][0] <= amounts[0][0]:
            return []
        start, length = amounts[0][0], amounts[-1][0] - amounts[0][0]
        num_bins = max(1, min(_MOST_RATES, self._num_reports // _REPORTS_A_RATE))
        bins = [0.0] * num_bins
        for at, amount in amounts[1:]:  # The first one's own time is not known.
            bins[min(num_bins - 1, int((at - start) / length * num_bins))] += amount
        width = length / num_bins
        return [((number + 0.5) * width, amount / width) for number, amount in enumerate(bins)]


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
