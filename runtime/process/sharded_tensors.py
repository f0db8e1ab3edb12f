"""Models and tensors that torch itself has sharded over ranks, and how FSDP2 keeps them.

Their classes are asked for in `sys.modules`: importing torch.distributed.fsdp takes longer than a
recovery, and in a process that has such an object it is loaded."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch


def is_fully_sharded(made: object) -> bool:
    """Whether it is a module to which `fully_shard` was applied."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(made, fsdp.FSDPModule)


def has_shards(made: object) -> bool:
    """Whether it is a model of `fully_shard`, or has a part that is one."""
    return isinstance(made, torch.nn.Module) and any(map(is_fully_sharded, made.modules()))


def is_dtensor(value: object) -> bool:
    """Whether it is a DTensor."""
    tensor = sys.modules.get("torch.distributed.tensor")
    return tensor is not None and isinstance(value, tensor.DTensor)


def steps_shards(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer steps parameters that are sharded over ranks."""
    return any(is_dtensor(one) for group in optimizer.param_groups for one in group["params"])


def states_of(model: Any) -> list[Any]:
    """FSDP2's state of each module of a model to which `fully_shard` was applied."""
    modules: list[Any] = [one for one in model.modules() if is_fully_sharded(one)]
    return list(dict.fromkeys(one._get_fsdp_state() for one in modules))


def groups_of(states: Sequence[Any]) -> list[Any]:
    """FSDP2's parameter groups: what it gathers and reduces together."""
    found: list[Any] = []
    for state in states:
        several = getattr(state, "_fsdp_param_groups", None)  # torch 2.11 and newer
        one = getattr(state, "_fsdp_param_group", None)
        found += several if several is not None else [one] if one else []
    return found


def sharded_parameters(model: Any) -> list[tuple[str, Any]]:
    """The sharded parameters of a model, DTensors, with their names. While a module's whole
    parameters are swapped in, its attributes do not show them."""
    prefixes = {id(module): f"{name}." if name else "" for name, module in model.named_modules()}
    return [
        (prefixes[id(one._module_info.module)] + one._module_info.param_name, one.sharded_param)
        for group in groups_of(states_of(model))
        for one in group.fsdp_params
    ]


def unsharded_parameters(model: Any) -> list[str]:
    """The names of the trainable parameters that FSDP2 has not sharded."""
    sharded = {name for name, _ in sharded_parameters(model)}
    named = model.named_parameters()
    return [name for name, one in named if one.requires_grad and name not in sharded]
