"""Steps the shard of a bucket while the backward pass still computes gradients of later buckets.

The rank that owns a shard must know two things before it steps: the divisor of the sum, and which
parameters have a gradient on any rank. Both are in an agreement (agreement.py), so a small
agreement travels with each bucket but the last. After a bucket has been launched, the rank waits
for the bucket before it, steps its shard and starts the all-gather of its parameters. The
optimizer's `step()` does the rest, after the ballot. All ranks read the same agreement, so they
launch the same operations in the same order.

On a GPU nobody reads an agreement during the pass: the host would wait there, and launch nothing
meanwhile. The shards are stepped at the beginning of `step()` (`step_launched`). The host comes
there long before the GPU has ended the pass, and reads the agreements one after the other, as the
GPU gets to them; so the updates still run beside the kernels of the pass, on a stream of their own.
The all-gathers do not: NCCL's stream keeps its order, and the last bucket is before them.

A bucket is launched when a rank has all its gradients, or when the backward pass has ended. So the
pass no longer needs the bucket's parameters when new values arrive in them. (The exception is a
pass that reads a parameter without its gradient, `weight.detach()`; this is not supported.)

If a rank has joined, no shard is stepped early: its options come with the ballot.

An early step cannot be undone. So it excludes clipping, loss scaling (which may skip a step) and a
new decision after the loss of a rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from chorusline.collectives.operations.host_reads import Reading, device_numbers

from ..data_parallel.gradients.reducer import Reducer
from ..process.agreement import Agreement, check_votes, read_agreement, vote_of
from ..process.leftovers import LeftoverVote
from .shards.parameter_bucket import Gather
from .shards.parameter_shard import ParameterShard


class EarlyUpdate:
    """The early steps of one optimizer's shard. Registers itself with the reducer.

    groups: of the user's optimizer. divisor_of: returns the divisor of a step's gradient sums.
    """

    def __init__(
        self,
        reducer: Reducer,
        shard: ParameterShard,
        groups: Sequence[dict[str, Any]],
        divisor_of: Callable[[Agreement], float],
    ) -> None:
        self._reducer = reducer
        self._shard = shard
        self._groups = groups
        self._divisor_of = divisor_of
        self._votes: list[Reading] = []  # by bucket
        self._gathers: list[Gather] = []  # by bucket, of those that were stepped
        device = reducer.group.device
        # On a GPU updates have their own stream: the backward pass must not wait for the network.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        reducer.on_launched = self._launched

    @torch.no_grad()
    def _launched(self, number: int) -> None:
        """The reducer has launched bucket `number`."""
        if number == 0 and self._votes:
            raise RuntimeError(
                "with overlap_with_ddp a synchronised backward pass steps most parameters, so "
                "call optimizer.step() after it, before the next one; accumulate gradients under "
                "no_sync()"
            )
        if number == 0:
            self._shard.bring_home()
        if number + 1 < len(self._reducer.buckets):
            self._votes.append(self._vote(number))
        if self._stream is None and 0 < number == len(self._gathers) + 1:
            self._step(number - 1)

    def step_launched(self) -> None:
        """On a GPU: step the shards of all buckets but the last. Called in `step()`, before any
        wait."""
        if self._stream is not None:
            while len(self._gathers) < len(self._votes) and self._step(len(self._gathers)):
                pass

    def _vote(self, number: int) -> Reading:
        reducer, group = self._reducer, self._reducer.group
        usage = [
            reducer.parameters[p].grad is not None for p, _, _ in reducer.buckets[number].plan.spans
        ]
        vote = vote_of(
            group.rank,
            group.size,
            standing=LeftoverVote(reducer.is_live),
            has_next=False,
            used=usage,
            weight=reducer.weight,
            stop=False,  # The ballot carries this request.
        )
        return group.all_reduce_and_read(device_numbers(vote, torch.float64, group.device))

    def _step(self, number: int) -> bool:
        """Whether the shard was stepped; if not, a rank has joined, and `step()` takes the step
        after the ballot."""
        bucket = self._reducer.buckets[number]
        with self._aside():
            assert bucket.work is not None
            bucket.work.order_stream()
            total = self._votes[number].tolist()
            check_votes(total, self._reducer.group)
            agreement = read_agreement(total, self._reducer.group.size)
            if len(agreement.live) < self._reducer.group.size:
                return False
            used = [False] * len(self._shard.parameters)
            for (parameter, _, _), is_used in zip(bucket.plan.spans, agreement.used, strict=True):
                used[parameter] = is_used
            self._shard.apply([number], self._groups, used, self._divisor_of(agreement), 1.0)
            self._gathers += self._shard.start_gather([number])
        return True

    def _aside(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._stream) if self._stream else contextlib.nullcontext()

    def end_step(self) -> list[Gather]:
        """The all-gathers of the first buckets, which have been stepped early."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        gathers, self._gathers, self._votes = self._gathers, [], []
        return gathers
