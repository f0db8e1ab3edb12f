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


def _create(arguments: Any, options: Any) -> Any:
    """Make a process group; torch calls it on every rank. Blocks until all ranks have come."""
    # The rest of the backend takes a quarter of a second to import; many processes make no group.
    process_group = importlib.import_module(".process_group", __package__)
    return process_group.create(arguments, options)
