"""Ray Train with TorchftConfig: a lost worker is replaced without a restart of the others, and gets
the state from them by torchft."""

from __future__ import annotations

import os
import sys
from typing import Any

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")
# How often Ray Train looks for lost workers: every 2 s by default, which is a part of a recovery.
os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.1")
os.environ.setdefault("RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", "0")

from ray import cloudpickle

from benchmarks.trials import replicated, workload as workload_module
from benchmarks.trials.cluster import fit
from benchmarks.trials.replicated import LIGHTHOUSE, train_replica
from benchmarks.trials.workload import Workload

cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(workload_module)
cloudpickle.register_pickle_by_value(replicated)


def train(config: dict[str, Any]) -> None:
    import ray.train

    rank = ray.train.get_context().get_world_rank()
    train_replica(Workload(**config), rank, os.environ["TORCHFT_LIGHTHOUSE"])


def main() -> None:
    from ray.train.v2.torch.torchft_config import TorchftConfig

    fit(train, Workload.of(sys.argv[1]), TorchftConfig(LIGHTHOUSE, backend="gloo"))


if __name__ == "__main__":
    main()
