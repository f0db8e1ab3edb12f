"""What the flight recorder says of a group's operations, and whom it names as late."""

from __future__ import annotations

import inspect
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from chorusline.collectives.contract.errors import (
    CollectiveTimeout,
)
from chorusline.collectives.contract.operation import ReduceOp, State
from chorusline.collectives.diagnosis.flight_recorder import CAPACITY, describe_positions
from chorusline.collectives.group import Group
from chorusline.collectives.transports.liveness import StorePosition, culprits
from tests.harness.ranks import GLOO, SHARED_MEMORY, Rank, error_of, run_ranks, transports


def line() -> int:
    """Of the caller."""
    frame = inspect.currentframe()
    assert frame is not None and frame.f_back is not None
    return frame.f_back.f_lineno


def test_the_recorder_tells_what_was_issued_where_and_how_it_ended(alone: Group) -> None:
    before = time.time()
    first = line() + 1
    alone.all_reduce(torch.ones(3), ReduceOp.MAX).wait()
    alone.broadcast(torch.ones(5).double()).wait()
    alone.barrier().wait()
    recording = alone.flight_recorder
    assert [c.description for c in recording.collectives] == [
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
    assert f"barrier #2, test_flight_recorder.py:{first + 2}" == recording.collectives[2].place
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
    from chorusline.runtime.data_parallel.same_model import broadcast_tensors

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
        recording = group.flight_recorder
        states.append([c.state for c in recording.collectives])
        first = recording.position()
        assert first is not None and first.sequence == 0, "the first that is not done"
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
    assert describe_positions({0: here, 1: here, 2: there, 3: here}, [2]) == (
        f"rank 2 is at {there}, the others at {here}"
    )
    assert (
        describe_positions({0: here, 1: there}, [1]) == f"rank 1 is at {there}, the other at {here}"
    )
    assert describe_positions({0: here, 1: "nothing yet", 2: there, 3: here}, [1, 2]) == (
        f"rank 1 is at nothing yet, rank 2 at {there}, the others at {here}"
    )
    assert describe_positions({0: here, 1: here}, [0, 1]) == f"all ranks are at {here}"
    assert describe_positions({0: here, 1: here, 2: there, 3: there}, [2, 3]) == (
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
        there = f"all_gather #3, test_flight_recorder.py:{gathered_at}"
        here = f"all_reduce #4, test_flight_recorder.py:{reduced_at}"
        if transport == SHARED_MEMORY:
            assert f"rank 2 is at {there}, the others at {here}." in str(error)
        else:
            assert f"rank 2 has finished {there} and issued nothing since" in str(error)
            assert f"the others are at {here}" in str(error)
