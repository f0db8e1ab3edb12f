"""Debug level DETAIL: both sides of a mistake, with their lines, before anything changes."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from chorusline.collectives.contract.errors import (
    CollectiveMismatch,
    CollectiveTimeout,
    StoreTimeout,
)
from chorusline.collectives.contract.operation import ReduceOp
from chorusline.collectives.diagnosis.debug import DebugLevel, set_debug_level
from chorusline.collectives.group import Group
from tests.contracts import in_flight, operations
from tests.harness.ranks import Rank, error_of, run_ranks, transports

Do = Callable[[Group, torch.Tensor], Any]


def usual(group: Group, t: torch.Tensor) -> Any:
    return group.all_reduce(t)


def others_kind(group: Group, t: torch.Tensor) -> Any:
    return group.broadcast(t, 1)


def others_shape(group: Group, t: torch.Tensor) -> Any:
    return group.all_reduce(t.view(3, 4))


def others_dtype(group: Group, t: torch.Tensor) -> Any:
    return group.all_reduce(t.view(torch.int32))


def others_op(group: Group, t: torch.Tensor) -> Any:
    return group.all_reduce(t, ReduceOp.MAX)


def others_size(group: Group, t: torch.Tensor) -> Any:
    return group.all_reduce(t[:9])


def from_root_0(group: Group, t: torch.Tensor) -> Any:
    return group.broadcast(t, 0)


def out_of_order(group: Group, t: torch.Tensor) -> Any:
    group.barrier()
    return group.all_reduce(t)


def in_order(group: Group, t: torch.Tensor) -> Any:
    group.all_reduce(t)
    return group.barrier()


def gathered_on(root: int) -> Do:
    def do(group: Group, t: torch.Tensor) -> Any:
        output = torch.empty(36) if group.rank == root else None
        return group.gather(t, output, root)

    return do


def scattered_from(root: int) -> Do:
    def do(group: Group, t: torch.Tensor) -> Any:
        return group.scatter(t[:4], t.clone() if group.rank == root else None, root)

    return do


def reduced_on_0(group: Group, t: torch.Tensor) -> Any:
    return group.reduce(t, 0)


def reduced_on_1(group: Group, t: torch.Tensor) -> Any:
    return group.reduce(t, 1)


def to_all(group: Group, t: torch.Tensor) -> Any:
    return group.all_to_all(t, t.clone())


def integers_to_all(group: Group, t: torch.Tensor) -> Any:
    return group.all_to_all(t.view(torch.int32), t.view(torch.int32).clone())


def scattered_sum(group: Group, t: torch.Tensor) -> Any:
    return group.reduce_scatter(t[:4], t.clone())


def scattered_table(group: Group, t: torch.Tensor) -> Any:
    return group.reduce_scatter(t[:4].view(2, 2), t.clone())


def scattered_from_a_table(group: Group, t: torch.Tensor) -> Any:
    return group.reduce_scatter(t[:4], t.clone().view(3, 4))


def gathered_list(group: Group, t: torch.Tensor) -> Any:
    return group.all_gather([torch.empty(4) for _ in range(3)], t[:4])


def gathered_uneven_list(group: Group, t: torch.Tensor) -> Any:
    return group.all_gather([torch.empty(n) for n in (4, 5, 3)], t[:5])


SUM = "all_reduce #0 (12 float32) with SUM of shape (12,)"
PLANTED: dict[str, tuple[Do, Do, str, str]] = {
    # What ranks 0 and 2 do, what rank 1 does, and both sides as told.
    "kind": (usual, others_kind, SUM, "broadcast #0 (12 float32) from rank 1 of shape (12,)"),
    "shape": (usual, others_shape, SUM, "all_reduce #0 (12 float32) with SUM of shape (3, 4)"),
    "dtype": (usual, others_dtype, SUM, "all_reduce #0 (12 int32) with SUM of shape (12,)"),
    "reduce op": (usual, others_op, SUM, "all_reduce #0 (12 float32) with MAX of shape (12,)"),
    "size": (usual, others_size, SUM, "all_reduce #0 (9 float32) with SUM of shape (9,)"),
    "root": (
        from_root_0,
        others_kind,
        "broadcast #0 (12 float32) from rank 0 of shape (12,)",
        "broadcast #0 (12 float32) from rank 1 of shape (12,)",
    ),
    "order": (in_order, out_of_order, SUM, "barrier #0"),
    "root of a gather": (
        gathered_on(0),
        gathered_on(1),
        "gather #0 (float32) to rank 0",
        "gather #0 (float32) to rank 1",
    ),
    "root of a scatter": (
        scattered_from(0),
        scattered_from(1),
        "scatter #0 (float32) from rank 0",
        "scatter #0 (float32) from rank 1",
    ),
    "root of a reduce": (
        reduced_on_0,
        reduced_on_1,
        "reduce #0 (12 float32) with SUM to rank 0 of shape (12,)",
        "reduce #0 (12 float32) with SUM to rank 1 of shape (12,)",
    ),
    "dtype of an exchange": (
        to_all,
        integers_to_all,
        "all_to_all #0 (float32)",
        "all_to_all #0 (int32)",
    ),
    "shape of an output": (
        scattered_sum,
        scattered_table,
        "reduce_scatter #0 (12 float32) with SUM of shape (4,), (12,)",
        "reduce_scatter #0 (12 float32) with SUM of shape (2, 2), (12,)",
    ),
    "shape of an input": (
        scattered_sum,
        scattered_from_a_table,
        "reduce_scatter #0 (12 float32) with SUM of shape (4,), (12,)",
        "reduce_scatter #0 (12 float32) with SUM of shape (4,), (3, 4)",
    ),
    "evenness": (
        gathered_list,
        gathered_uneven_list,
        "all_gather #0 (12 float32) of shape (4,)",
        "all_gather #0 (12 float32) in parts of different sizes",
    ),
}


def first_collective(do: Do) -> int:
    """Where the first collective is; in what issues two, the first of them."""
    lines, first = inspect.getsourcelines(do)
    return first + next(i for i, text in enumerate(lines) if re.search(r" group\.\w+\(", text))


def plant(rank: Rank) -> list[Any]:
    set_debug_level(DebugLevel.DETAIL)
    found = []
    for generation, (ours, theirs, _, _) in enumerate(PLANTED.values()):
        tensor = torch.full((12,), float(rank.rank + 1))
        before = tensor.clone()
        with rank.group(generation=generation, timeout_s=20) as group:
            do = theirs if rank.rank == 1 else ours
            error = error_of(lambda do=do, group=group, t=tensor: do(group, t).wait())
        found.append((error, torch.equal(tensor, before)))
    return found


@transports
def test_detail_names_both_sides_with_their_lines_before_anything_changes(
    transport: str, tmp_path: Path
) -> None:
    by_rank = run_ranks(plant, 3, tmp_path, transport)
    for case, (name, (ours, theirs, usual_told, other_told)) in enumerate(PLANTED.items()):
        for found in by_rank:
            error, is_unchanged = found[case]
            assert isinstance(error, CollectiveMismatch), (name, error)
            assert is_unchanged, name
            assert error.ranks == [1], name
            where = "on cpu in group 'default' at test_detail.py"
            our_line, their_line = (first_collective(do) for do in (ours, theirs))
            assert f"ranks [0, 2] issued {usual_told} {where}:{our_line}" in str(error), name
            assert f"rank 1 issued {other_told} {where}:{their_line}" in str(error), name
            assert error.args == by_rank[0][case][0].args


def send_other_sizes(group: Group) -> Any:
    """Rank 1 sends rank 2 more than that expects."""
    sizes = [2, 3, 5] if group.rank == 1 else [2, 3, 4]
    received = [torch.zeros((2, 3, 4)[group.rank]) for _ in range(3)]
    return group.all_to_all(received, [torch.ones(n) for n in sizes]), received


def gather_other_sizes(group: Group) -> Any:
    received = [torch.zeros(n) for n in (2, 3, 4)]
    is_root = group.rank == 2
    part = torch.ones((2, 5, 4)[group.rank])
    return group.gather(part, received if is_root else None, 2), received


def scatter_other_sizes(group: Group) -> Any:
    sent = [torch.ones(n) for n in (2, 3, 4)]
    received = torch.zeros((2, 3, 5)[group.rank])
    return group.scatter(received, sent if group.rank == 1 else None, 1), [received]


PAIRS = {
    send_other_sizes: ("all_to_all", [1, 2], "rank 1 sends 5 elements to rank 2, which expects 4"),
    gather_other_sizes: ("gather", [1, 2], "rank 1 sends 5 elements to rank 2, which expects 3"),
    scatter_other_sizes: ("scatter", [1, 2], "rank 1 sends 4 elements to rank 2, which expects 5"),
}


def plant_pairs(rank: Rank) -> list[Any]:
    set_debug_level(DebugLevel.DETAIL)
    found = []
    for generation, do in enumerate(PAIRS):
        with rank.group(generation=generation, timeout_s=20) as group:
            work, received = do(group)
            error = error_of(work.wait)
        found.append((error, not any(tensor.any() for tensor in received)))
    return found


@transports
def test_detail_names_the_lines_of_a_pair_that_differs(transport: str, tmp_path: Path) -> None:
    for found in run_ranks(plant_pairs, 3, tmp_path, transport):
        for (do, (name, ranks, told)), (error, is_unchanged) in zip(
            PAIRS.items(), found, strict=True
        ):
            assert isinstance(error, CollectiveMismatch), (name, error)
            assert error.ranks == ranks
            assert is_unchanged
            lines = inspect.getsource(do).splitlines()
            at = next(i for i, line in enumerate(lines) if f"group.{name}(" in line)
            where = f"test_detail.py:{do.__code__.co_firstlineno + at}"
            assert f"{told}; rank 1 is at {where}, rank 2 is at {where}" in str(error)


def leave_one_out(rank: Rank) -> Any:
    """Rank 1 forgets a barrier, and then a second operation for good."""
    set_debug_level(DebugLevel.DETAIL)
    group = rank.group(timeout_s=1.5)
    # One operation at two lines is no mismatch.
    if rank.rank == 1:
        group.barrier().wait()
    else:
        group.barrier().wait()
    tensor = torch.ones(3)
    if rank.rank != 1:
        forgotten = error_of(lambda: group.barrier().wait())
    else:
        forgotten = error_of(lambda: group.all_reduce(tensor).wait())
    with rank.group(generation=1, timeout_s=1.5) as group:
        group.all_reduce(tensor).wait()
        if rank.rank == 1:
            rank.store.wait(["said/over/0", "said/over/2"], 60)
            return forgotten, None
        missing = error_of(lambda: group.barrier().wait())
        rank.say("over")
    return forgotten, missing


@transports
def test_detail_names_a_rank_that_leaves_an_operation_out(transport: str, tmp_path: Path) -> None:
    for rank, (forgotten, missing) in enumerate(run_ranks(leave_one_out, 3, tmp_path, transport)):
        assert isinstance(forgotten, CollectiveMismatch)
        assert "ranks [0, 2] issued barrier #1 on cpu" in str(forgotten)
        assert "rank 1 issued all_reduce #1 (3 float32) with SUM of shape (3,)" in str(forgotten)
        if rank != 1:
            assert isinstance(missing, CollectiveTimeout)
            assert missing.operation == "barrier #1"
            assert missing.ranks == [1]
            assert "all_reduce #0, test_detail.py" in missing.whereabouts


def detail_on_one(rank: Rank) -> Any:
    if rank.rank == 0:
        set_debug_level(DebugLevel.DETAIL)
    try:
        rank.group(timeout_s=1).close()
    except StoreTimeout as error:
        return str(error)
    return ""  # The group of a rank without DETAIL is whole before the other rank waits in vain.


def test_detail_on_some_ranks_only_is_told(tmp_path: Path) -> None:
    told, _ = run_ranks(detail_on_one, 2, tmp_path)
    assert "rank 1 of 2 did not take part in the comparison" in told
    assert "debug level DETAIL" in told


def run_the_contract(rank: Rank) -> None:
    set_debug_level(DebugLevel.DETAIL)
    with rank.group() as group:
        operations.check_shapes_and_views(group)
        in_flight.check_many_in_flight(group)
        in_flight.check_awaiting(group)
        in_flight.check_statistics(group)
        group.barrier().wait()


@transports
def test_detail_changes_no_result(transport: str, tmp_path: Path) -> None:
    run_ranks(run_the_contract, 2, tmp_path, transport)
