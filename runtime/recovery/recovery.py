"""A run that goes on: how a rank's objects get from one generation into the next.

A step of a `ZeroRedundancyOptimizer` that meets with the end of its generation calls `recover`,
which returns in the next generation, and the step goes on. Nothing of the user's runs meanwhile.

    (a) Freeze, say which ballots this rank has seen, and learn which count
        (actors/worker/lifeline.py).
    (b) Catch up: apply a step that others have seen and this rank has not. That needs no peer,
        since nobody votes before all gradients are reduced and with their replicas.
    (c) Meet the others in the new generation, and tell them what this rank holds.
    (d) Send and receive what the new shard map wants moved (runtime/partition/resharding.py).
    (e) When all have what they need, and not before, *enter* the generation: cut the shards, deal
        the samples, and drop what is not kept any more. Until then all have what they had.
    (f) Gather the parameters and the buffers: the end of a step that somebody may have missed.
    (g) Reduce again the buckets of steps that do not count yet.

A failure on the way begins again at (a), with what is held then. Some may have entered by then and
some not: those had come to the same point, and enter behind, which needs no peer.

Not every function waits inside a step. One that was left by the error of a collective of its own,
that of a newcomer, and one inside a Join that follows groups, has to run from the top, and then all
do, in the next generation and in the same processes. So do those with plain optimizers
(recovery/plain_optimizer_steps.py). What they register is brought to where it was
(recovery/restart.py), and `ctx.epochs` and `ctx.shard` go on there. A sharded step that counts is
ended first, on every rank that waits in it, with what the others send (recovery/waiting_steps.py):
then the function goes on to its next boundary or collective, and is left there.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from actors.errors import StateLost, ends_a_generation
from actors.messages import NOWHERE, Assignment, Progress, Resumption
from actors.run_status import Steps
from actors.worker.lifeline import Lifeline
from collectives import ChoruslineError, CollectiveError, Group, GroupAborted, GroupClosed
from collectives.contract.operation import State
from collectives.objects.blocking import all_gather_object

from ..checkpoint.checkpoints import Checkpoints
from ..checkpoint.config import CheckpointConfig
from ..data.dealer import Dealer, Position
from ..data_parallel.distributed_data_parallel import DistributedDataParallel
from ..join import join
from ..partition.resharding import Range
from ..process.registry import Registered, Registry
from ..zero.shard_state import Description, HeldState
from ..zero.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from . import last_checkpoint, waiting_steps
from .last_checkpoint import Saveable
from .live_objects import LiveObjects
from .plain_optimizer_steps import PlainSteps
from .restart import RestartState, Summary, leader_of, up_to_date


class RunningCall(Protocol):
    """What recovery asks of the call of the train function (function_call.py)."""

    dealer: Dealer
    registry: Registry
    checkpoints: Checkpoints | None
    group: Group

    @property
    def step(self) -> int: ...

    def enter(self, assignment: Assignment, group: Group) -> None: ...

    def count_step(self) -> None: ...

    def told_data(self, *, committed: bool = False) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class Standing:
    """What a rank tells the others in (c).

    held, described: per optimizer that it has. synced: per model, the step whose buffers it has
    taken over. passes: per model, how often its gradients were sent. position: in the samples.
    """

    held: Mapping[int, tuple[list[Range], Mapping[int, Description]]]
    synced: Mapping[int, int]
    passes: Mapping[int, int]
    position: Position


@dataclass(frozen=True, slots=True)
class Entry:
    """What it takes to enter a generation. former_ranks: by rank in it, the rank in the generation
    that was entered before."""

    assignment: Assignment
    former_ranks: tuple[int, ...]
    positions: tuple[Position, ...]


class FunctionLeft(BaseException):
    """Unwinds the user's function, which runs again from the top. Not an Exception: it is nobody's
    to catch but ours."""


class Recovery:
    """One rank's, for one run."""

    def __init__(self, lifeline: Lifeline) -> None:
        self._lifeline = lifeline
        self._made = LiveObjects()
        self._entered = lifeline.generation
        self._entry: Entry | None = None
        """Into the generation that this rank was about to enter; the others may have."""
        self._since_entered: dict[int, tuple[int, ...]] = {}
        """By generation that was formed since, its ranks in the one before it."""
        self._restart: Resumption | None = None
        """How the function runs again, once it has been left."""
        self._met = NOWHERE
        """The last generation whose ranks have met because functions run again in it."""
        self._on_the_way: Mapping[int, HeldState] = {}
        """By id() of an optimizer, what it has of attempts to go on in place, when its function is
        to run again. Others may have entered that generation, and dropped what came here."""
        self._retained: RestartState | None = None
        """Of before the function was run again; until a step has been agreed on since."""
        self._is_newcomer = False
        """This rank has nothing of its own to go on with, until such a step."""
        self._data: dict[str, Any] = {}
        self._saveable: Saveable | None = None
        self._saved = ""
        """The path of the checkpoint that was written because the run is given up."""
        self._summaries: list[Summary] = []
        self._plain = PlainSteps(self._plain_step_taken)
        self.bytes_moved = 0
        """Sent by this rank, so that ranges of sharded state changed their owner, in all recoveries
        of the run so far, those from the top as well; parameters, as in (f), left out."""
        self.num_recoveries = 0

    def attach(self, call: RunningCall) -> None:
        """The function runs, in this call."""
        self._call = call
        self._attached_at = time.time()
        self.dealer = call.dealer
        self._on_the_way = {}
        self._plain.begin()
        self._made.begin()

    @property
    def counts_samples(self) -> bool:
        """Whether steps tell how many samples belong to them, so that what a lost rank had can be
        dealt again; with optimizers that are not registered the loss ends the run."""
        return bool(self._made.optimizers()) or self._plain.is_watching

    def watch_optimizer(self, optimizer: ZeroRedundancyOptimizer) -> None:
        self._made.add_optimizer(optimizer)

    def has_stepped(self, optimizer: ZeroRedundancyOptimizer) -> None:
        self._made.stepped_last = optimizer

    def watch_model(self, model: DistributedDataParallel) -> None:
        self._made.add_model(model)

    def cursors(self) -> list[int]:
        return self.dealer.cursors()

    def record(self, cursors: tuple[tuple[int, ...], ...]) -> None:
        """A ballot was seen; the cursors of all ranks."""
        self.dealer.record(cursors)
        self._step_counts()

    def watch_registered(self, entry: Registered) -> None:
        self._plain.watch(entry)

    def agreed(self, cursors: tuple[tuple[int, ...], ...]) -> None:
        """A backward pass for a plain optimizer was reduced; the cursors of all ranks."""
        self._plain.agreed(cursors, self.dealer.inside())

    def has_taken_over(self) -> None:
        """This rank has joined, and got the parameters of one that has taken the last step."""
        self._plain.take_over()

    def _plain_step_taken(
        self, cursors: tuple[tuple[int, ...], ...], iterations: list[int]
    ) -> None:
        self.dealer.record(cursors, iterations, is_settled=False)
        self._step_counts()
        for model in self._made.models().values():
            model.keep_agreed_buffers()
        self._call.count_step()

    def _step_counts(self) -> None:
        """What this rank has is its own again; nothing of before the function was run again is
        asked for any more."""
        self._retained = self._saveable = None
        self._summaries, self._is_newcomer = [], False

    def finish(self) -> None:
        """The function has returned here: wait until it has everywhere, and help until then."""
        self.pass_boundary()
        while (error := self._lifeline.finish()) is not None:
            self.recover(error)

    def pass_boundary(self) -> None:
        """Between two steps: leave the function here, if it has to run again."""
        if self._restart is not None:
            raise FunctionLeft

    def recover(
        self, error: BaseException, optimizer: ZeroRedundancyOptimizer | None = None
    ) -> None:
        """Return in the next generation. Raises what ended the run, if it does not go on.

        optimizer: whose step waits. Where functions run again it returns if the step counts, when
        its parameters are whole, and raises FunctionLeft if not.
        """
        self.pass_boundary()
        held: dict[int, HeldState] = {}
        handed_over = False
        while True:
            # A plain model has gradients of the lost rank's, and may have stepped with them.
            is_parked = optimizer is None or not self._plain.has_begun
            is_parked = is_parked and not join.follows_groups()
            resumption = self._freeze(
                error, self._entered, is_parked=is_parked, handed_over=handed_over
            )  # (a)
            handed_over = False
            if resumption.restarts:
                self._made.catch_up(resumption.progress)
                living = self._made.optimizers()
                self._on_the_way = {id(living[number]): one for number, one in held.items()}
                if optimizer is None or not optimizer.step_counts:
                    self._restart = resumption
                    raise FunctionLeft
                try:
                    self._meet_waiting(optimizer)
                except Exception as failure:
                    if not ends_a_generation(failure):
                        raise
                    error = failure
                    continue
                self._restart = resumption
                return
            if self._entry is not None and resumption.entered > self._entered:
                self._enter(self._entry)
            self._entry = None
            self._since_entered[resumption.assignment.generation] = resumption.former_ranks
            try:
                if not resumption.leaving:
                    self._go_on(resumption, held)
                    return
                self._hand_over(resumption, held)
                handed_over = True
                told = f"ranks {list(resumption.leaving)} have handed over, and leave"
                error = GroupAborted(resumption.assignment.generation, [], told)
            except Exception as failure:
                if not ends_a_generation(failure):
                    raise
                error = failure

    def _freeze(
        self, error: BaseException, entered: int, *, is_parked: bool, handed_over: bool = False
    ) -> Resumption:
        missing = "" if entered == NOWHERE else self._missing()
        frozen = replace(
            self._lifeline.leave_generation(error),
            progress=self._progress(),
            entered=entered,
            is_parked=is_parked,
            can_restart=not missing,
            spare=self._spare(),
            handed_over=handed_over,
            missing=missing,
            plain_steps=self._place[0],
            can_save=self._can_save(),
            saved=self._saved,
        )
        return self._lifeline.regenerate(frozen)

    def _spare(self) -> int:
        """Ranks that may go at once, as others have what they keep."""
        if optimizers := self._made.optimizers():
            return min(one.shard.replicas - 1 for one in optimizers.values())
        has_all = self._plain.is_watching and not self._is_newcomer
        return self._call.group.size - 1 if has_all else 0

    @property
    def _place(self) -> tuple[int, int]:
        return self._plain.place if self._retained is None else self._retained.place

    def _progress(self) -> tuple[Progress, ...]:
        live = self._made.progress()
        retained = self._retained.progress() if self._retained is not None else []
        # Those that the function has not made again yet are where they were.
        return (*live, *retained[len(live) :])

    def _missing(self) -> str:
        """What keeps the function from running again: something that is sharded, or reduced, is not
        registered. Empty if nothing does, or the function has not come to that yet."""
        if self._retained is not None:
            return ""
        registered = {id(entry.object) for entry in self._call.registry}
        optimizers, models = self._made.optimizers().values(), self._made.models().values()
        if not optimizers and not models:
            return (
                "it has not registered a DistributedDataParallel of the session's group with its "
                "optimizer (ctx.register)"
            )
        if any(id(one) not in registered for one in optimizers):
            return "it has not registered its model and its ZeroRedundancyOptimizer (ctx.register)"
        return self._plain.why_not_again(self._call.registry, models)

    def _can_save(self) -> bool:
        """Whether this rank can take part in writing down all that counts. Before its first step a
        function may still have to register something; nothing is lost with that, either."""
        if self._is_newcomer or self._retained is not None:
            return self._is_newcomer or self._saveable is not None
        return self._keeps_checkpoints and self._has_stepped and not self._missing()

    @property
    def _has_stepped(self) -> bool:
        """Whether a step was taken since the run began here."""
        return self._place[0] > 0 or any(one.ballots > 0 for one in self._progress())

    @property
    def _keeps_checkpoints(self) -> bool:
        checkpoints = self._call.checkpoints
        return checkpoints is not None and checkpoints.config is not None

    @property
    def can_begin_again(self) -> bool:
        """Whether the function, left now, would be run again from the top, as far as this rank
        knows."""
        return not self._has_begun() or not self._missing()

    def _has_begun(self) -> bool:
        """Whether any collective of the function has come to its end. If not, no other rank has
        anything of this one, and it may begin once more, as if it had not."""
        if self._retained is not None or self.num_recoveries > 0:
            return True
        return any(
            one.state is State.DONE and one.issued_at >= self._attached_at
            for recording in self._call.group.flight_recorders()
            for one in recording.collectives
        )

    # -- in place --------------------------------------------------------------------------------

    def _go_on(self, resumption: Resumption, held: dict[int, HeldState]) -> None:
        """held: by optimizer, what an attempt that failed has left here."""
        optimizers, models = self._made.optimizers(), self._made.models()
        group, standings = self._meet(resumption, held)
        everywhere = self._move(held, standings, group)
        self._entry = Entry(
            resumption.assignment,
            self._former_ranks(),
            tuple(standing.position for standing in standings),
        )
        group.barrier().wait()
        self._enter(self._entry)  # (e)
        self._call.enter(resumption.assignment, group)
        for number in everywhere:
            optimizers[number].change_group(group, held.pop(number))
        for model in models.values():
            model.group = group
            if model.reducer.group is not group:
                model.reducer.change_group(group)
        join.change_group(group)
        for number in everywhere:  # (f)
            optimizers[number].shard.gather()
        for number, model in models.items():
            if all(number in one.synced for one in standings):
                synced, step, live = [one.synced[number] for one in standings], 0, []
                for optimizer in optimizers.values():
                    if optimizer.model is model:
                        step = optimizer.progress.ballots
                        live = list(optimizer.last_live)
                model.sync_buffers_again(synced, step or max(synced), live)
        self._made.launch_again([one.passes for one in standings])  # (g)
        self.num_recoveries += 1

    def _hand_over(self, resumption: Resumption, held: dict[int, HeldState]) -> None:
        """Return when all who stay have what they keep without those that leave. Nobody enters this
        generation: what it has brought stays in `held`, for the next one."""
        group, standings = self._meet(resumption, held)
        self._move(held, standings, group, resumption.leaving)
        group.barrier().wait()

    def _meet(
        self,
        resumption: Resumption,
        held: dict[int, HeldState],
    ) -> tuple[Group, list[Standing]]:
        models = self._made.models()
        self._made.catch_up(resumption.progress)  # (b)
        for number, optimizer in self._made.optimizers().items():
            if number not in held:
                held[number] = optimizer.shard.held()
        group = self._lifeline.connect()  # (c)
        mine = Standing(
            {number: (state.ranges, state.described) for number, state in held.items()},
            {number: model.synced_step for number, model in models.items()},
            {number: model.reducer.num_passes for number, model in models.items()},
            self.dealer.position(),
        )
        return group, all_gather_object(group, mine)

    def _move(
        self,
        held: Mapping[int, HeldState],
        standings: Sequence[Standing],
        group: Group,
        leaving: Sequence[int] = (),
    ) -> list[int]:
        """(d); the numbers of the optimizers that all ranks have."""
        optimizers = self._made.optimizers()
        everywhere = [n for n in optimizers if all(n in one.held for one in standings)]
        for number in everywhere:
            told = [standing.held[number] for standing in standings]
            shard = optimizers[number].shard
            self.bytes_moved += shard.complete(held[number], told, group, leaving)
        return everywhere

    def _former_ranks(self) -> tuple[int, ...]:
        """By rank of the last generation that was formed, the rank in the one entered last."""
        generations = sorted(self._since_entered)
        ranks = self._since_entered[generations[0]]
        for generation in generations[1:]:
            ranks = tuple(ranks[former] for former in self._since_entered[generation])
        return ranks

    def _enter(self, entry: Entry) -> None:
        """What is numbered by ranks, or dealt to them, goes on in the generation."""
        self._entry = None
        self._entered = entry.assignment.generation
        self._since_entered = {
            generation: ranks
            for generation, ranks in self._since_entered.items()
            if generation > self._entered
        }
        new_rank = {old: new for new, old in enumerate(entry.former_ranks)}
        for optimizer in self._made.optimizers().values():
            live = (new_rank[old] for old in optimizer.last_live if old in new_rank)
            optimizer.last_live = tuple(live)
        join.change_ranks(entry.former_ranks)
        self._deal(entry)

    def _deal(self, entry: Entry) -> None:
        rank = entry.assignment.rank
        left = self.dealer.redeal(rank, entry.positions, entry.former_ranks)
        inside = join.active_join()
        if left is None:
            return
        if inside is not None:
            # Who is behind the others has yet to take the step that they are in.
            inside.ledger.begin_epoch(left.to_do)
            inside.ledger.has_next = left.to_take[rank] > 0
        elif min(left.to_do) < max(left.to_do):
            by_rank = ", ".join(f"rank {rank}: {n}" for rank, n in enumerate(left.to_do))
            raise RuntimeError(
                f"the samples of a lost rank were dealt to the others, which now have different "
                f"numbers of batches left ({by_rank}); a run that may lose workers iterates its "
                "shards inside Join([model, optimizer])"
            )

    # -- from the top ----------------------------------------------------------------------------

    def leave(self, error: BaseException) -> Resumption:
        """The function has been left: learn how it goes on, and keep what it has registered.

        Where no rank has begun, its `entered` is NOWHERE, and the function begins as at first.

        Raises what ended the run, if it does not go on; and `error` itself if it ends no
        generation: then the function has failed.
        """
        resumption, self._restart = self._restart, None
        is_left = isinstance(error, FunctionLeft) or ends_a_generation(error)
        # A body behind a step that counts finds the group of that step closed.
        if resumption is None or not (is_left or isinstance(error, GroupClosed)):
            if not is_left:
                raise error
            has_begun = self._has_begun()
            entered = self._entered if has_begun else NOWHERE
            resumption = self._freeze(error, entered, is_parked=False)
            if not has_begun:
                if resumption.entered == NOWHERE:
                    self.forget()
                else:
                    self.begin_as_newcomer()
                return resumption
            self._made.catch_up(resumption.progress)
        if self._retained is None:
            registry, place = self._call.registry, self._plain.place
            self._retained = RestartState.of(registry, place, self._on_the_way)
            self._data = self._call.told_data(committed=True)
            if self._keeps_checkpoints and self._has_stepped:
                self._saveable = Saveable.of(registry, self._retained, self._call.step)
        return resumption

    def save_last(self, group: Group, config: CheckpointConfig) -> CollectiveError:
        """The run is given up: write down what is retained. Returns what to freeze with, for the
        last time; raises what ends the group."""
        assert self._retained is not None
        saveable = self._saveable or Saveable()
        was_there = not self._is_newcomer
        try:
            self._saved = last_checkpoint.save(
                saveable, self._retained, was_there, self._data, group, config
            )
            told = f"it is saved in {self._saved}"
        except Exception as error:  # Whatever it is, the run ends with what it was given up for.
            if ends_a_generation(error):
                raise
            last = None
            with contextlib.suppress(Exception):  # The place itself may be what has failed.
                last = last_checkpoint.newest(config)
            is_ours = isinstance(error, ChoruslineError)
            told = str(error) if is_ours else f"{type(error).__name__}: {error}"
            told += f" (the last checkpoint is {last})" if last else ""
        return GroupAborted(group.generation, [], told)

    def _meet_waiting(self, optimizer: ZeroRedundancyOptimizer) -> None:
        """As `meet`, of a rank that waits in a step of this optimizer, which counts."""
        registry = self._call.registry
        has = waiting_steps.Holdings.of_live(registry, self._on_the_way)
        group = self._lifeline.connect()
        waiting_steps.complete(group, has, registry, optimizer)
        self._met = group.generation

    def connect(self) -> Group:
        """The group of the generation that the function is to run in; it was met before by who has
        waited in a step."""
        group = self._lifeline.group
        if group is not None and group.generation == self._met == self._lifeline.generation:
            return group
        return self._lifeline.connect()

    def meet(self, group: Group) -> None:
        """Once in each generation in which functions run again, before anything else: what ranks
        lack that wait inside a step that counts (recovery/waiting_steps.py)."""
        if self._met == group.generation:
            return
        assert self._retained is not None
        has = waiting_steps.Holdings.of_retained(self._retained)
        waiting_steps.complete(group, has)
        self._met = group.generation

    def forget(self) -> None:
        """The function begins where no rank has anything any more."""
        self._entered, self._since_entered = self._lifeline.generation, {}
        self._entry = self._restart = self._retained = self._saveable = None
        self._summaries, self._is_newcomer = [], False
        self._plain.go_on_at(0)

    def begin_as_newcomer(self) -> None:
        """The function runs for the first time here, and has run elsewhere."""
        self._retained, self._is_newcomer = RestartState(), True

    def begin_again(
        self, resumption: Resumption, group: Group, steps: Steps
    ) -> list[dict[str, Any]]:
        """Meet the others before the function runs again; where they were in their data, the
        leader first. steps: this rank's; a newcomer's go on from those of the others."""
        assert self._retained is not None
        self._entered, self._since_entered = resumption.assignment.generation, {}
        self._entry = None
        if self._retained.steps_taken is None:
            # Those that this rank has seen agreed on, and not taken, are taken again.
            self._retained.steps_taken = steps.taken - self._plain.num_untaken
        mine = self._retained.summary(not self._is_newcomer, self._data)
        self._summaries = all_gather_object(group, mine)
        if not any(one.was_there for one in self._summaries):
            raise StateLost(group.generation, 1, "all that was registered and had taken a step")
        self.num_recoveries += 1
        leader = self._summaries[leader_of(self._summaries)]
        newest = [one for one in up_to_date(self._summaries) if one is not leader]
        steps.taken = max(one.steps_taken for one in (leader, *newest))
        self._plain.go_on_at(leader.place[0])
        return [one.data for one in (leader, *newest)]

    def restore(self, entry: Registered, group: Group) -> bool:
        """Bring a registered object to where it was; False if the function runs for the first
        time, or had nothing of this name."""
        if self._retained is None or not self._summaries:
            return False
        sent_bytes = self._retained.restore(entry, self._summaries, group)
        self.bytes_moved += sent_bytes or 0
        return sent_bytes is not None
