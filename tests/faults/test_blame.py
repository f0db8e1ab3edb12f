"""Whose deadline ends first is chance: who is kept waiting by another rank is not to blame."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from chorusline.collectives.contract.errors import CollectiveError, CollectiveTimeout
from chorusline.collectives.diagnosis.blame import (
    describe_issued,
    describe_waits,
    to_blame,
    usual_and_blamed,
)
from chorusline.collectives.group import Group
from tests.harness.ranks import GLOO, SHARED_MEMORY, Rank, run_ranks

MORE_THAN_A_RING = 1_000_000


@pytest.mark.parametrize(
    ("late", "waits_for", "here", "blamed"),
    [
        ([0, 2], {}, [1], [0, 2]),
        ([0, 2], {2: [0]}, [1], [0]),
        ([2], {2: [1], 1: [0]}, [3], [0]),
        ([2], {2: [0, 1]}, [3], [0, 1]),
        # Who waits for one that is here disagrees with it on what comes next.
        ([0, 2], {2: [1]}, [1], [0, 2]),
        ([0, 2], {2: [0, 1]}, [1], [0, 2]),
        ([0, 2], {2: [0], 0: [2]}, [1], [0, 2]),
    ],
)
def test_the_ends_of_the_chains_are_to_blame(
    late: list[int], waits_for: dict[int, list[int]], here: list[int], blamed: list[int]
) -> None:
    assert to_blame(late, waits_for, here) == blamed


def test_waits_are_told_of_those_who_are_late_only() -> None:
    waits_for = {2: [1], 1: [0], 3: [4, 0]}
    assert (
        describe_waits(waits_for, [3, 2])
        == "; rank 2 waits for rank 1; rank 3 waits for ranks [0, 4]"
    )
    assert describe_waits(waits_for, [0]) == ""


def _send_to_0(group: Group) -> None:
    group.send(torch.ones(MORE_THAN_A_RING), 0, timeout_s=30).wait()


def _recv_from_0(group: Group) -> None:
    group.recv(torch.ones(3), 0, timeout_s=30).wait()


def _polled(group: Group) -> None:
    work = group.recv(torch.ones(3), 0, timeout_s=30)
    while not work.is_completed():
        time.sleep(0.001)
    work.wait()


WAITS = {call.__name__: call for call in (_send_to_0, _recv_from_0, _polled)}


def stop_before(rank: Rank, names: list[str]) -> Any:
    """Rank 0 does nothing, rank 2 waits for it, and it is rank 1 whose deadline ends."""
    errors = []
    for generation, name in enumerate(names):
        group = rank.group(generation=generation)
        group.barrier().wait()
        errors.append(_error_of(rank, group, name))
        rank.say(f"over {generation}")
        rank.store.wait([f"said/over {generation}/{r}" for r in range(3)], 60)
        group.close()
    return errors


def _error_of(rank: Rank, group: Group, name: str) -> CollectiveError | None:
    if rank.rank == 0:
        while group.failure() is None:
            time.sleep(0.02)
        return group.failure()
    try:
        if rank.rank == 2:
            rank.say(f"waits {group.generation}")
            WAITS[name](group)
        else:
            rank.store.wait([f"said/waits {group.generation}/2"], 60)
            group.barrier(timeout_s=0.5).wait()
    except CollectiveError as error:
        return error
    return None


def test_a_rank_that_is_kept_waiting_by_a_message_is_not_blamed(tmp_path: Path) -> None:
    for errors in run_ranks(stop_before, 3, tmp_path, SHARED_MEMORY, list(WAITS)):
        for name, error in zip(WAITS, errors, strict=True):
            assert isinstance(error, CollectiveTimeout), (name, error)
            assert error.ranks == [0], (name, error)
            assert "rank 2 waits for rank 0" in str(error)


def pass_on(rank: Rank) -> Any:
    """A pipeline: each rank waits for the one before it, the first one does nothing."""
    group = rank.group()
    group.barrier().wait()
    if rank.rank == 0:
        while group.failure() is None:
            time.sleep(0.02)
        return group.failure()
    try:
        timeout_s = 0.7 if rank.rank == rank.size - 1 else 30
        group.recv(torch.ones(3), rank.rank - 1, timeout_s=timeout_s).wait()
    except CollectiveError as error:
        return error
    return None


@pytest.mark.parametrize("transport", [SHARED_MEMORY, GLOO])
def test_the_first_of_a_pipeline_is_blamed_not_the_one_before(
    transport: str, tmp_path: Path
) -> None:
    for error in run_ranks(pass_on, 4, tmp_path, transport):
        assert isinstance(error, CollectiveTimeout)
        assert error.ranks == [0]
        assert "rank 1 waits for rank 0; rank 2 waits for rank 1." in str(error)


def stop_in_a_pair(rank: Rank) -> Any:
    group = rank.group()
    pair = group.new_group([2, 0])
    errors: list[CollectiveError | None] = []
    try:
        if rank.rank == 0:
            while group.failure() is None:
                time.sleep(0.02)
        elif pair is not None:
            pair.all_reduce(torch.ones(3), timeout_s=30).wait()
        group.barrier(timeout_s=0.7).wait()
    except CollectiveError as error:
        errors.append(group.as_counted_here(error))
    rank.say("over")
    rank.store.wait([f"said/over/{r}" for r in range(3)], 60)
    return errors


def test_a_rank_that_is_kept_waiting_in_a_group_of_two_is_not_blamed(tmp_path: Path) -> None:
    for (error,) in run_ranks(stop_in_a_pair, 3, tmp_path):
        assert isinstance(error, CollectiveTimeout), error
        assert error.ranks == [0], error


@pytest.mark.parametrize(
    ("said", "usual", "blamed"),
    [
        (["a", "a", "a"], "a", []),
        (["b", "a", "a"], "a", [0]),
        (["a", "b", "a", "c", "a"], "a", [1, 3]),
        (["a", "b"], "a", [0, 1]),
        (["c", "a", "b", "a"], "a", [0, 1, 2, 3]),
        ([["a"], ["b"], ["a"]], ["a"], [1]),
    ],
)
def test_a_majority_of_the_ranks_is_right(said, usual, blamed) -> None:
    assert usual_and_blamed(said) == (usual, blamed)


def test_what_was_issued_is_told_once_with_its_ranks() -> None:
    assert describe_issued(["a", "b", "a"]) == "ranks [0, 2] issued a, rank 1 issued b"
