"""A loop over a shard in the body of another one, inside a Join: a rank that is through with
its inner loop, or with both, shadows what the others still take."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch

import chorusline as cl
from chorusline.runtime.data.dataset_batches import Shard
from chorusline.runtime.data.dealer import Dealer
from tests.harness.reused_ranks import another_group

SIZES = [(21, 9), (21, 5), (8, 8), (8, 21), (21, 8), (21, 7), (7, 21), (21, 4), (3, 9), (1, 8)]


def pairs(loop: str, outer: Shard, inner: Shard) -> Iterator[torch.Tensor]:
    """The batches of the inner data, as the loop takes them."""
    if loop == "nested":
        for _ in outer:
            yield from inner
    elif loop == "the first ones of each":
        for _ in outer:
            yield from itertools.islice(inner, 2)
    else:
        batches = iter(inner)
        for _ in outer:
            batch = next(batches, None)
            if batch is None:
                batches = iter(inner)
                batch = next(batches, None)
            if batch is not None:
                yield batch


def train(group: cl.Group, loop: str, sizes: tuple[int, int], sharded: bool) -> object:
    with another_group(group) as own:
        torch.manual_seed(0)
        model = cl.DistributedDataParallel(torch.nn.Linear(1, 1), own)
        optim = (
            cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=1e-4)
            if sharded
            else torch.optim.SGD(model.parameters(), lr=1e-4)
        )
        dealer = Dealer(own.rank, own.size)
        outer, inner = (
            Shard(list(torch.ones(size, 1)), 2, rank=own.rank, world_size=own.size, dealer=dealer)
            for size in sizes
        )
        steps = 0
        try:
            with cl.Join([model, optim] if sharded else [model], skew_warning=None):
                for batch in pairs(loop, outer, inner):
                    optim.zero_grad()
                    model(batch).sum().backward()
                    optim.step()
                    steps += 1
        except (RuntimeError, cl.CollectiveError) as error:
            return f"{type(error).__name__}: {error}"
        return steps, model.module.weight.item()


def steps_of(loop: str, sizes: tuple[int, int]) -> list[int]:
    """By rank, how many steps it takes with data of its own."""
    outer, inner = (Shard([0] * size, 2, rank=0, world_size=2).batches_per_rank for size in sizes)
    if loop == "nested":
        return [a * b for a, b in zip(outer, inner, strict=True)]
    if loop == "the first ones of each":
        return [a * min(b, 2) for a, b in zip(outer, inner, strict=True)]
    return [a if b else 0 for a, b in zip(outer, inner, strict=True)]


@pytest.mark.parametrize("sharded", [True, False], ids=["zero", "plain"])
@pytest.mark.parametrize("loop", ["nested", "the first ones of each", "begun again"])
def test_every_rank_takes_all_batches_of_a_loop_in_a_loop(ranks_of, loop, sharded):
    for sizes in SIZES:
        told = ranks_of(2).run(train, loop, sizes, sharded)
        assert all(not isinstance(one, str) for one in told), (sizes, told)
        assert [steps for steps, _ in told] == steps_of(loop, sizes), sizes
        assert told[0][1] == told[1][1], sizes
