"""What a body changes beside `optimizer.step()` (gradients, state, weights, the loss scale) a rank
without data does not change: all ranks are told so, with a remedy that helps, or it is exact."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import chorusline as cl
from tests.harness.reused_ranks import another_group
from tests.references.training import (
    backward_of_all,
    data_of,
    largest_difference,
    make_model,
)

DTYPE = torch.float64
Step = Callable[[torch.nn.Module, torch.optim.Optimizer], None]


def clip(module: torch.nn.Module, optim: torch.optim.Optimizer) -> None:
    torch.nn.utils.clip_grad_norm_(module.parameters(), 0.05)
    optim.step()


def leave_out(module: torch.nn.Module, optim: torch.optim.Optimizer) -> None:
    next(module.parameters()).grad = None
    optim.step()


def forget(module: torch.nn.Module, optim: torch.optim.Optimizer) -> None:
    optim.state.clear()
    optim.step()


def clamp(module: torch.nn.Module, optim: torch.optim.Optimizer) -> None:
    optim.step()
    for parameter in module.parameters():
        parameter.data.clamp_(-0.1, 0.1)


def train(
    group: cl.Group | None, step: Step, lists_function: bool, lengths: Sequence[int]
) -> list[torch.Tensor] | str:
    """Two epochs. group: None: in one process, over the batches of all ranks."""
    module = make_model(DTYPE)
    model: Any = cl.DistributedDataParallel(module, group) if group else module
    optim = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    data = data_of(group, lengths, DTYPE)
    take_step = functools.partial(step, module, optim)
    along = [take_step if lists_function else optim]
    try:
        for _ in range(2):
            join = cl.Join([model], step_along=along, skew_warning=None) if group else None
            with join or contextlib.nullcontext():
                for number in range(max(map(len, data))):
                    optim.zero_grad()
                    backward_of_all(model, data, number)
                    take_step()
    except cl.CollectiveMismatch as error:
        return str(error)
    return [p.detach().clone() for p in module.parameters()]


def on_ranks(group: cl.Group, *args: Any) -> Any:
    with another_group(group) as own:
        return train(own, *args)


@pytest.mark.parametrize("step", [clip, leave_out, forget, clamp])
@pytest.mark.parametrize("lengths", [(4, 4), (5, 3), (1, 4)])
def test_what_the_body_changes_is_named_where_a_rank_lacks_it_and_the_remedy_helps(
    ranks_of, step, lengths
):
    expected = train(None, step, False, lengths)
    for lists_function in (False, True):
        for found in ranks_of(2).run(on_ranks, step, lists_function, lengths):
            if lists_function or lengths[0] == lengths[1]:
                assert not isinstance(found, str), found
                assert largest_difference(found, expected) < 1e-12
            else:
                assert "do not run the loop's body" in found, found
                assert "had no data" in found or "the state (momentum" in found, found
                assert "list it in place of both, Join(..., step_along=[function])" in found


def load(scaler: Any) -> None:
    scaler.update()
    scaler.load_state_dict({**scaler.state_dict(), "scale": 64.0})


SCALES: list[Callable[[Any], object]] = [
    lambda scaler: scaler.update(0.5),
    lambda scaler: scaler.update(torch.tensor(64.0)),
    load,
]


def scale_anew(
    group: cl.Group | None, way: str, number: int, at: int, lengths: Sequence[int]
) -> tuple[list[torch.Tensor], Any] | str:
    """Two epochs; in step `at` of each the scale is set. number: in SCALES."""
    module = make_model(DTYPE)
    model: Any = cl.DistributedDataParallel(module, group) if group else module
    settings: dict[str, Any] = {"init_scale": 4.0, "growth_interval": 2}
    optim: Any
    if group and way == "zero":
        optim = cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.1, momentum=0.9)
        scaler: Any = cl.GradScaler(optim, **settings)
        joined, along = [model, optim, scaler], []
    else:
        optim = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        scaler = torch.amp.GradScaler("cpu", **settings)
        joined, along = [model], [functools.partial(scaler.step, optim), scaler.update]
    data = data_of(group, lengths, DTYPE)
    try:
        for _ in range(2):
            join = cl.Join(joined, step_along=along, skew_warning=None) if group else None
            with join or contextlib.nullcontext():
                for step in range(max(map(len, data))):
                    optim.zero_grad()
                    backward_of_all(model, data, step, scaler.scale)
                    scaler.step(optim)
                    (SCALES[number] if step == at else torch.amp.GradScaler.update)(scaler)
    except cl.CollectiveMismatch as error:
        return str(error)
    return [p.detach().clone() for p in module.parameters()], scaler.state_dict()


def scale_on_ranks(group: cl.Group, *args: Any) -> Any:
    with another_group(group) as own:
        return scale_anew(own, *args)


@pytest.mark.parametrize("way", ["zero", "plain"])
@pytest.mark.parametrize("number", range(len(SCALES)))
def test_a_scale_that_the_body_sets_is_that_of_all_ranks_or_is_named(ranks_of, way, number):
    for lengths, at in (((4, 4), 1), ((5, 3), 1), ((5, 3), 3), ((5, 3), 4), ((2, 4), 3)):
        expected, state = scale_anew(None, way, number, at, lengths)
        told = ranks_of(2).run(scale_on_ranks, way, number, at, lengths)
        for found in told:
            if way == "plain" and at >= min(lengths) and isinstance(found, str):
                assert all(isinstance(one, str) for one in told), told
                assert "the scale of the GradScaler" in found or "had no data" in found, found
            else:
                assert not isinstance(found, str), (lengths, at, found)
                assert largest_difference(found[0], expected) < 1e-12, (lengths, at)
                assert found[1] == state, (lengths, at)


def warm_up(
    group: cl.Group | None, lengths: Sequence[int], others: Sequence[float]
) -> list[torch.Tensor] | str:
    """Each batch begins with a learning rate of its own. others: what rank 1 adds to it."""
    module = make_model(DTYPE)
    model: Any = cl.DistributedDataParallel(module, group) if group else module
    optim = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    data = data_of(group, lengths, DTYPE)
    steps = [0]

    def set_rate() -> None:
        own = others[steps[0] % len(others)] if group and group.rank == 1 else 0.0
        steps[0] += 1
        optim.param_groups[0]["lr"] = 0.02 * steps[0] + own

    try:
        for _ in range(2):
            along = [set_rate, optim]
            join = cl.Join([model], step_along=along, skew_warning=None) if group else None
            with join or contextlib.nullcontext():
                for number in range(max(map(len, data))):
                    set_rate()
                    optim.zero_grad()
                    backward_of_all(model, data, number)
                    optim.step()
    except cl.CollectiveMismatch as error:
        return str(error)
    return [p.detach().clone() for p in module.parameters()]


def warm_up_on_ranks(group: cl.Group, *args: Any) -> Any:
    with another_group(group) as own:
        return warm_up(own, *args)


@pytest.mark.parametrize("lengths", [(4, 4), (5, 2), (0, 3)])
def test_a_rate_that_the_body_sets_before_its_pass_is_the_same_on_a_rank_without_data(
    ranks_of, lengths
):
    expected = warm_up(None, lengths, [0.0])
    for found in ranks_of(2).run(warm_up_on_ranks, lengths, [0.0]):
        assert not isinstance(found, str), found
        assert largest_difference(found, expected) < 1e-12
    for found in ranks_of(2).run(warm_up_on_ranks, (5, 2), [0.0, 0.0, 0.0, 0.5]):
        assert "lr of SGD is 0.08 on rank 0, 0.58 on rank 1" in found, found


class TwoHeads(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads = torch.nn.ModuleList(torch.nn.Linear(7, 2, dtype=DTYPE) for _ in range(2))
        self.head = 0

    def forward(self, batch: torch.Tensor) -> Any:
        return self.heads[self.head](batch)


def on_own_group(group: cl.Group, train: Callable[..., Any], *args: Any) -> Any:
    with another_group(group) as own:
        return train(own, *args)


def made(
    module: torch.nn.Module, group: cl.Group | None, way: str, **options: Any
) -> tuple[Any, Any, Callable[[], Any]]:
    """The model, its SGD, and what makes their Join. group: None: in one process."""
    if group is None:
        optim = torch.optim.SGD(module.parameters(), **options)
        return module, optim, contextlib.nullcontext
    model = cl.DistributedDataParallel(module, group)
    if way == "zero":
        sharded = cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, **options)
        return model, sharded, lambda: cl.Join([model, sharded], skew_warning=None)
    optim = torch.optim.SGD(module.parameters(), **options)
    along = [optim] if way == "along" else []
    return model, optim, lambda: cl.Join([model], step_along=along, skew_warning=None)


def train_heads(group: cl.Group | None, way: str, lengths: Sequence[int]) -> list[torch.Tensor]:
    """An epoch for each head; the other one is stepped by zeros, to which gradients are cleared."""
    module = TwoHeads()
    model, optim, join = made(module, group, way, lr=0.1, momentum=0.9, weight_decay=0.1)
    data = data_of(group, lengths, DTYPE)
    for module.head in range(2):
        with join():
            for number in range(max(map(len, data))):
                backward_of_all(model, data, number)
                optim.step()
                optim.zero_grad(set_to_none=False)
    return [p.detach().clone() for p in module.parameters()]


@pytest.mark.parametrize("lengths", [(2, 2), (2, 1)])
@pytest.mark.parametrize("way", ["along", "zero"])
def test_gradients_that_the_last_batch_clears_to_zeros_are_stepped_by_later(ranks_of, way, lengths):
    expected = train_heads(None, way, lengths)
    for found in ranks_of(2).run(on_own_group, train_heads, way, lengths):
        assert largest_difference(found, expected) < 1e-12


def leave_one_head(group: cl.Group | None, epochs: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Even batches are stepped and cleared; what the first epoch leaves, and the second one, are
    gradients of the first head alone."""
    module = TwoHeads()
    model, optim, join = made(module, group, "zero", lr=0.1, momentum=0.9)
    for epoch, lengths in enumerate(epochs):
        data = data_of(group, lengths, DTYPE)
        with join():
            for number in range(max(map(len, data))):
                for module.head in range(1 + (epoch == 0 and number == 0)):
                    backward_of_all(model, data, number)
                if number % 2 == 0:
                    optim.step()
                    optim.zero_grad()
    return [p.detach().clone() for p in module.parameters()]


@pytest.mark.parametrize("first", [(0, 2), (1, 2), (2, 2)])
def test_a_parameter_whose_gradient_no_rank_has_left_is_not_stepped(ranks_of, first):
    epochs = [first, (1, 1)]
    expected = leave_one_head(None, epochs)
    for found in ranks_of(2).run(on_own_group, leave_one_head, epochs):
        assert largest_difference(found, expected) < 1e-12


def unfreeze(group: cl.Group | None, way: str, lengths: Sequence[int]) -> list[torch.Tensor]:
    """The first layer is trained from the third batch on; two epochs."""
    module = make_model(DTYPE)
    model, optim, join = made(module, group, way, lr=0.1)
    data = data_of(group, lengths, DTYPE)
    layer = next(module.children()).requires_grad_(False)
    for _ in range(2):
        with join():
            for number in range(max(map(len, data))):
                if number == 2:
                    layer.requires_grad_(True)
                backward_of_all(model, data, number)
                optim.step()
                optim.zero_grad()
    return [p.detach().clone() for p in module.parameters()]


@pytest.mark.parametrize("way", ["plain", "zero"])
def test_what_the_body_unfreezes_is_trained_by_all_ranks_in_the_next_epoch(ranks_of, way):
    expected = unfreeze(None, way, (2, 5))
    for found in ranks_of(2).run(on_own_group, unfreeze, way, (2, 5)):
        assert largest_difference(found, expected) < 1e-12


def unfreeze_in_a_function(
    group: cl.Group | None, lengths: Sequence[int]
) -> list[torch.Tensor] | str:
    """A function in step_along, from the second step on."""
    module = make_model(DTYPE)
    layer, taken = next(module.children()).requires_grad_(False), 0
    model = module if group is None else cl.DistributedDataParallel(module, group)
    optim = torch.optim.SGD(module.parameters(), lr=0.1)
    data = data_of(group, lengths, DTYPE)

    def step() -> None:
        nonlocal taken
        optim.step()
        optim.zero_grad()
        taken += 1
        layer.requires_grad_(taken >= 2)

    is_alone = group is None
    with contextlib.nullcontext() if is_alone else cl.Join([model], step_along=[step]):
        for number in range(max(map(len, data))):
            backward_of_all(model, data, number)
            step()
    return [p.detach().clone() for p in module.parameters()]


@pytest.mark.parametrize("lengths", [(1, 5), (5, 0, 4)])
def test_what_a_listed_function_unfreezes_is_reduced_with_a_rank_without_data(ranks_of, lengths):
    expected = unfreeze_in_a_function(None, lengths)
    for found in ranks_of(len(lengths)).run(on_own_group, unfreeze_in_a_function, lengths):
        assert largest_difference(found, expected) < 1e-12


def clear_in_parts(
    group: cl.Group | None, first: Sequence[int], last: Sequence[int], lengths: Sequence[int]
) -> list[torch.Tensor] | str:
    """first, last: the parameters that are cleared before the pass, and after the step."""
    module = make_model(DTYPE)
    parameters = [*module.parameters()]
    model, optim, join = made(module, group, "zero", lr=0.1)
    data = data_of(group, lengths, DTYPE)
    try:
        with join():
            for number in range(max(map(len, data))):
                for part in first:
                    parameters[part].grad = None
                backward_of_all(model, data, number)
                optim.step()
                for part in last:
                    parameters[part].grad = None
    except RuntimeError as error:
        return str(error)
    return [p.detach().clone() for p in parameters]


@pytest.mark.parametrize("lengths", [(1, 2), (3, 4), (3, 3)])
@pytest.mark.parametrize(
    ("first", "last"), [([2, 3], [0]), ([0], [2, 3]), ([1], [0, 3]), ([0], []), ([], [0])]
)
def test_parts_that_are_cleared_in_two_places_are_exact_or_told(ranks_of, first, last, lengths):
    expected = clear_in_parts(None, first, last, lengths)
    for found in ranks_of(2).run(on_own_group, clear_in_parts, first, last, lengths):
        if isinstance(found, str):
            assert "has changed some gradients between two backward passes" in found
            assert lengths[0] < lengths[1]
        else:
            assert largest_difference(found, expected) < 1e-12


def freeze_without_a_step(
    group: cl.Group | None, epochs: Sequence[Sequence[int]]
) -> list[torch.Tensor]:
    """Each second batch is stepped; the first batch of the first epoch freezes a layer."""
    module = make_model(DTYPE)
    model, optim, join = made(module, group, "zero", lr=0.1)
    for epoch, lengths in enumerate(epochs):
        data = data_of(group, lengths, DTYPE)
        with join():
            for number in range(max(map(len, data))):
                backward_of_all(model, data, number)
                if number == 1:
                    optim.step()
                    optim.zero_grad()
                next(module.children()).requires_grad_(epoch + number > 0)
    return [p.detach().clone() for p in module.parameters()]


@pytest.mark.parametrize("epochs", [[(0, 1), (1, 2)], [(0, 1), (2, 2)], [(1, 0), (1, 2)]])
def test_what_an_epoch_without_a_step_freezes_is_frozen_on_all_ranks(ranks_of, epochs):
    expected = freeze_without_a_step(None, epochs)
    for found in ranks_of(2).run(on_own_group, freeze_without_a_step, epochs):
        assert largest_difference(found, expected) < 1e-12


def clear_a_part_last(
    group: cl.Group | None, epochs: Sequence[Sequence[int]]
) -> list[torch.Tensor] | str:
    """Each batch steps by the gradients of the one before, and clears one of them."""
    module = make_model(DTYPE)
    model, optim, join = made(module, group, "zero", lr=0.1)
    try:
        for epoch, lengths in enumerate(epochs):
            data = data_of(group, lengths, DTYPE)
            with join():
                for number in range(max(map(len, data))):
                    if epoch + number:
                        optim.step()
                    next(module.parameters()).grad = None
                    backward_of_all(model, data, number)
    except RuntimeError as error:
        return str(error)
    return [p.detach().clone() for p in module.parameters()]


@pytest.mark.parametrize("epochs", [[(2, 1)], [(2, 1), (1, 1)], [(2, 2), (1, 1)]])
def test_a_part_that_the_end_of_an_epoch_clears_is_exact_or_told(ranks_of, epochs):
    expected = clear_a_part_last(None, epochs)
    for found in ranks_of(2).run(on_own_group, clear_a_part_last, epochs):
        if len({*epochs[0]}) > 1 and len(epochs) > 1:
            assert "in an epoch before this one, another rank has changed some gra" in found
            assert "when rank 1 had no data" in found
        else:
            assert largest_difference(found, expected) < 1e-12


def replace_by_zeros(group: cl.Group | None) -> list[torch.Tensor]:
    """Two heads in turn; the first batch of the second one sets zeros in place of gradients."""
    module = TwoHeads()
    model, optim, _ = made(module, group, "", lr=0.1, momentum=0.9)
    data = data_of(group, (6, 6), DTYPE)
    for number in range(6):
        module.head = number % 2
        backward_of_all(model, data, number)
        for parameter in module.parameters() if number == 1 else ():
            parameter.grad = torch.zeros_like(parameter)
        optim.step()
    return [p.detach().clone() for p in module.parameters()]


def test_zeros_in_place_of_gradients_stay_where_the_next_pass_brings_none(ranks_of):
    expected = replace_by_zeros(None)
    for found in ranks_of(2).run(on_own_group, replace_by_zeros):
        assert largest_difference(found, expected) < 1e-12


def penalise_between(group: cl.Group) -> str:
    """A gradient of the input alone, between a pass in no_sync and the next one."""
    with another_group(group) as own:
        model = cl.DistributedDataParallel(make_model(DTYPE), own)
        try:
            with cl.Join([model]):
                for batch in data_of(own, (3, 1), DTYPE)[0]:
                    model.zero_grad()
                    model(batch).sum().backward()
                    with model.no_sync():
                        model(batch).sum().backward()
                    points = batch.clone().requires_grad_(True)
                    torch.autograd.grad(model(points).sum(), points)
                    model(batch).sum().backward()
        except RuntimeError as error:
            return str(error)
        return ""


def test_a_pass_in_no_sync_that_is_refused_stays_so_after_a_gradient_of_the_input(ranks_of):
    for told in ranks_of(2).run(penalise_between):
        assert "no_sync() was added to gradients that an earlier pass had reduced" in told
