"""What each rank is told when a generation ends, and when the next one begins."""

from __future__ import annotations

from collections.abc import Sequence

from chorusline.collectives.contract.errors import CollectiveError, CollectiveTimeout, GroupAborted

from .. import messages
from ..messages import Failure, Loss
from ..run_status import Gone
from . import instructions
from .run_state import RunState, assign
from .situation import Plan


def freezes(
    run: RunState, generation: int, error: CollectiveError, but: int
) -> list[instructions.FreezeRank]:
    """A generation ends by an error. but: a rank that has frozen itself."""
    return [
        instructions.FreezeRank(
            run.members[rank].info.worker_id,
            generation,
            error,
            isinstance(error, CollectiveTimeout) and rank in error.ranks,
        )
        for rank in sorted(run.running - {but})
    ]


def dismissals(run: RunState, plan: Plan, generation: int) -> list[instructions.DismissRank]:
    """To the ranks of a generation that leave. Their notices say why."""
    dismissed = []
    for member in plan.dismissed:
        why = run.departures.why(member.info)
        left = GroupAborted(generation, [], f"{member.info} has left: {why}")
        dismissed.append(instructions.DismissRank(member.info.worker_id, left))
    return dismissed


def gone(run: RunState, plan: Plan) -> tuple[Gone, ...]:
    """The ranks of a generation that are not in the next one, and why."""
    deaths = {loss.worker.worker_id: loss.detail for loss in run.losses}
    return tuple(
        Gone(
            rank,
            member.info.pid,
            deaths.get(member.info.worker_id) or run.departures.why(member.info) or "",
        )
        for rank, member in enumerate(run.members)
        if rank not in plan.former
    )


def beginnings(
    plan: Plan,
    generation: int,
    entered: int,
    gives_up: Loss | Failure | None,
    without: tuple[Gone, ...],
) -> Sequence[instructions.StartRank | instructions.ResumeRank]:
    """To the ranks of the next generation: those that were there go on, as do newcomers that have
    rehearsed; others start. without: as of `gone`."""
    pairs = zip(plan.members, plan.former, strict=True)
    pids = tuple(member.info.pid for member, before in pairs if before < 0)
    former = messages.FormerRanks.of(plan.former)
    told: list[instructions.StartRank | instructions.ResumeRank] = []
    assignments = assign(plan.members, generation)
    for member, before, assignment in zip(plan.members, plan.former, assignments, strict=True):
        worker_id = member.info.worker_id
        resumption = messages.Resumption(
            assignment,
            former,
            plan.progress,
            entered,
            plan.restarts,
            plan.leaving,
            gives_up,
            without,
            pids,
        )
        if before >= 0 or not plan.restarts:
            told.append(instructions.ResumeRank(worker_id, resumption))
        else:
            told.append(instructions.StartRank(worker_id, assignment, resumption))
    return told
