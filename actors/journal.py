"""Reports on their way from the training threads to the session, without the driver.

`ctx.report` appends to the Journal of its worker. The session pulls from all control loops and says
how many reports it has, and the worker drops those.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection, Mapping

from .calls import Actor, ActorGone, NoAnswer, answers
from .messages import Report

PRINTED = "chorusline.printed"
"""The name of the only value of a Report that carries a line which the rank has printed."""


class Journal:
    """The reports of one rank in one run. The training thread writes, the control loop reads.

    keep: False if the session will not read; then only `last` is held, so that memory does not
    grow.
    """

    def __init__(self, *, keep: bool) -> None:
        self._keep = keep
        self._lock = threading.Lock()
        self._reports: deque[Report] = deque()
        self._dropped = 0  # reports before the first one that is held
        self.last: Report | None = None

    def append(self, report: Report) -> None:
        with self._lock:
            if PRINTED not in report.values:
                self.last = report
            if self._keep:
                self._reports.append(report)

    def read(self, since: int) -> list[Report]:
        """All reports from number `since` on; the earlier ones are dropped."""
        with self._lock:
            while self._dropped < since and self._reports:
                self._reports.popleft()
                self._dropped += 1
            return list(self._reports)


class JournalReader:
    """The session's side: it gets every report of a run once, in order for each rank.

    workers: by seat. It is the crew's own mapping, since a run may go on with other workers than it
    began with.
    starting: seats whose workers have not answered yet. They have no reports, and whoever waited
    for them would keep the reports of the others.
    """

    def __init__(self, workers: Mapping[int, Actor], starting: Collection[int], run: int) -> None:
        self._workers = workers
        self._starting = starting
        self._run = run
        self._received: dict[int, tuple[Actor, int]] = {}  # by seat: of whom, how many

    async def pull(self, timeout_s: float) -> list[Report]:
        """New reports, by step, then by rank. A worker that is gone gives none."""
        asked = {
            seat: worker for seat, worker in self._workers.items() if seat not in self._starting
        }
        since = {
            seat: known[1] if (known := self._received.get(seat)) and known[0] is worker else 0
            for seat, worker in asked.items()
        }
        calls = {
            seat: worker.pull_reports.remote(self._run, since[seat])
            for seat, worker in asked.items()
        }
        new: list[Report] = []
        for seat, reports in (await answers(calls, timeout_s)).items():
            if not isinstance(reports, ActorGone | NoAnswer):
                self._received[seat] = (asked[seat], since[seat] + len(reports))
                new += reports
        return sorted(new, key=lambda report: (report.step, report.rank))
