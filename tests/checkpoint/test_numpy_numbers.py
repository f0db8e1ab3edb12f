"""Numbers of numpy's as arguments: they leave no trace in a checkpoint, which holds none."""

from __future__ import annotations

from pathlib import Path

import numpy
import torch

import chorusline as cl


def train(ctx: cl.Context) -> list[int]:
    """Saves in epochs whose arguments are all numpy's, and after them."""
    model = ctx.register("model", cl.DistributedDataParallel(torch.nn.Linear(4, 1)))
    optim = ctx.register("optim", cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.1))
    epochs = []
    for epoch in ctx.epochs(numpy.int64(2)):
        epochs.append(epoch)
        of_epoch = numpy.int64(epoch)
        for batch in ctx.shard(
            torch.ones(12, 4), numpy.int64(2), epoch=of_epoch, seed=numpy.int32(3)
        ):
            model(batch).mean().backward()
            optim.step()
            optim.zero_grad()
            ctx.save().wait()
            if epoch == 1 and ctx.resumed_from is None:
                return epochs
    ctx.save().wait()
    return epochs


async def test_a_run_with_numpys_numbers_is_saved_and_resumed(
    cluster: None, tmp_path: Path
) -> None:
    config = cl.CheckpointConfig(storage_path=tmp_path)
    async with cl.Session(2, checkpoint=config, progress=False) as session:
        assert await session.run(train) == [[0, 1], [0, 1]]
        assert await session.run(train) == [[1], [1]]
