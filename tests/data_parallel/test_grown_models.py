"""A module that gets layers after it was wrapped trains on as in one process, or is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import chorusline as cl
from tests.harness.reused_ranks import another_group
from tests.references.training import batches_of, largest_difference, make_model


def grow(module: torch.nn.Module, optimizer: torch.optim.Optimizer | None, seed: int) -> None:
    assert isinstance(module, torch.nn.Sequential)
    torch.manual_seed(seed)
    layer = torch.nn.Linear(5, 5).double()
    module.append(layer)
    if optimizer is not None:
        optimizer.add_param_group({"params": list(layer.parameters()), "lr": 0.05})


def model_and_optimizer(group: cl.Group, kind: str) -> tuple[cl.DistributedDataParallel, Any]:
    model = cl.DistributedDataParallel(make_model(torch.float64), group)
    if kind == "plain":
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.1, momentum=0.9)


def train(group: cl.Group, kind: str) -> list[torch.Tensor]:
    with another_group(group) as own:
        model, optimizer = model_and_optimizer(own, kind)
        for step, batch in enumerate(batches_of(own.rank, 6, torch.float64)):
            if step == 2:
                grow(model.module, optimizer, seed=own.rank)
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("kind", ["plain", "zero"])
def test_layers_added_after_wrapping_are_trained_as_in_one_process(ranks_of, kind):
    """They begin with rank 0's values."""
    model = make_model(torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = [batches_of(rank, 6, torch.float64) for rank in range(2)]
    for step in range(6):
        if step == 2:
            grow(model, optimizer, seed=0)
        for batches in data:
            (model(batches[step]).square().mean() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for parameters in ranks_of(2).run(train, kind):
        assert largest_difference(parameters, list(model.parameters())) < 1e-14


def train_unevenly(group: cl.Group, kind: str, lengths: tuple[int, ...]) -> list[torch.Tensor]:
    """A function that step_along lists adds a layer after the second step."""
    with another_group(group) as own:
        model, optimizer = model_and_optimizer(own, kind)
        steps = iter(range(max(lengths)))

        def grow_after_two() -> None:
            if next(steps) == 1:
                grow(model.module, optimizer, seed=own.rank)

        along = [optimizer, grow_after_two] if kind == "plain" else [grow_after_two]
        joined = [model] if kind == "plain" else [model, optimizer]
        with cl.Join(joined, step_along=along, skew_warning=None):
            for batch in batches_of(own.rank, lengths[own.rank], torch.float64):
                model(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                grow_after_two()
        return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("lengths", [(4, 4), (1, 4), (0, 4), (4, 2)])
@pytest.mark.parametrize("kind", ["plain", "zero"])
def test_a_rank_without_data_adds_the_layers_that_step_along_makes(ranks_of, kind, lengths):
    model = make_model(torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = [batches_of(rank, length, torch.float64) for rank, length in enumerate(lengths)]
    for step in range(max(lengths)):
        if step == 2:
            grow(model, optimizer, seed=0)
        for batches in data:
            if step < len(batches):
                (model(batches[step]).square().mean() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for parameters in ranks_of(2).run(train_unevenly, kind, lengths):
        assert largest_difference(parameters, list(model.parameters())) < 1e-14


def train_and_grow_between_epochs(
    group: cl.Group, kind: str, epochs: list[tuple[int, ...]], is_listed: bool
) -> list[torch.Tensor]:
    with another_group(group) as own:
        model, optimizer = model_and_optimizer(own, kind)
        joined = [model] if kind == "plain" else [model, optimizer]
        along = [optimizer] if kind == "plain" and is_listed else []
        for epoch, lengths in enumerate(epochs):
            if epoch:
                grow(model.module, optimizer, seed=own.rank)
            with cl.Join(joined, step_along=along, skew_warning=None):
                for batch in batches_of(own.rank, lengths[own.rank], torch.float64):
                    model(batch).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("second", [(1, 3), (0, 2), (2, 0), (2, 2)])
@pytest.mark.parametrize(("kind", "is_listed"), [("plain", True), ("plain", False), ("zero", True)])
def test_layers_added_before_a_join_are_trained_in_it(ranks_of, kind, is_listed, second):
    """Also on a rank that has no batch in it."""
    # Without a list a plain optimizer steps on as in one process only after even epochs.
    epochs = [(2, 2), second] if not is_listed else [(3, 1), second, (1, 2)]
    model = make_model(torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch, lengths in enumerate(epochs):
        if epoch:
            grow(model, optimizer, seed=0)
        data = [batches_of(rank, length, torch.float64) for rank, length in enumerate(lengths)]
        for step in range(max(lengths)):
            for batches in data:
                if step < len(batches):
                    (model(batches[step]).square().mean() / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
    trained = ranks_of(2).run(train_and_grow_between_epochs, kind, epochs, is_listed)
    for parameters in trained:
        assert largest_difference(parameters, list(model.parameters())) < 1e-14


def grow_where_it_cannot_be(group: cl.Group, kind: str) -> str:
    with another_group(group) as own:
        model = cl.DistributedDataParallel(make_model(torch.float64), own)
        joined: Any = [model]
        if kind == "zero":
            joined.append(cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.1))
        (batch,) = batches_of(own.rank, 1, torch.float64)
        model(batch).square().mean().backward()
        with (
            pytest.raises((RuntimeError, cl.GroupAborted)) as raised,
            cl.Join(joined, enable=kind == "join"),
        ):
            grow(model.module, None, seed=0)
            model(batch)
        return str(raised.value)


@pytest.mark.parametrize(
    ("kind", "mend"), [("zero", "add_param_group"), ("join", "outside of the")]
)
def test_where_they_cannot_be_taken_over_the_next_forward_says_so(ranks_of, kind, mend):
    for told in ranks_of(2).run(grow_where_it_cannot_be, kind):
        assert "2.weight" in told or "3.weight" in told
        assert mend in told
