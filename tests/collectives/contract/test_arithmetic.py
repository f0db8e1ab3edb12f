"""Reductions on the host, against Python's own numbers."""

from __future__ import annotations

import random

import pytest
import torch

from chorusline.collectives.contract.arithmetic import reduce_into
from chorusline.collectives.contract.operation import ReduceOp


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64])
def test_an_average_of_whole_numbers_does_not_overflow(dtype: torch.dtype, size: int) -> None:
    chance, limits = random.Random(size), torch.iinfo(dtype)
    rows = [[limits.max, limits.min, -1, 0, limits.min + 1] for _ in range(size)]
    for row in rows:
        row += [chance.randint(limits.min, limits.max) for _ in range(50)]
    output = torch.empty(len(rows[0]), dtype=dtype)
    reduce_into(output, [torch.tensor(row, dtype=dtype) for row in rows], ReduceOp.AVG)
    sums = [sum(column) for column in zip(*rows, strict=True)]
    truncated = [abs(one) // size * (1 if one > 0 else -1) for one in sums]
    assert output.tolist() == truncated
