"""`PureDistributedDataParallel`: data parallelism in a few lines, to read and to compare with."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from chorusline.collectives.contract.operation import ReduceOp
from chorusline.collectives.contract.torch_hints import says
from chorusline.collectives.group import Group

from ..process.running import current_group
from .same_model import (
    broadcast_tensors,
    check_devices,
    check_layouts,
    check_same_model,
    check_wrapping,
    warn_of_forward_passes_that_write,
)


class PureDistributedDataParallel(torch.nn.Module):
    """A module whose gradients are the mean over all ranks: one all-reduce for each gradient.

        model = cl.PureDistributedDataParallel(net, group)  # In a train function, without a group.
        model(torch.ones(2, 8)).mean().backward()

    The model has no buckets, no overlap and no agreement: as soon as a parameter's gradient is
    accumulated, the model reduces it and waits. That is slow, but simple to verify, and in a
    debugger a rank that hangs is in the all-reduce of the parameter in question.

    module: the same on all ranks; it starts from rank 0's parameters and buffers.
    group: the ranks that reduce gradients; default: the session's group.

    All ranks must use the same parameters in each backward pass. A parameter that one rank does not
    use causes a CollectiveMismatch or CollectiveTimeout; `DistributedDataParallel` handles it.
    Buffers are not synchronised after the start. Join does not accept the model.

    Raises what `DistributedDataParallel` raises for a module that has no trainable parameters, is
    on another device, or differs between ranks.
    """

    @says(process_group="write group=, with a chorusline Group")
    def __init__(self, module: torch.nn.Module, group: Group | None = None) -> None:
        super().__init__()
        check_wrapping(module, group)
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        if not named:
            raise ValueError(
                "PureDistributedDataParallel is not needed when a module doesn't have any "
                "parameter that requires a gradient."
            )
        self.module = module
        self.group = group if group is not None else current_group()
        self._reduction = _Reduction(self.group)
        check_devices(named, self.group)
        check_layouts("parameter", module.named_parameters())
        check_layouts("buffer", module.named_buffers())
        warn_of_forward_passes_that_write(module, self.group)
        check_same_model("PureDistributedDataParallel", named, self.group)
        state = [*module.parameters(), *module.buffers()]
        broadcast_tensors([tensor.detach() for tensor in state], 0, self.group)
        for _, parameter in named:
            parameter.register_post_accumulate_grad_hook(self._reduction.reduce)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.module(*inputs, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context manager in which backward passes only accumulate gradients on this rank; the next
        backward pass outside reduces the sum."""
        before, self._reduction.is_on = self._reduction.is_on, False
        try:
            yield
        finally:
            self._reduction.is_on = before


@dataclass
class _Reduction:
    """What the hooks hold: nothing that leads back to a parameter, or no parameter would be freed
    (`GradientWatch` in gradients/reducer.py)."""

    group: Group
    is_on: bool = True

    def reduce(self, parameter: torch.Tensor) -> None:
        if self.is_on:
            assert parameter.grad is not None
            self.group.all_reduce(parameter.grad, ReduceOp.AVG).wait()
