"""Where the systems that need Ray find it, on the cluster that runs or on one of their own, and how
Ray Train trains there."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import ray

from .workload import Workload


def connect(num_cpus: int) -> None:
    """num_cpus: of a cluster that is started."""
    if "RAY_ADDRESS" in os.environ:
        ray.init(log_to_driver=False)
    else:
        ray.init(address="local", num_cpus=num_cpus, include_dashboard=False, log_to_driver=False)


def fit(train: Callable[[dict[str, Any]], None], workload: Workload, torch_config: Any) -> None:
    """Train the workload with Ray Train, which puts up with any number of failures.

    torch_config: Ray Train's, of how its ranks meet.
    """
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    number = workload.num_workers
    connect(number + 2)
    TorchTrainer(
        train,
        train_loop_config=asdict(workload),
        torch_config=torch_config,
        scaling_config=ScalingConfig(num_workers=number, resources_per_worker={"CPU": 0.5}),
        run_config=RunConfig(
            storage_path=str(workload.disk),
            failure_config=FailureConfig(max_failures=-1),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    ).fit()
    ray.shutdown()
