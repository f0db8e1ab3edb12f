"""How a rank that waits inside a step gets into the next generation, where the step continues.

The phases are those of recovery.py; (a), freeze and learn which ballots count, comes before.

    (b) Catch up: take a step whose ballot only other ranks have seen. This needs no peer, since no
        rank votes before its gradients are reduced and sent to their replicas.
    (c) Meet the other ranks in the new generation, and report what this rank holds.
    (d) Send and receive the ranges that the new shard map moves (runtime/partition/resharding.py).
    (e) When all ranks have all that they need, and not before, *enter* the generation: cut the
        shards, deal the samples, and drop state that other ranks own. Until then each rank keeps
        its old state.
    (f) Gather the parameters and the buffers: the end of a step that some rank may have missed.
    (g) Reduce again the buckets of steps that do not count yet.

After a failure in one of the phases the ranks repeat (a), and keep the ranges received so far. Some
ranks may have entered by then. The other ranks had all they need too, and enter afterwards, which
needs no peer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from chorusline.actors.fault_plan import Instant
from chorusline.actors.messages.messages import Assignment, Resumption
from chorusline.actors.worker.lifeline import Lifeline
from chorusline.collectives.group import Group
from chorusline.collectives.objects.blocking import all_gather_object

from ..data.dealer import DataPosition
from ..data.steps.steps import Steps
from ..join import active
from ..zero.shards.shard_state import Inventory, ShardState
from .live_objects import LiveObjects
from .rank_state import RankState
from .state_transfer import transfer_state


@dataclass(frozen=True, slots=True)
class RankReport:
    """A rank's report to the other ranks in (c).

    held: by number of an optimizer, the inventory of its state.
    synced: by number of a model, the step whose buffers the rank has.
    passes: by number of a model, how often its gradients were sent.
    position: of the rank in the samples.
    saved: as Checkpoints.begun.
    """

    held: Mapping[int, Inventory]
    synced: Mapping[int, int]
    passes: Mapping[int, int]
    position: DataPosition
    saved: tuple[int, int]


@dataclass(frozen=True, slots=True)
class GenerationEntry:
    """The data with which a rank enters a generation.

    former_ranks: by rank in the generation, the rank in the generation entered before.
    positions: by rank, in the samples.
    """

    assignment: Assignment
    former_ranks: tuple[int, ...]
    positions: tuple[DataPosition, ...]


class InPlace:
    """These phases on one rank, for one run."""

    def __init__(self, lifeline: Lifeline, state: RankState, objects: LiveObjects) -> None:
        self.held: dict[int, ShardState] = {}
        """By number of an optimizer, this rank's state, with parts from attempts that failed."""
        self.dealt_again = 0
        """Batches of lost ranks that the others have been dealt, since `begin`."""
        self._lifeline = lifeline
        self._state = state
        self._objects = objects
        self._entry: GenerationEntry | None = None
        """The generation that this rank was about to enter, and others may have entered; None if it
        has entered it, or has not come so far."""

    def begin(self) -> None:
        """Forget earlier attempts to continue."""
        self.held, self._entry = {}, None
        self.dealt_again = 0

    def resume(self, resumption: Resumption, steps: Steps | None = None) -> None:
        """Return when this rank and all its objects have entered the generation. steps: the pass
        over an epoch in which workers come in, if some do."""
        optimizers, models = self._objects.optimizers(), self._objects.models()
        checkpoints = self._objects.call.checkpoints
        group, reports = self._meet(resumption, steps)
        # From here until the barrier each rank has its old state and what it has received.
        everywhere = self._move(reports, group)
        self._entry = GenerationEntry(
            resumption.assignment,
            self._state.former_ranks,
            tuple(report.position for report in reports),
        )
        # A rank that enters drops what others may still have to be sent, so all wait for all.
        group.barrier().wait()
        self._enter(self._entry)  # (e)
        self._objects.call.enter(resumption.assignment, group)
        if checkpoints is not None:
            checkpoints.skip(max(one.saved for one in reports))
        # Optimizers that a rank has not made, or has dropped, are in no collective of the others.
        for number in everywhere:
            optimizers[number].change_group(group, self.held.pop(number))
        for model in models.values():
            model.change_group(group)
        active.change_group(group)
        for number in everywhere:  # (f)
            optimizers[number].shard.gather()
            self._lifeline.faults.reach(Instant.GATHER_AGAIN)
        for number, model in models.items():
            # A model that one of the ranks has not made, or has dropped, cannot take part in a
            # collective.
            if all(number in one.synced for one in reports):
                synced, step, live = [one.synced[number] for one in reports], 0, []
                for optimizer in optimizers.values():
                    if optimizer.model is model:
                        step, live = optimizer.progress.ballots, list(optimizer.last_live)
                model.buffers.sync_again(synced, step or max(synced), live, group)
        # A rank may have sent the gradients of a step once more than another: all send as often.
        self._objects.launch_again([one.passes for one in reports])  # (g)
        self.held, self._entry = {}, None  # The rest is of optimizers that some ranks have dropped.
        self._state.num_recoveries += 1

    def hand_over(self, resumption: Resumption) -> None:
        """Return when the staying ranks have all shards of the leaving ranks. No rank enters this
        generation: the received state stays in `held`, for the next one."""
        group, reports = self._meet(resumption)
        self._move(reports, group, resumption.leaving)
        group.barrier().wait()
        self._state.handed_over(group.generation)

    def _meet(
        self, resumption: Resumption, steps: Steps | None = None
    ) -> tuple[Group, list[RankReport]]:
        # The resumption says whether other ranks have entered the generation of the last attempt.
        if self._entry is not None and resumption.entered > self._state.entered:
            self._enter(self._entry)
        self._entry = None
        # The ranks may be renumbered several times before one generation is entered.
        self._state.formed(resumption.former_ranks)
        self._objects.catch_up(resumption.progress)  # (b)
        former = self._state.former_ranks
        is_new = former[resumption.assignment.rank] < 0
        for number, optimizer in self._objects.optimizers().items():
            # A worker that comes in has made its shards itself: nothing in them is of the run.
            if number not in self.held:
                shard = optimizer.shard
                # In a step or between two: what the body has written since the last one stays.
                self.held[number] = ShardState() if is_new else shard.held(takes_parameters=True)
        models, checkpoints = self._objects.models(), self._objects.call.checkpoints
        group = self._lifeline.connect()  # (c)
        # Before the reports: what a worker gets here is part of the report that it gives.
        if min(former) < 0:
            assert steps is not None
            root = next(rank for rank, before in enumerate(former) if before >= 0)
            transfer_state(self._objects, steps, root, group, is_new=is_new)
        mine = RankReport(
            {number: state.inventory for number, state in self.held.items()},
            {number: model.buffers.synced_step for number, model in models.items()},
            {number: model.reducer.num_passes for number, model in models.items()},
            self._objects.call.dealer.position(),
            checkpoints.begun if checkpoints is not None else (0, -1),
        )
        return group, all_gather_object(group, mine)

    def _move(
        self, reports: Sequence[RankReport], group: Group, leaving: Sequence[int] = ()
    ) -> list[int]:
        """(d) Returns the numbers of the optimizers that exist on all ranks."""
        optimizers = self._objects.optimizers()
        # Sent by number, so that each rank has to have it.
        everywhere = [n for n in optimizers if all(n in one.held for one in reports)]
        for number in everywhere:
            inventories = [report.held[number] for report in reports]
            shard = optimizers[number].shard
            self._lifeline.faults.reach(Instant.MOVE)
            self._state.bytes_moved += shard.complete(
                self.held[number], inventories, group, leaving
            )
        return everywhere

    def _enter(self, entry: GenerationEntry) -> None:
        """Renumber by the new ranks, and deal the samples to them."""
        self._entry = None
        self._state.entered_in_place(entry.assignment.generation)
        if entry.former_ranks[entry.assignment.rank] < 0:
            self._state.step_counts()  # This rank has come in, and has all that the others have.
        new_rank = {old: new for new, old in enumerate(entry.former_ranks)}
        for optimizer in self._objects.optimizers().values():
            # Ranks that are gone end no step, and send no buffers.
            live = (new_rank[old] for old in optimizer.last_live if old in new_rank)
            optimizer.last_live = tuple(live)
        active.change_ranks(entry.former_ranks)
        self.deal(entry)

    def deal(self, entry: GenerationEntry) -> None:
        """Deal the samples of lost ranks to the remaining ranks."""
        self._lifeline.faults.reach(Instant.ENTER)
        rank = entry.assignment.rank
        inside = active.active_join()
        left = self._objects.call.dealer.redeal(
            rank,
            entry.positions,
            entry.former_ranks,
            inside.together[-1] if inside is not None and inside.together else (),
        )
        # No iteration is in progress here, so no loop gets another number of batches.
        if left is None:
            return
        self.dealt_again += left.dealt_again
        if inside is not None:
            # A rank that is behind the others has yet to take their current step.
            inside.ledger.begin_epoch(left.to_do)
            inside.ledger.has_next = left.to_take[rank] > 0
        elif min(left.to_do) < max(left.to_do):
            by_rank = ", ".join(f"rank {rank}: {n}" for rank, n in enumerate(left.to_do))
            raise RuntimeError(
                f"the samples of a lost rank were dealt to the others, which now have different "
                f"numbers of batches left ({by_rank}); a run that may lose workers must iterate "
                "its shards inside Join([model, optimizer])"
            )
