"""The buffers of a model: equal on all ranks after a step, and as they were after one that counts.

A forward pass changes them (running statistics, counters) before anybody knows whether the step
counts. So where a run goes on after a death, a rank keeps a copy of them from step to step:

    agreed   copied when all ranks had agreed on the last step, and taken over its buffers
    kept     those of the last step that counts; a plain optimizer may have yet to take the agreed
             one, while a step that a sharded optimizer has held a ballot on counts at once
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from collectives import Group

from .same_model import broadcast_tensors


class Buffers:
    """The buffers of one module on one rank.

    travel: whether all ranks take over those of one rank after each step.
    is_kept: whether this rank keeps copies of them.
    """

    def __init__(self, module: torch.nn.Module, *, travel: bool, is_kept: bool) -> None:
        self._module = module
        self.travel = travel
        self.is_kept = is_kept
        self.count_when_agreed = False
        """Whether a step counts as soon as all ranks have agreed on it."""
        self.synced_step = 0
        """Steps whose buffers this rank has taken over."""
        self._kept: list[torch.Tensor] = []
        self._agreed: list[torch.Tensor] = []

    def begin_forward(self) -> None:
        """A forward pass is about to change them; there may have been no step yet."""
        if self.is_kept and not self._kept:
            self._kept = self._copied()

    def sync(self, root: int | None, group: Group) -> None:
        """Take over the buffers of rank `root` after a step; None: no rank took the step."""
        buffers = list(self._module.buffers())
        if self.travel and buffers and root is not None:
            broadcast_tensors(buffers, root, group)
        self._have_synced()

    def sync_again(
        self, synced: Sequence[int], step: int, live: Sequence[int], group: Group
    ) -> None:
        """End `step` on ranks that have not ended it. A rank that has ended it may be in the next
        forward pass already, and gives what it had before that.

        synced: `synced_step` by rank.
        live: ranks that took the step and are there.
        """
        if min(synced) == step:
            return
        buffers = list(self._module.buffers())
        has_ended = self.synced_step == step
        if self.travel and buffers:
            root = synced.index(step) if step in synced else max(live, default=0)
            broadcast_tensors(self._kept if has_ended else buffers, root, group)
        if not has_ended:
            self._have_synced()

    def end_step(self, step: int) -> None:
        """The buffers are those of `step` now, if they were not before."""
        if self.synced_step < step:
            self._have_synced()

    def _have_synced(self) -> None:
        self.synced_step += 1
        self._agreed = self._copied()
        if self.count_when_agreed:
            self.keep_agreed()

    def keep_agreed(self) -> None:
        """The step that was agreed on counts on this rank, so its buffers do."""
        self._kept = self._agreed

    def drop_kept(self) -> None:
        """Keep none any more: no run goes on with them."""
        self.is_kept = False
        self._kept = []

    def committed(self) -> dict[str, torch.Tensor]:
        """By name, as they were after the last step that counts; without one, as they are."""
        buffers = dict(self._module.named_buffers())
        return dict(zip(buffers, self._kept, strict=True)) if self._kept else buffers

    def _copied(self) -> list[torch.Tensor]:
        if not (self.is_kept and self.travel):
            return []
        return [buffer.clone() for buffer in self._module.buffers()]
