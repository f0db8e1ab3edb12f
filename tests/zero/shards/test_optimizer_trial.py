"""Optimizers that nobody has heard of: a trial finds out whether, and how, they can be sharded."""

from __future__ import annotations

import random
import warnings
from typing import Any

import numpy
import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

import chorusline as cl
from chorusline.runtime.process.random_state import RandomState
from chorusline.runtime.zero.shards.optimizer_trial import keeps_state, trial_groups, try_out
from chorusline.runtime.zero.zero_redundancy_optimizer import optimizer_engine_of
from tests.harness.reused_ranks import another_group
from tests.references.training import batches_of, loss_of, make_model


class Own(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float = 0.05, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    change = self.change_of(parameter, self.state[parameter])
                    parameter.sub_(change, alpha=group["lr"])

    def change_of(self, parameter: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        state["sum"] = state.get("sum", 0) + parameter.grad
        return state["sum"].sign()


class BySign(Own):
    """Each element for itself."""


class ByRow(Own):
    """A state that has a number for each element of a vector, and for each row of a matrix."""

    def change_of(self, parameter: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        rows = parameter.grad if parameter.dim() < 2 else parameter.grad.flatten(1).mean(1)
        state["sum"] = state.get("sum", 0) + rows
        state["list"] = [state["sum"] + 1]
        missing = parameter.dim() - rows.dim()
        return state["sum"].view((*rows.shape, *[1] * missing)).expand_as(parameter)


class DecaysMatrices(Own):
    """Cut anywhere without a weight decay only, which may be set later."""

    def change_of(self, parameter: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        decay = self.param_groups[0]["weight_decay"]
        return parameter.grad + (decay * parameter if parameter.dim() > 1 else 0)


class Clipped(Own):
    """The norm of the whole gradient counts, if it is large."""

    def step(self, closure: Any = None) -> None:
        given = [p.grad for group in self.param_groups for p in group["params"]]
        norm = torch.nn.utils.get_total_norm([grad for grad in given if grad is not None])
        for grad in given:
            if grad is not None:
                grad.mul_(1e3 / norm.clamp(min=1e3))
        super().step()


class Noisy(Own):
    def change_of(self, parameter: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        return parameter.grad + torch.rand_like(parameter) + random.random() + numpy.random.rand()


class Shared(Own):
    def step(self, closure: Any = None) -> None:
        self.state["steps"] = self.state.get("steps", 0) + 1
        super().step()


class TakesLosses(Own):
    def step(self, closure: Any = None) -> None:
        rate = 1.0 if closure is None else float(closure())
        self.param_groups[0]["lr"] = 0.1 * rate
        super().step()


class NeedsGroups(Own):
    def step(self, closure: Any = None) -> None:
        first = [group["params"][0] for group in self.param_groups]
        assert first
        super().step()


class Averaging(Own):
    """A schedule-free one, small: training and evaluation use different parameters."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            group["is_training"] = False

    def change_of(self, parameter: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        assert self.param_groups[0]["is_training"], "call train() first"
        state["first"] = state.get("first", parameter.clone())
        return parameter.grad

    @torch.no_grad()
    def _move(self, is_training: bool) -> None:
        for group in self.param_groups:
            if group["is_training"] != is_training:
                group["is_training"] = is_training
                for parameter in group["params"]:
                    if "first" in self.state[parameter]:
                        parameter.add_(self.state[parameter]["first"], alpha=1 - 2 * is_training)

    def train(self) -> None:
        self._move(True)

    def eval(self) -> None:
        self._move(False)


class Rebinding(Own):
    """The parameters are other memory after each step."""

    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data = parameter.data.clone()


class RebindingByRow(Rebinding, ByRow):
    """Gets whole parameters."""


class RebindingAverages(Averaging):
    """So does its `train()`, and its `eval()`."""

    def _move(self, is_training: bool) -> None:
        super()._move(is_training)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data = parameter.data.clone()


def groups_of(*shapes: tuple[int, ...]) -> list[dict[str, Any]]:
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
    half = len(parameters) // 2
    return [
        {"params": parameters[:half], "lr": 0.1, "weight_decay": 0.0},
        {"params": parameters[half:], "lr": 0.0, "weight_decay": 0.0},
    ]


KINDS = groups_of((), (5,), (300, 7), (3, 4, 3, 3), (20, 20), (20,))


@pytest.mark.parametrize("kind", [BySign, torch.optim.AdamW])
def test_what_steps_each_element_for_itself_may_be_cut_anywhere(kind):
    verdict = try_out(kind, trial_groups(KINDS), {})
    assert verdict.elementwise and not verdict.refusal


@pytest.mark.parametrize("kind", [ByRow, DecaysMatrices, torch.optim.Adafactor])
def test_what_steps_each_parameter_for_itself_gets_whole_parameters(kind):
    verdict = try_out(kind, trial_groups(KINDS), {})
    assert not verdict.elementwise and not verdict.refusal


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Clipped, "its step of a parameter depends on the other parameters"),
        (Noisy, "it draws random numbers"),
        (Shared, "its state has entries of no parameter ('steps')"),
        (TakesLosses, "its steps depend on the loss"),
        (NeedsGroups, "it needs all parameters in one place, and raises IndexError"),
        (torch.optim.LBFGS, "in a trial on small tensors, in one process, its step() "),
    ],
)
def test_what_cannot_be_sharded_is_refused_with_what_to_use_instead(kind, reason):
    told = try_out(kind, trial_groups(KINDS), {}).refusal
    assert told.startswith(f"{kind.__name__} cannot be sharded: {reason}")
    assert f"{kind.__name__}(model.parameters(), ...) takes the same steps on every rank" in told


class Loud(Noisy):
    """Also warns, and counts in an option."""

    def change_of(self, parameter: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        warnings.warn("deprecated", stacklevel=1)
        self.param_groups[0]["count"][0] += 1
        return super().change_of(parameter, state)


@pytest.mark.parametrize(
    "tried",
    [
        lambda groups: try_out(Loud, trial_groups(groups), {}),
        lambda groups: keeps_state(Loud, groups[0], {}),
    ],
    ids=["cuts", "state"],
)
def test_a_trial_leaves_the_random_generators_and_the_parameters_as_they_were(tried, recwarn):
    groups = [{**group, "count": [0]} for group in KINDS]
    before, values = RandomState().state_dict(), [p.clone() for g in KINDS for p in g["params"]]
    tried(groups)
    assert not recwarn and groups[0]["count"] == [0]
    after = RandomState().state_dict()
    assert torch.equal(before.pop("torch"), after.pop("torch")) and before == after
    assert all(map(torch.equal, values, [p for g in KINDS for p in g["params"]]))


def train(group: cl.Group | None, kind: type[Own], size: int) -> Any:
    module = make_model(torch.float32)
    values: list[list[torch.Tensor]] = []
    model: torch.nn.Module = module
    optimizer: Any = kind(module.parameters())
    if group is not None:
        model = cl.DistributedDataParallel(module, group)
        optimizer = cl.ZeroRedundancyOptimizer(model, kind)
    assert hasattr(optimizer, "train") == issubclass(kind, Averaging)
    data = [batches_of(rank, 4, torch.float32) for rank in range(size)]
    for step in range(4):
        if issubclass(kind, Averaging):
            optimizer.train()
        for rank in range(size) if group is None else [group.rank]:
            (loss_of(model, data[rank][step]) / (size if group is None else 1)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if issubclass(kind, Averaging):
            optimizer.eval()
        values.append([p.detach().clone() for p in module.parameters()])
    if group is not None:
        optimizer.consolidate_state_dict(0)
        if group.rank:
            return values, None
        optimizer.load_state_dict(optimizer.state_dict())
    return values, optimizer.state_dict()["state"]


def train_in(group: cl.Group, *args: Any) -> Any:
    with another_group(group) as own:
        return train(own, *args)


@pytest.mark.parametrize(
    "kind", [BySign, ByRow, Averaging, Rebinding, RebindingByRow, RebindingAverages]
)
def test_an_optimizer_of_ones_own_trains_as_in_one_process_and_so_is_its_state(ranks_of, kind):
    expected, state = train(None, kind, 2)
    results = ranks_of(2).run(train_in, kind, 2)
    for values, _ in results:
        for ours, theirs in zip(values, expected, strict=True):
            assert all(map(torch.equal, ours, theirs))
    gathered = results[0][1]
    assert gathered.keys() == state.keys()
    for number, kept in state.items():
        assert gathered[number].keys() == kept.keys()
        for name, value in kept.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(gathered[number][name], value)
            else:
                assert all(map(torch.equal, gathered[number][name], value))


def refusals(group: cl.Group) -> list[str]:
    model = cl.DistributedDataParallel(make_model(torch.float32), group)
    told = []
    for kind in (Clipped, Clipped, torch.optim.swa_utils.AveragedModel, _Around):
        try:
            cl.ZeroRedundancyOptimizer(model, kind)
        except (TypeError, ValueError) as error:
            told.append(str(error))
    return told


class _Around(torch.optim.Optimizer):
    def __init__(self, optimizer: torch.optim.Optimizer) -> None: ...


def test_the_constructor_refuses_in_the_same_words_each_time(ranks_of):
    for first, again, no_optimizer, around in ranks_of(2).run(refusals):
        assert first == again and "Clipped cannot be sharded" in first
        assert "optimizer_class must be a class of optimizers" in no_optimizer
        assert "_Around cannot be sharded: it takes an optimizer, not parameters" in around


class ClippedOnly(Clipped):
    """As above, and no state shows it."""

    def change_of(self, parameter: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        return parameter.grad


@pytest.mark.parametrize("rate", [0.0, torch.tensor(0.0)])
def test_a_warm_up_that_begins_with_no_rate_hides_nothing(rate):
    given = [{"params": [torch.zeros(40, 30), torch.zeros(30)], "lr": rate, "weight_decay": 0.0}]
    verdict = try_out(ClippedOnly, trial_groups(given), {})
    assert "depends on the other parameters" in verdict.refusal
    assert float(rate) == 0


def test_hooks_on_the_steps_of_all_optimizers_do_not_see_the_trial():
    seen: list[Any] = []
    handle = register_optimizer_step_post_hook(lambda optimizer, *_: seen.append(optimizer))
    try_out(BySign, trial_groups(KINDS), {})
    assert not seen
    BySign([torch.zeros(1)]).step()
    assert len(seen) == 1
    handle.remove()
    BySign([torch.zeros(1)]).step()
    assert len(seen) == 1


class Rule:
    """An option whose text does not say what it is."""

    def __init__(self, by_norm: bool) -> None:
        self.by_norm = by_norm

    def __repr__(self) -> str:
        return "Rule()"


class ByRule(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float = 0.1, rule: Rule | None = None) -> None:
        super().__init__(params, {"lr": lr, "rule": rule})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    norm = parameter.grad.norm() if group["rule"].by_norm else 1.0
                    parameter.sub_(parameter.grad / norm, alpha=group["lr"])


def test_two_options_of_one_text_are_tried_out_each_for_itself() -> None:
    with cl.Group.create(cl.HashStore(), 0, 1) as group:

        def is_flat(*rules: Rule) -> bool:
            parameters = [
                {"params": [torch.nn.Parameter(torch.ones(8, 8))], "rule": rule} for rule in rules
            ]
            made = cl.ZeroRedundancyOptimizer(parameters, ByRule, group=group)
            return optimizer_engine_of(made).shard.elementwise

        assert is_flat(Rule(False)) and not is_flat(Rule(True))
        assert not is_flat(Rule(False), Rule(True))
