"""A model in the steps of `ctx.steps`.

(1) Backward passes only add up in the buckets; at the end of each micro-batch its gradient is
    added to the sums of this rank (gradients/micro_batch_sums.py).
(2) At the end of the step the sums go to the owners of the shards: beside the meeting of the
    ranks, if theirs is the only model. A sharded optimizer takes its shard, and holds its
    ballot; else all ranks gather the whole gradient, and vote.
(3) `.grad` holds the mean, or with a sharded optimizer nothing that the program may use.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Protocol

import torch

from chorusline.collectives.operations.host_reads import device_numbers

from ..partition.shards import padded_numel, shard_numel
from ..process.micro_batches import StepPlan
from .buffers import StepBuffers
from .gradients.micro_batch_sums import MicroBatchSums, SumPhase
from .gradients.reducer import Reducer
from .sync_batch_norm import SyncBatchNorm


class StepEnder(Protocol):
    """A sharded optimizer, which ends the steps of its model."""

    def begin_summed_step(self) -> None:
        """A step begins."""

    def end_summed_step(self) -> None:
        """Sum over all ranks, and hold the ballot."""

    @property
    def can_wait(self) -> bool: ...

    def wait_for_next_generation(self, error: BaseException) -> bool: ...


class ModelSteps:
    """One model in the steps of `ctx.steps`, on one rank (process/micro_batches.py, SummableModel).

    ender: the sharded optimizer of the model, if there is one.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        reducer: Reducer,
        on_begin: Callable[[], None],
        *,
        buffers_travel: bool,
    ) -> None:
        """on_begin: called on all ranks when a step begins. buffers_travel: whether all ranks get
        the buffers of one."""
        self.ender: StepEnder | None = None  # None: no optimizer in shards
        self.plan: StepPlan | None = None  # None: in no step of ctx.steps
        self.divisor = 1.0
        """The sum of the step is divided by it."""
        self.buffers = StepBuffers(module)
        self._module = module
        self._reducer = reducer
        self._sums = MicroBatchSums(reducer.gradients)
        self._on_begin = on_begin
        self._buffers_travel = buffers_travel
        self._takes_part = False
        """Whether a micro-batch of the step uses the model: other models do as they always do."""
        self._is_open = False
        """Whether a micro-batch is under way."""
        self._passed: list[int] = []
        """The micro-batches of this rank that did not use the model, before one that did."""
        self._shards: list[torch.Tensor] = []

    @property
    def is_under_way(self) -> bool:
        """Whether the model takes part in a step of `ctx.steps`."""
        return self.plan is not None and self._takes_part

    @property
    def signature(self) -> str:
        gradients = self._reducer.gradients
        shapes = [tuple(parameter.shape) for parameter in gradients.parameters]
        text = "/".join(f"{n}{s}" for n, s in zip(gradients.names, shapes, strict=True))
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def used(self) -> list[bool]:
        return self._sums.used

    @property
    def weight(self) -> float | None:
        return self._reducer.held.taken_weight if self._takes_part else None

    @property
    def has_gradient(self) -> bool:
        return self._takes_part and any(self._sums.used)

    @property
    def buffers_have_changed(self) -> bool:
        return self._takes_part and self.buffers.have_changed

    def send_buffers(self, root: int) -> None:
        self._take_part()
        self.buffers.send(root, self._reducer.group)

    @property
    def can_wait(self) -> bool:
        return self.ender is not None and self.ender.can_wait

    def why_not_summed(self) -> str:
        # It would reduce what the tree adds in an order of its own.
        if self._reducer.hook is not None:
            return (
                f"the communication hook {self._reducer.hook.name} reduces its gradients; leave "
                "the hook out"
            )
        norms = (SyncBatchNorm, torch.nn.SyncBatchNorm)
        if any(isinstance(layer, norms) and layer.training for layer in self._module.modules()):
            return (
                "its SyncBatchNorm would wait for statistics of ranks that have fewer "
                "micro-batches. Leave the layers as BatchNorm, which then normalise over a "
                "micro-batch, or use GroupNorm"
            )
        if not self._buffers_travel and any(True for _ in self._module.buffers()):
            return (
                "it has broadcast_buffers=False, and the buffers of a rank would depend on which "
                "micro-batches it computes; leave broadcast_buffers out"
            )
        return ""

    def begin_step(self, plan: StepPlan) -> None:
        self.leave_steps()  # Where the last step was left by an error.
        self.plan, self._passed = plan, []
        self._on_begin()
        if self.ender is not None:
            self.ender.begin_summed_step()

    def begin_forward(self) -> None:
        """A forward pass with gradients begins. In a micro-batch the model takes part in the step.

        Raises RuntimeError if it cannot."""
        if self._is_open and not self._takes_part:
            if why := self.why_not_summed():
                raise RuntimeError(f"a model cannot take the steps of ctx.steps: {why}")
            self._take_part()

    def _take_part(self) -> None:
        """From here on, if not before: a rank may end a step of which it has no micro-batch, or
        none that uses the model."""
        if self._takes_part:
            return
        assert self.plan is not None
        self._reducer.check_stepped()
        self._takes_part = True
        self._reducer.summing = SumPhase.ADDING
        self._reducer.weight = None
        self._sums.begin_step(self.plan)
        self.buffers.begin_step()
        for number in self._passed:  # As micro-batches later on that do not use the model: zeros.
            self._sums.begin_micro_batch()
            self._sums.end_micro_batch(number, self.plan.shares[number])
        if self._is_open:
            self._sums.begin_micro_batch()

    def begin_micro_batch(self) -> None:
        self._is_open = True
        if self._takes_part:
            # Each micro-batch has a weight of its own, as each loss has.
            self._reducer.weight = None
            self._sums.begin_micro_batch()
            self.buffers.begin_micro_batch()
        else:
            self._reducer.summing = SumPhase.OPEN

    def end_micro_batch(self, number: int) -> None:
        assert self.plan is not None
        self._is_open = False
        if not self._takes_part:
            self._reducer.summing = SumPhase.NO
            self._passed.append(number)
            return
        # Weights say how much a loss counts, even in a micro-batch that is smaller than the others.
        share = 1.0 if self.weight is not None else self.plan.shares[number]
        self._sums.end_micro_batch(number, share)
        if number == self.plan.num_micro_batches - 1:
            self.buffers.end_last()

    def launch(self) -> None:
        self._take_part()
        self._sums.launch(self._reducer.group, self._outs())

    def _outs(self) -> list[torch.Tensor]:
        """Where this rank's part of the sums comes to."""
        buckets, size = self._reducer.buckets, self._reducer.group.size
        if self.ender is not None:
            return [bucket.shard for bucket in buckets]
        lengths = [shard_numel(bucket.plan.content, size) for bucket in buckets]
        # Made again only when the buckets or the number of ranks have changed.
        if [shard.numel() for shard in self._shards] != lengths:
            self._shards = [
                bucket.flat.new_empty(n) for bucket, n in zip(buckets, lengths, strict=True)
            ]
        return self._shards

    def reduce_shards(self, *, on_host: bool = False) -> None:
        """Return when this rank's shard of the sum of each bucket is there. on_host: also on a
        GPU, return or raise when it is known how that has ended."""
        # Of several models none could be launched before all ranks knew which take part.
        if not self._sums.is_launched:
            self.launch()
        self._sums.wait(on_host=on_host)

    def end_step(self, divisor: float) -> None:
        self.divisor = divisor
        self._take_part()
        if self.ender is not None:
            self.ender.end_summed_step()
        else:
            self._reduce_whole()
        self._reducer.summing = SumPhase.ENDED

    def _reduce_whole(self) -> None:
        reducer, group = self._reducer, self._reducer.group
        self.reduce_shards()
        works = [
            group.all_gather(bucket.flat[: padded_numel(bucket.plan.content, group.size)], shard)
            for bucket, shard in zip(reducer.buckets, self._shards, strict=True)
        ]
        vote = device_numbers(reducer.vote_of_sums(self._sums.used), torch.float64, group.device)
        reading = group.all_reduce_and_read(vote)
        for work in works:
            work.wait()
        reducer.conclude_sums(reading.tolist(), self.divisor)

    def leave_steps(self) -> None:
        self.plan, self._takes_part, self._is_open = None, False, False
        self._reducer.summing = SumPhase.NO
        self._reducer.gradients.lead_home()

    def wait_for_next_generation(self, error: BaseException) -> bool:
        assert self.ender is not None
        # The works of the ended generation have failed; the sums that they sent are kept.
        self._sums.forget_launch()
        is_agreed = self.ender.wait_for_next_generation(error)
        if is_agreed:
            self._reducer.summing = SumPhase.ENDED
        return is_agreed
