"""Ray Train's TorchTrainer: torch's DistributedDataParallel over Gloo, checkpoints by `report`.

A lost worker ends the worker group, and Ray Train starts it again from the newest checkpoint.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")
# How often Ray Train looks for lost workers: every 2 s by default, which is a part of a recovery.
os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.1")
os.environ.setdefault("RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", "0")

import torch
from ray import cloudpickle

from benchmarks.trials import checkpointed, workload as workload_module
from benchmarks.trials.checkpointed import train_from
from benchmarks.trials.cluster import fit
from benchmarks.trials.workload import Workload

cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(workload_module)
cloudpickle.register_pickle_by_value(checkpointed)


def train(config: dict[str, Any]) -> None:
    import ray.train

    workload = Workload(**config)
    context = ray.train.get_context()
    rank = context.get_world_rank()

    def save(state: dict[str, Any]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            kept = None
            if rank == 0:
                torch.save(state, Path(folder) / "state.pt")
                kept = ray.train.Checkpoint.from_directory(folder)
            ray.train.report({"step": state["step"]}, checkpoint=kept)

    state = None
    if (checkpoint := ray.train.get_checkpoint()) is not None:
        with checkpoint.as_directory() as path:
            state = torch.load(Path(path) / "state.pt")
    train_from(state, workload, rank, context.get_world_size(), save)


def main() -> None:
    from ray.train.torch import TorchConfig

    fit(train, Workload.of(sys.argv[1]), TorchConfig(backend="gloo"))


if __name__ == "__main__":
    main()
