"""Parameters without elements have the state that the plain optimizer gives them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import chorusline as cl
from tests.harness.reused_ranks import another_group
from tests.references.checkpoint_runs import in_run

ADAMW = {"lr": 0.1}


class Model(torch.nn.Module):
    """One at the beginning, one in the middle, and one alone in a bucket of its dtype."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Parameter(torch.empty(2, 0))
        self.one = torch.nn.Linear(3, 2)
        self.middle = torch.nn.Parameter(torch.empty(0, 4))
        self.other = torch.nn.Linear(2, 1)
        self.last = torch.nn.Parameter(torch.empty(0, dtype=torch.float64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        nothing = self.first.sum() + self.middle.sum() + self.last.sum()
        return self.other(self.one(inputs)) + nothing


def steps_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    for step in range(number):
        model(torch.full((4, 3), step + 1.0)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def in_one_process(kind: Any, options: Any, number: int) -> Any:
    model = Model()
    optimizer = kind(model.parameters(), **options)
    steps_of(model, optimizer, number)
    return optimizer.state_dict()


def assert_same(state: Any, expected: Any) -> None:
    assert list(state["state"]) == list(expected["state"]) == list(range(7))
    for number, values in expected["state"].items():
        assert state["state"][number].keys() == values.keys()
        for name, value in values.items():
            ours = state["state"][number][name]
            assert ours.shape == value.shape and ours.dtype == value.dtype
            assert torch.allclose(ours, value)


def train(group: cl.Group, kind: Any, options: Any, start: Any = None) -> Any:
    with another_group(group) as own:
        model = cl.DistributedDataParallel(Model(), own)
        optimizer = cl.ZeroRedundancyOptimizer(model, kind, **options)
        if start is not None:
            optimizer.load_state_dict(start)
        steps_of(model, optimizer, 0 if start is not None else 2)
        optimizer.consolidate_state_dict()
        return optimizer.state_dict() if own.rank == 0 else None


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_state_is_the_plain_optimizers_and_can_be_loaded(ranks_of, size):
    for kind, options in (
        (torch.optim.AdamW, ADAMW),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    ):
        expected = in_one_process(kind, options, 2)
        assert_same(ranks_of(size).run(train, kind, options)[0], expected)
        assert_same(ranks_of(size).run(train, kind, options, expected)[0], expected)


def save_or_resume(group: cl.Group, folder: str, number: int) -> Any:
    def run(ctx: cl.Context) -> Any:
        model = ctx.register("model", cl.DistributedDataParallel(Model()))
        zero = cl.ZeroRedundancyOptimizer(model, torch.optim.AdamW, **ADAMW)
        optimizer = ctx.register("optimizer", zero)
        steps_of(model, optimizer, number)
        if number:
            ctx.save().wait()
        optimizer.consolidate_state_dict()
        return optimizer.state_dict() if ctx.rank == 0 else None

    return in_run(group, run, cl.CheckpointConfig(folder))


def test_it_goes_through_a_checkpoint_to_another_number_of_ranks(ranks_of, tmp_path):
    saved = ranks_of(2).run(save_or_resume, str(tmp_path), 2)[0]
    assert_same(saved, in_one_process(torch.optim.AdamW, ADAMW, 2))
    assert_same(ranks_of(3).run(save_or_resume, str(tmp_path), 0)[0], saved)
