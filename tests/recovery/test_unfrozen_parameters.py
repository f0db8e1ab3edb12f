"""Layers that a body unfreezes, one after the other, while workers are lost and come."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import chorusline as cl
from chorusline.collectives.objects.blocking import all_gather_object, broadcast_object
from chorusline.runtime.process.registry import Registered
from chorusline.runtime.program.context import call_of
from chorusline.runtime.recovery.restart import RestartState
from chorusline.runtime.zero.zero_redundancy_optimizer import optimizer_engine_of
from tests.harness.stand_in_gpu.runs import in_run
from tests.references.arriving_runs import note, noted
from tests.references.sharded_training import assert_same_state
from tests.references.training_to_kill import die

NUM_STEPS = 40


class Points:
    def __len__(self) -> int:
        return 8 * NUM_STEPS

    def __getitem__(self, number: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(number)
        return torch.randn(4, generator=generator, dtype=torch.float64)


def train(
    ctx: cl.Context, folder: Path, dies: tuple[int, str], sharded: bool, adds: bool
) -> dict[str, Any]:
    """dies: the step in which rank 1 dies, once, and where: outside of it the functions of the
    others run again from the top. adds: the optimizer gets a layer when it is unfrozen."""
    note(folder, "began")
    torch.manual_seed(0)
    layers = [torch.nn.Linear(4, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 2)]
    net = torch.nn.Sequential(layers[0], torch.nn.Tanh(), layers[1], torch.nn.Tanh(), layers[2])
    net.double()
    for layer in layers[:2]:
        layer.requires_grad_(False)
    model = ctx.register("model", cl.DistributedDataParallel(net))
    given = layers[2].parameters() if adds else net.parameters()
    optim: Any
    if sharded:
        optim = cl.ZeroRedundancyOptimizer(given, torch.optim.AdamW, lr=0.05, replicas=2)
    else:
        optim = torch.optim.AdamW(given, lr=0.05)
    ctx.register("optim", optim)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optim, 0.99)
    ctx.register("schedule", schedule)
    is_victim = ctx.rank == 1 and not noted(folder, "died")
    sizes = []
    for step in ctx.steps(Points(), 8, 2):
        # Not in the order of the parameters, so that shards are laid out in another one.
        if step.number in (2, 3):
            layer = layers[3 - step.number].requires_grad_(True)
            if adds:
                optim.add_param_group({"params": layer.parameters(), "lr": 0.03})
        is_due = is_victim and step.number == dies[0]
        if is_due and dies[1] == "outside":
            note(folder, "died")
            die()
        if dies[1] == "outside":
            ctx.reduce(1.0)
        elif noted(folder, "died") and ctx.world_size < 3:
            time.sleep(0.5)  # A worker comes meanwhile.
        for batch in step:
            model(batch).square().mean().backward()
            if is_due:
                note(folder, "died")
                die()
        optim.step()
        schedule.step()
        optim.zero_grad()
        sizes.append(ctx.world_size)
    if sharded:
        optim.consolidate_state_dict()
    return {
        "weights": dict(net.state_dict()),
        "state": optim.state_dict() if ctx.rank == 0 else None,
        "sizes": sizes,
        "began": noted(folder, "began").count(os.getpid()),
    }


def one_process(alone: cl.Group, folder: Path, adds: bool) -> dict[str, Any]:
    """A plain optimizer."""
    folder.mkdir()
    told: dict[str, Any] = in_run(
        alone, lambda ctx: train(ctx, folder, (-1, ""), False, adds), goes_on=True
    )
    return told


def assert_equal(told: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    for one in told:
        for name, weight in expected["weights"].items():
            assert torch.allclose(one["weights"][name], weight, rtol=0, atol=1e-12), name
    state = told[0]["state"]
    rates = [[one["lr"] for one in each["param_groups"]] for each in (state, expected["state"])]
    assert rates[0] == rates[1]
    assert state["state"].keys() == expected["state"]["state"].keys()
    for number, values in expected["state"]["state"].items():
        for key, value in values.items():
            found = state["state"][number][key]
            assert torch.allclose(found, value, rtol=0, atol=1e-12), (number, key)


@pytest.mark.parametrize("adds", [False, True], ids=["all", "later groups"])
@pytest.mark.parametrize("dies_at", [3, 5])
async def test_a_function_that_runs_again_has_the_state_of_what_its_body_has_unfrozen(
    session: cl.Session, alone: cl.Group, tmp_path: Path, dies_at: int, adds: bool
) -> None:
    expected = one_process(alone, tmp_path / "alone", adds)
    told = await session.run(
        train, folder=tmp_path, dies=(dies_at, "outside"), sharded=True, adds=adds
    )
    assert noted(tmp_path, "died") and max(one["began"] for one in told) > 1
    assert_equal(told, expected)


@pytest.mark.parametrize("adds", [False, True], ids=["all", "later groups"])
async def test_a_worker_comes_between_two_steps_after_the_body_has_unfrozen_layers(
    session: cl.Session, alone: cl.Group, tmp_path: Path, adds: bool
) -> None:
    expected = one_process(alone, tmp_path / "alone", adds)
    told = await session.run(train, folder=tmp_path, dies=(5, "in it"), sharded=True, adds=adds)
    assert noted(tmp_path, "died") and len(told) == 3
    assert {2, 3} <= {*told[0]["sizes"]} and all(one["began"] == 1 for one in told)
    assert_equal(told, expected)


# -- what the ranks have kept ---------------------------------------------------------------------


def made(*, trainable: bool = False) -> tuple[Any, Any]:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2)).double()
    net[0].requires_grad_(trainable)
    model = cl.DistributedDataParallel(net)
    optim = cl.ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, replicas=2)
    return model, optim


def whole(optim: Any) -> Any:
    optim.consolidate_state_dict()
    return broadcast_object(optim.group, optim.state_dict() if optim.group.rank == 0 else None)


def left_while_it_lays_out(ctx: cl.Context) -> str:
    """Rank 0 has laid out a layer when it is left, and rank 1 has not. Returns the error for a
    function that begins again with another model."""
    model, optim = made()
    ctx.register("optim", optim)
    model(torch.ones(3, 4, dtype=torch.float64)).sum().backward()
    optim.step()
    registry = call_of(ctx).registry
    kept = RestartState.of(registry, (0, 0), {})
    model.module[0].requires_grad_(True)
    optimizer_engine_of(optim).take_up_trainable()
    if ctx.rank == 0:
        kept = RestartState.of(registry, (0, 0), {})
    summaries = all_gather_object(ctx.group, kept.summary(True, None))
    expected, (_, again) = whole(optim), made()
    kept.restore(Registered("optim", again, per_rank=False), summaries, ctx.group)
    assert_same_state(whole(again), expected)
    _, other = made(trainable=True)
    try:
        kept.restore(Registered("optim", other, per_rank=False), summaries, ctx.group)
    except RuntimeError as error:
        return str(error)
    return ""


def _is_left_while_it_lays_out(group: Any) -> Any:
    return in_run(group, left_while_it_lays_out, goes_on=True)


def test_what_one_rank_alone_has_laid_out_is_not_looked_for_on_the_others(ranks_of: Any) -> None:
    for told in ranks_of(2).run(_is_left_while_it_lays_out):
        assert "has other parameters" in told and "requires_grad" in told


def add_what_would_be_missing(ctx: cl.Context, sharded: bool) -> list[str]:
    """Why the function could not run again: with a group of the model's own parameters, and with
    one of a layer that came later."""
    recovery = call_of(ctx).recovery
    assert recovery is not None
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
    net[0].requires_grad_(False)
    model = ctx.register("model", cl.DistributedDataParallel(net))
    optim: Any = torch.optim.AdamW([*net[1].parameters()])
    if sharded:
        optim = cl.ZeroRedundancyOptimizer(model, torch.optim.AdamW)
    ctx.register("optim", optim)
    told = [recovery._objects.facts().missing]
    for layer in (net[0].requires_grad_(True), torch.nn.Linear(2, 2)):
        if layer is not net[0]:
            net.append(layer)
        optim.add_param_group({"params": layer.parameters()})
        told.append(recovery._objects.facts().missing)
    return told


@pytest.mark.parametrize("sharded", [True, False], ids=["sharded", "plain"])
def test_groups_that_a_function_would_begin_again_without_are_named(
    alone: cl.Group, sharded: bool
) -> None:
    told = in_run(alone, lambda ctx: add_what_would_be_missing(ctx, sharded), goes_on=True)
    assert told[0] == ""
    if sharded:
        assert told[1] == "" and "add_param_group() (2.weight, 2.bias)" in told[2]
    else:
        assert "optimizer 'optim' has got parameter groups by add_param_group()" in told[1]
