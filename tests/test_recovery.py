"""A worker is killed at every phase of a step, for real, and the others go on as if nothing was.

What they end with is compared, bit by bit, with one process that takes the same steps over the
same samples: nothing may be lost, repeated, or reduced in another order.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import chorusline as cl
from actors.errors import StateLost, WorkerLost  # noqa: F401

NUM_SAMPLES, BATCH_SIZE, LEARNING_RATE = 61, 4, 0.05


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
    """What a rank returns. taken: by step that counts, the samples of this rank in it."""

    pid: int
    rank: int
    world_size: int
    parameters: list[torch.Tensor]
    taken: dict[int, list[int]]
    ids_of_the_lost: list[int]
    num_steps: int
    state_numel: int


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def before(owner: Any, name: str) -> None:
    """Die when `owner.name` is called next."""
    setattr(owner, name, lambda *args, **kwargs: die())


def after(owner: Any, name: str) -> None:
    """Die when `owner.name` has returned next."""
    original = getattr(owner, name)

    def called(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        die()

    setattr(owner, name, called)


PHASES: dict[str, Callable[[Any], None]] = {
    "while gradients are reduced (1)": lambda optim: before(optim.reducer, "wait"),
    "after they are reduced": lambda optim: after(optim.reducer, "wait"),
    "while replicas get theirs (2)": lambda optim: after(optim.shard, "start_replicating"),
    "before it votes (3)": lambda optim: before(optim._ballot, "hold"),
    "when it has seen the ballot": lambda optim: after(optim._ballot, "hold"),
    "before it applies (4)": lambda optim: before(optim.shard, "apply"),
    "when it has applied": lambda optim: after(optim.shard, "apply"),
    "while parameters are gathered (5)": lambda optim: after(optim.shard, "start_gather"),
    "after the step": lambda optim: after(optim, "_try_step"),
}


def train(
    ctx: cl.Context,
    victims: dict[int, tuple[int, str]],
    replicas: int = 2,
    num_epochs: int = 1,
    optimizer: Any = torch.optim.AdamW,
) -> Told:
    """victims: by first rank, the step in which it dies, and the phase."""
    first_rank = ctx.rank
    model = cl.DistributedDataParallel(network(), bucket_cap_mb=0.001)
    optim = cl.ZeroRedundancyOptimizer(model, optimizer, lr=LEARNING_RATE, replicas=replicas)
    taken: dict[int, list[int]] = {}
    lost: list[int] = []
    for epoch in ctx.epochs(num_epochs):
        with cl.Join([model, optim], divide_by_initial_world_size=False):
            shard = ctx.shard(Samples(), BATCH_SIZE, epoch=epoch)
            for numbers, inputs, targets in shard:
                loss_of(model, inputs, targets).backward()
                step, phase = victims.get(first_rank, (-1, ""))
                if optim.num_steps == step:
                    PHASES[phase](optim)
                optim.step()
                optim.zero_grad()
                taken[optim.num_steps] = numbers.tolist()
            lost += shard.ids_of_the_lost
    state = optim.shard_optimizer.state.values() if optim.shard_optimizer else ()
    return Told(
        os.getpid(),
        ctx.rank,
        ctx.world_size,
        [p.detach().clone() for p in model.parameters()],
        taken,
        lost,
        optim.num_steps,
        sum(t.numel() for s in state for t in s.values() if t.dim() > 0),
    )


def reference(told: list[Told], victim: int, num_ranks: int) -> list[torch.Tensor]:
    """One process that takes the same steps over the same samples, and adds in the same order."""
    model = network()
    optim = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    samples = Samples()
    lost = told[0].ids_of_the_lost
    of_survivors = iter(told)
    taken = [
        {n: lost[(n - 1) * BATCH_SIZE : n * BATCH_SIZE] for n in range(1, told[0].num_steps + 1)}
        if rank == victim
        else next(of_survivors).taken
        for rank in range(num_ranks)
    ]
    for step in range(1, told[0].num_steps + 1):
        batches = [numbers for of_rank in taken if (numbers := of_rank.get(step))]
        total = [torch.zeros_like(p) for p in model.parameters()]
        for numbers in batches:
            model.zero_grad()
            loss_of(model, samples.inputs[numbers], samples.targets[numbers]).backward()
            for so_far, p in zip(total, model.parameters(), strict=True):
                so_far += p.grad
        for so_far, p in zip(total, model.parameters(), strict=True):
            p.grad = so_far / len(batches)
        optim.step()
    return [p.detach() for p in model.parameters()]


@pytest.fixture(scope="module")
async def session(cluster: None) -> AsyncIterator[cl.Session]:
    async with cl.Session(num_workers=(1, 3), timeout_s=20) as session:
        yield session


CASES = [
    pytest.param(
        phase,
        victim,
        marks=[] if number % 3 == victim else [pytest.mark.slow],
        id=f"{phase}-{victim}",
    )
    for number, phase in enumerate(PHASES)
    for victim in range(3)
]
"""Every phase on every rank; each phase on one of them in the fast suite."""


@pytest.mark.parametrize("phase, victim", CASES)
async def test_a_killed_worker_costs_no_step_and_no_sample(
    session: cl.Session, phase: str, victim: int
) -> None:
    told = await session.run(train, victims={victim: (2, phase)})
    assert [one.rank for one in told] == [0, 1]
    assert {one.world_size for one in told} == {2}
    for one in told[1:]:
        assert all(map(torch.equal, one.parameters, told[0].parameters))
        assert one.num_steps == told[0].num_steps
        assert one.ids_of_the_lost == told[0].ids_of_the_lost
    # Every sample once: what the survivors took, and what the victim did before it died.
    taken = [n for one in told for numbers in one.taken.values() for n in numbers]
    assert sorted(taken + told[0].ids_of_the_lost) == list(range(NUM_SAMPLES))
    expected = reference(told, victim, num_ranks=3)
    assert all(map(torch.equal, told[0].parameters, expected))
