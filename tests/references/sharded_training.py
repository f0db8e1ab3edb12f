"""A sharded training run, and the plain optimizer's, which it has to equal bit by bit."""

from __future__ import annotations

import copy

import torch

import chorusline as cl
from tests.references.training import batches_of, loss_of, make_model

ELEMENTWISE = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "adam": (torch.optim.Adam, {"lr": 1e-2, "amsgrad": True}),
    "adamw_fused": (torch.optim.AdamW, {"lr": 1e-2, "fused": True}),
    "adamw_foreach": (torch.optim.AdamW, {"lr": 1e-2, "foreach": True}),
    "nadam": (torch.optim.NAdam, {"lr": 1e-2}),
    "radam": (torch.optim.RAdam, {"lr": 1e-2}),
    "adamax": (torch.optim.Adamax, {"lr": 1e-2}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 1e-2, "momentum": 0.5, "centered": True}),
    "adagrad": (torch.optim.Adagrad, {"lr": 1e-2}),
    "adadelta": (torch.optim.Adadelta, {}),
    "asgd": (torch.optim.ASGD, {"lr": 1e-2}),
    "rprop": (torch.optim.Rprop, {"lr": 1e-2}),
}


def groups_of(model):
    """Two groups, with different decay: biases apart."""
    return [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.01},
        {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
    ]


def plain_run(size, kind, options, steps, *, start=None, first=0):
    """One process that sums the ranks' gradients in rank order; parameters and state."""
    model = make_model(torch.float32)
    optimizer = kind(groups_of(model), **options)
    if start is not None:
        with torch.no_grad():
            for parameter, saved in zip(model.parameters(), start[0], strict=True):
                parameter.copy_(saved)
        optimizer.load_state_dict(copy.deepcopy(start[1]))  # torch goes on in the very tensors
    data = [batches_of(rank, steps, torch.float32) for rank in range(size)]
    for step in range(first, steps):
        total = []
        for rank in range(size):
            optimizer.zero_grad()
            loss_of(model, data[rank][step]).backward()
            mine = [parameter.grad for parameter in model.parameters()]
            total = [a + b for a, b in zip(total, mine, strict=True)] if total else mine
        for parameter, gradient in zip(model.parameters(), total, strict=True):
            parameter.grad = gradient / size
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()], optimizer.state_dict()


def sharded_run(group, kind, options, steps, start=None, first=0, ranks_of_data=None):
    model = cl.DistributedDataParallel(make_model(torch.float32), group)
    if start is not None:
        with torch.no_grad():
            for parameter, saved in zip(model.parameters(), start[0], strict=True):
                parameter.copy_(saved)
    optimizer = cl.ZeroRedundancyOptimizer(groups_of(model), kind, **options)
    if start is not None:
        given = copy.deepcopy(start[1])
        optimizer.load_state_dict(given)
    for batch in batches_of(group.rank, steps, torch.float32)[first:]:
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    if start is not None:
        assert_same_state(given, start[1])  # steps wrote to none of it
    optimizer.consolidate_state_dict(to=group.size - 1)
    state = optimizer.state_dict() if group.rank == group.size - 1 else None
    return [p.detach().clone() for p in model.parameters()], state


def assert_same_state(ours, theirs):
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    for number, expected in theirs["state"].items():
        assert ours["state"][number].keys() == expected.keys()
        for name, value in expected.items():
            mine = ours["state"][number][name]
            same = torch.equal(mine, value) if isinstance(value, torch.Tensor) else mine == value
            assert same, f"{name} of parameter {number}"
