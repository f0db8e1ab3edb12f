"""The end of a step of `ctx.steps` on one rank: what the ranks tell each other there."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from chorusline.collectives import CollectiveMismatch, Group
from chorusline.collectives.operations.host_reads import device_numbers

from ..process.micro_batches import StepPlan, SummableModel

_FORGETTING = 0.5
"""The part of a rank's pace that its last step makes; the rest is of the steps before."""


class StepEnd:
    """The end of one step on this rank: what the ranks tell each other there, and what it says.

    plan: of the step. has_gradient, has_buffers, divisors: by model.
    paces: by rank, the seconds that it takes for a micro-batch.
    """

    def __init__(self, plan: StepPlan, num_samples: int, micro_batch_size: int) -> None:
        self.plan = plan
        self.has_gradient: list[bool] = []
        self.has_buffers: list[bool] = []
        self.divisors: list[float] = []
        self.paces: list[float] = []
        self._num_samples = num_samples
        self._micro_batch_size = micro_batch_size
        self._weights: dict[int, dict[int, float]] = {}  # by id() of a model, by micro-batch
        self._seconds: list[float] = []

    def note(self, number: int, models: Sequence[SummableModel], seconds: float) -> None:
        """This rank has computed a micro-batch."""
        self._seconds.append(seconds)
        for model in models:
            if model.weight is not None:
                self._weights.setdefault(id(model), {})[number] = model.weight

    def meet(self, group: Group, models: Sequence[SummableModel], paces: Sequence[float]) -> None:
        """(2) Raises CollectiveMismatch, on all ranks, if they are at different steps."""
        num = self.plan.num_micro_batches
        # With the square, ranks that differ show in the sums alone (_check_same).
        told = [float(self.plan.number), float(self.plan.number) ** 2]
        told += [float(self._num_samples), float(self._num_samples) ** 2]
        for model in models:
            weights = self._weights.get(id(model), {})
            told += [model.has_gradient, model.buffers_have_changed, len(weights)]
            told += [weights.get(number, 0.0) for number in range(num)]
        own = [0.0] * group.size
        own[group.rank] = self._pace(paces[group.rank])
        told += own
        vector = device_numbers(told, torch.float64, group.device)
        seen = group.all_reduce_and_read(vector).tolist()
        self._check_same(seen, group)
        self.has_gradient, self.has_buffers, self.divisors, at = [], [], [], 4
        for _ in models:
            has_gradient, has_buffers, num_weighed = seen[at : at + 3]
            weighed = seen[at + 3 : at + 3 + num]
            self.has_gradient.append(has_gradient > 0)
            self.has_buffers.append(has_buffers > 0)
            self.divisors.append(self._divisor(int(num_weighed), weighed))
            at += 3 + num
        if not any(self.has_gradient):
            raise RuntimeError(
                f"no backward pass of step {self.plan.number} has given any model a gradient on "
                "any rank: call backward() on a loss of the DistributedDataParallel inside the "
                "loop over the step's batches"
            )
        self.paces = seen[at:]

    def _pace(self, before: float) -> float:
        if not self._seconds:
            return before
        pace = sum(self._seconds) / len(self._seconds)
        return before + _FORGETTING * (pace - before) if before else pace

    def _check_same(self, seen: Sequence[float], group: Group) -> None:
        size = group.size
        for at, what in ((0, "number of the step"), (2, "number of samples of the step")):
            total, squares = seen[at], seen[at + 1]
            if total * total != size * squares:
                own = (self.plan.number, self._num_samples)[at // 2]
                raise CollectiveMismatch(
                    "ctx.steps",
                    group.generation,
                    list(range(size)),
                    f"the {what} is {own} on rank {group.rank}, and differs on other ranks",
                    "Every rank must call ctx.steps with the same dataset and sizes, and take all "
                    "steps.",
                )

    def _divisor(self, num_weighed: int, weights: Sequence[float]) -> float:
        if not num_weighed:
            return self._num_samples / self._micro_batch_size
        if num_weighed < len(weights):
            raise RuntimeError(
                f"{num_weighed} of the {len(weights)} micro-batches of step {self.plan.number} "
                "weighted their loss; either all of them must call model.weigh(loss, weight), or "
                "none"
            )
        total = math.fsum(weights)  # Rounded once, so the order does not matter.
        if not total > 0:
            raise RuntimeError(
                f"the weights of the micro-batches of step {self.plan.number} add up to {total:g}; "
                "the sum must be above 0"
            )
        return total
