"""Settings that steer a step, set in the loop's body at any step: where the ranks with data set
them alike, a rank without data has them too; where they do not, all ranks are told which."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, strategies as st

import chorusline as cl
from tests.harness.reused_ranks import another_group
from tests.references.training import batches_of, largest_difference, loss_of, make_model

DTYPE = torch.float64
SETTINGS: dict[str, list[Any]] = {
    "lr": [0.125, 1],
    "momentum": [0, 0.5],
    "max_norm": [None, 0.125, 4],
    "growth_factor": [2.0, 4.0],
    "backoff_factor": [0.5, 0.25],
    "growth_interval": [1, 3],
}
"""Each begins with the first value."""


@dataclass(frozen=True)
class Change:
    """A rank that begins batch `at` sets the setting. only: the rank that does; None: each."""

    name: str
    value: Any
    at: int
    only: int | None = None


def apply(name: str, value: Any, optim: Any, scaler: torch.amp.GradScaler) -> None:
    if name in ("lr", "momentum"):
        optim.param_groups[0][name] = value
    elif name == "max_norm":
        optim.max_norm = value
    else:
        getattr(scaler, f"set_{name}")(value)


def begin(optim: Any, scaler: torch.amp.GradScaler) -> None:
    for name, (value, *_) in SETTINGS.items():
        apply(name, value, optim, scaler)


def scaled(loss: torch.Tensor, overflows: bool) -> torch.Tensor:
    return loss * math.inf if overflows else loss


def on_ranks(
    group: cl.Group, changes: list[Change], lengths: tuple[int, int], overflow: tuple[int, int]
) -> Any:
    with another_group(group) as own:
        model = cl.DistributedDataParallel(make_model(DTYPE), own)
        optim = cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.1)
        scaler = cl.GradScaler(optim, init_scale=4.0)
        begin(optim, scaler)
        batches = batches_of(own.rank, lengths[own.rank], DTYPE)
        try:
            with cl.Join([model, optim, scaler], skew_warning=None):
                for number, batch in enumerate(batches):
                    for one in changes:
                        if one.at == number and one.only in (None, own.rank):
                            apply(one.name, one.value, optim, scaler)
                    loss = scaled(loss_of(model, batch), (own.rank, number) == overflow)
                    scaler.scale(loss).backward()
                    scaler.step(optim)
                    scaler.update()
                    optim.zero_grad()
        except cl.CollectiveMismatch as error:
            return str(error)
        return [p.detach().clone() for p in model.parameters()], scaler.get_scale()


def in_one_process(
    changes: list[Change], lengths: tuple[int, int], overflow: tuple[int, int]
) -> tuple[str, Any]:
    """The setting that differs between ranks with data; else the parameters and the scale."""
    model = make_model(DTYPE)
    optim: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    begin(optim, scaler)
    by_rank = [{name: values[0] for name, values in SETTINGS.items()} for _ in lengths]
    for step in range(max(lengths)):
        live = [rank for rank, length in enumerate(lengths) if step < length]
        for rank in live:
            for one in changes:
                if one.at == step and one.only in (None, rank):
                    by_rank[rank][one.name] = one.value
        for name, value in by_rank[live[0]].items():
            if any(by_rank[rank][name] != value for rank in live):
                return name, None
            apply(name, value, optim, scaler)
        for rank in live:
            batch = batches_of(rank, lengths[rank], DTYPE)[step]
            loss = scaled(loss_of(model, batch), (rank, step) == overflow)
            scaler.scale(loss / len(lengths)).backward()
        if optim.max_norm is not None:
            scaler.unscale_(optim)
            torch.nn.utils.clip_grad_norm_(model.parameters(), optim.max_norm)
        scaler.step(optim)
        scaler.update()
        optim.zero_grad()
    return "", (list(model.parameters()), scaler.get_scale())


@st.composite
def changes(draw: st.DrawFn) -> list[Change]:
    at = st.integers(0, 4)
    only = st.sampled_from([None, None, None, 0, 1])
    names = draw(st.lists(st.sampled_from(sorted(SETTINGS)), min_size=1, max_size=4))
    return [Change(n, draw(st.sampled_from(SETTINGS[n])), draw(at), draw(only)) for n in names]


EACH = [Change(name, values[-1], 3) for name, values in SETTINGS.items()]


@given(
    changes(),
    st.tuples(st.integers(0, 5), st.integers(0, 5)).filter(any),
    st.tuples(st.integers(0, 1), st.integers(0, 5)),
)
@example(EACH, (5, 3), (0, 4))
@example(EACH, (2, 5), (1, 3))
@example([Change("growth_interval", 3, 1, only=1)], (3, 3), (0, 5))
@example([Change("max_norm", 0.125, 1, only=0)], (3, 3), (0, 5))
def test_a_setting_reaches_a_rank_without_data_or_is_named(ranks_of, changes, lengths, overflow):
    name, whole = in_one_process(changes, lengths, overflow)
    for told in ranks_of(2).run(on_ranks, changes, lengths, overflow):
        if name:
            assert f"{name} is " in told, (name, told)
        else:
            parameters, scale = told
            assert largest_difference(parameters, whole[0]) < 1e-11
            assert scale == whole[1]


NORMS = (2, 2.0, np.float32(2), np.array([2.0]), torch.tensor(2), torch.tensor([2.0]))
NO_NORMS = {
    TypeError: ("2", True, [2.0], 2j, torch.ones(2), torch.tensor(2j), np.array(["2"])),
    ValueError: (-1, 0, 0.0, math.nan, torch.tensor(-1.0), np.array(0)),
}


def test_a_norm_that_is_set_is_checked_as_one_that_is_passed(alone: cl.Group) -> None:
    model = cl.DistributedDataParallel(make_model(torch.float32), alone)
    optimizer = cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.1, max_norm=1.0)
    for norm in NORMS:
        optimizer.max_norm = norm
        assert optimizer.max_norm == 2 and type(optimizer.max_norm) is float
    for kind, norms in NO_NORMS.items():
        for norm in norms:
            with pytest.raises(kind, match="max_norm must be"):
                optimizer.max_norm = norm
    assert optimizer.max_norm == 2, "the one before stays"
    for norm, is_clipped in ((math.inf, False), (10**400, False), (None, False), (1e-3, True)):
        optimizer.max_norm = norm
        before = model.module[0].bias.detach().clone()
        loss_of(model, torch.ones(3, 7)).backward()
        optimizer.step()
        assert (float((model.module[0].bias.detach() - before).norm()) < 2e-4) == is_clipped, norm
        optimizer.zero_grad()
