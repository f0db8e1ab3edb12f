"""The buffers of a model: made equal on all ranks after each step, and kept for recovery.

A forward pass changes the buffers (running statistics, counters) before any rank knows whether the
step counts. So in a run that continues after the death of a rank, each rank keeps two copies:

    agreed   the buffers after the last step that all ranks agreed on
    kept     the buffers after the last step that counts. An agreed step counts once the plain
             optimizer has taken it; with a sharded optimizer it counts after the ballot

What the loop's body writes to buffers after a step that counts belongs to that step. So the kept
buffers are the module's own until a forward pass begins the next step, and a copy from then on. A
rank that is still inside the step runs that code itself, and is sent the agreed ones.

On a GPU the host does not wait for the buffers of another rank to come in the step of a plain
optimizer. So a copy consists of what has come, and of what was there before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from chorusline.collectives.contract.errors import CollectiveError, CollectiveMismatch
from chorusline.collectives.contract.work import Work
from chorusline.collectives.group import Group

from .same_model import broadcast_tensors


@dataclass(frozen=True, slots=True)
class _BuffersCopy:
    """after, before: copies of the buffers after and before the operation that brought those
    of another rank. work: this operation; None if it is known that it has succeeded."""

    after: list[torch.Tensor] = field(default_factory=list)
    before: list[torch.Tensor] = field(default_factory=list)
    work: Work | None = None

    def tensors(self) -> list[torch.Tensor]:
        if self.work is not None:
            try:
                self.work.wait_on_host()
            except CollectiveError:  # It was stopped, and has left anything.
                return self.before
        return self.after


class Buffers:
    """The buffers of one module on one rank.

    travel: whether all ranks copy the buffers of one rank after each step.
    is_kept: whether this rank keeps copies of the buffers.
    """

    def __init__(self, module: torch.nn.Module, *, travel: bool, is_kept: bool) -> None:
        self._module = module
        self.travel = travel
        self.is_kept = is_kept
        self.count_when_agreed = False
        """Whether a step counts as soon as all ranks have agreed on it."""
        self.synced_step = 0
        """The number of steps whose buffers this rank has synchronised."""
        self._shapes = {name: tuple(buffer.shape) for name, buffer in module.named_buffers()}
        self._kept = _BuffersCopy()
        self._agreed = _BuffersCopy()
        self._is_within_step = False
        """Whether the module's own buffers may be those of a step that does not count yet."""

    def begin_forward(self, *, begins_step: bool = True) -> None:
        """Copy the buffers that the forward pass is about to change, if it begins a step."""
        if not begins_step or self._is_within_step:
            return
        self._is_within_step = True
        if self.is_kept:
            # As far as they have come: of this, too, nobody on the host knows yet.
            self._kept = _BuffersCopy(self._copied(), self._kept.before, self._kept.work)

    def sync(self, root: int | None, group: Group, *, on_host: bool = False) -> bool:
        """Copy the buffers of rank `root` after a step; None: no rank took the step.

        on_host: also on a GPU, return when it is known that they have come.
        Returns whether any were sent.
        """
        # As torch writes them: without a new version, for which a second backward pass would refuse
        # a graph that reads them.
        buffers = [buffer.data for buffer in self._module.buffers()]
        work: Work | None = None
        before: list[torch.Tensor] = []
        if self.travel and buffers and root is not None:
            # Nobody waits for it on the host: what an abort leaves in the buffers is undone from a
            # copy.
            is_open = group.device.type != "cpu" and not on_host
            before = self._copied() if is_open else []
            try:
                work = broadcast_tensors(buffers, root, group, on_host=on_host)
            except CollectiveMismatch as error:
                raise self._explained(error, group.rank) from error
        self._have_synced(before, work if before else None)
        return work is not None

    def _explained(self, error: CollectiveMismatch, rank: int) -> CollectiveMismatch:
        """The same error, with the buffers that have become others on this rank."""
        others = [
            f"{name} is {tuple(buffer.shape)} and was {self._shapes.get(name, 'not there')}"
            for name, buffer in self._module.named_buffers()
            if self._shapes.get(name) != tuple(buffer.shape)
        ]
        since = "; ".join(others) or "none is another one"
        return CollectiveMismatch(
            error.operation,
            error.generation,
            error.ranks,
            f"{error.detail}; these are the model's buffers: since the model was wrapped, on rank "
            f"{rank}: {since}",
            "A buffer must have the same shape on all ranks; otherwise wrap the model with "
            "broadcast_buffers=False.",
        )

    def sync_again(
        self, synced: Sequence[int], step: int, live: Sequence[int], group: Group
    ) -> None:
        """End `step` on ranks that have not ended it. A rank that has ended it may have run the
        code after it, or be in the next forward pass, so it sends its copy from before.

        synced: `synced_step` by rank.
        live: the ranks that took the step and are alive.
        """
        if min(synced) == step:
            return
        buffers = list(self._module.buffers())
        has_ended = self.synced_step == step
        if self.travel and buffers:
            root = synced.index(step) if step in synced else max(live, default=0)
            sent = self._agreed.tensors() if has_ended else buffers
            broadcast_tensors(sent, root, group, on_host=True)
        if not has_ended:
            self._have_synced()

    def end_step(self, step: int) -> None:
        """Note that the buffers are those of `step` now, if this is not done yet."""
        if self.synced_step < step:
            self._have_synced()

    def _have_synced(self, before: Sequence[torch.Tensor] = (), work: Work | None = None) -> None:
        self.synced_step += 1
        self._is_within_step = True
        self._agreed = _BuffersCopy(self._copied(), [*before], work)
        if self.count_when_agreed:
            self.keep_agreed()

    def keep_agreed(self) -> None:
        """The agreed step counts on this rank, so its buffers are the ones to keep."""
        self._kept = self._agreed
        self._is_within_step = False

    def drop_kept(self) -> None:
        """Stop keeping copies, at the end of the run."""
        self.is_kept = False
        self._kept = self._agreed = _BuffersCopy()

    def committed(self) -> dict[str, torch.Tensor]:
        """By name, the buffers after the last step that counts; present ones before any step."""
        kept = self._kept.tensors()
        # The present ones would be those of an operation that was stopped.
        has_come = kept is self._kept.after
        return self._named(kept if self._is_within_step or not has_come else [])

    def agreed(self) -> dict[str, torch.Tensor]:
        """By name, the buffers with which the code after the last agreed step began."""
        return self._named(self._agreed.tensors())

    def _named(self, copies: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        buffers = dict(self._module.named_buffers())
        return dict(zip(buffers, copies, strict=True)) if copies else buffers

    def _copied(self) -> list[torch.Tensor]:
        if not (self.is_kept and self.travel):
            return []
        return [buffer.clone() for buffer in self._module.buffers()]


@dataclass(slots=True)
class _Before:
    """A buffer as the step began with it."""

    buffer: torch.Tensor
    values: torch.Tensor

    @classmethod
    def of(cls, buffer: torch.Tensor) -> _Before:
        return cls(buffer, buffer.detach().clone())

    def is_still(self, buffer: torch.Tensor) -> bool:
        # torch's batch_norm does not count its writes to running statistics in `_version`. On a GPU
        # the host would wait for a comparison, and a copy costs less.
        on_host = buffer.device.type == "cpu"
        return buffer is self.buffer and on_host and torch.equal(buffer, self.values)


class StepBuffers:
    """The buffers of one module on one rank, in steps of several micro-batches.

    A forward pass in training changes buffers (running statistics, counters). In the steps of
    `ctx.steps` every micro-batch begins with the buffers that the step began with, and after the
    step all ranks have those that its last micro-batch has left. So they are a function of the
    step, whoever computed which micro-batch; as torch's DistributedDataParallel takes the buffers
    of rank 0, whose batch is one of several too.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._before: dict[str, _Before] = {}
        self._after: list[torch.Tensor] = []
        """As the last micro-batch has left them; empty if it was not computed here, or not yet."""

    def begin_step(self) -> None:
        """Remember the present buffers; copies that are still right stay."""
        known = {id(one.buffer): one for one in self._before.values()}
        self._before = {
            name: one
            if (one := known.get(id(buffer))) and one.is_still(buffer)
            else _Before.of(buffer)
            for name, buffer in self._module.named_buffers()
        }
        self._after = []

    def _pairs(self) -> list[tuple[_Before, torch.Tensor]]:
        """The buffers as the step began with them, and as they are.

        Raises RuntimeError if a forward pass of the step has made a buffer, or another shape."""
        now = dict(self._module.named_buffers())
        shapes = {name: one.values.shape for name, one in self._before.items()}
        for name in {**shapes, **now}:
            one, other = shapes.get(name), now[name].shape if name in now else None
            if one == other:
                continue
            was = "was not there" if one is None else f"was {tuple(one)}"
            shape = "no buffer" if other is None else f"one of shape {tuple(other)}"
            raise RuntimeError(
                f"a forward pass in a step of ctx.steps has made buffer {name} {shape}, which "
                f"{was} when the step began. Every micro-batch begins with the buffers of the "
                "step, whichever rank computes it. Register the buffer in the constructor, with "
                "its largest shape; or keep what can be computed again, such as a mask, in a plain "
                "attribute of the module"
            )
        return [(self._before[name], buffer) for name, buffer in now.items()]

    @torch.no_grad()
    def begin_micro_batch(self) -> None:
        """Give the step's first buffers back to the module."""
        for before, buffer in self._pairs():
            if not before.is_still(buffer):
                buffer.copy_(before.values)
                before.buffer = buffer

    def end_last(self) -> None:
        """The last micro-batch of the step was computed here."""
        pairs = self._pairs()
        is_still = [before.is_still(buffer) for before, buffer in pairs]
        self._after = [] if all(is_still) else [buffer.clone() for _, buffer in pairs]

    @property
    def have_changed(self) -> bool:
        """Whether the last micro-batch, computed here, has changed any."""
        return bool(self._after)

    @torch.no_grad()
    def send(self, root: int, group: Group) -> None:
        """Give all ranks what the last micro-batch has left on rank `root`; `commit` takes it."""
        if group.rank != root:
            self._after = [torch.empty_like(one.values) for one in self._before.values()]
        broadcast_tensors(self._after, root, group)

    @torch.no_grad()
    def commit(self) -> None:
        """The step counts: its last buffers are the module's now."""
        self.begin_micro_batch()
        for buffer, after in zip(self._module.buffers(), self._after, strict=False):
            buffer.copy_(after)
        self._after = []
