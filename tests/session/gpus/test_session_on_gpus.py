"""A session whose workers have real GPUs. Skipped, with the reason, where there are none."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests import ROOT
from tests.harness.ranks import on_gpus
from tests.references.killed_runs import PHASES

pytest.importorskip("ray", reason="needs the package ray")

# A process of its own: the tests' cluster may have been told of other GPUs than there are.
PROGRAM = """
import json, sys
import torch
import chorusline as cl

def train(ctx):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    model = cl.DistributedDataParallel(net.to(ctx.device))
    optim = cl.ZeroRedundancyOptimizer(model, torch.optim.AdamW, lr=1e-2)
    generator = torch.Generator().manual_seed(ctx.rank)
    with cl.Join([model, optim]):
        for batch in torch.randn(3 + ctx.rank, 4, 6, generator=generator).to(ctx.device):
            model(batch).square().mean().backward()
            optim.step()
            optim.zero_grad()
    return {
        "device": str(ctx.device),
        "current": torch.cuda.current_device(),
        "of .cuda()": torch.ones(1).cuda().device.index,
        "seen": torch.cuda.device_count(),
        "backend": ctx.group.backend,
        "parameters": [p.tolist() for p in model.parameters()],
    }

size = int(sys.argv[1])
share = min(1.0, torch.cuda.device_count() / size)
results = cl.run(
    train,
    num_workers=size,
    use_gpu=True,
    resources_per_worker={"CPU": 0.1, "GPU": share},
)
print(json.dumps([share, torch.cuda.device_count(), list(results)]))
"""

KILLED = """
import asyncio, sys, tempfile
import torch
from ray import cloudpickle
import chorusline as cl
import tests
from tests.references.killed_runs import PHASES, Kind, assert_as_if_nothing_was, train

cloudpickle.register_pickle_by_value(tests)

async def kill_in_each_phase(device):
    gpus = {"GPU": min(1.0, torch.cuda.device_count() / 2)} if device == "cuda" else {}
    async with cl.Session(
        (1, 2), use_gpu=device == "cuda", resources_per_worker={"CPU": 0.1, **gpus}, timeout_s=60
    ) as session:
        for number, phase in enumerate(PHASES):
            victims, kind = {number % 2: (2, phase)}, Kind(num_epochs=1)
            with tempfile.TemporaryDirectory() as folder:
                told = await session.run(train, kind=kind, folder=folder, victims=victims)
                assert {one.world_size for one in told} == {1}
                assert_as_if_nothing_was(kind, folder, told, victims, device)
            print("as if nothing was:", phase, flush=True)

asyncio.run(kill_in_each_phase(sys.argv[1]))
"""


def run_alone(program: str, argument: object, timeout_s: float) -> list[str]:
    """The lines that `program` prints."""
    done = subprocess.run(
        [sys.executable, "-c", program, str(argument)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        cwd=ROOT,
        env={key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("device", [on_gpus("cuda"), pytest.param("cpu", marks=pytest.mark.slow)])
def test_a_worker_that_is_killed_in_any_phase_of_a_step_costs_nothing(device: str) -> None:
    lines = run_alone(KILLED, device, 290)
    done = [line for line in lines if line.startswith("as if nothing was")]
    assert len(done) == len(PHASES), lines


@pytest.mark.parametrize("size", [on_gpus(2)])
def test_workers_train_each_on_its_own_gpu_and_see_all(size: int) -> None:
    share, num_gpus, found = json.loads(run_alone(PROGRAM, size, 110)[-1])
    for one in found:
        assert one["backend"] == "nccl"
        assert one["device"] == f"cuda:{one['current']}" == f"cuda:{one['of .cuda()']}"
        assert one["seen"] == num_gpus
        assert one["parameters"] == found[0]["parameters"]
    if share == 1:
        assert len({one["device"] for one in found}) == size
