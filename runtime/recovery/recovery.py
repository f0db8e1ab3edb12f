"""Recovery: how a rank's objects get from one generation into the next, after a rank is lost.

If a generation ends during a step of a `ZeroRedundancyOptimizer`, the step calls `recover`, which
returns in the next generation, and the step continues. No user code runs meanwhile.

    (a) Freeze, report which ballots this rank has seen, and learn which ones count
        (actors/worker/lifeline.py). The state of the rank and its report are in rank_state.py.
    (b) to (g): catch up, meet, move, enter, gather, reduce again (in_place.py).

Not every function waits inside a step. All functions must run again from the top, in the next
generation and in the same processes, if one of them

- was left by an error of a collective that the user's code called,
- belongs to a newcomer that cannot come in between two steps (arrivals.py),
- is inside a Join that follows groups,
- or steps plain optimizers (plain_optimizer_steps.py).

Then the registered objects get their state back (from_the_top.py), and `ctx.epochs` and `ctx.shard`
continue there. If a sharded step counts, every rank that waits in it first finishes it, with
parameters from the other ranks (waiting_steps.py). Its function then continues to its next boundary
or collective, and is left there.
"""

from __future__ import annotations

import weakref

from chorusline.actors.errors import ends_a_generation
from chorusline.actors.fault_plan import Instant
from chorusline.actors.messages.messages import NOWHERE, Resumption
from chorusline.actors.worker.lifeline import Lifeline
from chorusline.collectives.contract.errors import GroupAborted, GroupClosed, name_ranks
from chorusline.collectives.group import Group
from chorusline.collectives.objects.blocking import all_gather_row

from ..data_parallel.distributed_data_parallel import ModelEngine
from ..process.agreement import MAX_ITERATIONS, Agreement
from ..process.between_runs import between_runs
from ..process.registry import Registered
from ..process.step_boundary import boundary
from ..zero.zero_redundancy_optimizer import (
    OptimizerEngine,
    ZeroRedundancyOptimizer,
    optimizer_engine_of,
)
from .arrivals import Arrivals
from .from_the_top import FromTheTop
from .in_place import InPlace
from .live_objects import LiveObjects, RunningCall
from .plain_optimizer_steps import Cursors, rows_of
from .rank_state import RankState, Stage, Where
from .state_transfer import ReplayLog


class FunctionLeft(BaseException):
    """Unwinds the user's function, which runs again from the top. It is not an Exception, so that
    only the runtime catches it."""


class Recovery:
    """The recovery of one rank, for one run: the interface for models, the function's call and the
    program.

    in_place, from_the_top: the two ways into the next generation. The program calls `from_the_top`
        for the steps of a run that begins again.
    arrivals: how workers are admitted between two steps.
    """

    def __init__(self, lifeline: Lifeline) -> None:
        self._lifeline = lifeline
        self.faults = lifeline.faults
        self._objects = LiveObjects(self._plain_step_counts, self._vote, lifeline.replica_size)
        self._state = RankState(lifeline.generation)
        self._began_in = lifeline.generation
        self.can_resume_again = False
        """The function has begun from a checkpoint, and would find it again. As long as no step
        counts, it does that: not all of its objects may have their state yet."""
        self.in_place = InPlace(lifeline, self._state, self._objects)
        self.from_the_top = FromTheTop(lifeline, self._state, self._objects)
        self.arrivals = Arrivals(lifeline, self._objects, self._cross, self._be_admitted)
        lifeline.arrivals = self.arrivals
        lifeline.readiness = lambda for_departure: self._state.readiness(
            self._objects.facts(), admits=self.arrivals.admits, for_departure=for_departure
        )
        lifeline.missing = lambda: self._objects.facts().missing

    @property
    def num_recoveries(self) -> int:
        return self._state.num_recoveries

    @property
    def bytes_moved(self) -> int:
        return self._state.bytes_moved

    # -- objects that a function makes, and its steps ----------------------------------------------

    def attach(self, call: RunningCall) -> None:
        """The function begins to run, in this call."""
        self._objects.begin(call)
        self.can_resume_again = False
        self.in_place.begin()
        self.from_the_top.begin_call()

    def makes_model(self) -> None:
        self._objects.makes_model = True

    def watch_model(self, model: ModelEngine) -> None:
        self._objects.made_models.append(weakref.ref(model))

    def watch_optimizer(self, optimizer: OptimizerEngine) -> None:
        self._objects.made_optimizers.append(weakref.ref(optimizer))

    def watch_registered(self, entry: Registered) -> None:
        self._objects.plain.watch(entry)
        if isinstance(entry.object, ZeroRedundancyOptimizer):
            optimizer_engine_of(entry.object).note_registered()

    def restore(self, entry: Registered, group: Group) -> bool:
        """Load the state that an object has had in this run; whether there was any."""
        # In a dry run nothing of the others has come yet: it is noted what is to be filled.
        if self.arrivals.is_dry_run:
            return self.arrivals.restore(entry)
        return self.from_the_top.restore(entry, group)

    def note_flags(self) -> None:
        """Called between two batches."""
        self._objects.flags.note(self._objects.call.registry)

    @property
    def has_gone_on(self) -> bool:
        """Whether this is a later generation than the one in which the run began; equal on all
        ranks of a generation."""
        return self._lifeline.generation != self._began_in

    @property
    def counts_samples(self) -> bool:
        """Whether steps report their samples, so that a lost rank's samples can be dealt again.
        With optimizers that are not registered, a lost rank ends the run."""
        return bool(self._objects.optimizers()) or self._objects.plain.is_watching

    @property
    def has_failed_plainly(self) -> bool:
        """Whether a collective has failed in this function, and its steps are those of plain
        optimizers, which do not wait for the next generation. Where a rank only reads data, as when
        it has trained, none fails."""
        plain = self._objects.plain
        steps_plain = plain.has_begun or (plain.is_watching and not self._objects.optimizers())
        return steps_plain and self._objects.has_met_failure()

    def cursors(self) -> list[int]:
        return self._objects.call.dealer.cursors()

    def step_agreed(self, cursors: Cursors, *, counts: bool) -> None:
        dealer = self._objects.call.dealer
        if counts:
            # A sharded step has voted: what all have agreed on counts at once.
            dealer.record(cursors)
            self._step_counts()
        else:
            # Agreed is not taken: a scaler may skip the step, so the samples count when it has
            # returned.
            self._objects.plain.agreed(cursors, dealer.inside())

    def _vote(self) -> None:
        """At the beginning of a step of sharded parameters: agree on it with all ranks, which then
        have their shards of the gradient. Raises FunctionLeft if this is not known of all."""
        call, plain = self._objects.call, self._objects.plain
        cursors = self.cursors()
        row = [int(boundary().status.stop_is_wanted), *cursors]
        row += [0] * (MAX_ITERATIONS - len(cursors))
        try:
            rows = all_gather_row(call.group, row)
        except Exception as error:
            if not ends_a_generation(error):
                raise
            # The function is being left already, and has come to a step of its next beginning.
            self.pass_boundary()
            num_seen = plain.num_seen
            resumption = self._freeze(error, Where.OUTSIDE)
            self._objects.catch_up(resumption.progress)
            self._state.has_to_leave(resumption)
            if plain.num_seen == num_seen:
                raise FunctionLeft from None
        else:
            plain.voted(tuple(float(one) for row in rows for one in row), call.dealer.inside())
        stop, by_rank = rows_of(plain.votes[0].payload)
        everybody = tuple(range(len(by_rank)))
        agreement = Agreement(everybody, everybody, used=(), stop=stop, cursors=by_rank)
        boundary().step_agreed(agreement, call.group, ends_step=True)

    def has_stepped(self, optimizer: OptimizerEngine) -> None:
        self._objects.stepped_last = optimizer

    def has_taken_over(self) -> None:
        """This rank has joined, and now has the parameters of a rank that took the last step."""
        self._objects.plain.take_over()

    def _plain_step_counts(self, cursors: Cursors, iterations: list[int]) -> None:
        call = self._objects.call
        between_runs().end_applying()
        call.dealer.record(cursors, iterations, is_settled=False)
        self._step_counts()
        for model in self._objects.models().values():
            model.buffers.keep_agreed()
        self._objects.flags.step_counts(call.registry)
        call.count_step()

    def _step_counts(self) -> None:
        """A step counts: this rank's live objects replace the state that was kept for it."""
        self.arrivals.step_counts()
        # It takes as much memory as the live objects, and is of no use from here on.
        if self._state.has_kept:
            self.from_the_top.forget()
        self._state.step_counts()

    # -- when a generation has ended ---------------------------------------------------------------

    def finish(self) -> None:
        """The function has returned: take part in recoveries until it has on all ranks."""
        if self.arrivals.is_dry_run:
            self.arrivals.refuse("it returns before a step of ctx.steps")
        # A function that was to be left at its next boundary has come to its end instead.
        self.pass_boundary()
        # The others may still need this rank's shards, until the driver knows that all have
        # returned.
        while (error := self._lifeline.finish()) is not None:
            self.recover(error)

    def pass_boundary(self) -> None:
        """Called between two steps: raise FunctionLeft if the function has to run again."""
        if self._state.is_leaving:
            raise FunctionLeft

    def before_step(self) -> None:
        """Called between two steps: wait here if a rank is about to leave (Lifeline)."""
        self._lifeline.before_step()

    @property
    def can_begin_again(self) -> bool:
        """Whether the function would run again from the top if it were left now, as far as this
        rank knows."""
        return self._state.can_run_again(self._objects.facts(), self._where_left())

    def recover(self, error: BaseException, optimizer: OptimizerEngine | None = None) -> None:
        """Return in the next generation. Raises the error that ended the run, if it has ended.

        optimizer: the optimizer whose step waits. If functions run again and this step counts,
            `recover` returns when the parameters are complete; otherwise it raises FunctionLeft.
        """
        # The function is being left already: its next boundary is this error.
        self.pass_boundary()
        self.in_place.begin()
        where = Where.AT_END if optimizer is None else Where.IN_STEP
        self._continue(self._freeze(error, where), where, optimizer)

    def _cross(self, error: BaseException) -> None:
        """A worker is admitted between two steps: return in the next generation."""
        self.pass_boundary()
        self.in_place.begin()
        self._continue(self._freeze(error, Where.AT_BOUNDARY), Where.AT_BOUNDARY)

    def _be_admitted(self, resumption: Resumption) -> None:
        """After this worker's dry run: return in the first generation of which it is a rank."""
        self._state.waits_to_be_admitted(resumption.entered)
        self.in_place.begin()
        self._continue(resumption, Where.AT_BOUNDARY)

    def _continue(
        self, resumption: Resumption, where: Where, optimizer: OptimizerEngine | None = None
    ) -> None:
        while True:
            try:
                # First the ballot that only others have seen: the kept state must have that step.
                if resumption.restarts:
                    self._objects.catch_up(resumption.progress)
                    # Their senders may have entered the generation in which they came, and have
                    # dropped them.
                    self.from_the_top.keep_on_the_way(self.in_place.held)
                    if optimizer is not None and optimizer.step_counts:
                        # The loop's body after the step may read the parameters.
                        self.from_the_top.meet_waiting(optimizer)
                        self._state.has_to_leave(resumption)
                        return
                    self._state.has_to_leave(resumption)
                    raise FunctionLeft
                if not resumption.leaving:
                    self.in_place.resume(resumption, self.arrivals.steps)
                    self._lifeline.has_entered(
                        runs_again=False, dealt_again=self.in_place.dealt_again
                    )
                    self.faults.reach(Instant.RECOVERED)
                    return
                # A generation only for handing over: the leaving ranks are still in it, so none may
                # enter it.
                self.in_place.hand_over(resumption)
                leavers = name_ranks(resumption.leaving, "has", "have")
                reason = f"{leavers} handed over the optimizer state, to leave"
                error: BaseException = GroupAborted(resumption.assignment.generation, [], reason)
            except Exception as failure:
                # A further loss repeats all of it; what has been received is kept for the next
                # attempt.
                if not ends_a_generation(failure):
                    raise
                error = failure
            resumption = self._freeze(error, where)  # (a)

    def leave(self, error: BaseException) -> Resumption:
        """The function has been left: learn how the run continues, and keep its objects.

        If no rank has begun, `entered` of the result is NOWHERE, and the function begins afresh.

        Raises the error that ended the run, if it has ended; and `error` itself if that does not
        end a generation: then the function has failed.
        """
        is_left = isinstance(error, FunctionLeft) or ends_a_generation(error)
        resumption = self._state.take_restart()
        # The loop's body after a step that counts finds the group of that step closed.
        if resumption is None or not (is_left or isinstance(error, GroupClosed)):
            # The function's own error, which may be all that is known of a defect: it is not
            # replaced.
            if not is_left:
                raise error
            where = self._where_left()
            resumption = self._freeze(error, where)
            if where is Where.NOT_BEGUN:
                # No rank has begun, so nothing is resumed: it is the first call once more.
                if resumption.entered == NOWHERE:
                    self.forget()
                else:  # Other ranks have begun; this rank is a newcomer to them.
                    self.begin_as_newcomer()
                return resumption
            self._objects.catch_up(resumption.progress)
        self.from_the_top.retain()
        return resumption

    def _freeze(self, error: BaseException, where: Where) -> Resumption:
        frozen = self._lifeline.leave_generation(error)
        # No operation of the generation can complete from here on, so the facts stay valid.
        facts, admits = self._objects.facts(), self.arrivals.admits
        return self._lifeline.regenerate(self._state.report(frozen, facts, where, admits=admits))

    def _where_left(self) -> Where:
        is_fresh = self._state.stage is Stage.FRESH
        begins_again = self.can_resume_again or self._objects.are_being_made
        # Before any of its collectives has completed, no other rank can depend on what it has done.
        has_begun = not is_fresh or (self._objects.has_taken_part() and not begins_again)
        return Where.OUTSIDE if has_begun else Where.NOT_BEGUN

    # -- how a function begins ---------------------------------------------------------------------

    def forget(self) -> None:
        """The function begins afresh, because no rank has any state of it."""
        self._state.begins_afresh(self._lifeline.generation)
        self._began_in = self._lifeline.generation
        self.from_the_top.forget()
        self._objects.plain.continue_at(0)

    def begin_as_newcomer(self, replay_log: ReplayLog | None = None) -> None:
        """The function runs for the first time on this rank, and has run on others.

        replay_log: with which it runs by itself first."""
        self.arrivals.replay_log = replay_log
        self._state.is_new()
        self._began_in = -1
        self.from_the_top.forget()
