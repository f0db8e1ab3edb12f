"""The three ways in which the buckets of a model are reduced: one small class for each.

AllReduce      every rank gets the sum of all gradients; any optimizer can step. The step's vote
               (agreement.py) travels behind the content of the last bucket if the dtype of the
               bucket can count ranks; else it is reduced alone.
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

from collectives import Group, Work

from .comm_hooks import CommHook, GradBucket
from .gradient_bucket import GradientBucket

_COUNTING = (torch.float32, torch.float64)
"""Dtypes whose sums count ranks and samples exactly; bfloat16 stops at 256."""


class Reduction(ABC):
    """How the buckets of one model are reduced.

    hook: the communication hook that reduces them, if there is one.
    vote: (vote_numel,) this rank writes its vote here before the last bucket is launched; after
        `finish` it holds the sum of all votes. None where an optimizer holds a ballot instead.
    carrier: the bucket that carries the vote behind its content, if one does.
    """

    hook: CommHook | None = None
    vote: torch.Tensor | None = None
    carrier: GradientBucket | None = None

    def adopt(self, fresh: Sequence[GradientBucket], group: Group) -> None:
        """Prepare new buckets for this kind of reduction."""

    def place_vote(self, last: GradientBucket, numel: int) -> None:
        """Place the vote anew, between two steps, for a new last bucket or a new vote length."""

    @abstractmethod
    def launch(self, bucket: GradientBucket, number: int, group: Group) -> None:
        """Begin to reduce a bucket. All ranks launch them in the order of their numbers."""

    def launch_vote(self, group: Group) -> None:
        """Called when the vote is written and all buckets are launched."""

    def finish(self, buckets: Sequence[GradientBucket], group: Group) -> None:
        """Block until buckets and vote hold the sums over all ranks. The caller has waited for the
        works of the buckets."""

    def divide(self, buckets: Sequence[GradientBucket], divisor: float) -> None:
        """Divide the sums to get means. divisor: 0 where no rank was live: no gradient counts."""


class AllReduce(Reduction):
    """Every rank gets the whole sum of every bucket, in place."""

    vote: torch.Tensor

    def __init__(self) -> None:
        self._vote_work: Work | None = None

    def place_vote(self, last: GradientBucket, numel: int) -> None:
        self._vote_work = None
        if last.flat.dtype in _COUNTING:
            self.carrier = last
            self.vote = last.flat[last.plan.content : last.plan.content + numel]
        else:
            self.carrier = None
            self.vote = torch.zeros(numel, dtype=torch.float32, device=last.flat.device)

    def launch(self, bucket: GradientBucket, number: int, group: Group) -> None:
        rider = self.vote.numel() if bucket is self.carrier else 0
        bucket.work = group.all_reduce(bucket.flat[: bucket.plan.content + rider])

    def launch_vote(self, group: Group) -> None:
        if self.carrier is None:
            self._vote_work = group.all_reduce(self.vote)

    def finish(self, buckets: Sequence[GradientBucket], group: Group) -> None:
        if self._vote_work is not None:
            self._vote_work.wait_on_host()
            self._vote_work = None

    def divide(self, buckets: Sequence[GradientBucket], divisor: float) -> None:
        if divisor not in (0, 1):
            for bucket in buckets:
                bucket.flat[: bucket.plan.content].div_(divisor)


class ByHook(Reduction):
    """A communication hook reduces the buckets, and divides the sums itself.

    parameters: of the model, by number; parameters that become trainable later are appended to it.
    """

    hook: CommHook
    vote: torch.Tensor

    def __init__(self, hook: CommHook, parameters: Sequence[torch.nn.Parameter]) -> None:
        self.hook = hook
        self._parameters = parameters
        self._last: GradientBucket | None = None

    def place_vote(self, last: GradientBucket, numel: int) -> None:
        self._last = last
        self.vote = torch.zeros(numel, dtype=torch.float32, device=last.flat.device)

    def launch(self, bucket: GradientBucket, number: int, group: Group) -> None:
        is_last = bucket is self._last
        bucket.future = self.hook.launch(
            GradBucket(number, bucket.content(), bucket.plan.spans, self._parameters, is_last)
        )

    def finish(self, buckets: Sequence[GradientBucket], group: Group) -> None:
        for bucket in buckets:
            assert bucket.future is not None
            future, bucket.future = bucket.future, None
            self.hook.finish(future, bucket.flat[: bucket.plan.content], group)
        group.all_reduce(self.vote).wait_on_host()


class ReduceScatter(Reduction):
    """Each rank gets the sum for its shard of a bucket; its optimizer divides the sum."""

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
