"""torch.distributed over the group of a run: the train function begins it, and it ends with it.

Besides the process group, programs look at the variables that torchrun sets. accelerate and the
Trainer of transformers train alone on every rank where these are missing, even if torch.distributed
is initialised. So the variables are there as long as the process group is.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from ray.util import get_node_ip_address

from collectives import Group, TorchStore
from collectives.objects.blocking import broadcast_object
from collectives.torch_backend import NAME, Options

from .between_runs import World, between_runs

_OF_ACCELERATE = "ACCELERATE_TORCH_DEVICE"


def initialise(
    group: Group, timeout_s: float | None, *, local_rank: int, local_world_size: int
) -> None:
    """`Context.init_torch_distributed`."""
    ours = between_runs().world
    if ours is not None and (ours.group is not group or not dist.is_initialized()):
        end()  # Its generation has ended, or the program has destroyed the process group.
    if dist.is_initialized():
        if ours is not None and ours.process_group is dist.group.WORLD:
            return
        raise RuntimeError(
            f"torch.distributed is initialised in this process already, with the backend "
            f"{dist.get_backend()!r} and not for this run; call "
            "torch.distributed.destroy_process_group() first"
        )
    address, port = broadcast_object(group, _place() if group.rank == 0 else None)
    store = TorchStore(group.another_store())
    seconds = group.timeout_s if timeout_s is None else timeout_s
    try:
        dist.init_process_group(
            NAME,
            store=store,
            rank=group.rank,
            world_size=group.size,
            timeout=timedelta(seconds=seconds),
            pg_options=Options(parent=group),
        )
    except BaseException:
        store.release()
        raise
    before = _set_environment(
        {
            "RANK": str(group.rank),
            "WORLD_SIZE": str(group.size),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(local_world_size),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
            **of_device(group.device, os.environ),
        }
    )
    between_runs().world = World(dist.group.WORLD, group, store, before)


def of_device(device: torch.device, environment: Mapping[str, str]) -> dict[str, str]:
    """accelerate, and with it the Trainer, would take the GPU whose number is LOCAL_RANK. A worker
    sees all GPUs of its node, and its own may have another number."""
    if device.type == "cpu" or _OF_ACCELERATE in environment:
        return {}
    return {_OF_ACCELERATE: str(device)}


def end() -> None:
    """Destroy what `initialise` made, if the program has not: the process serves later programs."""
    restore_environment()
    ours, between_runs().world = between_runs().world, None
    if ours is None:
        return
    if dist.is_initialized() and dist.group.WORLD is ours.process_group:
        dist.destroy_process_group()
    ours.store.release()


def restore_environment() -> None:
    """Give the environment variables that `initialise` has set their former values."""
    ours = between_runs().world
    if ours is not None:
        _set_environment(ours.environment)
        ours.environment = {}


def _set_environment(values: Mapping[str, str | None]) -> dict[str, str | None]:
    """Set these variables, and unset those that are None. Returns their former values."""
    before = {name: os.environ.get(name) for name in values}
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    return before


def _place() -> tuple[str, int]:
    """The address of this node, and a port that is free on it now: it is not reserved."""
    address = get_node_ip_address()
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.closing(socket.socket(family, socket.SOCK_STREAM)) as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
    return address, port
