"""A training under every schedule of torch, side by side: an optimizer and a model for each.

The optimizer is registered as soon as it is made, before its schedule: what the schedule's
constructor writes into it must not stay when both have got their state back.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer, lr_scheduler, swa_utils

import chorusline as cl

LENGTH = 12
"""Steps of the whole training."""


def _chained(optim: Optimizer) -> Any:
    return lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(optim, 0.1, total_iters=7), lr_scheduler.ExponentialLR(optim, 0.9)]
    )


def _sequential(optim: Optimizer) -> Any:
    parts = [
        lr_scheduler.LinearLR(optim, 0.1, total_iters=4),
        lr_scheduler.CosineAnnealingLR(optim, T_max=LENGTH),
    ]
    return lr_scheduler.SequentialLR(optim, parts, milestones=[4])


SCHEDULES: dict[str, Callable[[Optimizer], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda epoch: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 3, 0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 7], 0.5),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.25, 8),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=9),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, LENGTH, 2.0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=LENGTH),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 5),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.001, 0.1, step_size_up=4),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=LENGTH + 1),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "ChainedScheduler": _chained,
    "SequentialLR": _sequential,
    "SWALR": lambda o: swa_utils.SWALR(o, swa_lr=0.5, anneal_epochs=6),
}
if torch.__version__ < "2.9":
    del SCHEDULES["SWALR"]  # Its state holds a function there, which a resume refuses to load.


class Clock:
    """The number of steps that were taken, and what was drawn at random in the last."""

    def __init__(self) -> None:
        self.step = 0
        self.draw = torch.zeros(())

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "draw": self.draw}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.draw = state["step"], state["draw"]


def train_scheduled(
    ctx: cl.Context, sharded: bool, until: int = LENGTH, dies_at: int = -1, folder: str = ""
) -> dict[str, Any]:
    """Steps up to number `until`, each over the same batch on all ranks, so that their number does
    not matter. Returns what all optimizers, models and generators have come to.

    dies_at: behind this step rank 1 is killed, once, and the function runs again from the top.
    folder: for a file that says that it was.
    """
    if sharded:
        ctx.seed(0)
    else:
        torch.manual_seed(0)
        ctx.register("random", cl.RandomState())  # First: all that is made below draws from it.
    clock = ctx.register("clock", Clock())
    models: dict[str, Any] = {}
    optims: dict[str, Any] = {}
    schedules: dict[str, Any] = {}
    for name, make in SCHEDULES.items():
        model = models[name] = cl.DistributedDataParallel(torch.nn.Linear(3, 2))
        optim = optims[name] = (
            cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, replicas=2, lr=0.05, momentum=0.9)
            if sharded
            else torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        )
        ctx.register(f"model of {name}", model)
        ctx.register(f"optimizer of {name}", optim)
        schedules[name] = ctx.register(name, make(optim))
    average = ctx.register("average", swa_utils.AveragedModel(models["LinearLR"].module))
    while clock.step < until:
        # A worker that comes has the function run again between any two steps of optimizers, and
        # those before would be stepped once more: it is awaited where none is under way.
        while dies_at >= 0 and ctx.world_size < 3:
            ctx.reduce(0.0)
            time.sleep(0.02)
        inputs = torch.linspace(0, 1, 6).view(2, 3) + 0.1 * clock.step
        loss = sum(model(inputs).square().mean() for model in models.values())
        assert isinstance(loss, torch.Tensor)
        loss.backward()
        for optim in optims.values():
            optim.step()
            optim.zero_grad()
        for name, schedule in schedules.items():
            schedule.step(*[loss.item()] if name == "ReduceLROnPlateau" else [])
        average.update_parameters(models["LinearLR"].module)
        clock.draw = torch.rand(())
        clock.step += 1
        if dies_at >= 0:
            mark = Path(folder) / "died"
            if ctx.rank == 1 and clock.step == dies_at and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            ctx.reduce(loss.detach())
    return {
        "step": clock.step,
        "options": {
            name: [{k: v for k, v in group.items() if k != "params"} for group in o.param_groups]
            for name, o in optims.items()
        },
        "schedules": {name: one.get_last_lr() for name, one in schedules.items()},
        "weights": {name: model.module.weight.detach().clone() for name, model in models.items()},
        "average": average.module.weight.detach().clone(),
        "draw": clock.draw,
    }
