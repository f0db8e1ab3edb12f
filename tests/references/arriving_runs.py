"""Runs in the steps of `ctx.steps` to which workers come, for comparisons of bits."""

from __future__ import annotations

import os
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import ray
import torch
from torch.optim.swa_utils import AveragedModel

import chorusline as cl
from benchmarks.proofs.invariance_training import digest
from chorusline.runtime.process.step_boundary import boundary
from chorusline.runtime.program.context import call_of
from tests.references.script_values import ScriptState, told_after
from tests.references.stepped_training import MODELS, OPTIMIZERS
from tests.references.training_to_kill import die

STEPS_OF_EPOCH = 100


class Shown(torch.nn.Module):
    """What a module has beside its tensors: a count of steps, and flags that the first one sets."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.zeros(()))
        self.count = 0

    def change(self) -> None:
        self.count += 1
        self.eval()
        self.scale.requires_grad_(False)

    def get_extra_state(self) -> int:
        return self.count

    def set_extra_state(self, state: int) -> None:
        self.count = state

    def told(self) -> tuple[int, bool, bool]:
        return self.count, self.training, self.scale.requires_grad


@dataclass(frozen=True)
class Told:
    """What a rank returns. began: how often the function has begun in this process. sizes: by step
    that it took in this call, the number of ranks behind it. heard: what its own collectives gave
    before its steps, in this call. average: of the parameters, over the steps. shown: of a
    module of that class. drawn: by epoch and step, what the body drew of each generator before its
    first batch."""

    rank: int
    parameters: str
    state: str
    learning_rate: float
    pid: int
    began: int
    sizes: list[int]
    heard: list[object]
    average: str
    shown: tuple[int, bool, bool]
    drawn: dict[tuple[int, int], tuple[float, float, float]]

    @property
    def num_steps(self) -> int:
        return len(self.sizes)


def note(folder: Path, word: str) -> None:
    with (folder / word).open("a") as file:
        file.write(f"{os.getpid()}\n")


def noted(folder: Path, word: str) -> list[int]:
    path = folder / word
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def train(
    ctx: cl.Context,
    folder: Path,
    *,
    full: int = 1,
    victims: tuple[int, ...] = (),
    model_name: str = "perceptron",
    optimizer_name: str = "adamw",
    sharded: bool = True,
    max_norm: float | None = None,
    replicas: int = 2,
    epochs: int = 2,
    check_every: int | None = None,
    stream: cl.Stream | None = None,
    scenario: str = "",
) -> Told:
    """victims: first ranks that die in the fourth step, in its loop. full: until so many ranks
    train, the steps are slow. stream: of the samples, of one epoch. scenario: what else happens,
    once: a worker waits in its dry run for three steps of the others, or dies in it, or while it
    comes in; the driver dies in its dry run; rank 2 dies while one comes in, or when all have
    agreed to that; or after each step: the body drops the optimizer's state; or the body has two
    loops, and they die in the second."""
    note(folder, "began")
    is_first = len(noted(folder, "began")) <= full and not noted(folder, "killed")
    seat = ctx.rank if is_first else -1
    make, data, loss_of = MODELS[model_name]
    optimizer_class, options = OPTIMIZERS[optimizer_name]
    recovery = call_of(ctx).recovery

    def strike() -> None:
        if not noted(folder, "struck"):
            note(folder, "struck")
            die()

    def strike_at_entry() -> None:
        assert recovery is not None
        move = recovery.in_place._move

        def moved(*arguments: Any) -> Any:
            strike()
            return move(*arguments)

        recovery.in_place._move = moved  # type: ignore[method-assign]

    if scenario == "in its dry run" and not is_first:
        strike()
    if scenario == "the driver in the dry run" and not is_first and not noted(folder, "struck"):
        assert recovery is not None
        note(folder, "struck")
        ray.kill(recovery._lifeline._driver)
    waits_for_steps = scenario == "waits for steps in its dry run"
    if waits_for_steps and not is_first and not noted(folder, "struck"):
        note(folder, "struck")
        last, give_up_at = len(noted(folder, "stepped")) + 3, time.monotonic() + 30
        while len(noted(folder, "stepped")) < last:
            if time.monotonic() > give_up_at:
                note(folder, "held up")
                break
            time.sleep(0.02)
    if scenario == "hangs in its dry run" and not is_first and not noted(folder, "struck"):
        note(folder, "struck")
        time.sleep(1000)
    if scenario == "at its entry" and not is_first:
        strike_at_entry()
    random.seed(3)
    numpy.random.seed(3)
    torch.manual_seed(3)
    model = cl.DistributedDataParallel(make().to(ctx.device), bucket_cap_mb=0.004)
    optim: Any
    if sharded:
        optim = cl.ZeroRedundancyOptimizer(
            model,
            optimizer_class,
            replicas=replicas,
            max_norm=max_norm,
            check_every=check_every,
            **options,
        )
    else:
        optim = optimizer_class(model.parameters(), **options)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optim, 0.999)
    script, average, shown = ScriptState(), AveragedModel(model.module), Shown()
    named: dict[str, Any] = {"model": model, "optim": optim, "schedule": schedule}
    named |= {"average": average, "shown": shown}
    checkpoints = call_of(ctx).checkpoints
    # Classes of a script travel between ranks; a checkpoint refuses them.
    travels = checkpoints is None or checkpoints.config is None
    for name, one in (named | ({"script": script} if travels else {})).items():
        ctx.register(name, one)
    sizes: list[int] = []
    heard: list[object] = []
    drawn: dict[tuple[int, int], tuple[float, float, float]] = {}
    if scenario == "asks the others":
        heard = [ctx.broadcast(os.getpid()), ctx.reduce(float(ctx.rank)), ctx.reduce(2, "sum")]
        ctx.barrier()
    if scenario == "needs a part of its own":
        part, whole = torch.zeros(2), torch.ones(2 * ctx.world_size)
        ctx.group.reduce_scatter(part, whole).wait()
    for epoch in ctx.epochs(epochs):
        if scenario == "asks the others":
            heard.append((epoch, ctx.reduce(float(os.getpid()), "max")))
        dataset: Any = data(16 * STEPS_OF_EPOCH)
        if stream is not None:
            dataset = stream
        if scenario == "in the second loop":
            for step in ctx.steps(dataset[: 16 * 8], 16, 3, epoch=epoch):
                for batch in step:
                    loss_of(model, batch).backward()
                optim.step()
                optim.zero_grad()
        for step in ctx.steps(dataset, 16, 3, epoch=epoch):
            if ctx.world_size < full:
                # Long enough for workers to start, also on a busy machine; the last ones for one
                # that has begun again, as its driver had died.
                time.sleep(0.03 if step.number < 50 else 0.5 if step.number < 90 else 3.0)
            numbers = random.random(), float(numpy.random.rand()), float(torch.rand(()))
            drawn[epoch, step.number] = numbers
            if scenario == "a rank at the entry" and sizes[-1:] == [2] and seat == 2:
                strike_at_entry()
            for number, batch in enumerate(step):
                loss_of(model, batch).backward()
                if seat in victims and step.number == 3 and number == 0:
                    note(folder, "killed")
                    die()
            optim.step()
            if scenario == "a rank behind the vote" and seat == 2 and boundary().admits:
                strike()
            schedule.step()
            average.update_parameters(model.module)
            script.change()
            shown.change()
            optim.zero_grad()
            if scenario == "drops its state":
                optim.state.clear()
            sizes.append(ctx.world_size)
            if waits_for_steps and ctx.rank == 0:
                note(folder, "stepped")
    if sharded:
        optim.consolidate_state_dict(0)
    assert not travels or script.told() == told_after(schedule.last_epoch)
    state = digest(optim.state_dict()) if not sharded or ctx.rank == 0 else ""
    return Told(
        ctx.rank,
        digest(dict(model.module.state_dict())),
        state,
        optim.param_groups[0]["lr"],
        os.getpid(),
        noted(folder, "began").count(os.getpid()),
        sizes,
        heard,
        digest(dict(average.state_dict())),
        shown.told(),
        drawn,
    )
