"""Parameters that a program changes between two backward passes of a step, as SAM does."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import chorusline as cl
from tests.harness.reused_ranks import another_group
from tests.references.training import backward_of_all, data_of, largest_difference, make_model

DTYPE = torch.float64
Mean = Callable[[torch.Tensor], torch.Tensor]
Clear = Callable[[torch.nn.Module, torch.optim.Optimizer], None]
Body = Callable[[torch.nn.Module, torch.optim.Optimizer, Callable[[], None], Mean], None]


def clear_model(module: torch.nn.Module, optim: torch.optim.Optimizer) -> None:
    module.zero_grad()


def clear_optimizer(module: torch.nn.Module, optim: torch.optim.Optimizer) -> None:
    optim.zero_grad()


def clear_each(module: torch.nn.Module, optim: torch.optim.Optimizer) -> None:
    for parameter in module.parameters():
        parameter.grad = None


@torch.no_grad()
def move_along(module: torch.nn.Module, directions: list[torch.Tensor]) -> list[torch.Tensor]:
    """Returns what the parameters were before."""
    before = [parameter.clone() for parameter in module.parameters()]
    norm = sum(direction.square().sum() for direction in directions) ** 0.5
    for parameter, direction in zip(module.parameters(), directions, strict=True):
        parameter.add_(0.05 * direction / norm)
    return before


@torch.no_grad()
def move_back(module: torch.nn.Module, before: list[torch.Tensor]) -> None:
    for parameter, content in zip(module.parameters(), before, strict=True):
        parameter.copy_(content)


def sam(clear: Clear, has_mean: bool, module: Any, optim: Any, backward: Any, mean: Mean) -> None:
    backward()
    gradients = [parameter.grad.clone() for parameter in module.parameters()]
    before = move_along(module, [mean(one) for one in gradients] if has_mean else gradients)
    clear(module, optim)
    backward()
    move_back(module, before)
    optim.step()
    clear(module, optim)


def noise(module: Any, optim: Any, backward: Any, mean: Mean) -> None:
    """Its own on each rank, with gradients of two passes that are added."""
    for _ in range(2):
        before = move_along(module, [torch.randn_like(one) for one in module.parameters()])
        backward()
        move_back(module, before)
    optim.step()
    optim.zero_grad()


def clamp_first(module: Any, optim: Any, backward: Any, mean: Mean) -> None:
    """As in a WGAN: the gradients of the last pass are cleared after a clamp, unused."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.clamp_(-0.3, 0.3)
    optim.zero_grad()
    backward()
    optim.step()
    backward()


def train(
    group: cl.Group | None, body: Body, lengths: tuple[int, ...]
) -> tuple[list[torch.Tensor], list[str]]:
    """Returns the parameters, and the warnings. group: None: one process, with all batches."""
    torch.manual_seed(group.rank if group else 0)
    module = make_model(DTYPE)
    model: Any = cl.DistributedDataParallel(module, group) if group else module
    optim: Any = (
        cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.1, momentum=0.9)
        if group
        else torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    )
    data = data_of(group, lengths, DTYPE)

    def mean(gradient: torch.Tensor) -> torch.Tensor:
        if group is not None:
            group.all_reduce(gradient, cl.ReduceOp.AVG).wait()
        return gradient

    join = cl.Join([model, optim], skew_warning=None) if group else contextlib.nullcontext()
    with warnings.catch_warnings(record=True) as caught, join:
        warnings.simplefilter("always")
        for number in range(max(map(len, data))):
            body(module, optim, functools.partial(backward_of_all, model, data, number), mean)
    texts = [str(one.message) for one in caught if "two backward passes" in str(one.message)]
    return [p.detach().clone() for p in module.parameters()], texts


def on_ranks(group: cl.Group, body: Body, lengths: tuple[int, ...]) -> Any:
    with another_group(group) as own:
        return train(own, body, lengths)


@pytest.mark.parametrize("clear", [clear_model, clear_optimizer, clear_each])
@pytest.mark.parametrize("lengths", [(3, 3), (4, 2)])
def test_a_rank_that_perturbs_along_its_own_gradient_is_told_once(ranks_of, clear, lengths):
    body = functools.partial(sam, clear, False)
    results = ranks_of(2).run(on_ranks, body, lengths)
    for _, texts in results:
        assert len(texts) == 1
        assert "ranks [0, 1] have changed the parameters between two backward passes" in texts[0]
        assert "group.all_reduce(parameter.grad.clone(), ReduceOp.AVG)" in texts[0]
    expected, _ = train(None, body, lengths)
    assert largest_difference(results[0][0], expected) > 1e-4  # Or the warning was untrue.


@pytest.mark.parametrize("clear", [clear_model, clear_optimizer, clear_each])
def test_along_the_mean_of_all_ranks_it_is_as_in_one_process(ranks_of, clear):
    body = functools.partial(sam, clear, True)
    results = ranks_of(2).run(on_ranks, body, (3, 3))
    expected, _ = train(None, body, (3, 3))
    for parameters, texts in results:
        assert not texts
        assert largest_difference(parameters, expected) < 1e-12


@pytest.mark.parametrize("body", [noise, clamp_first])
@pytest.mark.parametrize("lengths", [(3, 3), (4, 2)])
def test_other_changes_of_the_parameters_are_not_warned_of(ranks_of, body, lengths):
    for _, texts in ranks_of(2).run(on_ranks, body, lengths):
        assert not texts
