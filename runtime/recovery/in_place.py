"""How a rank that waits inside a step gets into the next generation, where the step goes on.

The phases are those of recovery.py; (a), to freeze and to learn what holds, comes before.

    (b) Catch up: take a step that other ranks have seen and this one has not. That needs no peer,
        since no rank votes before all gradients are reduced and with their replicas.
    (c) Meet the others in the new generation, and tell them what this rank holds.
    (d) Send and receive what the new shard map wants moved (runtime/partition/resharding.py).
    (e) When all ranks have what they need, and not before, *enter* the generation: cut the shards,
        deal the samples, and drop what is not kept any more. Until then each rank keeps what it
        had.
    (f) Gather the parameters and the buffers: the end of a step that some rank may have missed.
    (g) Reduce again the buckets of steps that do not count yet.

After a failure in one of them (a) comes again, and what was received until then is kept. Some ranks
may have entered by then and some not. Those had come to the same point, and enter behind the
others, which needs no peer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from actors.messages import Assignment, Resumption
from actors.worker.lifeline import Lifeline
from collectives import Group
from collectives.objects.blocking import all_gather_object

from ..data.dealer import DataPosition
from ..join import join
from ..zero.shard_state import Inventory, ShardState
from .live_objects import LiveObjects
from .rank_state import RankState


@dataclass(frozen=True, slots=True)
class Standing:
    """What a rank tells the others in (c).

    held: of each optimizer that it has, ranges and what the state of a parameter consists of.
    synced: of each model, the step whose buffers it has taken over.
    passes: of each model, how often its gradients were sent.
    position: in the samples.
    """

    held: Mapping[int, Inventory]
    synced: Mapping[int, int]
    passes: Mapping[int, int]
    position: DataPosition


@dataclass(frozen=True, slots=True)
class Entry:
    """What it takes to enter a generation.

    former_ranks: by rank in it, the rank in the generation that was entered before.
    positions: by rank, in the samples.
    """

    assignment: Assignment
    former_ranks: tuple[int, ...]
    positions: tuple[DataPosition, ...]


class InPlace:
    """One rank's, for one run."""

    def __init__(self, lifeline: Lifeline, state: RankState, objects: LiveObjects) -> None:
        self.bytes_moved = 0
        """Sent by this rank because ranges of sharded state changed their owner."""
        self.held: dict[int, ShardState] = {}
        """By optimizer, what this rank holds since an attempt that failed."""
        self._lifeline = lifeline
        self._state = state
        self._objects = objects
        self._entry: Entry | None = None
        """Into the generation that this rank was about to enter; the others may have."""

    def begin(self) -> None:
        """No attempt to go on has been made."""
        self.held, self._entry = {}, None

    def go_on(self, resumption: Resumption) -> None:
        """Return in the generation, with all objects in it."""
        optimizers, models = self._objects.optimizers(), self._objects.models()
        group, standings = self._meet(resumption)
        everywhere = self._move(standings, group)
        self._entry = Entry(
            resumption.assignment,
            self._state.former_ranks,
            tuple(standing.position for standing in standings),
        )
        group.barrier().wait()
        self._enter(self._entry)  # (e)
        self._objects.call.enter(resumption.assignment, group)
        for number in everywhere:
            optimizers[number].change_group(group, self.held.pop(number))
        for model in models.values():
            model.change_group(group)
        join.change_group(group)
        for number in everywhere:  # (f)
            optimizers[number].shard.gather()
        for number, model in models.items():
            if all(number in one.synced for one in standings):
                synced, step, live = [one.synced[number] for one in standings], 0, []
                for optimizer in optimizers.values():
                    if optimizer.model is model:
                        step, live = optimizer.progress.ballots, list(optimizer.last_live)
                model.buffers.sync_again(synced, step or max(synced), live, group)
        self._objects.launch_again([one.passes for one in standings])  # (g)
        self.begin()  # What is left in `held` is of optimizers that some ranks have dropped.

    def hand_over(self, resumption: Resumption) -> None:
        """Return when all ranks that stay have what they keep without those that leave. No rank
        enters this generation: what it has brought stays in `held`, for the next one."""
        group, standings = self._meet(resumption)
        self._move(standings, group, resumption.leaving)
        group.barrier().wait()
        self._state.handed_over(group.generation)

    def _meet(self, resumption: Resumption) -> tuple[Group, list[Standing]]:
        # What was decided says whether others have entered the generation of the last attempt.
        if self._entry is not None and resumption.entered > self._state.entered:
            self._enter(self._entry)
        self._entry = None
        self._state.formed(resumption.former_ranks)
        self._objects.catch_up(resumption.progress)  # (b)
        for number, optimizer in self._objects.optimizers().items():
            if number not in self.held:
                self.held[number] = optimizer.shard.held()
        models = self._objects.models()
        group = self._lifeline.connect()  # (c)
        mine = Standing(
            {number: state.inventory for number, state in self.held.items()},
            {number: model.buffers.synced_step for number, model in models.items()},
            {number: model.reducer.num_passes for number, model in models.items()},
            self._objects.call.dealer.position(),
        )
        return group, all_gather_object(group, mine)

    def _move(
        self, standings: Sequence[Standing], group: Group, leaving: Sequence[int] = ()
    ) -> list[int]:
        """(d). Returns the numbers of the optimizers that all ranks have."""
        optimizers = self._objects.optimizers()
        everywhere = [n for n in optimizers if all(n in one.held for one in standings)]
        for number in everywhere:
            told = [standing.held[number] for standing in standings]
            shard = optimizers[number].shard
            self.bytes_moved += shard.complete(self.held[number], told, group, leaving)
        return everywhere

    def _enter(self, entry: Entry) -> None:
        """What is numbered by ranks, or dealt to them, goes on in the generation."""
        self._entry = None
        self._state.entered_in_place(entry.assignment.generation)
        new_rank = {old: new for new, old in enumerate(entry.former_ranks)}
        for optimizer in self._objects.optimizers().values():
            live = (new_rank[old] for old in optimizer.last_live if old in new_rank)
            optimizer.last_live = tuple(live)
        join.change_ranks(entry.former_ranks)
        self.deal(entry)

    def deal(self, entry: Entry) -> None:
        """The samples of ranks that are gone are dealt to those that are left."""
        rank = entry.assignment.rank
        left = self._objects.call.dealer.redeal(rank, entry.positions, entry.former_ranks)
        inside = join.active_join()
        if left is None:
            return
        if inside is not None:
            # A rank that is behind the others has yet to take the step that they are in.
            inside.ledger.begin_epoch(left.to_do)
            inside.ledger.has_next = left.to_take[rank] > 0
        elif min(left.to_do) < max(left.to_do):
            by_rank = ", ".join(f"rank {rank}: {n}" for rank, n in enumerate(left.to_do))
            raise RuntimeError(
                f"the samples of a lost rank were dealt to the others, which now have different "
                f"numbers of batches left ({by_rank}); a run that may lose workers iterates its "
                "shards inside Join([model, optimizer])"
            )
