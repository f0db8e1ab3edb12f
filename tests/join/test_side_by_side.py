"""Loops over several shards inside one Join: side by side as in a zip, and one inside another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import chorusline as cl
from chorusline.runtime.data.dealer import Dealer

SIZES = [(1, 21), (7, 21), (21, 7), (13, 15), (2, 3), (5, 9, 7)]


def train(
    group: cl.Group, sizes: tuple[int, ...], sharded: bool, norm: bool, evaluates: bool
) -> tuple[list[Any], list[int], list[Any]]:
    """Two epochs; by step the samples, by epoch the last iteration's number, and parameters."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(1, 3), *([torch.nn.BatchNorm1d(3)] if norm else [])]
    module = torch.nn.Sequential(*layers, torch.nn.Linear(3, 1))
    if norm:
        module = cl.SyncBatchNorm.convert_sync_batchnorm(module, group)
    model = cl.DistributedDataParallel(module, group)
    optim: Any = torch.optim.SGD(model.parameters(), lr=1e-3)
    if sharded:
        optim = cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=1e-3)
    dealer = Dealer(group.rank, group.size)
    used, numbers = [], []
    for epoch in range(2):
        first, *others = [
            cl.Shard(
                [torch.tensor([float(i)]) for i in range(size)],
                2,
                rank=group.rank,
                world_size=group.size,
                epoch=epoch,
                dealer=dealer,
            )
            for size in sizes
        ]
        joined, along = ([model, optim], []) if sharded else ([model], [optim])
        with cl.Join(joined, step_along=along, skew_warning=None):
            for batches in first if evaluates else zip(first, *others, strict=False):
                batch = batches if evaluates else torch.cat(batches)
                # Normalised over all ranks: of one value there is no variance.
                model(torch.cat([batch, batch]) if norm else batch).mean().backward()
                optim.step()
                optim.zero_grad()
                beside = [batch] if evaluates else batches
                used.append((epoch, [one.flatten().tolist() for one in beside]))
                if evaluates:
                    with torch.no_grad():
                        for shard in others:
                            for values in shard:
                                module[0](values)
        numbers.append(dealer.position().last_begun)
    return used, numbers, [parameter.tolist() for parameter in model.parameters()]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("sharded", [True, False], ids=["zero", "ddp"])
@pytest.mark.parametrize("norm", [False, True], ids=["", "statistics"])
def test_shards_side_by_side_train_alike_on_all_ranks(
    ranks_of: Callable[[int], Any], sizes: tuple[int, ...], sharded: bool, norm: bool
) -> None:
    results = ranks_of(2).run(train, sizes, sharded, norm, False)
    assert results[0][1:] == results[1][1:]
    used = [step for by_step, *_ in results for step in by_step]
    for epoch in range(2):
        for place, size in enumerate(sizes):
            numbers = [n for at, batches in used if at == epoch for n in batches[place]]
            assert len(set(numbers)) == len(numbers)
            if sizes[place] == min(sizes) and place == 0:
                assert sorted(numbers) == list(range(size))


@pytest.mark.parametrize("sizes", [(1, 21), (7, 21), (21, 7), (5, 9, 7)], ids=str)
@pytest.mark.parametrize("sharded", [True, False], ids=["zero", "ddp"])
def test_an_evaluation_in_the_body_keeps_joined_ranks_in_the_loop(
    ranks_of: Callable[[int], Any], sizes: tuple[int, ...], sharded: bool
) -> None:
    results = ranks_of(2).run(train, sizes, sharded, False, True)
    assert results[0][2] == results[1][2]
    numbers = [n for by_step, *_ in results for at, (batch,) in by_step if at == 0 for n in batch]
    assert sorted(numbers) == list(range(sizes[0]))
