"""A session whose workers have GPUs. Skipped, with the reason, where there are none."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import chorusline as cl
from tests.harness.ranks import on_gpus


def train(ctx: cl.Context) -> dict[str, Any]:
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
        "backend": ctx.group.backend,
        "parameters": [p.detach().cpu() for p in model.parameters()],
    }


@pytest.mark.parametrize("size", [on_gpus(2)])
async def test_workers_train_each_on_its_own_gpu(size: int, cluster: None) -> None:
    share = min(1.0, torch.cuda.device_count() / size)
    variables = {"NCCL_MAX_CTAS": "2"} if share < 1 else {}
    each = {"CPU": 0.5, "GPU": share}
    async with cl.Session(
        size, use_gpu=True, resources_per_worker=each, env_vars=variables
    ) as session:
        found = await session.run(train)
    for one in found:
        assert one["backend"] == "nccl"
        assert one["device"] == f"cuda:{one['current']}" == f"cuda:{one['of .cuda()']}"
        for ours, first in zip(one["parameters"], found[0]["parameters"], strict=True):
            assert torch.equal(ours, first)
    if share == 1:
        assert len({one["device"] for one in found}) == size
