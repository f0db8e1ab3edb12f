"""The sum of the gradients of a step's micro-batches, with the same bits on any number of ranks.

Each micro-batch is a leaf of one binary tree (partition/summation_tree.py). A rank adds up its
leaves as far as the tree lets it:

    (1) A micro-batch's gradients come to memory in which no sum is kept: the bucket, or more of
        its kind. Its leaf is added to the sibling's sum, that sum to its own sibling's, and so on,
        as with the carries of a binary counter; what finds no sibling here is kept where it is. So
        a rank of k consecutive micro-batches keeps at most 2 log2(k) sums.
    (2) At the end of the step the owner of a shard receives the shard's part of all kept sums of
        all ranks, and adds them in the order of the tree. The sums themselves stay until the step
        is over: if a rank is lost meanwhile, they are sent again.

With two ranks that keep one sum each, (2) is a reduce-scatter: the sum of two has one order only.

Where the bits need not be the same, all micro-batches of a rank are one leaf, and autograd adds
them up in the buckets.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from chorusline.collectives.contract.work import Work
from chorusline.collectives.group import Group

from ...partition.shards import shard_numel
from ...partition.summation_tree import (
    Node,
    children_of,
    nodes_over,
    parent_of,
    root_of,
    sibling_of,
)
from ...process.micro_batches import StepPlan
from .gradient_bucket import GradientBucket, Gradients


class SumPhase(enum.Enum):
    """The part of a step of `ctx.steps` that the model is in (model_steps.py)."""

    NO = "backward passes reduce their gradients"
    OPEN = "a micro-batch runs, in which no forward pass of the model has begun"
    ADDING = "backward passes only add up: they are those of micro-batches"
    ENDED = "the gradient of the step is complete, and no backward pass may run"


_ONLY: Node = (0, 0)
"""Where the order is free, a rank keeps one sum, which is a leaf of the sum over the ranks."""


@dataclass(frozen=True, slots=True, eq=False)
class Sum:
    """Memory for a sum of gradients of one bucket.

    flat: as long as the bucket's. content: its part that is gradients.
    views: by number of a parameter, the place of its gradient.
    """

    flat: torch.Tensor
    content: torch.Tensor
    views: dict[int, torch.Tensor]

    @classmethod
    def of(cls, bucket: GradientBucket, flat: torch.Tensor) -> Sum:
        views = bucket.views if flat is bucket.flat else bucket.views_of(flat)
        return cls(flat, flat[: bucket.plan.content], views)


class BucketSums:
    """The sums of one bucket on this rank.

    kept: by node, its sum.
    coming: where the gradients of the micro-batch under way have their place.
    """

    def __init__(self, bucket: GradientBucket) -> None:
        self.bucket = bucket
        self.kept: dict[Node, Sum] = {}
        self._made = [Sum.of(bucket, bucket.flat)]
        self._free: list[Sum] = []
        self.coming = self._made[0]
        self._received: dict[tuple[int, int], torch.Tensor] = {}

    def begin_step(self) -> None:
        self.kept = {}
        # The bucket is the first that is taken.
        self._free = self._made[:0:-1]
        self.coming = self._made[0]

    def make_room(self) -> None:
        """A micro-batch begins: its gradients come to where no sum is kept."""
        if self.coming in self.kept.values():
            self.coming = self._free.pop() if self._free else self._one_more()

    def _one_more(self) -> Sum:
        self._made.append(Sum.of(self.bucket, self.bucket.another_flat()))
        return self._made[-1]

    def add(self, number: int, num_leaves: int) -> None:
        """(1) The leaf `number` has come."""
        node, carried, root = (0, number), self.coming, root_of(num_leaves)
        while node != root:
            sibling = sibling_of(node, num_leaves)
            # A node without a sibling is the sum of its parent as well.
            if sibling is not None:
                # On another rank, or yet to come.
                if sibling not in self.kept:
                    break
                total = self.kept.pop(sibling)
                total.content.add_(carried.content)
                self._let_go(carried)
                carried = total
            node = parent_of(node)
        self.kept[node] = carried

    def add_in_any_order(self) -> None:
        """Add what has come to the one sum that this rank keeps."""
        if _ONLY in self.kept:
            self.kept[_ONLY].content.add_(self.coming.content)
        else:
            self.kept[_ONLY] = self.coming

    def keep_bucket(self) -> None:
        """Autograd has added all of this rank's micro-batches up in the bucket."""
        self.kept = {_ONLY: self._made[0]}

    def _let_go(self, memory: Sum) -> None:
        # What comes next is written to `coming` in any case.
        if memory is not self.coming:
            self._free.append(memory)

    def exchange(
        self, group: Group, nodes: Sequence[Sequence[Node]], num_leaves: int, out: torch.Tensor
    ) -> Exchange:
        """(2) Begin to sum over the ranks.

        nodes: by rank, those that it keeps. out: (shard_numel,) gets this rank's part of the sum.
        """
        length = shard_numel(self.bucket.plan.content, group.size)
        # Where the order is free, the one sum has another number among those of all ranks.
        mine = [self.kept[node if node in self.kept else _ONLY].flat for node in nodes[group.rank]]
        # Of two summands the order does not matter, so the transport may add them.
        if group.size == 2 and [len(of_rank) for of_rank in nodes] == [1, 1]:
            return Exchange([group.reduce_scatter(out, mine[0][: 2 * length])], {}, num_leaves, out)
        at = group.rank * length
        parts = {
            node: _Part(memory[at : at + length], is_ours=False)
            for node, memory in zip(nodes[group.rank], mine, strict=True)
        }
        works, nothing = [], out.new_empty(0)
        # Ranks may keep several sums each, which travel one after the other.
        for turn in range(max(map(len, nodes)) if group.size > 1 else 0):
            theirs, sent = [nothing] * group.size, [nothing] * group.size
            for rank, of_rank in enumerate(nodes):
                if rank == group.rank:
                    continue
                if turn < len(mine):
                    sent[rank] = mine[turn][rank * length : (rank + 1) * length]
                if turn < len(of_rank):
                    theirs[rank] = self._room(turn, rank, length)
                    parts[of_rank[turn]] = _Part(theirs[rank], is_ours=True)
            works.append(group.all_to_all(theirs, sent))
        return Exchange(works, parts, num_leaves, out)

    def _room(self, turn: int, rank: int, length: int) -> torch.Tensor:
        room = self._received.get((turn, rank))
        # Kept from step to step, as long as the number of ranks stays.
        if room is None or room.numel() != length:
            room = self._received[turn, rank] = self.bucket.flat.new_empty(length)
        return room


@dataclass(frozen=True, slots=True)
class _Part:
    """A shard's part of a kept sum. is_ours: received here, so this rank may write to it."""

    values: torch.Tensor
    is_ours: bool


@dataclass(frozen=True, slots=True)
class Exchange:
    """A sum over all ranks on its way. parts: by node; empty where the transport adds."""

    works: Sequence[Work]
    parts: dict[Node, _Part]
    num_leaves: int
    out: torch.Tensor

    def wait(self, on_host: bool) -> None:
        """Return when `out` holds the sum; on_host: also on a GPU, if the host reads of it next."""
        for work in self.works:
            if on_host:
                work.wait_on_host()
            else:
                work.wait()
        # Without parts the transport has added, and `out` has the sum already.
        if self.parts:
            total = self._sum_of(root_of(self.num_leaves)).values
            if total is not self.out:
                self.out.copy_(total)

    def _sum_of(self, node: Node) -> _Part:
        if node in self.parts:
            return self.parts[node]
        first, *second = (self._sum_of(c) for c in children_of(node, self.num_leaves))
        # A node with one child is that child's sum.
        if not second:
            return first
        other = second[0]
        # Into what was received: the kept sums stay as they are, for a loss.
        if first.is_ours:
            first.values.add_(other.values)
            return first
        if other.is_ours:
            other.values.add_(first.values)
            return other
        # This rank would have added two sums of its own in (1).
        raise AssertionError(f"both children of {node} were kept by one rank")


class MicroBatchSums:
    """The sums of one model's gradients on this rank, for one step after the other.

    used: by number of a parameter, whether a micro-batch of this rank has brought it a gradient.
    """

    def __init__(self, gradients: Gradients) -> None:
        self._gradients = gradients
        self._buckets: list[BucketSums] = []
        self._plan = StepPlan(0, (), [])
        self._accumulates = False
        """Whether autograd adds up the micro-batches in the buckets, as their bits may differ."""
        self._has_begun = False
        self._exchanges: list[Exchange] = []
        self.used: list[bool] = []

    def begin_step(self, plan: StepPlan) -> None:
        self._plan = plan
        # In any order, backward passes may add up in the bucket itself, if all micro-batches are
        # whole ones: a share is multiplied into the sum of its own micro-batch.
        self._accumulates = not plan.deterministic and set(plan.shares) == {1.0}
        self._has_begun = False
        self._exchanges = []
        self._gradients.summed.clear()
        # As in one process: what was cleared to zeros, and not to None, is stepped by zeros.
        grads = [parameter.grad for parameter in self._gradients.parameters]
        self.used = [grad is not None and not grad.any() for grad in grads]
        self._gradients.drop()
        for sums in self._buckets:
            sums.begin_step()
        # The reducer has made its buckets again, in the order in which gradients came.
        if [sums.bucket for sums in self._buckets] != self._gradients.buckets:
            self._buckets = [BucketSums(bucket) for bucket in self._gradients.buckets]

    def begin_micro_batch(self) -> None:
        # Autograd adds to what is there.
        if self._accumulates:
            return
        self._gradients.drop()
        for sums in self._buckets:
            sums.make_room()
            self._gradients.views.update(sums.coming.views)

    def end_micro_batch(self, number: int, share: float) -> None:
        """share: the leaf is multiplied by it."""
        used = self._gradients.usage()
        for parameter, is_used in enumerate(used):
            if is_used:
                self._gradients.bring_home(parameter)  # If the program has put another one there.
            else:
                self._gradients.views[parameter].zero_()
        self.used = [one or other for one, other in zip(self.used, used, strict=True)]
        self._has_begun = True
        if self._accumulates:
            self._gradients.summed.update(n for n, is_used in enumerate(used) if is_used)
        for sums in self._buckets:
            # Backward passes have added to the bucket itself, which is the only sum.
            if self._accumulates:
                continue
            if share != 1:
                sums.coming.content.mul_(share)
            if self._plan.deterministic:
                sums.add(number, self._plan.num_micro_batches)
            else:
                sums.add_in_any_order()

    def launch(self, group: Group, outs: Sequence[torch.Tensor]) -> None:
        """(2) begins. outs: get this rank's shard of the sum of each bucket."""
        plan = self._plan
        # The tree is that of the micro-batches, whoever holds them; else it is one of the ranks.
        if plan.deterministic:
            num_leaves = plan.num_micro_batches
            nodes = [nodes_over(plan.held_by(rank), num_leaves) for rank in range(group.size)]
        else:
            holding = sorted(set(plan.holders))
            num_leaves = len(holding)
            nodes = [[(0, holding.index(r))] if r in holding else [] for r in range(group.size)]
        self._gradients.lead_home()
        self._exchanges = []
        for sums, out in zip(self._buckets, outs, strict=True):
            if self._accumulates and self._has_begun:
                sums.keep_bucket()
            self._exchanges.append(sums.exchange(group, nodes, num_leaves, out))

    @property
    def is_launched(self) -> bool:
        return bool(self._exchanges)

    def forget_launch(self) -> None:
        """The generation in which it was launched has ended."""
        self._exchanges = []

    def wait(self, *, on_host: bool = False) -> None:
        """Return when the sums that were launched are there.

        on_host: also on a GPU, return or raise when it is known how that has ended."""
        for exchange in self._exchanges:
            exchange.wait(on_host)
        self._exchanges = []
