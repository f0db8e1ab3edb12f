"""The buffers of a model in a step of several micro-batches.

A forward pass in training changes buffers (running statistics, counters). In the steps of
`ctx.steps` every micro-batch begins with the buffers that the step began with, and after the step
all ranks have those that its last micro-batch has left. So they are a function of the step, whoever
computed which micro-batch; as torch's DistributedDataParallel takes the buffers of rank 0, whose
batch is one of several too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from chorusline.collectives import Group

from .same_model import broadcast_tensors


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
    """The buffers of one module on one rank."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._before: list[_Before] = []
        self._after: list[torch.Tensor] = []
        """As the last micro-batch has left them; empty if it was not computed here, or not yet."""

    def begin_step(self) -> None:
        """Remember the present buffers; copies that are still right stay."""
        buffers = list(self._module.buffers())
        known = {id(one.buffer): one for one in self._before}
        self._before = [
            one if (one := known.get(id(buffer))) and one.is_still(buffer) else _Before.of(buffer)
            for buffer in buffers
        ]
        self._after = []

    @torch.no_grad()
    def begin_micro_batch(self) -> None:
        """Give the step's first buffers back to the module."""
        for before, buffer in zip(self._before, self._module.buffers(), strict=True):
            if not before.is_still(buffer):
                buffer.copy_(before.values)
                before.buffer = buffer

    def end_last(self) -> None:
        """The last micro-batch of the step was computed here."""
        buffers = list(self._module.buffers())
        is_still = [one.is_still(b) for one, b in zip(self._before, buffers, strict=True)]
        self._after = [] if all(is_still) else [buffer.clone() for buffer in buffers]

    @property
    def have_changed(self) -> bool:
        """Whether the last micro-batch, computed here, has changed any."""
        return bool(self._after)

    @torch.no_grad()
    def send(self, root: int, group: Group) -> None:
        """Give all ranks what the last micro-batch has left on rank `root`; `commit` takes it."""
        if group.rank != root:
            self._after = [torch.empty_like(one.values) for one in self._before]
        broadcast_tensors(self._after, root, group)

    @torch.no_grad()
    def commit(self) -> None:
        """The step counts: its last buffers are the module's now."""
        self.begin_micro_batch()
        for buffer, after in zip(self._module.buffers(), self._after, strict=False):
            buffer.copy_(after)
        self._after = []
