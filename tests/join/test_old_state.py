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
from tests.harness.reused_ranks import another_group
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


AFTER_THE_LOOP = 1000
# How the optimizer is made, what happens after each epoch, whether Join lists it, after how many
# batches it steps; is it told?
CASES: list[tuple[Make, Callable[..., Any], str, int, bool]] = [
    (MOMENTUM, nothing, "", 1, True),
    (ADAM, nothing, "", 1, True),
    (SGD, nothing, "", 1, False),
    (ADAM, clear, "", 1, False),
    (ADAM, zero, "", 1, False),
    (ADAM, renew, "", 1, False),
    (ADAM, nothing, "optimizer", 1, False),
    (MOMENTUM, nothing, "optimizer", 3, False),
    (MOMENTUM, nothing, "function", 1, False),
    (MOMENTUM, nothing, "", AFTER_THE_LOOP, False),
]


def train(
    group: cl.Group | None,
    make: Make,
    after_epoch: Callable[..., Any],
    lists: str,
    every: int,
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
                    if number % every == 0:
                        optim.zero_grad()
                    backward_of_all(model, data, number)
                    if number % every == every - 1:
                        optim.step()
            if every == AFTER_THE_LOOP:
                optim.step()
            optim = after_epoch(optim, make)
    return [p.detach().clone() for p in module.parameters()], [str(one.message) for one in told]


def cases_of(lengths: Sequence[int]) -> list[Any]:
    # A rank that has run out of data before its first step cannot know after how many passes.
    return [case for case in CASES if case[3] != 3 or min(lengths) >= 3]


def train_all(group: cl.Group, lengths: Sequence[int]) -> Any:
    with another_group(group) as own:
        return [train(own, *case, lengths) for *case, _ in cases_of(lengths)]


@pytest.mark.parametrize("lengths", [(4, 4), (5, 3), (1, 4)])
def test_a_rank_that_steps_by_old_momentum_is_told_once(ranks_of, lengths):
    missed = [max(lengths) - length for length in lengths]
    for rank, results in enumerate(ranks_of(2).run(train_all, lengths)):
        for (*case, is_told), (parameters, told) in zip(cases_of(lengths), results, strict=True):
            if is_told and missed[rank]:
                (one,) = told
                assert f"had no data for {missed[rank]} step" in one, one
                assert "step_along=[optimizer]" in one and "momentum" in one
            else:
                assert told == [], (case, told)
            if not (is_told and any(missed)):
                expected, _ = train(None, *case, lengths)
                assert largest_difference(parameters, expected) < 1e-12, case


def keep_momentum_late(group: cl.Group, lengths: Sequence[int], clears: bool) -> list[list[str]]:
    """In two epochs, from the fourth batch on. Returns what each has warned."""
    with another_group(group) as own:
        model = cl.DistributedDataParallel(make_model(DTYPE), own)
        optim, data = SGD(model.parameters()), data_of(own, lengths, DTYPE)
        epochs = []
        for _ in range(2):
            with (
                warnings.catch_warnings(record=True) as told,
                cl.Join([model], skew_warning=None),
            ):
                warnings.simplefilter("always")
                for number in range(max(map(len, data))):
                    if number == 3:
                        optim.param_groups[0]["momentum"] = 0.9
                    optim.zero_grad()
                    backward_of_all(model, data, number)
                    optim.step()
                    if clears:
                        optim.state.clear()
            epochs.append([str(one.message) for one in told])
        return epochs


@pytest.mark.parametrize("clears", [False, True])
@pytest.mark.parametrize("lengths", [(5, 3), (1, 4), (4, 4)])
def test_a_rank_that_kept_nothing_is_told_where_the_others_have_made_state(
    ranks_of, lengths, clears
):
    missed = [max(lengths) - length for length in lengths]
    for rank, (first, second) in enumerate(ranks_of(2).run(keep_momentum_late, lengths, clears)):
        assert first == []
        assert len(second) == (missed[rank] > 0 and not clears)
        assert all(f"had no data for {missed[rank]} step" in one for one in second)
