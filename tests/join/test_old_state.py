"""A plain optimizer with momentum whose steps a rank has missed: the rank is told so when it steps
by the old state, and only then; without such a word the result is that of one process."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import chorusline as cl
from tests.harness.standing_ranks import another_group
from tests.references.training import (
    backward_of_all,
    data_of,
    largest_difference,
    make_model,
)

DTYPE = torch.float64
Make = Callable[[Any], torch.optim.Optimizer]
SGD = functools.partial(torch.optim.SGD, lr=0.1)
MOMENTUM = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAM = functools.partial(torch.optim.Adam, lr=0.05)


def nothing(optim: torch.optim.Optimizer, _: Make) -> torch.optim.Optimizer:
    return optim


def clear(optim: torch.optim.Optimizer, _: Make) -> torch.optim.Optimizer:
    optim.state.clear()
    return optim


def zero(optim: torch.optim.Optimizer, _: Make) -> torch.optim.Optimizer:
    for state in optim.state.values():
        for tensor in state.values():
            tensor.zero_()
    return optim


def renew(optim: torch.optim.Optimizer, make: Make) -> torch.optim.Optimizer:
    return make([p for options in optim.param_groups for p in options["params"]])


# How the optimizer is made, what happens after each epoch, whether Join lists it; is it told?
CASES: list[tuple[Make, Callable[..., Any], str, bool]] = [
    (MOMENTUM, nothing, "", True),
    (ADAM, nothing, "", True),
    (SGD, nothing, "", False),
    (ADAM, clear, "", False),
    (ADAM, zero, "", False),
    (ADAM, renew, "", False),
    (ADAM, nothing, "optimizer", False),
    (MOMENTUM, nothing, "function", False),
]


def train(
    group: cl.Group | None,
    make: Make,
    after_epoch: Callable[..., Any],
    lists: str,
    lengths: Sequence[int],
) -> tuple[list[torch.Tensor], list[str]]:
    """Three epochs. Returns the parameters, and what was warned. group: None: in one process."""
    module = make_model(DTYPE)
    model: Any = cl.DistributedDataParallel(module, group) if group else module
    optim = make(module.parameters())
    data = data_of(group, lengths, DTYPE)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(3):
            along = {"": [], "optimizer": [optim], "function": [lambda o=optim: o.step()]}[lists]
            join = cl.Join([model], step_along=along, skew_warning=None) if group else None
            with join or contextlib.nullcontext():
                for number in range(max(map(len, data))):
                    optim.zero_grad()
                    backward_of_all(model, data, number)
                    optim.step()
            optim = after_epoch(optim, make)
    return [p.detach().clone() for p in module.parameters()], [str(one.message) for one in told]


def train_all(group: cl.Group, lengths: Sequence[int]) -> Any:
    with another_group(group) as own:
        return [train(own, *case, lengths) for *case, _ in CASES]


@pytest.mark.parametrize("lengths", [(4, 4), (5, 3), (1, 4)])
def test_a_rank_that_steps_by_old_momentum_is_told_once(ranks_of, lengths):
    missed = [max(lengths) - length for length in lengths]
    for rank, results in enumerate(ranks_of(2).run(train_all, lengths)):
        for (*case, is_told), (parameters, told) in zip(CASES, results, strict=True):
            if is_told and missed[rank]:
                (one,) = told
                assert f"had no data for {missed[rank]} step" in one, one
                assert "step_along=[optimizer]" in one and "momentum" in one
            else:
                assert told == [], (case, told)
            if not (is_told and any(missed)):
                expected, _ = train(None, *case, lengths)
                assert largest_difference(parameters, expected) < 1e-12, case
