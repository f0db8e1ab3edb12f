"""Stock training that goes back to a checkpoint: what torchrun's ranks and Ray Train's have in
common. torch's DistributedDataParallel; the caller has made the process group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .workload import Ledger, Workload


def train_from(
    state: dict[str, Any] | None,
    workload: Workload,
    rank: int,
    size: int,
    save: Callable[[dict[str, Any]], None],
) -> None:
    """Train to the end. state: of the newest checkpoint; None: from the beginning. save: called on
    every rank with what a checkpoint has in it, every `save_every` steps."""
    torch.set_num_threads(1)
    workload.log("process", rank)
    module = Ledger(workload.num_samples)
    optim = torch.optim.SGD(module.groups())
    step = 0
    if state is not None:
        module.load_state_dict(state["model"])
        optim.load_state_dict(state["optim"])
        step = state["step"]
    model = torch.nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True)
    while step < workload.num_steps:
        first = step * workload.global_batch
        numbers = torch.arange(first, min(first + workload.global_batch, workload.num_samples))
        workload.work(rank, module)
        model(numbers[rank::size]).backward()
        optim.step()
        optim.zero_grad()
        step += 1
        workload.log("step", rank, step)
        if step % workload.save_every == 0:
            save({"model": module.state_dict(), "optim": optim.state_dict(), "step": step})
    workload.finish(rank, module)
