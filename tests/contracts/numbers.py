"""What ranks bring to the checks of the contracts, and what numpy makes of it."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from chorusline.collectives.contract.dtypes import DTYPES
from chorusline.collectives.contract.operation import ReduceOp
from chorusline.collectives.group import Group
from tests.references.reductions import UFUNCS

SMALL_SIZES = (0, 1, 10)
LARGE_SIZE = 600_007
LARGE_DTYPES = (torch.float32, torch.int64, torch.complex64)
LARGE_CASES = (
    (torch.float32, ReduceOp.SUM),
    (torch.bfloat16, ReduceOp.AVG),
    (torch.float16, ReduceOp.MIN),
    (torch.float64, ReduceOp.PRODUCT),
    (torch.int32, ReduceOp.AVG),
    (torch.int64, ReduceOp.MAX),
    (torch.complex64, ReduceOp.SUM),
    (torch.uint8, ReduceOp.BXOR),
)
BITWISE = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)


def can(group: Group, dtype: torch.dtype, op: ReduceOp) -> bool:
    """What the contract promises; everything else is refused."""
    if group.backend == "nccl" and (dtype is torch.int16 or op is ReduceOp.BXOR):
        return False
    if group.backend == "nccl" and op is ReduceOp.AVG and dtype in (torch.int8, torch.uint8):
        return False
    if dtype is torch.bool:
        return op not in (ReduceOp.AVG, ReduceOp.PREMUL_SUM)
    if group.backend == "nccl" and op in BITWISE:
        return False
    if dtype.is_complex:
        return op in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PREMUL_SUM)
    return not (dtype.is_floating_point and op in BITWISE)


def cases(group: Group) -> Iterator[tuple[int, torch.dtype, ReduceOp]]:
    every = [(dtype, op) for dtype in DTYPES for op in ReduceOp if can(group, dtype, op)]
    for numel in SMALL_SIZES:
        for dtype, op in every:
            yield numel, dtype, op
    for dtype, op in LARGE_CASES:
        if (dtype, op) in every:
            yield LARGE_SIZE, dtype, op


def part(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """What `rank` brings: from -3 to 3, so that sums and products are exact in every dtype."""
    numbers = _drawn(rank, numel)
    if dtype.is_complex:
        return torch.complex(numbers.double(), numbers.flip(0).double()).to(dtype)
    return (numbers > 0) if dtype is torch.bool else numbers.to(dtype, copy=True)


@functools.lru_cache(maxsize=32)
def _drawn(rank: int, numel: int) -> torch.Tensor:
    generator = np.random.default_rng([rank, numel])
    return torch.from_numpy(generator.integers(-3, 4, numel, dtype=np.int8))


def factor_of(rank: int, dtype: torch.dtype, op: ReduceOp) -> complex | None:
    """Another one on each rank."""
    if op is not ReduceOp.PREMUL_SUM:
        return None
    if dtype.is_complex:
        return 0.5 * (rank + 1) + 1j
    return 0.5 * (rank + 1) if dtype.is_floating_point else rank + 2


def wide(tensor: torch.Tensor) -> NDArray[Any]:
    """As numpy has it, without loss."""
    tensor = tensor.detach().cpu()
    if tensor.is_complex():
        return np.asarray(tensor.to(torch.complex128).numpy())
    return np.asarray((tensor.double() if tensor.is_floating_point() else tensor.long()).numpy())


def reduced(parts: list[torch.Tensor], op: ReduceOp) -> NDArray[Any]:
    """The reduction in numpy, in float64, int64 or complex128."""
    dtype = parts[0].dtype
    stack: NDArray[Any] = np.stack([wide(p) for p in parts])
    if op is ReduceOp.PREMUL_SUM:
        factors = [factor_of(rank, dtype, op) for rank in range(len(parts))]
        return np.asarray(sum(row * f for row, f in zip(stack, factors, strict=True)))
    if op is ReduceOp.AVG:
        total = np.asarray(stack.sum(0))
        if dtype.is_complex:  # numpy's complex division rounds twice.
            return total.real / len(parts) + 1j * (total.imag / len(parts))
        mean = total / len(parts)
        return mean if dtype.is_floating_point else np.trunc(mean)
    if dtype is torch.bool:
        stack = stack.astype(bool)
    if dtype is torch.bool and op in (ReduceOp.SUM, ReduceOp.PRODUCT):
        return np.asarray(stack.any(0) if op is ReduceOp.SUM else stack.all(0))
    return np.asarray(UFUNCS[op].reduce(stack, axis=0))


def assert_equal(tensor: torch.Tensor, expected: NDArray[Any]) -> None:
    """Equal to `expected`, rounded once to the tensor's dtype."""
    rounded = torch.from_numpy(np.asarray(expected)).to(tensor.dtype)
    found, wanted = wide(tensor), wide(rounded)
    if found.shape != wanted.shape or not (found == wanted).all():
        np.testing.assert_array_equal(found, wanted)  # It says where; and NaN equals NaN.


def digest(tensors: list[torch.Tensor]) -> str:
    """Of the bits."""
    hashed = hashlib.sha256()
    for tensor in tensors:
        copy = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
        hashed.update(copy.view(-1).view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()


def moved_cases() -> Iterator[tuple[int, torch.dtype]]:
    for numel in (0, 1, 7):
        for dtype in DTYPES:
            yield numel, dtype
    for dtype in LARGE_DTYPES:
        yield 150_001, dtype


def message(source: int, to: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """What `source` has for rank `to`."""
    return part(100 * source + to, numel, dtype)


def empty(group: Group, numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((numel,), 7, dtype=torch.int64).to(dtype).to(group.device)
