"""The epoch of a shard that is made without one."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

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


class Rows:
    """A source whose rows are the same in every epoch."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


class Shuffled(Rows):
    def set_epoch(self, epoch: int) -> None: ...


def reads_again(ctx: cl.Context, streams: list[cl.Stream]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for stream in streams:
            for _ in range(2):
                list(ctx.shard(stream, 2))
    return [str(warning.message) for warning in caught]


async def test_a_stream_without_an_epoch_is_told_only_where_the_epoch_matters(
    session: cl.Session,
) -> None:
    with cl.Stream(Rows()) as rows, cl.Stream(Shuffled()) as shuffled:
        (told,), others = await session.run(reads_again, streams=[rows, shuffled])
    assert "it calls set_epoch(0) again" in told and "shuffle=False" not in told
    assert others == []


def forgets_join(ctx: cl.Context) -> list[str]:
    model = cl.DistributedDataParallel(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters())
    numbers = torch.ones(12, 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number, batch in enumerate(ctx.shard(numbers, 2, keep_together=[0, 0] + [1] * 10)):
            if number:
                break
            model(batch).sum().backward()
            optimizer.step()
        list(ctx.shard(numbers, 2, keep_together=[0, 0] + [1] * 10, epoch=1))  # Without a step.
        with torch.no_grad():
            list(ctx.shard(numbers, 2, keep_together=[0, 0] + [1] * 10))
        list(ctx.shard(numbers, 2, epoch=3))
    del model
    return [f"{warning.filename}: {warning.message}" for warning in caught]


async def test_an_uneven_loop_that_trains_without_a_join_is_told_in_its_first_step(
    session: cl.Session,
) -> None:
    (told,), others = await session.run(forgets_join)
    assert told.startswith(__file__)
    assert "Write `with chorusline.Join([model, optimizer]):` around the loop" in told
    assert others == []
