"""What cannot be a step of `ctx.steps` is a sentence with its mend."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import chorusline as cl
from chorusline.runtime.data.dealer import Dealer
from chorusline.runtime.data.steps.step_rows import DatasetRows
from chorusline.runtime.data.steps.steps import Steps

DATA = list(torch.randn(12, 3, generator=torch.Generator().manual_seed(2)))


def steps_of(
    group: cl.Group,
    num: int = 8,
    whole: int = 4,
    part: int = 2,
    shuffle: bool = True,
    deterministic: bool = True,
) -> Steps:
    data = DATA[:num]
    dealer = Dealer(group.rank, group.size)
    rows = DatasetRows(data, epoch=0, seed=0, shuffle=shuffle)
    return Steps(
        rows,
        whole,
        part,
        key="",
        group=lambda: group,
        dealer=dealer,
        deterministic=deterministic,
    )


def made(group: cl.Group, sharded: bool = True, **options: Any) -> tuple[Any, Any]:
    model = cl.DistributedDataParallel(torch.nn.Linear(3, 2), group)
    if sharded:
        return model, cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.1, **options)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def in_join(group: cl.Group) -> None:
    model, optim = made(group)
    with cl.Join([model, optim]):
        next(iter(steps_of(group)))


def without_gradients(group: cl.Group) -> None:
    model, _ = made(group)
    with torch.no_grad():
        next(iter(steps_of(group)))
    model.eval()


def without_a_model(group: cl.Group) -> None:
    for step in steps_of(group):
        list(step)


def with_a_hook(group: cl.Group) -> None:
    model, _ = made(group, sharded=False)
    model.register_comm_hook(None, allreduce_hook)
    for step in steps_of(group):
        for batch in step:
            model(batch)


def with_sync_batch_norm(group: cl.Group) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(3, 2), cl.SyncBatchNorm(2))
    model = cl.DistributedDataParallel(net, group)
    for step in steps_of(group):
        for batch in step:
            model(batch)


def with_buffers_that_stay(group: cl.Group) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    model = cl.DistributedDataParallel(net, group, broadcast_buffers=False)
    for step in steps_of(group):
        for batch in step:
            model(batch)


class Growing(torch.nn.Linear):
    """A forward pass makes its buffer one of the next size; 0: it leaves it; -1: it deletes it."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__(3, 2)
        self.sizes = [*sizes]

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        if (size := self.sizes.pop(0)) > 0:
            self.register_buffer("cache", torch.zeros(size))
        elif size < 0:
            del self.cache
        return super().forward(batch)


def growing(sizes: list[int]) -> Callable[[cl.Group], None]:
    def train(group: cl.Group) -> None:
        model = cl.DistributedDataParallel(Growing(sizes), group)
        model(DATA[0])
        for step in steps_of(group):
            for batch in step:
                model(batch).sum().backward()

    return train


def left_early(group: cl.Group) -> None:
    model, _ = made(group)
    for step in steps_of(group):
        for batch in step:
            model(batch).sum().backward()
            break


def iterated_twice(group: cl.Group) -> None:
    model, _ = made(group)
    for step in steps_of(group):
        for batch in step:
            model(batch).sum().backward()
        list(step)


def not_stepped(group: cl.Group) -> None:
    model, _optim = made(group)
    for step in steps_of(group):
        for batch in step:
            model(batch).sum().backward()


def without_backward(group: cl.Group) -> None:
    model, _ = made(group)
    for step in steps_of(group):
        for batch in step:
            model(batch)


def step_in_the_loop(group: cl.Group) -> None:
    model, optim = made(group, sharded=False)
    for step in steps_of(group):
        for batch in step:
            model(batch).sum().backward()
            optim.step()
            optim.zero_grad()


def sharded_step_in_the_loop(group: cl.Group) -> None:
    model, optim = made(group)
    for step in steps_of(group):
        for batch in step:
            model(batch).sum().backward()
            optim.step()


def cleared_in_the_loop(group: cl.Group) -> None:
    model, optim = made(group)
    for step in steps_of(group):
        for batch in step:
            model(batch).sum().backward()
            optim.zero_grad()
        optim.step()


def stepped_every_second_time(group: cl.Group) -> None:
    model, optim = made(group, sharded=False)
    for step in steps_of(group, whole=2):
        for batch in step:
            model(batch).sum().backward()
        if step.number % 2:
            optim.step()
            optim.zero_grad()


def stepped_from_the_second_time_on(group: cl.Group) -> None:
    model, optim = made(group, sharded=False)
    for step in steps_of(group):
        for batch in step:
            model(batch).sum().backward()
        if step.number:
            optim.step()


def past_the_wrapper(group: cl.Group) -> None:
    model, _ = made(group, sharded=False)
    for step in steps_of(group):
        for batch in step:
            model.module(batch).sum().backward()


def cleared_between_sums(group: cl.Group) -> None:
    model, optim = made(group)
    for step in steps_of(group, deterministic=False):
        for batch in step:
            optim.zero_grad()
            model(batch).sum().backward()
        optim.step()


def backward_behind_the_loop(group: cl.Group) -> None:
    model, _ = made(group, sharded=False)
    for step in steps_of(group):
        for batch in step:
            model(batch).sum().backward()
        model(torch.ones(1, 3)).sum().backward()


def options_changed(group: cl.Group) -> None:
    model, optim = made(group)
    for step in steps_of(group):
        for batch in step:
            model(batch).sum().backward()
        optim.param_groups[0]["lr"] = 0.2
        optim.step()


def clipped_by_hand(group: cl.Group) -> None:
    model, optim = made(group)
    for step in steps_of(group):
        for batch in step:
            model(batch).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optim.step()


def cleared_behind_the_loop(group: cl.Group) -> None:
    model, optim = made(group)
    for step in steps_of(group):
        for batch in step:
            model(batch).sum().backward()
        model.module.bias.grad = None
        optim.step()


def all_cleared_behind_the_loop(group: cl.Group) -> None:
    model, optim = made(group)
    for step in steps_of(group):
        for batch in step:
            model(batch).sum().backward()
        optim.zero_grad()
        optim.step()


def weighed_in_part(group: cl.Group) -> None:
    model, _ = made(group)
    for step in steps_of(group):
        for number, batch in enumerate(step):
            loss = model(batch).mean()
            (loss if number else model.weigh(loss, 2.0)).backward()


WRONG: dict[str, tuple[Callable[[cl.Group], None], type[Exception], str]] = {
    "Join": (in_join, RuntimeError, "needs no Join"),
    "no_grad": (without_gradients, RuntimeError, "ctx.shard"),
    "no model": (without_a_model, RuntimeError, "Wrap the model before the loop"),
    "hook": (with_a_hook, RuntimeError, "leave the hook out"),
    "SyncBatchNorm": (with_sync_batch_norm, RuntimeError, "Leave the layers as BatchNorm"),
    "buffers": (with_buffers_that_stay, RuntimeError, "leave broadcast_buffers out"),
    "a larger buffer": (growing([2, 0, 3]), RuntimeError, "shape (3,), which was (2,) when"),
    "no buffer any more": (growing([2, 0, -1]), RuntimeError, "cache no buffer, which was (2,)"),
    "a later buffer": (growing([0, 4, 0]), RuntimeError, "shape (4,), which was not there when"),
    "break": (left_early, RuntimeError, "without a break"),
    "twice": (iterated_twice, RuntimeError, "iterated once"),
    "no step()": (not_stepped, RuntimeError, "Call optimizer.step()"),
    "no backward()": (without_backward, RuntimeError, "Call backward() on a loss"),
    "step() in the loop": (step_in_the_loop, RuntimeError, "optimizer.step() once after that loop"),
    "sharded step() in the loop": (sharded_step_in_the_loop, RuntimeError, "once after that loop"),
    "zero_grad() in the loop": (
        cleared_in_the_loop,
        RuntimeError,
        "zero_grad() after optimizer.step()",
    ),
    "zero_grad() between": (cleared_between_sums, RuntimeError, "Call zero_grad() once, after"),
    "every second step()": (stepped_every_second_time, RuntimeError, "raise global_batch_size"),
    "late step()": (stepped_from_the_second_time_on, RuntimeError, "raise global_batch_size"),
    "model.module": (past_the_wrapper, RuntimeError, "Call the model itself there"),
    "late backward()": (backward_behind_the_loop, RuntimeError, "inside the loop over the step's"),
    "options": (options_changed, RuntimeError, "after optimizer.step()"),
    "clip_grad_norm_": (clipped_by_hand, RuntimeError, "max_norm"),
    "grad = None": (cleared_behind_the_loop, RuntimeError, "freeze it with requires_grad_(False)"),
    "zero_grad() before step()": (
        all_cleared_behind_the_loop,
        RuntimeError,
        "after optimizer.step()",
    ),
    "weighed in part": (weighed_in_part, RuntimeError, "1 of the 2 micro-batches"),
    "sizes": (lambda group: print(steps_of(group, part=5)), ValueError, "the part of a step"),
    "no size": (lambda group: print(steps_of(group, whole=0)), ValueError, "at least 1"),
    "no number": (lambda group: print(steps_of(group, part=1.5)), TypeError, "a whole number"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_use_is_a_sentence_with_its_mend(alone: cl.Group, wrong: str) -> None:
    act, kind, mend = WRONG[wrong]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(kind, match=mend.replace("(", r"\(").replace(")", r"\)")):
            act(alone)


def test_behind_a_loop_that_was_left_backward_passes_reduce_again(alone: cl.Group) -> None:
    model, optim = made(alone)
    for step in steps_of(alone):
        for batch in step:
            model(batch).sum().backward()
        optim.step()
        optim.zero_grad()
        break
    before = model.module.weight.detach().clone()
    model(torch.ones(1, 3)).sum().backward()
    optim.step()
    assert torch.allclose(model.module.weight, before - 0.1)


def test_a_scaled_loss_is_unscaled_and_an_overflow_skips_the_step(alone: cl.Group) -> None:
    def trained(scaled: bool, overflow_at: int = -1) -> torch.Tensor:
        torch.manual_seed(0)
        model, optim = made(alone)
        scaler = cl.GradScaler(optim, init_scale=1024.0, enabled=scaled)
        torch.manual_seed(1)
        for step in steps_of(alone, num=12):
            if not scaled and step.number == overflow_at:
                # The same samples, but no step.
                optim.param_groups[0]["lr"] = 0.0
            for batch in step:
                loss = model(batch).square().mean()
                if scaled and step.number == overflow_at:
                    loss = loss * torch.inf
                scaler.scale(loss).backward()
            scaler.step(optim)
            scaler.update()
            optim.zero_grad()
            optim.param_groups[0]["lr"] = 0.1
        weight: torch.Tensor = model.module.weight.detach().clone()
        return weight

    assert torch.equal(trained(True), trained(False))
    assert torch.equal(trained(True, 1), trained(False, 1))


def test_the_mean_is_over_samples_and_equals_one_large_batch(alone: cl.Group) -> None:
    for sharded in (True, False):
        torch.manual_seed(0)
        model, optim = made(alone, sharded)
        steps = steps_of(alone, num=7, whole=7, part=2, shuffle=False)
        torch.manual_seed(0)
        plain = torch.nn.Linear(3, 2)
        plain(torch.stack(steps._rows._given)).square().mean().backward()
        for step in steps:
            for batch in step:
                model(batch).square().mean().backward()
            optim.step()
        expected = plain.weight - 0.1 * plain.weight.grad
        assert torch.allclose(model.module.weight, expected, atol=1e-6)


def test_a_weight_counts_once_and_not_for_gradients_by_inputs(alone: cl.Group) -> None:
    torch.manual_seed(0)
    model, optim = made(alone, sharded=False)
    plain = copy.deepcopy(model.module)
    steps = steps_of(alone, num=8, whole=8, part=2, shuffle=False)
    plain(torch.stack(steps._rows._given)).square().mean().backward()

    def weighted(batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model.weigh(model(batch).square().mean(), len(batch))
        return loss

    for step in steps:
        for number, batch in enumerate(step):
            x = batch.clone().requires_grad_()
            for comes_first in (True, False):
                if comes_first == (number % 2 == 0):
                    torch.autograd.grad(weighted(x), x)
                if comes_first:
                    weighted(batch).backward()
        optim.step()
    assert torch.allclose(model.module.weight, plain.weight - 0.1 * plain.weight.grad, atol=1e-6)


@pytest.mark.parametrize("sharded", [False, True], ids=["plain", "sharded"])
def test_a_last_step_of_one_short_micro_batch_is_a_mean_over_its_samples(
    alone: cl.Group, sharded: bool
) -> None:
    def trained(deterministic: bool) -> torch.Tensor:
        torch.manual_seed(0)
        model, optim = made(alone, sharded)
        for step in steps_of(alone, num=9, whole=8, part=8, deterministic=deterministic):
            for batch in step:
                model(batch).square().mean().backward()
            optim.step()
            optim.zero_grad()
        weight: torch.Tensor = model.module.weight.detach().clone()
        return weight

    assert torch.equal(trained(True), trained(False))


def test_models_that_no_micro_batch_uses_do_as_they_always_do(alone: cl.Group) -> None:
    hooked, _ = made(alone, sharded=False)
    hooked.register_comm_hook(None, allreduce_hook)
    beside, other = made(alone)
    beside(torch.ones(1, 3)).sum().backward()
    before = beside.module.weight.detach().clone()
    model, optim = made(alone)
    for step in steps_of(alone):
        for batch in step:
            model(batch).sum().backward()
        optim.step()
        if step.number == 0:
            other.step()  # With the gradient from before the loop.
        else:
            beside(torch.ones(1, 3)).sum().backward()
            other.step()
        other.zero_grad()
    assert torch.allclose(beside.module.weight, before - 0.2)
    assert hooked.module.weight.grad is None


class Upended(torch.nn.Module):
    """Its layers are used in the other order than that of their registration."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first = torch.nn.Linear(5, 2), torch.nn.Linear(3, 5)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.first(batch))
        return out


@pytest.mark.parametrize("deterministic", [True, False])
def test_passes_outside_of_the_loop_may_lay_the_buckets_out_anew(
    alone: cl.Group, deterministic: bool
) -> None:
    torch.manual_seed(0)
    model = cl.DistributedDataParallel(Upended(), alone, bucket_cap_mb=1e-5)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = copy.deepcopy(model.module)
    order = list(model._reducer.gradients.order)
    plain = torch.optim.SGD(expected.parameters(), lr=0.1)

    def also(batch: torch.Tensor) -> None:
        expected(batch).square().mean().backward()
        plain.step()
        plain.zero_grad()

    for _ in range(3):
        for step in steps_of(alone, num=6, whole=6, deterministic=deterministic):
            for batch in step:
                model(batch).square().mean().backward()
            optim.step()
            optim.zero_grad()
        also(torch.stack(DATA[:6]))
        model(torch.ones(2, 3)).square().mean().backward()
        optim.step()
        optim.zero_grad()
        also(torch.ones(2, 3))
    assert model._reducer.gradients.order != order
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6)


@pytest.mark.parametrize("sharded", [False, True], ids=["plain", "sharded"])
def test_a_frozen_parameter_is_left_out_of_a_step(alone: cl.Group, sharded: bool) -> None:
    """The mend for a program that clears the gradient of one between the loop and `step()`."""
    model, optim = made(alone, sharded)
    weight, bias = (p.detach().clone() for p in model.parameters())
    for step in steps_of(alone, num=4):
        model.module.bias.requires_grad_(False)
        for batch in step:
            model(batch).sum().backward()
        optim.step()
    assert not torch.equal(model.module.weight, weight)
    assert torch.equal(model.module.bias, bias)


def test_with_a_plain_optimizer_a_cleared_gradient_is_left_out_of_a_step(alone: cl.Group) -> None:
    model, optim = made(alone, sharded=False)
    bias = model.module.bias.detach().clone()
    for step in steps_of(alone, num=4):
        for batch in step:
            model(batch).sum().backward()
        model.module.bias.grad = None
        optim.step()
    assert torch.equal(model.module.bias, bias)
