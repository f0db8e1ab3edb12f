"""The part of a worker that other workers come to, or that comes to others (actors/arrivals.py)."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

import ray

from chorusline.collectives.contract.errors import CollectiveError, GroupAborted

from ..arrivals import Invitation, Readiness, Score
from ..messages import Stand, WorkerInfo, WorkerState
from .lifeline import Arrivals
from .outliving import Outliving
from .run_here import RunHere

if TYPE_CHECKING:
    import torch

    from chorusline.collectives.group import Group


class TakingIn(Outliving):
    """What drivers ask of a rank while a worker comes, and of a worker that comes."""

    _lock: threading.Lock
    _info: WorkerInfo

    async def _abort(self, run: int, error: CollectiveError) -> None:
        raise NotImplementedError

    @ray.method(concurrency_group="control")
    async def readiness(self, run: int) -> Readiness:
        """Whether the generation could be ended now without need, as far as this rank knows."""
        here = self._in_run(run)
        if here is None or here.lifeline is None:
            return Readiness.NOT_YET
        try:
            return here.lifeline.readiness()
        except RuntimeError:  # The training thread has changed what was looked through.
            return Readiness.NOT_YET

    @ray.method(concurrency_group="control")
    async def missing(self, run: int) -> str:
        """Why the function cannot run again with a worker that comes; empty if it can."""
        here = self._in_run(run)
        if here is None or here.lifeline is None:
            return ""
        try:
            return here.lifeline.missing()
        except RuntimeError:  # The training thread has changed what was looked through.
            return ""

    @ray.method(concurrency_group="control")
    async def hold(self, run: int) -> None:
        """Return when this rank waits before its next step, as its generation is about to end."""
        here = self._in_run(run)
        if here is not None and here.lifeline is not None:
            await asyncio.wrap_future(here.lifeline.hold())

    @ray.method(concurrency_group="control")
    async def score(self, run: int) -> Score:
        """What a worker needs that is to rehearse the function; when this rank is between two of
        its steps."""
        arrivals = self._arrivals_of(run)
        if arrivals is None:
            return Score(why_not="the function has not begun here")
        return await asyncio.wrap_future(arrivals.give_score())

    @ray.method(concurrency_group="control")
    async def invite(self, run: int, invitation: Invitation) -> None:
        """Take workers in that wait, behind the next step."""
        arrivals = self._arrivals_of(run)
        if arrivals is not None:
            arrivals.invite(invitation)

    def _arrivals_of(self, run: int) -> Arrivals | None:
        here = self._in_run(run)
        return here.lifeline.arrivals if here is not None and here.lifeline is not None else None

    @ray.method(concurrency_group="control")
    async def stand(self, run: int) -> Stand | None:
        """Where this worker is in a run, for a new driver; None if it is no rank of it. A worker
        that rehearses stops: the driver is gone that was to call it in, and the next one hears of
        it as of any idle worker."""
        with self._lock:
            current = self._in_run(run)
            if current is None:
                return None
            rehearses, lifeline = current.rehearses, current.lifeline
            resumption = lifeline.last_resumption if lifeline is not None else None
            stand = Stand(self._info, current.assignment, resumption)
        if rehearses:
            gone = GroupAborted(current.assignment.generation, [], "its driver is gone")
            await self._abort(run, gone)
            return None
        return stand


def rehearsal_group(run: RunHere, device: torch.device, before: Group | None) -> Group:
    """The group of a worker that rehearses. before: of an earlier generation, which it closes."""
    from chorusline.collectives.rehearsal import RehearsalGroup

    if before is not None:
        before.close()
    run.state = WorkerState.REHEARSING
    return RehearsalGroup(
        run.assignment.rank,
        run.assignment.world_size,
        device,
        generation=run.assignment.generation,
        timeout_s=run.request.timeout_s,
        store=run.store,
    )
