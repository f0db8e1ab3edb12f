"""What is made, loaded or stepped in torch.inference_mode() is as outside of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import chorusline as cl
from tests.references.training import batches_of, loss_of, make_model

INSTANTS = ("wrap", "make", "load", "add", "step", "consolidate")


def train(group: cl.Group, instants: tuple[str, ...], sharded: bool) -> list[torch.Tensor]:
    def inside(instant: str) -> torch.inference_mode:
        return torch.inference_mode(instant in instants)

    former = make_model(torch.float64)
    adam = torch.optim.Adam([*former.parameters()][:-1], lr=0.01)
    for batch in batches_of(5, 2, torch.float64):
        loss_of(former, batch).backward()
        adam.step()
    net = make_model(torch.float64)
    *most, last = net.parameters()
    last.requires_grad_(False)
    with inside("wrap"):
        model = cl.DistributedDataParallel(net, group)
    with inside("make"):
        if sharded:
            optim: Any = cl.ZeroRedundancyOptimizer(most, torch.optim.Adam, lr=0.01)
        else:
            optim = torch.optim.Adam(most, lr=0.01)
    with inside("load"):
        optim.load_state_dict(adam.state_dict())
    last.requires_grad_()
    with inside("add"):
        optim.add_param_group({"params": [last], "lr": 0.02})
    along = {} if sharded else {"step_along": [optim]}
    with cl.Join([model, optim] if sharded else [model], skew_warning=None, **along):
        for batch in batches_of(group.rank, 2 + group.rank, torch.float64):
            loss_of(model, batch).backward()
            with inside("step"):
                optim.step()
            optim.zero_grad()
    with inside("consolidate"):
        if sharded:
            optim.consolidate_state_dict(0)
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("instants", [*((one,) for one in INSTANTS), INSTANTS], ids="+".join)
def test_a_sharded_optimizer_does_in_inference_mode_what_it_does_outside(
    ranks_of: Callable[[int], Any], instants: tuple[str, ...]
) -> None:
    expected, _ = ranks_of(2).run(train, (), False)
    for parameters in ranks_of(2).run(train, instants, True):
        assert all(map(torch.equal, parameters, expected))
