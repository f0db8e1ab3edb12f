"""The hooks on parameters that tell a reducer of gradients.

torch's garbage collector does not see through the hooks of a parameter: a hook that refers to what
refers to the parameter keeps both forever. While a run is in progress that is as it should be: a
model continues to be reduced if its function has dropped the wrapper. When the run is over the
hooks let go of the reducer, which lives on only if somebody keeps its model.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from ...process.between_runs import between_runs

OnGradient = Callable[[int, torch.Tensor], None]


class GradientWatch:
    """Calls a bound method when autograd has added to a parameter's gradient."""

    def __init__(self, on_gradient: OnGradient) -> None:
        self._told: OnGradient | None = on_gradient
        self._loosely: weakref.WeakMethod[Any] | None = None
        self._handles: list[RemovableHandle] = []

    def add(self, parameters: Sequence[torch.nn.Parameter], first: int) -> None:
        """first: the number of the first one."""
        for number, parameter in enumerate(parameters, start=first):
            hook = partial(self._tell, number)
            self._handles.append(parameter.register_post_accumulate_grad_hook(hook))

    def loosen(self) -> None:
        """From now on nobody is kept alive by the hooks."""
        if self._told is not None:
            self._loosely, self._told = weakref.WeakMethod(self._told), None

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _tell(self, number: int, parameter: torch.Tensor) -> None:
        told = self._told
        if told is None:
            assert self._loosely is not None
            told = self._loosely()
        if told is not None:
            told(number, parameter)
            return
        owner = between_runs().engines.get(parameter)
        if owner is None or owner() is None:
            raise RuntimeError(
                f"a parameter of shape {tuple(parameter.shape)} has a gradient that nobody "
                "reduces: the DistributedDataParallel around its module is gone since its run has "
                "ended. Keep it with ctx.keep, or wrap the module again"
            )


def why_not_twice(name: str, shape: tuple[int, ...]) -> str:
    """name, shape: of a parameter."""
    return (
        f"parameter {name} of shape {shape} got a second gradient in the same backward pass after "
        "its bucket was sent: it is used in several checkpointed segments. Checkpoint with "
        "use_reentrant=False, or pass static_graph=True, which waits for all gradients of a "
        "parameter"
    )


def why_not_between(name: str) -> str:
    return (
        f"a backward pass has given parameter {name} a gradient after the last micro-batch of a "
        "step of ctx.steps, when the ranks had already summed theirs. Run all backward passes "
        "inside the loop over the step's batches"
    )
