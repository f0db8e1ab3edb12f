"""Steps the shard of a bucket while the backward pass still makes the gradients of the next ones.

The rank that owns a shard must know two things before it steps: what to divide the sum by, and
which parameters have a gradient on any rank. Both are in an agreement (agreement.py), so a small
one travels with each bucket but the last. When the next bucket has been launched, the one before is
waited for, stepped, and its parameters set out to all ranks; the optimizer's `step()` does the
rest, after the ballot. All ranks read the same agreement, so they do the same in the same order.

A bucket is launched when a rank has all its gradients, or when its backward pass has ended. So no
rank needs those parameters any more in this pass when others' values arrive in them. (Except where
a pass reads a parameter without asking for its gradient, `weight.detach()`: not with this.)

If a rank has joined, nothing is done early: the options of its step come with the ballot.

What was stepped cannot be undone, so there is no clipping and no scaling, which may leave a step
out, and no deciding anew after a death.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from collectives import Work

from ..data_parallel.reducer import Reducer
from ..process.agreement import Agreement, read_agreement, vote_numel, write_vote
from .parameter_bucket import Gather
from .parameter_shard import ParameterShard


class EarlyUpdate:
    """What is stepped early of one optimizer's shard. Registers itself with the reducer.

    groups: the user's. divisor_of: what to divide a step's sums by.
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
        self._votes: list[tuple[torch.Tensor, Work]] = []  # by bucket
        self._gathers: list[Gather] = []  # by bucket; as many as were stepped
        device = reducer.group.device
        # The backward pass must not wait for the network: there, updates have their own stream.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        reducer.on_launched = self._launched

    @torch.no_grad()
    def _launched(self, number: int) -> None:
        """The reducer has launched bucket `number`."""
        if number == 0 and self._votes:
            raise RuntimeError(
                "with overlap_with_ddp a backward pass steps most parameters, so each one that is "
                "synchronised is followed by optimizer.step(); accumulate under no_sync()"
            )
        if number + 1 < len(self._reducer.buckets):
            self._votes.append(self._vote(number))
        if 0 < number == len(self._gathers) + 1:
            self._step(number - 1)

    def _vote(self, number: int) -> tuple[torch.Tensor, Work]:
        reducer, group = self._reducer, self._reducer.group
        usage = [
            reducer.parameters[p].grad is not None for p, _, _ in reducer.buckets[number].plan.spans
        ]
        vote = torch.zeros(
            vote_numel(group.size, len(usage)), dtype=torch.float64, device=group.device
        )
        write_vote(
            vote,
            group.rank,
            group.size,
            live=reducer.is_live,
            has_next=False,
            used=usage,
            weight=reducer.weight,
            stop=False,  # The ballot has the word for it.
        )
        return vote, group.all_reduce(vote)

    def _step(self, number: int) -> None:
        bucket = self._reducer.buckets[number]
        vote, work = self._votes[number]
        with self._aside():
            assert bucket.work is not None
            bucket.work.wait()
            work.wait()
            agreement = read_agreement(vote.tolist(), self._reducer.group.size)
            if len(agreement.live) < self._reducer.group.size:
                return
            used = [False] * len(self._shard.parameters)
            for (parameter, _, _), is_used in zip(bucket.plan.spans, agreement.used, strict=True):
                used[parameter] = is_used
            self._shard.apply([number], self._groups, used, self._divisor_of(agreement), 1.0)
            self._gathers += self._shard.start_gather([number])

    def _aside(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._stream) if self._stream else contextlib.nullcontext()

    def end_step(self) -> list[Gather]:
        """What brings the parameters of the first buckets, which have been stepped."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        gathers, self._gathers, self._votes = self._gathers, [], []
        return gathers
