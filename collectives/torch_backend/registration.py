"""The backend's name in torch.distributed, and its registration, which imports no more of it."""

from __future__ import annotations

import importlib
from typing import Any

NAME = "chorusline"


def register() -> None:
    """Register the backend with torch. It may be called again."""
    import torch.distributed as dist  # The driver's process has no torch.

    # If a script names no backend, torch still chooses Gloo and NCCL.
    dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])
    # torch 2.15 attaches its own recorder to a process group, in C++, of which one in Python has
    # nothing to attach to, unless the backend is in this set: those that record by themselves.
    recording: set[str] = getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
    recording.add(NAME)


def _create(arguments: Any, options: Any) -> Any:
    """Make a process group; torch calls it on every rank. Blocks until all ranks have come."""
    # The rest of the backend takes a quarter of a second to import; many processes make no group.
    process_group = importlib.import_module(".process_group", __package__)
    return process_group.create(arguments, options)
