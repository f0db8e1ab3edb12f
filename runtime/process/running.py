"""The train function that runs in this process, as far as models and optimizers have to know it.

Models need its group, and what takes them into the next generation. They stand below the context
and below the recovery, which know models. So two protocols here say what models ask of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol, TypeVar

import torch

from collectives.group import Group

T = TypeVar("T")


class Survival(Protocol):
    """What takes models and optimizers into the next generation (recovery.py). A model is the
    engine of a DistributedDataParallel here, an optimizer that of a ZeroRedundancyOptimizer."""

    def watch_model(self, model: Any) -> None:
        """Take this model along, as long as it lives."""

    def watch_optimizer(self, optimizer: Any) -> None:
        """Take this optimizer along, as long as it lives."""

    def cursors(self) -> list[int]:
        """This rank's place in the samples, which the vote of a step carries."""

    def record(self, cursors: tuple[tuple[int, ...], ...]) -> None:
        """The ballot of a step was seen. cursors: of all ranks."""

    def has_stepped(self, optimizer: Any) -> None:
        """A step of this optimizer has ended on this rank."""

    def agreed(self, cursors: tuple[tuple[int, ...], ...]) -> None:
        """A backward pass for a plain optimizer was reduced. cursors: of all ranks."""

    def has_taken_over(self) -> None:
        """This rank has joined, and has the parameters of a rank that took the last step."""

    def recover(self, error: BaseException, optimizer: Any = None) -> None:
        """Return in the next generation, or raise what ended the run. optimizer: whose step
        waits."""


class Running(Protocol):
    """What models and Lightning ask of the context of a train function."""

    rank: int
    world_size: int
    local_rank: int
    node_rank: int
    device: torch.device
    group: Group

    @property
    def recovery(self) -> Survival | None: ...

    def broadcast(self, value: T, root: int = 0) -> T: ...


# One per process, not a context variable: autograd's threads have no context variables.
_current: Running | None = None


@contextlib.contextmanager
def running(context: Running) -> Iterator[None]:
    """Make `context` the process's current one for the length of a with-block."""
    global _current
    before, _current = _current, context
    try:
        yield
    finally:
        _current = before


def current() -> Running:
    """The context of the train function that runs in this process."""
    if _current is None:
        raise RuntimeError(
            "no train function of a session runs in this process; call this inside the function "
            "that is given to Session.run or chorusline.run"
        )
    return _current


def current_group() -> Group:
    """The group of all ranks: what wrappers use that are given no group of their own."""
    if _current is None:
        raise RuntimeError(
            "no train function of a session runs in this process, so there is no default group; "
            "make one with Group.create and pass it"
        )
    return _current.group


def recovery_of(group: Group) -> Survival | None:
    """What takes the objects of `group` into the next generation; None where the run ends with
    the first loss, and for groups that the user made."""
    return _current.recovery if _current is not None and _current.group is group else None
