"""The bodies in C: the bits of those in Python, where both meet in one group, and without it."""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from chorusline.collectives.contract.operation import ReduceOp
from chorusline.collectives.group import Group
from chorusline.collectives.shared_memory import compiled
from tests.harness.ranks import IN_BOTH, IN_PYTHON, SHARED_MEMORY
from tests.harness.reused_ranks import ReusedRanks

SOURCE = Path(compiled.__file__).with_name("ticks.c")
HALVES = (torch.float16, torch.bfloat16)
DTYPES = (*HALVES, torch.float32, torch.float64, torch.int32, torch.int64, torch.int16)
NUMBERS = (0.0, -0.0, 1.0, -1 / 3, 1e-45, -3e-41, 6e-8, 65504.0, 3.3e38, -3.3e38)
NOT_FINITE = (float("inf"), -float("inf"), float("nan"))

needs_library = pytest.mark.skipif(
    compiled.library() is None,
    reason="the library is not there, or older than ticks.c: make compile",
)


def test_the_source_compiles_without_a_warning(tmp_path: Path) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("this machine has no C compiler")
    flags = ("-Wall", "-Wextra", "-Werror", "-O3", "-std=gnu11", "-shared", "-fPIC")
    subprocess.run([compiler, *flags, "-o", tmp_path / "ticks.so", SOURCE], check=True)
    assert ctypes.CDLL(str(tmp_path / "ticks.so")).advance


def test_a_library_older_than_its_source_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "__file__", str(tmp_path / "compiled.py"))
    (tmp_path / "ticks.so").write_bytes(b"")
    (tmp_path / "ticks.c").touch()
    os.utime(tmp_path / "ticks.so", (0, 0))
    monkeypatch.setattr(ctypes, "CDLL", lambda path: pytest.fail(f"{path} was loaded"))
    assert compiled.library.__wrapped__() is None


def test_a_library_for_another_machine_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "__file__", str(tmp_path / "compiled.py"))
    (tmp_path / "ticks.so").write_bytes(b"not a library")
    assert compiled.library.__wrapped__() is None


def runs_in_c(group: Group) -> bool:
    return group._communicator._lane.compiled is not None  # type: ignore[attr-defined]


@needs_library
def test_the_environment_chooses_who_has_the_library(
    reused_ranks: Callable[[str, int], ReusedRanks],
) -> None:
    assert reused_ranks(SHARED_MEMORY, 3).run(runs_in_c) == [True, True, True]
    assert reused_ranks(IN_PYTHON, 3).run(runs_in_c) == [False, False, False]
    assert reused_ranks(IN_BOTH, 3).run(runs_in_c) == [True, False, True]


def values(rank: int, dtype: torch.dtype) -> torch.Tensor:
    """Each number beside each other one, and every half beside others of its size, whose sums have
    to be rounded; an odd number of them."""
    if dtype in HALVES:
        bits = torch.arange(-(1 << 15), 1 << 15).to(torch.int16)
        every = bits.roll(rank * 333).view(dtype)
        return torch.cat([every, every[:1]])
    if not dtype.is_floating_point:
        return torch.arange(10_001).mul(1 + 2**40 * (rank + 1)).to(dtype)
    pairs = list(itertools.product((*NUMBERS, *NOT_FINITE), repeat=2))
    return torch.tensor([pair[rank % 2] for pair in pairs], dtype=torch.float64).to(dtype)


def sums(group: Group) -> list[Any]:
    """Sums and averages as integers, with all that is not a number made the same."""
    found = []
    for dtype in DTYPES:
        ops = [ReduceOp.SUM, *([ReduceOp.AVG] if dtype.is_floating_point else [ReduceOp.MAX])]
        for op in ops:
            tensor = values(group.rank, dtype)
            group.all_reduce(tensor, op).wait()
            if dtype.is_floating_point:
                tensor[tensor.isnan()] = float("nan")
            found.append(tensor.view(torch.uint8).numpy().tobytes())
    return found


@needs_library
@pytest.mark.parametrize("size", [2, 3])
def test_sums_have_the_bits_of_python(
    size: int, reused_ranks: Callable[[str, int], ReusedRanks]
) -> None:
    expected = reused_ranks(IN_PYTHON, size).run(sums)
    assert reused_ranks(SHARED_MEMORY, size).run(sums) == expected
    assert reused_ranks(IN_BOTH, size).run(sums) == expected


def moves(group: Group, numel: int, dtype: torch.dtype) -> list[bytes]:
    """Every operation that C has, in one chunk and in several, each into memory with other data."""
    me, size = group.rank, group.size
    numbers = torch.Generator().manual_seed(me)
    whole = torch.randn(size * numel, generator=numbers, dtype=torch.float64).to(dtype)
    part = whole[:numel].clone()
    found = [torch.empty_like(part), torch.empty_like(whole), *(part.clone() for _ in range(4))]
    works = [
        group.reduce_scatter(found[0], whole),
        group.all_gather(found[1], part),
        group.all_reduce(found[2]),
        group.broadcast(found[3], size - 1),
        group.reduce(found[4], size - 1, ReduceOp.AVG),
        group.barrier(),
        group.all_reduce(found[5][: numel // 2 or 1], ReduceOp.AVG),
    ]
    for work in works:
        work.wait()
    own = whole.clone()
    group.all_gather(own, own[me * numel : (me + 1) * numel]).wait()
    return [one.view(torch.uint8).numpy().tobytes() for one in (*found, own)]


@needs_library
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("numel", [1, 65, 131_073, 300_001, 1_060_000])
def test_each_operation_gives_what_python_gives_in_any_number_of_ticks(
    numel: int, size: int, reused_ranks: Callable[[str, int], ReusedRanks]
) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        expected = reused_ranks(IN_PYTHON, size).run(moves, numel, dtype)
        assert reused_ranks(SHARED_MEMORY, size).run(moves, numel, dtype) == expected
        assert reused_ranks(IN_BOTH, size).run(moves, numel, dtype) == expected
