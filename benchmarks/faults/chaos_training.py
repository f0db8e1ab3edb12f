"""The training that chaos strikes, and what has to be true of it at the end.

Each process notes, in a file that outlives it, which samples it takes for which step. At the end
one process takes the steps that counted, in float64, over the samples that counted, and has to come
to the same bits; and over all ranks, gone or not, every sample was used once in every epoch.

Of a process that is gone nobody knows whether its last batch counted: its step may have been taken
without it, or ended before it died. So both are tried: one of them makes the ledger whole, and the
bits have to be those of that one.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import ray
import torch
from ray import cloudpickle

import chorusline as cl
from chorusline.runtime.program.context import call_of
from chorusline.runtime.recovery.recovery import FunctionLeft
from chorusline.runtime.zero.zero_redundancy_optimizer import optimizer_engine_of

from .chaos_faults import BATCH, EPOCHS, NUM_SAMPLES, Plan, append, entries_of, strike

RATE = 0.02

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Samples:
    """(number, input, target), float64."""

    def __init__(self, num_samples: int = NUM_SAMPLES) -> None:
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(num_samples, 5, generator=generator, dtype=torch.float64)
        self.targets = torch.randn(num_samples, 3, generator=generator, dtype=torch.float64)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, number: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        return number, self.inputs[number], self.targets[number]


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(5, 33), torch.nn.Tanh(), torch.nn.Linear(33, 3)
    ).double()


def loss_of(model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.mse_loss(model(inputs), targets)


@dataclass
class Told:
    """What a rank returns. world_sizes: those that it has trained in, one after another."""

    seat: int
    pid: int
    parameters: list[torch.Tensor]
    num_steps: int
    recoveries: int
    world_sizes: tuple[int, ...] = ()


_world_sizes: dict[str, list[int]] = {}
"""By folder, of this process; the function may run more than once in it."""


def train(ctx: cl.Context, plan: Plan, folder: str) -> Told:
    torch.set_num_threads(1)
    seat, samples = seat_here(), Samples()
    path = Path(folder) / f"{seat}-{os.getpid()}.diary"
    world_sizes = _world_sizes.setdefault(folder, [])
    model = cl.DistributedDataParallel(network(), bucket_cap_mb=plan.bucket_cap_mb)
    optim = cl.ZeroRedundancyOptimizer(model, torch.optim.AdamW, lr=RATE, replicas=plan.replicas)
    if plan.registers:
        ctx.register("model", model)
        ctx.register("optim", optim)
    try:
        for epoch in ctx.epochs(EPOCHS):
            with cl.Join([model, optim], divide_by_initial_world_size=False):
                for numbers, inputs, targets in ctx.shard(samples, BATCH, epoch=epoch):
                    time.sleep(plan.step_s)
                    strike(ctx, optim, plan, seat, Path(folder))
                    loss_of(model, inputs, targets).backward()
                    append(
                        path, (epoch, optimizer_engine_of(optim).progress.ballots, numbers.tolist())
                    )
                    optim.step()
                    optim.zero_grad()
                    if world_sizes[-1:] != [ctx.world_size]:
                        world_sizes.append(ctx.world_size)
    except FunctionLeft:
        append(
            path, (-1, optimizer_engine_of(optim).progress.ballots, [])
        )  # A batch of that step does not count.
        raise
    except BaseException:
        # A worker that leaves, whose process may come again: nobody knows whether its last one did.
        append(path, (-2, optimizer_engine_of(optim).progress.ballots, []))
        raise
    assert call_of(ctx).recovery is not None
    parameters = [p.detach().clone() for p in model.parameters()]
    recoveries = call_of(ctx).recovery.num_recoveries
    return Told(seat, os.getpid(), parameters, optim.num_steps, recoveries, tuple(world_sizes))


def seat_here() -> int:
    """Ranks change with the generations, and are in the order of the seats in each."""
    (worker,) = ray._private.worker.global_worker.actors.values()
    return int(worker._info.seat)


# -- what has to be true -------------------------------------------------------------------------

Steps = dict[int, dict[tuple[int, int], tuple[int, list[int]]]]
"""By ballot, by seat and process: the epoch and the samples."""


def possible_steps(told: list[Told], folder: str) -> Iterator[Steps]:
    """What may have counted; the first is with the last batches of all that are gone."""
    alive = {one.pid for one in told}
    certain: Steps = {}
    in_doubt = []
    for path in sorted(Path(folder).glob("*.diary")):
        seat, pid = map(int, path.stem.split("-"))
        taken: dict[int, tuple[int, list[int]]] = {}
        left_in: set[int] = set()
        for epoch, ballot, numbers in entries_of(path):
            if epoch == -1:
                taken.pop(ballot, None)
            elif epoch == -2:
                left_in.add(ballot)
            else:
                taken[ballot] = (epoch, numbers)
        for ballot, batch in taken.items():
            if ballot in left_in or (pid not in alive and ballot == max(taken)):
                in_doubt.append((ballot, (seat, pid), batch))
            else:
                certain.setdefault(ballot, {})[seat, pid] = batch
    for chosen in itertools.product((True, False), repeat=len(in_doubt)):
        steps = {ballot: dict(of_step) for ballot, of_step in certain.items()}
        for ballot, who, batch in itertools.compress(in_doubt, chosen):
            steps.setdefault(ballot, {})[who] = batch
        yield steps


def take_step(
    model: torch.nn.Module,
    optim: torch.optim.Optimizer,
    samples: Samples,
    batches: Sequence[list[int]],
) -> None:
    """One step of one process, with the mean of the gradients of `batches`, added in that order."""
    total = [torch.zeros_like(p) for p in model.parameters()]
    for numbers in batches:
        model.zero_grad()
        loss_of(model, samples.inputs[numbers], samples.targets[numbers]).backward()
        for so_far, p in zip(total, model.parameters(), strict=True):
            so_far += p.grad
    for so_far, p in zip(total, model.parameters(), strict=True):
        p.grad = so_far / len(batches)
    optim.step()


def reference(steps: Steps) -> list[torch.Tensor]:
    """One process that takes the same steps and adds in the same order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # As on the ranks: a product's inner sum depends on it.
    model, samples = network(), Samples()
    optim = torch.optim.AdamW(model.parameters(), lr=RATE)
    for ballot in sorted(steps):
        taken = sorted(steps[ballot].items())
        take_step(model, optim, samples, [numbers for _, (_, numbers) in taken])
    torch.set_num_threads(threads)
    return [p.detach() for p in model.parameters()]


def complaints(told: list[Told], folder: str) -> list[str]:
    """What is wrong with a round; nothing, we hope."""
    wrong = []
    for one in told[1:]:
        if not all(map(torch.equal, one.parameters, told[0].parameters)):
            wrong.append(f"the parameters of seats {told[0].seat} and {one.seat} differ")
        if one.num_steps != told[0].num_steps:
            wrong.append(f"seat {one.seat} has taken {one.num_steps} steps, {told[0].num_steps}")
    possible = list(possible_steps(told, folder))
    whole = [steps for steps in possible if not holes(steps)]
    if not whole:
        # With the fewest, of what may have been.
        return wrong + min((holes(steps) for steps in possible), key=len)
    told_apart = [complaint_about(steps, told[0]) for steps in whole]
    return wrong if None in told_apart else [*wrong, str(told_apart[0])]


def holes(steps: Steps) -> list[str]:
    found = []
    batches = [batch for of_step in steps.values() for batch in of_step.values()]
    for epoch in range(EPOCHS):
        used = Counter(number for at, numbers in batches if at == epoch for number in numbers)
        missing = sorted(set(range(NUM_SAMPLES)) - set(used))
        again = sorted(number for number, count in used.items() if count > 1)
        if missing or again:
            found.append(f"epoch {epoch}: samples {missing} not used, {again} more than once")
    return found


def complaint_about(steps: Steps, one: Told) -> str | None:
    if len(steps) != one.num_steps:
        return f"{len(steps)} steps in the diaries, {one.num_steps} taken"
    if not all(map(torch.equal, one.parameters, reference(steps))):
        return "the parameters are not those of one process that took the same steps"
    return None
