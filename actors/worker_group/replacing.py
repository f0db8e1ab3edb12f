"""Workers that are far behind the others for long, replaced during a run.

Such a worker leaves as one whose node is drained does: it hands over what only it has, and the
others continue. Then its seat is empty, and filled as any other.

A seat is cleared once in a run. If the next worker there is as slow, it is the place, or the work
of that rank, and a third one would be as slow.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from ..messages.messages import WorkerSnapshot
from ..ray_calls.calls import Actor, answer, answers

WATCH_S = 1.0

_ANSWER_S = 2.0


@dataclass(slots=True)
class Leavers:
    """The workers that are to leave, second by second. Pure."""

    _by_seat: dict[int, str] = field(default_factory=dict)  # ids of the workers that were told

    def note(self, snapshots: Collection[WorkerSnapshot]) -> dict[str, str]:
        """By worker that is to leave now, why. A worker is among them until it has left.

        snapshots: of the workers that have answered."""
        leaving = {}
        for one in snapshots:
            seat, worker_id, status = one.info.seat, one.info.worker_id, one.status
            if status.is_straggler:
                # The first worker only: its successor in the seat stays, however slow it is.
                self._by_seat.setdefault(seat, worker_id)
            if self._by_seat.get(seat) == worker_id:
                leaving[worker_id] = f"{one.info} was much slower than the other ranks for long"
        return leaving


class Replacing:
    """It watches the workers of one run, as long as one driver carries it out.

    workers, starting: as in Recruiter (recruiting.py).
    """

    def __init__(
        self, driver: Actor, run: int, workers: Mapping[int, Actor], starting: Collection[int]
    ) -> None:
        self._driver = driver
        self._run = run
        self._workers = workers
        self._starting = starting
        self._leavers = Leavers()

    async def watch(self) -> None:
        """Raises ActorGone if the driver dies."""
        while True:
            await asyncio.sleep(WATCH_S)
            for worker_id, why in self._leavers.note(await self._snapshots()).items():
                await answer(self._driver.leaves.remote(self._run, worker_id, why))

    async def _snapshots(self) -> list[WorkerSnapshot]:
        asked = {
            seat: worker.snapshot.remote()
            for seat, worker in self._workers.items()
            if seat not in self._starting
        }
        replies = (await answers(asked, _ANSWER_S)).values()
        return [one for one in replies if isinstance(one, WorkerSnapshot)]
