"""The epoch of a shard that is made without one."""

from __future__ import annotations

import warnings

import torch

import chorusline as cl


def orders(ctx: cl.Context) -> dict[str, list[list[int]]]:
    numbers = torch.arange(12)

    def taken(epoch: int | None = None) -> list[int]:
        return torch.cat(list(ctx.shard(numbers, 3, epoch=epoch))).tolist()

    outside = taken()
    inside = [taken() for _ in ctx.epochs(3)]
    for _ in ctx.epochs(3):
        break
    behind = taken()
    return {
        "outside": [outside, behind],
        "inside": inside,
        "by number": [taken(epoch) for epoch in range(3)],
    }


async def test_a_loop_over_epochs_is_the_epoch_of_the_shards_in_it(session: cl.Session) -> None:
    for told in await session.run(orders):
        assert told["inside"] == told["by number"]
        assert told["inside"][0] != told["inside"][1]
        assert told["outside"] == [told["by number"][0]] * 2


def forgets_epochs(ctx: cl.Context) -> list[str]:
    numbers, others = torch.arange(12), torch.arange(8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for epoch in range(3):
            list(ctx.shard(others, 3, epoch=epoch))
            list(ctx.shard(others, 3, shuffle=False))
            with torch.no_grad():
                list(ctx.shard(others, 3))
        quiet = len(caught)
        for _ in range(2):
            list(ctx.shard(numbers, 3))
    assert quiet == 0
    return [f"{warning.filename}: {warning.message}" for warning in caught]


async def test_the_same_dataset_without_an_epoch_again_is_told_on_one_rank(
    session: cl.Session,
) -> None:
    (told,), others = await session.run(forgets_epochs)
    assert told.startswith(__file__)
    assert "without epoch=" in told and "ctx.epochs(n)" in told
    assert others == []
