"""Optimizers without a common parameter may step in another order on each rank: that leads to the
same. What differs in any order, and the order of steps that build on each other, is still told."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

import chorusline as cl
from tests.harness.reused_ranks import another_group
from tests.references.training import batches_of, loss_of, make_model

DTYPE = torch.float64
PARTS = {"first": slice(0, 2), "last": slice(2, 4), "both": slice(0, 4)}


def train(group: cl.Group, orders: list[list[str]], sharded: bool, rate_of_rank_1: float) -> Any:
    """orders: by rank, which parts of the model step after each pass, and how often. sharded: the
    optimizer of the first layer shards its state. Returns the parameters, or what was raised."""
    with another_group(group) as own:
        model = cl.DistributedDataParallel(make_model(DTYPE), own)
        parameters = list(model.parameters())
        rate = rate_of_rank_1 if own.rank else 0.1
        optims: dict[str, Any] = {
            "first": torch.optim.SGD(parameters[PARTS["first"]], lr=0.1, momentum=0.9),
            "last": torch.optim.SGD(parameters[PARTS["last"]], lr=rate, momentum=0.5),
            "both": torch.optim.SGD(parameters, lr=0.3),
        }
        if sharded:
            optims["first"] = cl.ZeroRedundancyOptimizer(
                parameters[PARTS["first"]], torch.optim.SGD, group=own, lr=0.1, momentum=0.9
            )
        try:
            for batch in batches_of(own.rank, 3, DTYPE):
                loss_of(model, batch).backward()
                for part in orders[own.rank]:
                    optims[part].step()
                model.zero_grad()
        except cl.CollectiveMismatch as error:
            return str(error)
        return [p.detach().tolist() for p in parameters]


@pytest.mark.parametrize("sharded", [False, True])
def test_ranks_may_step_disjoint_optimizers_in_any_order(ranks_of, sharded):
    orders = [["first", "last"], ["last", "first"]]
    first, second = ranks_of(2).run(train, orders, sharded, 0.1)
    assert first == second and not isinstance(first, str), first


@pytest.mark.parametrize(
    ("orders", "rate", "says"),
    [
        ([["first", "last"], ["last", "first"]], 0.2, "lr of SGD is 0.1 on rank 0, 0.2 on rank 1"),
        ([["first", "last"], ["last"]], 0.1, "have stepped: SGD and SGD on rank 0, SGD on rank 1"),
        ([["both", "first"], ["first", "both"]], 0.1, "is 0.3 on rank 0, 0.1 on rank 1"),
    ],
)
def test_what_differs_in_any_order_is_told(ranks_of, orders, rate, says):
    for told in ranks_of(2).run(train, orders, False, rate):
        assert isinstance(told, str) and says in told, told


PART = st.sampled_from([*PARTS])


@given(st.lists(PART, min_size=1, max_size=5), st.lists(st.integers(0, 3), max_size=4))
def test_any_exchange_of_neighbours_that_have_no_common_parameter_is_let_alone(
    ranks_of, order, exchanges
):
    other = list(order)
    for place in exchanges:
        if {*other[place : place + 2]} == {"first", "last"}:
            other[place : place + 2] = other[place + 1], other[place]
    first, second = ranks_of(2).run(train, [order, other], False, 0.1)
    assert first == second and not isinstance(first, str), (order, other, first)
