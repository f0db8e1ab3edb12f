"""The GPU of this worker's process: asks Ray and torch, and sets what the decision says."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import ray

from .devices import NoGpu, check_gpu, choose_gpu, narrowed_by

if TYPE_CHECKING:
    import torch


def own_gpu() -> torch.device:
    """Called once, before anything uses CUDA in this process. Raises NoGpu."""
    import torch  # Not at the top of the file: see Worker.__init__.

    context = ray.get_runtime_context()
    narrowed = narrowed_by(context.runtime_env)
    if narrowed is not None:
        raise NoGpu(narrowed)
    share = float(context.get_assigned_resources().get("GPU", 0))
    assigned = ray.get_gpu_ids()
    gpu = choose_gpu(assigned, share, os.environ)
    # Before anything counts: with parts of a GPU (MIG), or without NVML, torch asks CUDA, which
    # reads the list once.
    os.environ.update(gpu.environment)
    check_gpu(gpu, assigned, os.environ, torch.cuda.device_count())
    return torch.device("cuda", gpu.index)
