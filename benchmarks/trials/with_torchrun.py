"""Ranks of torchrun: torch's DistributedDataParallel over Gloo, with a checkpoint of rank 0.

A lost rank ends all others, and torchrun starts all of them again, from the newest checkpoint.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.trials.checkpointed import train_from
from benchmarks.trials.workload import Workload


def main() -> None:
    workload = Workload.of(sys.argv[1])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    place = workload.disk / "checkpoint.pt"

    def save(state: dict[str, Any]) -> None:
        if rank == 0:
            torch.save(state, place.with_suffix(".part"))
            place.with_suffix(".part").rename(place)

    state = torch.load(place) if place.exists() else None
    train_from(state, workload, rank, dist.get_world_size(), save)
    dist.barrier()


if __name__ == "__main__":
    main()
