"""How the buckets of one model are launched, waited for, and kept for another launch.

When a bucket is launched is the reducer's to say (reducer.py); this file is what happens to it from
then on, until its sum is there.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from chorusline.actors.errors import ends_a_generation
from chorusline.collectives import CollectiveError, Group

from ...process.step_boundary import boundary
from .comm_hooks import CommHook
from .gradient_bucket import GradientBucket, Gradients, why_not_changed
from .reductions import AllReduce, ReduceScatter, Reduction
from .step_statistics import StepClock


class Launcher:
    """The buckets of one model on one rank, from their launch to their sums.

    group: the ranks that reduce gradients. bucket_bytes: the size of a bucket.
    """

    def __init__(self, group: Group, bucket_bytes: int) -> None:
        self.gradients = Gradients(bucket_bytes)
        self.group = group
        self.parks = False
        """Whether `wait`, not the launch, raises the error of a generation that has ended. Then
        the optimizer's step can begin again in the next generation."""
        self.clock: StepClock | None = None
        """Times the steps; None below debug level INFO."""
        self.on_launched: Callable[[int], None] | None = None
        """Called with the number of each bucket that a pass launches."""
        self._reduction: Reduction = AllReduce()
        self._failure: CollectiveError | None = None
        self._num_launched = 0

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        return self.gradients.parameters

    @property
    def buckets(self) -> list[GradientBucket]:
        return self.gradients.buckets

    @property
    def hook(self) -> CommHook | None:
        """The communication hook that reduces the buckets, if there is one."""
        return self._reduction.hook

    @property
    def is_sharded(self) -> bool:
        """Whether a rank gets the sum for its shard only, and an optimizer finishes the step."""
        return isinstance(self._reduction, ReduceScatter)

    @property
    def has_begun(self) -> bool:
        """Whether at least one bucket of the step is launched."""
        return self._num_launched > 0

    @property
    def has_launched(self) -> bool:
        """Whether all buckets of the step are launched."""
        return self._num_launched == len(self.buckets)

    def _launch(self, bucket: GradientBucket) -> None:
        number = self._num_launched
        self._num_launched += 1
        self._reduce(bucket, number)
        if self.on_launched is not None:
            self.on_launched(number)

    def _reduce(self, bucket: GradientBucket, number: int) -> None:
        bucket.launched_at = time.monotonic()
        try:
            self._reduction.launch(bucket, number, self.group)
        except CollectiveError as error:
            # The buckets are kept, so the pass continues, and the step can start again from them.
            if not self.parks or not ends_a_generation(error):
                raise
            self._failure = error
        bucket.launched_version = bucket.flat._version

    def wait(self) -> None:
        """Block until the works of all launched buckets are done."""
        if self._failure is not None:
            raise self._failure
        operations = [bucket.work.operation for bucket in self.buckets if bucket.work is not None]
        began_at = time.monotonic()
        carrier = self._reduction.carrier
        for bucket in self.buckets:
            if bucket.work is not None:
                if bucket is carrier:
                    bucket.work.wait_on_host()  # The host reads the vote after the gradients.
                else:
                    bucket.work.order_stream()  # The vote tells how it has ended.
                bucket.work = None
        waited_s = time.monotonic() - began_at
        boundary().steps.waited_s += waited_s
        if self.clock is not None and operations:
            self.clock.buckets_are_reduced(operations, waited_s)

    def kept(self) -> list[GradientBucket]:
        """The buckets of a sharded step that are launched; empty if there is no such step."""
        return self.buckets if self.is_sharded and self.has_launched else []

    def check_unchanged(self) -> None:
        """Raise RuntimeError if the program has changed gradients that are sent already."""
        if why := self.why_changed():
            raise RuntimeError(why)

    def why_changed(self) -> str:
        """Says what `check_unchanged` raises; empty if nothing was changed."""
        changed = self.gradients.why_changed()
        return why_not_changed(changed) if changed else ""
