"""Reads a GradScaler's loss scale in a sharded step, and checks that it is equal on all ranks."""

from __future__ import annotations

import math

import torch


def given_scale(optimizer: torch.optim.Optimizer, uses_scaler: bool) -> float | None:
    """The scale of this step, None without a GradScaler, which sets `found_inf` and `grad_scale`
    on the optimizer for the time of the step.

    uses_scaler: whether the scaler is a chorusline.GradScaler. Raises RuntimeError for others.
    """
    if not hasattr(optimizer, "found_inf"):
        return None
    scale: torch.Tensor | None = getattr(optimizer, "grad_scale", None)
    if not uses_scaler or scale is None:
        raise RuntimeError(
            "this GradScaler decides and unscales by local gradients, but a "
            "ZeroRedundancyOptimizer steps with the mean gradient. Use "
            "chorusline.GradScaler(optimizer), leave unscale_ out, and clip with max_norm"
        )
    return scale.item()


def check_scale(mine: float | None, mean: float) -> None:
    """Raises RuntimeError if this rank's scale is not the mean over the live ranks."""
    if mine is None or not math.isclose(mine, mean, rel_tol=1e-9):
        raise RuntimeError(
            f"the loss scales of the ranks differ: {mine} on this rank, {mean:g} on "
            "average; every rank must call scaler.step(optimizer) and scaler.update() in each "
            "step, and a Join of this optimizer must list the scaler: "
            "Join([model, optimizer, scaler])"
        )
