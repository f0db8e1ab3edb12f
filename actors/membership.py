"""The driver's decisions, pure: an event goes in, instructions come out.

No Ray, no `await`, no clock: a race between workers is a list of events, and the tests go through
all of them. `driver.py` turns what happens into events and carries the instructions out.

The rules:

1. A **generation** is one immutable membership. It serves one run after another while all is well;
   after a failure, a change of members, or a run that left collectives in flight, the next run
   forms the next generation. Numbers never repeat, also not after the driver has died: workers say
   which generation they were in.
2. **First failure wins.** The first failure of a run ends it for all: every rank that still runs
   is told to stop, once. What the others then raise (GroupAborted, PeerLost) is an echo. An echo
   can be faster than its cause, so the cause is settled only when every rank has stopped, or when
   the grace period is over: the first that is no echo, else the first echo.
3. **Ranks** follow the seats, and ranks of one node are adjacent: nodes in the order of their
   lowest seat. A worker that was replaced thus leaves the others' ranks alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from collectives.errors import CollectiveError, GroupAborted, PeerLost

from .messages import (
    Assignment,
    Cancellation,
    DriverSnapshot,
    Failure,
    Loss,
    MemberState,
    RunFailed,
    RunSucceeded,
    Success,
    WorkerInfo,
)
from .testimony import Testimony, tell

# ── Events: what has happened ────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class WorkerRegistered:
    """A worker is here and idle. It takes its seat from whoever sat there.

    generation: the last one it took part in, -1 if none.
    """

    worker: WorkerInfo
    generation: int = -1


@dataclass(frozen=True, slots=True)
class RunStarted:
    run: int


@dataclass(frozen=True, slots=True)
class RankEnded:
    """The user's function has returned or raised on a rank, and its training thread is over."""

    ending: Success | Failure


@dataclass(frozen=True, slots=True)
class RanksTold:
    """Where the ranks are; by rank, a text says why one said nothing."""

    testimonies: Mapping[int, Testimony | str]


@dataclass(frozen=True, slots=True)
class WorkerDied:
    worker_id: str
    detail: str


@dataclass(frozen=True, slots=True)
class RunCancelled:
    reason: str


@dataclass(frozen=True, slots=True)
class GraceEnded:
    """The ranks that were told to stop have had their time."""


Event: TypeAlias = (
    WorkerRegistered | RunStarted | RankEnded | RanksTold | WorkerDied | RunCancelled | GraceEnded
)

# ── Instructions: what to do about it ────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class StartRank:
    worker_id: str
    assignment: Assignment


@dataclass(frozen=True, slots=True)
class AskRanks:
    """Ask all ranks what they do, before anything stops them; they answer within a deadline.

    worker_ids: by rank.
    """

    worker_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AbortRank:
    """Tell a rank that still runs to stop; `error` is what its collectives raise."""

    worker_id: str
    error: CollectiveError


@dataclass(frozen=True, slots=True)
class StartGrace:
    """Send GraceEnded when ranks have had long enough to stop."""


@dataclass(frozen=True, slots=True)
class EndRun:
    """The run is over; nothing more comes for it."""

    outcome: RunSucceeded | RunFailed


Instruction: TypeAlias = StartRank | AskRanks | AbortRank | StartGrace | EndRun

# ── The state machine ────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class _Member:
    info: WorkerInfo
    state: MemberState


@dataclass(slots=True)
class _Run:
    """A run in progress. running: ranks that have not stopped. cause: rule 2, as known so far.

    is_asking: the ranks were asked what they do, and the answers are still to come. story: what
    follows from the answers; None before anybody was asked.
    """

    number: int
    members: tuple[_Member, ...]  # by rank
    running: set[int]
    returned: dict[int, Success] = field(default_factory=dict)
    cause: Failure | Loss | Cancellation | None = None
    is_stopping: bool = False
    is_asking: bool = False
    story: str | None = None


class Membership:
    """Who belongs to the session, in which generation, and how the run in progress stands."""

    def __init__(self) -> None:
        self._members: dict[int, _Member] = {}  # by seat
        self._generation = -1
        self._formed: tuple[str, ...] = ()  # worker ids by rank, while the generation is healthy
        self._run: _Run | None = None

    def handle(self, event: Event) -> list[Instruction]:
        match event:
            case WorkerRegistered(worker, generation):
                return self._register(worker, generation)
            case RunStarted(run):
                return self._start(run)
            case RankEnded(ending):
                return self._rank_ended(ending)
            case RanksTold(testimonies):
                return self._ranks_told(testimonies)
            case WorkerDied(worker_id, detail):
                return self._worker_died(worker_id, detail)
            case RunCancelled(reason):
                return self._stop(Cancellation(reason)) if self._run else []
            case GraceEnded():
                return self._end() if self._run and self._run.is_stopping else []

    def _ranks_told(self, testimonies: Mapping[int, Testimony | str]) -> list[Instruction]:
        run = self._run
        if run is None or not run.is_asking:
            return []
        run.is_asking = False
        late = run.cause.culprits if isinstance(run.cause, Failure) else ()
        run.story = tell(testimonies, late)
        return [] if run.running else self._end()

    def snapshot(self, incarnation: int) -> DriverSnapshot:
        return DriverSnapshot(
            incarnation,
            self._generation,
            self._run.number if self._run else None,
            tuple((member.info, member.state) for _, member in sorted(self._members.items())),
        )

    def _register(self, worker: WorkerInfo, generation: int) -> list[Instruction]:
        self._members[worker.seat] = _Member(worker, MemberState.READY)
        if generation > self._generation:
            self._generation = generation
            self._formed = ()
        return []

    def _start(self, run: int) -> list[Instruction]:
        if self._run is not None:
            raise RuntimeError(f"run {self._run.number} is still in progress")
        unready = [m for m in self._members.values() if m.state is not MemberState.READY]
        if unready or not self._members:
            told = "; ".join(f"{member.info} is {member.state.value}" for member in unready)
            raise RuntimeError(f"run {run} cannot start: {told or 'no worker has registered'}")
        members = tuple(in_rank_order(self._members.values()))
        order = tuple(member.info.worker_id for member in members)
        if order != self._formed:
            self._generation += 1
            self._formed = order
        self._run = _Run(run, members, set(range(len(members))))
        for member in members:
            member.state = MemberState.RUNNING
        assignments = assign([member.info for member in members], self._generation)
        return [
            StartRank(worker_id, assignment)
            for worker_id, assignment in zip(order, assignments, strict=True)
        ]

    def _rank_ended(self, ending: Success | Failure) -> list[Instruction]:
        run = self._run
        if run is None or ending.rank not in run.running:
            return []
        run.running.discard(ending.rank)
        run.members[ending.rank].state = MemberState.READY
        if isinstance(ending, Failure):
            return self._stop(ending)
        run.returned[ending.rank] = ending
        return [] if run.running or run.is_asking else self._end()

    def _worker_died(self, worker_id: str, detail: str) -> list[Instruction]:
        for member in self._members.values():
            if member.info.worker_id == worker_id:
                member.state = MemberState.LOST
                self._formed = ()
        run = self._run
        if run is None:
            return []
        for rank in sorted(run.running):
            if run.members[rank].info.worker_id == worker_id:
                run.running.discard(rank)
                return self._stop(Loss(rank, run.members[rank].info, detail))
        return []

    def _stop(self, cause: Failure | Loss | Cancellation) -> list[Instruction]:
        """Rule 2: note what happened; the first time, tell all who still run."""
        run = self._run
        assert run is not None
        if run.cause is None or (_is_echo(run.cause) and not _is_echo(cause)):
            run.cause = cause
        self._formed = ()
        ask: list[Instruction] = []
        if isinstance(cause, Failure) and cause.asks_all and run.story is None:
            run.is_asking, run.story = True, ""
            ask.append(AskRanks(tuple(member.info.worker_id for member in run.members)))
        if not run.running:
            return ask if run.is_asking else self._end()
        if run.is_stopping:
            return ask
        run.is_stopping = True
        error = stop_error(cause, self._generation)
        aborts = [
            AbortRank(run.members[rank].info.worker_id, error) for rank in sorted(run.running)
        ]
        return [*ask, *aborts, StartGrace()]

    def _end(self) -> list[Instruction]:
        run = self._run
        assert run is not None
        self._run = None
        if run.cause is None:
            endings = [run.returned[rank] for rank in range(len(run.members))]
            if len({ending.collectives for ending in endings}) > 1:
                self._formed = ()  # Some rank's operation waits for peers that have left.
            results = tuple(ending.result for ending in endings)
            return [EndRun(RunSucceeded(self._generation, results))]
        for rank in run.running:
            run.members[rank].state = MemberState.STUCK
        infos = tuple(member.info for member in run.members)
        returned, stuck = tuple(sorted(run.returned)), tuple(sorted(run.running))
        return [
            EndRun(RunFailed(self._generation, run.cause, infos, returned, stuck, run.story or ""))
        ]


def in_rank_order(members: Iterable[_Member]) -> list[_Member]:
    """Rule 3."""
    by_seat = sorted(members, key=lambda member: member.info.seat)
    first_seat: dict[str, int] = {}
    for member in by_seat:
        first_seat.setdefault(member.info.node_id, member.info.seat)
    return sorted(by_seat, key=lambda member: first_seat[member.info.node_id])


def assign(workers: list[WorkerInfo], generation: int) -> list[Assignment]:
    """workers: by rank, those of one node adjacent."""
    nodes = list(dict.fromkeys(worker.node_id for worker in workers))
    of_node = {node: [w for w in workers if w.node_id == node] for node in nodes}
    return [
        Assignment(
            generation=generation,
            rank=rank,
            world_size=len(workers),
            local_rank=of_node[worker.node_id].index(worker),
            local_world_size=len(of_node[worker.node_id]),
            node_rank=nodes.index(worker.node_id),
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


def _is_echo(cause: Failure | Loss | Cancellation) -> bool:
    return isinstance(cause, Failure) and cause.is_echo
