"""What a sharded step takes from a GradScaler, and what all ranks must have alike."""

from __future__ import annotations

import math

import torch


def given_scale(optimizer: torch.optim.Optimizer, uses_scaler: bool) -> float | None:
    """What a GradScaler has left on the optimizer for this step (torch sets these attributes, and
    takes them off again), None without one.

    uses_scaler: whether the scaler is ours. Raises RuntimeError for one that is not.
    """
    if not hasattr(optimizer, "found_inf"):
        return None
    scale: torch.Tensor | None = getattr(optimizer, "grad_scale", None)
    if not uses_scaler or scale is None:
        raise RuntimeError(
            "a GradScaler decides and unscales by local gradients, which are not what this "
            "optimizer steps with. Use chorusline.GradScaler(optimizer), leave unscale_ out, "
            "and clip with max_norm"
        )
    return scale.item()


def check_scale(mine: float | None, mean: float) -> None:
    """mean: over the ranks that took the step. Raises RuntimeError where this rank's differs."""
    if mine is None or not math.isclose(mine, mean, rel_tol=1e-9):
        raise RuntimeError(
            f"the loss scales of the ranks differ: {mine} here, {mean:g} on average; every "
            "rank must call scaler.step(optimizer) and scaler.update() in each step, and a "
            "Join of this optimizer lists the scaler: Join([model, optimizer, scaler])"
        )
