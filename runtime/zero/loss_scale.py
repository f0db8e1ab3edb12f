"""The loss scale of a GradScaler in a sharded step, and the check that it is equal on all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from chorusline.collectives.contract.errors import name_ranks

from ..process.option_numbers import told_apart


def given_scale(optimizer: torch.optim.Optimizer, uses_scaler: bool) -> torch.Tensor | None:
    """The scale of this step, None without a GradScaler, which sets `found_inf` and `grad_scale`
    on the optimizer for the time of the step. It travels as it is: to read it, the host would have
    to wait for the GPU.

    uses_scaler: whether the scaler is a chorusline.GradScaler. Raises RuntimeError for others.
    """
    # No GradScaler has called this step.
    if not hasattr(optimizer, "found_inf"):
        return None
    scale: torch.Tensor | None = getattr(optimizer, "grad_scale", None)
    if not uses_scaler or scale is None:
        raise RuntimeError(
            "this GradScaler decides and unscales with local gradients, but a "
            "ZeroRedundancyOptimizer steps with the mean gradient. Use "
            "chorusline.GradScaler(optimizer), leave unscale_ out, and clip with max_norm"
        )
    return scale


def agreed_scale(scales: Sequence[float], live: Sequence[int], *, in_steps: bool = False) -> float:
    """The loss scale of a step; 1.0 if no rank has data. Raises RuntimeError, on all ranks, if it
    is not equal on the live ranks, or a rank has none.

    scales: of the ranks in `live`.
    in_steps: the step is one of `ctx.steps`, to which workers come, and in no Join.
    """
    if not scales:
        return 1.0
    if min(scales) == max(scales) > 0:
        return scales[0]
    if not any(scales):
        raise RuntimeError(
            f"a GradScaler was made for this optimizer, and {name_ranks(live)} stepped without it; "
            "every rank must call scaler.step(optimizer) and scaler.update() in each step. A "
            "GradScaler that scales nothing is one with enabled=False"
        )
    by_rank = ", ".join(
        f"{text if scale else 'none'} on rank {rank}"
        for rank, scale, text in zip(live, scales, told_apart(scales), strict=True)
    )
    and_also = (
        'a worker that comes later needs the scale of the others: ctx.register("scaler", scaler)'
        if in_steps
        else "a Join of this optimizer must list the scaler: Join([model, optimizer, scaler])"
    )
    raise RuntimeError(
        f"the loss scales of the ranks differ: {by_rank}; every rank must call "
        f"scaler.step(optimizer) and scaler.update() in each step, and {and_also}"
    )
