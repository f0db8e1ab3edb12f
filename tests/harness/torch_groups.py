"""torch.distributed among the ranks of one of our groups, for as long as a function runs."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from collectives import Group
from collectives.objects.blocking import broadcast_object


def with_torch(group: Group, backend: str, body: Callable[..., Any], *args: Any) -> Any:
    """body(rank, size, *args) on every rank, with torch.distributed over `backend`."""
    path = broadcast_object(group, tempfile.mktemp(prefix="chorusline-torch-"))
    dist.init_process_group(
        backend,
        store=dist.FileStore(path, group.size),
        rank=group.rank,
        world_size=group.size,
        timeout=timedelta(seconds=30),
    )
    try:
        result = body(group.rank, group.size, *args)
    finally:
        dist.destroy_process_group()
    group.barrier().wait()  # Nobody looks into the store any more.
    if group.rank == 0:
        Path(path).unlink(missing_ok=True)
    return result
