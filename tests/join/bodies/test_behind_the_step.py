"""What a body does behind optimizer.step() is done on joined ranks too, or told at the end."""

from __future__ import annotations

import functools
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import chorusline as cl
from chorusline.runtime.checkpoint.checkpoints import Checkpoints
from chorusline.runtime.process.registry import Registry
from tests.harness.reused_ranks import another_group
from tests.references.training import batches_of, largest_difference, make_model

LENGTHS = (2, 6)
EMA = get_ema_multi_avg_fn(0.5)


def made(group: cl.Group, way: str) -> tuple[Any, Any, list[Any], list[Any]]:
    model = cl.DistributedDataParallel(make_model(torch.float64), group)
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}
    if way == "zero":
        sharded = cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, **options)
        return model, sharded, [model, sharded], []
    optimizer = torch.optim.SGD(model.parameters(), **options)
    return model, optimizer, [model], [optimizer]


def clamp(module: torch.nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data.clamp_(0.05, 0.2)  # The gradients push them below.


def train_clamped(group: cl.Group, way: str, listed: bool) -> Any:
    with another_group(group) as own:
        model, optimizer, joined, along = made(own, way)
        if listed:
            along = [*along, lambda: clamp(model)]
        try:
            for _ in range(2):
                with cl.Join(joined, step_along=along, skew_warning=None):
                    for batch in batches_of(own.rank, LENGTHS[own.rank], torch.float64):
                        model(batch).square().mean().backward()
                        optimizer.step()
                        optimizer.zero_grad()
                        clamp(model)
        except cl.CollectiveMismatch as error:
            return str(error), error.ranks
        return [parameter.detach().clone() for parameter in model.parameters()]


def reference(average: AveragedModel | None = None) -> list[torch.Tensor]:
    model = make_model(torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    data = [batches_of(rank, n, torch.float64) for rank, n in enumerate(LENGTHS)]
    for _ in range(2):
        for step in range(max(LENGTHS)):
            for batches in data:
                if step < len(batches):
                    (model(batches[step]).square().mean() / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
            if average is not None:
                average.update_parameters(model)
            else:
                clamp(model)
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("way", ["zero", "plain"])
def test_weights_that_the_body_clamps_are_clamped_on_joined_ranks_if_it_is_listed(ranks_of, way):
    for parameters in ranks_of(2).run(train_clamped, way, True):
        assert largest_difference(parameters, reference()) < 1e-14


def test_a_sharded_optimizer_has_them_from_ranks_with_data_if_it_is_not_listed(ranks_of):
    for parameters in ranks_of(2).run(train_clamped, "zero", False):
        assert largest_difference(parameters, reference()) < 1e-14


def test_with_a_plain_one_the_end_of_the_join_says_so_on_all_ranks(ranks_of):
    for told, ranks in ranks_of(2).run(train_clamped, "plain", False):
        assert ranks == [1] and "rank 0 had no data for the last step" in told
        assert "step_along=[function]" in told


def read_along(group: cl.Group, how: str, every: int) -> str:
    """The error of a body that clamps now and then, unlisted, before what reads the weights."""
    with another_group(group) as own:
        model, optimizer, joined, _ = made(own, "zero")
        ema = AveragedModel(model.module, multi_avg_fn=EMA)

        def update(*_: object) -> None:
            ema.update_parameters(model)

        along = {"average": [ema], "function": [update]}.get(how, [])
        if how == "hook":
            optimizer.register_step_pre_hook(update)
        try:
            with cl.Join(joined, step_along=along, skew_warning=None):
                for number, batch in enumerate(
                    batches_of(own.rank, LENGTHS[own.rank], torch.float64)
                ):
                    model(batch).square().mean().backward()
                    if how == "hook" and number % every == 0:
                        clamp(model)
                    optimizer.step()
                    optimizer.zero_grad()
                    if how != "hook":
                        if number % every == 0:
                            clamp(model)
                        update()
        except cl.CollectiveMismatch as error:
            return str(error)
        return ""


@pytest.mark.parametrize("how", ["average", "function", "hook"])
def test_what_a_joined_rank_has_read_before_such_a_write_is_named(ranks_of, how):
    for every in (1, 2):  # With 2 the last batch does not write.
        for told in ranks_of(2).run(read_along, how, every):
            if how == "average":
                assert "of the average in step_along differs between rank 0 and rank 1" in told
            else:
                assert "the loop's body has written parameter 0.weight" in told
                assert "but not on rank 0 (which has run out of data" in told
                assert "optimizer.register_step_pre_hook(lambda *_: function())" in told


def average(group: cl.Group, way: str, listed: bool, place: Path) -> Any:
    """The average's weights, its number of updates, and what saving it says."""
    with another_group(group) as own:
        model, optimizer, joined, along = made(own, way)
        ema = AveragedModel(model.module, multi_avg_fn=EMA)
        for _ in range(2):
            with cl.Join(joined, step_along=[*along, ema] if listed else along, skew_warning=None):
                for batch in batches_of(own.rank, LENGTHS[own.rank], torch.float64):
                    model(batch).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    ema.update_parameters(model)
        registry = Registry()
        registry.add("ema", ema)
        told = ""
        try:
            Checkpoints(own, registry, None).save(place, 1, (0, 1)).wait()
        except cl.CheckpointError as error:
            told = str(error)
        weights = [parameter.detach().clone() for parameter in ema.parameters()]
        return weights, int(ema.n_averaged), told


@pytest.mark.parametrize("way", ["zero", "plain"])
def test_a_moving_average_that_is_listed_is_that_of_one_process(ranks_of, way, tmp_path):
    ema = AveragedModel(make_model(torch.float64), multi_avg_fn=EMA)
    reference(ema)
    for weights, updates, told in ranks_of(2).run(average, way, True, tmp_path / way):
        assert largest_difference(weights, list(ema.parameters())) < 1e-14
        assert updates == 2 * max(LENGTHS)
        assert told == ""


def test_one_that_is_not_listed_is_not_saved_and_the_error_names_the_counts(ranks_of, tmp_path):
    for _, _, told in ranks_of(2).run(average, "zero", False, tmp_path):
        assert "ema.n_averaged is 4 on rank 0, 12 on rank 1" in told
        assert "step_along" in told and "per_rank=True" in told


def refusals(group: cl.Group) -> list[str]:
    with another_group(group) as own:
        model, optimizer, joined, _ = made(own, "plain")
        other = cl.DistributedDataParallel(make_model(torch.float64), own)
        told = []
        for models, along in (
            (joined, [AveragedModel(model.module)]),
            (joined, [AveragedModel(model.module), optimizer]),
            ([model, other], [optimizer, AveragedModel(model.module)]),
        ):
            with pytest.raises(ValueError) as raised:
                cl.Join(models, step_along=along)
            told.append(str(raised.value))
        return told


def test_an_average_that_cannot_be_kept_up_is_refused(ranks_of):
    alone, before, ambiguous = ranks_of(2).run(refusals)[0]
    assert "step_along=[optimizer, average]" in alone and alone == before
    assert "2 of the listed models" in ambiguous


def stepped_by_code(group: cl.Group, how: str) -> tuple[list[torch.Tensor], int] | str:
    """(5, 2) batches with a plain optimizer, a schedule and an average behind a step of a kind."""
    with another_group(group) as own:
        torch.manual_seed(0)
        model = cl.DistributedDataParallel(torch.nn.Linear(4, 3), own)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        ema = AveragedModel(model.module, multi_avg_fn=EMA)
        along = {
            "the optimizer": optimizer,
            "its method": optimizer.step,
            "a partial": functools.partial(optimizer.step),
            "a function": lambda: optimizer.step(),
            "an object": types.SimpleNamespace(step=lambda: optimizer.step()),
            "a function that does not step": lambda: None,
        }[how]
        try:
            with cl.Join([model], step_along=[along, schedule, ema], skew_warning=None):
                for number in range((5, 2)[group.rank]):
                    optimizer.zero_grad()
                    inputs = torch.full((2, 4), 1.0 + number + group.rank)
                    model(inputs).square().mean().backward()
                    optimizer.step()
                    schedule.step()
                    ema.update_parameters(model)
        except cl.CollectiveMismatch as error:
            return str(error)
        values = [*model.module.parameters(), *ema.module.parameters()]
        return [value.detach() for value in values], int(ema.n_averaged)


@pytest.mark.parametrize("how", ["its method", "a partial", "a function", "an object"])
def test_an_average_may_follow_any_code_that_steps(ranks_of, how):
    expected, _ = ranks_of(2).run(stepped_by_code, "the optimizer")
    for values, count in ranks_of(2).run(stepped_by_code, how):
        assert count == expected[1] == 5
        assert all(map(torch.equal, values, expected[0]))


def test_an_average_behind_code_that_does_not_step_is_noticed_at_the_end(ranks_of):
    for told in ranks_of(2).run(stepped_by_code, "a function that does not step"):
        assert "of the average in step_along differs between rank 0 and rank 1" in told
        assert "together with the optimizer.step()" in told
