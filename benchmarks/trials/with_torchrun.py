"""Ranks of torchrun: torch's DistributedDataParallel over Gloo, with a checkpoint of rank 0.

A lost rank ends all others, and torchrun starts all of them again, from the newest checkpoint.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch
import torch.distributed as dist

from benchmarks.trials.workload import Ledger, Workload


def main() -> None:
    workload = Workload.of(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    workload.log("process", rank)
    module = Ledger(workload.num_samples)
    optim = torch.optim.SGD(module.groups())
    place, step = Path(workload.folder) / "checkpoint.pt", 0
    if place.exists():
        state = torch.load(place)
        module.load_state_dict(state["model"])
        optim.load_state_dict(state["optim"])
        step = state["step"]
    model = torch.nn.parallel.DistributedDataParallel(module)
    while step < workload.num_steps:
        first = step * workload.global_batch
        numbers = torch.arange(first, min(first + workload.global_batch, workload.num_samples))
        time.sleep(workload.batch_s)
        model(numbers[rank::size]).backward()
        optim.step()
        optim.zero_grad()
        step += 1
        workload.log("step", rank, step)
        if rank == 0 and step % workload.save_every == 0:
            state = {"model": module.state_dict(), "optim": optim.state_dict(), "step": step}
            torch.save(state, place.with_suffix(".part"))
            place.with_suffix(".part").rename(place)
    workload.finish(rank, module)
    dist.barrier()


if __name__ == "__main__":
    main()
