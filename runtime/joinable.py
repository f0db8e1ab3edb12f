"""What a Join holds: something whose collectives a rank without data can shadow."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from collectives import Group

if TYPE_CHECKING:
    from .join import Join


class JoinHook:
    """What a joinable does on a rank that has joined. Both do nothing unless overridden."""

    def main_hook(self) -> None:
        """Shadow one step: the collectives that others run in it. Once per step some rank takes."""

    def post_hook(self, is_last_joiner: bool) -> None:
        """Once, when all ranks have joined. Several ranks may be last joiners."""


class Joinable(ABC):
    """Something whose collectives a joined rank can shadow: list it in `Join([...])`."""

    _join: Join | None = None

    @abstractmethod
    def join_hook(self, **kwargs: Any) -> JoinHook:
        """The hook for one Join. kwargs: those given to Join, the same for all joinables."""

    @property
    @abstractmethod
    def join_device(self) -> torch.device:
        """Where the joinable's tensors live."""

    @property
    @abstractmethod
    def join_group(self) -> Group:
        """The group of its collectives; one group for all joinables of a Join."""

    def _carries_agreement(self) -> bool:
        """Whether its steps end with an agreement, of its own or of a joinable beside it."""
        return False

    def _ends_step(self) -> bool:
        """Whether it hands that agreement to `Join.record` itself."""
        return False

    def _begins_passes(self) -> bool:
        """Whether its `notify_join_context` comes once per batch, before all collectives of it."""
        return False

    def _announces_hook(self) -> bool:
        """Whether it says itself when its main hook is due; else that is behind the one before."""
        return True

    def _end_shadowed_step(self) -> None:
        """A step that this rank has shadowed is over, for all that steps with it."""

    def _groups_to_follow(self) -> Sequence[Group]:
        """Groups of its own whose collectives are not the same in each step."""
        return ()

    def _check_joined_with(self, joinables: Sequence[Joinable]) -> None:
        """Raise ValueError if it cannot be shadowed without another joinable."""


class GroupJoinable(Joinable):
    """A joinable of ours: on one group, and its steps carry an agreement."""

    group: Group

    @property
    def join_device(self) -> torch.device:
        return self.group.device

    @property
    def join_group(self) -> Group:
        return self.group

    def _carries_agreement(self) -> bool:
        return True
