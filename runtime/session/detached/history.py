"""What a run has reported and printed, in bounded memory. Pure: no Ray, no clock.

All of the newest reports are kept, and one of n of each rank among the older ones. n doubles
whenever there are too many, so a curve goes back to the beginning of a run of any length. The
newest part of what the ranks have printed is kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import islice

from chorusline.actors.messages.messages import Report, RunPause
from chorusline.actors.messages.run_status import GenerationChange, RunStatus
from chorusline.actors.reporting.worker_logs import Printed
from chorusline.actors.worker_group.news import News

from ...notebook.history import Thinned

MOST_RECENT = 20_000
"""Reports that are all kept; whoever looks in time gets each of them."""

MOST_OLDER = 10_000

MOST_PRINTED_BYTES = 16 << 20
"""Bytes of output that are kept for programs that look now and have not received it yet."""

TAIL_BYTES = 64 << 10
"""Bytes of output that are shown to a program that begins to look."""


@dataclass(frozen=True, slots=True)
class Bookmark:
    """How far somebody has read: numbers of the next report, piece of output, and notice.
    host: which session host has counted them."""

    reports: int = 0
    printed: int = 0
    host: str = ""
    notices: int = 0


class RunHistory:
    """The news of one run. host: goes into the places that it hands out."""

    def __init__(self, host: str = "") -> None:
        self._host = host
        self._recent: deque[Report] = deque()
        self._num_reports = 0
        self._older: Thinned[tuple[int, Report]] = Thinned(MOST_OLDER)  # by _spread(step)
        self._printed: deque[tuple[int, Printed]] = deque()  # by seat
        self._num_printed = 0
        self._printed_bytes = 0
        self._statuses: Mapping[int, RunStatus] = {}
        self._numbers: Mapping[int, dict[str, float]] = {}
        self._num_lost = 0
        self._notices: list[str] = []
        self._pause: RunPause | None = None  # None: it is not paused
        self._changes: dict[int, GenerationChange] = {}  # by generation

    def add(self, news: News) -> None:
        self._recent.extend(news.reports)
        self._num_reports += len(news.reports)
        while len(self._recent) > MOST_RECENT:
            number, report = self._num_reports - len(self._recent), self._recent.popleft()
            self._older.add(_spread(report.step), (number, report))  # The same of each rank.
        self._printed.extend(news.printed)
        self._num_printed += len(news.printed)
        self._printed_bytes += sum(_size(one) for _, one in news.printed)
        while self._printed_bytes > MOST_PRINTED_BYTES:
            self._printed_bytes -= _size(self._printed.popleft()[1])
        if news.statuses:
            self._statuses, self._numbers = dict(news.statuses), dict(news.numbers)
        self._notices += news.notices
        for status in news.statuses.values():
            for change in status.generation_changes:
                known = self._changes.setdefault(change.generation, change)
                # Ranks tell of the same change, and one that has come later knows less of it. The
                # reasons of deaths come after it.
                if len(change.lost) >= len(known.lost) and len(change.gone) >= len(known.gone):
                    self._changes[change.generation] = change
        self._num_lost, self._pause = news.num_lost, news.pause

    def beginning(self, *, whole: bool = False) -> Bookmark:
        """The place of a program that has seen nothing: all reports are to come, and the end of
        what was printed (its newest piece, of any length), or, if `whole`, all of it."""
        if whole:
            return Bookmark(0, 0, self._host)
        number, num_bytes = self._num_printed, 0
        for _, printed in reversed(self._printed):
            num_bytes += _size(printed)
            if num_bytes > TAIL_BYTES and number < self._num_printed:
                break
            number -= 1
        return Bookmark(0, number, self._host)

    def since(self, place: Bookmark) -> tuple[News, Bookmark]:
        """What came after a place, and the place after it. The place of another session host counts
        as none."""
        if place.host != self._host:
            place = self.beginning()
        first = self._num_reports - len(self._recent)
        older = [report for _, (number, report) in self._older.items if number >= place.reports]
        recent = islice(self._recent, max(0, place.reports - first), None)
        first_printed = self._num_printed - len(self._printed)
        printed = islice(self._printed, max(0, place.printed - first_printed), None)
        statuses = dict(self._statuses)
        if place.reports == 0 and statuses:
            # One who begins to look hears of all losses, and a status has the last ones only.
            seat, first_one = next(iter(statuses.items()))
            statuses[seat] = replace(first_one, generation_changes=tuple(self._changes.values()))
        news = News(
            [*older, *recent],
            list(printed),
            statuses,
            dict(self._numbers),
            self._num_lost,
            self._notices[place.notices :],
            self._pause,
        )
        seen = Bookmark(self._num_reports, self._num_printed, self._host, len(self._notices))
        return news, seen

    def reports(self) -> list[Report]:
        return [*(report for _, (_, report) in self._older.items), *self._recent]


def _spread(step: int) -> int:
    """A number for Thinned. Each n-th step itself would never be one at which a name is reported
    that has the odd reports only, or each 100th one: so every part of the steps is thinned alike.

    Source: multiplicative hashing by the golden ratio, Knuth, TAOCP 3, section 6.4; it leaves at
    most three different gaps between the steps that are kept."""
    return int(f"{step * 0x9E3779B1 % (1 << 32):032b}"[::-1], 2)


def _size(printed: Printed) -> int:
    return sum(len(piece.data) for piece in printed.pieces)
