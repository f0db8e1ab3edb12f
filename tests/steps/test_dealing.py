"""Which rank computes which micro-batches."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import chorusline as cl
from chorusline.runtime.data.dataset_batches import Shard
from chorusline.runtime.data.dealer import Dealer
from chorusline.runtime.data.steps.micro_batch_dealing import (
    deal_again,
    deal_micro_batches,
    sizes_of_step,
)
from chorusline.runtime.data.steps.step_rows import DatasetRows
from chorusline.runtime.data.steps.steps import StepEnd, Steps
from chorusline.runtime.data.stragglers import LONG_S, Stragglers, slowness
from chorusline.runtime.process.micro_batches import StepPlan
from tests.harness.reused_ranks import ReusedRanks


def test_a_step_is_cut_into_micro_batches_and_the_last_one_may_be_smaller() -> None:
    assert sizes_of_step(8, 3) == [3, 3, 2]
    assert sizes_of_step(4, 3) == [3, 1]
    assert sizes_of_step(3, 3) == [3]
    for num, micro in itertools.product(range(1, 20), range(1, 8)):
        sizes = sizes_of_step(num, micro)
        assert sum(sizes) == num
        assert all(size == micro for size in sizes[:-1])
        assert 0 < sizes[-1] <= micro


@pytest.mark.parametrize("num_ranks", range(1, 6))
@pytest.mark.parametrize("num", range(1, 14))
def test_equally_fast_ranks_get_equal_consecutive_parts(num: int, num_ranks: int) -> None:
    for paces in ([0.0] * num_ranks, [1.0 + 0.05 * rank for rank in range(num_ranks)]):
        holders = deal_micro_batches(num, paces)
        assert holders == sorted(holders)
        counts = [holders.count(rank) for rank in range(num_ranks)]
        assert sum(counts) == num
        assert max(counts) - min(counts) <= 1


def test_a_slow_rank_gets_less_and_never_nothing() -> None:
    assert deal_micro_batches(9, [1.0, 2.0]) == [0] * 6 + [1] * 3
    assert deal_micro_batches(9, [1.0, 100.0]) == [0] * 8 + [1]
    assert deal_micro_batches(2, [1.0, 100.0, 1.0]).count(1) <= 1
    # A rank whose pace is not known counts as an average one.
    assert deal_micro_batches(8, [1.0, 0.0, 3.0]).count(1) >= 2


def makespan(counts: list[int], paces: list[float]) -> float:
    return max(count * pace for count, pace in zip(counts, paces, strict=True))


@pytest.mark.parametrize("paces", [[1.0, 1.5, 3.0], [2.0, 1.0, 1.0], [5.0, 1.0, 2.0]])
@pytest.mark.parametrize("num", [3, 5, 8])
def test_the_last_rank_is_done_as_early_as_it_can_be(num: int, paces: list[float]) -> None:
    counts = [deal_micro_batches(num, paces).count(rank) for rank in range(3)]
    every = itertools.product(range(1, num + 1), repeat=3)
    best = min(makespan([*one], paces) for one in every if sum(one) == num)
    assert makespan(counts, paces) == best


@pytest.mark.parametrize("num_ranks", range(2, 5))
def test_those_that_stay_keep_theirs_and_share_those_of_lost_ranks(num_ranks: int) -> None:
    ranks = range(num_ranks)
    for num in range(1, 9):
        before = deal_micro_batches(num, [0.0] * num_ranks)
        for stay in range(1, num_ranks):
            for former in itertools.permutations(ranks, stay):
                after = deal_again(before, former, [0.0] * stay)
                assert len(after) == num
                for old, new in zip(before, after, strict=True):
                    if old in former:
                        assert new == former.index(old)
                counts = [after.count(rank) for rank in range(stay)]
                kept = [before.count(old) for old in former]
                assert all(a >= b for a, b in zip(counts, kept, strict=True))
                # The last one to be done is done as early as it can be.
                added = zip(counts, kept, strict=True)
                busiest = max((count for count, held in added if count > held), default=0)
                assert busiest <= min(counts) + 1


def test_a_newcomer_shares_too() -> None:
    assert deal_again([0, 0, 1, 1, 2, 2], [0, 2, -1], [0.0] * 3) == [0, 0, 2, 2, 1, 1]


def test_a_rank_that_stays_far_behind_is_named_once() -> None:
    seen = Stragglers()
    assert seen.note([1.0, 1.0, 5.0], 0.0) == []
    assert seen.note([1.0, 1.0, 5.0], LONG_S - 1) == []
    assert seen.note([1.0, 1.0, 5.0], LONG_S) == [2]
    assert seen.note([1.0, 1.0, 5.0], 2 * LONG_S) == []
    assert seen.now == {2}
    # It has caught up in between, so it begins anew.
    assert seen.note([1.0, 1.0, 1.1], 2 * LONG_S + 1) == []
    assert seen.now == set()
    assert seen.note([1.0, 1.0, 5.0], 2 * LONG_S + 2) == []
    assert seen.note([1.0, 1.0, 5.0], 3 * LONG_S + 2) == [2]


def test_how_slow_a_rank_is_is_measured_by_the_median_of_the_others() -> None:
    assert slowness([1.0, 1.0, 3.0, 90.0], 2) == 3.0
    assert slowness([2.0, 0.0], 0) == 0.0  # The other one is not known.
    assert slowness([2.0], 0) == 0.0


# -- a worker that comes ---------------------------------------------------------------------------


def test_a_worker_that_comes_after_an_evaluation_shares_a_step_that_loses_a_rank(
    alone: cl.Group,
) -> None:
    """Three ranks in one process: two that have evaluated in the body of a step, and a newcomer."""
    dealers = [Dealer(0, 2), Dealer(1, 2), Dealer(0, 1)]
    rows = [DatasetRows(range(40), epoch=0, seed=0, shuffle=False) for _ in dealers]
    passes = [
        Steps(its, 8, 1, key="", group=lambda: alone, dealer=dealer)
        for its, dealer in zip(rows, dealers, strict=True)
    ]
    given = [iter(one) for one in passes]
    for rank in range(2):
        step = next(given[rank])
        evaluation = Shard(range(4), 1, rank=rank, world_size=2, dealer=dealers[rank])
        assert len(list(evaluation)) == 2
        dealers[rank].record([[1], [1]])
        step._has_ended = True
    next(given[2])  # It waits at its first step.
    its = passes[0]
    passes[2].take_place(its.counts.number, dealers[0].position(), its.rest, its.paces)
    positions = [dealer.position() for dealer in dealers]
    for rank, dealer in enumerate(dealers):
        dealer.redeal(rank, positions, (0, 1, -1))
    for one in passes:  # All of them begin the second step.
        one.counts.take(1)
    positions = [dealers[0].position(), dealers[2].position()]
    for rank, dealer in enumerate((dealers[0], dealers[2])):
        dealer.redeal(rank, positions, (0, 2))
    assert passes[0]._dealt[1] == passes[2]._dealt[1] == [0, 0, 0, 0, 1, 1, 1, 1]
    for batches in reversed(given):
        batches.close()  # type: ignore[attr-defined]


# -- the paces that ctx.steps measures -------------------------------------------------------------


def counts_of_steps(group: cl.Group, epochs: int) -> list[int]:
    """How many of the eight micro-batches of each step this rank computes, in epochs of five steps;
    in every second epoch rank 0 is slow, in the others rank 1."""
    model = cl.DistributedDataParallel(torch.nn.Linear(1, 1), group)
    model(torch.ones(1, 1)).sum().backward()  # The first pass of a process takes its time.
    model.zero_grad()
    dealer = Dealer(group.rank, group.size)
    counts = []
    for epoch in range(epochs):
        rows = DatasetRows(torch.ones(40, 1), epoch=epoch, seed=0, shuffle=True)
        steps = Steps(rows, 8, 1, key="", group=lambda: group, dealer=dealer, epoch=epoch)
        for step in steps:
            counts.append(0)
            for batch in step:
                time.sleep(0.1 if group.rank == (epoch + 1) % 2 else 0.0)
                model(batch).sum().backward()
                counts[-1] += 1
            model.zero_grad()
    return counts


def test_a_rank_that_is_measured_to_be_slow_gets_fewer_micro_batches_of_the_next_steps(
    ranks_of: Callable[[int], ReusedRanks],
) -> None:
    steps = list(zip(*ranks_of(2).run(counts_of_steps, 2), strict=True))
    assert {sum(step) for step in steps} == {8}
    # Nobody's pace is known in the first step of an epoch.
    assert steps[0] == steps[5] == (4, 4)
    # In the others it is; in one of them a busy machine may hold up the rank that is not slow.
    for epoch, slow in ((steps[1:5], 1), (steps[6:], 0)):
        taken = [sum(counts) for counts in zip(*epoch, strict=True)]
        assert taken[slow] < taken[1 - slow], steps


def test_a_rank_that_becomes_slow_or_quick_later_is_measured_again(alone: cl.Group) -> None:
    """Half of a pace is that of the last step, so that one slow step alone changes little."""
    model: Any = SimpleNamespace(has_gradient=True, buffers_have_changed=False, weight=None)
    pace, paces = 0.0, []
    for seconds in ([1.0, 3.0], [6.0], [], [1.0]):
        end = StepEnd(StepPlan(0, (1.0, 1.0), [0, 0]), 2, 1)
        for number, of_one in enumerate(seconds):
            end.note(number, [model], of_one)
        end.meet(alone, [model], [pace])
        [pace] = end.paces
        paces.append(pace)
    assert paces == [2.0, 4.0, 4.0, 2.5]
