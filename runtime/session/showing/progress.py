"""The progress of a run on stderr: live bars on a terminal, else plain lines.

In a job's log, a file or a pipe rich would show only its last bar, and Ray merges identical lines.
So this process prints a plain line every few seconds and at the ends of epochs.

What is shown comes from two places (progress_model.py): the ranks' reports, and where the ranks are
in their loops, which the session pulls anyway. A training step does nothing for it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from chorusline.actors.messages.messages import Report, RunPause
from chorusline.actors.messages.run_status import RunStatus
from chorusline.collectives.contract.argument_kinds import check_kinds, check_range

from ...notebook.rank_output import show_line
from ...tracking.tracker import TrackedEvent
from .progress_model import (
    MAX_RANKS_LISTED,
    NOWHERE,
    Pace,
    Places,
    ProgressModel,
    batches_left,
    headline,
    in_the_end,
    joining,
    living,
    step_of,
)

LINE_INTERVAL_S = 10.0
_EPOCH_LINE_S = 1.0  # Epochs that are shorter than this have no lines of their own.
_BARS_AFTER_S = 1.0


class Progress:
    """Shows the progress of a run on stderr: `Session(progress=Progress(num_steps=365))`.

        cl.run(train, num_workers=2, progress=cl.Progress(num_steps=365))

    A session makes one for each run, unless it has `progress=False`. It shows the epoch and the
    step, the last reported numbers, tokens (if they are reported) or samples a second, the workers,
    and what each rank has left of the epoch. As a context manager, it also shows that the workers
    are starting.

    num_steps: steps of the whole run, for the bar, with those before the checkpoint that it resumes
        from; None if unknown.
    console: of rich; by default that of stderr.
    """

    def __init__(self, num_steps: int | None = None, *, console: Console | None = None) -> None:
        check_kinds(Progress.__init__, locals())
        if num_steps is not None:
            check_range("num_steps", num_steps, 0)
        self.counts_reports = True
        """Whether it is to be given each report: it counts tokens and reported steps, and says who
        has joined. Reports that nobody is given are not kept on the ranks."""
        self._num_steps = num_steps
        self._console = console or Console(stderr=True)
        self._num_entered = 0
        self._waits_for = "starting"
        self._live: Live | None = None  # None: nothing is drawn
        self._happened: list[TrackedEvent] = []
        self._has_stdout = False  # True: what this process prints goes above the bars.
        self._clear()

    @classmethod
    def of_places(cls) -> Progress:
        """The default of a session, which needs no reports."""
        progress = cls()
        progress.counts_reports = False
        return progress

    def __enter__(self) -> Progress:
        """Show the bars from now on, also that the workers are starting."""
        self.begin()
        self._show_bars()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    @property
    def is_shown(self) -> bool:
        """Whether bars are shown, or the line about the start in their place."""
        return self._live is not None

    def waits_for(self, what: str) -> None:
        """Set what is shown before a run has something to show."""
        self._waits_for, self._waits_since_s = what, time.monotonic()

    def _clear(self) -> None:
        """Nothing of a run has been seen."""
        self._model = ProgressModel()
        self._places = NOWHERE
        self._pace = Pace()
        self._entered_s = self._waits_since_s = time.monotonic()
        self._began_s: float | None = None  # None: nothing to show so far
        self._line_s = -LINE_INTERVAL_S  # when the last line was printed
        self._last_line = ""
        self._pause: RunPause | None = None  # None: the run is not paused

    def begin(self) -> None:
        """A run begins; a terminal has its bars as soon as there is something to show."""
        self._num_entered += 1
        self._clear()
        self._waits_for = "starting" if self._num_entered == 1 else "waiting for the first step"

    def end(self) -> None:
        """The run is over: the last state stays."""
        self._num_entered -= 1
        if self._num_entered:
            return
        if self._live is not None:
            self._live.stop()
            self._live = None
            self._has_stdout = False
        elif self._has_something:
            self._line(self._plain_line())
        if summary := in_the_end(self._happened):
            self.say(summary)
        self._happened = []

    def on_report(self, report: Report) -> None:
        """Show what a rank has reported: for sessions that have this method as their on_report."""
        before, self._model = self._model, self._model.add(report)
        if news := joining(before, self._model):
            self.say(news)
        self._update()

    def look(
        self,
        statuses: Mapping[int, RunStatus],
        numbers: Mapping[int, Mapping[str, float]],
        num_lost: int,
        pause: RunPause | None = None,
    ) -> None:
        """Show where the ranks are. statuses, and the numbers that were reported last: by seat.
        num_lost: workers that the run has lost. pause: of the run, while it is paused."""
        self._pause = pause
        if not statuses:
            return
        before, self._places = self._places, Places.of(statuses, numbers, num_lost)
        self._pace.look(statuses, time.monotonic(), self._places.taken)
        over = before.epoch_over(self._places)
        # Short epochs would fill a log; bars show each of them anyway.
        if over and self._live is None and self._waited_s >= _EPOCH_LINE_S:
            self._line(self._plain_line(over))
        self._update()

    def happened(self, event: TrackedEvent) -> None:
        """Workers were lost, left or joined: count them in the summary at the end."""
        self._happened.append(event)

    def say(self, line: str) -> None:
        """Print a line, above the bars if there are any."""
        # People search a log by line, so lines are not wrapped at the 80 columns of a job's output.
        self._console.print(Text.from_ansi(line), soft_wrap=True)

    def show_line(self, line: str, is_error: bool) -> None:
        """Print a line of a rank where it belongs: stdout or stderr, above the bars there."""
        if self._live is not None and (is_error or self._has_stdout):
            self.say(line)
        else:
            show_line(line, is_error)

    @property
    def _has_something(self) -> bool:
        return bool(self._model.ranks or self._places.has_begun)

    @property
    def _waited_s(self) -> float:
        return time.monotonic() - self._line_s

    def _update(self) -> None:
        if self._began_s is None and self._has_something:
            self._began_s = time.monotonic()  # The start, and the first step, are not counted.
        if self._live is not None or not self._has_something or not self._num_entered:
            return
        if self._console.is_interactive:
            if time.monotonic() - self._entered_s >= _BARS_AFTER_S:
                self._show_bars()
        elif self._waited_s >= LINE_INTERVAL_S:
            self._line(self._plain_line())

    def _show_bars(self) -> None:
        if self._live is None and self._console.is_interactive:
            self._has_stdout = self._console.stderr and is_terminal(sys.stdout)
            self._live = Live(
                get_renderable=self._draw,
                console=self._console,
                refresh_per_second=4,
                redirect_stdout=self._has_stdout,  # Else it is no terminal, and has no bars.
            )
            self._live.start()

    def _line(self, line: str) -> None:
        self._line_s = time.monotonic()
        if line != self._last_line:
            self._last_line = line
            self.say(line)

    def _plain_line(self, over: str = "") -> str:
        left = "" if over else batches_left(self._model, self._places)
        return "  ".join(filter(None, [self._headline(over), left]))

    def _headline(self, over: str = "") -> str:
        text = headline(self._model, self._places, self._pace, self._num_steps, over)
        return text if self._pause is None else f"{text}  paused, {self._pause}"

    def _draw(self) -> RenderableType:
        model, places = self._model, self._places
        if not self._has_something:
            waited_s = time.monotonic() - self._waits_since_s
            return Text(f"{self._waits_for} … {waited_s:.0f} s", style="dim")
        elapsed_s = time.monotonic() - (self._began_s or time.monotonic())
        top = Text(f"{self._headline()}  {elapsed_s:.0f} s", style="bold", overflow="ellipsis")
        top.no_wrap = True
        bars = Table.grid(padding=(0, 2))
        # One bar for all: of the run if its length is known, else of the epoch.
        if self._num_steps:
            bars.add_row("all ranks", _bar(step_of(model, places), self._num_steps))
        elif places.total:
            bars.add_row("this epoch", _bar(places.done, places.total))
        left, joined = places.left or living(model.left, places), places.joined | model.joined
        if len(left) > MAX_RANKS_LISTED:
            return Group(top, bars, Text(batches_left(model, places), style="dim"))
        # As long as the ranks are equal, the one bar says it for each of them.
        if len(set(left.values())) > 1 or joined:
            taken = places.batches or {rank: its.taken for rank, its in model.ranks.items()}
            for rank, count in sorted(left.items()):
                says = Text(f"{count} batches left", style="dim")
                if rank in joined:
                    says = Text("out of data", style="yellow")
                bars.add_row(f"rank {rank}", _bar(taken[rank], taken[rank] + count), says)
        return Group(top, bars)


def is_terminal(stream: Any) -> bool:
    """Also of what a program or rich has put in the place of a stream, which may have no isatty or
    be closed, or of None."""
    stream = getattr(stream, "rich_proxied_file", stream)
    return not getattr(stream, "closed", False) and bool(getattr(stream, "isatty", bool)())


def _bar(completed: int, total: int | None) -> ProgressBar:
    return ProgressBar(total=total, completed=completed, width=36)
