"""`ctx.seed`: models begin alike on all ranks, and each rank draws its own numbers from then on."""

from __future__ import annotations

import random
from typing import Any

import numpy
import pytest
import torch

import chorusline as cl
from chorusline.runtime.process.random_state import RankSeed
from tests.references.checkpoint_runs import in_run


def train(ctx: cl.Context, until: int = 6, how: str = "forward") -> Any:
    ctx.seed(3)
    module = torch.nn.Linear(2, 2)
    first = module.weight.detach().clone()
    model = ctx.register("model", cl.DistributedDataParallel(module))
    optim = cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.1)
    ctx.register("optim", optim)
    draws = []
    for batch in ctx.shard(torch.ones(24, 2), 2, seed=1) if how == "shard" else range(until):
        inputs = batch if isinstance(batch, torch.Tensor) else torch.ones(1, 2)
        model(inputs).sum().backward()
        optim.step()
        optim.zero_grad()
        draws.append((random.random(), float(numpy.random.rand()), torch.rand(()).item()))
        if optim.num_steps == until:
            break
    if ctx._call.checkpoints is not None and ctx._call.checkpoints.config is not None:
        ctx.save().wait()
    with pytest.raises(ValueError, match="seeded already"):
        ctx.seed(3)
    return first, draws


def run(group: cl.Group, place: str, how: str) -> tuple[Any, Any]:
    whole = in_run(group, train, None, how=how)
    config = cl.CheckpointConfig(f"{place}/{how}")
    first, before = in_run(group, train, config, until=2, how=how)
    again, after = in_run(group, train, config, how=how)
    return whole, (first, again, before + after[-4:])


@pytest.mark.parametrize("how", ["forward", "shard"])
def test_ranks_begin_alike_draw_apart_and_go_on_where_they_were(ranks_of, tmp_path, how):
    torch.manual_seed(3)
    expected = torch.nn.Linear(2, 2).weight
    drawn = []
    for (first, draws), (resumed, again, in_parts) in ranks_of(2).run(run, str(tmp_path), how):
        for weight in (first, resumed, again):  # The seed is set anew before models are made.
            assert torch.equal(weight, expected)
        assert in_parts == draws, "a resumed run draws on"
        assert len(set(draws)) == 6
        drawn.append(set(draws))
    assert not drawn[0] & drawn[1]


def test_a_worker_that_comes_later_draws_other_numbers_than_the_one_before_it() -> None:
    before, drawn = cl.RandomState().state_dict(), []
    for steps_taken in (0, 5, 5):
        RankSeed(3, rank=1).begin_steps(steps_taken)
        drawn.append(torch.rand(()).item())
    cl.RandomState().load_state_dict(before)
    assert drawn[0] != drawn[1] == drawn[2]


def refused(group: cl.Group, seed: Any) -> str:
    with pytest.raises(ValueError) as raised:
        in_run(group, lambda ctx: ctx.seed(seed), None)
    return str(raised.value)


@pytest.mark.parametrize("seed", [-1, 1.5, None])
def test_a_seed_is_a_whole_number(ranks_of, seed):
    (told,) = ranks_of(1).run(refused, seed)
    assert told == f"seed must be a whole number of at least 0, got {seed!r}"


async def draw(ctx: cl.Context) -> tuple[float, list[float]]:
    module = torch.nn.Linear(2, 2)
    model = cl.DistributedDataParallel(module)
    first = module.weight[0, 0].item()
    model(torch.ones(1, 2))
    return first, [random.random(), torch.rand(()).item()]


def seed_twice(ctx: cl.Context) -> None:
    ctx.seed(1)


async def test_a_sessions_seed_is_that_of_each_of_its_runs(cluster: None) -> None:
    few = {"CPU": 0.01}
    async with cl.Session(2, seed=3, resources_per_worker=few) as session:
        one, other = await session.run(draw)
        again = await session.run(draw)
        with pytest.raises(ValueError, match=r"seeded already.*Session\(seed"):
            await session.run(seed_twice)
    torch.manual_seed(3)
    assert one[0] == other[0] == torch.nn.Linear(2, 2).weight[0, 0].item()
    assert one[1] != other[1] and [one, other] == again


def test_run_keeps_its_seed_and_says_so() -> None:
    def train(ctx: cl.Context, seed: int = 0) -> None: ...

    with pytest.raises(TypeError, match=r"seed=3 is an argument of run.*itself.*another name"):
        cl.run(train, seed=3)
