"""torch.distributed in the ranks of one of our groups, while a function runs; a store of torch."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from chorusline.collectives.group import Group
from chorusline.collectives.objects.blocking import broadcast_object

# By their names of torch 2.13; torch 2.11 knows the former ones.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@contextlib.contextmanager
def torch_over(group: Group, backend: str, timeout_s: float = 30.0) -> Iterator[None]:
    path = broadcast_object(group, tempfile.mktemp(prefix="chorusline-torch-"))
    dist.init_process_group(
        backend,
        store=dist.FileStore(path, group.size),
        rank=group.rank,
        world_size=group.size,
        timeout=timedelta(seconds=timeout_s),
    )
    try:
        yield
    finally:
        dist.destroy_process_group()
    group.barrier().wait()  # Nobody looks into the store any more.
    if group.rank == 0:
        Path(path).unlink(missing_ok=True)


def with_torch(group: Group, backend: str, body: Callable[..., Any], *args: Any) -> Any:
    """body(rank, size, *args) on every rank, with torch.distributed over `backend`."""
    with torch_over(group, backend):
        return body(group.rank, group.size, *args)


def tcp_store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
