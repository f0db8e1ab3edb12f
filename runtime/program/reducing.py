"""`ctx.reduce`: one value of all ranks."""

from __future__ import annotations

import math

import torch

from chorusline.collectives.contract.operation import ReduceOp
from chorusline.collectives.group import Group

_OPS = {
    "mean": ReduceOp.AVG,
    "sum": ReduceOp.SUM,
    "min": ReduceOp.MIN,
    "max": ReduceOp.MAX,
    "product": ReduceOp.PRODUCT,
}


def check_op(op: str, weight: float | None) -> None:
    """Raises ValueError for an unknown op, and for a weight that does not fit."""
    if op not in _OPS:
        raise ValueError(f"op must be one of {', '.join(map(repr, _OPS))}, got {op!r}")
    if weight is not None and (op != "mean" or not 0 <= weight < math.inf):
        raise ValueError(
            f"weight must be a finite number of at least 0, and needs op='mean'; got "
            f"{weight!r}, op={op!r}"
        )


def reduced(
    group: Group, value: torch.Tensor | float, op: str, weight: float | None
) -> torch.Tensor | float:
    """As Context.reduce says. Collective; blocks the training thread."""
    if weight is not None:
        return _weighted_mean(group, value, weight)
    if isinstance(value, torch.Tensor):
        return _reduced(group, value.detach(), op)
    dtype = torch.float64 if isinstance(value, float) else torch.int64
    number: float = _reduced(group, torch.tensor([value], dtype=dtype), op).item()
    return number


def _weighted_mean(
    group: Group, value: torch.Tensor | float, weight: float
) -> torch.Tensor | float:
    # torch would make float32 of a Python float, and keep 24 of its 53 bits.
    dtype = None if isinstance(value, torch.Tensor) else torch.float64
    given = torch.as_tensor(value, dtype=dtype).detach()
    # One collective: the weight behind the weighed values, in float64, so counts stay exact.
    sums = torch.zeros(given.numel() + 1, dtype=torch.float64)
    sums[-1] = weight
    if weight:
        sums[:-1] = given.reshape(-1).to(torch.float64) * weight
    sums = _reduced(group, sums, "sum")
    if not sums[-1] > 0:
        raise ValueError("the weights of all ranks add up to 0: no rank had anything to count")
    mean = (sums[:-1] / sums[-1]).view(given.shape)
    if not isinstance(value, torch.Tensor):
        return mean.item()
    return mean.to(given.device, given.dtype if given.is_floating_point() else torch.float64)


def _reduced(group: Group, tensor: torch.Tensor, op: str) -> torch.Tensor:
    """The reduced tensor, on the device of `tensor`."""
    if op == "mean" and not tensor.is_floating_point():
        tensor = tensor.to(torch.float64)
    elif tensor.dtype in (torch.bool, torch.uint8, torch.int8, torch.int16):
        tensor = tensor.to(torch.int64)
    total = tensor.to(group.device, copy=True).contiguous()
    group.all_reduce(total, _OPS[op]).wait_on_host()
    return total.to(tensor.device)
