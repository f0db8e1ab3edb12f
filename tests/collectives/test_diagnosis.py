"""What the collectives know of themselves: levels, the flight recorder, DETAIL, profiler ranges."""

from __future__ import annotations

import inspect
import logging
import pickle
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from collectives import (
    DebugLevel,
    Group,
    ReduceOp,
    get_debug_level,
    set_debug_level,
    set_debug_level_from_env,
)
from collectives.contract.errors import (
    CollectiveMismatch,
    CollectiveTimeout,
    StoreTimeout,
)
from collectives.contract.operation import State
from collectives.diagnosis.debug import inform
from collectives.diagnosis.flight_recorder import CAPACITY, tell_positions
from collectives.transports.liveness import StorePosition, culprits
from tests.harness.ranks import GLOO, SHARED_MEMORY, Rank, error_of, run_ranks, transports


@pytest.fixture
def level() -> Iterator[None]:
    before = get_debug_level()
    yield
    set_debug_level(before)


def line() -> int:
    """Of the caller."""
    frame = inspect.currentframe()
    assert frame is not None and frame.f_back is not None
    return frame.f_back.f_lineno


# -- levels ----------------------------------------------------------------------------------------


def test_the_level_comes_from_our_variable_then_from_torchs(
    level: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CHORUSLINE_DEBUG", raising=False)
    monkeypatch.delenv("TORCH_DISTRIBUTED_DEBUG", raising=False)
    set_debug_level_from_env()
    assert get_debug_level() is DebugLevel.OFF
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    set_debug_level_from_env()
    assert get_debug_level() is DebugLevel.DETAIL
    monkeypatch.setenv("CHORUSLINE_DEBUG", "info")
    assert get_debug_level() is DebugLevel.DETAIL
    set_debug_level_from_env()
    assert get_debug_level() is DebugLevel.INFO


def test_a_level_that_does_not_exist_is_refused_with_the_choices(
    level: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHORUSLINE_DEBUG", "LOUD")
    with pytest.raises(ValueError, match="CHORUSLINE_DEBUG must be one of OFF, INFO, DETAIL, got"):
        set_debug_level_from_env()
    with pytest.raises(TypeError, match="level must be a DebugLevel"):
        set_debug_level("INFO")  # type: ignore[arg-type]


def test_what_is_told_at_info_is_seen_where_nobody_set_up_logging() -> None:
    program = "from collectives.diagnosis.debug import inform; inform('%d buckets', 3)"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.stderr == "3 buckets\n"


def test_what_is_told_at_info_goes_to_the_users_logging(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "chorusline"):
        inform("%d buckets", 3)
    assert caplog.messages == ["3 buckets"]


# -- the flight recorder ---------------------------------------------------------------------------


def test_the_recorder_tells_what_was_issued_where_and_how_it_ended(alone: Group) -> None:
    before = time.time()
    first = line() + 1
    alone.all_reduce(torch.ones(3), ReduceOp.MAX).wait()
    alone.broadcast(torch.ones(5).double()).wait()
    alone.barrier().wait()
    recording = alone.flight_recorder
    assert [c.told for c in recording.collectives] == [
        "all_reduce #0 (3 float32) with MAX",
        "broadcast #1 (5 float64) from rank 0",
        "barrier #2",
    ]
    assert [c.line for c in recording.collectives] == [first, first + 1, first + 2]
    for c in recording.collectives:
        assert c.file == __file__
        assert c.state is State.DONE
        assert c.ended_at is not None
        assert before - 1 < c.issued_at <= c.ended_at < time.time() + 1
    assert f"barrier #2, test_diagnosis.py:{first + 2}" == recording.collectives[2].place
    assert "rank 0 of 1: the last 3 of 3 collectives" in str(recording)
    assert f"{__file__}:{first + 1}" in str(recording)
    assert pickle.loads(pickle.dumps(recording)) == recording
    with pytest.raises(AttributeError):
        recording.rank = 1  # type: ignore[misc]


def test_the_recorder_keeps_the_last_ones_only_and_counts_all(alone: Group) -> None:
    for _ in range(CAPACITY + 10):
        alone.barrier().wait()
    recording = alone.flight_recorder
    assert len(recording.collectives) == CAPACITY
    assert recording.collectives[0].sequence == 10
    assert recording.num_issued == CAPACITY + 10


def test_a_hook_that_torch_calls_is_recorded_at_the_line_of_backward(alone: Group) -> None:
    parameter = torch.ones(3, requires_grad=True)
    parameter.register_post_accumulate_grad_hook(hook_of(alone))
    parameter.sum().backward()
    # The hook itself is the user's code here, so it counts.
    assert alone.flight_recorder.collectives[0].line == hook_of.__code__.co_firstlineno + 2
    from runtime.data_parallel.same_model import broadcast_tensors

    here = line() + 1
    broadcast_tensors([torch.ones(2)], 0, alone)
    assert alone.flight_recorder.collectives[-1].line == here


def hook_of(group: Group) -> Callable[[torch.Tensor], None]:
    def hook(parameter: torch.Tensor) -> None:
        group.all_reduce(parameter.grad).wait()

    return hook


def read_in_flight(rank: Rank) -> Any:
    group = rank.group()
    states = []
    if rank.rank == 0:
        works = [group.all_reduce(torch.ones(10)) for _ in range(2)]
        time.sleep(0.3)
        states.append([c.state for c in group.flight_recorder.collectives])
        rank.say("looked")
    else:
        rank.store.wait(["said/looked/0"], 60)
        works = [group.all_reduce(torch.ones(10)) for _ in range(2)]
    for work in works:
        work.wait()
    states.append([c.state for c in group.flight_recorder.collectives])
    rank.say("done")
    rank.store.wait(["said/done/0", "said/done/1"], 60)
    group.abort("enough")
    error_of(lambda: group.barrier().wait())
    states.append([c.state for c in group.flight_recorder.collectives])
    position = group.flight_recorder.position()
    group.close()
    return states, position and position.place.partition(",")[0]


@transports
def test_the_recorder_knows_what_is_in_flight_and_what_failed(
    transport: str, tmp_path: Path
) -> None:
    ((in_flight, *rest), position), (others, _) = run_ranks(read_in_flight, 2, tmp_path, transport)
    done, failed = [State.DONE] * 2, [State.DONE, State.DONE, State.FAILED]
    assert in_flight == [State.STARTED, State.ISSUED]
    assert rest == others == [done, failed]
    assert position == "barrier #2"


def test_positions_are_told_with_the_late_ranks_first() -> None:
    here, there = "all_reduce #118, train.py:57", "all_gather #117, train.py:41"
    assert tell_positions({0: here, 1: here, 2: there, 3: here}, [2]) == (
        f"rank 2 is at {there}, the others at {here}"
    )
    assert tell_positions({0: here, 1: there}, [1]) == f"rank 1 is at {there}, the other at {here}"
    assert tell_positions({0: here, 1: "nothing yet", 2: there, 3: here}, [1, 2]) == (
        f"rank 1 is at nothing yet, rank 2 at {there}, the others at {here}"
    )
    assert tell_positions({0: here, 1: here}, [0, 1]) == f"all ranks are at {here}"
    assert tell_positions({0: here, 1: here, 2: there, 3: there}, [2, 3]) == (
        f"ranks [2, 3] are at {there}, the others at {here}"
    )


def fall_behind(rank: Rank) -> Any:
    group = rank.group()
    part, whole = torch.ones(2), torch.ones(6)
    for _ in range(3):
        group.all_reduce(part).wait()
    gathered_at = line() + 1
    group.all_gather(whole, part).wait()
    if rank.rank == 2:
        if rank.transport == GLOO:
            position = f"group/default/0/1/position/{rank.rank}"
            while b"has finished all_gather #3" not in rank.store.get(position, 30):
                time.sleep(0.05)
        rank.say("asleep")
        rank.store.wait(["said/over/0", "said/over/1"], 60)
        return gathered_at
    rank.store.wait(["said/asleep/2"], 60)
    reduced_at = line() + 1
    error = error_of(lambda: group.all_reduce(part, timeout_s=1.5).wait())
    rank.say("over")
    return error, reduced_at


def test_who_waits_for_somebody_further_behind_is_not_to_blame() -> None:
    inside, idle = StorePosition(1, "is at", waits=True), StorePosition(1, "has finished")
    assert culprits({1: StorePosition(-1, "was not heard of"), 2: inside}) == [1]
    assert culprits({1: StorePosition(0, "has finished"), 2: idle}) == [1, 2]
    assert culprits({1: inside, 2: inside}) == [1, 2]
    assert culprits({}) == []


@transports
def test_a_timeout_says_who_is_behind_at_which_line(transport: str, tmp_path: Path) -> None:
    *waiting, gathered_at = run_ranks(fall_behind, 3, tmp_path, transport)
    for error, reduced_at in waiting:
        assert isinstance(error, CollectiveTimeout)
        there = f"all_gather #3, test_diagnosis.py:{gathered_at}"
        here = f"all_reduce #4, test_diagnosis.py:{reduced_at}"
        if transport == SHARED_MEMORY:
            assert f"rank 2 is at {there}, the others at {here}." in str(error)
        else:
            assert f"rank 2 has finished {there} and issued nothing since" in str(error)
            assert f"the others are at {here}" in str(error)


# -- DETAIL ----------------------------------------------------------------------------------------

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
            where = "on cpu in group 'default' at test_diagnosis.py"
            our_line, their_line = (first_collective(do) for do in (ours, theirs))
            assert f"ranks [0, 2] issued {usual_told} {where}:{our_line}" in str(error), name
            assert f"ranks [1] issued {other_told} {where}:{their_line}" in str(error), name
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
            where = f"test_diagnosis.py:{do.__code__.co_firstlineno + at}"
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
        assert "ranks [1] issued all_reduce #1 (3 float32) with SUM of shape (3,)" in str(forgotten)
        if rank != 1:
            assert isinstance(missing, CollectiveTimeout)
            assert missing.operation == "barrier #1"
            assert missing.ranks == [1]
            assert "all_reduce #0, test_diagnosis.py" in missing.whereabouts


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
    assert "ranks [1] of 2 did not come" in told
    assert "debug level DETAIL" in told


def run_the_contract(rank: Rank) -> None:
    from tests.contracts import group as group_contract

    set_debug_level(DebugLevel.DETAIL)
    with rank.group() as group:
        group_contract.check_shapes_and_views(group)
        group_contract.check_many_in_flight(group)
        group_contract.check_awaiting(group)
        group_contract.check_statistics(group)
        group.barrier().wait()


@transports
def test_detail_changes_no_result(transport: str, tmp_path: Path) -> None:
    run_ranks(run_the_contract, 2, tmp_path, transport)


# -- profiling -------------------------------------------------------------------------------------


def profile(rank: Rank) -> Any:
    with rank.group() as group:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as recorded:
            work = group.all_reduce(torch.ones(500_000))
            torch.ones(3).add_(1)
            work.wait()
            group.barrier().wait()
        group.barrier().wait()
    return {e.key: e.count for e in recorded.key_averages() if e.key.startswith("chorusline::")}


@transports
def test_collectives_are_ranges_in_torchs_profiler(transport: str, tmp_path: Path) -> None:
    for found in run_ranks(profile, 2, tmp_path, transport):
        assert found == {"chorusline::all_reduce": 1, "chorusline::barrier": 1}
