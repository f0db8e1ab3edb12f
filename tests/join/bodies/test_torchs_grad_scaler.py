"""torch's own GradScaler with a plain optimizer: ranks that missed steps have its scale afterwards,
and ranks whose scales differ are told so."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import chorusline as cl
from tests.harness.combinations import combinations
from tests.harness.reused_ranks import another_group
from tests.references.training import batches_of, loss_of, make_model

DTYPE = torch.float64


def train(
    group: cl.Group,
    lengths: tuple[int, ...],
    growth_interval: int,
    momentum: float = 0.0,
    steps_along: bool = False,
    scale_of_rank_1: float = 4.0,
) -> tuple[list[torch.Tensor], float, str]:
    """Two epochs; the second and the last step of the first overflow. Returns the parameters, the
    scale, and what was raised."""
    scale = scale_of_rank_1 if group.rank else 4.0
    with another_group(group) as own:
        model = cl.DistributedDataParallel(make_model(DTYPE), own)
        optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=growth_interval)
        along = [functools.partial(scaler.step, optim), scaler.update] if steps_along else []
        try:
            for epoch in range(2):
                with cl.Join([model], step_along=along):
                    for number, batch in enumerate(batches_of(own.rank, lengths[own.rank], DTYPE)):
                        optim.zero_grad()
                        loss = loss_of(model, batch) * factor(epoch, number, lengths)
                        scaler.scale(loss).backward()
                        scaler.step(optim)
                        scaler.update()
        except cl.CollectiveMismatch as error:
            return [], 0.0, str(error)
        return [p.detach().clone() for p in model.parameters()], scaler.get_scale(), ""


def factor(epoch: int, number: int, lengths: tuple[int, ...]) -> float:
    return float("inf") if epoch == 0 and number in (1, max(lengths) - 1) else 1.0


def one_process(lengths: tuple[int, ...], momentum: float) -> list[torch.Tensor]:
    model = make_model(DTYPE)
    optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    for epoch in range(2):
        batches = [batches_of(rank, length, DTYPE) for rank, length in enumerate(lengths)]
        for number in range(max(lengths)):
            optim.zero_grad()
            for batch in (some[number] for some in batches if number < len(some)):
                (loss_of(model, batch) / len(lengths)).backward()
            if factor(epoch, number, lengths) == 1.0:
                optim.step()
    return [p.detach() for p in model.parameters()]


@combinations(
    3,
    lengths=[(5, 5), (5, 3), (2, 5), (6, 1), (4, 2)],
    growth_interval=[1, 2, 100],
    steps_along=[False, True],
)
def test_a_scaled_training_over_uneven_data_is_that_of_one_process_without_scaling(
    ranks_of, lengths, growth_interval, steps_along
):
    momentum = 0.9 if steps_along else 0.0
    told = ranks_of(2).run(train, lengths, growth_interval, momentum, steps_along)
    assert [text for *_, text in told] == ["", ""]
    assert told[0][1] == told[1][1], "one scale"
    expected = one_process(lengths, momentum)
    for parameters, *_ in told:
        assert all(map(torch.allclose, parameters, expected))


def test_scales_that_differ_from_the_start_are_named(ranks_of):
    told = ranks_of(2).run(train, (3, 3), 100, 0.0, False, 8.0)
    says = "the scale of the GradScaler of SGD is 4 on rank 0, 8 on rank 1"
    assert all(says in text and "[functools.partial(scaler.step" in text for *_, text in told), told


def test_a_rank_that_has_never_used_its_scaler_is_told_at_the_end_of_the_join(ranks_of):
    told = ranks_of(2).run(train, (3, 0), 1)
    assert all("rank 1 had no batch to use theirs" in text for *_, text in told), told


FORMS: dict[str, Callable[[torch.amp.GradScaler, torch.optim.Optimizer], list[Any]]] = {
    "two functions": lambda scaler, optim: [lambda: scaler.step(optim), scaler.update],
    "unscales first": lambda scaler, optim: [
        lambda: (scaler.unscale_(optim), scaler.step(optim), scaler.update())
    ],
}


def steps_along(group: cl.Group, form: str, lengths: tuple[int, int], begins: bool) -> Any:
    with another_group(group) as own:
        model = cl.DistributedDataParallel(make_model(DTYPE), own)
        optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        if begins:  # The remedy of the text.
            scaler.scale(torch.zeros((), device=own.device))
        functions = FORMS[form](scaler, optim)
        try:
            for _ in range(2):
                with cl.Join([model], step_along=functions, skew_warning=None):
                    for batch in batches_of(own.rank, lengths[own.rank], DTYPE):
                        optim.zero_grad()
                        scaler.scale(loss_of(model, batch)).backward()
                        for function in functions:
                            function()
        except (RuntimeError, cl.GroupAborted) as error:
            return str(error)
        return [p.detach().clone() for p in model.parameters()], scaler.get_scale()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("lengths", [(0, 3), (2, 0)])
def test_a_rank_that_has_had_no_batch_is_told_how_its_scaler_gets_a_scale(ranks_of, form, lengths):
    for told in ranks_of(2).run(steps_along, form, lengths, False):
        assert f"has no scale on rank {lengths.index(0)}: this rank has had no batch" in told
        assert "scaler.scale(torch.zeros((), device=...)) on all ranks before the Join" in told
    model = make_model(DTYPE)
    optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        for batch in batches_of(1 - lengths.index(0), max(lengths), DTYPE):
            optim.zero_grad()
            (loss_of(model, batch) / 2).backward()
            optim.step()
    (first, one), (second, other) = ranks_of(2).run(steps_along, form, lengths, True)
    assert one == other == 4.0 * 2.0 ** max(lengths)
    for parameters in (first, second):
        assert all(map(torch.allclose, parameters, model.parameters()))
