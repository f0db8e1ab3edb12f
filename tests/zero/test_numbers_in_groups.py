"""Optimizers that keep numbers of their own in their parameter groups, as schedule-free ones do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import chorusline as cl
from tests.harness.reused_ranks import another_group
from tests.references.training import batches_of, loss_of, make_model


class Decaying(torch.optim.Optimizer):
    """SGD at the rate lr / (number of the step), which it counts in the group."""

    def __init__(self, params: Any, lr: float = 0.1, k: int = 0) -> None:
        super().__init__(params, {"lr": lr, "k": k})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] += 1
            group["rate"] = group["lr"] / group["k"]  # An option that was not there at first.
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=group["rate"])


def train(group: cl.Group | None, size: int, lengths: tuple[int, ...], tiny: bool) -> Any:
    module = torch.nn.Linear(1, 1, bias=False).double() if tiny else make_model(torch.float64)
    torch.nn.init.constant_(next(module.parameters()), 0.5)
    model, optimizer = module, Decaying(module.parameters())
    if group is not None:
        model = cl.DistributedDataParallel(module, group)
        optimizer = cl.ZeroRedundancyOptimizer(model, Decaying)
    data = [batches_of(rank, max(lengths), torch.float64) for rank in range(size)]
    if tiny:
        data = [[batch[:, :1] for batch in batches] for batches in data]

    def take(step: int, ranks: list[int]) -> None:
        for rank in ranks:
            (loss_of(model, data[rank][step]) / (1 if group is not None else size)).backward()
        optimizer.step()
        optimizer.zero_grad()

    if group is not None:
        with cl.Join([model, optimizer], skew_warning=None):
            for step in range(lengths[group.rank]):
                take(step, [group.rank])
    else:
        for step in range(max(lengths)):
            take(step, [rank for rank in range(size) if step < lengths[rank]])
    options = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
    return [p.detach().clone() for p in module.parameters()], options


def train_in(group: cl.Group, *args: Any) -> Any:
    with another_group(group) as own:
        return train(own, own.size, *args)


@pytest.mark.parametrize("tiny", [False, True], ids=["small", "an element for two ranks"])
@pytest.mark.parametrize("lengths", [(4, 4), (2, 4)])
def test_what_an_optimizer_counts_in_its_groups_counts_as_in_one_process(ranks_of, lengths, tiny):
    expected, options = train(None, 2, lengths, tiny)
    assert options["k"] == 4
    results = ranks_of(2).run(train_in, lengths, tiny)
    assert [found for _, found in results] == [options] * 2
    for parameters, _ in results:
        for one, other in zip(parameters, expected, strict=True):
            assert torch.allclose(one, other, rtol=1e-12, atol=0)


class OnOneDevice(torch.optim.Optimizer):
    """It cannot step nothing: it asks its first parameter for the device. And it counts."""

    def __init__(self, params: Any, lr: float = 0.1, k: int = 0) -> None:
        super().__init__(params, {"lr": lr, "k": k})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] += 1
            rate = torch.tensor(group["lr"] / group["k"], device=group["params"][0].device)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(rate * parameter.grad)


def step_one_element(group: cl.Group, lengths: tuple[int, int]) -> tuple[bool, float]:
    """The body halves the rate after each step."""
    with another_group(group) as own:
        module = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.constant_(module.weight, 0.5)
        model = cl.DistributedDataParallel(module, own)
        optimizer = cl.ZeroRedundancyOptimizer(model, OnOneDevice, lr=0.75)
        with cl.Join([model, optimizer], skew_warning=None):
            for _ in range(lengths[own.rank]):
                model(torch.ones(1, 1)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                optimizer.param_groups[0]["lr"] /= 2
        return optimizer.shard_optimizer is None, float(module.weight)


# Rates of 0.75, 0.375 / 2 and 0.1875 / 3, for half of the gradient where one of two ranks has data.
@pytest.mark.parametrize(
    ("lengths", "expected"), [((3, 3), -0.5), ((3, 1), -0.375), ((1, 3), -0.375)]
)
def test_an_optimizer_that_needs_parameters_steps_on_ranks_that_have_some(
    ranks_of, lengths, expected
):
    found = ranks_of(2).run(step_one_element, lengths)
    assert found == [(False, expected), (True, expected)]


class Halving(torch.optim.SGD):
    """`eval()` changes the parameters, and `train()` changes them back."""

    def eval(self) -> None:
        self._switch(0.5)

    def train(self) -> None:
        self._switch(2.0)

    @torch.no_grad()
    def _switch(self, factor: float) -> None:
        for group in self.param_groups:
            group["is_training"] = factor > 1
            for parameter in group["params"]:
                parameter.mul_(factor)


def switch_without_the_other(group: cl.Group) -> tuple[bool, bool]:
    """Rank 1 is lost before it comes to `eval()`. Whether the shard and the options of this rank
    are as before."""
    with another_group(group) as own:
        model = cl.DistributedDataParallel(make_model(torch.float64), own)
        optimizer = cl.ZeroRedundancyOptimizer(model, Halving, lr=0.1)
        optimizer.eval()
        optimizer.train()
        before = [p.detach().clone() for p in model.parameters()]
        group.barrier().wait()
        with pytest.raises(cl.CollectiveError):
            if own.rank == 1:
                own.abort(RuntimeError("lost"))
                own.barrier().wait()
            optimizer.eval()
        is_same = all(map(torch.equal, before, model.parameters()))
        return is_same, optimizer.param_groups[0]["is_training"]


def test_no_shard_is_switched_where_a_rank_is_lost_before_it_comes_to_that(ranks_of: Any) -> None:
    assert ranks_of(2).run(switch_without_the_other) == [(True, True)] * 2
