"""How many steps there will be is known before the first batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import chorusline as cl
from tests.harness.reused_ranks import ReusedRanks
from tests.references.checkpoint_runs import in_run

KEYS = [int(number**0.5) for number in range(97)]  # ten keys, of 1, 3, 5 … samples
Ranks = Callable[[int], ReusedRanks]


def epochs_of(
    ctx: cl.Context, epochs: int, options: dict[str, Any], save_at: int = -1
) -> tuple[list[tuple[int, int, int]], float]:
    """By epoch: what was told before the first batch, and the steps that were taken; and the last
    learning rate of a cosine over the told number of steps."""
    data = torch.ones(97, 4)
    model = cl.DistributedDataParallel(torch.nn.Linear(4, 1))
    optim = cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.5)
    told = [ctx.shard(data, 4, epoch=epoch, **options).num_steps for epoch in range(epochs)]
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optim, sum(told))
    for name, stateful in (("model", model), ("optim", optim), ("schedule", schedule)):
        ctx.register(name, stateful)
    by_epoch = []
    for epoch in ctx.epochs(epochs):
        before = ctx.step
        shard = ctx.shard(data, 4, epoch=epoch, **options)
        ahead = shard.num_steps, shard.num_steps_left
        assert ahead[0] == told[epoch]
        assert max(shard.batches_per_rank) == ahead[1] >= len(shard)
        with cl.Join([model, optim], step_along=[schedule]):
            for batch in shard:
                model(batch).square().mean().backward()
                optim.step()
                optim.zero_grad()
                schedule.step()
                if ctx.step == save_at:
                    ctx.save().wait()
        by_epoch.append((*ahead, ctx.step - before))
    return by_epoch, schedule.get_last_lr()[0]


def run_epochs(group: cl.Group, config: cl.CheckpointConfig | None, kwargs: dict[str, Any]) -> Any:
    return in_run(group, epochs_of, config, **kwargs)


@pytest.mark.parametrize(
    "options", [{}, {"drop_last": True}, {"keep_together": KEYS}, {"shuffle": False}]
)
def test_as_many_steps_are_taken_as_were_told_and_a_cosine_ends_at_its_end(
    ranks_of: Ranks, options: dict[str, Any]
) -> None:
    first, second = ranks_of(2).run(run_epochs, None, {"epochs": 3, "options": options})
    assert first == second, "all ranks are told the same"
    by_epoch, rate = first
    assert all(told == left == taken for told, left, taken in by_epoch)
    if "keep_together" in options:
        assert len({told for told, *_ in by_epoch}) > 1, "each epoch has a number of its own"
    assert rate == pytest.approx(0, abs=1e-9)


def test_after_a_resume_the_number_is_the_same_and_what_is_left_is_told_beside_it(
    ranks_of: Ranks, tmp_path: Path
) -> None:
    config = cl.CheckpointConfig(tmp_path)
    (whole, _), _ = ranks_of(2).run(run_epochs, config, {"epochs": 2, "options": {}, "save_at": 17})
    assert whole == [(13, 13, 13), (13, 13, 13)]
    (rest, rate), _ = ranks_of(2).run(run_epochs, config, {"epochs": 2, "options": {}})
    assert rest == [(13, 9, 9)]
    assert rate == pytest.approx(0, abs=1e-9)
    (rest, _), *_ = ranks_of(3).run(run_epochs, config, {"epochs": 2, "options": {}})
    assert rest == [(9, 6, 6)], "97 samples are 9 steps of three ranks; 97 - 4 * 2 * 4 are 6"


def test_the_number_of_steps_of_a_stream_is_not_known() -> None:
    from chorusline.runtime.data.streaming import StreamShard

    shard = object.__new__(StreamShard)
    with pytest.raises(TypeError, match=r"not known before its end\. Count them in one epoch"):
        _ = shard.num_steps
