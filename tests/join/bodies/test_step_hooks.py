"""Hooks on a sharded optimizer's step run in each step, also on a rank without data, and see
the parameters that one process has then; those of one optimizer, and those of all."""

import contextlib
import warnings
from typing import Any

import pytest
import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

import chorusline as cl
from tests.harness.reused_ranks import another_group
from tests.references.training import batches_of, largest_difference, loss_of, make_model


def train(
    group: cl.Group,
    model: cl.DistributedDataParallel,
    optim: cl.ZeroRedundancyOptimizer,
    lengths: tuple[int, ...],
    hooks: list[RemovableHandle],
) -> None:
    """One uneven epoch; removes the hooks after it."""
    with cl.Join([model, optim], skew_warning=None):
        for batch in batches_of(group.rank, lengths[group.rank], torch.float64):
            loss_of(model, batch).backward()
            optim.step()
            optim.zero_grad()
    for hook in hooks:
        hook.remove()


def average(
    group: cl.Group, lengths: tuple[int, ...], of_all: bool
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """of_all: the hooks are those of all optimizers of the process."""
    with another_group(group) as own:
        model = cl.DistributedDataParallel(make_model(torch.float64), own)
        optim = cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.1)
        weight = next(model.module.parameters())
        before, after = torch.zeros(weight.shape).double(), torch.zeros(weight.shape).double()

        def add(total: torch.Tensor, decay: float) -> None:
            total.detach().mul_(decay).add_(weight.detach())

        def add_before(which: torch.optim.Optimizer, *_: object) -> None:
            if which is optim:
                add(before, 1.0)

        def add_after(which: torch.optim.Optimizer, *_: object) -> None:
            if which is optim:
                add(after, 0.9)

        if of_all:
            hooks = [
                register_optimizer_step_pre_hook(add_before),
                register_optimizer_step_post_hook(add_after),
            ]
        else:
            hooks = [
                optim.register_step_pre_hook(add_before),
                optim.register_step_post_hook(add_after),
            ]
        train(own, model, optim, lengths, hooks)
        return before.detach(), after.detach(), optim.num_steps


def in_one_process(lengths: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    model = make_model(torch.float64)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    weight = next(model.parameters())
    before, after = torch.zeros(weight.shape).double(), torch.zeros(weight.shape).double()
    data = [batches_of(rank, length, torch.float64) for rank, length in enumerate(lengths)]
    for step in range(max(lengths)):
        for batches in data:
            if step < len(batches):
                (loss_of(model, batches[step]) / len(lengths)).backward()
        before += weight.detach()
        optim.step()
        after.mul_(0.9).add_(weight.detach())
        optim.zero_grad()
    return before, after


@pytest.mark.parametrize("of_all", [False, True], ids=["of one", "of all"])
def test_averages_that_step_hooks_keep_are_those_of_one_process(ranks_of, of_all):
    for lengths in ((2, 5), (4, 4), (0, 3)):
        first, second = ranks_of(2).run(average, lengths, of_all)
        assert first[2] == second[2] == max(lengths)
        assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])
        for found, expected in zip(first[:2], in_one_process(lengths), strict=True):
            assert torch.allclose(found, expected, rtol=0, atol=1e-12)


def shrink(optim: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        for options in optim.param_groups:
            for parameter in options["params"]:
                parameter.mul_(0.9)


def halve_rate(optim: torch.optim.Optimizer) -> None:
    optim.param_groups[0]["lr"] *= 0.5


def decay_more(optim: torch.optim.Optimizer) -> None:
    optim.param_groups[0]["weight_decay"] += 0.1
    shrink(optim)


def change_before(
    group: cl.Group | None,
    change: Any,
    of_all: bool,
    lengths: tuple[int, ...],
    options: dict[str, Any],
) -> list[torch.Tensor]:
    """group: None: in one process, over the batches of all ranks."""
    module = make_model(torch.float64)
    model: Any = module
    kinds = {"lr": 0.2, "momentum": 0.9, "weight_decay": 0.0}
    if group is None:
        optim: Any = torch.optim.SGD(module.parameters(), **kinds)
        data = [batches_of(rank, n, torch.float64) for rank, n in enumerate(lengths)]
    else:
        model = cl.DistributedDataParallel(module, group)
        optim = cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, **kinds, **options)
        data = [batches_of(group.rank, lengths[group.rank], torch.float64)]

    def run(which: torch.optim.Optimizer, *_: object) -> None:
        if which is optim:
            change(optim)

    register = register_optimizer_step_pre_hook if of_all else optim.register_step_pre_hook
    hook = register(run)
    join = cl.Join([model, optim], skew_warning=None) if group else contextlib.nullcontext()
    with join:
        for step in range(max(map(len, data))):
            for batches in data:
                if step < len(batches):
                    (loss_of(model, batches[step]) / len(data)).backward()
            optim.step()
            optim.zero_grad()
    hook.remove()
    return [parameter.detach().clone() for parameter in module.parameters()]


def change_on_ranks(group: cl.Group, *args: Any) -> Any:
    with another_group(group) as own, warnings.catch_warnings():
        warnings.simplefilter("error")
        return change_before(own, *args)


@pytest.mark.parametrize("change", [shrink, halve_rate, decay_more])
@pytest.mark.parametrize(
    "options", [{}, {"check_every": 1}, {"replicas": 2}, {"check_every": 1, "replicas": 2}]
)
def test_what_a_hook_changes_before_the_step_is_that_of_one_process(ranks_of, change, options):
    for lengths, of_all in (((5, 3), False), ((0, 3), True)):
        expected = change_before(None, change, of_all, lengths, {})
        for found in ranks_of(2).run(change_on_ranks, change, of_all, lengths, options):
            assert largest_difference(found, expected) < 1e-12, lengths


def count_steps(
    group: cl.Group, kind: type[torch.optim.Optimizer], lengths: tuple[int, int]
) -> Any:
    with another_group(group) as own:
        model = cl.DistributedDataParallel(make_model(torch.float64), own)
        optim = cl.ZeroRedundancyOptimizer(model, kind, lr=0.1)
        seen: list[object] = []
        hooks = [
            register_optimizer_step_pre_hook(lambda one, *_: seen.append(one is optim)),
            register_optimizer_step_post_hook(lambda one, *_: seen.append(one is optim)),
        ]
        train(own, model, optim, lengths, hooks)
        return seen


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adafactor])
def test_hooks_of_all_optimizers_see_each_step_once(ranks_of, kind):
    for seen in ranks_of(2).run(count_steps, kind, (2, 3)):
        assert seen == [True] * 2 * 3
