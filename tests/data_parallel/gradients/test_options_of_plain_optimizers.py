"""Plain optimizers that step by other options, or another number of times, than those of other
ranks are named at the next backward pass, with and without a Join."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

import chorusline as cl
from tests.harness.reused_ranks import another_group
from tests.references.training import batches_of, loss_of, make_model

LENGTHS = (4, 4)
DTYPE = torch.float64


class Loop:
    """What a body of a loop uses, on one rank."""

    def __init__(self, group: cl.Group, options: dict[str, Any], kind: str = "SGD") -> None:
        self.rank = group.rank
        self.model = cl.DistributedDataParallel(make_model(DTYPE), group)
        groups = [{"params": [p]} for p in self.model.parameters()]
        self.optim = getattr(torch.optim, kind)(groups, **options)
        self.loss = 0.0
        self.plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(self.optim, patience=0)

    def set(self, name: str, value: Any, group: int = 1) -> None:
        self.optim.param_groups[group][name] = value

    def take(self, batch: torch.Tensor) -> None:
        self.optim.zero_grad()
        loss_of(self.model, batch).backward()
        self.optim.step()
        self.loss -= 1


def on_rank_1(loop: Loop, name: str, value: Any) -> None:
    if loop.rank == 1:
        loop.set(name, value)


def step_on_nothing(loop: Loop) -> None:
    loop.optim.zero_grad()
    step_once_more(loop)


def step_once_more(loop: Loop) -> None:
    if loop.rank == 1:
        loop.optim.step()


DIFFERENT: dict[str, tuple[str, dict[str, Any], Callable[[Loop], object], str]] = {
    # The optimizer, its options, what the body does after a step, and what the error says.
    "a schedule that looks at this rank's loss": (
        *("SGD", {"lr": 0.1}, lambda loop: loop.plateau.step(loop.loss * (-1) ** loop.rank)),
        "lr of parameter group 0 of SGD is 0.1 on rank 0, 0.01 on rank 1",
    ),
    "lr": (
        *("SGD", {"lr": 0.1}, lambda loop: on_rank_1(loop, "lr", 0.2)),
        "lr of parameter group 1 of SGD is 0.1 on rank 0, 0.2 on rank 1",
    ),
    "lr, in a tensor": (
        *("SGD", {"lr": 0.1}, lambda loop: on_rank_1(loop, "lr", torch.tensor(0.5))),
        "lr of parameter group 1 of SGD is 0.1 on rank 0, 0.5 on rank 1",
    ),
    "a flag": (
        *("SGD", {"lr": 0.1}, lambda loop: on_rank_1(loop, "maximize", True)),
        "maximize of parameter group 1 of SGD is 0 on rank 0, 1 on rank 1",
    ),
    "none": (
        *("SGD", {"lr": 0.1}, lambda loop: on_rank_1(loop, "foreach", False)),
        "foreach of parameter group 1 of SGD is None on rank 0, 0 on rank 1",
    ),
    "betas, in a list": (
        *("AdamW", {"lr": 0.1}, lambda loop: on_rank_1(loop, "betas", [0.9, 0.5])),
        "betas of parameter group 1 of AdamW is [0.9, 0.999] on rank 0, [0.9, 0.5] on rank 1",
    ),
    "another number of steps": (
        *("SGD", {"lr": 0.1}, step_once_more),
        "have stepped: SGD on rank 0, SGD 2 times on rank 1",
    ),
}

ALIKE: dict[str, tuple[str, dict[str, Any], Callable[[Loop], object]]] = {
    "numbers of other types": (
        *("SGD", {"lr": 0.5}, lambda loop: loop.set("lr", (0.5, np.float64(0.5))[loop.rank])),
    ),
    "an entry that the optimizer does not know": (
        *("SGD", {"lr": 0.5}, lambda loop: loop.set("initial_lr", loop.rank)),
    ),
    "a step without gradients": ("SGD", {"lr": 0.5, "momentum": 0.9}, step_on_nothing),
    "a schedule": ("AdamW", {"lr": 0.5}, lambda loop: loop.plateau.step(1.0)),
}


def train(group: cl.Group, table: str, name: str, joins: bool) -> str:
    kind, options, afterwards, *_ = {"different": DIFFERENT, "alike": ALIKE}[table][name]
    with another_group(group) as own:
        loop = Loop(own, options, kind)
        try:
            with cl.Join([loop.model], enable=joins):
                for batch in batches_of(own.rank, 4, DTYPE):
                    loop.take(batch)
                    afterwards(loop)
        except cl.CollectiveMismatch as error:
            return str(error)
        return ""


@pytest.mark.parametrize("joins", [True, False])
@pytest.mark.parametrize("name", DIFFERENT)
def test_ranks_that_step_differently_are_told_what_differs(ranks_of, name, joins):
    *_, says = DIFFERENT[name]
    told = ranks_of(2).run(train, "different", name, joins)
    assert all(says in text and "drift apart" in text for text in told), told


@pytest.mark.parametrize("name", ALIKE)
def test_ranks_that_step_alike_are_let_alone(ranks_of, name):
    assert ranks_of(2).run(train, "alike", name, False) == ["", ""]


def train_unevenly(group: cl.Group, along: Sequence[str], pauses: int) -> str:
    """Over (5, 3) batches, twice. along: what is listed in step_along. pauses: how often a batch of
    rank 0 has no backward pass, and steps by the gradients of the batch before."""
    with another_group(group) as own:
        loop = Loop(own, {"lr": 0.1, "momentum": 0.9})
        loop.schedule = torch.optim.lr_scheduler.ExponentialLR(loop.optim, 0.5)
        try:
            for _ in range(2):
                listed = [getattr(loop, name) for name in along]
                with cl.Join([loop.model], step_along=listed, skew_warning=None):
                    for batch in batches_of(own.rank, (5, 3)[own.rank], DTYPE):
                        loop.take(batch)
                        if pauses and loop.schedule.last_epoch % 5 == 3:
                            loop.optim.step()
                        loop.schedule.step()
        except cl.CollectiveMismatch as error:
            return str(error)
        return ""


@pytest.mark.parametrize(
    ("along", "pauses", "says"),
    [
        (["optim", "schedule"], 0, ""),
        (["optim", "schedule"], 1, "have stepped: SGD 2 times on rank 0, SGD on rank 1"),
        (["optim"], 0, "lr of parameter group 0 of SGD is 0.003125 on rank 0, 0.0125 on rank 1"),
        ([], 0, ""),  # The options come with the parameters, at the end of the Join.
    ],
)
def test_what_a_rank_without_data_has_missed_is_named(ranks_of, along, pauses, says):
    told = ranks_of(2).run(train_unevenly, along, pauses)
    assert all((says in text) if says else not text for text in told), told


def train_with_an_own_gradient(group: cl.Group, lengths: tuple[int, ...], last: int) -> str:
    """The rank `last` runs its last pass in no_sync(), and steps with what that gave."""
    with another_group(group) as own:
        loop = Loop(own, {"lr": 0.1})
        batches = batches_of(own.rank, lengths[own.rank], DTYPE)
        try:
            with cl.Join([loop.model]):
                for number, batch in enumerate(batches):
                    alone = own.rank == last and number == len(batches) - 1
                    with loop.model.no_sync() if alone else contextlib.nullcontext():
                        loop.take(batch)
        except cl.CollectiveMismatch as error:
            return str(error)
        return ""


@pytest.mark.parametrize("lengths", [(4, 4), (3, 5), (2, 6)])
def test_a_last_step_with_gradients_that_were_not_reduced_is_told_to_all_ranks(ranks_of, lengths):
    shorter = lengths.index(min(lengths))
    told = ranks_of(2).run(train_with_an_own_gradient, lengths, shorter)
    assert all("by gradients of no_sync() that were not reduced on rank 0" in t for t in told), told
