"""The train function that runs in this process, as models and optimizers see it.

Models need its group, and the recovery that takes them into the next generation. Context and
recovery know models, so models cannot import them. Two protocols here say what models ask of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol, TypeVar

import torch

from chorusline.actors.fault_plan import Faults
from chorusline.collectives.group import Group

T = TypeVar("T")


class RecoveryInterface(Protocol):
    """What models and optimizers ask of recovery (recovery.py), which takes them into the next
    generation. `model` and `optimizer` are the engines of a DistributedDataParallel and of a
    ZeroRedundancyOptimizer."""

    @property
    def faults(self) -> Faults:
        """What was ordered to happen to this rank."""

    def makes_model(self) -> None:
        """A model is being made, with collectives of its own."""

    def watch_model(self, model: Any) -> None:
        """Take this model along into later generations, as long as it lives."""

    def watch_optimizer(self, optimizer: Any) -> None:
        """Take this optimizer along into later generations, as long as it lives."""

    def cursors(self) -> list[int]:
        """This rank's place in the samples, for the vote of a step."""

    def step_agreed(self, cursors: tuple[tuple[int, ...], ...], *, counts: bool) -> None:
        """The ranks have agreed on a step. cursors: by rank. counts: its samples count now; those
        of a plain optimizer's step count when it has stepped."""

    def has_stepped(self, optimizer: Any) -> None:
        """A step of this optimizer has ended on this rank."""

    @property
    def has_gone_on(self) -> bool:
        """Whether ranks were lost or came in this run; equal on all ranks of a generation."""

    def has_taken_over(self) -> None:
        """This rank has joined, and has taken the parameters of a rank that took the last step."""

    def recover(self, error: BaseException, optimizer: Any = None) -> None:
        """Return in the next generation, or raise the error that ended the run. optimizer: the one
        whose step waits."""


class RunningContext(Protocol):
    """What models and Lightning ask of the context of a train function.

    dealt_as: the (num_replicas, rank) that samplers of this rank had in earlier generations.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    device: torch.device
    group: Group
    dealt_as: set[tuple[int, int]]

    @property
    def recovery(self) -> RecoveryInterface | None: ...

    def broadcast(self, value: T, root: int = 0) -> T: ...

    def show(self, figure: bytes) -> None:
        """Show a picture (PNG) where the rank's output is shown."""


# A global, not a context variable: autograd's threads have no context variables.
_current: RunningContext | None = None


@contextlib.contextmanager
def running(context: RunningContext) -> Iterator[None]:
    """Make `context` the process's current one for the length of a with-block."""
    global _current
    before, _current = _current, context
    try:
        yield
    finally:
        _current = before


def is_running() -> bool:
    """Whether this process is a rank in its train function."""
    return _current is not None


def current() -> RunningContext:
    """The context of the train function that runs in this process."""
    if _current is None:
        raise RuntimeError(
            "no train function of a session runs in this process; call this inside the function "
            "that is given to Session.run or chorusline.run"
        )
    return _current


def current_group() -> Group:
    """The group of all ranks, which is the default of all wrappers."""
    if _current is None:
        raise RuntimeError(
            "no train function of a session runs in this process, so there is no default group; "
            "make one with Group.create and pass it"
        )
    return _current.group


def recovery_of(group: Group) -> RecoveryInterface | None:
    """The recovery that takes objects of `group` into the next generation. None if the run ends
    with the first loss, and for groups that the user made."""
    return _current.recovery if _current is not None and _current.group is group else None
