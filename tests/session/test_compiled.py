"""Modules that the ranks of a session compile, with torch's compiler of C++, while the machine has
other work: compiling takes much longer than a step, and not equally long on all ranks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import chorusline as cl
from tests.references.training import largest_difference

BUSY = "import os\nwhile os.getppid() == {parent}: pass"


@pytest.fixture
def load() -> Iterator[None]:
    """A process more than there are cores computes as long as the test does."""
    program = BUSY.format(parent=os.getpid())
    busy = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(os.cpu_count() or 1)]
    yield
    for process in busy:
        process.kill()
        process.wait()


def train(ctx: cl.Context, backend: str, sharded: bool, folder: str) -> list[torch.Tensor]:
    """Uneven, so that a rank shadows a step of a compiled model."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/{ctx.rank}"  # Each rank compiles.
    ctx.seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(7, 13), torch.nn.Tanh(), torch.nn.Linear(13, 5))
    model = cl.DistributedDataParallel(module.double())
    called: Any = torch.compile(model, backend=backend) if backend else model
    optim: Any = (
        cl.ZeroRedundancyOptimizer(model, torch.optim.AdamW, lr=0.01)
        if sharded
        else torch.optim.AdamW(model.parameters(), lr=0.01)
    )
    data = torch.randn(15, 7, generator=torch.Generator().manual_seed(1)).double()
    listed = [model, optim] if sharded else [model]
    for epoch in ctx.epochs(2):
        with cl.Join(listed, step_along=[] if sharded else [optim], skew_warning=None):
            for batch in ctx.shard(data, 4, epoch=epoch):
                optim.zero_grad()
                model.weigh(called(batch).square().mean(), len(batch)).backward()
                optim.step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.slow  # The compiler takes tens of seconds.
@pytest.mark.timeout(400)
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a compiler")
@pytest.mark.parametrize("sharded", [True, False], ids=["zero", "plain"])
async def test_a_compiled_model_trains_in_a_session_on_a_machine_at_load(
    session: cl.Session, load: None, tmp_path: Any, sharded: bool
) -> None:
    arguments = {"sharded": sharded, "folder": str(tmp_path)}
    expected, _ = await session.run(train, backend="", **arguments)
    for found in await session.run(train, backend="inductor", **arguments):
        assert largest_difference(found, expected) < 1e-12
