"""The name `chorusline` among torch's backends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from ..group import Group
    from .process_group import ChoruslineProcessGroup

NAME = "chorusline"


@dataclass(frozen=True)
class Options:
    """What `dist.init_process_group(..., pg_options=...)` may say to us.

    parent: a group of the same ranks, in the same order, whose fate the process group shares: if
    one of them fails, both do. A session passes its own.
    """

    parent: Group | None = None


def register() -> None:
    """Make the backend known to torch. Harmless when done again."""
    # Where a script names no backend, torch goes on choosing Gloo and NCCL.
    dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])


def _create(arguments: Any, options: Options | None) -> ChoruslineProcessGroup:
    """What torch calls on every rank of a new process group. Blocks until all have come."""
    from .process_group import create  # With its transports, only for who uses it.

    if options is not None and not isinstance(options, Options):
        raise TypeError(
            f"pg_options must be chorusline's own Options or None, got {type(options).__name__}; "
            "options of other backends mean nothing to this one"
        )
    return create(arguments, options or Options())
