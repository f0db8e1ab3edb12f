"""Parameters and buffers of every dtype reach the other ranks bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import chorusline as cl

DTYPES = [
    name
    for name in (
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "complex32"),
        *("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "bool"),
        *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    )
    if hasattr(torch, name)
]


def bits_of(dtype: torch.dtype, rank: int) -> torch.Tensor:
    """(24,) of the dtype, other bits on each rank."""
    if dtype is torch.bool:
        return (torch.arange(24) + rank) % 3 == 0
    width = torch.empty(0, dtype=dtype).element_size()
    numbers = torch.arange(24 * width, dtype=torch.int64) * (3 + rank) % 113
    return numbers.to(torch.uint8).view(dtype)


def wrapped(group: cl.Group, name: str, as_parameter: bool) -> list[int]:
    """The bits on this rank of a tensor that rank 0's has to replace; at odd strides."""
    module = torch.nn.Linear(2, 1)
    values = bits_of(getattr(torch, name), group.rank).reshape(6, 4).t()
    if as_parameter:
        module.frozen = torch.nn.Parameter(values, requires_grad=False)
    else:
        module.register_buffer("frozen", values)
    model = cl.DistributedDataParallel(module, group)
    return model.module.frozen.contiguous().view(torch.uint8).reshape(-1).tolist()


@pytest.mark.parametrize("as_parameter", [True, False], ids=["parameter", "buffer"])
@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.filterwarnings("ignore:ComplexHalf support")
def test_every_dtype_begins_with_the_bits_of_rank_0(
    ranks_of: Callable[[int], Any], name: str, as_parameter: bool
) -> None:
    first = bits_of(getattr(torch, name), 0).reshape(6, 4).t().contiguous()
    for bits in ranks_of(2).run(wrapped, name, as_parameter):
        assert bits == first.view(torch.uint8).reshape(-1).tolist()


class Turned(torch.nn.Module):
    """Parameters with imaginary parts."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        begin = torch.linspace(1, 2, 70)
        self.weight = torch.nn.Parameter(torch.complex(begin, -3 * begin).to(dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).abs().square().sum()


def norm_of(group: cl.Group, dtype: str, max_norm: float) -> tuple[float, list[complex]]:
    model = cl.DistributedDataParallel(Turned(getattr(torch, dtype)), group)
    optim = cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.1, max_norm=max_norm)
    model(torch.ones(())).backward()
    optim.step()
    return float(optim.grad_norm), model.module.weight.detach().tolist()


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
@pytest.mark.parametrize("max_norm", [0.5, 1e9])
def test_the_norm_of_complex_gradients_has_their_imaginary_part(
    ranks_of: Callable[[int], Any], dtype: str, max_norm: float
) -> None:
    alone = Turned(getattr(torch, dtype))
    alone(torch.ones(())).backward()
    norm = torch.nn.utils.clip_grad_norm_(alone.parameters(), max_norm)
    torch.optim.SGD(alone.parameters(), lr=0.1).step()
    for ours, weights in ranks_of(2).run(norm_of, dtype, max_norm):
        assert ours == pytest.approx(norm.item(), rel=1e-6)
        assert weights == pytest.approx(alone.weight.tolist(), rel=1e-5)
