"""`GradScaler`: loss scaling whose decisions are the same on all ranks."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from chorusline.collectives.contract.torch_hints import TOO_FEW, says
from chorusline.collectives.group import Group

from ..join.engine import GroupJoinable, Joinable
from ..join.join_hook import JoinHook
from .zero_redundancy_optimizer import ZeroRedundancyOptimizer


class GradScaler(torch.amp.GradScaler, GroupJoinable):
    """torch.amp.GradScaler for a ZeroRedundancyOptimizer, with the same interface.

        model = cl.DistributedDataParallel(net, group)
        optimizer = cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.1)
        scaler = cl.GradScaler(optimizer)
        scaler.scale(model(torch.ones(2, 8)).mean()).backward()
        scaler.step(optimizer)
        scaler.update()

    torch.amp.GradScaler looks at a rank's local gradients, so ranks would skip different steps and
    their scales would diverge. This scaler reads the result of the optimizer's ballot: if the
    reduced gradient of any rank is not finite, all ranks skip the step, and all scales stay the
    same.

    optimizer: the optimizer whose losses are scaled.
    options: arguments of torch.amp.GradScaler (init_scale, growth_interval, …).

    Inside Join, list the scaler after the optimizer: Join([model, optimizer, scaler]).
    """

    @says(
        **{
            TOO_FEW: "write GradScaler(optimizer), or for a plain optimizer "
            "torch.amp.GradScaler(device)"
        }
    )
    def __init__(self, optimizer: ZeroRedundancyOptimizer, **options: Any) -> None:
        if not isinstance(optimizer, ZeroRedundancyOptimizer):
            raise TypeError(
                f"GradScaler takes the ZeroRedundancyOptimizer whose losses it scales, got "
                f"{optimizer!r}; write GradScaler(optimizer), or for a plain optimizer "
                "torch.amp.GradScaler(device)"
            )
        super().__init__(optimizer.group.device.type, **options)
        self._optimizer = optimizer
        optimizer.uses_scaler = self.is_enabled()
        optimizer._scaler = weakref.ref(self) if self.is_enabled() else None

    @property
    def growth(self) -> tuple[float, float, float]:
        """By what the scale grows and shrinks, and when, in the order of ballot.GROWTH."""
        factors = self.get_growth_factor(), self.get_backoff_factor()
        return *factors, float(self.get_growth_interval())

    def follow(self, scale: float, growth: Sequence[float]) -> None:
        """This rank has no data. scale, growth: of the ranks with data in this step."""
        factor, backoff, interval = growth
        self.set_growth_factor(factor)
        self.set_backoff_factor(backoff)
        self.set_growth_interval(int(interval))
        self._current_scale().fill_(scale)

    def _current_scale(self) -> torch.Tensor:
        """(1,) the scale of the losses, even on a rank that has scaled none yet."""
        if self._scale is None:
            self.scale(torch.zeros((), device=self.join_device))
        assert self._scale is not None
        return self._scale

    @property
    def group(self) -> Group:  # type: ignore[override]
        """The optimizer's group, which changes when a rank is lost."""
        return self._optimizer.group

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Step the optimizer, which unscales, and skips the step on all ranks or on none.

        Raises RuntimeError for another ZeroRedundancyOptimizer than this scaler's, and if a newer
        GradScaler was made for it."""
        if self.is_enabled() and isinstance(optimizer, ZeroRedundancyOptimizer):
            self._check_scales(optimizer)
        try:
            result = super().step(optimizer, *args, **kwargs)
        except Exception:
            # torch would multiply the scale of the next step by what an error leaves here.
            for name in ("grad_scale", "found_inf"):
                vars(optimizer).pop(name, None)
            raise
        if self.is_enabled() and optimizer is self._optimizer:
            self._take_agreement()
        return result

    def _check_scales(self, optimizer: ZeroRedundancyOptimizer) -> None:
        if optimizer is not self._optimizer:
            raise RuntimeError(
                "this GradScaler scales the losses of another ZeroRedundancyOptimizer. Make one "
                "for each, GradScaler(optimizer), and scale the loss of each model by its own; "
                "where one loss trains several models, make them parts of one module, with one "
                "DistributedDataParallel and one ZeroRedundancyOptimizer"
            )
        if optimizer._scaler_of_losses is not self:
            raise RuntimeError(
                "another GradScaler was made for this ZeroRedundancyOptimizer after this one, and "
                "ranks without data follow the newest. Scale, step and update with that"
            )

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises RuntimeError for this scaler's optimizer: clip with its `max_norm`."""
        if optimizer is self._optimizer and self.is_enabled():
            raise RuntimeError(
                "unscale_ would unscale this rank's local gradients, but a "
                "ZeroRedundancyOptimizer steps with the mean gradient; leave unscale_ out, and "
                "clip with the optimizer's max_norm"
            )
        super().unscale_(optimizer)

    def _take_agreement(self) -> None:
        """Make `update` read the overflow flag on which all ranks agreed, not the local one."""
        device = self._optimizer.group.device
        # Filled there: the host would wait for the copy of a tensor that it makes. torch takes no
        # other dtype, whatever the default one is.
        overflow = float(self._optimizer.found_overflow)
        found = torch.full((), overflow, dtype=torch.float32, device=device)
        state = self._per_optimizer_states[id(self._optimizer)]
        state["found_inf_per_device"] = {found.device: found}

    def __reduce_ex__(self, protocol: object) -> Any:
        raise TypeError(
            "a GradScaler belongs to its ZeroRedundancyOptimizer and cannot be copied or pickled; "
            "save scaler.state_dict()"
        )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        return _ScalerHook(self)

    def _announces_hook(self) -> bool:
        return False

    def _check_joined_with(self, joinables: Sequence[Joinable]) -> None:
        before = [j for j in joinables if j is self or j is self._optimizer]
        if before != [self._optimizer, self]:
            raise ValueError(
                "a GradScaler follows the steps of its optimizer, so Join must list it after the "
                "optimizer: Join([model, optimizer, scaler])"
            )


class _ScalerHook(JoinHook):
    """Updates a joined rank's scale after each step that its optimizer takes implicitly."""

    def __init__(self, scaler: GradScaler) -> None:
        self._scaler = scaler

    def main_hook(self) -> None:
        scaler = self._scaler
        join = scaler._optimizer._join
        if scaler.is_enabled() and join is not None and join.last_step_live:
            scaler._current_scale()  # makes the scale on first use
            scaler._take_agreement()
            scaler.update()
