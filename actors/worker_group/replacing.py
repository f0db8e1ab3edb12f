"""Workers that are far behind the others for long, replaced during a run.

Such a worker leaves as one whose node is drained does: it hands over what only it has, and the
others continue. Then its seat is empty, and filled as any other.

A seat is cleared once in a run. If the next worker there is as slow, it is the place, or the work
of that rank, and a third one would be as slow.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping

from ..messages.messages import WorkerSnapshot
from ..ray_calls.calls import Actor, answer, answers

WATCH_S = 1.0

_ANSWER_S = 2.0


async def replace_stragglers(
    driver: Actor, run: int, workers: Mapping[int, Actor], starting: Collection[int]
) -> None:
    """Watch the workers of one run, as long as one driver carries it out: raises ActorGone if the
    driver dies. workers, starting: as in Recruiter (recruiting.py)."""
    first: dict[int, str] = {}
    while True:
        await asyncio.sleep(WATCH_S)
        asked = {
            seat: worker.snapshot.remote()
            for seat, worker in workers.items()
            if seat not in starting
        }
        replies = (await answers(asked, _ANSWER_S)).values()
        snapshots = [one for one in replies if isinstance(one, WorkerSnapshot)]
        for worker_id, why in note_stragglers(first, snapshots).items():
            await answer(driver.leaves.remote(run, worker_id, why))


def note_stragglers(first: dict[int, str], snapshots: Collection[WorkerSnapshot]) -> dict[str, str]:
    """By worker that is to leave now, why. A worker is among them until it has left.

    first: by seat, the id of the first worker that was to leave; changed here.
    snapshots: of the workers that have answered.
    """
    leaving = {}
    for one in snapshots:
        seat, worker_id, status = one.info.seat, one.info.worker_id, one.status
        if status.is_straggler:
            # The first worker only: its successor in the seat stays, however slow it is.
            first.setdefault(seat, worker_id)
        if first.get(seat) == worker_id:
            leaving[worker_id] = f"{one.info} was much slower than the other ranks for long"
    return leaving
