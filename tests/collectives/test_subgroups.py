"""Groups made of groups: what they are refused, and how they end together."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from chorusline.collectives.contract.errors import (
    CollectiveMismatch,
    CollectiveTimeout,
    GroupAborted,
    GroupClosed,
    PeerLost,
)
from chorusline.collectives.group import Group
from tests.harness.ranks import Rank, Ranks, error_of, run_ranks, transports

# -- ends ----------------------------------------------------------------------------------------


def abort_the_parent(rank: Rank) -> Any:
    """Rank 2 aborts the parent, while 0 and 1 wait in a group of their own for each other."""
    group = rank.group()
    pair = group.new_group([1, 0], name="pair")
    if pair is None:
        time.sleep(0.3)
        group.abort("the driver said so")
        return error_of(lambda: group.barrier().wait())
    started = time.monotonic()
    if rank.rank == 1:
        rank.store.wait(["said/over/0"], 30)  # It does not come.
        return error_of(lambda: pair.barrier().wait())
    error = error_of(lambda: pair.all_reduce(torch.ones(3)).wait())
    rank.say("over")
    assert time.monotonic() - started < 5
    return error


@transports
def test_aborting_a_parent_ends_the_groups_made_of_it(transport: str, tmp_path: Path) -> None:
    waited, late, aborter = run_ranks(abort_the_parent, 3, tmp_path, transport)
    for error in (waited, late, aborter):
        assert isinstance(error, GroupAborted)
        assert "the driver said so" in str(error)
    assert aborter.ranks == [2]
    assert waited.ranks == []  # Nobody of the pair.
    assert "global ranks [0, 1, 2]" in str(waited)


def abort_beside_the_pair(rank: Rank) -> Any:
    """Rank 2 aborts the parent, while 0 waits for it in a group of the two, where it is rank 0."""
    group = rank.group()
    pair = group.new_group([2, 0], name="pair")
    rank.say("paired")
    if rank.rank == 2:
        rank.store.wait(["said/paired/0", "said/paired/1"], 30)
        group.abort("of this rank")
    return error_of(lambda: (group if pair is None else pair).barrier().wait())


@transports
def test_who_has_ended_the_parent_is_named_as_the_child_counts(
    transport: str, tmp_path: Path
) -> None:
    in_pair, outside, aborter = run_ranks(abort_beside_the_pair, 3, tmp_path, transport)
    assert "of this rank" in str(in_pair) and "of this rank" in str(outside)
    assert (in_pair.ranks, outside.ranks, aborter.ranks) == ([0], [2], [0])


def lose_one_in_a_child(rank: Rank) -> Any:
    """Rank 2 dies in a group with 1; rank 0 waits for 1 in the parent."""
    group = rank.group()
    pair = group.new_group([2, 1], name="pair")
    group.barrier().wait()
    if rank.rank == 0:
        return error_of(lambda: group.barrier().wait())
    assert pair is not None
    if rank.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    child_error = error_of(lambda: pair.barrier().wait())
    pair.close()  # At once: who closes a group that failed has told the others.
    time.sleep(1)
    return child_error, error_of(lambda: group.barrier().wait())


@transports
def test_a_rank_lost_in_a_child_is_named_by_each_group_as_it_counts(
    transport: str, tmp_path: Path
) -> None:
    with Ranks(lose_one_in_a_child, 3, tmp_path, transport) as ranks:
        outside, (in_child, in_parent) = ranks.results(ranks=[0, 1])
    assert isinstance(in_child, PeerLost)
    assert in_child.ranks == [0], "rank 0 of the pair"
    for error in (outside, in_parent):
        assert isinstance(error, PeerLost)
        assert error.ranks == [2]


def close_the_parent(rank: Rank) -> Any:
    group = rank.group()
    pair = group.new_group([0, 1])
    assert pair is not None
    group.all_gather_object("the channel is open").wait()
    group.close()
    group.close()
    assert not pair.describe().is_open
    return [error_of(pair.barrier), error_of(group.barrier), error_of(lambda: group.split(0))]


@transports
def test_closing_a_parent_closes_the_groups_made_of_it(transport: str, tmp_path: Path) -> None:
    for errors in run_ranks(close_the_parent, 2, tmp_path, transport):
        assert [type(error) for error in errors] == [GroupClosed] * 3
        assert "make a new one with Group.create" in str(errors[0])


# -- disagreement ----------------------------------------------------------------------------------


def ask_for_different_groups(rank: Rank) -> Any:
    group = rank.group()
    error = error_of(lambda: group.new_group([0, 1] if rank.rank else [1, 0]))
    group.barrier().wait()
    return error


def test_ranks_that_ask_for_different_groups_are_told_and_go_on(tmp_path: Path) -> None:
    for error in run_ranks(ask_for_different_groups, 3, tmp_path):
        assert isinstance(error, CollectiveMismatch)
        assert error.ranks == [0]
        assert "rank 0 passed [1, 0], name None, rank 1 passed [0, 1]" in str(error)


def split_with_different_names(rank: Rank) -> Any:
    group = rank.group()
    error = error_of(lambda: group.split(rank.rank // 2, name=f"one-{rank.rank // 3}"))
    half = group.split(rank.rank // 2, name=f"half-{rank.rank // 2}")
    assert half is not None
    half.barrier().wait()
    group.barrier().wait()
    return error


def test_ranks_that_split_with_different_names_are_told_and_go_on(tmp_path: Path) -> None:
    for error in run_ranks(split_with_different_names, 4, tmp_path):
        assert isinstance(error, CollectiveMismatch)
        assert error.ranks == [2, 3]
        assert "rank 2 passed name 'one-0', rank 3 passed name 'one-1'" in str(error)


def miss_the_making(rank: Rank) -> Any:
    if rank.rank == 1:
        rank.group()
        rank.store.wait(["said/over/0"], 60)
        return None
    group = rank.group(timeout_s=5)  # The other may be as late as that on a loaded machine.
    error = error_of(lambda: group.new_group([0]))
    rank.say("over")
    return error


def test_a_rank_that_does_not_come_to_new_group_is_named(tmp_path: Path) -> None:
    error, _ = run_ranks(miss_the_making, 2, tmp_path)
    assert isinstance(error, CollectiveTimeout)
    assert error.ranks == [1]
    assert "all_gather_object #0" in str(error)


# -- mistakes of one caller ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "told"),
    [
        ([0, 1], r"ranks must be in \[0, 1\), the ranks of group 'default'; got \[1\]"),
        ([], "at least one rank"),
        ([0, 0], r"each rank once, got \[0, 0\]"),
    ],
)
def test_impossible_ranks_are_refused(alone: Group, ranks: list[int], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        alone.new_group(ranks)


def test_what_is_no_whole_number_is_refused(alone: Group) -> None:
    with pytest.raises(TypeError, match=r"ranks must be whole numbers, got 0\.0"):
        alone.new_group([0.0])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="color must be a whole number or None, got 'red'"):
        alone.split("red")  # type: ignore[arg-type]


def test_ranks_outside_of_a_group_cannot_be_translated(alone: Group) -> None:
    with pytest.raises(ValueError, match=r"group_rank must be a rank in \[0, 1\), got 1"):
        alone.global_rank(1)
    with pytest.raises(ValueError, match=r"global_rank 7 is not in group 'default', .* \[0\]"):
        alone.group_rank(7)
