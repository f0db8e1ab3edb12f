"""Who leads after a loss, and what the votes of plain steps carry: all cases, in this process."""

from __future__ import annotations

import itertools

import pytest
import torch

import chorusline as cl
from chorusline.runtime.data.dealer import Cut, Dealer, Left, ShardIteration
from chorusline.runtime.process.agreement import (
    MAX_ITERATIONS,
    Note,
    Vote,
    read_agreement,
    vote_numel,
)
from chorusline.runtime.process.leftovers import LeftoverVote
from chorusline.runtime.process.registry import Registered, Registry
from chorusline.runtime.recovery.plain_optimizer_steps import PlainSteps
from chorusline.runtime.recovery.restart import Summary, leader_of, up_to_date

PLACES = [(0, 0), (1, 0), (1, 1), (2, 1), (2, 2)]


def summary(was_there: bool, place: tuple[int, int]) -> Summary:
    return Summary(was_there, place, 0, {}, None)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_who_has_the_last_step_leads_and_of_those_the_lowest_that_took_it_itself(size: int) -> None:
    for places in itertools.product(PLACES, repeat=size):
        for there in itertools.product([False, True], repeat=size):
            if not any(there):
                continue
            told = [summary(*one) for one in zip(there, places, strict=True)]
            leader = leader_of(told)
            assert there[leader]
            for rank in range(size):
                if there[rank] and rank != leader:
                    assert places[rank] <= places[leader]
                    assert places[rank] < places[leader] or rank > leader
            last = max(place[0] for was, place in zip(there, places, strict=True) if was)
            assert up_to_date(told) == [
                one for one in told if one.was_there and one.place[0] == last
            ]
            assert told[leader] in up_to_date(told)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("num_ranks", [1, 2, 5])
def test_a_vote_carries_all_cursors_exactly_beside_the_rest(
    dtype: torch.dtype, num_ranks: int
) -> None:
    large = [0, 1, (1 << 23) - 1, 1 << 23, (1 << 24) + 1, 10**12 + 7, (1 << 46) + 3]
    used = [[(rank + number) % 3 == 0 for number in range(4)] for rank in range(num_ranks)]
    for shift in range(len(large)):
        cursors = [
            [large[(shift + rank + i) % len(large)] for i in range(MAX_ITERATIONS)]
            for rank in range(num_ranks)
        ]
        total = torch.zeros(vote_numel(num_ranks, 4, MAX_ITERATIONS), dtype=dtype)
        for rank in range(num_ranks):
            vote = Vote(
                leftovers=LeftoverVote(rank != 1),
                has_next=rank != 0,
                used=used[rank],
                weight=None,
                stop=False,
                cursors=cursors[rank],
                epoch=rank + shift,
                digest=(1 << 23) - rank,
                sample=(1 << 23) - 2 * rank,
            )
            numbers = vote.numbers(rank, num_ranks, MAX_ITERATIONS)
            total += torch.tensor(numbers, dtype=dtype)
        told = read_agreement(total.tolist(), num_ranks, MAX_ITERATIONS)
        # Also of a rank that has joined, which is not live.
        assert told.cursors == tuple(map(tuple, cursors))
        live = [rank for rank in range(num_ranks) if rank != 1]
        assert told.live == tuple(live)
        assert told.may_continue == tuple(range(1, num_ranks))
        assert told.epochs == tuple(rank + shift for rank in range(num_ranks))
        assert told.digests == tuple((1 << 23) - rank for rank in range(num_ranks))
        assert told.samples == tuple((1 << 23) - 2 * rank for rank in range(num_ranks))
        assert told.used == tuple(any(used[rank][i] for rank in live) for i in range(4))


def test_a_vote_that_tells_no_samples_is_no_longer_than_before() -> None:
    assert vote_numel(3, 4) == 4 + len(Note) + 6 * 3 + 4
    total = torch.zeros(vote_numel(3, 4))
    assert read_agreement(total.tolist(), 3).cursors == ()


def watched(
    *names: str, kind: type[torch.optim.SGD] = torch.optim.SGD, own: str = ""
) -> tuple[PlainSteps, list[torch.optim.SGD], list[object]]:
    """own: which of them is registered with per_rank=True."""
    taken: list[object] = []
    steps = PlainSteps(lambda cursors, iterations: taken.append((cursors, iterations)))
    optims = []
    for name in names:
        weight = torch.nn.Parameter(torch.ones(1))
        weight.grad = torch.ones(1)
        optims.append(kind([weight], lr=0.1))
        steps.watch(Registered(name, optims[-1], name == own))
    return steps, optims, taken


def why_not_stepped(steps: PlainSteps, optim: torch.optim.Optimizer) -> str:
    (weight,) = optim.param_groups[0]["params"]
    return steps.why_not_stepped("the model", [("weight", weight)])


def test_a_step_is_taken_when_its_optimizer_has_stepped_behind_an_agreement() -> None:
    steps, (optim,), taken = watched("optim")
    steps.agreed(((4,), (8,)), [1])
    assert steps.place == (0, 0) and steps.num_untaken == 1 and not taken
    optim.step()
    assert steps.place == (1, 1) and steps.num_untaken == 0
    assert taken == [(((4,), (8,)), [1])]


def test_a_step_that_the_scaler_left_out_counts_with_the_next_one() -> None:
    steps, (optim,), taken = watched("optim")
    steps.agreed(((4,),), [1])
    steps.agreed(((8,),), [1])
    assert steps.num_untaken == 2
    optim.step()
    assert steps.place == (2, 2) and taken == [(((8,),), [1])]


def test_two_optimizers_behind_one_backward_pass_take_one_step() -> None:
    steps, (first, second), taken = watched("first", "second")
    steps.agreed(((4,),), [1])
    first.step()
    second.step()
    assert steps.place == (1, 1) and len(taken) == 1


def test_a_rank_that_joined_is_behind_until_it_has_taken_over_and_then_does_not_lead() -> None:
    steps, _, taken = watched("optim")
    for step in range(3):
        steps.agreed(((step,),), [1])
    assert steps.place == (0, 0)
    steps.take_over()
    assert steps.place == (3, 0) and taken == [(((2,),), [1])]
    assert leader_of([summary(True, steps.place), summary(True, (3, 3))]) == 1


def test_after_a_loss_all_go_on_at_the_step_of_the_leader() -> None:
    steps, (optim,), taken = watched("optim")
    steps.agreed(((4,),), [1])
    steps.begin()
    steps.continue_at(5)
    optim.step()  # Of the function that was left.
    assert steps.place == (5, 5) and not taken


class Rows(ShardIteration):
    """An iteration that a dealer deals for."""

    @property
    def taken_ids(self) -> list[int]:
        return []

    def begin_dealt(self, cuts: object) -> None: ...

    def redeal(self, cut: Cut) -> Left:
        return Left([1], [1])

    def ids_by_counts(self, counts: object) -> list[int]:
        return []


def test_what_only_this_rank_may_know_of_is_not_settled_before_the_next_step() -> None:
    """Its rows are kept until then: if it is lost, others take the step again."""
    dealer, rows = Dealer(0, 2), Rows()
    dealer.begin(rows)
    assert dealer.num_settled(rows) == 0
    dealer.record(((4,), (3,)), [rows.counts.number], is_settled=False)
    assert dealer.num_settled(rows) == 0 and rows.counts.committed == (4, 3)
    dealer.record(((8,), (6,)), [rows.counts.number], is_settled=False)
    assert dealer.num_settled(rows) == 4
    dealer.record(((12,), (9,)))  # In a ballot, which the others have seen before they go on.
    assert dealer.num_settled(rows) == 12


class AskingRows(Rows):
    """As a stream, which says while it is dealt again what of its rows no other rank gets."""

    def __init__(self, dealer: Dealer) -> None:
        self.dealer = dealer
        self.settled_meanwhile: list[int] = []

    def redeal(self, cut: Cut) -> Left:
        self.settled_meanwhile.append(self.dealer.num_settled(self))
        return super().redeal(cut)


def test_a_rank_with_another_number_says_of_its_own_rows_which_are_settled() -> None:
    """Six rows of rank 0 count, which is lost, and two of rank 1, which is rank 0 then."""
    dealers = [Dealer(rank, 3) for rank in range(3)]
    rows = [AskingRows(dealer) for dealer in dealers]
    for dealer, its in zip(dealers, rows, strict=True):
        dealer.begin(its)
        dealer.record(((6,), (2,), (4,)))
    positions = [dealer.position() for dealer in dealers[1:]]
    for rank, dealer in enumerate(dealers[1:]):
        dealer.redeal(rank, positions, (1, 2))
    assert [its.settled_meanwhile for its in rows] == [[], [2], [4]]


def test_an_agreement_on_an_iteration_that_is_over_says_nothing_of_the_next() -> None:
    dealer, first, second = Dealer(0, 1), Rows(), Rows()
    dealer.begin(first)
    numbers = dealer.inside()
    dealer.end(first)
    dealer.begin(second)
    dealer.record(((4,),), numbers)
    assert second.counts.committed is None


class Lost(RuntimeError):
    pass


class Gathering(torch.optim.SGD):
    """Loses a rank in a collective of its own, as a distributed Muon would."""

    @torch.no_grad()
    def step(self, closure=None):  # type: ignore[no-untyped-def]
        for weight in self.param_groups[0]["params"]:
            weight -= weight.grad
        raise Lost


def test_an_optimizer_that_lost_a_rank_inside_its_step_may_have_changed_parameters() -> None:
    steps, (optim,), taken = watched("optim", kind=Gathering)
    steps.agreed(((4,),), [1])
    assert not why_not_stepped(steps, optim)
    with pytest.raises(Lost):
        optim.step()
    assert not taken and "'optim' was interrupted inside step()" in why_not_stepped(steps, optim)


def test_a_hook_that_lost_a_rank_before_the_step_has_changed_nothing() -> None:
    def hook(*_: object) -> None:
        raise Lost

    steps, (optim,), _ = watched("optim")
    optim.register_step_pre_hook(hook)
    steps.agreed(((4,),), [1])
    with pytest.raises(Lost):
        optim.step()
    assert not why_not_stepped(steps, optim)


class Clamping(torch.optim.SGD):
    """Calls the step of its base, for which torch calls the hooks, too."""

    def step(self, closure=None):  # type: ignore[no-untyped-def]
        super().step(closure)
        for weight in self.param_groups[0]["params"]:
            weight.data.clamp_(-1, 1)


def test_a_step_that_calls_that_of_its_base_is_one_step() -> None:
    watched("base")  # From now on SGD.step has hooks of its own.
    steps, (optim,), taken = watched("optim", kind=Clamping)
    for step in (1, 2):
        steps.agreed(((4,),), [1])
        optim.step()
        assert steps.place == (step, step) and len(taken) == step
    assert not why_not_stepped(steps, optim)


def test_a_closure_whose_first_pass_has_lost_a_rank_has_changed_nothing() -> None:
    def closure() -> None:
        raise Lost

    steps, (optim,), _ = watched("optim")
    with pytest.raises(Lost):
        optim.step(closure)
    assert not why_not_stepped(steps, optim)


def test_an_optimizer_of_one_rank_takes_no_step_of_the_model() -> None:
    steps, (own, optim), taken = watched("own", "optim", own="own")
    steps.agreed(((4,),), [1])
    own.step()
    assert steps.place == (0, 0) and not taken
    optim.step()
    assert steps.place == (1, 1) and len(taken) == 1


@pytest.mark.parametrize("by", ["module", "optimizer"])
def test_averaged_parameters_are_each_ranks_own(by: str) -> None:
    steps, registry = PlainSteps(lambda *_: None), Registry()
    net = torch.nn.Linear(2, 1)
    optim = torch.optim.SGD(net.parameters(), lr=0.1)
    registry.add("net", net if by == "module" else optim)
    assert not steps.why_not_again(registry, [])
    with cl.Group.create(cl.HashStore(), 0, 1) as group:
        averager = cl.PeriodicModelAverager(period=4, warmup_steps=8, process_group=group)
        averager.average_parameters(net.parameters())
    assert "model averaging takes the mean of parameters of 'net'" in steps.why_not_again(
        registry, []
    )
