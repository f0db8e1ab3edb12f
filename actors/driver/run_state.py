"""A run in progress, as the driver's decisions know it: its phase and its ranks. Pure."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from chorusline.collectives.contract.errors import CollectiveError, GroupAborted, PeerLost

from ..messages import messages, outcomes
from ..messages.messages import Cancellation, Failure, Loss
from .departures import Departures
from .regeneration import Regeneration


class Phase(enum.Enum):
    """Where a run stands. membership.py has the table of what each event does in each phase."""

    RUNNING = "running"
    """The ranks are in a generation, and no failure is known. After a change of drivers some may
    have failed, or have been released, without this driver's knowing yet."""

    FREEZING = "freezing"
    """The generation has ended and the run may continue. A round is open: its ranks freeze or die,
    one after another, and nothing is decided before the last of them."""

    PAUSED = "paused"
    """All ranks that live are frozen, and they are too few. The round stays open until newcomers
    come, or the pause is over."""

    SAVING_LAST = "saving last"
    """The run is given up (`RunState.gives_up`). Its ranks write a checkpoint in their last
    generation."""

    FREEZING_LAST = "freezing last"
    """The last generation has ended, and its round is open: the reports say whether the checkpoint
    is whole. No generation follows."""

    RELEASED = "released"
    """The function has returned on all ranks, and each ends with its result. A rank that is lost
    now takes its result along, so the run cannot continue without it."""

    STOPPING = "stopping"
    """The run ends with `RunState.cause`. The ranks that still run were told to stop; the run is
    over when they have stopped and the questions are answered, or with the grace period."""

    @property
    def has_open_round(self) -> bool:
        return self in (Phase.FREEZING, Phase.PAUSED, Phase.FREEZING_LAST)


class Inquiry(enum.Enum):
    """Whether the ranks of a run that ends were asked what they do."""

    NOT_MADE = "not made"
    OPEN = "open"
    """They were asked, and the run is not over before the answers are there."""
    ANSWERED = "answered"
    """`RunState.story` is what follows from the answers."""


@dataclass(slots=True)
class Member:
    """A worker that the driver counts on, and what it does now."""

    info: messages.WorkerInfo
    state: messages.MemberState


@dataclass(slots=True)
class RunState:
    """What the driver knows of a run in progress.

    members: by rank, of the generation that the run is in, or that has just ended.
    running: ranks that have not stopped.
    round: the open round, or the last one; before the first one it has no ranks.
    finished: ranks whose function has returned in this generation, and that wait for the others.
    returned: the results of ranks that have ended with one.
    losses: workers that the run has lost, in this order.
    num_lost_before: workers that it had lost when another driver took it over.
    takes_newcomers: False once the functions of some rank could not be run again from the top.
    asked_in: the last generation in which ranks are asked whether they are ready for newcomers.
    departures: workers that leave on notice.
    fenced: by worker id, why the driver has ended a worker's process.
    gives_up: what the run ends with when its last generation is over; None before that.
    missing: workers that have to come before it continues, where it is paused.
    epilogue: what has become of the last generation.
    cause: why the run ends, as far as is known (rule 2 of membership.py); None while it does not.
    story: where each rank was, from the answers to the inquiry; empty before them.
    nobody_began: the function cannot have been called on any rank.
    num_without_progress: generations in a row that ended though no rank was lost and nothing was
    achieved.
    achieved: ballots and plain steps by the end of the last round.
    """

    request: messages.RunRequest
    members: tuple[Member, ...]
    running: set[int]
    phase: Phase = Phase.RUNNING
    round: Regeneration = field(default_factory=lambda: Regeneration(-1, ()))
    finished: set[int] = field(default_factory=set)
    returned: dict[int, messages.Success] = field(default_factory=dict)
    losses: list[Loss] = field(default_factory=list)
    num_lost_before: int = 0
    takes_newcomers: bool = True
    asked_in: int = -1
    departures: Departures = field(default_factory=Departures)
    fenced: dict[str, str] = field(default_factory=dict)
    gives_up: Loss | Failure | None = None
    missing: int = 0
    epilogue: str = ""
    cause: Failure | Loss | Cancellation | None = None
    inquiry: Inquiry = Inquiry.NOT_MADE
    story: str = ""
    nobody_began: bool = False
    num_without_progress: int = 0
    achieved: int = -1

    @property
    def worker_ids(self) -> tuple[str, ...]:
        """By rank."""
        return tuple(member.info.worker_id for member in self.members)

    @property
    def num_lost(self) -> int:
        return self.num_lost_before + len(self.losses)

    @property
    def may_lose_one(self) -> bool:
        """Whether the run continues without one more of its ranks, as far as their number goes."""
        allowed = self.request.max_failures
        return len(self.running) > 1 and (allowed is None or self.num_lost < allowed)

    @property
    def has_lost_too_many(self) -> bool:
        allowed = self.request.max_failures
        return allowed is not None and self.num_lost > allowed


def in_rank_order(members: Iterable[Member]) -> list[Member]:
    """Rule 4 of membership.py."""
    by_seat = sorted(members, key=lambda member: member.info.seat)
    first_seat: dict[str, int] = {}
    for member in by_seat:
        first_seat.setdefault(member.info.node_id, member.info.seat)
    return sorted(by_seat, key=lambda member: first_seat[member.info.node_id])


def assign(members: Iterable[Member], generation: int) -> list[messages.Assignment]:
    """The assignments of a generation. members: by rank, those of one node adjacent."""
    nodes = [member.info.node_id for member in members]
    sizes: dict[str, int] = {}
    local_ranks = []
    for node in nodes:
        local_ranks.append(sizes.get(node, 0))
        sizes[node] = local_ranks[-1] + 1
    node_ranks = {node: number for number, node in enumerate(sizes)}
    return [
        messages.Assignment(
            generation=generation,
            rank=rank,
            world_size=len(nodes),
            local_rank=local_rank,
            local_world_size=sizes[node],
            node_rank=node_ranks[node],
        )
        for rank, (node, local_rank) in enumerate(zip(nodes, local_ranks, strict=True))
    ]


def stop_error(cause: Failure | Loss | Cancellation, generation: int) -> CollectiveError:
    """The error that the collectives of the other ranks raise: which rank began it, and where."""
    match cause:
        case Failure():
            return GroupAborted(generation, list(cause.culprits), cause.reason, cause.traceback)
        case Loss():
            return PeerLost("run", generation, [cause.rank], f"{cause.worker}: {cause.detail}")
        case Cancellation():
            return GroupAborted(generation, [], cause.reason)


def failed_run(run: RunState, generation: int) -> messages.RunFailed:
    """The outcome of a run that has ended with a cause."""
    assert run.cause is not None
    # A death may be reported later than what it did to the other ranks.
    is_by_loss = isinstance(run.cause, Loss) or is_echo(run.cause)
    # The text of a loss has its epilogue in it.
    epilogue = run.epilogue if isinstance(run.cause, Failure) else ""
    return messages.RunFailed(
        generation,
        run.cause,
        workers=tuple(member.info for member in run.members),
        returned=tuple(sorted(run.returned)),
        stuck=tuple(sorted(run.running)),
        story="\n".join(words for words in (run.story, epilogue) if words),
        nobody_began=run.nobody_began and is_by_loss,
        may_lose=run.request.survives_loss,
        losses=tuple(run.losses),
        replica_size=run.request.replica_size,
    )


def failure_of(frozen: messages.Frozen, why: str) -> Failure:
    """What a frozen rank raises in a run that cannot continue. why: it cannot."""
    error = frozen.error
    if isinstance(error, GroupAborted):  # It says why the generation was ended, and no more.
        error = replace(error, reason=f"{error.reason}; and the run cannot continue: {why}")
    return replace(outcomes.failure(frozen.rank, error), is_echo=False)


def is_echo(cause: Failure | Loss | Cancellation) -> bool:
    return isinstance(cause, Failure) and cause.is_echo
