"""What every rank does rightly and the ranks together do wrongly is told at the first step."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import chorusline as cl
from chorusline.actors.messages.run_status import RunStatus
from chorusline.runtime.data.cursor import Cursor
from chorusline.runtime.process.random_state import RankSeed
from chorusline.runtime.process.step_boundary import boundary, entered

KINDS = pytest.mark.parametrize("sharded", [False, True], ids=["plain", "zero"])


def told(run: Callable[[], object]) -> list[str]:
    """What a run of this process warns of."""
    with entered(RunStatus()), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(one.message) for one in caught]


def wrapped(group: cl.Group, net: nn.Module, sharded: bool) -> tuple[Any, Any]:
    model = cl.DistributedDataParallel(net, group)
    if sharded:
        return model, cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def step(model: Any, optim: Any) -> None:
    optim.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optim.step()


# ── One seed on every rank ───────────────────────────────────────────────────────────────────────

SEEDS: dict[str, tuple[Callable[[int], object], float, bool]] = {
    "one seed": (lambda rank: torch.manual_seed(3), 0.5, True),
    "one seed, nothing drawn": (lambda rank: torch.manual_seed(3), 0.0, False),
    "a seed for each": (torch.manual_seed, 0.5, False),
    "ctx.seed": (
        lambda rank: setattr(boundary(), "at_first_step", RankSeed(3, rank).begin_steps),
        0.5,
        False,
    ),
}


def seeded(group: cl.Group, kind: str, sharded: bool) -> list[str]:
    seed, rate, _ = SEEDS[kind]

    def run() -> None:
        seed(group.rank)
        layers = [nn.Linear(4, 4), *([nn.Dropout(rate)] if rate else [])]
        model, optim = wrapped(group, nn.Sequential(*layers), sharded)
        with torch.no_grad():  # An evaluation before the training says nothing.
            model(torch.ones(2, 4))
        for _ in range(3):
            step(model, optim)

    return told(run)


@KINDS
@pytest.mark.parametrize("kind", SEEDS)
def test_one_seed_on_every_rank_is_told_once_where_the_model_draws(
    ranks_of: Any, kind: str, sharded: bool
) -> None:
    first, *others = ranks_of(2).run(seeded, kind, sharded)
    assert not any(others)
    assert len(first) == SEEDS[kind][2]
    for text in first:
        assert text.startswith("ranks [0, 1] draw the same random numbers")
        assert "ctx.seed(seed)" in text


# ── An embedding whose forward pass writes ───────────────────────────────────────────────────────

LONG_ROWS: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "max_norm": (lambda: nn.Embedding(6, 3, max_norm=0.1), True),
    "of a bag": (lambda: nn.EmbeddingBag(6, 3, max_norm=0.1), True),
    "without": (lambda: nn.Embedding(6, 3), False),
}


def looked_up(group: cl.Group, kind: str, pure: bool) -> tuple[list[str], list[list[float]]]:
    net = nn.Sequential(LONG_ROWS[kind][0]())
    wrapper = cl.PureDistributedDataParallel if pure else cl.DistributedDataParallel

    def run() -> None:
        model = wrapper(net, group)
        rows = torch.tensor([[group.rank, 2 + group.rank]])  # Each rank its own.
        model(rows).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()

    return told(run), net[0].weight.tolist()


@pytest.mark.parametrize("pure", [False, True], ids=["DDP", "pure"])
@pytest.mark.parametrize("kind", LONG_ROWS)
def test_an_embedding_that_shortens_its_rows_on_one_rank_is_told_when_it_is_wrapped(
    ranks_of: Any, kind: str, pure: bool
) -> None:
    (texts, weight), (others, other) = ranks_of(2).run(looked_up, kind, pure)
    drifts = LONG_ROWS[kind][1]
    assert (weight != other) is drifts
    assert len(texts) == (drifts and (1 if pure else 2)) and not others
    for text in texts[1:]:
        assert text.startswith("parameter 0.weight differs between rank 0 and rank 1 in step 1")
    for text in texts[:1]:
        assert text.startswith("0 is an Embedding")
        assert "weight.renorm_(2, 0, 0.1)" in text


# ── A Join that was forgotten ────────────────────────────────────────────────────────────────────

UNEVEN = ((3, 2), (2, 3))
"""By epoch, the number of batches of each rank."""


def several_epochs(group: cl.Group, sharded: bool, joins: bool, even: bool) -> list[str]:
    def run() -> None:
        model, optim = wrapped(group, nn.Linear(4, 4), sharded)
        along = [] if sharded else [optim]
        joined = [model, optim] if sharded else [model]
        for epoch in Cursor().epochs(len(UNEVEN)):
            join = cl.Join(joined, step_along=along, skew_warning=None)
            with join if joins else contextlib.nullcontext():
                for _ in range(3 if even else UNEVEN[epoch][group.rank]):
                    step(model, optim)

    return told(run)


@KINDS
@pytest.mark.parametrize(
    ("joins", "even"), [(False, False), (True, False), (False, True)], ids=["forgotten", "", "even"]
)
def test_a_join_that_was_forgotten_is_told_though_the_counts_of_two_epochs_add_up(
    ranks_of: Any, sharded: bool, joins: bool, even: bool
) -> None:
    first, *others = ranks_of(2).run(several_epochs, sharded, joins, even)
    assert not any(others)
    assert len(first) == (not joins and not even)
    for text in first:
        assert "gradients of different epochs (rank 0: 0, rank 1: 1)" in text
        assert "chorusline.Join([model, optimizer])" in text


# ── A sharded optimizer over parameters that nobody reduces ──────────────────────────────────────


def over_other_parameters(group: cl.Group, kind: str) -> tuple[str, list[str]]:
    net = nn.Linear(4, 4)
    model = cl.DistributedDataParallel(net, group)
    other = copy.deepcopy(net)
    optim: Any = cl.ZeroRedundancyOptimizer(
        [*model.parameters(), *other.parameters()] if kind == "both" else other.parameters(),
        torch.optim.SGD,
        group=group,
        lr=0.1,
    )
    mismatch = ""

    def run() -> None:
        nonlocal mismatch
        for _ in range(2):
            optim.zero_grad()
            loss = model(torch.full((2, 4), group.rank + 1.0)).sum()
            if kind != "without gradients":
                loss = loss + other(torch.full((2, 4), group.rank + 1.0)).sum()
            loss.backward()
            if kind == "reduced by the program":
                for parameter in other.parameters():
                    group.all_reduce(parameter.grad).wait()
            try:
                optim.step()
            except cl.CollectiveMismatch as error:
                mismatch = str(error)
                return

    warned = told(run)
    return mismatch, warned


@pytest.mark.parametrize("kind", ["copy", "both", "without gradients", "reduced by the program"])
def test_a_sharded_optimizer_over_the_parameters_of_another_module_says_so(
    ranks_of: Any, kind: str
) -> None:
    by_rank = ranks_of(2).run(over_other_parameters, kind)
    for mismatch, _ in by_rank:
        assert bool(mismatch) == (kind in ("copy", "both"))
        if mismatch:
            assert "differs between rank 0 and rank 1" in mismatch
            assert "ZeroRedundancyOptimizer(model, ...)" in mismatch
    assert [len(warned) for _, warned in by_rank] == [int(kind == "without gradients"), 0]
    for text in by_rank[0][1]:
        assert "no parameter of this ZeroRedundancyOptimizer has a gradient" in text
