"""What the workers say while they work, as the session hears it without the driver: what they
report, what they print, and where they are.

The session pulls from all control loops, and says how much it has already. So nothing is lost where
an answer is, and a worker drops what has arrived.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from ..messages.messages import Report, RunPause
from ..messages.run_status import RunStatus
from ..ray_calls.calls import Actor, ActorGone, NoAnswer, answer, answers
from ..reporting.report_buffer import Pulled
from ..reporting.worker_logs import ERR, Position, Printed, PrintedPiece, read_rest

_REST_S = 2.0
_SILENT_S = 5.0
"""A worker that does not answer is asked again after this time, and not each time, so that a rank
that hangs does not delay what the others say. What it prints is read from its files meanwhile. Who
has more patience asks it at once: the last pull of a run, without which its last reports are lost
though it answers again."""


@dataclass(slots=True)
class _WorkerLog:
    """How far the output of one worker was read. printed: its last answer; None if there is none,
    or if Ray shows the worker's output."""

    worker: Actor
    printed: Printed | None = None


@dataclass(slots=True)
class News:
    """reports: new ones, by step, then by rank.
    printed: new output, by seat; a worker that is gone is among them with what it has printed last.
    statuses: of the workers in the run, by seat.
    numbers: that each of them has reported last, by seat and name.
    num_lost: workers that the run has lost so far.
    notices: sentences for whoever looks at the run.
    pause: what the run waits for; None unless it is paused.
    has_more_reports: there are more to pull at once."""

    reports: list[Report] = field(default_factory=list)
    printed: list[tuple[int, Printed]] = field(default_factory=list)
    statuses: dict[int, RunStatus] = field(default_factory=dict)
    numbers: dict[int, dict[str, float]] = field(default_factory=dict)
    num_lost: int = 0
    notices: list[str] = field(default_factory=list)
    pause: RunPause | None = None
    has_more_reports: bool = False

    @property
    def has_more(self) -> bool:
        """Whether there is more to pull at once."""
        return self.has_more_reports or any(printed.has_more for _, printed in self.printed)


class Listener:
    """It gets every report of a run once, in order for each rank, and every byte that was printed.

    workers: by seat. It is the worker group's own mapping, since a run may continue with other
    workers than it began with.
    starting: seats whose workers have not answered yet. They say nothing yet, and whoever waited
    for them would keep waiting what the others say.
    """

    def __init__(self, workers: Mapping[int, Actor], starting: Collection[int]) -> None:
        self._workers = workers
        self._starting = starting
        self._logs: dict[int, _WorkerLog] = {}
        self._rests: list[tuple[int, _WorkerLog]] = []
        """By seat, of workers that are gone and have no seat: not all of it has been read."""
        self._run = -1
        self._received: dict[int, tuple[Actor, int]] = {}  # by seat: of whom, how many reports
        self._lost: list[Actor] = []  # in this run
        # Until when it is not asked, and how long it was waited for.
        self._silent: dict[Actor, tuple[float, float]] = {}
        self._notices: list[str] = []
        self._pause: tuple[RunPause, float] | None = None  # None: no pause; when it was heard of

    def note_pause(self, pause: RunPause | None) -> None:
        """Have it in the news from now on."""
        self._pause = (pause, time.monotonic()) if pause is not None else None

    def note(self, notice: str) -> None:
        """Have a sentence in the next news."""
        self._notices.append(notice)

    @property
    def knows_all(self) -> bool:
        """Whether every worker was asked before. The last words of one that was not are lost."""
        return all(
            (log := self._logs.get(seat)) is not None and log.worker is worker
            for seat, worker in self._workers.items()
            if seat not in self._starting
        )

    async def pull(self, run: int, timeout_s: float) -> News:
        """What is new in a run. A worker that is gone reports nothing."""
        # Each run has a report buffer of its own, in which the numbers of reports begin at 0.
        if is_new := run != self._run:
            self._run, self._received, self._lost = run, {}, []
            self._silent.clear()
        news = News()
        if self._pause is not None:
            pause, heard_at = self._pause
            news.pause = replace(pause, waited_s=pause.waited_s + time.monotonic() - heard_at)
        asked = {
            seat: worker for seat, worker in self._workers.items() if seat not in self._starting
        }
        calls, since, logs = {}, {}, {}
        # Another worker has a seat, or nobody: of the one before, what it printed last is still to
        # be read from its file, since it cannot be asked any more.
        for seat in [*self._logs]:
            if self._logs[seat].worker is not self._workers.get(seat):
                gone = self._logs.pop(seat)
                self._rests.append((seat, gone))
                if not is_new:  # Else it is no loss of this run.
                    self._lose(gone.worker)
        for rest in [*self._rests]:
            if not await self._read_rest(*rest, news):
                self._rests = [one for one in self._rests if one is not rest]
        for seat, worker in asked.items():
            log = logs[seat] = self._logs.setdefault(seat, _WorkerLog(worker))
            # One that did not answer in time would hold every pull up; its file can be read.
            until_s, waited_s = self._silent.get(worker, (0.0, 0.0))
            if until_s > time.monotonic() and timeout_s <= waited_s:
                await self._read_rest(seat, log, news, is_gone=False)
                continue
            # A worker that has taken the seat over begins to count its reports.
            received = self._received.get(seat)
            since[seat] = received[1] if received and received[0] is worker else 0
            until = log.printed.until if log.printed else None
            calls[seat] = worker.pull.remote(run, since[seat], until)
        for seat, pulled in (await answers(calls, timeout_s)).items():
            if isinstance(pulled, Pulled):
                self._silent.pop(asked[seat], None)
                self._received[seat] = (asked[seat], pulled.first + len(pulled.reports))
                news.reports.extend(pulled.reports)
                news.has_more_reports |= pulled.has_more
                if pulled.status is not None:
                    news.statuses[seat] = pulled.status
                    news.numbers[seat] = pulled.numbers
                if pulled.printed is not None:
                    _note(seat, logs[seat], pulled.printed, news)
            elif isinstance(pulled, ActorGone):
                await self._read_rest(seat, logs[seat], news)
                self._lose(asked[seat])
            else:
                assert isinstance(pulled, NoAnswer)
                # Asked again after a while: its control loop may only be slow, on a busy machine.
                self._silent[asked[seat]] = time.monotonic() + _SILENT_S, timeout_s
                await self._read_rest(seat, logs[seat], news, is_gone=False)
        news.num_lost = len(self._lost)
        news.notices, self._notices = self._notices, []
        # Workers answer in any order, and the caller's function is called by step.
        news.reports.sort(key=lambda report: (report.step, report.rank))
        return news

    def _lose(self, worker: Actor) -> None:
        if not any(worker is one for one in self._lost):
            self._lost.append(worker)

    async def _read_rest(
        self, seat: int, log: _WorkerLog, news: News, *, is_gone: bool = True
    ) -> bool:
        """What a worker that is gone, or does not answer, has printed last, out of its files: as
        much as one answer of a worker has. Whether there is more, for the next pull."""
        last = log.printed
        if last is None:
            return False
        given = (last.files, last.node_id, last.until, last.rank)
        rest = read_rest(*given)
        if rest is None:  # On another node: have another worker there read it.
            rest = await self._read_there(given)
        if rest is not None:
            _note(seat, log, rest, news)
            return rest.has_more
        if is_gone:  # Else it lives, and will be asked again.
            text = f"(it is gone; its last output is in {last.files[0]} on its node)\n"
            piece = PrintedPiece(ERR, text.encode(), last.rank)
            notice = replace(last, pieces=(piece,), has_more=False, is_notice=True)
            news.printed.append((seat, notice))
            log.printed = None
        return False

    async def _read_there(
        self, given: tuple[tuple[str, str], str, Position, int | None]
    ) -> Printed | None:
        for seat, log in [*self._logs.items()]:
            is_there = log.printed is not None and log.printed.node_id == given[1]
            worker = self._workers.get(seat)
            # A living worker on the same node sees the same files. One that is silent is not asked:
            # its answer would be waited for in each pull.
            if worker is None or worker is not log.worker or worker in self._silent or not is_there:
                continue
            try:
                found = await answer(worker.read_rest.remote(*given), _REST_S)
            except (ActorGone, NoAnswer):
                continue
            assert found is None or isinstance(found, Printed)
            return found
        return None


def _note(seat: int, log: _WorkerLog, printed: Printed, news: News) -> None:
    log.printed = printed
    if printed.pieces:
        news.printed.append((seat, printed))
