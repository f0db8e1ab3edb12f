"""A model of torch's `fully_shard` (FSDP2) in replicas, in a run that recovers from a lost rank.

The model is on a mesh of (replicas, ranks of a replica), so each rank has one shard of it and of
its optimizer's state, and the ranks with the same number in their replicas have the same one. A
step counts when all ranks have voted, before `optimizer.step()` changes anything, that they have
their shard of the reduced gradient (Recovery). When a rank is lost, whole replicas continue
(actors/driver/replicas.py): the functions run again from the top, each rank loads the shard that it
has kept, and a rank that has none, or another one, gets it from a rank of another replica.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._pytree import tree_map

from chorusline.actors.errors import LOADS_SHARDS, StateLost
from chorusline.collectives.group import Group
from chorusline.collectives.objects.blocking import broadcast_object

from ..process.sharded_tensors import (
    has_shards,
    is_dtensor,
    sharded_parameters,
    steps_shards,
    unsharded_parameters,
)


def is_sharded(made: object) -> bool:
    """Whether each rank has a shard of its own of this model or optimizer."""
    return has_shards(made) or (
        isinstance(made, torch.optim.Optimizer)
        and hasattr(made, "_optimizer_step_pre_hooks")
        and steps_shards(made)
    )


def why_not_in_replicas(model: Any, name: str, replica_size: int, group: Group) -> str:
    """The reason why a registered model does not survive a lost rank; empty if it does."""
    if beside := unsharded_parameters(model):
        return (
            f"parameter {beside[0]} of {name!r} is not sharded, so each rank has its own; apply "
            "fully_shard to the whole model, too, without ignored_params"
        )
    shape = (group.size // replica_size, replica_size)
    meshes = {tuple(one.device_mesh.shape) for _, one in sharded_parameters(model)}
    if replica_size > 1 and meshes == {shape}:
        return ""
    size = replica_size if replica_size > 1 else 2
    return (
        f"{name!r} is a model of fully_shard on a mesh of shape {min(meshes, default=())}, and "
        "each of its shards would be gone with a rank; shard it in replicas, by "
        f'Session(replica_size={size}) and fully_shard(model, mesh=init_device_mesh("'
        f'{group.device.type}", (ctx.world_size // {size}, {size}), mesh_dim_names=("replicate", '
        '"shard")))'
    )


# ── What a rank keeps of its objects while its function runs again ────────────────────────────────


@dataclass(frozen=True, slots=True)
class _Shard:
    """A DTensor without its mesh, which ends with the generation."""

    local: torch.Tensor
    placements: Any
    shape: torch.Size
    stride: tuple[int, ...]


@torch.no_grad()
def kept(made: Any) -> dict[str, Any]:
    """A copy of what this rank has of a model, by name its shards and buffers, or of an optimizer,
    its state_dict. Copies: the function may wrap the same module again."""
    if isinstance(made, torch.nn.Module):
        return {name: tensor.clone() for name, tensor in _live(made).items()}
    state: dict[str, Any] = tree_map(_without_mesh, made.state_dict())
    return state


@torch.no_grad()
def load(made: Any, kept: dict[str, Any]) -> None:
    """Give a model or an optimizer that was made again what `kept` has of it."""
    if isinstance(made, torch.nn.Module):
        for name, tensor in _live(made).items():
            if name in kept:  # A module may have grown.
                tensor.copy_(kept[name])
        return
    parameters = [one for group in made.param_groups for one in group["params"]]
    state = {
        number: tree_map(lambda value, p=parameters[number]: _on_mesh_of(p, value), of_parameter)
        for number, of_parameter in kept["state"].items()
    }
    made.load_state_dict(kept | {"state": state})


def _without_mesh(value: Any) -> Any:
    if is_dtensor(value):
        local = value.to_local().detach().clone()
        return _Shard(local, value.placements, value.shape, value.stride())
    return value.clone() if isinstance(value, torch.Tensor) else value


def _on_mesh_of(parameter: Any, value: Any) -> Any:
    if not isinstance(value, _Shard):
        return value.clone() if isinstance(value, torch.Tensor) else value
    local = value.local.to(parameter.to_local().device, copy=True)
    return type(parameter.data).from_local(
        local,
        parameter.device_mesh,
        value.placements,
        run_check=False,
        shape=value.shape,
        stride=value.stride,
    )


def _live(model: Any) -> dict[str, torch.Tensor]:
    """This rank's shards and buffers, in the memory in which FSDP2 has them."""
    found = {name: one.to_local().detach() for name, one in sharded_parameters(model)}
    return found | {name: buffer.detach() for name, buffer in model.named_buffers()}


# ── Which rank has which shard ────────────────────────────────────────────────────────────────────


def shard_for(
    group: Group, holders: Sequence[int | None], replica_size: int, mine: Any, name: str
) -> Any:
    """What this rank loads into its shard of an object. All ranks call it.

    holders: by rank, the number of the shard that it has kept, of the last step that counts.
    mine: what this rank has kept of the object; None if there is nothing.
    name: of the object, for the error.

    Raises StateLost, on all ranks alike, if no rank has some shard.
    """
    number = group.rank % replica_size
    if gone := sorted(set(range(replica_size)).difference(holders)):
        shards = "shard" if len(gone) == 1 else "shards"
        raise StateLost(
            group.generation,
            0,
            f"all ranks that had {shards} {', '.join(map(str, gone))} of {replica_size} of "
            f"{name!r} died",
            LOADS_SHARDS,
        )
    # Every rank decides so by the same list, so none waits below for one that has returned.
    if all(held == rank % replica_size for rank, held in enumerate(holders)):
        return mine
    between = group.split(number, name=f"the ranks with shard {number}")
    assert between is not None
    with between:
        peers = range(number, group.size, replica_size)
        has = [holders[rank] == number for rank in peers]
        # There is one: a rank keeps the number of its shard (driver/replicas.py).
        root = has.index(True)
        sent = broadcast_object(between, _on_host(mine) if between.rank == root else None, root)
        return mine if has[between.rank] else sent


def _on_host(kept: Any) -> Any:
    def moved(value: Any) -> Any:
        if isinstance(value, _Shard):
            return replace(value, local=value.local.cpu())
        return value.cpu() if isinstance(value, torch.Tensor) else value

    return tree_map(moved, kept)
