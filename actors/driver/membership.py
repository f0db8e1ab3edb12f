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
3. **A run may go on** without the workers that it loses, if its request says so. Then the first
   loss, or a rank that has frozen itself, freezes all (regeneration.py). When all who live are
   frozen the next generation forms of them, and the run goes on in it. A rank whose function has
   returned stays until all have, because others may need its shard. Where the functions can be run
   again from the top (they have registered what has to survive), they are, with the newcomers:
   if one of them was left by an error of its own collectives, or if new workers have come. With
   fewer than the fewest workers the run waits for some. What else ends a run still ends it: an
   exception of a function, too many losses, ranks that fail to meet again and again though none
   of them dies. Where it is the driver that gives up, and the session keeps checkpoints, the ranks
   save what they have first (last_generation.py).
4. **Ranks** follow the seats, and ranks of one node are adjacent: nodes in the order of their
   lowest seat. A worker that was replaced thus leaves the others' ranks alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from collectives.contract.errors import CollectiveError, CollectiveTimeout, GroupAborted

from ..messages import (
    Cancellation,
    DriverSnapshot,
    Failure,
    FormerRanks,
    Frozen,
    Loss,
    MemberState,
    Progress,
    Resumption,
    RunFailed,
    RunSucceeded,
    Stand,
    Success,
    WorkerInfo,
)
from ..whereabouts import Testimony, tell
from . import last_generation
from .events import (
    Event,
    GraceEnded,
    LastSaveEnded,
    Leaving,
    PatienceEnded,
    PauseEnded,
    RankEnded,
    RankFinished,
    RankFroze,
    RankSilent,
    RanksTold,
    RunCancelled,
    RunStarted,
    RunTakenOver,
    SeatEmptied,
    WorkerDied,
    WorkerRegistered,
)
from .instructions import (
    AbortRank,
    AskRanks,
    AttachRank,
    DismissRank,
    EndRun,
    Fence,
    FreezeRank,
    Instruction,
    ReleaseRank,
    ResumeRank,
    StartGrace,
    StartLastSave,
    StartPatience,
    StartPause,
    StartRank,
)
from .regeneration import Regeneration, decide
from .run_state import (
    Member,
    Run,
    assign,
    failure_of,
    in_rank_order,
    is_echo,
    missing_in,
    stop_error,
)

MAX_VAIN = 3
"""Generations in which ranks did not meet, one after another, before the run is given up."""


class Membership:
    """Who belongs to the session, in which generation, and how the run in progress stands."""

    def __init__(self) -> None:
        self._members: dict[int, Member] = {}  # by seat
        self._generation = -1
        self._formed: tuple[str, ...] = ()  # worker ids by rank, while the generation is healthy
        self._run: Run | None = None

    def handle(self, event: Event) -> list[Instruction]:
        match event:
            case WorkerRegistered(worker, generation):
                return self._register(worker, generation)
            case RunStarted():
                return self._start(event)
            case RunTakenOver():
                return self._take_over(event)
            case SeatEmptied(seat):
                if self._members.pop(seat, None) is not None:
                    self._formed = ()
                return []
            case RankEnded(ending, worker_id):
                return self._rank_ended(ending, worker_id)
            case RankFroze(frozen):
                return self._rank_froze(frozen)
            case RankFinished(rank, generation):
                return self._rank_finished(rank, generation)
            case RankSilent(worker_id, generation):
                return self._fence([worker_id], generation, "its control loop does not answer")
            case PatienceEnded(generation):
                return self._patience_ended(generation)
            case PauseEnded(generation):
                return self._pause_ended(generation)
            case LastSaveEnded(generation):
                return self._last_save_ended(generation)
            case Leaving(who, why):
                return self._leaving(who, why)
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
        known = self._members.get(worker.seat)
        if known and known.info == worker and known.state is MemberState.RUNNING:
            return []  # It was asked twice, and has a rank meanwhile.
        self._members[worker.seat] = Member(worker, MemberState.READY)
        if generation > self._generation:
            self._generation = generation
            self._formed = ()
        run = self._run
        if run is None or not run.goes_on or run.is_stopping or run.is_released or run.gives_up:
            return []
        if run.regeneration is not None:
            return self._decide()
        if not run.takes_newcomers:
            return []
        return self._freeze_others(GroupAborted(self._generation, [], f"{worker} has come"))

    def _start(self, started: RunStarted) -> list[Instruction]:
        run, fewest = started.run, started.fewest
        if self._run is not None:
            raise RuntimeError(f"run {self._run.number} is still in progress")
        ready = [m for m in self._members.values() if m.state is MemberState.READY]
        unready = [m for m in self._members.values() if m.state is not MemberState.READY]
        # A seat may stay empty whose node is gone, as long as there are enough of the others.
        if len(ready) < fewest or any(m.state is not MemberState.LOST for m in unready):
            told = "; ".join(f"{member.info} is {member.state.value}" for member in unready)
            raise RuntimeError(f"run {run} cannot start: {told or 'no worker has registered'}")
        self._members = {member.info.seat: member for member in ready}
        members = tuple(in_rank_order(ready))
        order = tuple(member.info.worker_id for member in members)
        if order != self._formed:
            self._generation += 1
            self._formed = order
        self._run = Run(
            run,
            fewest,
            started.max_failures,
            members,
            set(range(len(members))),
            saves_last=started.saves_last,
        )
        for member in members:
            member.state = MemberState.RUNNING
        assignments = assign([member.info for member in members], self._generation)
        return [
            StartRank(worker_id, assignment)
            for worker_id, assignment in zip(order, assignments, strict=True)
        ]

    def _take_over(self, taken: RunTakenOver) -> list[Instruction]:
        """Go on with what the workers say; a rank that none of them has is lost."""
        # Of those who were told last, one that knows how it came about.
        newest = max(
            taken.stands,
            key=lambda stand: (stand.assignment.generation, stand.resumption is not None),
        )
        generation, size = newest.assignment.generation, newest.assignment.world_size
        by_rank: dict[int, Stand] = {}
        late: list[tuple[int, Stand]] = []
        for stand in taken.stands:
            if stand.assignment.generation == generation:
                by_rank[stand.assignment.rank] = stand
            elif newest.resumption is not None:
                former = newest.resumption.former_ranks
                if stand.assignment.rank in former:
                    late.append((former.index(stand.assignment.rank), stand))
        by_rank.update(late)
        members = []
        for rank in range(size):
            if rank in by_rank:
                member = self._members[by_rank[rank].info.seat]
                member.state = MemberState.RUNNING
            else:
                unknown = replace(newest.info, worker_id=f"lost with the driver, rank {rank}")
                member = Member(unknown, MemberState.LOST)
            members.append(member)
        self._generation = generation
        self._formed = tuple(member.info.worker_id for member in members)
        self._run = Run(
            taken.run,
            taken.fewest,
            taken.max_failures,
            tuple(members),
            set(range(size)),
            saves_last=taken.saves_last,
            gives_up=newest.resumption.gives_up if newest.resumption is not None else None,
        )
        instructions: list[Instruction] = [
            AttachRank(stand.info.worker_id) for _, stand in sorted(by_rank.items())
        ]
        assignments = assign([member.info for member in members], generation)
        if newest.resumption is not None:
            instructions += [
                ResumeRank(
                    stand.info.worker_id, replace(newest.resumption, assignment=assignments[rank])
                )
                for rank, stand in late
            ]
        if self._run.gives_up is not None:
            instructions.append(StartLastSave(generation))
        for rank in range(size):
            if rank not in by_rank:
                instructions += self._worker_died(
                    members[rank].info.worker_id, "it died with the driver"
                )
        return instructions

    def _rank_ended(self, ending: Success | Failure, worker_id: str) -> list[Instruction]:
        run = self._run
        if run is None or ending.rank not in run.running:
            return []
        if worker_id and run.members[ending.rank].info.worker_id != worker_id:
            return []  # It has had that rank in an earlier generation.
        run.running.discard(ending.rank)
        run.members[ending.rank].state = MemberState.READY
        if isinstance(ending, Failure):
            run.nobody_began = run.nobody_began or ending.nobody_began
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
                return self._lose(Loss(rank, run.members[rank].info, detail))
        return []

    # ── Rule 3: a run goes on ────────────────────────────────────────────────────────────────────

    def _lose(self, loss: Loss) -> list[Instruction]:
        run = self._run
        assert run is not None
        run.losses.append(loss)
        ends_at_once = run.has_lost_too_many and not (run.goes_on and run.saves_last)
        if run.is_stopping or run.is_released or ends_at_once or not run.running:
            return self._stop(loss)
        begun = self._freeze_others(stop_error(loss, self._generation))
        assert run.regeneration is not None
        run.regeneration.died(loss.rank)
        return [*begun, *self._decide()]

    def _leaving(self, who: str, why: str) -> list[Instruction]:
        run = self._run
        if run is None or not run.goes_on or run.is_stopping or run.is_released or run.gives_up:
            return []
        run.departures.note(who, why)
        infos = [member.info for member in run.members]
        if run.regeneration is not None or not run.departures.is_due(who, infos, run.fewest):
            return []
        return self._freeze_others(GroupAborted(self._generation, [], f"ranks leave: {why}"))

    def _rank_froze(self, frozen: Frozen) -> list[Instruction]:
        run = self._run
        if run is None or run.is_stopping or frozen.generation != self._generation:
            return []
        begun = self._freeze_others(frozen.error, but=frozen.rank)
        assert run.regeneration is not None
        run.regeneration.froze(frozen)
        return [*begun, *self._decide()]

    def _freeze_others(self, error: CollectiveError, but: int = -1) -> list[Instruction]:
        """Begin a round, if none has begun."""
        run = self._run
        assert run is not None
        if run.regeneration is not None:
            return []
        run.regeneration = Regeneration(self._generation, range(len(run.members)))
        freezes = [
            FreezeRank(
                run.members[rank].info.worker_id,
                self._generation,
                error,
                isinstance(error, CollectiveTimeout) and rank in error.ranks,
            )
            for rank in sorted(run.running - {but})
        ]
        return [*freezes, StartPatience(self._generation)]

    def _patience_ended(self, generation: int) -> list[Instruction]:
        run = self._run
        if run is None or run.regeneration is None:
            return []
        silent = [run.members[rank].info.worker_id for rank in run.regeneration.unfrozen]
        return self._fence(silent, generation, "its function did not come to a stop in time")

    def _fence(self, worker_ids: Iterable[str], generation: int, why: str) -> list[Instruction]:
        run = self._run
        if run is None or run.is_stopping or generation != self._generation:
            return []
        round_ = run.regeneration
        unfrozen = round_.unfrozen if round_ is not None else []
        silent = {run.members[rank].info.worker_id for rank in unfrozen}
        return [Fence(worker_id, why) for worker_id in worker_ids if worker_id in silent]

    def _decide(self) -> list[Instruction]:
        """Form the next generation, if all who live are frozen."""
        run = self._run
        assert run is not None and run.regeneration is not None
        round_ = run.regeneration
        if not round_.is_complete:
            return []
        frozen = round_.frozen
        if run.gives_up is not None:
            return self._end_given_up(last_generation.epilogue(frozen))
        met = next(iter(frozen.values()))
        if run.has_lost_too_many:
            return self._give_up(met, f"max_failures={run.max_failures} allows no more losses")
        newcomers = [
            member
            for member in self._members.values()
            if member.state is MemberState.READY
            and run.departures.why(member.info) is None
            and all(member is not one for one in run.members)
        ]
        can_restart = all(word.can_restart for word in frozen.values())
        if not can_restart:
            newcomers, run.takes_newcomers = [], False
        unparked = sorted(rank for rank, word in frozen.items() if not word.is_parked)
        if unparked and not can_restart:
            return self._give_up(
                met,
                f"ranks {unparked} were outside a step of a sharded optimizer, or inside a Join "
                "that follows groups, and their function cannot be run again in the middle, "
                f"because {missing_in(frozen)}",
            )
        restarts = bool(unparked or newcomers)
        infos = [member.info for member in run.members]
        leavers, handing = run.departures.leavers(
            infos, frozen, round_.lost, run.fewest, restarts=restarts
        )
        gone = [run.members[rank] for rank in leavers]
        survivors = [run.members[rank] for rank in sorted(frozen) if rank not in leavers]
        if len(survivors) + len(newcomers) < run.fewest:
            return self._pause(met, "" if can_restart else missing_in(frozen))
        try:
            progress = decide(frozen)
        except ValueError as error:
            return self._give_up(met, str(error))
        achieved = sum(one.ballots for one in progress)
        achieved += max(word.plain_steps for word in frozen.values())
        has_changed = round_.lost or newcomers or leavers or achieved > run.achieved
        run.num_vain = 0 if has_changed else run.num_vain + 1
        run.achieved = achieved
        if run.num_vain >= MAX_VAIN:
            return self._give_up(met, f"ranks did not meet {MAX_VAIN} times in a row")
        instructions: list[Instruction] = []
        for member in gone:
            why = run.departures.why(member.info)
            left = GroupAborted(self._generation, [], f"{member.info} has left: {why}")
            instructions.append(DismissRank(member.info.worker_id, left))
        members = in_rank_order([*survivors, *newcomers]) if newcomers else survivors
        formed = self._form(members, progress, restarts=restarts, leaving=handing)
        return [*instructions, *formed]

    def _form(
        self,
        members: list[Member],
        progress: tuple[Progress, ...],
        *,
        restarts: bool,
        leaving: Iterable[int] = (),
        gives_up: Loss | Failure | None = None,
    ) -> list[Instruction]:
        """The next generation, of these. leaving: by rank of the one that has ended; the rest as in
        Resumption."""
        run = self._run
        assert run is not None and run.regeneration is not None
        rank_before = {id(member): rank for rank, member in enumerate(run.members)}
        former = FormerRanks.of(rank_before.get(id(member), -1) for member in members)
        entered = max(word.entered for word in run.regeneration.frozen.values())
        run.members = tuple(members)
        run.running = set(range(len(members)))
        run.finished.clear()
        run.regeneration, run.is_paused = None, False
        self._generation += 1
        self._formed = tuple(member.info.worker_id for member in members)
        now_leaving = tuple(rank for rank, old in enumerate(former.ranks()) if old in leaving)
        instructions: list[Instruction] = []
        for member, assignment in zip(
            members,
            assign([member.info for member in members], self._generation),
            strict=True,
        ):
            member.state = MemberState.RUNNING
            told = Resumption(
                assignment, former, progress, entered, restarts, now_leaving, gives_up
            )
            instructions.append(
                ResumeRank(member.info.worker_id, told)
                if id(member) in rank_before
                else StartRank(member.info.worker_id, assignment, told)
            )
        return instructions

    def _pause(self, met: Frozen, missing: str) -> list[Instruction]:
        """Fewer are left than the run may go on with."""
        run = self._run
        assert run is not None
        if missing:
            return self._give_up(
                met,
                f"fewer than {run.fewest} workers are left, and new ones cannot be taken in, "
                f"because {missing}",
            )
        if run.is_paused:
            return []
        run.is_paused = True
        return [StartPause(self._generation)]

    def _pause_ended(self, generation: int) -> list[Instruction]:
        run = self._run
        if run is None or not run.is_paused or generation != self._generation:
            return []
        assert run.regeneration is not None
        met = next(iter(run.regeneration.frozen.values()))
        return self._give_up(met, f"no new workers came, and fewer than {run.fewest} are left")

    def _give_up(self, met: Frozen, why: str) -> list[Instruction]:
        """The run cannot go on: it ends with the last loss, or with what a rank has met with.
        All who live are frozen; they save what they have first, if they can."""
        run = self._run
        assert run is not None and run.regeneration is not None
        cause: Loss | Failure = failure_of(met)
        if run.losses:
            last = run.losses[-1]
            cause = Loss(last.rank, last.worker, f"{last.detail} ({why})")
        frozen = run.regeneration.frozen
        if run.saves_last and last_generation.may_save(frozen):
            try:
                progress = decide(frozen)
            except ValueError:
                pass  # They have run different programs: nobody knows what counts.
            else:
                run.gives_up = cause
                survivors = [run.members[rank] for rank in sorted(frozen)]
                formed = self._form(survivors, progress, restarts=True, gives_up=cause)
                return [*formed, StartLastSave(self._generation)]
        run.regeneration = None
        return self._stop(cause)

    def _last_save_ended(self, generation: int) -> list[Instruction]:
        run = self._run
        if run is None or run.is_stopping or not run.gives_up or generation != self._generation:
            return []
        return self._end_given_up("what the ranks had was not saved in time")

    def _end_given_up(self, epilogue: str) -> list[Instruction]:
        """The last generation is over, one way or the other."""
        run = self._run
        assert run is not None and run.gives_up is not None
        run.regeneration, run.epilogue = None, epilogue
        return self._stop(last_generation.told_with(run.gives_up, epilogue))

    def _rank_finished(self, rank: int, generation: int) -> list[Instruction]:
        run = self._run
        if run is None or run.is_stopping or generation != self._generation:
            return []
        run.finished.add(rank)
        # Asked after each report, of thousands perhaps: so they are counted, not compared.
        if run.regeneration is not None or len(run.finished) < len(run.running):
            return []
        run.is_released = True
        return [ReleaseRank(member.info.worker_id) for member in run.members]

    def _stop(self, cause: Failure | Loss | Cancellation) -> list[Instruction]:
        """Rule 2: note what happened; the first time, tell all who still run."""
        run = self._run
        assert run is not None
        if is_echo(cause) and run.losses:
            cause = run.losses[-1]
        if run.cause is None or (is_echo(run.cause) and not is_echo(cause)):
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
        # A death may be told later than what it did to the others.
        is_by_loss = isinstance(run.cause, Loss) or is_echo(run.cause)
        # The text of a loss has its epilogue in it.
        epilogue = run.epilogue if isinstance(run.cause, Failure) else ""
        failed = RunFailed(
            self._generation,
            run.cause,
            infos,
            returned,
            stuck,
            "\n".join(words for words in (run.story, epilogue) if words),
            nobody_began=run.nobody_began and is_by_loss,
        )
        return [EndRun(failed)]
