"""A session in a notebook: a table of the ranks, and plots that grow during training.

Each run has one display, which is updated in place, so a saved notebook contains its last state:
one table and its plots, in plain HTML and SVG.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from html import escape
from typing import Any

from chorusline.actors.messages.messages import Report, RunPause, WorkerSnapshot

from ..tracking.tracker import TrackedEvent
from .history import History
from .plots import COLORS, Line, Mark, chart

_DRAW_S = 0.5
_SHOW_AFTER_S = 1.0  # A run that ends sooner, and reports no number, is not drawn.
_ANSWER_S = 1.0
_RANKS_LISTED = 16
_MOST_CHARTS = 8
_LINES_SHOWN = 6

Seen = Sequence[WorkerSnapshot | str]
"""The workers' answers, by seat; a text says why a worker did not answer."""

_log = logging.getLogger(__name__)


class LiveView:
    """The display of one run. ask: asks the workers for snapshots, with a deadline in seconds."""

    def __init__(self, ask: Callable[[float], Awaitable[Seen]]) -> None:
        self._ask = ask
        self._history = History()
        self._seen: Seen = ()
        self._began_at = time.monotonic()  # set again when the workers have started
        self._handle: Any = None
        self._happened: list[TrackedEvent] = []
        self._notes: list[str] = []
        self.pause: RunPause | None = None
        """What the run waits for; None unless it is paused."""

    def happened(self, event: TrackedEvent) -> None:
        """Workers were lost, have left or have come: mark it in the plots."""
        self._happened.append(event)

    def say(self, line: str) -> None:
        """Show a line below the table of the ranks."""
        self._notes.append(line)

    def add(self, report: Report) -> None:
        self._history.add(report)

    async def keep_drawing(self, is_over: asyncio.Event) -> None:
        """Draw twice a second until the run is over. A drawing error is logged, and ends no run."""
        self._began_at = time.monotonic()
        try:
            while not is_over.is_set():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_DRAW_S):
                        await is_over.wait()
                waited_s = time.monotonic() - self._began_at
                if self._history.has_curves or waited_s > _SHOW_AFTER_S:
                    self._seen = await self._ask(_ANSWER_S)
                    self._draw(self._doing(waited_s))
        except Exception:
            _log.exception("the live view has stopped; the run continues")

    async def finish(self, error: BaseException | None) -> None:
        """Draw the last state, with a headline about how the run ended."""
        elapsed_s = time.monotonic() - self._began_at
        try:
            self._seen = await self._ask(_ANSWER_S)
            # Too short a run to show anything of.
            if self._handle is None and not self._history.has_curves:
                return
            ending = (
                f"{self.step} steps in {elapsed_s:.1f} s" if self.step else f"{elapsed_s:.1f} s"
            )
            if isinstance(error, asyncio.CancelledError):
                ending = f"interrupted after {ending}"
            elif error is not None:
                ending = f"ended by {type(error).__name__} after {ending}"
            self._draw(ending)
        except Exception:
            _log.exception("the last state of the run was not drawn")

    def _doing(self, waited_s: float) -> str:
        paused = f", paused, {self.pause}" if self.pause is not None else ""
        return f"running for {waited_s:.0f} s{paused}"

    @property
    def step(self) -> int:
        """The number of steps of this run in the last answers."""
        return max((one.status.taken for one in self._seen if not isinstance(one, str)), default=0)

    def _draw(self, headline: str) -> None:
        display = sys.modules["IPython"].display.display
        if lost := sum(len(event.lost) for event in self._happened):
            headline += f", {lost} worker{'s' * (lost > 1)} lost"
        html = run_as_html(headline, self._seen, self._history, self._happened, self._notes)
        words = [headline, *map(str, self._seen), *self._notes]
        data = {"text/html": html, "text/plain": "\n".join(words)}
        if self._handle is None:
            self._handle = display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)


def session_as_html(state: str, seen: Seen) -> str:
    return _frame(f"session {state}", ranks_as_html(seen) if seen else "")


def run_as_html(
    headline: str,
    seen: Seen,
    history: History,
    happened: Sequence[TrackedEvent] = (),
    notes: Sequence[str] = (),
) -> str:
    """happened: marked in the plots. notes: lines below the table, of which the last are shown."""
    at_steps = [Mark(one.step, one.text, bool(one.came)) for one in happened]
    charts = [_chart_of(name, history, at_steps) for name in history.names[:_MOST_CHARTS]]
    rate = Line("", history.rates(), COLORS[2])
    at_times = [
        Mark(one.began_at - history.began_at, one.text, bool(one.came))
        for one in happened
        if history.began_at is not None
    ]
    # The throughput stands beside the loss; other numbers follow.
    title = f"{history.unit}/s" + (", all ranks" if history.unit != "steps" else "")
    charts.insert(1, chart(title, "seconds", [rate], from_zero=True, marks=at_times))
    plots = f'<div style="display:flex;flex-wrap:wrap;gap:8px">{"".join(charts)}</div>'
    if more := history.names[_MOST_CHARTS:]:
        names = escape(", ".join(more))
        plots += f"<div>and {len(more)} more reported, not drawn: {names}</div>"
    lines = "".join(f"<div>{escape(line)}</div>" for line in notes[-_LINES_SHOWN:])
    if len(notes) > _LINES_SHOWN:
        lines = f"<div>… and {len(notes) - _LINES_SHOWN} lines before</div>" + lines
    return _frame(headline, ranks_as_html(seen) + lines + plots)


def _chart_of(name: str, history: History, marks: Sequence[Mark]) -> str:
    lines = [*history.lines(name).items()]
    drawn = [
        Line(f"rank {rank}", points, COLORS[rank % len(COLORS)])
        for rank, points in lines[: len(COLORS)]
    ]
    of_all = f", the first {len(drawn)} of {len(lines)} ranks" if len(drawn) < len(lines) else ""
    return chart(name, f"optimizer step{of_all}", drawn, marks=marks)


def ranks_as_html(seen: Seen) -> str:
    """A table with a row for each of the first workers, and a summary of the others."""
    names = ("rank", "state", "step", "epoch", "batches left", "memory", "worker")
    head = "".join(f'<th style="{_CELL}">{name}</th>' for name in names)
    rows = [_row(seat, answer) for seat, answer in enumerate(seen[:_RANKS_LISTED])]
    if len(seen) > _RANKS_LISTED:
        rest = seen[_RANKS_LISTED:]
        joined = sum(not isinstance(answer, str) and answer.status.has_joined for answer in rest)
        silent = sum(isinstance(answer, str) for answer in rest)
        rows.append(
            f'<tr><td colspan="{len(names)}" style="{_CELL}">and {len(rest)} more: {joined} have '
            f"joined, {silent} did not answer</td></tr>"
        )
    return (
        '<table style="border-collapse:collapse;margin:4px 0 8px 0">'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    )


_CELL = "text-align:left;padding:2px 14px 2px 0;border-bottom:1px solid rgba(128,128,128,.3)"


def _row(seat: int, answer: WorkerSnapshot | str) -> str:
    if isinstance(answer, str):
        # Ray's text about a death is longer than a row; the run's error contains it.
        short = escape(answer) if len(answer) < 40 else "<b>gone</b>"
        cells = ["?", f'<span title="{escape(answer)}">{short}</span>', *[""] * 4, f"seat {seat}"]
    else:
        status = answer.status
        state = "joined: shadows the others" if status.has_joined else answer.state.value
        cells = [
            "" if status.rank is None else _dot(status.rank) + str(status.rank),
            escape(state),
            str(status.step or ""),
            "" if status.epoch is None else str(status.epoch),
            "" if status.batches_left is None else str(status.batches_left),
            _memory(answer),
            escape(f"{answer.info.device}, pid {answer.info.pid} on {answer.info.hostname}"),
        ]
    return "<tr>" + "".join(f'<td style="{_CELL}">{cell}</td>' for cell in cells) + "</tr>"


def _dot(rank: int) -> str:
    return f'<span style="color:{COLORS[rank % len(COLORS)]}">●</span>&nbsp;'


def _memory(answer: WorkerSnapshot) -> str:
    text = f"{answer.memory_bytes / 2**20:.0f} MiB"
    if answer.device_memory_bytes:
        text += f", {answer.device_memory_bytes / 2**20:.0f} MiB on the GPU"
    return text


def _frame(headline: str, inside: str) -> str:
    return f"<div><b>chorusline</b> · {escape(headline)}{inside}</div>"
