"""A model in channels_last trains as in one process, and stays in channels_last."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch

import chorusline as cl
from tests.harness.reused_ranks import another_group
from tests.references.checkpoint_runs import in_run
from tests.references.training import largest_difference

LAST = torch.channels_last
ADAMW: dict[str, Any] = {"lr": 0.01, "fused": True}


def make_model() -> torch.nn.Module:
    """Its convolutions are longer than what is aligned, so shards end within them."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 7, 3),
        torch.nn.Tanh(),
        torch.nn.Conv2d(7, 5, 1),
        torch.nn.Tanh(),
        torch.nn.Conv2d(5, 6, 2),
        torch.nn.Flatten(),
        torch.nn.Linear(24, 2),
    ).double()


def batch_of(rank: int, step: int) -> torch.Tensor:
    drawn = torch.Generator().manual_seed(10 * rank + step)
    return torch.randn(2, 3, 5, 5, generator=drawn, dtype=torch.float64)


def change(module: torch.nn.Module, step: int) -> None:
    """What a program writes between two steps counts."""
    if step == 2:
        for parameter in module.parameters():
            parameter.data.clamp_(-0.2, 0.2)


def assert_in(memory_format: torch.memory_format, module: torch.nn.Module) -> None:
    for parameter in module.parameters():
        if parameter.dim() == 4:
            assert parameter.is_contiguous(memory_format=memory_format)
            assert parameter.untyped_storage().nbytes() == parameter.nbytes


def in_one_process(size: int, kind: Any, options: Any, steps: int = 4) -> tuple[Any, Any]:
    module = make_model()
    optimizer = kind(module.parameters(), **options)
    for step in range(steps):
        change(module, step)
        for rank in range(size):
            (module(batch_of(rank, step)).square().mean() / size).backward()
        optimizer.step()
        optimizer.zero_grad()
    return module.state_dict(), optimizer.state_dict()


def train(
    group: cl.Group,
    last_at: int | None,
    kind: Any,
    options: Any,
    start: Any = None,
    sharded: bool = True,
    first: int = 0,
    **more: Any,
) -> Any:
    """Four steps. last_at: the step before which the model gets channels_last; -1: before it is
    wrapped; None: never."""
    module = make_model()
    if start is not None:
        module.load_state_dict(start[0])
    if last_at == -1:
        module.to(memory_format=LAST)
    with another_group(group) as own:
        model = cl.DistributedDataParallel(module, own, bucket_cap_mb=1e-3)
        if sharded:
            optimizer: Any = cl.ZeroRedundancyOptimizer(model, kind, **options, **more)
        else:
            optimizer = kind(model.parameters(), **options)
        if start is not None:
            optimizer.load_state_dict(copy.deepcopy(start[1]))
        for step in range(first, 4):
            if step == last_at:
                module.to(memory_format=LAST)
            change(module, step)
            model(batch_of(own.rank, step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            is_last = last_at is not None and step >= last_at
            assert_in(LAST if is_last else torch.contiguous_format, module)
        if sharded:
            optimizer.consolidate_state_dict()
            state = optimizer.state_dict() if own.rank == 0 else None
        else:
            state = optimizer.state_dict()
    return module.state_dict(), state


def assert_same(found: Any, expected: Any) -> None:
    weights, state = found
    assert largest_difference(list(weights.values()), list(expected[0].values())) < 1e-12
    for number, wanted in expected[1]["state"].items() if state is not None else ():
        for name, value in wanted.items():
            assert torch.allclose(state["state"][number][name], value, rtol=0, atol=1e-12), name


CASES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "sharded": (torch.optim.AdamW, ADAMW, {}),
    "never cut": (torch.optim.Adafactor, {"lr": 0.01}, {}),
    "replicas": (torch.optim.AdamW, ADAMW, {"replicas": 2}),
    "plain, fused": (torch.optim.AdamW, ADAMW, {"sharded": False}),
    "plain": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, {"sharded": False}),
}


def train_all(group: cl.Group) -> dict[Any, Any]:
    return {
        (name, last_at): train(group, last_at, kind, options, **more)
        for name, (kind, options, more) in CASES.items()
        for last_at in (-1, 1)
        if last_at < 1 or "sharded" not in more  # torch's fused state has one format only.
    }


@pytest.mark.parametrize("size", [2, 3])
def test_channels_last_trains_as_in_one_process_and_stays(ranks_of, size):
    results = ranks_of(size).run(train_all)
    for name, (kind, options, _) in CASES.items():
        expected = in_one_process(size, kind, options)
        for found in (f for of_rank in results for key, f in of_rank.items() if key[0] == name):
            assert_same(found, expected)
            weights, state = found
            for parameter in range(len(weights)) if state is not None else ():
                kept = state["state"][parameter].get("exp_avg")
                if kept is not None:  # As a plain optimizer makes it.
                    assert kept.dim() < 4 or kept.is_contiguous(memory_format=LAST)


def go_on(group: cl.Group, start: Any) -> list[Any]:
    adamw = torch.optim.AdamW
    return [
        train(group, last_at, adamw, ADAMW, start, first=2, sharded=sharded)
        for last_at in (None, -1)
        for sharded in (True, False)
        # torch's fused optimizers need the state in the format of the parameters.
        if sharded or (last_at is None) == start[0]["0.weight"].is_contiguous()
    ]


def half_way(group: cl.Group, last_at: int | None) -> Any:
    module = make_model()
    if last_at is not None:
        module.to(memory_format=LAST)
    with another_group(group) as own:
        model = cl.DistributedDataParallel(module, own)
        optimizer = cl.ZeroRedundancyOptimizer(model, torch.optim.AdamW, **ADAMW)
        for step in range(2):
            model(batch_of(own.rank % 2, step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.consolidate_state_dict()
        return module.state_dict(), optimizer.state_dict() if own.rank == 0 else None


@pytest.mark.parametrize("last_at", [None, -1])
def test_state_goes_from_one_memory_format_into_another(ranks_of, last_at):
    start = ranks_of(2).run(half_way, last_at)[0]
    assert_in(torch.contiguous_format if last_at is None else LAST, _local(start[0]))
    results = ranks_of(3).run(go_on, start)
    first = results[0][0]
    for found in (f for of_rank in results for f in of_rank):
        assert_same(found, (first[0], {"state": {}}))
    assert largest_difference(list(first[0].values()), list(start[0].values())) > 1e-3


def _local(state: dict[str, torch.Tensor]) -> torch.nn.Module:
    module = torch.nn.Module()
    for name, value in state.items():
        module.register_parameter(name.replace(".", "_"), torch.nn.Parameter(value))
    return module


def swap(group: cl.Group) -> list[torch.Tensor]:
    module = make_model()
    module[2] = torch.nn.Conv2d(7, 7, 1).double()
    module[4] = torch.nn.Conv2d(7, 7, 1).double()
    module[6] = torch.nn.Linear(112, 1).double()
    one, other = module[2].weight, module[4].weight
    with another_group(group) as own:
        model = cl.DistributedDataParallel(module, own, bucket_cap_mb=1e-4)
        optimizer = cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.0)
        before = [one.detach().clone(), other.detach().clone()]
        one.data, other.data = other.data, one.data
        model(torch.ones(1, 3, 6, 6, dtype=torch.float64)).sum().backward()
        optimizer.step()
    return [one.detach() - before[1], other.detach() - before[0]]


def test_parameters_that_have_changed_places_keep_their_values(ranks_of):
    for differences in ranks_of(2).run(swap):
        assert not any(difference.any() for difference in differences)


def resume(group: cl.Group, folder: str) -> Any:
    def run(ctx: cl.Context, steps: range) -> Any:
        module = make_model().to(memory_format=LAST)
        model = ctx.register("model", cl.DistributedDataParallel(module))
        optimizer = ctx.register("optimizer", torch.optim.AdamW(model.parameters(), **ADAMW))
        for step in steps:
            change(model.module, step)
            model(batch_of(ctx.rank, step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if steps.start == 0:
            ctx.save().wait()
        return model.module.state_dict(), optimizer.state_dict()

    config = cl.CheckpointConfig(folder)
    in_run(group, functools.partial(run, steps=range(2)), config)
    return in_run(group, functools.partial(run, steps=range(2, 4)), config)


def test_a_plain_fused_optimizer_goes_on_from_a_checkpoint_in_channels_last(ranks_of, tmp_path):
    expected = in_one_process(2, torch.optim.AdamW, ADAMW)
    for found in ranks_of(2).run(resume, str(tmp_path)):
        assert_same(found, expected)
