"""The driver's decisions, pure: an event goes in, instructions come out.

No Ray, no `await`, no clock: a race between workers is a list of events, and the tests go through
all of them. `driver.py` turns what happens into events and carries the instructions out.

The rules:

1. A **generation** is one immutable membership. It serves one run after another while all is well;
   after a failure, a change of members, or a run that left collectives in flight, the next run
   forms the next generation. Numbers never repeat, also not after the driver has died: workers
   report which generation they were in.
2. **First failure wins.** The first failure of a run ends it for all: every rank that still runs
   is told to stop, once. What the others then raise (GroupAborted, PeerLost) is an echo. An echo
   can be faster than its cause, so the cause is settled only when every rank has stopped, or when
   the grace period is over: the first that is not an echo, else the first echo.
3. **A run may continue** without the workers that it loses, if its request says so. Then the first
   loss, or a rank that has frozen itself, opens a round in which all ranks freeze
   (`Regeneration`). When all who live are frozen the next generation forms of them, and the run
   continues in it. A rank whose function has returned stays until all have, because others may need
   its shard. Where the functions can be run again from the top (they have registered what has to
   survive), they are, with the newcomers: if one of them was left by an error of its own
   collectives, or if new workers have come. With fewer than the fewest workers the run pauses
   until some come. What else ends a run still ends it: an exception of a function, too many
   losses, ranks that fail to meet again and again though none of them dies. Where it is the driver
   that gives up, and the session keeps checkpoints, the ranks save what they have first
   (last_generation.py).
4. **Ranks** follow the seats, and ranks of one node are adjacent: nodes in the order of their
   lowest seat. A worker that was replaced thus leaves the others' ranks alone.
5. With `replica_size` above 1 a generation has **whole replicas** only, in the order of
   replicas.py. A rank that is left over rests: its worker ends what it did, and is READY then.

What an event does in each phase of a run (run_state.py). Where there is nothing, the event is void
or too late, as are events that carry the number of another generation.

   event             RUNNING      FREEZING  PAUSED    SAVING_LAST  FREEZING_LAST  RELEASED  STOPPING
   a rank is lost    open         decide    decide    open         decide         stop      note
   a rank froze      open         decide    decide    open         decide
   a newcomer        ask (a)      decide    decide
   ranks are ready   take (d)
   a notice          open (b)     note      note
   a rank raised     stop         stop      stop      stop         stop           stop      note
   a rank returned   release (c)  stop (c)  stop (c)  stop (c)     stop (c)       note      note
   all finished      release
   silent, or late                fence                            fence
   pause ended                              give up
   last save ended                                    stop         stop
   grace ended                                                                              end
   cancelled         stop         stop      stop      stop         stop           stop      note

    open: end the generation for all its ranks; FREEZING, or FREEZING_LAST where it was the last.
    stop: note the cause and tell the ranks to stop; STOPPING. The run ends with the last of them.
    ask: whether the functions of all ranks could run again now, until they can. No generation is
         ended for a newcomer while a function is in its constructors, or registers nothing.
    (a) if functions can be run again as far as is known.
    (b) if the others are enough, and all ranks would survive it now.
    (c) in a run that continues: `_rank_returned` says why. In another one it is noted.
    (d) have the workers make a dry run, if all ranks can continue where they are (arrivals.py);
    else open.

A loss stops the run at once where it is one too many and nothing can be saved, or where no rank is
left. What *decide* does depends on what the reports of the round add up to (situation.py):

    situation        FREEZING  PAUSED    FREEZING_LAST
    INCOMPLETE       wait      wait      wait
    HOPELESS         give up   give up   stop
    TOO_FEW          pause     wait      stop
    READY            form      form      stop

    form: the next generation, RUNNING. pause: PAUSED. give up: form the last generation,
    SAVING_LAST, if the ranks can save what they have, else stop.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from chorusline.collectives.contract.endpoint import Endpoint
from chorusline.collectives.contract.errors import CollectiveError, CollectiveTimeout, GroupAborted

from ..messages import messages, whereabouts
from ..messages.messages import Cancellation, Failure, Loss, MemberState
from ..messages.run_status import NOT_WHOLE, Gone
from ..ray_calls.calls import ENDED
from . import events, instructions, last_generation
from .arrivals import DryRun, DryRuns
from .events import Event
from .instructions import Instruction
from .regeneration import Regeneration
from .run_state import (
    Inquiry,
    Member,
    Phase,
    RunState,
    assign,
    failed_run,
    failure_of,
    in_rank_order,
    is_echo,
    stop_error,
)
from .situation import Plan, Situation, assess, idle_in, newcomers_of
from .takeover import found_in


class Membership:
    """The members of the session, their generation, and the state of the run in progress."""

    def __init__(self) -> None:
        self._members: dict[int, Member] = {}  # by seat
        self._generation = -1
        self._formed: tuple[str, ...] = ()  # worker ids by rank, while the generation is healthy
        self._run: RunState | None = None  # None: between two runs
        self._arrivals = DryRuns()  # of the run

    def snapshot(self, incarnation: int) -> messages.DriverSnapshot:
        return messages.DriverSnapshot(
            incarnation,
            self._generation,
            self._run.request.run if self._run else None,
            tuple((member.info, member.state) for _, member in sorted(self._members.items())),
        )

    @property
    def missing(self) -> int:
        """Workers that a paused run waits for; 0 if no run is paused."""
        run = self._run
        return run.missing if run is not None and run.phase is Phase.PAUSED else 0

    @property
    def lost(self) -> list[str]:
        """Ids of the workers that the run in progress has lost."""
        return [loss.worker.worker_id for loss in self._run.losses] if self._run else []

    def dry_run_of(self, worker_id: str) -> DryRun | None:
        """The present attempt of a worker to come in; None if it is in none."""
        return self._arrivals.by_id.get(worker_id)

    def without_rank(self, who: str) -> list[str]:
        """Ids of the idle workers without a rank in the run in progress, if they are the worker
        `who`, or are on the node `who`."""
        idle = [] if self._run is None else idle_in(self._run, self._members.values())
        return [one.info.worker_id for one in idle if who in (one.info.worker_id, one.info.node_id)]

    def handle(self, event: Event) -> list[Instruction]:
        run = self._run
        match event:
            case events.RunStarted():
                return self._start(event)
            case events.RunTakenOver():
                return self._take_over(event)
            case events.SeatEmptied(seat):
                # Its group had this rank too, so that the next run needs another one.
                if self._members.pop(seat, None) is not None:
                    self._formed = ()
                return []
            case events.WorkerRegistered(worker, generation):
                # Between two runs it is only noted: a run begins with all that are ready.
                is_new = self._register(worker, generation)
                return self._newcomer(run) if run is not None and is_new else []
            case events.WorkerDied(worker_id, detail):
                # Between two runs too: the next run must not count on it, nor on the group that had
                # it.
                self._note_death(worker_id)
                return self._worker_died(run, worker_id, detail) if run is not None else []
        if run is None:
            return []  # It is about a run that is over.
        match event:
            case events.RankEnded(ending, worker_id):
                # These say which worker or which run they mean, so they count in every generation.
                # A rank that was slow to end, for example, ends after the others have formed the
                # next one.
                return self._rank_ended(run, ending, worker_id)
            case events.DryRunReady():
                return self._arrivals.ready(event, run.members, self._generation)
            case events.DryRunEnded(worker_id, _, is_final, counts):
                return self._dry_run_ended(run, worker_id, is_final=is_final, counts=counts)
            case events.Leaving():
                return self._leaving(run, event)
            case events.RanksAnswered(answers):
                return self._ranks_answered(run, answers)
            case events.RunCancelled(reason):
                return self._stop(run, Cancellation(reason))
            case events.GraceEnded(is_for_ranks):
                self._arrivals.abandon()
                # The grace of dry runs alone began when the run was released: ranks that were told
                # to stop since then have a grace of their own.
                is_over = is_for_ranks and run.phase is Phase.STOPPING
                return self._end(run) if is_over else self._end_if_over(run)
        if event.generation != self._generation:
            return []  # It was sent when the sender did not know of the present generation.
        return self._in_generation(run, event)

    def _in_generation(self, run: RunState, event: events.GenerationEvent) -> list[Instruction]:
        match event:
            case events.RankFroze(frozen):
                return self._rank_froze(run, frozen)
            case events.RankFinished(rank):
                return self._rank_finished(run, rank)
            case events.RankSilent(worker_id):
                # It may live on, and write: it is ended, and its death is what counts as the loss.
                return self._fence(run, [worker_id], "its control loop does not answer")
            case events.PatienceEnded():
                # No rank waits for another one: all of them compute, in an evaluation for example.
                # Patience begins again with the first that comes to a collective.
                if not run.round.frozen:
                    run.round.is_patience_over = True
                    return []
                late = [run.members[rank].info.worker_id for rank in run.round.unfrozen]
                return self._fence(run, late, "its function did not stop in time")
            case events.RanksReady(_, can_admit):
                return self._ranks_ready(run, can_admit)
            case events.Declined(_, number, why, is_final):
                return self._arrivals.declined(number, why, is_final=is_final)
            case events.PauseEnded():
                if run.phase is not Phase.PAUSED:
                    return []  # Enough workers came, or the run ends.
                few = f"no new workers started, and fewer than {run.request.fewest} are left"
                return self._give_up(run, few)
            case events.LastSaveEnded():
                # The run is being stopped already.
                if run.phase not in (Phase.SAVING_LAST, Phase.FREEZING_LAST):
                    return []
                return self._end_given_up(run, "the state of the ranks was not saved in time")

    # ── Who is there ──────────────────────────────────────────────────────────────────────────────

    def _register(self, worker: messages.WorkerInfo, generation: int) -> bool:
        """Whether the worker is idle and new to the run in progress."""
        known = self._members.get(worker.seat)
        is_busy = known and known.state in (MemberState.RUNNING, MemberState.DRY_RUN)
        # One that has left a run which is over is as idle as it says.
        if self._run is not None and known and known.info == worker and is_busy:
            return False  # It was asked twice, and has a rank, or a dry run, meanwhile.
        self._members[worker.seat] = Member(worker, MemberState.READY)
        # Another driver has formed it. Numbers only grow: a worker takes a group of the same number
        # for the one that it is to meet in.
        if generation > self._generation:
            self._generation = generation
            self._formed = ()
        return True

    def _note_death(self, worker_id: str) -> None:
        for member in self._members.values():
            # Of a death that a rank has reported, Ray's word comes when the next group is formed.
            if member.info.worker_id == worker_id and member.state is not MemberState.LOST:
                member.state = MemberState.LOST
                self._formed = ()

    # ── How a run begins ─────────────────────────────────────────────────────────────────────────

    def _start(self, started: events.RunStarted) -> list[Instruction]:
        request = started.request
        if self._run is not None:
            raise RuntimeError(f"run {self._run.request.run} is still in progress")
        ready = [m for m in self._members.values() if m.state is MemberState.READY]
        unready = [m for m in self._members.values() if m.state is not MemberState.READY]
        # A seat may stay empty whose node is gone, as long as there are enough of the others.
        if len(ready) < request.fewest or any(m.state is not MemberState.LOST for m in unready):
            why = "; ".join(f"{member.info} is {member.state.value}" for member in unready)
            raise RuntimeError(
                f"run {request.run} cannot start: {why or 'no worker has registered'}"
            )
        self._members = {member.info.seat: member for member in ready}
        # A replica has all its ranks; a worker too many waits as a newcomer would.
        num_ranks = len(ready) - len(ready) % request.replica_size
        members = tuple(in_rank_order(ready)[:num_ranks])
        order = tuple(member.info.worker_id for member in members)
        # The same workers in the same order still have their group, and begin without a rendezvous.
        if order != self._formed:
            self._generation += 1
            self._formed = order
        self._arrivals = DryRuns()
        self._run = RunState(request, members, running=set(range(len(members))))
        for member in members:
            member.state = MemberState.RUNNING
        return [
            instructions.StartRank(worker_id, assignment)
            for worker_id, assignment in zip(order, assign(members, self._generation), strict=True)
        ]

    def _take_over(self, taken: events.RunTakenOver) -> list[Instruction]:
        """Continue from what the workers report; a rank that none of them has is lost."""
        found = found_in(taken.places, self._members)
        for rank in found.by_rank:
            found.members[rank].state = MemberState.RUNNING
        self._generation = found.generation
        self._formed = tuple(member.info.worker_id for member in found.members)
        self._arrivals = DryRuns()
        # Before any loss is acted on, all lost ranks are left out.
        run = self._run = RunState(taken.request, found.members, running=set(found.by_rank))
        todo: list[Instruction] = [
            instructions.AttachRank(found.members[rank].info.worker_id)
            for rank in sorted(found.by_rank)
        ]
        # It may still be in its function, and gets a rank again when it has ended that.
        for place in found.without_rank:
            self._members[place.info.seat].state = MemberState.STUCK
            worker_id, generation = place.info.worker_id, place.assignment.generation
            rests = GroupAborted(generation, [], f"{place.info} has no rank now")
            todo += [instructions.AttachRank(worker_id), instructions.RestRank(worker_id, rests)]
        # The previous driver died while it told the ranks of a generation: the late ones were
        # not told.
        if found.resumption is not None:
            run.num_lost_before = found.resumption.num_lost
            assignments = assign(found.members, found.generation)
            todo += [
                instructions.ResumeRank(
                    found.members[rank].info.worker_id,
                    replace(found.resumption, assignment=assignments[rank]),
                )
                for rank in found.late
            ]
            if found.resumption.gives_up is not None:
                run.gives_up, run.phase = found.resumption.gives_up, Phase.SAVING_LAST
                todo.append(instructions.StartLastSave(found.generation))
        for rank in found.lost:
            gone = found.members[rank].info
            if found.resumption is None or found.resumption.former_ranks[rank] >= 0:
                todo += self._lose(run, Loss(rank, gone, "it died with the driver"))
                continue
            # A worker that was to come, and was not called. It has nothing of the run, and comes
            # with the next generation.
            not_called = GroupAborted(found.generation, [], f"rank {rank} was not called")
            todo += self._open_round(run, not_called)
            run.round.died(rank)
        # A worker may have been registered before the ranks had answered this driver.
        return [*todo, *self._ask(run)]

    # ── How a rank ends ──────────────────────────────────────────────────────────────────────────

    def _rank_ended(
        self, run: RunState, ending: messages.Success | Failure, worker_id: str
    ) -> list[Instruction]:
        if worker_id in self._arrivals.by_id:
            # It has had no rank yet. An error of the function itself would come in every other dry
            # run.
            is_final = isinstance(ending, Failure)
            return self._dry_run_ended(run, worker_id, is_final=is_final)
        # It rests, and has ended what it did as a rank: from here on it can be one again.
        for member in self._members.values():
            if member.info.worker_id == worker_id and member.state is MemberState.STUCK:
                member.state = MemberState.READY
                return self._newcomer(run)
        # Counted already, as lost or as ended.
        if ending.rank not in run.running:
            return []
        if worker_id and run.members[ending.rank].info.worker_id != worker_id:
            return []  # It has had that rank in an earlier generation.
        run.running.discard(ending.rank)
        run.members[ending.rank].state = MemberState.READY
        if isinstance(ending, Failure):
            # One rank proves it for all: it had not come to the barrier after which they begin
            # (Worker.run).
            run.nobody_began = run.nobody_began or ending.nobody_began
            return self._stop(run, ending)
        # A run that ends with a loss simply collects results; in one that continues a rank has to
        # be released first.
        run.returned[ending.rank] = ending
        todo = self._rank_returned(run) if run.request.survives_loss else []
        if self._run is None:
            return todo  # `_rank_returned` has ended the run.
        return [*todo, *self._end_if_over(run)]

    def _rank_returned(self, run: RunState) -> list[Instruction]:
        """A rank has ended with its result, in a run that continues: a rank does that only when it
        was released, so the function has returned on all ranks. A driver that has taken the run
        over may hear of it by this result only."""
        match run.phase:
            case Phase.RUNNING:
                # The previous driver died while it released the ranks.
                return self._release(run)
            case Phase.RELEASED | Phase.STOPPING:
                return []
        # A round is open in a generation that was released. The ranks that have ended can take no
        # part in it, and what was lost is the result of a rank.
        if run.losses:
            loss = run.losses[-1]
            returned = "the function had returned on all ranks, and the result of this one is lost"
            return self._stop(run, replace(loss, detail=f"{loss.detail}; {returned}"))
        unknown = "the function had returned on all ranks, and a new driver ended their generation"
        return self._stop(run, Cancellation(unknown))

    def _worker_died(self, run: RunState, worker_id: str, detail: str) -> list[Instruction]:
        if worker_id in self._arrivals.by_id:
            return self._dry_run_ended(run, worker_id, is_dead=True)
        for rank in sorted(run.running):
            if run.members[rank].info.worker_id == worker_id:
                run.running.discard(rank)
                # Of a kill by the driver Ray reports only that the process is gone.
                if (why := run.fenced.get(worker_id)) is not None:
                    detail = f"the driver ended its process, because {why}"
                return self._lose(run, Loss(rank, run.members[rank].info, detail))
        for number, loss in enumerate(run.losses):
            if loss.worker.worker_id == worker_id and loss.detail == ENDED:
                run.losses[number] = replace(loss, detail=detail)
                return [
                    instructions.ExplainLoss(
                        run.members[rank].info.worker_id, loss.worker.pid, detail
                    )
                    for rank in sorted(run.running)
                ]
        return []

    def _rank_finished(self, run: RunState, rank: int) -> list[Instruction]:
        run.finished.add(rank)
        # Asked after each report, of thousands perhaps: so they are counted, not compared.
        if run.phase is not Phase.RUNNING or len(run.finished) < len(run.running):
            return []
        return self._release(run)

    def _release(self, run: RunState) -> list[Instruction]:
        run.phase = Phase.RELEASED
        releases = [
            instructions.ReleaseRank(run.members[rank].info.worker_id)
            for rank in sorted(run.running)
        ]
        return [*releases, *self._call_off()]

    # ── Rule 3: a run continues ───────────────────────────────────────────────────────────────────

    def _lose(self, run: RunState, loss: Loss) -> list[Instruction]:
        """A rank that ran is lost, and is not in `run.running` any more."""
        # Released ranks are on their way out of the run, and the function may not run once more.
        if run.phase is Phase.RELEASED:
            returned = "the function had returned on all ranks, and the result of this one is lost"
            loss = replace(loss, detail=f"{loss.detail}; {returned}")
        # A reader who has allowed losses would ask why this one ended the run.
        elif run.request.survives_loss and not run.running and run.cause is None:
            loss = replace(loss, detail=f"{loss.detail}; no other rank was left to continue")
        run.losses.append(loss)
        # Released ranks take their results along, and nothing could be formed of no rank.
        if run.phase in (Phase.RELEASED, Phase.STOPPING) or not run.running:
            return self._stop(run, loss)
        # A run that is saved first is given up when all are frozen.
        is_saved = run.request.survives_loss and run.request.last_save_s is not None
        if run.has_lost_too_many and not is_saved:
            return self._stop(run, loss)
        todo = self._open_round(run, stop_error(loss, self._generation))
        run.round.died(loss.rank)
        return [*todo, *self._decide(run)]

    def _rank_froze(self, run: RunState, frozen: messages.Frozen) -> list[Instruction]:
        # The report of a rank that froze while the others were released, or told to stop: it hears
        # the same.
        if run.phase in (Phase.RELEASED, Phase.STOPPING):
            return []
        todo = self._open_round(run, frozen.error, but=frozen.rank)
        if run.phase.has_open_round and run.round.is_patience_over:
            run.round.is_patience_over = False
            todo.append(instructions.StartPatience(self._generation))
        # Ray reports these deaths later, when the connections of the processes are closed. A loss
        # that ends the run waits for that, since Ray's reason is its error. Nothing is decided
        # before the report counts, so that no generation is formed between two losses.
        for rank in frozen.ended if frozen.rank in run.round.unfrozen else ():
            if rank in run.running and run.may_lose_one:
                worker_id = run.members[rank].info.worker_id
                self._note_death(worker_id)
                todo += self._worker_died(run, worker_id, ENDED)
        run.round.froze(frozen)
        return [*todo, *self._decide(run)]

    def _newcomer(self, run: RunState) -> list[Instruction]:
        """A worker waits that has no rank."""
        if run.phase in (Phase.FREEZING, Phase.PAUSED):
            return self._decide(run)  # It may be the one that the run waits for.
        # No generation is ended for a newcomer before its ranks could continue (Readiness).
        return self._ask(run)

    def _ranks_ready(self, run: RunState, can_admit: bool) -> list[Instruction]:
        """Newcomers wait, and the functions can run again with them, or continue and take them
        in."""
        run.asked_in = -1  # Those that come from now on wait for another answer.
        come = newcomers_of(run, self._members.values())
        # Since they were asked a rank may have been lost, or the workers that came.
        are_enough = len(come) >= run.request.replica_size
        if run.phase is not Phase.RUNNING or self._arrivals.by_id or not are_enough:
            return []
        if can_admit and self._arrivals.are_possible:
            return self._arrivals.begin(run.members, come, self._generation)
        who = "; ".join(str(member.info) for member in come)
        return self._open_round(run, GroupAborted(self._generation, [], f"{who} has come"))

    def _dry_run_ended(
        self,
        run: RunState,
        worker_id: str,
        *,
        is_dead: bool = False,
        is_final: bool = False,
        counts: bool = True,
    ) -> list[Instruction]:
        """A worker that was to come is not in its dry run any more."""
        if worker_id not in self._arrivals.by_id:
            return []
        todo = self._arrivals.ended(worker_id, is_dead=is_dead, is_final=is_final, counts=counts)
        if run.phase in (Phase.RELEASED, Phase.STOPPING):
            return [*todo, *self._end_if_over(run)]
        return [*todo, *self._newcomer(run)]

    def _leaving(self, run: RunState, notice: events.Leaving) -> list[Instruction]:
        # A run that no loss may meet keeps its ranks until their nodes go; one that ends is soon
        # over.
        continues = run.phase in (Phase.RUNNING, Phase.FREEZING, Phase.PAUSED)
        if not run.request.survives_loss or not continues:
            return []
        run.departures.note(notice.who, notice.why, notice.num_ready)
        # A worker that is to leave does not come any more, nor do those that were to come with it.
        comes = [one.member.info for one in self._arrivals.by_id.values()]
        if any(run.departures.why(one) is not None for one in comes):
            return self._arrivals.call_off(notice.why)
        infos = [member.info for member in run.members]
        # In an open round the note counts when the round is decided. A round that is opened must
        # not cost the run, so a rank that could not continue now keeps the leavers until it can.
        if run.phase is not Phase.RUNNING or not notice.can_end:
            return []
        # Too few would be left, a hand-over is under way, or it was tried often enough.
        num_required = run.departures.num_required(infos, run.request)
        if not run.departures.is_due(notice.who, infos, num_required):
            return []
        leave = GroupAborted(self._generation, [], f"ranks leave: {notice.why}")
        return self._open_round(run, leave)

    def _open_round(
        self, run: RunState, error: CollectiveError, but: int = -1
    ) -> list[Instruction]:
        """End the generation for all its ranks, if no round is open. but: a rank that has frozen
        itself."""
        match run.phase:
            case Phase.RUNNING:
                run.phase = Phase.FREEZING
            case Phase.SAVING_LAST:
                run.phase = Phase.FREEZING_LAST
            # A round is open already, or the run ends.
            case _:
                return []
        run.round = Regeneration(self._generation, range(len(run.members)))
        freezes = _freezes(run, self._generation, error, but)
        return [*freezes, instructions.StartPatience(self._generation)]

    def _fence(self, run: RunState, worker_ids: Iterable[str], why: str) -> list[Instruction]:
        """Kill those of the workers that the open round still waits for."""
        if not run.phase.has_open_round:
            return []
        # One that has frozen in the meantime answers after all; its report counts, and its shard.
        unfrozen = {run.members[rank].info.worker_id for rank in run.round.unfrozen}
        fenced = [worker_id for worker_id in worker_ids if worker_id in unfrozen]
        run.fenced |= {worker_id: _missed(run, worker_id) + why for worker_id in fenced}
        return [instructions.Fence(worker_id) for worker_id in fenced]

    def _decide(self, run: RunState) -> list[Instruction]:
        """What follows from the open round: the second table above."""
        outlook = assess(run, self._members.values(), self._arrivals)
        match run.phase, outlook.situation:
            case _, Situation.INCOMPLETE:
                # A rank that has not frozen may have seen a ballot that counts for all.
                return []
            case Phase.FREEZING_LAST, _:
                # Whatever the reports say: there is no generation after the last.
                return self._end_given_up(run, last_generation.epilogue(run.round.frozen))
            case _, Situation.HOPELESS:
                return self._give_up(run, outlook.why)
            case Phase.PAUSED, Situation.TOO_FEW:
                # One more was lost, or too few came: the deadline of the pause stays as it is.
                run.missing = outlook.missing
                return []
            case _, Situation.TOO_FEW:
                run.phase, run.missing = Phase.PAUSED, outlook.missing
                called_off = self._arrivals.call_off("all functions run again with it")
                return [instructions.StartPause(self._generation), *called_off]
        assert outlook.plan is not None
        return self._form(run, outlook.plan)

    def _form(self, run: RunState, plan: Plan) -> list[Instruction]:
        """Begin the next generation."""
        dismissed = _dismissals(run, plan, self._generation)
        without = _gone(run, plan)
        entered = max(report.entered for report in run.round.frozen.values())
        run.departures.hand_over(plan.members[rank].info.worker_id for rank in plan.leaving)
        run.phase = Phase.RUNNING if run.gives_up is None else Phase.SAVING_LAST
        run.members = plan.members
        run.running = set(range(len(plan.members)))
        # A rank whose function had returned waits in its lifeline, and reports again in this one.
        run.finished.clear()
        run.takes_newcomers = run.takes_newcomers and plan.takes_newcomers
        run.num_without_progress, run.achieved = plan.num_without_progress, plan.achieved
        # A number of its own even if nobody was lost: reports of the ended one must not count in
        # it.
        self._generation += 1
        self._formed = tuple(member.info.worker_id for member in plan.members)
        for member in plan.members:
            member.state = MemberState.RUNNING
        # READY when they have ended what they did (`_rank_ended`).
        for member in (*plan.resting, *plan.dismissed):
            member.state = MemberState.STUCK
        endpoints = self._endpoints(run, plan)
        beginnings = _beginnings(run, plan, self._generation, entered, without, endpoints)
        arrived = self._arrivals.formed(plan.members, restarts=plan.restarts)
        return [*dismissed, *beginnings, *arrived, *self._ask(run)]

    def _endpoints(self, run: RunState, plan: Plan) -> tuple[Endpoint, ...]:
        """Of the ranks of the next generation, by rank; empty if one has none, or they are not all
        on one host, or there is no room for all of them in the memory of the first."""
        frozen, comes = run.round.frozen, self._arrivals.by_id
        reports = [
            frozen[before] if before >= 0 else comes.get(member.info.worker_id)
            for member, before in zip(plan.members, plan.former, strict=True)
        ]
        endpoints = tuple(one.endpoint for one in reports if one and one.endpoint)
        are_here = len({endpoint.host for endpoint in endpoints}) == 1
        if len(endpoints) < len(reports) or not are_here or endpoints[0].size < len(reports):
            return ()
        return endpoints

    def _ask(self, run: RunState) -> list[Instruction]:
        """If workers wait, ask the ranks whether they could be admitted."""
        request = run.request
        may_come = run.phase is Phase.RUNNING and request.survives_loss and run.takes_newcomers
        if not may_come or len(newcomers_of(run, self._members.values())) < request.replica_size:
            return []  # They wait for the next run, or for more: all replicas here are whole.
        if self._arrivals.by_id:
            return []  # Others come, and these afterwards.
        if run.asked_in == self._generation:
            return []  # Another newcomer waits for the same answer.
        run.asked_in = self._generation
        return [instructions.AwaitReadiness(run.worker_ids, self._generation)]

    def _call_off(self) -> list[Instruction]:
        """The run ends: so do the dry runs."""
        called_off = self._arrivals.call_off("the run ends")
        return [*called_off, instructions.StartGrace(is_for_ranks=False)] if called_off else []

    def _give_up(self, run: RunState, why: str) -> list[Instruction]:
        """The run cannot continue: it ends with the last loss, or with the error of a rank. All
        ranks that live are frozen; they save what they have first, if they can."""
        cause: Loss | Failure = failure_of(next(iter(run.round.frozen.values())), why)
        if run.losses:
            last = run.losses[-1]
            cause = Loss(last.rank, last.worker, f"{last.detail} ({why})")
        plan = last_generation.plan_of(run)
        if plan is None:
            return self._stop(run, cause)
        run.gives_up = cause
        return [*self._form(run, plan), instructions.StartLastSave(self._generation)]

    def _end_given_up(self, run: RunState, epilogue: str) -> list[Instruction]:
        """The last generation is over, one way or the other."""
        assert run.gives_up is not None
        run.epilogue = epilogue
        return self._stop(run, last_generation.with_epilogue(run.gives_up, epilogue))

    # ── Rule 2: how a run ends ───────────────────────────────────────────────────────────────────

    def _stop(self, run: RunState, cause: Failure | Loss | Cancellation) -> list[Instruction]:
        """Note what has happened; the first time, tell all ranks that still run to stop."""
        # Such an error says that the group was ended, and the loss is why.
        if is_echo(cause) and run.losses:
            cause = run.losses[-1]
        # The first cause stays, except that an echo may arrive before what it is the echo of.
        if run.cause is None or (is_echo(run.cause) and not is_echo(cause)):
            run.cause = cause
        self._formed = ()
        ask: list[Instruction] = []
        if isinstance(cause, Failure) and cause.asks_all and run.inquiry is Inquiry.NOT_MADE:
            run.inquiry = Inquiry.OPEN
            ask.append(instructions.AskRanks(run.worker_ids))
        # Told once: a second order would interrupt a function that is ending by the first.
        was_stopping, run.phase = run.phase is Phase.STOPPING, Phase.STOPPING
        if not run.running:
            return [*ask, *self._call_off(), *self._end_if_over(run)]
        if was_stopping:
            return ask
        error = stop_error(cause, self._generation)
        aborts = [
            instructions.AbortRank(run.members[rank].info.worker_id, error)
            for rank in sorted(run.running)
        ]
        called_off = self._arrivals.call_off("the run ends")
        return [*ask, *aborts, *called_off, instructions.StartGrace()]

    def _ranks_answered(
        self, run: RunState, answers: Mapping[int, whereabouts.Whereabouts | str]
    ) -> list[Instruction]:
        if run.inquiry is not Inquiry.OPEN:
            return []
        run.inquiry = Inquiry.ANSWERED
        late = run.cause.culprits if isinstance(run.cause, Failure) else ()
        run.story = whereabouts.describe(answers, late)
        return self._end_if_over(run)

    def _end_if_over(self, run: RunState) -> list[Instruction]:
        is_over = not (run.running or run.inquiry is Inquiry.OPEN or self._arrivals.by_id)
        return self._end(run) if is_over else []

    def _end(self, run: RunState) -> list[Instruction]:
        self._run = None
        if run.cause is None:
            endings = [run.returned[rank] for rank in range(len(run.members))]
            # All ranks issue the same collectives, unless one returned before the others had.
            is_uneven = len({ending.collectives for ending in endings}) > 1
            if is_uneven or any(ending.is_group_over for ending in endings):
                self._formed = ()  # Some rank's operation waits for peers that have left.
            results = tuple(ending.result for ending in endings)
            are_idle = all(one.state is MemberState.READY for one in self._members.values())
            succeeded = messages.RunSucceeded(self._generation, results, are_idle)
            return [instructions.EndRun(succeeded)]
        # They did not stop within the grace: the session kills them before the next run
        # (WorkerGroup).
        for rank in run.running:
            run.members[rank].state = MemberState.STUCK
        return [instructions.EndRun(failed_run(run, self._generation))]


# ── What each rank is told when a generation ends, and when the next one begins ───────────────────


def _freezes(
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


def _missed(run: RunState, worker_id: str) -> str:
    """Which operation a worker has not come to, as a rank that waited for it there has said; empty
    if none did."""
    late = [rank for rank, one in enumerate(run.members) if one.info.worker_id == worker_id]
    for frozen in run.round.frozen.values():
        error = frozen.error
        if isinstance(error, CollectiveTimeout) and not set(late).isdisjoint(error.ranks):
            return f"it did not come to {error.operation} within {error.timeout_s:g} s, and "
    return ""


def _dismissals(
    run: RunState, plan: Plan, generation: int
) -> list[instructions.DismissRank | instructions.RestRank]:
    """To the ranks of a generation that leave, whose notices say why, or rest."""
    dismissed: list[instructions.DismissRank | instructions.RestRank] = []
    for member in plan.resting:
        rests = GroupAborted(generation, [], f"{member.info} has no rank now: {NOT_WHOLE}")
        dismissed.append(instructions.RestRank(member.info.worker_id, rests))
    for member in plan.dismissed:
        why = run.departures.why(member.info)
        left = GroupAborted(generation, [], f"{member.info} has left: {why}")
        dismissed.append(instructions.DismissRank(member.info.worker_id, left))
    return dismissed


def _gone(run: RunState, plan: Plan) -> tuple[Gone, ...]:
    """The ranks of a generation that are not in the next one, and why."""
    deaths = {loss.worker.worker_id: loss.detail for loss in run.losses}
    deaths |= {member.info.worker_id: NOT_WHOLE for member in plan.resting}
    return tuple(
        Gone(
            rank,
            member.info.pid,
            deaths.get(member.info.worker_id) or run.departures.why(member.info) or "",
        )
        for rank, member in enumerate(run.members)
        if rank not in plan.former
    )


def _beginnings(
    run: RunState,
    plan: Plan,
    generation: int,
    entered: int,
    without: tuple[Gone, ...],
    endpoints: tuple[Endpoint, ...],
) -> Sequence[instructions.StartRank | instructions.ResumeRank]:
    """How the ranks of the next generation begin: those that were there continue, as do newcomers
    that have made a dry run; others start. without: as of `_gone`."""
    pairs = zip(plan.members, plan.former, strict=True)
    pids = tuple(member.info.pid for member, before in pairs if before < 0)
    former = messages.FormerRanks.of(plan.former)
    beginnings: list[instructions.StartRank | instructions.ResumeRank] = []
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
            run.gives_up,
            without,
            pids,
            run.num_lost,
            endpoints,
        )
        # In place a worker that comes has made its dry run: its function runs, and is resumed.
        if before >= 0 or not plan.restarts:
            beginnings.append(instructions.ResumeRank(worker_id, resumption))
        else:
            beginnings.append(instructions.StartRank(worker_id, assignment, resumption))
    return beginnings
