"""From the reports of ranks to one number a name and step, for trackers. Pure: no clock, no Ray.

Ranks report when they have taken a step, and a pull brings the reports of some ranks earlier than
those of others. A step is held back until it is settled:

    (a) every rank that still has data is past it: it has reported a later step, or its status says
        that it has taken a later one;
    (b) or nothing has come for it for _QUIET_S, and every rank has reported it that reports at all;
        with amounts, has reported a later one: micro-batches may be slow, and each adds its own;
    (c) or _LONGEST_S have passed since its first report, with amounts since its last one, since a
        rank hangs or is slow.

What comes later for a step that is settled is logged if its name was not logged there yet; a second
mean of fewer ranks would be a wrong one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from chorusline.actors.messages.messages import Report, numbers_of
from chorusline.actors.messages.run_status import RunStatus

SUMS = frozenset({"tokens", "samples"})
"""Amounts: what all ranks have done together is their sum."""

_QUIET_S = 2.0
_LONGEST_S = 10.0


@dataclass(frozen=True, slots=True)
class Logged:
    """What a tracker's `log` gets."""

    step: int
    numbers: Mapping[str, float]
    time: float


@dataclass(slots=True)
class _Pending:
    """A step that is not settled. taken: of its reports, the most. first_s, last_s: when its first
    and its last report came."""

    first_s: float
    last_s: float
    taken: int = 0
    time: float = 0.0
    of_rank: dict[int, dict[str, float]] = field(default_factory=dict)


class StepNumbers:
    """The reports of one run, until they are settled."""

    def __init__(self) -> None:
        self._pending: dict[int, _Pending] = {}
        self._at: dict[int, int] = {}  # by rank, the step that it has reported last
        self._settled: int | None = None  # the last step that was logged; None: none
        self._names: set[str] = set()  # that were logged in it
        self.num_late = 0
        """Numbers that came too late for the mean of their step, and are logged nowhere."""

    def add(self, report: Report, now_s: float) -> list[Logged]:
        """Take one report; returns what is settled because its rank has gone back."""
        numbers = numbers_of(report.values)
        step = report.global_step
        back: list[Logged] = []
        # The reports of a rank come in order: its function runs again, from an earlier step.
        if step < self._at.get(report.rank, step):
            back = self.rest()
            self._at.clear()
            self._settled, self._names = step - 1, set()
        self._at[report.rank] = step
        if not numbers:
            return back
        if self._settled is not None and step <= self._settled:
            fresh = {} if step < self._settled else numbers
            fresh = {name: one for name, one in fresh.items() if name not in self._names}
            self.num_late += len(numbers) - len(fresh)
            numbers = fresh
            if not numbers:
                return back
        pending = self._pending.setdefault(step, _Pending(now_s, now_s))
        pending.last_s = now_s
        pending.taken = max(pending.taken, report.taken)
        pending.time = max(pending.time, report.time)
        mine = pending.of_rank.setdefault(report.rank, {})
        for name, number in numbers.items():
            mine[name] = number + (mine.get(name, 0.0) if name in SUMS else 0.0)
        return back

    def settled(self, statuses: Collection[RunStatus], now_s: float) -> list[Logged]:
        """The steps that are settled now, in order. statuses: of the ranks of the run, after their
        reports were added."""
        found: list[Logged] = []
        live = {one.rank: one for one in statuses if one.rank is not None and not one.has_joined}
        for step in sorted(self._pending):
            if not self._is_settled(step, self._pending[step], live, now_s):
                break  # Steps are logged in order.
            found.append(self._logged(step))
        return found

    def rest(self) -> list[Logged]:
        """All that is left, in order: the run is over."""
        return [self._logged(step) for step in sorted(self._pending)]

    def _is_settled(
        self, step: int, pending: _Pending, live: Mapping[int, RunStatus], now_s: float
    ) -> bool:
        has_sums = any(not SUMS.isdisjoint(numbers) for numbers in pending.of_rank.values())
        since_s = pending.last_s if has_sums else pending.first_s
        if now_s - since_s >= _LONGEST_S:  # (c)
            return True
        # (a) A rank that has never reported is past it by its steps alone.
        if live and all(
            self._at.get(rank, step) > step or (pending.taken and one.taken > pending.taken)
            for rank, one in live.items()
        ):
            return True
        # (b)
        reporting = [rank for rank in live if rank in self._at]
        is_quiet = now_s - pending.last_s >= _QUIET_S
        return is_quiet and all(self._at[rank] >= step + has_sums for rank in reporting)

    def _logged(self, step: int) -> Logged:
        pending = self._pending.pop(step)
        values: dict[str, list[float]] = {}
        for _, numbers in sorted(pending.of_rank.items()):
            for name, number in numbers.items():
                values.setdefault(name, []).append(number)
        if step != self._settled:
            self._settled, self._names = step, set()
        self._names |= values.keys()
        means = {
            name: sum(those) if name in SUMS else sum(those) / len(those)
            for name, those in values.items()
        }
        return Logged(step, means, pending.time)
