"""Models and tensors that torch itself has sharded over ranks.

Their classes are asked for in `sys.modules`: importing torch.distributed.fsdp takes longer than a
recovery, and in a process that has such an object it is loaded."""

from __future__ import annotations

import sys


def is_fully_sharded(made: object) -> bool:
    """Whether it is a model to which `fully_shard` was applied."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(made, fsdp.FSDPModule)


def is_dtensor(value: object) -> bool:
    """Whether it is a DTensor."""
    tensor = sys.modules.get("torch.distributed.tensor")
    return tensor is not None and isinstance(value, tensor.DTensor)
