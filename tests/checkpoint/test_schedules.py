"""Each of torch's schedules goes through a checkpoint that is loaded as plain values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as schedules
from torch.optim.swa_utils import SWALR

from chorusline.runtime.checkpoint.contents import pickled, state_of
from chorusline.runtime.checkpoint.format.plain_values import load_plain
from chorusline.runtime.process.registry import Registered

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
