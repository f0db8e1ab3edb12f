"""Finds a program whose plain optimizer steps with gradients that nothing has reduced.

torch.autograd.grad runs no hook of a parameter: what a program computes by it and puts into `.grad`
is this rank's own, and so is what its passes in no_sync bring, alone or after a pass that was
reduced. And an optimizer may have parameters that are in no model, such as weights of a loss, whose
gradients nothing reduces. The copies of the parameters drift apart. No collective and no vote comes
in such a step. Nor may it wait for other ranks, which may average these gradients themselves. So at
the first such step each rank leaves a digest of its gradients in the store where the group has met,
and looks in later ones whether those of the others are there. That is over as soon as they are:
other steps cost nothing, and these a few look-ups.
"""

from __future__ import annotations

import json
import warnings
import weakref
from collections.abc import Mapping

import torch

from chorusline.collectives.contract.call_site import users_level
from chorusline.collectives.contract.errors import name_ranks
from chorusline.collectives.stores.store import PrefixStore

from ..process.between_runs import between_runs
from .gradients.gradient_bucket import Gradients
from .gradients.reducer import Reducer
from .same_model import sums_of_bits

_MANY = 32  # Looks in a row; after these, in steps whose number is a power of two.


class UnreducedSteps:
    """The unreduced steps of one model on one rank.

    number: the model's number in its group, the same on all ranks.
    """

    def __init__(self, gradients: Gradients, number: int) -> None:
        self._gradients = gradients
        self._key = f"unreduced/{number}"
        self._passes: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = (
            weakref.WeakKeyDictionary()
        )
        self._num_steps = 0
        self._is_over = False

    def note(
        self,
        optimizer: torch.optim.Optimizer,
        reducer: Reducer,
        beside: Mapping[str, torch.Tensor],
    ) -> None:
        """`optimizer` has stepped with the gradients of the model.

        beside: by name, its parameters that have a gradient and are in no model."""
        num_passes, group = reducer.num_passes, reducer.group
        if self._is_over:
            return
        before = self._passes.get(optimizer, 0)
        self._passes[optimizer] = num_passes
        is_reduced = before != num_passes and not reducer.has_leftover
        if is_reduced and not beside and not self._gradients.has_replaced():
            return  # A pass has come since its last step, and reduced all that `.grad` holds.
        self._num_steps += 1
        number, store = self._num_steps, PrefixStore(self._key, group._store)
        if number == 1:
            store.post(str(group.rank), json.dumps([num_passes, self._digests(beside)]))
        elif number < _MANY or number & (number - 1) == 0:
            keys = [str(rank) for rank in range(group.size)]
            if store.check(keys):
                self._is_over = True
                if group.rank == 0:
                    reports = [json.loads(one) for one in store.multi_get(keys)]
                    # A rank that had no data then has done it at another step.
                    if all(passes == reports[0][0] for passes, _ in reports):
                        # Between two averages they are meant to differ.
                        averaged = between_runs().averaged
                        apart = {n for n, p in self._named(beside) if p in averaged}
                        self._compare([digests for _, digests in reports], apart)

    def _named(self, beside: Mapping[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
        own = zip(self._gradients.names, self._gradients.parameters, strict=True)
        return [*own, *beside.items()]

    def _digests(self, beside: Mapping[str, torch.Tensor]) -> dict[str, int]:
        held = [
            (name, p.grad)
            for name, p in self._named(beside)
            if p.grad is not None and p.grad.layout is torch.strided
        ]
        sums = sums_of_bits([gradient for _, gradient in held])
        return {name: int(one) for (name, _), one in zip(held, sums, strict=True)}

    def _compare(self, by_rank: list[dict[str, int]], apart: set[str]) -> None:
        """apart: names of parameters that ranks train apart, and average."""
        names = {name: None for digests in by_rank for name in digests if name not in apart}
        for name in names:
            own = [digests.get(name) for digests in by_rank]
            unlike = [rank for rank, digest in enumerate(own) if digest != own[0]]
            if unlike and name not in self._gradients.names:
                warnings.warn(
                    f"optimizer.step() has stepped {name}, which is in no "
                    "DistributedDataParallel, so nothing reduces its gradient: that differs "
                    f"between rank 0 and {name_ranks(unlike)}, and so does the parameter from now "
                    "on. Register it in the module that is wrapped, wrap its module too, or "
                    "average before the step: parameter.grad = ctx.reduce(parameter.grad)",
                    stacklevel=users_level(),
                )
                return
            if unlike:
                warnings.warn(
                    "optimizer.step() has used gradients that no backward pass of the "
                    "DistributedDataParallel has reduced, and they are not the same on all ranks: "
                    f"that of parameter {name} differs between rank 0 and {name_ranks(unlike)}, so "
                    "the parameters of the ranks drift apart. What torch.autograd.grad returns, "
                    "what a hook of a parameter sees, and what a backward pass in no_sync() "
                    "brings, is the rank's own. Call "
                    "loss.backward() on an output of the model, the last time in each step outside "
                    "no_sync(), or average before the step: parameter.grad = "
                    "ctx.reduce(parameter.grad)",
                    stacklevel=users_level(),
                )
                return
