"""`ctx.reduce`: one value of all ranks."""

from __future__ import annotations

from typing import Any

import numpy
import torch

from chorusline.collectives.contract.dtypes import DTYPES
from chorusline.collectives.contract.errors import with_article
from chorusline.collectives.contract.operation import ReduceOp
from chorusline.collectives.group import Group

from ..process.option_numbers import weight_of

_OPS = {
    "mean": ReduceOp.AVG,
    "sum": ReduceOp.SUM,
    "min": ReduceOp.MIN,
    "max": ReduceOp.MAX,
    "product": ReduceOp.PRODUCT,
}

_SMALL = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.uint32)


def checked_weight(op: str, weight: object) -> float | None:
    """Raises ValueError for an unknown op, and for a weight that does not fit; TypeError for one
    that is no number."""
    if not isinstance(op, str) or op not in _OPS:
        raise ValueError(f"op must be one of {', '.join(map(repr, _OPS))}, got {op!r}")
    if weight is None:
        return None
    if op != "mean":
        raise ValueError(f"weight needs op='mean'; got {weight!r}, op={op!r}")
    return weight_of(weight, "weight must be a number")


def has_value(value: object) -> bool:
    """Whether `ctx.reduce` reduces it; it gives back texts and None.

    Raises TypeError for all else, in which numbers may be, and stay this rank's own."""
    if value is None or isinstance(value, str | bytes):
        return False
    if isinstance(value, torch.Tensor | int | float | complex):
        return True
    if isinstance(value, numpy.ma.MaskedArray):
        raise TypeError(
            "ctx.reduce() cannot reduce a masked array, whose ranks may mask different elements; "
            "reduce its sum and its count, as in ctx.reduce(value.sum(), 'sum') / "
            "ctx.reduce(value.count(), 'sum')"
        )
    if isinstance(value, numpy.ndarray | numpy.generic) and value.dtype.kind in "biufc":
        return True
    raise TypeError(
        "ctx.reduce() takes a number, a tensor or a numeric array, and gives back a text and None; "
        f"got {with_article(type(value))}. Reduce each number that it holds, as in {{name: "
        "ctx.reduce(value) for name, value in metrics.items()}, or convert it, as in "
        "ctx.reduce(float(value))"
    )


def reduced(group: Group, value: Any, op: str, weight: float | None) -> Any:
    """As Context.reduce says. Collective; blocks the training thread."""
    if isinstance(value, numpy.generic | numpy.ndarray) and value.dtype.char in "gG":
        # Longer than any number of torch's or Python's.
        value = value.astype("complex128" if value.dtype.char == "G" else "float64")
    if isinstance(value, numpy.generic):
        value = value.item()
    if isinstance(value, numpy.ndarray):
        # A copy in the machine's order of bytes: torch takes no other, and warns of one to read.
        there = torch.from_numpy(numpy.array(value, dtype=value.dtype.newbyteorder("=")))
        return reduced(group, there, op, weight).numpy()
    if isinstance(value, torch.Tensor) and _wraps_others(value):
        raise TypeError(
            f"ctx.reduce() takes plain tensors, and got {with_article(type(value))}, which wraps "
            "others; reduce these, as in ctx.reduce(value.to_local())"
        )
    if isinstance(value, torch.Tensor) and value.is_nested:
        raise TypeError(
            "ctx.reduce() cannot reduce a nested tensor, whose parts may have other lengths on "
            "each rank; reduce each of value.unbind(), or one number that is made of them"
        )
    if isinstance(value, torch.Tensor) and value.layout is not torch.strided:
        raise TypeError(
            f"ctx.reduce() takes dense tensors, and got one of layout {value.layout}; convert it, "
            "as in ctx.reduce(value.to_dense())"
        )
    if isinstance(value, torch.Tensor) and (value.is_meta or value.is_quantized):
        raise TypeError(
            "ctx.reduce() cannot reduce a tensor on the meta device, which has no values"
            if value.is_meta
            else "ctx.reduce() cannot reduce a quantized tensor, whose scale may be another one on "
            "each rank; convert it, as in ctx.reduce(value.dequantize())"
        )
    if op in ("min", "max") and _is_complex(value):
        raise ValueError(f"op={op!r} needs numbers with an order, and complex numbers have none")
    if weight is not None:
        return _weighted_mean(group, value, weight)
    if isinstance(value, torch.Tensor):
        return _reduced(group, value.detach(), op)
    if isinstance(value, int):
        return _reduced_int(group, value, op)
    dtype = torch.complex128 if isinstance(value, complex) else torch.float64
    number: complex = _reduced(group, torch.tensor([value], dtype=dtype, device="cpu"), op).item()
    return number


def _reduced_int(group: Group, value: int, op: str) -> float:
    if not -(2**63) <= value < 2**63:
        raise OverflowError(
            f"ctx.reduce() takes whole numbers of 64 bits, and got {value}; reduce float(value)"
        )
    if op == "sum":
        # In two halves, as the sum may need more bits than any dtype has.
        high, low = _reduced(group, torch.tensor(divmod(value, 2**32), device="cpu"), op).tolist()
        return int(high * 2**32 + low)
    number: float = _reduced(group, torch.tensor([value], device="cpu"), op).item()
    if op == "product":
        about = _reduced(group, torch.tensor([value], dtype=torch.float64, device="cpu"), op).item()
        if abs(about) >= 2**63 * (1 - 1e-9):  # It is rounded.
            raise OverflowError(
                f"the product of all ranks, about {about:.3g}, is more than 64 bits hold; reduce "
                "float(value)"
            )
    return number


def _weighted_mean(
    group: Group, value: torch.Tensor | float, weight: float
) -> torch.Tensor | float:
    # torch would make float32 of a Python float, and keep 24 of its 53 bits.
    wide = torch.complex128 if _is_complex(value) else torch.float64
    dtype = None if isinstance(value, torch.Tensor) else wide
    given = torch.as_tensor(value, dtype=dtype).detach()
    # One collective: the weight after the weighted values, in float64, so counts stay exact.
    sums = torch.zeros(given.numel() + 1, dtype=wide)
    sums[-1] = weight
    if weight:
        sums[:-1] = given.reshape(-1).to(wide) * weight
    sums = _reduced(group, sums, "sum")
    total = sums[-1].real
    if not total > 0:
        raise ValueError("the weights of all ranks add up to 0: no rank had anything to count")
    mean = (sums[:-1] / total).view(given.shape)
    if not isinstance(value, torch.Tensor):
        return mean.item()
    return mean.to(given.device, torch.float64 if _is_whole(given) else given.dtype)


def _wraps_others(value: torch.Tensor) -> bool:
    """Whether its class answers operations itself, as a DTensor, and no parameter, does. What it
    wraps may have other shapes, and other meanings, on each rank."""
    plain = torch.Tensor.__torch_dispatch__
    return type(value).__torch_dispatch__ is not plain and not value.is_nested


def _is_complex(value: Any) -> bool:
    return value.is_complex() if isinstance(value, torch.Tensor) else isinstance(value, complex)


def _is_whole(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


def _reduced(group: Group, tensor: torch.Tensor, op: str) -> torch.Tensor:
    """The reduced tensor, on the device of `tensor`."""
    if op == "mean" and _is_whole(tensor):
        tensor = tensor.to(torch.float64)
    # The sum over many ranks need not fit into the dtype.
    elif tensor.dtype in _SMALL:
        tensor = tensor.to(torch.int64)
    if tensor.dtype not in DTYPES:
        raise TypeError(
            f"ctx.reduce() cannot add numbers of {tensor.dtype}; convert them, as in "
            "ctx.reduce(value.float())"
        )
    total = tensor.to(group.device, copy=True).contiguous()
    group.all_reduce(total, _OPS[op]).wait_on_host()
    return total.to(tensor.device)
