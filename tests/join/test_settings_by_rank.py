"""What every rank must set alike, set differently by rank: all ranks raise the same error, which
names the setting, its values and the ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

import chorusline as cl
from tests.harness.reused_ranks import another_group
from tests.references.training import batches_of, loss_of, make_model

DTYPE = torch.float64


def train(group: cl.Group, name: str, sharded: bool) -> str:
    """The error of a loop over three batches whose setting differs by rank."""
    wrap, optimize, join, scale, passes = LOOPS[name]
    rank = group.rank
    with another_group(group) as own, contextlib.suppress(StopIteration):
        try:
            model = cl.DistributedDataParallel(make_model(DTYPE), own, **wrap(rank))
            if sharded:
                optim: Any = cl.ZeroRedundancyOptimizer(
                    model, torch.optim.SGD, lr=0.1, **optimize(rank)
                )
            else:
                optim = torch.optim.SGD(model.parameters(), lr=0.1)
            scaler = cl.GradScaler(optim, init_scale=4.0, **scale(rank)) if scale(rank) else None
            listed = [model, optim, scaler] if scaler else [model, optim] if sharded else [model]
            with cl.Join(listed, skew_warning=None, **join(rank)):
                for number, batch in enumerate(batches_of(rank, 4 - rank, DTYPE)):
                    optim.zero_grad()
                    for syncs in passes(rank, number):
                        with contextlib.nullcontext() if syncs else model.no_sync():
                            loss = loss_of(model, batch)
                            (scaler.scale(loss) if scaler else loss).backward()
                    if scaler:
                        scaler.step(optim)
                        scaler.update()
                    else:
                        optim.step()
        except (cl.CollectiveMismatch, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"
    return ""


def nothing(rank: int) -> dict[str, Any]:
    return {}


def by_rank(name: str, *values: Any) -> Callable[[int], dict[str, Any]]:
    return lambda rank: {name: values[rank]}


def off(rank: int) -> dict[str, Any]:
    return {"enable": False}


def once(rank: int, number: int) -> list[bool]:
    return [True]


def alone(at: int) -> Callable[[int, int], list[bool]]:
    """Rank 1 runs the only pass of this step in no_sync()."""
    return lambda rank, number: [(rank, number) != (1, at)]


LOOPS: dict[str, tuple[Any, Any, Any, Any, Any]] = {
    # What the model, the optimizer, the Join and the scaler get, and the passes of a step: whether
    # each is outside of no_sync().
    "divide_by_initial_world_size": (
        *(nothing, nothing, by_rank("divide_by_initial_world_size", True, False), nothing, once),
    ),
    "throw_on_early_termination": (
        *(nothing, nothing, by_rank("throw_on_early_termination", True, False), nothing, once),
    ),
    "enable": (nothing, nothing, by_rank("enable", True, False), nothing, once),
    "broadcast_buffers": (by_rank("broadcast_buffers", True, False), *[nothing] * 3, once),
    "bucket_cap_mb": (by_rank("bucket_cap_mb", 25, 0.0001), *[nothing] * 3, once),
    "static_graph": (by_rank("static_graph", False, True), *[nothing] * 3, once),
    "check_every": (nothing, by_rank("check_every", 2, None), nothing, nothing, once),
    "growth_interval": (*[nothing] * 3, by_rank("growth_interval", 1, 2), once),
    "growth_factor": (*[nothing] * 3, by_rank("growth_factor", 2.0, 4.0), once),
    "backoff_factor": (*[nothing] * 3, by_rank("backoff_factor", 0.5, 0.25), once),
    "no_sync on the first step": (nothing, nothing, off, nothing, alone(0)),
    "no_sync on the second step": (nothing, nothing, off, nothing, alone(1)),
}

SAYS = {
    "divide_by_initial_world_size": "Join(divide_by_initial_world_size=) is True on rank 0, False "
    "on rank 1",
    "throw_on_early_termination": "Join(throw_on_early_termination=) is True on rank 0, False on "
    "rank 1",
    "enable": "a Join that is enabled is True on rank 0, False on rank 1",
    "broadcast_buffers": "broadcast_buffers is True on rank 0, False on rank 1",
    "bucket_cap_mb": "bucket_cap_mb (in bytes) is 26214400 on rank 0, 104 on rank 1",
    "static_graph": "static_graph is False on rank 0, True on rank 1",
    "check_every": "check_every (0: no check) is 2 on rank 0, 0 on rank 1",
    "growth_interval": "growth_interval is 1 on rank 0, 2 on rank 1",
    "growth_factor": "growth_factor is 2 on rank 0, 4 on rank 1",
    "backoff_factor": "backoff_factor is 0.5 on rank 0, 0.25 on rank 1",
}
OF_ZERO = {"check_every", "growth_interval", "growth_factor", "backoff_factor"}


@pytest.mark.parametrize(
    ("name", "sharded"),
    [(name, sharded) for name in SAYS for sharded in {True, name in OF_ZERO}],
)
def test_a_setting_that_differs_by_rank_is_named_with_its_ranks(ranks_of, name, sharded):
    for told in ranks_of(2).run(train, name, sharded):
        assert told.startswith("CollectiveMismatch") and SAYS[name] in told, told


@pytest.mark.parametrize("at", ["first", "second"])
def test_a_last_pass_in_no_sync_on_one_rank_is_named_on_all(ranks_of, at):
    for told in ranks_of(2).run(train, f"no_sync on the {at} step", False):
        assert "SGD by gradients of no_sync() that were not reduced on rank 1" in told, told


@pytest.mark.parametrize("at", ["first", "second"])
def test_a_sharded_step_after_a_pass_in_no_sync_is_refused_on_that_rank(ranks_of, at):
    _, told = ranks_of(2).run(train, f"no_sync on the {at} step", True)
    assert told.startswith("RuntimeError: step() needs gradients that were reduced"), told
