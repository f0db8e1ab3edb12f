"""torch.compile on the module inside the wrapper, with fullgraph=True, or on the wrapper."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import chorusline as cl
from tests.harness.reused_ranks import another_group
from tests.references.training import batches_of, largest_difference, loss_of, make_model


def compiled(module: torch.nn.Module, group: cl.Group, how: str) -> tuple[Any, Any]:
    if how == "inside":
        model: Any = cl.DistributedDataParallel(
            torch.compile(module, backend="eager", fullgraph=True), group
        )
        return model, model
    model = cl.DistributedDataParallel(module, group)
    return model, torch.compile(model, backend="eager") if how == "around" else model


def train(group: cl.Group) -> dict[str, list[torch.Tensor]]:
    results = {}
    for how in ("inside", "around", "not"):
        with another_group(group) as own:
            module = make_model(torch.float64)
            model, called = compiled(module, own, how)
            optimizer = cl.ZeroRedundancyOptimizer(model, torch.optim.AdamW, lr=0.01)
            for batch in batches_of(own.rank, 3, torch.float64):
                loss_of(called, batch).backward()
                optimizer.step()
                optimizer.zero_grad()
        results[how] = [parameter.detach().clone() for parameter in module.parameters()]
    return results


@pytest.mark.slow  # The compiler takes seconds to come up.
def test_a_compiled_module_trains_as_one_that_is_not_compiled(ranks_of):
    for results in ranks_of(2).run(train):
        for how in ("inside", "around"):
            assert largest_difference(results[how], results["not"]) < 1e-12
