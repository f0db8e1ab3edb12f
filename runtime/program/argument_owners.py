"""Which call has an argument of a given name: for a user who gave it to another one."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from ..checkpoint.config import CheckpointConfig
from ..data_parallel.distributed_data_parallel import DistributedDataParallel
from ..join.join import Join
from ..zero.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from .context import Context

Function = TypeVar("Function", bound=Callable[..., Any])

_OWNERS: tuple[tuple[str, Callable[..., Any]], ...] = (
    ("ZeroRedundancyOptimizer(...)", ZeroRedundancyOptimizer),
    ("Session(checkpoint=CheckpointConfig(...))", CheckpointConfig),
    ("ctx.shard(...)", Context.shard),
    ("ctx.steps(...)", Context.steps),
    ("Join(...)", Join),
    ("DistributedDataParallel(...)", DistributedDataParallel),
)
"""What an argument is written in, the likeliest first."""


def owner_of(names: Iterable[str]) -> str:
    """A sentence about the first of `names` that is an argument of something else, or an empty
    text."""
    for name in names:
        for written, owner in _OWNERS:
            if name in inspect.signature(owner).parameters:
                return f"{name} is an argument of {written}"
    return ""


def naming_owners(function: Function) -> Function:
    """A decorator: an unknown argument of `function` raises a TypeError that says whose it is."""
    known = inspect.signature(function).parameters

    @functools.wraps(function)
    def named(*args: Any, **kwargs: Any) -> Any:
        if owner := owner_of(name for name in kwargs if name not in known):
            raise TypeError(f"{owner}, and not of {function.__qualname__.partition('.')[0]}(...)")
        return function(*args, **kwargs)

    return named  # type: ignore[return-value]
