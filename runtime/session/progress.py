"""The progress of a run: live bars in a terminal, else plain lines.

In a job's log, a file or a pipe rich would show only its last bar, and Ray merges identical lines.
So this process prints a plain line every few seconds, and each line has its step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import mean
from types import TracebackType
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from actors.messages import Report

LINE_INTERVAL_S = 5.0
MAX_RANKS_LISTED = 8  # More ranks than this are counted, not listed.


@dataclass(frozen=True)
class RankSeen:
    """The last report of one rank."""

    epoch: int
    taken: int  # batches of that epoch, one per report
    left: int | None  # batches of that epoch, if reported
    loss: float | None


@dataclass(frozen=True)
class Seen:
    """The sum of all reports so far. Frozen, since the display draws it from a thread.

    Reports come in bursts, one rank's before another's. So a rank counts as joined only when it
    has reported no batch left and another rank has taken more batches of the same epoch. If all
    ranks end an epoch with equal numbers, no rank joins.
    """

    ranks: Mapping[int, RankSeen] = field(default_factory=dict)
    steps_of: Mapping[int, int] = field(default_factory=dict)  # epoch -> most steps of any rank
    tokens: float = 0.0  # after the first report, whose step includes the start
    first_s: float = 0.0
    last_s: float = 0.0

    def add(self, report: Report) -> Seen:
        values = report.values
        epoch = _whole(values, "epoch") or 0
        before = self.ranks.get(report.rank)
        rank = RankSeen(
            epoch=epoch,
            taken=1 if before is None or before.epoch != epoch else before.taken + 1,
            left=_whole(values, "batches_left"),
            loss=_number(values, "loss"),
        )
        longest = max(self.steps_of.get(epoch, 0), rank.taken)
        return Seen(
            ranks={**self.ranks, report.rank: rank},
            steps_of={**self.steps_of, epoch: longest},
            tokens=self.tokens + (_number(values, "tokens") or 0.0) if self.ranks else 0.0,
            first_s=self.first_s if self.ranks else report.time,
            last_s=max(self.last_s, report.time),
        )

    @property
    def step(self) -> int:
        """The number of optimizer steps so far."""
        return sum(self.steps_of.values())

    @property
    def joined(self) -> frozenset[int]:
        epoch = max(self.steps_of, default=0)
        return frozenset(
            rank
            for rank, its in self.ranks.items()
            if its.left == 0 and its.epoch == epoch and its.taken < self.steps_of[epoch]
        )

    @property
    def loss(self) -> float | None:
        """The mean of the last losses of the ranks that still have data."""
        joined = self.joined
        live = (its for rank, its in self.ranks.items() if rank not in joined)
        losses = [its.loss for its in live if its.loss is not None]
        return mean(losses) if losses else None

    @property
    def tokens_per_s(self) -> float | None:
        elapsed_s = self.last_s - self.first_s
        return self.tokens / elapsed_s if self.tokens and elapsed_s > 0 else None


def _number(values: Mapping[str, Any], name: str) -> float | None:
    """A value of a report if it is a number: one of this name may be a vector or a text."""
    value = values.get(name)
    return float(value) if isinstance(value, int | float) else None


def _whole(values: Mapping[str, Any], name: str) -> int | None:
    number = _number(values, name)
    return None if number is None or not math.isfinite(number) else int(number)


def headline(seen: Seen, num_steps: int | None) -> str:
    parts = [f"step {seen.step}" + (f"/{num_steps}" if num_steps else "")]
    if seen.loss is not None:
        parts.append(f"loss {seen.loss:.3f}")
    if seen.tokens_per_s is not None:
        parts.append(f"{seen.tokens_per_s:,.0f} tokens/s")
    return "  ".join(parts)


def batches_left(seen: Seen) -> str:
    """`batches left: rank 0 130, rank 1 joined`; many ranks are summed up in one phrase."""
    joined = seen.joined
    left = {rank: its.left for rank, its in sorted(seen.ranks.items()) if its.left is not None}
    if not left:
        return ""
    if len(left) <= MAX_RANKS_LISTED:
        says = (f"rank {rank} {'joined' if rank in joined else n}" for rank, n in left.items())
        return "batches left: " + ", ".join(says)
    live = [n for rank, n in left.items() if rank not in joined]
    return f"batches left: {min(live)} to {max(live)}; {len(joined)} of {len(left)} ranks joined"


def plain_line(seen: Seen, num_steps: int | None) -> str:
    return "  ".join(filter(None, [headline(seen, num_steps), batches_left(seen)]))


def joining(before: Seen, after: Seen) -> str:
    """A sentence about the ranks that have joined between the two, or an empty text."""
    ranks = sorted(after.joined - before.joined)
    if not ranks:
        return ""
    subject = f"rank {ranks[0]} has" if len(ranks) == 1 else f"ranks {ranks} have"
    return f"step {after.step}: {subject} run out of data and joined; the others go on"


class Progress:
    """Shows a run's reports: hand `on_report` to the Session, and enter this object around it.

    It shows the values loss, tokens, batches_left and epoch of a report, if it has them.
    num_steps: steps of the whole run, for the bar; None if unknown.
    """

    def __init__(self, num_steps: int | None = None, *, console: Console | None = None) -> None:
        self._num_steps = num_steps
        self._console = console or Console()
        self._seen = Seen()
        self._entered_s = time.monotonic()
        self._line_due_s = 0.0
        self._live: Live | None = None

    def __enter__(self) -> Progress:
        self._entered_s = time.monotonic()
        if self._console.is_interactive:
            self._live = Live(
                get_renderable=self._draw, console=self._console, refresh_per_second=8
            )
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
        elif self._seen.ranks:
            self.say(plain_line(self._seen, self._num_steps))

    def on_report(self, report: Report) -> None:
        """Show what a rank has reported: hand this method to a session as its on_report."""
        now_s = time.monotonic()
        before, self._seen = self._seen, self._seen.add(report)
        if news := joining(before, self._seen):
            self.say(news)
        if self._live is None and now_s >= self._line_due_s:
            self._line_due_s = now_s + LINE_INTERVAL_S
            self.say(plain_line(self._seen, self._num_steps))

    def say(self, line: str) -> None:
        """Print a line, above the bars if there are any."""
        # People search a log by line, so lines are not wrapped at the 80 columns of a job's output.
        self._console.print(Text(line), soft_wrap=True)

    def _draw(self) -> RenderableType:
        seen = self._seen
        elapsed_s = time.monotonic() - self._entered_s
        if not seen.ranks:
            return Text(f"starting workers … {elapsed_s:.0f} s", style="dim")
        top = Text(f"{headline(seen, self._num_steps)}  {elapsed_s:.0f} s", style="bold")
        bars = Table.grid(padding=(0, 2))
        bars.add_row("all ranks", _bar(seen.step, self._num_steps))
        if len(seen.ranks) > MAX_RANKS_LISTED:
            return Group(top, bars, Text(batches_left(seen), style="dim"))
        for rank, its in sorted(seen.ranks.items()):
            if its.left is not None:
                says = Text(f"{its.left} batches left", style="dim")
                if rank in seen.joined:
                    says = Text("out of data, has joined", style="yellow")
                bars.add_row(f"rank {rank}", _bar(its.taken, its.taken + its.left), says)
        return Group(top, bars)


def _bar(completed: int, total: int | None) -> ProgressBar:
    return ProgressBar(total=total, completed=completed, width=36)
