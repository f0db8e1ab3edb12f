"""Where the systems that need Ray find it: on the cluster that runs, or on one of their own."""

from __future__ import annotations

import os

import ray


def connect(num_cpus: int) -> None:
    """num_cpus: of a cluster that is started."""
    if "RAY_ADDRESS" in os.environ:
        ray.init(log_to_driver=False)
    else:
        ray.init(address="local", num_cpus=num_cpus, include_dashboard=False, log_to_driver=False)
