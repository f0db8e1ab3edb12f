"""Statistics of a model's steps: average times, the chosen buckets, and unused parameters.

They are collected at debug level INFO and above. Times are measured on the host: on a GPU they say
when work was queued, not when it was done.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from chorusline.collectives.contract.operation import Operation
from chorusline.collectives.diagnosis.debug import inform
from chorusline.collectives.group import Group

from .gradient_bucket import GradientBucket

_STEPS = 100


@dataclass(frozen=True, slots=True)
class StepStatistics:
    """What `model.statistics()` returns: averages over the last `steps` synchronised backward
    passes on this rank; times in seconds.

        cl.set_debug_level(cl.DebugLevel.INFO)
        model = cl.DistributedDataParallel(net, group)
        model(torch.ones(2, 8)).sum().backward()
        print(model.statistics())

    forward_s: inside the model's forward.
    backward_s: from the end of the forward pass until the last gradient is there.
    wait_s: waiting for buckets after the last gradient.
    communication_s: from the first launch of a bucket to the end of the last bucket.
    overlap_s: the part of communication_s in which the backward pass still ran.
    buckets: the bytes of each bucket, in the order of sending.
    without_gradient: the names of the parameters that have never got a gradient on this rank.
    """

    steps: int
    forward_s: float
    backward_s: float
    wait_s: float
    communication_s: float
    overlap_s: float
    buckets: tuple[int, ...]
    without_gradient: tuple[str, ...] = ()

    def __str__(self) -> str:
        hidden = self.overlap_s / self.communication_s if self.communication_s else 0.0
        return (
            f"{self.steps} steps on average: forward {self.forward_s * 1e3:.2f} ms, backward "
            f"{self.backward_s * 1e3:.2f} ms, communication {self.communication_s * 1e3:.2f} ms, "
            f"{hidden:.0%} of it during the backward pass, wait {self.wait_s * 1e3:.2f} ms; "
            f"{len(self.buckets)} buckets of {sum(self.buckets)} bytes"
        )


class StepClock:
    """Times one model's steps with time.monotonic(); the model and its reducer call it.

    names: of the parameters, by number; those without a gradient are logged.
    """

    def __init__(self, rank: int, names: Sequence[str]) -> None:
        self._unused = UnusedParameters(rank, names)
        self._steps: deque[tuple[float, float, float, float, float]] = deque(maxlen=_STEPS)
        self._forward_s = 0.0
        self._forward_ended_at = 0.0
        self._backward_ended_at = 0.0
        self._num_steps = 0

    def forward_ran(self, began_at: float) -> None:
        self._forward_ended_at = time.monotonic()
        self._forward_s += self._forward_ended_at - began_at

    def backward_ended(self, usage: Sequence[bool]) -> None:
        """usage: by parameter, whether the pass has brought it a gradient."""
        self._backward_ended_at = time.monotonic()
        self._unused.tell(usage)

    @property
    def has_round_of_steps(self) -> bool:
        """Whether as many steps have been counted as are averaged, since it was true before."""
        return self._num_steps > 0 and self._num_steps % _STEPS == 0

    def buckets_are_reduced(self, operations: Sequence[Operation], wait_s: float) -> bool:
        """operations: the collectives of the buckets, in the order of issue. Returns whether it is
        a step to count."""
        ends = [operation.ended_at for operation in operations if operation.ended_at is not None]
        return bool(ends) and self.count(operations[0].issued_at, max(ends), wait_s)

    def count(self, began_at: float, ended_at: float, wait_s: float) -> bool:
        """The same with the times at which the first bucket was launched, and the last one done."""
        if not self._forward_ended_at:
            return False
        self._num_steps += 1
        backward_s = max(0.0, self._backward_ended_at - self._forward_ended_at)
        overlap_s = max(0.0, min(ended_at, self._backward_ended_at) - began_at)
        self._steps.append(
            (self._forward_s, backward_s, wait_s, max(0.0, ended_at - began_at), overlap_s)
        )
        self._forward_s = 0.0
        self._forward_ended_at = 0.0
        return True

    def average(self, buckets: Sequence[GradientBucket]) -> StepStatistics:
        count = len(self._steps)
        sums = [sum(column) for column in zip(*self._steps, strict=True)] or [0.0] * 5
        forward, backward, wait, communication, overlap = (total / max(count, 1) for total in sums)
        return StepStatistics(
            count,
            forward,
            backward,
            wait,
            communication,
            overlap,
            bucket_bytes(buckets),
            tuple(self._unused.never),
        )


def bucket_bytes(buckets: Sequence[GradientBucket]) -> tuple[int, ...]:
    return tuple(b.plan.content * b.flat.element_size() for b in buckets)


def tell_beginning(
    module: torch.nn.Module,
    group: Group,
    named: Sequence[tuple[str, torch.nn.Parameter]],
    **given: Any,
) -> None:
    """Log that a model was wrapped, as torch's DistributedDataParallel does at DETAIL."""
    parameters = [parameter for _, parameter in named]
    record = {
        "module": type(module).__name__,
        "rank": group.rank,
        "world_size": group.size,
        "backend": group.backend,
        "device": group.device,
        "parameters": len(parameters),
        "bytes": sum(p.numel() * p.element_size() for p in parameters),
        "dtypes": ", ".join(sorted({str(p.dtype) for p in parameters})),
        **given,
    }
    inform("DistributedDataParallel: %s", "; ".join(f"{k} {v}" for k, v in record.items()))


def tell_choice(buckets: Sequence[GradientBucket], rank: int, names: Sequence[str]) -> None:
    """Log the buckets of a model. names: of its parameters, by number."""
    nbytes = bucket_bytes(buckets)
    lines = [
        f"rank {rank}: {len(names)} parameters in {len(nbytes)} buckets of "
        f"{sum(nbytes)} bytes, in the order in which they are sent:"
    ]
    for number, (bucket, size) in enumerate(zip(buckets, nbytes, strict=True)):
        first, last = bucket.plan.spans[0][0], bucket.plan.spans[-1][0]
        lines.append(
            f"  bucket {number}: {size} bytes, {len(bucket.plan.spans)} parameters, from "
            f"{names[first]} to {names[last]}"
        )
    inform("%s", "\n".join(lines))


class UnusedParameters:
    """Logs which parameters got no gradient on this rank, whenever that changes."""

    def __init__(self, rank: int, names: Sequence[str]) -> None:
        self._rank = rank
        self._names = names
        self._logged: list[str] = []
        self.never = list(names)
        """Those that have got none so far."""

    def tell(self, usage: Sequence[bool]) -> None:
        unused = [name for name, is_used in zip(self._names, usage, strict=True) if not is_used]
        if self.never:
            still = set(unused)
            self.never = [name for name in self.never if name in still]
        if unused != self._logged:
            self._logged = unused
            text = ", ".join(unused) if unused else "none; all parameters have one again"
            inform("rank %d: parameters without a gradient in this step: %s", self._rank, text)
