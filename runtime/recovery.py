"""A run that goes on: how a rank's objects get from one generation into the next.

A step of a `ZeroRedundancyOptimizer` that meets with the end of its generation calls `recover`,
which returns in the next generation, and the step goes on. Nothing of the user's runs meanwhile.

    (a) Freeze, say which ballots this rank has seen, and learn which count (actors/lifeline.py).
    (b) Catch up: apply a step that others have seen and this rank has not. That needs no peer,
        since nobody votes before all gradients are reduced and with their replicas.
    (c) Meet the others in the new generation, and tell them what this rank holds.
    (d) Send and receive what the new shard map wants moved (collectives/resharding.py).
    (e) When all have what they need, and not before: cut the shards, deal the samples, and drop
        what is not kept any more. Before this point everybody still has all that it had.
    (f) Gather the parameters and the buffers: the end of a step that somebody may have missed.
    (g) Reduce again the buckets of steps that do not count yet.

A failure on the way begins again at (a), with what is held then.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from actors.errors import StateLost
from actors.lifeline import Lifeline, ends_a_generation
from actors.messages import DROPPED, Progress, Resumption
from collectives import Group
from collectives.objects import all_gather_object
from collectives.resharding import Range, RangesLost, plan_transfers

from . import join
from .dealing import Position
from .held_state import Description, HeldState, exchange

if TYPE_CHECKING:
    from .context import Context
    from .distributed_data_parallel import DistributedDataParallel
    from .zero_redundancy_optimizer import ZeroRedundancyOptimizer


@dataclass(frozen=True, slots=True)
class Standing:
    """What a rank tells the others in (c).

    held, described: per optimizer that it has. synced: per model, the step whose buffers it has
    taken over. position: in the samples.
    """

    held: Mapping[int, tuple[list[Range], Mapping[int, Description]]]
    synced: Mapping[int, int]
    position: Position


class Recovery:
    """One rank's, for one run. Optimizers and models are numbered in the order of their making,
    which is the same on all ranks; those that the user has dropped leave a gap."""

    def __init__(self, context: Context, lifeline: Lifeline) -> None:
        self._context = context
        self.dealer = context.dealer
        self._lifeline = lifeline
        self._optimizers: list[weakref.ref[ZeroRedundancyOptimizer]] = []
        self._models: list[weakref.ref[DistributedDataParallel]] = []
        self.bytes_moved = 0
        """Sent by this rank in all recoveries of the run so far, parameters of (f) left out."""
        self.num_recoveries = 0

    def watch_optimizer(self, optimizer: ZeroRedundancyOptimizer) -> None:
        self._optimizers.append(weakref.ref(optimizer))

    def watch_model(self, model: DistributedDataParallel) -> None:
        self._models.append(weakref.ref(model))

    def finish(self) -> None:
        """The function has returned here: wait until it has everywhere, and help until then."""
        while (error := self._lifeline.finish()) is not None:
            self.recover(error)

    def recover(self, error: BaseException) -> None:
        """Return in the next generation. Raises what ended the run, if it does not go on."""
        held: dict[int, HeldState] = {}
        while True:
            resumption = self._lifeline.regenerate(error, self._progress)  # (a)
            try:
                self._go_on(resumption, held)
                return
            except Exception as failure:
                if not ends_a_generation(failure):
                    raise
                error = failure

    def _progress(self) -> tuple[Progress, ...]:
        optimizers = (reference() for reference in self._optimizers)
        return tuple(one.progress if one is not None else DROPPED for one in optimizers)

    def _go_on(self, resumption: Resumption, held: dict[int, HeldState]) -> None:
        """held: by optimizer, what an attempt that failed has left here."""
        optimizers = {n: one for n, ref in enumerate(self._optimizers) if (one := ref())}
        models = {n: model for n, made in enumerate(self._models) if (model := made())}
        for number, optimizer in optimizers.items():
            optimizer.catch_up(resumption.progress[number])  # (b)
            if number not in held:
                held[number] = optimizer.shard.held()
        group = self._lifeline.connect(resumption)  # (c)
        standings: list[Standing] = all_gather_object(
            group,
            Standing(
                {number: (mine.ranges, mine.described) for number, mine in held.items()},
                {number: model.synced_step for number, model in models.items()},
                self.dealer.position(),
            ),
        )
        everywhere = [n for n in optimizers if all(n in one.held for one in standings)]
        for number in everywhere:
            self._move(optimizers[number], held[number], number, standings, group)  # (d)
        group.barrier().wait()
        self._context.enter(resumption.assignment, group)  # (e)
        for number in everywhere:
            optimizers[number].change_group(group, held.pop(number))
        for model in models.values():
            model.group = group
            if model.reducer.group is not group:
                model.reducer.change_group(group)
        join.change_group(group, resumption.former_ranks)
        self._deal([one.position for one in standings], resumption.former_ranks)
        for number in everywhere:  # (f)
            optimizers[number].shard.gather()
        new_rank = {old: new for new, old in enumerate(resumption.former_ranks)}
        for number, model in models.items():
            if all(number in one.synced for one in standings):
                synced, step, live = [one.synced[number] for one in standings], 0, []
                for optimizer in optimizers.values():
                    if optimizer.model is model:
                        step = optimizer.progress.ballots
                        live = [new_rank[old] for old in optimizer.last_live if old in new_rank]
                model.sync_buffers_again(synced, step or max(synced), live)
        for model in models.values():  # (g)
            if model.reducer.has_launched:
                model.reducer.launch_again()
        self.num_recoveries += 1

    def _deal(self, positions: Sequence[Position], former_ranks: Sequence[int]) -> None:
        left = self.dealer.redeal(self._context.rank, positions, former_ranks)
        inside = join.active_join()
        if left is None:
            return
        if inside is not None:
            inside.ledger.begin_epoch(left)
            inside.ledger.has_next = left[self._context.rank] > 0
        elif min(left) < max(left):
            by_rank = ", ".join(f"rank {rank}: {n}" for rank, n in enumerate(left))
            raise RuntimeError(
                f"the samples of a lost rank were dealt to the others, which now have different "
                f"numbers of batches left ({by_rank}); a run that may lose workers iterates its "
                "shards inside Join([model, optimizer])"
            )

    def _move(
        self,
        optimizer: ZeroRedundancyOptimizer,
        held: HeldState,
        number: int,
        standings: list[Standing],
        group: Group,
    ) -> None:
        for standing in standings:
            held.learn(standing.held[number][1])
        try:
            plan = plan_transfers(
                {rank: standing.held[number][0] for rank, standing in enumerate(standings)},
                group.size,
                [bucket.plan.content for bucket in optimizer.shard.buckets],
                optimizer.shard.replicas,
            )
        except RangesLost as lost:
            raise StateLost(group.generation, optimizer.shard.replicas, str(lost)) from None
        travelling = optimizer.shard.travelling(held.described)
        self.bytes_moved += exchange(held, plan, travelling, group)
