"""Brings the gradients of all ranks together while the backward pass still runs.

Gradients live in flat buckets; a parameter's `.grad` is a view of its bucket. When the backward
pass has made the last gradient of a bucket, the bucket is launched, in the same order on all
ranks, and the network works while the pass goes on.

    ALL_REDUCE      every rank gets the mean of all gradients; any optimizer can step.
    REDUCE_SCATTER  every rank gets the sum for its shard only, out of place: the local buckets are
                    kept until the step is over. The optimizer that owns the shards finishes it.

In ALL_REDUCE mode the step's agreement (agreement.py) rides behind the content of the last bucket
if that is float32 or float64, and goes on its own otherwise. With a communication hook
(comm_hooks.py), which reduces the buckets in its own way, it goes when all of them are there: the
hook may issue collectives until then.

Buckets are laid out anew once, in the order in which gradients came: that of the lowest rank that
took the first step, which a broadcast gives to all, so it cannot differ between them. In
REDUCE_SCATTER mode it stays as it was when the optimizer cut its shards.
"""

from __future__ import annotations

import enum
import itertools
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch.utils.hooks import RemovableHandle

from actors.errors import ends_a_generation
from collectives import CollectiveError, Group, Work

from ..partition.buckets import plan_buckets
from ..process.agreement import MAX_ITERATIONS, Agreement, read_agreement, vote_numel, write_vote
from ..process.between_runs import between_runs
from ..process.step_boundary import boundary
from .comm_hooks import CommHook, GradBucket
from .gradient_bucket import GradientBucket
from .step_statistics import StepClock, UnusedParameters

FIRST_BUCKET_BYTES = 1 << 20
_launch_numbers = itertools.count()


def why_not_sharded(hook: str) -> str:
    return (
        f"the communication hook {hook} gives every rank the whole gradient, and a "
        "ZeroRedundancyOptimizer has each rank receive the sum for its own shard only, so that "
        "gradients travel once. Take a plain optimizer with the hook; or leave the hook out, and "
        "to send half as much keep the parameters in bfloat16: the optimizer steps float32 copies"
    )


class Mode(enum.Enum):
    ALL_REDUCE = "all ranks hold the mean of the whole gradient after backward"
    REDUCE_SCATTER = "each rank holds the sum of its shard after the optimizer has waited for it"


class Reducer:
    """The gradients of one model on one rank.

    named: names and parameters of those that require gradients, in the order of registration; same
    on all ranks.
    has_repeats: a parameter may get several gradients in one backward pass, the same number in each
    pass (`static_graph`).
    on_backward_end: called when a backward pass that is sent has ended, before anything is waited
    for. on_agreement: called with each step's agreement in ALL_REDUCE mode; returns the divisor.
    has_next, cursors: asked when a vote is written; cursors None where no samples are told.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, torch.nn.Parameter]],
        group: Group,
        bucket_bytes: int,
        *,
        has_repeats: bool = False,
        on_backward_end: Callable[[], None],
        on_agreement: Callable[[Agreement], float],
        has_next: Callable[[], bool],
        cursors: Callable[[], Sequence[int]] | None = None,
    ) -> None:
        self.names: list[str] = []
        """Of the parameters, as they are numbered."""
        self.parameters: list[torch.nn.Parameter] = []
        self.group = group
        self.mode = Mode.ALL_REDUCE
        self.is_syncing = True
        """Whether the coming backward pass launches the buckets; `no_sync` switches it off."""
        self.launches_early = True
        """Whether buckets are launched while the backward pass still runs."""
        self.is_live = False
        """Whether what was launched last held gradients of this rank's own data."""
        self.weight: float | None = None
        """Sum of the weights of the losses since the last step; None where nobody weighs."""
        self.ends_steps = True
        """Whether a step is over with its agreement here; not where a sharded optimizer votes."""
        self.parks = False
        """Whether a launch that fails because the generation is over is kept for `wait` to raise:
        then the optimizer's step can begin again in the next generation."""
        self.clock: StepClock | None = None
        """Times the steps and tells what has no gradient; there at debug level INFO and above."""
        self.unused: UnusedParameters | None = None
        self.on_launched: Callable[[int], None] | None = None
        """Called with the number of each bucket that a pass launched in REDUCE_SCATTER mode."""
        self.on_new_order: Callable[[], None] | None = None
        """Called when the buckets have been laid out in the order that was measured."""
        self.order: list[int] = []
        """Numbers of the parameters in the order in which their gradients are expected."""
        self.hook: CommHook | None = None
        """What reduces the buckets instead, in ALL_REDUCE mode."""
        self._on_backward_end = on_backward_end
        self._on_agreement = on_agreement
        self._has_next = has_next
        self._cursors = cursors
        self._bucket_bytes = bucket_bytes
        self.buckets: list[GradientBucket] = []
        self._home: dict[int, tuple[GradientBucket, torch.Tensor]] = {}
        self._vote_work: Work | None = None
        self._failure: CollectiveError | None = None
        self._has_repeats = has_repeats
        self._expected: dict[int, int] | None = None  # gradients per pass, where there are repeats
        self._in_backward = False
        self._sees_end = False
        self._num_launched = 0
        self.num_passes = 0
        """Backward passes, and shadowed steps, that have sent gradients."""
        self._has_leftover = False  # gradients were accumulated under no_sync and not sent yet
        # Gradients of this pass by parameter; in the order of the last ones.
        self._arrivals: dict[int, int] = {}
        self._watches: list[RemovableHandle] = []
        self.add_parameters(named)

    def add_parameters(
        self, named: Sequence[tuple[str, torch.nn.Parameter]]
    ) -> list[GradientBucket]:
        """Reduce these too, from now on; called alike on all ranks. Returns their buckets.

        Those go behind the others: what is made trainable later is mostly what lies deeper. Between
        a backward pass and the sharded step that it is for, what the parameters hold is sent too.
        """
        is_in_step = bool(self.buckets) and self.has_launched and self.mode is Mode.REDUCE_SCATTER
        before = len(self.parameters)
        self.names += [name for name, _ in named]
        self.parameters += [parameter for _, parameter in named]
        added = range(before, len(self.parameters))
        self.order += reversed(added)
        fresh = self._buckets_for(list(added), None)
        self.buckets += fresh
        for bucket in fresh:
            if self.mode is Mode.REDUCE_SCATTER:
                bucket.prepare_shard(self.group)
            self._take_home(bucket)
        for number in added:
            parameter = self.parameters[number]
            watch = parameter.register_post_accumulate_grad_hook(partial(self._on_gradient, number))
            self._watches.append(watch)
        self._place_vote()
        self._has_measured_order = len(self.buckets) == 1  # Then there is nothing to gain.
        for bucket in fresh if is_in_step else ():
            self._num_launched += 1
            self._reduce_scatter(bucket)
        return fresh

    def lay_out(self, order: Sequence[int]) -> None:
        """Make all buckets anew for gradients that come in this order, equal on all ranks.
        Gradients that are there move; between steps only, and never once shards are cut."""
        self.order = list(order)
        self.buckets = self._buckets_for(list(range(len(self.parameters))), order)
        for bucket in self.buckets:
            self._take_home(bucket)
        self._place_vote()

    def _buckets_for(self, numbers: list[int], order: Sequence[int] | None) -> list[GradientBucket]:
        """numbers: consecutive ones. order: of them all, from 0; None: reversed."""
        parameters = [self.parameters[number] for number in numbers]
        plans = plan_buckets(
            [p.numel() for p in parameters],
            [(p.dtype, p.device) for p in parameters],
            [p.element_size() for p in parameters],
            bucket_bytes=self._bucket_bytes,
            first_bucket_bytes=min(FIRST_BUCKET_BYTES, self._bucket_bytes),
            order=order,
        )
        return [
            GradientBucket(
                plan.numbered_from(numbers[0]), self.parameters, self.group, self._vote_numel()
            )
            for plan in plans
        ]

    def _take_home(self, bucket: GradientBucket) -> None:
        for number, view in bucket.views.items():
            self._home[number] = (bucket, view)
            parameter = self.parameters[number]
            if parameter.grad is not None and parameter.grad.layout is torch.strided:
                view.copy_(parameter.grad)
                parameter.grad = view

    def _vote_numel(self) -> int:
        return vote_numel(self.group.size, len(self.parameters), self._num_cursors)

    @property
    def _num_cursors(self) -> int:
        return MAX_ITERATIONS if self._cursors is not None else 0

    def _place_vote(self) -> None:
        last = self.buckets[-1]
        numel = self._vote_numel()
        counts = last.flat.dtype in (torch.float32, torch.float64)
        self._vote_rides = counts and self.hook is None
        self._vote = (
            last.flat[last.plan.content : last.plan.content + numel]
            if self._vote_rides
            else torch.zeros(numel, dtype=torch.float32, device=last.flat.device)
        )

    # -- the backward pass ---------------------------------------------------------------------

    def output_has_gradient(self) -> None:
        """A backward pass has come to the model's output: the pass whose end counts. Parameters
        may get their gradients in passes inside it, one for each checkpointed segment."""
        if self.is_syncing and not self._sees_end:
            self._see_end()

    def _see_end(self) -> None:
        self._sees_end = True
        torch.autograd.Variable._execution_engine.queue_callback(self._pass_ended)

    def _pass_ended(self) -> None:
        self._sees_end = False
        if self._in_backward:  # Else it was for gradients of something else than parameters.
            self._end_backward()

    def _on_gradient(self, number: int, parameter: torch.Tensor) -> None:
        bucket, view = self._home[number]
        gradient = parameter.grad
        assert gradient is not None
        if gradient.layout is not torch.strided:
            raise ValueError(
                f"parameter {self.names[number]} of shape {tuple(parameter.shape)} has a "
                f"{gradient.layout} gradient; only dense gradients are reduced (for nn.Embedding: "
                "sparse=False)"
            )
        if gradient.data_ptr() != view.data_ptr():
            view.copy_(gradient)
            parameter.grad = view
        if not self.is_syncing:
            self._has_leftover = True
            return
        if not self._in_backward:
            self._begin_backward()
        so_far = self._arrivals.pop(number, 0)
        self._arrivals[number] = so_far + 1
        if so_far < self._num_expected(number):
            bucket.missing -= 1
        elif self._is_launched(bucket):
            raise RuntimeError(
                f"parameter {self.names[number]} of shape {tuple(parameter.shape)} got another "
                "gradient in the same backward pass after its bucket was sent: it is used in "
                "several checkpointed segments. Checkpoint with use_reentrant=False, or pass "
                "static_graph=True, which waits for all of them"
            )
        if bucket.missing == 0:
            self._launch_complete_buckets()

    def _num_expected(self, number: int) -> int:
        if self._is_frozen(number):
            return 0
        return self._expected.get(number, 1) if self._expected else 1

    def _is_frozen(self, number: int) -> bool:
        return not self.parameters[number].requires_grad

    def _is_launched(self, bucket: GradientBucket) -> bool:
        return bucket in self.buckets[: self._num_launched]

    def _begin_backward(self) -> None:
        self._in_backward = True
        self.is_live = True
        self._begin_launching()
        if not self._sees_end:
            self._see_end()

    def _begin_launching(self) -> None:
        self.num_passes += 1
        self._num_launched = 0
        self._arrivals.clear()
        for bucket in self.buckets:
            bucket.missing = sum(self._num_expected(number) for number in bucket.views)
            for number, view in bucket.views.items():
                # Now, because a bucket may be on its way when the pass ends.
                if self._is_frozen(number) and self.parameters[number].grad is None:
                    view.zero_()

    def _end_backward(self) -> None:
        """Send what is left; parameters outside this backward pass contribute what they hold."""
        self._in_backward = False
        if self._has_repeats and self._expected is None:
            self._expected = dict(self._arrivals)
        self._on_backward_end()
        if self.clock is not None:
            self.clock.backward_ended()
        if self.unused is not None:
            self.unused.tell([number in self._arrivals for number in range(len(self.parameters))])
        for bucket in self.buckets[self._num_launched :]:
            for number, view in bucket.views.items():
                if number not in self._arrivals and self.parameters[number].grad is None:
                    view.zero_()
        self._launch_rest()
        self._has_leftover = False
        if self.mode is Mode.ALL_REDUCE:
            self._finish_all_reduce()

    def _launch_complete_buckets(self) -> None:
        if not self.launches_early or (self._has_repeats and self._expected is None):
            return
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
        if self.mode is Mode.ALL_REDUCE and not self._vote_rides and self.hook is None:
            self._vote_work = self.group.all_reduce(self._vote)

    def _launch(self, bucket: GradientBucket) -> None:
        self._num_launched += 1
        bucket.launch_number = next(_launch_numbers)
        if self.mode is Mode.REDUCE_SCATTER:
            try:
                self._reduce_scatter(bucket)
            except CollectiveError as error:
                if not self.parks or not ends_a_generation(error):
                    raise
                self._failure = error
            if self.on_launched is not None:
                self.on_launched(self._num_launched - 1)
        elif self.hook is not None:
            index = self._num_launched - 1
            is_last = self._num_launched == len(self.buckets)
            bucket.future = self.hook.launch(
                GradBucket(index, bucket.content(), bucket.plan.spans, self.parameters, is_last)
            )
        else:
            rider = len(self._vote) if self._vote_rides and bucket is self.buckets[-1] else 0
            bucket.work = self.group.all_reduce(bucket.flat[: bucket.plan.content + rider])

    def _reduce_scatter(self, bucket: GradientBucket) -> None:
        bucket.work = self.group.reduce_scatter(bucket.shard, bucket.flat[: bucket.padded])

    def _write_vote(self, vote: torch.Tensor, has_next: bool) -> None:
        cursors = list(self._cursors()) if self._cursors is not None else []
        write_vote(
            vote,
            self.group.rank,
            self.group.size,
            live=self.is_live,
            has_next=has_next,
            used=self.local_usage(),
            weight=self.weight,
            stop=boundary().steps.stop_is_wanted,
            cursors=cursors + [0] * (self._num_cursors - len(cursors)),
        )

    def local_usage(self) -> list[bool]:
        """Per parameter, whether this rank holds a gradient for it."""
        return [parameter.grad is not None for parameter in self.parameters]

    def _finish_all_reduce(self) -> None:
        self.wait()
        if self.hook is not None:
            for bucket in self.buckets:
                assert bucket.future is not None
                future, bucket.future = bucket.future, None
                self.hook.finish(future, bucket.flat[: bucket.plan.content], self.group)
            self._vote_work = self.group.all_reduce(self._vote)
        if self._vote_work is not None:
            self._vote_work.wait()
        agreement = read_agreement(self._vote.tolist(), self.group.size, self._num_cursors)
        self.weight = None
        divisor = self._on_agreement(agreement)
        boundary().step_agreed(agreement, self.group, ends_step=self.ends_steps)
        if divisor not in (0, 1) and self.hook is None:  # Hooks divide themselves.
            for bucket in self.buckets:
                bucket.flat[: bucket.plan.content].div_(divisor)
        for number, parameter in enumerate(self.parameters):
            # Who has no gradient on any rank keeps none: an optimizer must not step it.
            parameter.grad = self._home[number][1] if agreement.used[number] else None
        if agreement.live and not self._has_measured_order:
            self._take_order_of(min(agreement.live))
        if self.ends_steps:
            between_runs().end_applying()

    def _take_order_of(self, rank: int) -> None:
        self._has_measured_order = True
        rest = [number for number in self.order if number not in self._arrivals]
        measured = torch.tensor([*self._arrivals, *rest], dtype=torch.int32).to(self.group.device)
        self.group.broadcast(measured, rank).wait()
        order = measured.tolist()
        if order != self.order:
            self.lay_out(order)
        if self.on_new_order is not None:
            self.on_new_order()

    def wait(self) -> None:
        """Block until all launched buckets are reduced."""
        if self._failure is not None:
            raise self._failure
        operations = [bucket.work.operation for bucket in self.buckets if bucket.work is not None]
        began_at = time.monotonic()
        for bucket in self.buckets:
            if bucket.work is not None:
                bucket.work.wait()
                bucket.work = None
        waited_s = time.monotonic() - began_at
        boundary().steps.waited_s += waited_s
        if self.clock is not None and operations:
            self.clock.buckets_are_reduced(operations, waited_s)

    # -- other ways through a step -------------------------------------------------------------

    def reduce_by(self, hook: CommHook) -> None:
        """From now on `hook` reduces the buckets; between steps, on all ranks."""
        self.hook = hook
        self._place_vote()

    def reduce_by_shards(self) -> None:
        """From now on REDUCE_SCATTER: an optimizer takes over the second half of the step.

        Raises ValueError for gradients that a communication hook reduces.
        """
        if self.hook is not None:
            raise ValueError(why_not_sharded(self.hook.name))
        self.mode = Mode.REDUCE_SCATTER
        for bucket in self.buckets:
            bucket.prepare_shard(self.group)

    def tell_no_samples(self) -> None:
        """From now on no vote says how many samples were taken; between steps, on all ranks."""
        if self._cursors is not None:
            self._cursors = None
            self._place_vote()

    def release(self) -> None:
        """Take no notice of gradients any more."""
        for watch in self._watches:
            watch.remove()

    def change_group(self, group: Group) -> None:
        """The buckets stay as they are, also if they were launched; see `launch_again`."""
        self.group = group
        self._failure = None
        for bucket in self.buckets:
            bucket.change_group(group)
        self._place_vote()

    def kept(self) -> list[GradientBucket]:
        """Buckets that were launched for a sharded step that is not over."""
        is_in_step = self.mode is Mode.REDUCE_SCATTER and self.has_launched
        return self.buckets if is_in_step else []

    def launch_again(self, bucket: GradientBucket) -> None:
        """Reduce a kept bucket once more, in the group that is there now."""
        self._launch(bucket)
        self._num_launched = len(self.buckets)

    @property
    def has_begun(self) -> bool:
        """Whether some bucket of a step is launched."""
        return self._num_launched > 0

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
        self._sees_end = False
        self._arrivals.clear()
        self._has_leftover = False
        self._vote_work = None
        self._failure = None
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
