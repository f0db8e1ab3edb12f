"""The state of a plain optimizer, cleared, loaded or made again on some ranks alone: all ranks are
told with the next pass that follows a step; where all do it, nothing is said."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import chorusline as cl
from tests.harness.reused_ranks import another_group
from tests.references.training import batches_of, loss_of, make_model

DTYPE = torch.float64
MOMENTUM = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAM = functools.partial(torch.optim.Adam, lr=0.05)
ADAGRAD = functools.partial(torch.optim.Adagrad, lr=0.05)
Make = Callable[[Any], torch.optim.Optimizer]
Change = Callable[[torch.optim.Optimizer, dict[str, Any]], object]


def clear(optim: torch.optim.Optimizer, first: dict[str, Any]) -> None:
    optim.state.clear()


def replace(optim: torch.optim.Optimizer, first: dict[str, Any]) -> None:
    optim.state = type(optim.state)(dict)


def load(optim: torch.optim.Optimizer, first: dict[str, Any]) -> None:
    optim.load_state_dict(first)


def reload(optim: torch.optim.Optimizer, first: dict[str, Any]) -> None:
    """It ends with the state that it had."""
    optim.load_state_dict(copy.deepcopy(optim.state_dict()))


def train(
    group: cl.Group, make: Make, change: Change, at: int, before_step: bool, ranks: tuple[int, ...]
) -> str:
    """Six steps. The change is done around step `at`, on these ranks. Returns the error."""
    with another_group(group) as own:
        model = cl.DistributedDataParallel(make_model(DTYPE), own)
        optim, first = make(model.parameters()), {}
        changes = own.rank in ranks
        try:
            for number, batch in enumerate(batches_of(own.rank, 6, DTYPE)):
                optim.zero_grad()
                loss_of(model, batch).backward()
                if number == at and before_step and changes:
                    change(optim, first)
                optim.step()
                if number == at and not before_step and changes:
                    change(optim, first)
                first = first or copy.deepcopy(optim.state_dict())
        except cl.CollectiveMismatch as error:
            return str(error)
        return ""


@pytest.mark.parametrize("before_step", [False, True])
@pytest.mark.parametrize("change", [clear, replace, load])
@pytest.mark.parametrize("make", [MOMENTUM, ADAM], ids=["SGD", "Adam"])
def test_state_that_one_rank_drops_is_named(
    ranks_of: Callable[[int], Any], make: Any, change: Change, before_step: bool
) -> None:
    for told in ranks_of(2).run(train, make, change, 2, before_step, (1,)):
        assert (
            f"the state (momentum and the like) of {make.func.__name__} is kept on rank 0, made "
            "again in the last step on rank 1, so the parameters of the ranks drift apart" in told
        ), told
        assert "on every rank between the same two steps" in told


@pytest.mark.parametrize("before_step", [False, True])
@pytest.mark.parametrize("change", [clear, replace, load, reload])
def test_state_that_all_ranks_drop_is_nobodys_error(
    ranks_of: Callable[[int], Any], change: Change, before_step: bool
) -> None:
    for make in (MOMENTUM, ADAM, ADAGRAD):
        assert ranks_of(2).run(train, make, change, 2, before_step, (0, 1)) == ["", ""]


def test_state_that_one_rank_loads_as_it_was_is_no_error(ranks_of: Callable[[int], Any]) -> None:
    for make in (MOMENTUM, ADAM, ADAGRAD):
        assert ranks_of(2).run(train, make, reload, 2, False, (1,)) == ["", ""]


def train_unevenly(
    group: cl.Group, lengths: tuple[int, int], clears: tuple[int, ...], lists: bool
) -> list[str]:
    """Three epochs, after the first of which these ranks clear the state; what each is told."""
    with another_group(group) as own, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = cl.DistributedDataParallel(make_model(DTYPE), own)
        optim, told = ADAM(model.parameters()), []
        for epoch in range(3):
            try:
                with cl.Join([model], step_along=[optim] * lists, skew_warning=None):
                    for batch in batches_of(own.rank, lengths[own.rank], DTYPE):
                        optim.zero_grad()
                        loss_of(model, batch).backward()
                        optim.step()
            except cl.CollectiveMismatch as error:
                return [*told, str(error)]
            if epoch == 0 and own.rank in clears:
                optim.state.clear()
            told.append("")
        return told


@pytest.mark.parametrize("lengths", [(2, 4), (3, 0), (3, 3)], ids=str)
@pytest.mark.parametrize("clears", [(), (0,), (0, 1)], ids=str)
@pytest.mark.parametrize("lists", [True, False])
def test_state_is_compared_where_no_rank_has_missed_a_step(
    ranks_of: Callable[[int], Any], lengths: tuple[int, int], clears: tuple[int, ...], lists: bool
) -> None:
    is_told = len(clears) == 1 and (lists or lengths[0] == lengths[1])
    for told in ranks_of(2).run(train_unevenly, lengths, clears, lists):
        assert len(told) == (2 if is_told else 3), told
        assert ("(momentum and the like) of Adam is made again" in told[-1]) == is_told
