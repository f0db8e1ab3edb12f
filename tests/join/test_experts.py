"""A mixture of experts over uneven inputs: which of them a step steps hangs on how the body clears.

An optimizer leaves out what has None, and steps by zeros what was cleared to zeros: its momentum
and its weight decay go on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import chorusline as cl
from tests.harness.reused_ranks import another_group
from tests.references.training import largest_difference

Clear = Callable[[torch.nn.Module, Any], None]
LENGTHS = [(4, 2), (2, 4), (1, 3, 4)]


class Experts(torch.nn.Module):
    """Each rank uses its own one, and in every third batch the first one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(3, 1).double() for _ in range(3))

    def forward(self, rank: int, batch: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(10 * rank + batch)
        data = torch.randn(2, 3, dtype=torch.float64, generator=generator)
        out: torch.Tensor = self.experts[0 if batch % 3 == 2 else rank](data)
        return out.square().mean()


def to_none(module: torch.nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()


def to_zeros(module: torch.nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad(set_to_none=False)


def of_the_module_to_zeros(module: torch.nn.Module, optimizer: Any) -> None:
    module.zero_grad(set_to_none=False)


def each_to_zeros(module: torch.nn.Module, optimizer: Any) -> None:
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()


CLEARS = [to_none, to_zeros, of_the_module_to_zeros, each_to_zeros]


def train(
    group: cl.Group, lengths: Sequence[int], clear: Clear, sharded: bool, clears_first: bool
) -> list[torch.Tensor]:
    with another_group(group) as own:
        module = Experts()
        model = cl.DistributedDataParallel(module, own)
        options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}
        optimizer: Any = (
            cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, **options)
            if sharded
            else torch.optim.SGD(model.parameters(), **options)
        )
        join = (
            cl.Join([model, optimizer], skew_warning=None)
            if sharded
            else cl.Join([model], step_along=[optimizer], skew_warning=None)
        )
        with join:
            for batch in range(lengths[own.rank]):
                if clears_first:
                    clear(module, optimizer)
                model(own.rank, batch).backward()
                optimizer.step()
                if not clears_first:
                    clear(module, optimizer)
        return [parameter.detach().clone() for parameter in module.parameters()]


def in_one_process(lengths: Sequence[int], clear: Clear, clears_first: bool) -> list[torch.Tensor]:
    module = Experts()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    for batch in range(max(lengths)):
        if clears_first:
            clear(module, optimizer)
        live = [rank for rank, length in enumerate(lengths) if batch < length]
        (sum(module(rank, batch) for rank in live) / len(lengths)).backward()
        optimizer.step()
        if not clears_first:
            clear(module, optimizer)
    return [parameter.detach().clone() for parameter in module.parameters()]


@pytest.mark.parametrize("clears_first", [True, False])
@pytest.mark.parametrize("clear", CLEARS)
def test_unused_experts_are_stepped_as_in_one_process(
    ranks_of: Any, clear: Clear, clears_first: bool
) -> None:
    for lengths in LENGTHS:
        expected = in_one_process(lengths, clear, clears_first)
        for sharded in (True, False):
            arguments = lengths, clear, sharded, clears_first
            for rank, found in enumerate(ranks_of(len(lengths)).run(train, *arguments)):
                assert largest_difference(found, expected) < 1e-12, (lengths, sharded, rank)
