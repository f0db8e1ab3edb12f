"""torch.distributed over the group of a run: the train function begins it, and it ends with it."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from collectives import Group, TorchStore
from collectives.torch_backend import NAME, Options

from .between_runs import between_runs


def initialise(group: Group, timeout_s: float | None) -> None:
    """`Context.init_torch_distributed`."""
    ours = between_runs().world
    if ours is not None and ours[1] is not group:
        end()  # Its generation has ended.
    if dist.is_initialized():
        if ours is not None and ours[0] is dist.group.WORLD:
            return
        raise RuntimeError(
            f"torch.distributed is initialised in this process already, with the backend "
            f"{dist.get_backend()!r} and not for this run; call "
            "torch.distributed.destroy_process_group() first"
        )
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
    between_runs().world = (dist.group.WORLD, group, store)


def end() -> None:
    """Destroy what `initialise` made, if the program has not: the process serves later programs."""
    ours, between_runs().world = between_runs().world, None
    if ours is None:
        return
    world, _, store = ours
    if dist.is_initialized() and dist.group.WORLD is world:
        dist.destroy_process_group()
    store.release()
