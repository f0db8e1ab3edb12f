"""The norm of a sharded gradient: the same bits however it is cut."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from chorusline.runtime.zero.shards.exact_norm import NUMEL, partial_sum, total_of


def added(parts: list[torch.Tensor]) -> float:
    sums = [partial_sum([part]) for part in parts]
    return total_of([sum(column) for column in zip(*sums, strict=True)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_sum_does_not_depend_on_the_cuts(dtype: torch.dtype) -> None:
    scales = torch.logspace(-15, 12, 9001, dtype=torch.float64)
    values = (torch.randn(9001, dtype=torch.float64) * scales).to(dtype)
    whole = added([values])
    exact = sum(Fraction(float(value)) ** 2 for value in values)
    assert abs(Fraction(whole) / exact - 1) < 1e-15
    for cuts in ([64], [640, 1280], [128, 4096, 8960], [64 * n for n in range(1, 140)]):
        assert added([*torch.tensor_split(values, cuts)]) == whole


def test_small_and_large_squares_and_none_are_summed() -> None:
    assert total_of([0.0] * NUMEL) == 0
    assert total_of(partial_sum([torch.empty(0)])) == 0
    assert total_of(partial_sum([torch.tensor([1e-160], dtype=torch.float64)])) == 1e-320
    assert total_of(partial_sum([torch.full((5,), 3.0)])) == 45


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_seen(value: float) -> None:
    parts = [torch.ones(64), torch.tensor([1.0, value])]
    assert math.isnan(added(parts))


def test_the_sum_of_a_row_does_not_depend_on_the_number_of_rows() -> None:
    rows = torch.randn(500, 64, dtype=torch.float64).square_()
    sums = rows.sum(dim=1)
    for first, count in ((0, 1), (3, 1), (7, 2), (1, 3), (5, 17), (100, 63), (200, 300)):
        part = rows[first : first + count].clone()
        assert torch.equal(part.sum(dim=1), sums[first : first + count])
