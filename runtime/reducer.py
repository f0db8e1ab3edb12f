"""Brings the gradients of all ranks together while the backward pass still runs.

Gradients live in flat buckets; a parameter's `.grad` is a view of its bucket. When the backward
pass has made the last gradient of a bucket, the bucket is launched, in the same order on all
ranks, and the network works while the pass goes on.

    ALL_REDUCE      every rank gets the mean of all gradients; any optimizer can step.
    REDUCE_SCATTER  every rank gets the sum for its shard only, out of place: the local buckets are
                    kept until the step is over. The optimizer that owns the shards finishes it.

In ALL_REDUCE mode the step's agreement (agreement.py) rides behind the content of the last bucket
if that is float32 or float64, and goes on its own otherwise.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from collectives import Group, Work
from collectives.buckets import BucketPlan, plan_buckets
from collectives.shards import padded_numel, shard_numel

from .agreement import Agreement, read_agreement, vote_numel, write_vote
from .boundary import boundary
from .kept import kept
from .step_statistics import StepClock, UnusedParameters

FIRST_BUCKET_BYTES = 1 << 20


class Mode(enum.Enum):
    ALL_REDUCE = "all ranks hold the mean of the whole gradient after backward"
    REDUCE_SCATTER = "each rank holds the sum of its shard after the optimizer has waited for it"


class GradientBucket:
    """Gradients that travel together. The work and the memory that it uses live side by side.

    flat: (padded content or content + vote,) local gradients. shard: (n,) reduced, this rank's
    part, in REDUCE_SCATTER mode. missing: gradients that this backward pass still owes.
    """

    def __init__(
        self, plan: BucketPlan, parameters: Sequence[torch.nn.Parameter], group: Group
    ) -> None:
        first = parameters[plan.spans[0][0]]
        self.plan = plan
        self.padded = padded_numel(plan.content, group.size)
        room = max(self.padded, plan.content + vote_numel(group.size, len(parameters)))
        self.flat = torch.zeros(room, dtype=first.dtype, device=first.device)
        self.views = {
            number: self.flat[offset : offset + numel].view_as(parameters[number])
            for number, offset, numel in plan.spans
        }
        self.shard = torch.empty(0, dtype=first.dtype, device=first.device)
        self.missing = len(plan.spans)
        self.work: Work | None = None

    def prepare_shard(self, group: Group) -> None:
        self.shard = self.flat.new_zeros(shard_numel(self.plan.content, group.size))


class Reducer:
    """The gradients of one model on one rank.

    parameters: those that require gradients, in the order of registration; same on all ranks.
    on_agreement: called with each step's agreement in ALL_REDUCE mode; returns the divisor.
    has_next: asked when a vote is written.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        group: Group,
        bucket_bytes: int,
        *,
        on_agreement: Callable[[Agreement], float],
        has_next: Callable[[], bool],
    ) -> None:
        self.parameters = list(parameters)
        self.group = group
        self.mode = Mode.ALL_REDUCE
        self.is_syncing = True
        """Whether the coming backward pass launches the buckets; `no_sync` switches it off."""
        self.is_live = False
        """Whether what was launched last held gradients of this rank's own data."""
        self.weight: float | None = None
        """Sum of the weights of the losses since the last step; None where nobody weighs."""
        self.ends_steps = True
        """Whether a step is over with its agreement here; not where a sharded optimizer votes."""
        self.clock: StepClock | None = None
        """Times the steps and tells what has no gradient; there at debug level INFO and above."""
        self.unused: UnusedParameters | None = None
        self._on_agreement = on_agreement
        self._has_next = has_next
        plans = plan_buckets(
            [p.numel() for p in self.parameters],
            [(p.dtype, p.device) for p in self.parameters],
            [p.element_size() for p in self.parameters],
            bucket_bytes=bucket_bytes,
            first_bucket_bytes=min(FIRST_BUCKET_BYTES, bucket_bytes),
        )
        self.buckets = [GradientBucket(plan, self.parameters, group) for plan in plans]
        self._home = {
            number: (bucket, bucket.views[number])
            for bucket in self.buckets
            for number in bucket.views
        }
        last = self.buckets[-1]
        numel = vote_numel(group.size, len(self.parameters))
        self._vote_rides = last.flat.dtype in (torch.float32, torch.float64)
        self._vote = (
            last.flat[last.plan.content : last.plan.content + numel]
            if self._vote_rides
            else torch.zeros(numel, dtype=torch.float32, device=last.flat.device)
        )
        self._vote_work: Work | None = None
        self._in_backward = False
        self._num_launched = 0
        self._has_leftover = False  # gradients were accumulated under no_sync and not sent yet
        self._arrived: set[int] = set()
        for number, parameter in enumerate(self.parameters):
            parameter.register_post_accumulate_grad_hook(partial(self._on_gradient, number))

    # -- the backward pass ---------------------------------------------------------------------

    def _on_gradient(self, number: int, parameter: torch.Tensor) -> None:
        bucket, view = self._home[number]
        gradient = parameter.grad
        assert gradient is not None
        if gradient.layout is not torch.strided:
            raise ValueError(
                f"parameter {number} of shape {tuple(parameter.shape)} has a {gradient.layout} "
                "gradient; only dense gradients are reduced (for nn.Embedding: sparse=False)"
            )
        if gradient.data_ptr() != view.data_ptr():
            view.copy_(gradient)
            parameter.grad = view
        if not self.is_syncing:
            self._has_leftover = True
            return
        if not self._in_backward:
            self._begin_backward()
        self._arrived.add(number)
        bucket.missing -= 1
        if bucket.missing == 0:
            self._launch_complete_buckets()

    def _begin_backward(self) -> None:
        self._in_backward = True
        self._begin_launching()
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _begin_launching(self) -> None:
        self._num_launched = 0
        self._arrived.clear()
        for bucket in self.buckets:
            bucket.missing = len(bucket.plan.spans)

    def _end_backward(self) -> None:
        """Send what is left; parameters outside this backward pass contribute what they hold."""
        self._in_backward = False
        self.is_live = True
        if self.clock is not None:
            self.clock.backward_ended()
        if self.unused is not None:
            self.unused.tell([number in self._arrived for number in range(len(self.parameters))])
        for number, parameter in enumerate(self.parameters):
            if number not in self._arrived and parameter.grad is None:
                self._home[number][1].zero_()
        self._launch_rest()
        self._has_leftover = False
        if self.mode is Mode.ALL_REDUCE:
            self._finish_all_reduce()

    def _launch_complete_buckets(self) -> None:
        while self._num_launched < len(self.buckets):
            bucket = self.buckets[self._num_launched]
            carries_vote = self.mode is Mode.ALL_REDUCE and bucket is self.buckets[-1]
            # The vote says which parameters were used: known when the backward pass has ended.
            if bucket.missing or carries_vote:
                return
            self._launch(bucket)

    def _launch_rest(self) -> None:
        if self.mode is Mode.ALL_REDUCE:
            self._write_vote(self._vote, self._has_next())
        for bucket in self.buckets[self._num_launched :]:
            self._launch(bucket)
        if self.mode is Mode.ALL_REDUCE and not self._vote_rides:
            self._vote_work = self.group.all_reduce(self._vote)

    def _launch(self, bucket: GradientBucket) -> None:
        self._num_launched += 1
        if self.mode is Mode.REDUCE_SCATTER:
            bucket.work = self.group.reduce_scatter(bucket.shard, bucket.flat[: bucket.padded])
        else:
            rider = len(self._vote) if self._vote_rides and bucket is self.buckets[-1] else 0
            bucket.work = self.group.all_reduce(bucket.flat[: bucket.plan.content + rider])

    def _write_vote(self, vote: torch.Tensor, has_next: bool) -> None:
        write_vote(
            vote,
            self.group.rank,
            self.group.size,
            live=self.is_live,
            has_next=has_next,
            used=self.local_usage(),
            weight=self.weight,
            stop=boundary().steps.stop_is_wanted,
        )

    def local_usage(self) -> list[bool]:
        """Per parameter, whether this rank holds a gradient for it."""
        return [parameter.grad is not None for parameter in self.parameters]

    def _finish_all_reduce(self) -> None:
        self.wait()
        if self._vote_work is not None:
            self._vote_work.wait()
        agreement = read_agreement(self._vote, self.group.size)
        self.weight = None
        divisor = self._on_agreement(agreement)
        boundary().step_agreed(agreement, self.group, ends_step=self.ends_steps)
        if divisor not in (0, 1):
            for bucket in self.buckets:
                bucket.flat[: bucket.plan.content].div_(divisor)
        for number, parameter in enumerate(self.parameters):
            # Who has no gradient on any rank keeps none: an optimizer must not step it.
            parameter.grad = self._home[number][1] if agreement.used[number] else None
        if self.ends_steps:
            kept().end_applying()

    def wait(self) -> None:
        """Block until all launched buckets are reduced."""
        operations = [bucket.work.operation for bucket in self.buckets if bucket.work is not None]
        began_at = time.monotonic()
        for bucket in self.buckets:
            if bucket.work is not None:
                bucket.work.wait()
                bucket.work = None
        if self.clock is not None and operations:
            self.clock.buckets_are_reduced(operations, time.monotonic() - began_at)

    # -- other ways through a step -------------------------------------------------------------

    def reduce_by_shards(self) -> None:
        """From now on REDUCE_SCATTER: an optimizer takes over the second half of the step."""
        self.mode = Mode.REDUCE_SCATTER
        for bucket in self.buckets:
            bucket.prepare_shard(self.group)

    @property
    def has_launched(self) -> bool:
        """Whether reduced gradients are there, or on the way, for a step."""
        return self._num_launched == len(self.buckets)

    def end_step(self) -> None:
        """The optimizer has used what was reduced."""
        self._num_launched = 0
        self.weight = None

    def move_to(self, group: Group) -> None:
        """Go on in a group of the same ranks, at the beginning of a step, without gradients."""
        self.group = group
        self.is_syncing = True
        self.is_live = False
        self._in_backward = False
        self._has_leftover = False
        self._vote_work = None
        for bucket in self.buckets:
            bucket.work = None
        for parameter in self.parameters:
            parameter.grad = None
        self.end_step()

    def shadow(self) -> None:
        """Take part in one step of other ranks: with what was accumulated and never sent, then
        with zeros. As after a backward pass, `.grad` holds the result."""
        self.is_live = self._has_leftover
        for number, (_, view) in self._home.items():
            if not self._has_leftover or self.parameters[number].grad is None:
                view.zero_()
        self._begin_launching()
        self._launch_rest()
        self._has_leftover = False
        if self.mode is Mode.ALL_REDUCE:
            self._finish_all_reduce()
