"""Which tensors may share memory, so that an operation has to copy its input first."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from chorusline.collectives.operations.arguments import share_memory


def test_ranges_of_one_storage_share_memory_where_they_meet() -> None:
    whole = torch.zeros(100)
    assert not share_memory([whole[:50]], [whole[50:]])
    assert not share_memory([whole[50:]], [whole[:50]])
    assert share_memory([whole[:51]], [whole[50:]])
    assert share_memory([whole[10:20]], [whole])
    assert share_memory([whole], [whole.view(torch.uint8)[-1:]])


def test_interleaved_tensors_count_as_sharing() -> None:
    rows = torch.zeros(10, 2)
    assert share_memory([rows[:, 0]], [rows[:, 1]])
    assert share_memory([rows[:, 0]], [rows])


@pytest.mark.parametrize("number", [1, 3])
def test_tensors_of_different_storages_share_nothing(number: int) -> None:
    a, b = [torch.zeros(4) for _ in range(number)], [torch.zeros(4) for _ in range(number)]
    assert not share_memory(a, b)
    assert not share_memory([torch.zeros(0)], [torch.zeros(0)])
    assert share_memory(a, [*b[1:], a[-1]])


def test_arrays_of_numpy_over_one_buffer_share_memory_where_they_meet() -> None:
    buffer = np.zeros(16, np.float32)
    whole, part = torch.from_numpy(buffer), torch.from_numpy(buffer[8:])
    assert share_memory([whole], [part]) and share_memory([part, torch.ones(3)], [whole])
    assert not share_memory([torch.from_numpy(buffer[:8])], [part])
    rows = torch.from_numpy(buffer.reshape(4, 4)[:, 1:])
    assert share_memory([rows], [part]) and not share_memory([rows[:1]], [part])
