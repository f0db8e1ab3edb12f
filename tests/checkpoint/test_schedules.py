"""Each of torch's schedules goes through a checkpoint that is loaded as plain values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as schedules
from torch.optim.swa_utils import SWALR

import chorusline as cl
from chorusline.runtime.checkpoint.checkpoints import Checkpoints
from chorusline.runtime.checkpoint.contents import pickled, state_of
from chorusline.runtime.checkpoint.format.plain_values import load_plain
from chorusline.runtime.process.registry import Registered, Registry
from chorusline.runtime.recovery import last_checkpoint
from chorusline.runtime.recovery.last_checkpoint import Saveable
from chorusline.runtime.recovery.restart import RestartState

KINDS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "swa": lambda o: SWALR(o, swa_lr=0.05, anneal_epochs=4),
    "swa, linear": lambda o: SWALR(o, swa_lr=0.05, anneal_strategy="linear"),
    "step": lambda o: schedules.StepLR(o, 2),
    "multi step": lambda o: schedules.MultiStepLR(o, [2, 5]),
    "lambda": lambda o: schedules.LambdaLR(o, lambda n: 1 / (1 + n)),
    "multiplicative": lambda o: schedules.MultiplicativeLR(o, lambda n: 0.9),
    "constant": schedules.ConstantLR,
    "linear": schedules.LinearLR,
    "exponential": lambda o: schedules.ExponentialLR(o, 0.9),
    "polynomial": schedules.PolynomialLR,
    "cosine": lambda o: schedules.CosineAnnealingLR(o, 5),
    "restarts": lambda o: schedules.CosineAnnealingWarmRestarts(o, 3),
    "cyclic": lambda o: schedules.CyclicLR(o, 0.01, 0.1, step_size_up=2),
    "one cycle": lambda o: schedules.OneCycleLR(o, 0.2, total_steps=20),
    "plateau": lambda o: schedules.ReduceLROnPlateau(o, patience=0),
    "sequential": lambda o: schedules.SequentialLR(
        o, [schedules.LinearLR(o), SWALR(o, swa_lr=0.05)], [2]
    ),
    "chained": lambda o: schedules.ChainedScheduler([schedules.StepLR(o, 2), SWALR(o, 0.05)]),
}


def made(kind: str) -> tuple[torch.optim.Optimizer, Any, Callable[[], None]]:
    optim = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9)
    schedule = KINDS[kind](optim)

    def step() -> None:
        optim.step()
        schedule.step(*([1.0] if kind == "plateau" else []))

    return optim, schedule, step


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore")
def test_a_schedule_goes_on_where_it_was_saved(kind: str) -> None:
    optim, schedule, step = made(kind)
    for _ in range(3):
        step()
    saved = load_plain(pickled(state_of(Registered("schedule", schedule, False))))
    of_optim = optim.state_dict()
    other, loaded, go_on = made(kind)
    other.load_state_dict(of_optim)
    loaded.load_state_dict(saved)
    for _ in range(4):
        step()
        go_on()
        assert other.param_groups[0]["lr"] == optim.param_groups[0]["lr"]


class Warm(schedules.LRScheduler):
    """Its own attribute is a function, which no pickle can hold."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.factor = lambda n: 1 / (1 + n)
        super().__init__(optimizer)

    def get_lr(self) -> list[float | torch.Tensor]:
        return [rate * self.factor(self.last_epoch) for rate in self.base_lrs]


@pytest.mark.filterwarnings("ignore")
def test_the_checkpoint_of_a_run_that_is_given_up_holds_it_without_functions(
    alone: cl.Group, tmp_path: Path
) -> None:
    optim = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    schedule, loaded = Warm(optim), Warm(optim)
    schedule.step()
    registry = Registry()
    registry.add("schedule", schedule)
    kept = RestartState.of(registry, (1, 1), {})
    config = cl.CheckpointConfig(tmp_path)
    data = {"boundaries": 1, "data": None, "origin": "", "steps_before": 0}
    last_checkpoint.save(Saveable.of(registry, kept, 1), kept, True, data, alone, config)
    checkpoints = Checkpoints(alone, Registry(), config)
    checkpoints.begin()
    checkpoints.restore(Registered("schedule", loaded, False), required=True)
    assert loaded.last_epoch == 1
