"""Calls that cannot be right: of ranks that disagree, and of one caller, refused before sending."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from chorusline.collectives.contract.errors import (
    CollectiveMismatch,
    UnsupportedOperation,
)
from chorusline.collectives.contract.operation import ReduceOp
from chorusline.collectives.contract.work import Work
from chorusline.collectives.group import Group
from chorusline.collectives.stores.store import HashStore
from tests.harness.ranks import Rank, error_of, run_ranks, transports

# -- a disagreement ------------------------------------------------------------------------------

Issue = Callable[[Group, torch.Tensor], Work]


def reduce_scatter(group: Group, tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM) -> Work:
    return group.reduce_scatter(tensor[: tensor.numel() // group.size], tensor, op)


def all_gather(group: Group, tensor: torch.Tensor) -> Work:
    return group.all_gather(tensor, tensor[: tensor.numel() // group.size].clone())


ONES = torch.ones(12)

MISMATCHES: dict[str, tuple[Issue, torch.Tensor, Issue, torch.Tensor, str, str]] = {
    # What two ranks issue on which tensor, what the third does, and both sides as told.
    "operation": (
        lambda group, t: group.all_reduce(t),
        ONES,
        lambda group, t: group.broadcast(t, 1),
        ONES,
        "all_reduce #0 (12 float32) with SUM",
        "broadcast #0 (12 float32) from rank 1",
    ),
    "length": (
        lambda group, t: group.all_reduce(t),
        ONES,
        lambda group, t: group.all_reduce(t),
        torch.ones(9),
        "all_reduce #0 (12 float32) with SUM",
        "all_reduce #0 (9 float32) with SUM",
    ),
    "number of rounds": (
        lambda group, t: group.all_reduce(t),
        ONES,
        lambda group, t: group.all_reduce(t),
        torch.ones(5_000_000),
        "all_reduce #0 (12 float32) with SUM",
        "all_reduce #0 (5000000 float32) with SUM",
    ),
    "dtype": (
        lambda group, t: group.all_reduce(t),
        ONES,
        lambda group, t: group.all_reduce(t),
        ONES.double(),
        "all_reduce #0 (12 float32) with SUM",
        "all_reduce #0 (12 float64) with SUM",
    ),
    "root": (
        lambda group, t: group.broadcast(t, 0),
        ONES,
        lambda group, t: group.broadcast(t, 1),
        ONES,
        "broadcast #0 (12 float32) from rank 0",
        "broadcast #0 (12 float32) from rank 1",
    ),
    "reduce op": (
        reduce_scatter,
        ONES,
        lambda group, t: reduce_scatter(group, t, ReduceOp.MAX),
        ONES,
        "reduce_scatter #0 (12 float32) with SUM",
        "reduce_scatter #0 (12 float32) with MAX",
    ),
    "factor": (
        lambda group, t: group.all_reduce(t, ReduceOp.PREMUL_SUM, factor=2.0),
        ONES,
        lambda group, t: group.all_reduce(t),
        ONES,
        "all_reduce #0 (12 float32) with PREMUL_SUM",
        "all_reduce #0 (12 float32) with SUM",
    ),
    "factor on a root": (
        lambda group, t: group.reduce(t, 0, ReduceOp.PREMUL_SUM, factor=2.0),
        ONES,
        lambda group, t: group.reduce(t, 0),
        ONES,
        "reduce #0 (12 float32) with PREMUL_SUM to rank 0",
        "reduce #0 (12 float32) with SUM to rank 0",
    ),
    "barrier": (
        lambda group, t: group.barrier(),
        ONES,
        all_gather,
        ONES,
        "barrier #0",
        "all_gather #0 (12 float32)",
    ),
}


def disagree(rank: Rank) -> list[Any]:
    """In every case rank 1 does something else. (error, whether the tensor is as it was)"""
    found = []
    for generation, name in enumerate(MISMATCHES):
        usual, usual_tensor, other, other_tensor, _, _ = MISMATCHES[name]
        issue, tensor = (other, other_tensor) if rank.rank == 1 else (usual, usual_tensor)
        ours = tensor.clone() * (rank.rank + 1)
        before = ours.clone()
        with rank.group(generation=generation) as group:
            error = error_of(lambda issue=issue, group=group, ours=ours: issue(group, ours).wait())
        found.append((error, torch.equal(ours, before)))
    return found


@transports
def test_ranks_that_disagree_are_told_both_sides_and_keep_their_tensors(
    transport: str, tmp_path: Path
) -> None:
    by_rank = run_ranks(disagree, 3, tmp_path, transport)
    for case, name in enumerate(MISMATCHES):
        usual, other = MISMATCHES[name][-2:]
        for found in by_rank:
            error, is_unchanged = found[case]
            assert isinstance(error, CollectiveMismatch), (name, error)
            assert error.ranks == [1], name
            assert f"ranks [0, 2] issued {usual}, rank 1 issued {other}" in str(error)
            assert is_unchanged, name
            assert error.args == by_rank[0][case][0].args


@transports
def test_of_two_ranks_that_disagree_both_are_named(transport: str, tmp_path: Path) -> None:
    for found in run_ranks(disagree, 2, tmp_path, transport):
        for error, is_unchanged in found:
            assert isinstance(error, CollectiveMismatch)
            assert error.ranks == [0, 1]
            assert is_unchanged


# -- mistakes of one caller, told before anything is issued ----------------------------------------


def test_a_tensor_on_another_device_is_refused_with_the_remedy(alone: Group) -> None:
    text = r"tensor is on meta, but this group moves tensors on cpu; call .to\('cpu'\) first"
    with pytest.raises(ValueError, match=text):
        alone.all_reduce(torch.ones(3, device="meta"))


def test_a_result_with_several_elements_in_one_place_is_refused(alone: Group) -> None:
    text = r"tensor of shape \(3,\) and strides \(0,\) has several elements in one place.*\.clone"
    with pytest.raises(ValueError, match=text):
        alone.all_reduce(torch.ones(()).expand(3))


def test_a_dtype_outside_the_contract_is_refused_with_the_list(alone: Group) -> None:
    text = r"tensor of dtype torch.uint16 is not supported by the shared-memory backend: use one of"
    with pytest.raises(UnsupportedOperation, match=text):
        alone.all_reduce(torch.ones(3, dtype=torch.uint16))


def test_something_else_than_a_tensor_is_refused(alone: Group) -> None:
    with pytest.raises(TypeError, match=r"tensor must be a torch.Tensor, a numpy.*, got list"):
        alone.all_reduce([1.0])


@pytest.mark.parametrize("root", [-1, 1])
def test_a_root_out_of_range_is_refused(alone: Group, root: int) -> None:
    with pytest.raises(ValueError, match=rf"root must be a rank in \[0, 1\), got {root}"):
        alone.broadcast(torch.ones(3), root)


def test_parts_that_do_not_add_up_are_refused_with_the_numbers(alone: Group) -> None:
    text = r"input has 4 elements, output 3; with 1 ranks input must have 1 \* 3 = 3"
    with pytest.raises(ValueError, match=text):
        alone.reduce_scatter(torch.ones(3), torch.ones(4))
    text = r"all_gather: output is torch.float64 but input is torch.float32"
    with pytest.raises(ValueError, match=text):
        alone.all_gather(torch.ones(3).double(), torch.ones(3))


@pytest.mark.parametrize("timeout_s", [0, -1.5])
def test_a_deadline_in_the_past_is_refused(alone: Group, timeout_s: float) -> None:
    with pytest.raises(ValueError, match=rf"timeout_s must be positive, got {timeout_s}"):
        alone.barrier(timeout_s=timeout_s)
    assert alone.statistics.total_operations() == 0


def test_impossible_groups_are_refused() -> None:
    store = HashStore()
    with pytest.raises(ValueError, match="size must be at least 1, got 0"):
        Group.create(store, 0, 0)
    with pytest.raises(ValueError, match=r"rank must be in \[0, 2\), got 2"):
        Group.create(store, 2, 2)
    with pytest.raises(ValueError, match="timeout_s must be positive, got 0"):
        Group.create(store, 0, 1, timeout_s=0)
    with pytest.raises(ValueError, match="device must be a cpu or cuda device, got meta"):
        Group.create(store, 0, 1, "meta")
