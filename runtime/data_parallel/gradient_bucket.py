"""Gradients that travel together, and the memory that they travel in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from collectives import Group, Work

from ..partition.buckets import BucketPlan
from ..partition.shards import padded_numel, room_for, shard_numel


class GradientBucket:
    """Gradients that travel together. The work and the memory that it uses live side by side.

    flat: local gradients, and room behind them. padded: elements of it that a reduce-scatter takes.
    shard: (n,) reduced, this rank's part, in REDUCE_SCATTER mode. missing: gradients that this
    backward pass still owes; parameters that are frozen get none. launch_number: ascending, over
    the buckets of all models.
    """

    def __init__(
        self,
        plan: BucketPlan,
        parameters: Sequence[torch.nn.Parameter],
        group: Group,
        vote_numel: int,
    ) -> None:
        """vote_numel: elements that an agreement takes behind the content."""
        first = parameters[plan.spans[0][0]]
        self.plan = plan
        self.padded = padded_numel(plan.content, group.size)
        room = max(room_for(plan.content, group.size), plan.content + vote_numel)
        self.flat = torch.zeros(room, dtype=first.dtype, device=first.device)
        self.views = {
            number: self.flat[offset : offset + numel].view_as(parameters[number])
            for number, offset, numel in plan.spans
        }
        self.shard = torch.empty(0, dtype=first.dtype, device=first.device)
        self.missing = 0
        self.launch_number = 0
        self.work: Work | None = None
        self.future: torch.futures.Future[Any] | None = None
        """What a communication hook returned for it."""

    def content(self) -> torch.Tensor:
        """The gradients, with zeros between them: what a hook left there is cleared."""
        ends = [offset + numel for _, offset, numel in self.plan.spans]
        begins = [offset for _, offset, _ in self.plan.spans[1:]]
        for end, begin in zip(ends, [*begins, self.plan.content], strict=True):
            if begin > end:
                self.flat[end:begin] = 0
        return self.flat[: self.plan.content]

    def prepare_shard(self, group: Group) -> None:
        self.shard = self.flat.new_zeros(shard_numel(self.plan.content, group.size))

    def change_group(self, group: Group) -> None:
        """Be as it was before it was launched, for another number of ranks; the gradients stay."""
        self.work = None
        self.padded = padded_numel(self.plan.content, group.size)
        assert self.padded <= self.flat.numel()
        self.flat[self.plan.content :] = 0
        self.prepare_shard(group)
