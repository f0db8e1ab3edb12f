"""Runs of a session in the steps of `ctx.steps`, while ranks die, for comparisons of bits."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch

import chorusline as cl
from benchmarks.proofs.invariance_training import digest
from chorusline.runtime.program.context import call_of
from tests.references.killed_runs import PHASES
from tests.references.stepped_training import MODELS, OPTIMIZERS
from tests.references.training_to_kill import die


@dataclass(frozen=True)
class Told:
    """What a rank returns. seen: by step, the first elements of the samples that it computed."""

    rank: int
    world_size: int
    parameters: str
    state: str
    noise: str
    num_steps: int
    seen: dict[tuple[int, int], list[float]]
    pid: int


class Enough(Exception):
    """The function has saved what it was to save."""


def train(
    ctx: cl.Context,
    victims: dict[int, tuple[int, str]],
    model_name: str = "perceptron",
    optimizer_name: str = "adamw",
    *,
    sharded: bool = True,
    replicas: int = 2,
    registers: bool = False,
    num_samples: int = 53,
    micro_batch_size: int = 3,
    epochs: int = 2,
    max_norm: float | None = None,
    stream: cl.Stream | None = None,
    checkpoint_at: int = -1,
) -> Told:
    """victims: by first rank, how many steps it takes, and the phase of the next one.
    checkpoint_at: the step behind which the function saves, and fails."""
    recovery = call_of(ctx).recovery
    # A function that runs again from the top kills nobody.
    seat = ctx.rank if recovery is not None and not recovery.has_gone_on else -1
    make, data, loss_of = MODELS[model_name]
    optimizer_class, options = OPTIMIZERS[optimizer_name]
    torch.manual_seed(3)
    module = make()
    model = cl.DistributedDataParallel(module.to(ctx.device), bucket_cap_mb=0.004)
    optim: Any
    if sharded:
        optim = cl.ZeroRedundancyOptimizer(
            model, optimizer_class, replicas=replicas, max_norm=max_norm, **options
        )
    else:
        optim = optimizer_class(model.parameters(), **options)
    if registers:
        ctx.register("model", model)
        ctx.register("optim", optim)
    seen: dict[tuple[int, int], list[float]] = {}
    for epoch in ctx.epochs(epochs):
        dataset = data(num_samples) if stream is None else stream
        for step in ctx.steps(dataset, 16, micro_batch_size, epoch=epoch):
            at, phase = victims.get(seat, (-1, ""))
            is_due = step.number + epoch * 4 == at
            own: list[float] = []
            if is_due and phase == "before its first micro-batch":
                die()
            if is_due and phase in PHASES:
                PHASES[phase](optim)
            for number, batch in enumerate(step):
                own += batch.flatten(1)[:, 0].tolist()
                loss_of(model, batch).backward()
                if is_due and phase == "in a micro-batch" and number == 0:
                    die()
            if is_due and phase == "after the loop":
                die()
            optim.step()
            optim.zero_grad()
            seen[epoch, step.number] = own
            if checkpoint_at == step.number + epoch * 4:
                ctx.save().wait()
                raise Enough
    noise = digest([torch.get_rng_state()])
    if sharded:
        optim.consolidate_state_dict(0)
    state = digest(optim.state_dict()) if not sharded or ctx.rank == 0 else ""
    tensors = dict(model.module.state_dict())
    return Told(
        ctx.rank, ctx.world_size, digest(tensors), state, noise, ctx.step, seen, os.getpid()
    )
