"""`GradScaler`: loss scaling whose decisions are the same on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from collectives import Group

from ..join.join import GroupJoinable, Joinable, JoinHook
from .zero_redundancy_optimizer import ZeroRedundancyOptimizer


class GradScaler(torch.amp.GradScaler, GroupJoinable):
    """torch.amp.GradScaler for a ZeroRedundancyOptimizer; use it as torch's.

    torch's looks at a rank's local gradients, so ranks would skip different steps and drift apart
    in their scales. This one takes what the optimizer's ballot found: a step in which any rank's
    reduced gradient is not finite is left out on all, and all scales change alike.

    optimizer: on which it is stepped. options: torch's (init_scale, growth_interval, …).
    Inside Join, list it behind the optimizer: Join([model, optimizer, scaler]). `unscale_` has
    nothing to act on; clip with the optimizer's `max_norm`.
    """

    def __init__(self, optimizer: ZeroRedundancyOptimizer, **options: Any) -> None:
        super().__init__(optimizer.group.device.type, **options)
        if optimizer.overlap_with_ddp and self.is_enabled():
            raise ValueError(
                "a scaled step may have to be left out, but overlap_with_ddp steps parameters "
                "before that is known; make the optimizer without it"
            )
        self._optimizer = optimizer
        optimizer.uses_scaler = self.is_enabled()

    @property
    def group(self) -> Group:  # type: ignore[override]
        """The optimizer's, which changes when a rank is lost."""
        return self._optimizer.group

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """As torch's; the optimizer unscales, and leaves the step out on all ranks or on none."""
        result = super().step(optimizer, *args, **kwargs)
        if self.is_enabled() and optimizer is self._optimizer:
            self._take_agreement()
        return result

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        if optimizer is self._optimizer and self.is_enabled():
            raise RuntimeError(
                "unscale_ would act on local gradients, which are not what this optimizer steps "
                "with; leave it out, and clip with the optimizer's max_norm"
            )
        super().unscale_(optimizer)

    def _take_agreement(self) -> None:
        """Let `update` see what all ranks found instead of what this one did."""
        found = torch.tensor(
            float(self._optimizer.found_overflow), device=self._optimizer.group.device
        )
        state = self._per_optimizer_states[id(self._optimizer)]
        state["found_inf_per_device"] = {found.device: found}

    def join_hook(self, **kwargs: Any) -> JoinHook:
        return _Hook(self)

    def _announces_hook(self) -> bool:
        return False

    def _check_joined_with(self, joinables: Sequence[Joinable]) -> None:
        before = [j for j in joinables if j is self or j is self._optimizer]
        if before != [self._optimizer, self]:
            raise ValueError(
                "this GradScaler follows the steps of its optimizer, so it is listed behind it: "
                "Join([model, optimizer, scaler])"
            )


class _Hook(JoinHook):
    """A joined rank's scale follows the steps that its optimizer has shadowed."""

    def __init__(self, scaler: GradScaler) -> None:
        self._scaler = scaler

    def main_hook(self) -> None:
        scaler = self._scaler
        join = scaler._optimizer._join
        if scaler.is_enabled() and join is not None and join.last_step_live:
            scaler.scale(torch.zeros((), device=scaler.join_device))  # makes the scale on first use
            scaler._take_agreement()
            scaler.update()
