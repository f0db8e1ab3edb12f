"""Train, validate, test and predict as a trainer does: uneven shards, every sample once."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import chorusline as cl

SIZES = (41, 9, 1)  # By key: with two ranks one has 42 and the other 9, or 41 and 10.
KEYS = [key for key, size in enumerate(SIZES) for _ in range(size)]


def samples(seed: int) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    xs = torch.randn(len(KEYS), 4, generator=generator)
    return [(number, x, (x.sum() > 0).long()) for number, x in enumerate(xs)]


def evaluate(ctx: cl.Context, module: torch.nn.Module, data: Any) -> tuple[float, float, int]:
    """Mean loss, accuracy and number of samples, over all ranks."""
    module.eval()
    right, count, loss = 0, 0, 0.0
    with torch.no_grad():
        for _, x, y in ctx.shard(data, 4, shuffle=False, keep_together=KEYS):
            scores = module(x)
            loss += torch.nn.functional.cross_entropy(scores, y, reduction="sum").item()
            right += int((scores.argmax(1) == y).sum())
            count += len(y)
    module.train()
    mean_loss = ctx.reduce(loss / count if count else math.nan, weight=count)
    return mean_loss, ctx.reduce(right, "sum") / ctx.reduce(count, "sum"), ctx.reduce(count, "sum")


def predict(ctx: cl.Context, module: torch.nn.Module, data: Any) -> list[torch.Tensor] | None:
    """The scores of all samples in their own order, on rank 0."""
    mine = []
    with torch.no_grad():
        for numbers, x, _ in ctx.shard(data, 4, shuffle=False, keep_together=KEYS):
            mine += zip(numbers.tolist(), module(x), strict=True)
    gathered = ctx.group.gather_object(mine, root=0).wait()
    if gathered is None:
        return None
    by_number = dict(pair for theirs in gathered for pair in theirs)
    return [by_number[number] for number in range(len(data))]


def fit(ctx: cl.Context) -> dict[str, Any]:
    torch.manual_seed(0)
    module = torch.nn.Linear(4, 2)
    model = cl.DistributedDataParallel(module)  # Only to fit; what evaluates takes the module.
    optim = cl.ZeroRedundancyOptimizer(model, torch.optim.AdamW, lr=3e-2)
    validated = []
    for epoch in ctx.epochs(3):
        with cl.Join([model, optim], skew_warning=None):
            for _, x, y in ctx.shard(samples(0), 4, epoch=epoch, keep_together=KEYS):
                loss = torch.nn.functional.cross_entropy(model(x), y)
                model.weigh(loss, len(y)).backward()
                optim.step()
                optim.zero_grad()
        validated.append(evaluate(ctx, module, samples(1)))
    operations = ctx.group.statistics.total_operations()
    with torch.no_grad():
        model(torch.randn(3 + ctx.rank, 4))  # Outside a step the wrapped model sends nothing.
    assert ctx.group.statistics.total_operations() == operations
    return {
        "validated": validated,
        "tested": evaluate(ctx, module, samples(2)),
        "predicted": predict(ctx, module, samples(2)),
        "state": module.state_dict(),
    }


async def test_uneven_evaluation_counts_every_sample_once(session: cl.Session) -> None:
    first, second = await session.run(fit)
    assert (second.pop("predicted"), second["validated"]) == (None, first["validated"])
    module = torch.nn.Linear(4, 2).double()
    module.load_state_dict(first["state"])
    x = torch.stack([x for _, x, _ in samples(2)])
    y = torch.stack([y for _, _, y in samples(2)])
    scores = module(x.double()).detach()
    loss, accuracy, count = first["tested"]
    assert count == len(KEYS)
    assert loss == pytest.approx(torch.nn.functional.cross_entropy(scores, y).item(), rel=1e-6)
    assert accuracy == (scores.argmax(1) == y).double().mean().item()
    assert torch.allclose(torch.stack(first["predicted"]).double(), scores, atol=1e-6)
    losses = [loss for loss, _, _ in first["validated"]]
    assert losses == sorted(losses, reverse=True), "it has learned"


async def test_a_weighted_mean_is_the_mean_over_all_samples(session: cl.Session) -> None:
    def body(ctx: cl.Context) -> list[Any]:
        mine = [torch.tensor([1.0, 2.0, 6.0]), torch.tensor([11.0])][ctx.rank]
        return [
            ctx.reduce(mine.mean(), weight=len(mine)),
            ctx.reduce(mine.mean().item(), weight=len(mine)),
            ctx.reduce(math.nan if ctx.rank else 7.0, weight=1 - ctx.rank),
            ctx.reduce(torch.tensor([[ctx.rank, 2]]), weight=1 + 2 * ctx.rank),
            ctx.reduce("words pass", weight=3),
        ]

    for mean, number, of_one, matrix, words in await session.run(body):
        assert mean.item() == 5.0 and mean.dtype == torch.float32
        assert number == 5.0 and of_one == 7.0
        assert matrix.tolist() == [[0.75, 2.0]] and matrix.dtype == torch.float64
        assert words == "words pass"


async def test_weights_that_make_no_mean_are_refused(session: cl.Session) -> None:
    with pytest.raises(ValueError, match="add up to 0: no rank had anything to count"):
        await session.run(lambda ctx: ctx.reduce(1.0, weight=0))
    with pytest.raises(ValueError, match=r"weight must be a finite number of at least 0, got -1"):
        await session.run(lambda ctx: ctx.reduce(1.0, weight=-1))
    with pytest.raises(ValueError, match="needs op='mean'; got 2, op='sum'"):
        await session.run(lambda ctx: ctx.reduce(1.0, "sum", weight=2))
