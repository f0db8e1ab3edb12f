"""The three ways in which the buckets of a model are reduced: one small class for each.

AllReduce      every rank gets the sum of all gradients; any optimizer can step. The step's vote
               (agreement.py) travels after the content of the last bucket if the dtype of the
               bucket can count ranks; else it is reduced alone. A bucket of float16 gets the mean,
               as its sum may overflow.
ByHook         as AllReduce, but a communication hook (comm_hooks.py) reduces the buckets. The
               vote is sent after all buckets are done: the hook may issue collectives until then.
ReduceScatter  every rank gets the sum for its shard only, out of place: the local buckets are
               kept until the step is over. There is no vote here: the optimizer that owns the
               shards finishes the step, and holds a ballot on it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from chorusline.collectives.contract.operation import ReduceOp
from chorusline.collectives.group import Group
from chorusline.collectives.operations.host_reads import Reading, device_numbers, host_numbers

from .comm_hooks import CommHook, GradBucket
from .gradient_bucket import GradientBucket

_COUNTING = (torch.float32, torch.float64)
"""Dtypes whose sums count ranks and samples exactly; bfloat16 stops at 256."""


class Reduction(ABC):
    """How the buckets of one model are reduced.

    hook: the communication hook that reduces them; None: none does.
    votes: whether the step is voted on here, and not in the ballot of an optimizer.
    carrier: the bucket that carries the vote after its content; None: the vote travels by itself.
    """

    hook: CommHook | None = None
    votes = True
    carrier: GradientBucket | None = None

    def adopt(self, fresh: Sequence[GradientBucket], group: Group) -> None:
        """Prepare new buckets for this kind of reduction."""

    def place_vote(self, last: GradientBucket, numel: int) -> None:
        """Place the vote again, between two steps, for a new last bucket or a new vote length."""

    @abstractmethod
    def launch(self, bucket: GradientBucket, number: int, group: Group) -> None:
        """Begin to reduce a bucket. All ranks launch them in the order of their numbers."""

    def take_vote(self, vote: Sequence[float]) -> None:
        """This rank's vote (vote_numel), before the last bucket is launched."""

    def launch_vote(self, group: Group) -> None:
        """Called when the vote is taken and all buckets are launched."""

    def finish(self, buckets: Sequence[GradientBucket], group: Group) -> list[float]:
        """Block until the buckets hold the sums over all ranks; returns the sum of the votes. The
        caller has waited for the works of the buckets."""
        return []

    def divide(
        self, buckets: Sequence[GradientBucket], divisor: float, launched_by: int = 1
    ) -> None:
        """Divide the sums to get means.

        divisor: 0 where no rank was live: no gradient counts.
        launched_by: the number of ranks, if the sums are those that `launch` has begun."""


class AllReduce(Reduction):
    """Every rank gets the whole sum of every bucket, in place."""

    def __init__(self) -> None:
        self._vote = torch.empty(0)
        self._reading: Reading | None = None  # None: no vote is in flight

    def place_vote(self, last: GradientBucket, numel: int) -> None:
        self._reading = None
        if last.flat.dtype in _COUNTING:
            self.carrier = last
            self._vote = last.flat[last.plan.content : last.plan.content + numel]
        else:
            self.carrier = None
            self._vote = torch.zeros(numel, dtype=torch.float32, device=last.flat.device)

    def take_vote(self, vote: Sequence[float]) -> None:
        numbers = host_numbers(vote, self._vote.dtype, self._vote.device)
        self._vote.copy_(numbers, non_blocking=True)

    def launch(self, bucket: GradientBucket, number: int, group: Group) -> None:
        if bucket is self.carrier:
            whole = bucket.flat[: bucket.plan.content + self._vote.numel()]
            self._reading = group.all_reduce_and_read(whole, self._vote)
            bucket.work = self._reading.work
        else:
            op = ReduceOp.AVG if _overflows(bucket) else ReduceOp.SUM
            bucket.work = group.all_reduce(bucket.flat[: bucket.plan.content], op)

    def launch_vote(self, group: Group) -> None:
        if self.carrier is None:
            self._reading = group.all_reduce_and_read(self._vote)

    def finish(self, buckets: Sequence[GradientBucket], group: Group) -> list[float]:
        reading, self._reading = self._reading, None
        assert reading is not None
        return reading.tolist()

    def divide(
        self, buckets: Sequence[GradientBucket], divisor: float, launched_by: int = 1
    ) -> None:
        for bucket in buckets:
            rest = divisor / launched_by if _overflows(bucket) else divisor
            if rest not in (0, 1):
                bucket.flat[: bucket.plan.content].div_(rest)


def _overflows(bucket: GradientBucket) -> bool:
    """Whether a sum of gradients may be too large for their dtype, and their mean is not."""
    return bucket.flat.dtype is torch.float16


class ByHook(Reduction):
    """A communication hook reduces the buckets, and divides the sums itself.

    parameters: of the model, by number; parameters that become trainable later are appended to it.
    """

    hook: CommHook

    def __init__(self, hook: CommHook, parameters: Sequence[torch.nn.Parameter]) -> None:
        self.hook = hook
        self._parameters = parameters
        self._last: GradientBucket | None = None  # None: before the vote has a place
        self._vote: Sequence[float] = ()

    def place_vote(self, last: GradientBucket, numel: int) -> None:
        self._last = last

    def take_vote(self, vote: Sequence[float]) -> None:
        self._vote = vote

    def launch(self, bucket: GradientBucket, number: int, group: Group) -> None:
        is_last = bucket is self._last
        bucket.future = self.hook.launch(
            GradBucket(number, bucket.content(), bucket.plan.spans, self._parameters, is_last)
        )

    def finish(self, buckets: Sequence[GradientBucket], group: Group) -> list[float]:
        for bucket in buckets:
            assert bucket.future is not None
            future, bucket.future = bucket.future, None
            self.hook.finish(future, bucket.flat[: bucket.plan.content], group)
        vote = device_numbers(self._vote, torch.float32, group.device)
        return group.all_reduce_and_read(vote).tolist()


class ReduceScatter(Reduction):
    """Each rank gets the sum for its shard of a bucket; its optimizer divides the sum."""

    votes = False

    def adopt(self, fresh: Sequence[GradientBucket], group: Group) -> None:
        for bucket in fresh:
            bucket.prepare_shard(group)

    def launch(self, bucket: GradientBucket, number: int, group: Group) -> None:
        bucket.work = group.reduce_scatter(bucket.shard, bucket.flat[: bucket.padded])


def why_not_sharded(hook: str) -> str:
    return (
        f"the communication hook {hook} gives every rank the whole gradient, but with a "
        "ZeroRedundancyOptimizer each rank receives the sum for its own shard only, so that "
        "gradients travel once. Use a plain optimizer with the hook, or leave the hook out. To "
        "send half as much, keep the parameters in bfloat16: the optimizer steps float32 copies"
    )
