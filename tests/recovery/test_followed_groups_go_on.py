"""A worker is killed inside a Join that follows groups: the functions run again from the top.

Every rank notes the samples of each step in a file that outlives it; one process takes the same
steps, with statistics over the samples of all ranks.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import chorusline as cl
from chorusline.runtime.zero.zero_redundancy_optimizer import optimizer_engine_of
from tests.references.killed_runs import one_thread, wrap
from tests.references.training_to_kill import BATCH_SIZE, NUM_SAMPLES, Samples, die

pytestmark = pytest.mark.slow

DIES_AT = 3


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(5, 33),
        torch.nn.Unflatten(1, (3, 11)),  # So that a batch of one has a variance.
        torch.nn.BatchNorm1d(3),
        torch.nn.Flatten(),
        torch.nn.Tanh(),
        torch.nn.Linear(33, 3),
    ).double()


def train(ctx: cl.Context, folder: str, where: str) -> tuple[int, int, list[torch.Tensor]]:
    """Rank 1 dies in its first run from the top, at a step."""
    model = cl.DistributedDataParallel(
        cl.SyncBatchNorm.convert_sync_batchnorm(network()), bucket_cap_mb=0.0005
    )
    optim = cl.ZeroRedundancyOptimizer(model, torch.optim.AdamW, lr=0.05, replicas=2)
    ctx.register("model", model)
    ctx.register("optim", optim)
    dies = ctx.rank == 1 and optim.num_steps == 0
    for epoch in ctx.epochs(2):
        with cl.Join([model, optim], divide_by_initial_world_size=False):
            for numbers, inputs, targets in ctx.shard(Samples(), BATCH_SIZE, epoch=epoch):
                note = (dies, optim.num_steps + 1, epoch, numbers.tolist())
                is_last = dies and optim.num_steps == DIES_AT
                if is_last and where == "in the forward pass":
                    die()
                torch.nn.functional.mse_loss(model(inputs), targets).backward()
                if is_last and where == "in a step that does not count":
                    wrap(optimizer_engine_of(optim)._ballot, "hold", first=die)
                with (Path(folder) / f"{os.getpid()}.notes").open("a") as file:
                    print(json.dumps(note), file=file, flush=True)
                if is_last and where == "in a step that counts":
                    wrap(optimizer_engine_of(optim).shard, "apply", then=die)
                optim.step()
                optim.zero_grad()
    return ctx.generation, optim.num_steps, [p.detach().clone() for p in model.parameters()]


def counted(folder: Path, where: str) -> dict[int, list[tuple[int, list[int]]]]:
    """By step, what each rank took for it, with the epoch."""
    steps: dict[int, list[tuple[int, list[int]]]] = {}
    num_of_the_dead = DIES_AT + (where == "in a step that counts")
    for path in sorted(folder.glob("*.notes")):
        last: dict[int, Any] = {}
        for line in path.read_text().splitlines():
            dies, step, epoch, numbers = json.loads(line)
            if not dies or step <= num_of_the_dead:
                last[step] = (epoch, numbers)  # One that did not count is taken again.
        for step, taken in last.items():
            steps.setdefault(step, []).append(taken)
    return steps


@one_thread()
def reference(steps: dict[int, list[tuple[int, list[int]]]]) -> list[torch.Tensor]:
    model, samples = network(), Samples()
    optim = torch.optim.AdamW(model.parameters(), lr=0.05)
    for _, taken in sorted(steps.items()):
        batches = [numbers for _, numbers in taken]
        together = [number for numbers in batches for number in numbers]
        outputs = model(samples.inputs[together]).split([len(numbers) for numbers in batches])
        losses = [
            torch.nn.functional.mse_loss(output, samples.targets[numbers])
            for output, numbers in zip(outputs, batches, strict=True)
        ]
        optim.zero_grad()
        (sum(losses) / len(losses)).backward()
        optim.step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize(
    "where",
    ["in the forward pass", "in a step that does not count", "in a step that counts"],
)
async def test_no_step_and_no_sample_is_lost_with_a_worker_while_groups_are_followed(
    session: cl.Session, tmp_path: Path, where: str
) -> None:
    told = await session.run(train, folder=str(tmp_path), where=where)
    steps = counted(tmp_path, where)
    for epoch in range(2):
        taken = [
            n for of_step in steps.values() for e, batch in of_step if e == epoch for n in batch
        ]
        assert sorted(taken) == [*range(NUM_SAMPLES)], f"epoch {epoch}"
    for generation, num_steps, parameters in told:
        assert generation > 0 and num_steps == len(steps)
        assert all(map(torch.equal, parameters, told[0][2]))
    for ours, theirs in zip(told[0][2], reference(steps), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
