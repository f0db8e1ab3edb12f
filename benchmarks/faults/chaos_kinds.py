"""Eight kinds of training functions for kills from outside, whose parameters are their own ledger.

Each sample has a parameter of its own for each epoch, which only this sample moves, and the further
it has come the less: after one use it has one of a few values, one for each number of ranks that
may have shared the step, and after two uses it has none of these. Another parameter, the clock,
gets the same gradient in each step, with momentum: its value says how many steps were taken, and
that none was taken back, and no state of the optimizer was lost.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from ray import cloudpickle

import chorusline as cl

NUM_SAMPLES, EPOCHS, BATCH = 203, 3, 4
RATE, MOMENTUM = 0.37, 0.9
MOST = 4

KINDS = (
    "plain",
    "zero",
    "replicas",
    "uneven",
    "accumulation",
    "stream",
    "checkpoints",
    "various",
)
"""Plain DDP and SGD; ZeRO; ZeRO with two replicas; Join over parts of uneven size; gradients that
are accumulated; data from a Stream; checkpoints while it runs; and a function that registers
nothing, or one with SyncBatchNorm, a GradScaler and a schedule."""

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@dataclass(frozen=True)
class Kind:
    """name: of KINDS. registers, is_dressed: of the last kind, which it is. step_s: how long a step
    takes besides."""

    name: str
    registers: bool = True
    is_dressed: bool = False
    step_s: float = 0.03

    @property
    def is_plain(self) -> bool:
        return self.name in ("plain", "accumulation")

    @property
    def replicas(self) -> int:
        return 1 if self.name in ("zero", "checkpoints") else 2

    @property
    def has_clock(self) -> bool:
        """Whether the clock has the same gradient in every step."""
        return self.name != "accumulation"


def kind_of(name: str, rng: random.Random) -> Kind:
    if name != "various":
        return Kind(name)
    is_dressed = rng.random() < 0.5
    return Kind(name, registers=is_dressed, is_dressed=is_dressed)


class Ledger(torch.nn.Module):
    """Counts each use of each sample in its parameters, by epoch, and its steps in another one."""

    def __init__(self, is_dressed: bool) -> None:
        super().__init__()
        self.used = torch.nn.Parameter(torch.zeros(EPOCHS, NUM_SAMPLES, dtype=torch.float64))
        self.clock = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
        torch.manual_seed(0)
        layers = [torch.nn.Linear(3, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 1)]
        self.besides = torch.nn.Sequential(*layers).double() if is_dressed else None

    def forward(self, epoch: int, numbers: torch.Tensor) -> torch.Tensor:
        loss = 0.5 * (self.used[epoch, numbers] - 1).square().sum() + self.clock.sum()
        if self.besides is not None:
            inputs = torch.stack([numbers, numbers % 7, numbers % 3], 1).double() / NUM_SAMPLES
            loss = loss + self.besides(torch.cat([inputs, inputs.flip(0) + 1])).square().mean()
        return loss


@dataclass
class Told:
    """What a rank returns."""

    rank: int
    pid: int
    parameters: list[torch.Tensor]
    world_size: int
    resumed_from: str | None


class Numbers(torch.utils.data.IterableDataset):
    """The samples as rows of a stream."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(NUM_SAMPLES))


def train(ctx: cl.Context, kind: Kind, stream: cl.Stream | None = None) -> Told:
    torch.set_num_threads(1)
    module: Any = Ledger(kind.is_dressed)
    if kind.is_dressed:
        module = cl.SyncBatchNorm.convert_sync_batchnorm(module)
    model = cl.DistributedDataParallel(module)
    rest = [p for p in module.parameters() if p is not module.used]
    groups = [
        {"params": [module.used], "lr": RATE, "momentum": 0.0},
        {"params": rest, "lr": 0.001, "momentum": MOMENTUM},
    ]
    optim: Any
    if kind.is_plain:
        optim = torch.optim.SGD(groups)
    else:
        optim = cl.ZeroRedundancyOptimizer(
            groups, torch.optim.SGD, lr=0.001, replicas=kind.replicas
        )
    return _trained(ctx, kind, stream, module, model, optim)


def _trained(
    ctx: cl.Context, kind: Kind, stream: Any, module: Ledger, model: Any, optim: Any
) -> Told:
    joined = [model] if kind.is_plain else [model, optim]
    along: list[Any] = [optim] if kind.is_plain else []
    scaler = schedule = None
    if kind.is_dressed:
        scaler = cl.GradScaler(optim, init_scale=4.0, growth_interval=5)
        joined.append(scaler)
        schedule = torch.optim.lr_scheduler.LambdaLR(optim, [lambda _: 1.0, lambda n: 1.0])
        along.append(schedule)
    if kind.registers:
        named = {"model": model, "optim": optim, "scaler": scaler, "schedule": schedule}
        for name, made in named.items():
            if made is not None:
                ctx.register(name, made)
    keys = None
    if kind.name == "uneven":
        keys = [min(number // 3, 40) for number in range(NUM_SAMPLES)]
    data: Any = stream if stream is not None else range(NUM_SAMPLES)
    num_backward = 0
    for epoch in ctx.epochs(EPOCHS):
        with cl.Join(joined, divide_by_initial_world_size=False, step_along=along):
            options: dict[str, Any] = {} if keys is None else {"keep_together": keys}
            for numbers in ctx.shard(data, BATCH, epoch=epoch, **options):
                time.sleep(kind.step_s)
                num_backward += 1
                is_whole = kind.name != "accumulation" or num_backward % 3 == 0
                with contextlib.nullcontext() if is_whole else model.no_sync():
                    loss = model(epoch, numbers)
                    (scaler.scale(loss) if scaler is not None else loss).backward()
                if not is_whole:
                    continue
                if scaler is not None:
                    scaler.step(optim)
                    scaler.update()
                else:
                    optim.step()
                optim.zero_grad()
                if schedule is not None:
                    schedule.step()
                ctx.report(step=ctx.step)
    ctx.report(done=1)
    parameters = [p.detach().clone() for p in module.parameters()]
    return Told(ctx.rank, os.getpid(), parameters, ctx.world_size, ctx.resumed_from)


# -- what has to be true -------------------------------------------------------------------------


def complaints(kind: Kind, told: list[Told]) -> list[str]:
    """What is wrong with the results of a round."""
    wrong = []
    for one in told[1:]:
        if not all(map(torch.equal, one.parameters, told[0].parameters)):
            wrong.append(f"the parameters of ranks 0 and {one.rank} differ")
    used, clock, *_ = told[0].parameters
    once = torch.tensor([RATE / ranks for ranks in range(1, MOST + 1)], dtype=torch.float64)
    is_once = (used[..., None] - once).abs().min(-1).values < 1e-9
    for epoch in range(EPOCHS):
        never = torch.nonzero(used[epoch] == 0).flatten().tolist()
        again = torch.nonzero(~is_once[epoch] & (used[epoch] != 0)).flatten().tolist()
        # A step of three batches: what is left of them at the end of an epoch has none in the last
        # one, and is lost with a worker that is lost then.
        if kind.name == "accumulation" and len(never) <= 2 * BATCH * MOST:
            never = []
        if never or again:
            wrong.append(f"epoch {epoch}: samples {never} not used, {again} more than once")
    if kind.has_clock and min(abs(clock.item() - value) for value in clock_values()) > 1e-9:
        wrong.append(f"the clock is at {clock.item()}, which no number of steps leads to")
    return wrong


@functools.cache
def clock_values() -> tuple[float, ...]:
    """The clock after each number of steps that a run may have."""
    clock = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optim = torch.optim.SGD([clock], lr=0.001, momentum=MOMENTUM)
    values = []
    for _ in range(EPOCHS * NUM_SAMPLES):
        clock.grad = torch.ones(1, dtype=torch.float64)
        optim.step()
        values.append(clock.item())
    return tuple(values)


def stream_of(kind: Kind) -> cl.Stream | None:
    return cl.Stream(Numbers()) if kind.name == "stream" else None


def config_of(kind: Kind, folder: Path) -> cl.CheckpointConfig | None:
    if kind.name != "checkpoints":
        return None
    return cl.CheckpointConfig(folder / "checkpoints", num_to_keep=2, every_n_steps=4)
