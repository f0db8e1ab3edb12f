"""A run in progress, as the driver's decisions know it: its ranks, and how it stands. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from collectives.contract.errors import CollectiveError, GroupAborted, PeerLost

from .. import outcomes
from ..messages import (
    Assignment,
    Cancellation,
    Failure,
    Frozen,
    Loss,
    MemberState,
    Success,
    WorkerInfo,
)
from .departures import Departures
from .regeneration import Regeneration


@dataclass(slots=True)
class Member:
    info: WorkerInfo
    state: MemberState


@dataclass(slots=True)
class Run:
    """A run in progress. running: ranks that have not stopped. cause: as known so far (rule 2 of
    membership.py).

    is_asking: the ranks were asked what they do, and the answers are still to come. story: what
    follows from the answers; None before anybody was asked.
    losses: workers that it has gone on without. finished: ranks that wait for the others to return;
    is_released: all have, and were told so.
    regeneration: while one generation has ended and the next has not begun. takes_newcomers: as far
    as is known. is_paused: too few are left; the round is complete, and waits for newcomers.
    departures: who leaves on notice.
    saves_last: the ranks save what they have before it is given up. gives_up: what it ends with
    when its last generation is over; None while there may be others. epilogue: what came of that.
    nobody_began: a rank has said so, and it is for certain.
    num_vain: generations in a row that ended though nobody died and nothing was achieved;
    `achieved` says what was.
    """

    number: int
    fewest: int
    max_failures: int | None
    members: tuple[Member, ...]  # by rank
    running: set[int]
    returned: dict[int, Success] = field(default_factory=dict)
    cause: Failure | Loss | Cancellation | None = None
    is_stopping: bool = False
    is_asking: bool = False
    story: str | None = None
    losses: list[Loss] = field(default_factory=list)
    finished: set[int] = field(default_factory=set)
    is_released: bool = False
    regeneration: Regeneration | None = None
    takes_newcomers: bool = True
    is_paused: bool = False
    departures: Departures = field(default_factory=Departures)
    saves_last: bool = False
    gives_up: Loss | Failure | None = None
    epilogue: str = ""
    nobody_began: bool = False
    num_vain: int = 0
    achieved: int = -1

    @property
    def goes_on(self) -> bool:
        return self.max_failures != 0

    @property
    def has_lost_too_many(self) -> bool:
        return self.max_failures is not None and len(self.losses) > self.max_failures


def in_rank_order(members: Iterable[Member]) -> list[Member]:
    """Rule 4 of membership.py."""
    by_seat = sorted(members, key=lambda member: member.info.seat)
    first_seat: dict[str, int] = {}
    for member in by_seat:
        first_seat.setdefault(member.info.node_id, member.info.seat)
    return sorted(by_seat, key=lambda member: first_seat[member.info.node_id])


def assign(workers: list[WorkerInfo], generation: int) -> list[Assignment]:
    """workers: by rank, those of one node adjacent."""
    of_node: dict[str, list[WorkerInfo]] = {}
    for worker in workers:
        of_node.setdefault(worker.node_id, []).append(worker)
    node_ranks = {node: number for number, node in enumerate(of_node)}
    return [
        Assignment(
            generation=generation,
            rank=rank,
            world_size=len(workers),
            local_rank=of_node[worker.node_id].index(worker),
            local_world_size=len(of_node[worker.node_id]),
            node_rank=node_ranks[worker.node_id],
        )
        for rank, worker in enumerate(workers)
    ]


def stop_error(cause: Failure | Loss | Cancellation, generation: int) -> CollectiveError:
    """What the collectives of the other ranks raise: who began it, and where."""
    match cause:
        case Failure():
            return GroupAborted(generation, cause.culprits, cause.reason, cause.traceback)
        case Loss():
            return PeerLost("run", generation, [cause.rank], f"{cause.worker}: {cause.detail}")
        case Cancellation():
            return GroupAborted(generation, [], cause.reason)


def missing_in(frozen: Mapping[int, Frozen]) -> str:
    """What keeps the functions from running again, as the first rank says that has something."""
    told = (word.missing for _, word in sorted(frozen.items()) if not word.can_restart)
    return next(filter(None, told), "the function has not registered what has to survive")


def failure_of(met: Frozen) -> Failure:
    """What a frozen rank would have raised."""
    return replace(outcomes.failure(met.rank, met.error), is_echo=False)


def is_echo(cause: Failure | Loss | Cancellation) -> bool:
    return isinstance(cause, Failure) and cause.is_echo
