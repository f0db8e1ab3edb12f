"""A run that goes on: how a rank's objects get from one generation into the next.

A step of a `ZeroRedundancyOptimizer` that meets with the end of its generation calls `recover`,
which returns in the next generation, and the step goes on. Nothing of the user's runs meanwhile.

    (a) Freeze, say which ballots this rank has seen, and learn which count
        (actors/worker/lifeline.py). Where this rank stands then, and what it says, is in
        rank_state.py.
    (b) to (g): catch up, meet, move, enter, gather, reduce again (in_place.py).

Not every function waits inside a step. All functions have to run again from the top, in the next
generation and in the same processes, if one of them

- was left by an error of a collective of its own,
- belongs to a newcomer,
- is inside a Join that follows groups,
- or steps plain optimizers (plain_optimizer_steps.py).

What they register is brought to where it was (from_the_top.py), and `ctx.epochs` and `ctx.shard` go
on there. A sharded step that counts is ended first, on every rank that waits in it, with what the
others send (waiting_steps.py): then its function goes on to its next boundary or collective, and is
left there.
"""

from __future__ import annotations

from typing import Any

from actors.errors import ends_a_generation
from actors.messages import NOWHERE, Resumption
from actors.run_status import RunStatus
from actors.worker.lifeline import Lifeline
from collectives import CollectiveError, Group, GroupAborted, GroupClosed

from ..checkpoint.config import CheckpointConfig
from ..data_parallel.engine import ModelEngine
from ..process.registry import Registered
from ..zero.engine import OptimizerEngine
from .from_the_top import FromTheTop
from .in_place import InPlace
from .live_objects import LiveObjects, RunningCall
from .plain_optimizer_steps import Cursors
from .rank_state import RankState, Stage, Where


class FunctionLeft(BaseException):
    """Unwinds the user's function, which runs again from the top. Not an Exception: only the
    runtime catches it."""


class Recovery:
    """One rank's, for one run: what models, the function's call and the program ask of it."""

    def __init__(self, lifeline: Lifeline) -> None:
        self._lifeline = lifeline
        self._objects = LiveObjects(self._plain_step_counts)
        self._state = RankState(lifeline.generation)
        self.in_place = InPlace(lifeline, self._state, self._objects)
        self.from_the_top = FromTheTop(lifeline, self._state, self._objects)
        self.num_recoveries = 0

    @property
    def bytes_moved(self) -> int:
        """Sent by this rank because ranges of sharded state changed their owner, in all recoveries
        of the run so far, those from the top as well; parameters, as in (f), left out."""
        return self.in_place.bytes_moved + self.from_the_top.bytes_moved

    # -- what a function makes, and the steps that it takes ----------------------------------------

    def attach(self, call: RunningCall) -> None:
        """The function runs, in this call."""
        self._objects.begin(call)
        self.in_place.begin()
        self.from_the_top.begin_call()

    def watch_model(self, model: ModelEngine) -> None:
        self._objects.add_model(model)

    def watch_optimizer(self, optimizer: OptimizerEngine) -> None:
        self._objects.add_optimizer(optimizer)

    def watch_registered(self, entry: Registered) -> None:
        self._objects.plain.watch(entry)

    @property
    def counts_samples(self) -> bool:
        """Whether steps tell how many samples belong to them, so that what a lost rank had can be
        dealt again; with optimizers that are not registered the loss ends the run."""
        return bool(self._objects.optimizers()) or self._objects.plain.is_watching

    def cursors(self) -> list[int]:
        return self._objects.call.dealer.cursors()

    def record(self, cursors: Cursors) -> None:
        """A ballot was seen; the cursors of all ranks."""
        self._objects.call.dealer.record(cursors)
        self._step_counts()

    def has_stepped(self, optimizer: OptimizerEngine) -> None:
        self._objects.stepped_last = optimizer

    def agreed(self, cursors: Cursors) -> None:
        """A backward pass for a plain optimizer was reduced; the cursors of all ranks."""
        self._objects.plain.agreed(cursors, self._objects.call.dealer.inside())

    def has_taken_over(self) -> None:
        """This rank has joined, and has the parameters of a rank that has taken the last step."""
        self._objects.plain.take_over()

    def _plain_step_counts(self, cursors: Cursors, iterations: list[int]) -> None:
        call = self._objects.call
        call.dealer.record(cursors, iterations, is_settled=False)
        self._step_counts()
        for model in self._objects.models().values():
            model.buffers.keep_agreed()
        call.count_step()

    def _step_counts(self) -> None:
        """What this rank has is its own again."""
        if self._state.has_kept:
            self.from_the_top.forget()
        self._state.step_counts()

    # -- when a generation has ended ---------------------------------------------------------------

    def finish(self) -> None:
        """The function has returned here: wait until it has everywhere, and help until then."""
        self.pass_boundary()
        while (error := self._lifeline.finish()) is not None:
            self.recover(error)

    def pass_boundary(self) -> None:
        """Between two steps: leave the function here, if it has to run again."""
        if self._state.is_leaving:
            raise FunctionLeft

    @property
    def can_begin_again(self) -> bool:
        """Whether the function, left now, would be run again from the top, as far as this rank
        knows."""
        return self._state.can_run_again(self._objects.facts(), self._where_left())

    def recover(self, error: BaseException, optimizer: OptimizerEngine | None = None) -> None:
        """Return in the next generation. Raises what ended the run, if it does not go on.

        optimizer: whose step waits. Where functions run again it returns if the step counts, when
        its parameters are whole, and raises FunctionLeft if not.
        """
        self.pass_boundary()
        self.in_place.begin()
        where = Where.AT_END if optimizer is None else Where.IN_STEP
        while True:
            resumption = self._freeze(error, where)  # (a)
            try:
                if resumption.restarts:
                    self._objects.catch_up(resumption.progress)
                    self.from_the_top.keep_on_the_way(self.in_place.held)
                    if optimizer is not None and optimizer.step_counts:
                        # What the loop's body does behind the step needs its parameters.
                        self.from_the_top.meet_waiting(optimizer)
                        self._state.has_to_leave(resumption)
                        return
                    self._state.has_to_leave(resumption)
                    raise FunctionLeft
                if not resumption.leaving:
                    self.in_place.go_on(resumption)
                    self.num_recoveries += 1
                    return
                self.in_place.hand_over(resumption)
                told = f"ranks {list(resumption.leaving)} have handed over, and leave"
                error = GroupAborted(resumption.assignment.generation, [], told)
            except Exception as failure:
                if not ends_a_generation(failure):
                    raise
                error = failure

    def leave(self, error: BaseException) -> Resumption:
        """The function has been left: learn how it goes on, and keep what it has registered.

        Where no rank has begun, its `entered` is NOWHERE, and the function begins as at first.

        Raises what ended the run, if it does not go on; and `error` itself if it ends no
        generation: then the function has failed.
        """
        is_left = isinstance(error, FunctionLeft) or ends_a_generation(error)
        resumption = self._state.take_restart()
        # A body behind a step that counts finds the group of that step closed.
        if resumption is None or not (is_left or isinstance(error, GroupClosed)):
            if not is_left:
                raise error
            where = self._where_left()
            resumption = self._freeze(error, where)
            if where is Where.NOT_BEGUN:
                if resumption.entered == NOWHERE:
                    self.forget()
                else:  # Others have begun, and this rank is to them as if it had just come.
                    self.begin_as_newcomer()
                return resumption
            self._objects.catch_up(resumption.progress)
        self.from_the_top.retain()
        return resumption

    def _freeze(self, error: BaseException, where: Where) -> Resumption:
        frozen = self._lifeline.leave_generation(error)
        # Behind that nothing of the generation can complete here, so the facts stay.
        return self._lifeline.regenerate(self._state.report(frozen, self._objects.facts(), where))

    def _where_left(self) -> Where:
        has_begun = self._state.stage is not Stage.FRESH or self._objects.has_taken_part()
        return Where.OUTSIDE if has_begun else Where.NOT_BEGUN

    # -- how a function begins ---------------------------------------------------------------------

    def forget(self) -> None:
        """The function begins where no rank has anything any more."""
        self._state.begins_afresh(self._lifeline.generation)
        self.from_the_top.forget()
        self._objects.plain.go_on_at(0)

    def begin_as_newcomer(self) -> None:
        """The function runs for the first time here, and has run elsewhere."""
        self._state.is_new()
        self.from_the_top.forget()

    def connect(self) -> Group:
        """The group of the generation that the function is to run in."""
        return self.from_the_top.connect()

    def meet(self, group: Group) -> None:
        """Before anything else in a generation in which functions run again."""
        self.from_the_top.meet(group)

    def begin_again(self, group: Group, steps: RunStatus) -> list[dict[str, Any]]:
        """Meet the others before the function runs again. Returns where the ranks were in their
        data, the leader first. steps: this rank's."""
        told = self.from_the_top.begin_again(group, steps)
        self.num_recoveries += 1
        return told

    def restore(self, entry: Registered, group: Group) -> bool:
        """Bring a registered object to where it was. Returns False if there is no such place."""
        return self.from_the_top.restore(entry, group)

    def save_last(self, group: Group, config: CheckpointConfig) -> CollectiveError:
        """The run is given up: save what is kept. Returns the error to freeze with."""
        return self.from_the_top.save_last(group, config)
