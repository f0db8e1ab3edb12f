"""Reports on their way from the training thread to the control loop, where the session pulls them.

`ctx.report` appends to the ReportBuffer of its worker. The session pulls from all control loops
(worker_group/news.py) and says how many reports it has, and the worker drops those.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from itertools import islice

from ..messages.messages import Report, ReportValue, numbers_of
from ..messages.run_status import RunStatus
from .worker_logs import Output, Printed

_MOST_PULLED = 10_000
"""Reports in one answer. An answer with a long backlog would come too late each time."""

_MOST_NAMES = 256
"""Names of reported values that are remembered. Names that contain a number would add up
forever."""


@dataclass(frozen=True, slots=True)
class Pulled:
    """A worker's answer to the session's pull.

    reports: of the run, from the requested number on, or else from the oldest that is still held.
    first: the number of the first of them.
    has_more: there are more of them to pull at once.
    printed: since the position that was asked for; None if Ray shows the worker's output.
    status: of the worker in the run; None if it is not in it.
    numbers: the last one of each name that was reported in the run.
    """

    reports: list[Report]
    printed: Printed | None
    status: RunStatus | None
    numbers: dict[str, float]
    first: int = 0
    has_more: bool = False


class ReportBuffer:
    """The reports of one rank in one run. The training thread writes, the control loop reads.

    keep: False if the session will not read; then only `last` is held, so that memory does not
    grow.
    output: of the process, for what is shown in between its lines.
    history: how many reports are held that were read already, for a reader that begins again.
    """

    def __init__(self, keep: bool, output: Output | None = None, history: int = 0) -> None:
        self._keep = keep
        self._history = history
        self.output = output
        self._lock = threading.Lock()
        self._reports: deque[Report] = deque()
        self.dropped = 0
        """Reports before the first one that is held; the control loop's."""
        self._asked_from = 0  # By the last pull, which has had all before.
        self.last: Report | None = None  # None: before the first report
        self._latest: dict[str, ReportValue] = {}

    def append(self, report: Report) -> None:
        with self._lock:
            self.last = report
            self._latest.update(report.values)
            while len(self._latest) > _MOST_NAMES:
                del self._latest[next(iter(self._latest))]
            if self._keep:
                self._reports.append(report)

    def read(self, since: int) -> list[Report]:
        """Reports that are held from number `since` on; the earlier ones are dropped."""
        with self._lock:
            self._asked_from = since
            while self.dropped < since - self._history and self._reports:
                self._reports.popleft()
                self.dropped += 1
            begin = max(0, since - self.dropped)
            return list(islice(self._reports, begin, begin + _MOST_PULLED))

    def has_told_all(self) -> bool:
        """Whether whoever pulls is known to have every report."""
        with self._lock:
            return self._asked_from >= self.dropped + len(self._reports)

    def pulled(self, since: int, printed: Printed | None, status: RunStatus | None) -> Pulled:
        reports = self.read(since)
        first = max(since, self.dropped)
        has_more = len(reports) == _MOST_PULLED
        return Pulled(reports, printed, status, self.latest_numbers(), first, has_more)

    def latest_numbers(self) -> dict[str, float]:
        """The last number of each name that was reported."""
        with self._lock:
            latest = dict(self._latest)
        return numbers_of(latest)
