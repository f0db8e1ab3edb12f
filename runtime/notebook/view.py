"""What a notebook shows of a session: a table of the ranks, and plots that grow while it trains.

One display is made for each run and updated in place, so that a saved notebook holds its last
state: one table, one pair of plots, plain HTML and SVG.
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

from actors.messages import Report, WorkerSnapshot

from .history import History
from .plots import COLORS, Line, chart

_DRAW_S = 0.5
_SHOW_AFTER_S = 1.0  # A run that is over sooner, and reports nothing, needs no picture.
_ANSWER_S = 1.0
_RANKS_LISTED = 16

Seen = Sequence[WorkerSnapshot | str]
"""What the workers say of themselves, by seat; a text says why one said nothing."""

_log = logging.getLogger(__name__)


class LiveView:
    """One run, seen while it runs. ask: what the workers say now, within so many seconds."""

    def __init__(self, ask: Callable[[float], Awaitable[Seen]]) -> None:
        self._ask = ask
        self._history = History()
        self._seen: Seen = ()
        self._began_at = time.monotonic()  # And again when the workers are there.
        self._handle: Any = None

    def add(self, report: Report) -> None:
        self._history.add(report)

    async def keep_drawing(self, is_over: asyncio.Event) -> None:
        """Draw twice a second until it is over. What cannot be drawn ends no training."""
        self._began_at = time.monotonic()
        try:
            while not is_over.is_set():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_DRAW_S):
                        await is_over.wait()
                waited_s = time.monotonic() - self._began_at
                if self._history.has_losses or waited_s > _SHOW_AFTER_S:
                    self._seen = await self._ask(_ANSWER_S)
                    self._draw(f"running for {waited_s:.0f} s")
        except Exception:
            _log.exception("the live view has stopped; the run goes on")

    async def finish(self, error: BaseException | None) -> None:
        """Draw once more, as it will be saved; how it ended, above."""
        elapsed_s = time.monotonic() - self._began_at
        try:
            self._seen = await self._ask(_ANSWER_S)
            if self._handle is None and not self._history.has_losses:
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

    @property
    def step(self) -> int:
        """Steps that the ranks have taken in this run, as last seen."""
        return max(
            (said.steps.taken for said in self._seen if not isinstance(said, str)), default=0
        )

    def _draw(self, headline: str) -> None:
        display = sys.modules["IPython"].display.display
        data = {
            "text/html": run_as_html(headline, self._seen, self._history),
            "text/plain": "\n".join([headline, *map(_in_words, self._seen)]),
        }
        if self._handle is None:
            self._handle = display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)


def session_as_html(state: str, seen: Seen) -> str:
    return _frame(f"session {state}", ranks_as_html(seen) if seen else "")


def run_as_html(headline: str, seen: Seen, history: History) -> str:
    lines = history.loss_lines()
    if len(lines) > len(COLORS):
        lines = {rank: lines[rank] for rank in list(lines)[: len(COLORS)]}
    rate = Line("", history.rates(), COLORS[2])
    plots = chart(
        "loss",
        "optimizer step of this run",
        [
            Line(f"rank {rank}", points, COLORS[rank % len(COLORS)])
            for rank, points in lines.items()
        ],
    ) + chart(f"{history.unit}/s, all ranks", "seconds", [rate], from_zero=True)
    return _frame(headline, ranks_as_html(seen) + plots)


def ranks_as_html(seen: Seen) -> str:
    """A table with a row for each worker; many are counted after the first few."""
    names = ("rank", "state", "step", "epoch", "batches left", "memory", "worker")
    head = "".join(f'<th style="{_CELL}">{name}</th>' for name in names)
    rows = [_row(seat, said) for seat, said in enumerate(seen[:_RANKS_LISTED])]
    if len(seen) > _RANKS_LISTED:
        rest = seen[_RANKS_LISTED:]
        joined = sum(not isinstance(said, str) and said.steps.has_joined for said in rest)
        silent = sum(isinstance(said, str) for said in rest)
        rows.append(
            f'<tr><td colspan="{len(names)}" style="{_CELL}">and {len(rest)} more: {joined} have '
            f"joined, {silent} did not answer</td></tr>"
        )
    return (
        '<table style="border-collapse:collapse;margin:4px 0 8px 0">'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    )


_CELL = "text-align:left;padding:2px 14px 2px 0;border-bottom:1px solid rgba(128,128,128,.3)"


def _row(seat: int, said: WorkerSnapshot | str) -> str:
    if isinstance(said, str):
        # Ray's sentence about a death is longer than a row: it is told in full by the error.
        short = escape(said) if len(said) < 40 else "<b>gone</b>"
        cells = ["?", f'<span title="{escape(said)}">{short}</span>', *[""] * 4, f"seat {seat}"]
    else:
        steps = said.steps
        state = "joined: shadows the others" if steps.has_joined else said.state.value
        cells = [
            "" if steps.rank is None else _dot(steps.rank) + str(steps.rank),
            escape(state),
            str(steps.taken or ""),
            "" if steps.epoch is None else str(steps.epoch),
            "" if steps.batches_left is None else str(steps.batches_left),
            _memory(said),
            escape(f"{said.info.device}, pid {said.info.pid} on {said.info.hostname}"),
        ]
    return "<tr>" + "".join(f'<td style="{_CELL}">{cell}</td>' for cell in cells) + "</tr>"


def _dot(rank: int) -> str:
    return f'<span style="color:{COLORS[rank % len(COLORS)]}">●</span>&nbsp;'


def _memory(said: WorkerSnapshot) -> str:
    text = f"{said.memory_bytes / 2**20:.0f} MiB"
    if said.device_memory_bytes:
        text += f", {said.device_memory_bytes / 2**20:.0f} MiB on the GPU"
    return text


def _in_words(said: WorkerSnapshot | str) -> str:
    return said if isinstance(said, str) else str(said)


def _frame(headline: str, inside: str) -> str:
    return f"<div><b>chorusline</b> · {escape(headline)}{inside}</div>"
