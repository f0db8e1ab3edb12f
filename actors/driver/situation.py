"""What the reports of a round add up to: can the next generation form, and of which workers? Pure.

`assess` changes nothing. membership.py says what follows from a situation in each phase.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from chorusline.collectives.contract.errors import name_ranks

from ..messages.messages import Frozen, MemberState, OptimizerProgress
from .arrivals import DryRuns
from .regeneration import what_counts
from .replicas import whole_replicas
from .run_state import Member, RunState, in_rank_order

MAX_WITHOUT_PROGRESS = 3
"""Generations in which ranks did not meet, one after another, before the run is given up."""


class Situation(enum.Enum):
    """What the reports of the ranks let the driver do."""

    INCOMPLETE = "incomplete"
    """Some rank has neither frozen nor died: it may still see what the others have not seen."""

    HOPELESS = "hopeless"
    """No generation can continue from what the ranks report; `Outlook.why` says what is missing."""

    TOO_FEW = "too few"
    """There are fewer workers than the run may continue with; newcomers could be admitted."""

    READY = "ready"
    """The next generation can form; `Outlook.plan` says how."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The next generation.

    members: by their new rank.
    former: by new rank, the rank in the generation that has ended; -1 for a newcomer.
    progress: what holds for all ranks, by optimizer.
    restarts: the functions run again from the top.
    dismissed: workers that leave the run now.
    resting: workers that wait without a rank, as their replica is not whole.
    leaving: ranks that hand over what they keep in this generation, to leave after it.
    takes_newcomers: the functions can be run again from the top, so newcomers may begin with them.
    num_without_progress, achieved: as in RunState.
    """

    members: tuple[Member, ...]
    former: tuple[int, ...]
    progress: tuple[OptimizerProgress, ...]
    restarts: bool
    dismissed: tuple[Member, ...] = ()
    resting: tuple[Member, ...] = ()
    leaving: tuple[int, ...] = ()
    takes_newcomers: bool = False
    num_without_progress: int = 0
    achieved: int = -1


@dataclass(frozen=True, slots=True)
class Outlook:
    """A situation, with what belongs to it."""

    situation: Situation
    why: str = ""
    plan: Plan | None = None  # None: not READY
    missing: int = 0
    """Where they are too few: how many workers have to come."""


def assess(run: RunState, known: Iterable[Member], arrivals: DryRuns) -> Outlook:
    """The situation of the open round of a run. known: the members of the session. arrivals: the
    workers that come to it."""
    if not run.round.is_complete:
        return Outlook(Situation.INCOMPLETE)
    frozen = run.round.frozen
    can_restart = all(report.can_restart for report in frozen.values())
    if run.has_lost_too_many:
        return _hopeless(
            f"max_failures={run.request.max_failures} does not allow more lost workers"
        )
    unparked = sorted(rank for rank, report in frozen.items() if not report.is_parked)
    # In place all ranks must wait in a step; from the top all functions must be able to run again.
    if unparked and not can_restart:
        return _hopeless(
            f"{name_ranks(unparked, 'was', 'were')} outside a step of a sharded optimizer, or "
            "inside a Join that follows groups, and the function cannot be run again in the "
            f"middle, because {missing_in(frozen)}"
        )
    # A newcomer begins at the top of the function, and the others have to go there, too; unless it
    # can make their dry run first, and they can do without it until then.
    newcomers = newcomers_of(run, known) if can_restart else []
    can_wait = arrivals.are_possible and all(report.admits for report in frozen.values())
    if can_wait and not unparked and len(frozen) >= run.request.fewest:
        newcomers = []
    restarts = bool(unparked or newcomers)
    infos = [member.info for member in run.members]
    fewest = run.departures.num_required(infos, run.request)
    leavers, handing = run.departures.leavers(
        infos, frozen, run.round.lost, fewest, restarts=restarts
    )
    staying = {id(run.members[rank]): rank for rank in sorted(frozen) if rank not in leavers}
    survivors = [run.members[rank] for rank in staying.values()]
    if not (restarts or leavers or handing or run.round.lost):
        newcomers = arrivals.entering(survivors, frozen, run.round.generation)
    # Newcomers begin at the top of the function. Where it cannot run again no pause would end.
    if (missing := fewest - len(survivors) - len(newcomers)) > 0:
        if can_restart:
            return Outlook(Situation.TOO_FEW, missing=missing)
        return _hopeless(
            f"fewer than {run.request.fewest} workers are left, and new ones cannot join, because "
            f"{missing_in(frozen)}"
        )
    try:
        progress = what_counts(frozen)
    except ValueError as error:
        return _hopeless(str(error))
    # Ranks may fail to meet again and again though none of them dies: a network that lets the
    # driver through, and not the ranks. A loss, a change of members or a step is progress.
    achieved = sum(one.ballots for one in progress)
    achieved += max(report.plain_steps for report in frozen.values())
    has_changed = run.round.lost or newcomers or leavers or achieved > run.achieved
    num_without_progress = 0 if has_changed else run.num_without_progress + 1
    if num_without_progress >= MAX_WITHOUT_PROGRESS:
        return _hopeless(f"ranks did not meet {MAX_WITHOUT_PROGRESS} times in a row")
    resting: list[Member] = []
    if run.request.replica_size > 1 and restarts:
        by_rank = {rank: run.members[rank] for rank in staying.values()}
        placed, resting = whole_replicas(
            by_rank, in_rank_order(newcomers), run.request.replica_size
        )
        members = [member for member, _ in placed]
        former = tuple(rank for _, rank in placed)
    else:
        # Only newcomers change the order: the ranks that stay keep theirs.
        members = in_rank_order([*survivors, *newcomers]) if newcomers else survivors
        former = tuple(staying.get(id(member), -1) for member in members)
    plan = Plan(
        tuple(members),
        former,
        progress,
        restarts,
        dismissed=tuple(run.members[rank] for rank in leavers),
        resting=tuple(resting),
        leaving=tuple(new for new, old in enumerate(former) if old in handing),
        takes_newcomers=can_restart,
        num_without_progress=num_without_progress,
        achieved=achieved,
    )
    return Outlook(Situation.READY, plan=plan)


def _hopeless(why: str) -> Outlook:
    return Outlook(Situation.HOPELESS, why)


def idle_in(run: RunState, known: Iterable[Member]) -> list[Member]:
    """Idle workers that have no rank in the run."""
    members = {id(member) for member in run.members}
    return [
        member
        for member in known
        if member.state is MemberState.READY and id(member) not in members
    ]


def newcomers_of(run: RunState, known: Iterable[Member]) -> list[Member]:
    """Idle workers that have no rank in the run, and no notice to leave."""
    return [one for one in idle_in(run, known) if run.departures.why(one.info) is None]


def missing_in(frozen: Mapping[int, Frozen]) -> str:
    """What keeps the functions from running again, as the first rank reports that knows it."""
    return next(report.missing for _, report in sorted(frozen.items()) if report.missing)
