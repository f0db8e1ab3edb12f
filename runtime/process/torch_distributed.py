"""torch.distributed over the group of a run: the train function begins it, and it ends with it.

Besides the process group, programs look at the variables that torchrun sets. accelerate and the
Trainer of transformers train alone on every rank where these are missing, even if torch.distributed
is initialised. So the variables are there as long as the process group is.

A script that knows nothing of Chorusline (runtime/program/plain_script.py) initialises
torch.distributed by itself, as torchrun's scripts do. `like_torchrun` gives it the variables first,
and takes its `init_process_group` over.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.device_mesh
from ray.util import get_node_ip_address

from chorusline.collectives.contract.deadlines import Seconds, checked_seconds
from chorusline.collectives.objects.blocking import broadcast_object
from chorusline.collectives.stores.torch_store import TorchStore
from chorusline.collectives.torch_backend.options import Options
from chorusline.collectives.torch_backend.registration import NAME
from chorusline.collectives.torch_backend.translation import MOST_S

from .between_runs import World, between_runs
from .running import RunningContext

_OF_ACCELERATE = "ACCELERATE_TORCH_DEVICE"
_ON_CPU = "ACCELERATE_USE_CPU"

_INITIALISE = "init_process_group"
_ITS_MODULES = (dist, dist.distributed_c10d, torch.distributed.device_mesh)
"""The modules of torch that have `init_process_group`; init_device_mesh calls that of its own."""

_OF_TORCHRUN = (None, "env://")
"""The init_method of a script that is started by torchrun."""


def initialise(running: RunningContext, timeout_s: Seconds | None) -> None:
    """`Context.init_torch_distributed`."""
    group, ours = running.group, between_runs().world
    if ours is not None and (ours.group is not group or not dist.is_initialized()):
        end()  # Its generation has ended, or the program has destroyed the process group.
    # Called once more in the same run, by a library for example.
    if dist.is_initialized():
        if ours is not None and ours.process_group is dist.group.WORLD:
            return
        raise RuntimeError(
            "torch.distributed is initialised in this process already, with the backend "
            f"{dist.get_backend()!r} and not for this run; call "
            "torch.distributed.destroy_process_group() first"
        )
    variables = _variables(running)
    store = TorchStore(group.another_store())
    seconds = group.timeout_s if timeout_s is None else checked_seconds(timeout_s)
    try:
        dist.init_process_group(
            NAME,
            store=store,
            rank=group.rank,
            world_size=group.size,
            timeout=timedelta(seconds=seconds),
            pg_options=Options(parent=group),
        )
    # It stays until then, as torch's C++ may hold its other half.
    except BaseException:
        store.release()
        raise
    between_runs().world = World(dist.group.WORLD, group, store, set_environment(variables))


def _variables(running: RunningContext) -> dict[str, str | None]:
    """What torchrun would set. Collective over the group."""
    group = running.group
    address, port = broadcast_object(group, _place() if group.rank == 0 else None)
    return {
        "RANK": str(group.rank),
        "WORLD_SIZE": str(group.size),
        "LOCAL_RANK": str(running.local_rank),
        "LOCAL_WORLD_SIZE": str(running.local_world_size),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        **of_device(group.device, os.environ),
    }


def of_device(device: torch.device, environment: Mapping[str, str]) -> dict[str, str]:
    """Environment variables that tell accelerate, and so the Trainer, the device of the worker.

    By itself accelerate takes the GPU whose number is LOCAL_RANK; a worker sees all GPUs of its
    node, and its own may have another number. Without a GPU each rank would train alone, unless a
    variable says that the CPU is meant."""
    if device.type == "cpu":
        return {} if _ON_CPU in environment else {_ON_CPU: "true"}
    return {} if _OF_ACCELERATE in environment else {_OF_ACCELERATE: str(device)}


@contextlib.contextmanager
def like_torchrun(running: RunningContext, run_id: str, num_restarts: int) -> Iterator[None]:
    """Inside a with-block the process looks as if torchrun had started it: its variables are set,
    and `init_process_group`, with any of torch's own backends, gives the ranks of the run, with the
    backend "chorusline". All ranks enter it together.

    A call with a `store`, another `init_method` or another backend is torch's own, and has nothing
    to do with the run.
    """
    before = set_environment(
        {
            **_variables(running),
            "GROUP_RANK": str(running.node_rank),
            # Lightning starts processes of its own where it does not find torchrun's name.
            "TORCHELASTIC_RUN_ID": run_id,
            "TORCHELASTIC_RESTART_COUNT": str(num_restarts),
        }
    )
    original = dist.init_process_group
    for module in _ITS_MODULES:
        setattr(module, _INITIALISE, _patched(original, running))
    try:
        yield
    finally:
        for module in _ITS_MODULES:
            setattr(module, _INITIALISE, original)
        restore_environment()  # What `initialise` has found are our variables.
        set_environment(before)


def _patched(original: Callable[..., None], running: RunningContext) -> Callable[..., None]:
    """torch's `init_process_group`, but for the calls that torchrun's scripts make."""

    @functools.wraps(original)
    def init_process_group(
        backend: str | None = None,
        init_method: str | None = None,
        timeout: timedelta | None = None,
        world_size: int = -1,
        rank: int = -1,
        store: Any = None,
        *others: Any,
        **more: Any,
    ) -> None:
        # Called as a script for torchrun calls it. Other calls are for torch alone.
        is_ours = store is None and init_method in _OF_TORCHRUN and is_stock(backend)
        if not is_ours or dist.is_initialized():
            original(backend, init_method, timeout, world_size, rank, store, *others, **more)
            return
        group = running.group
        # A script that sets them itself has read them from torchrun's variables, or means others.
        if (rank, world_size) not in ((-1, -1), (group.rank, group.size)):
            raise ValueError(
                f"init_process_group(rank={rank}, world_size={world_size}) on rank {group.rank} of "
                f"{group.size}; leave both out, or take them from RANK and WORLD_SIZE"
            )
        initialise(running, None if timeout is None else min(timeout.total_seconds(), MOST_S))

    return init_process_group


def is_stock(backend: str | None) -> bool:
    """Whether it is one of torch's own, as "gloo", or several, as "cpu:gloo,cuda:nccl"; or ours."""
    names = {one.rpartition(":")[2].lower() for one in (backend or NAME).split(",")}
    return names <= {"gloo", "nccl", "mpi", "undefined", NAME}


def end() -> None:
    """Destroy what `initialise` made, if the program has not: the process serves later programs."""
    restore_environment()
    ours, between_runs().world = between_runs().world, None
    if ours is None:
        return
    # The program may have made another one in its place, which is its own.
    if dist.is_initialized() and dist.group.WORLD is ours.process_group:
        dist.destroy_process_group()
    ours.store.release()


def restore_environment() -> None:
    """Give the environment variables that `initialise` has set their former values."""
    ours = between_runs().world
    if ours is not None:
        set_environment(ours.environment)
        ours.environment = {}


def set_environment(values: Mapping[str, str | None]) -> dict[str, str | None]:
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
