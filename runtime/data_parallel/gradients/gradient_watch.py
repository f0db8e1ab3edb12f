"""The hooks on parameters that tell a reducer of gradients.

Python's garbage collector does not see what a post-accumulate-grad hook of torch refers to: if that
leads back to the parameter, both stay forever. So these hooks hold the reducer weakly. A hook on
the gradient of one parameter, which the collector does see through, holds it strongly: a module
continues to be reduced if its wrapper was dropped, and all of it is freed when the module is. When
a run is over, that hook is removed, and the reducer lives on only if somebody keeps its model.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch.utils.hooks import RemovableHandle

from ...process.between_runs import between_runs

OnGradient = Callable[[int, torch.Tensor], None]


class GradientWatch:
    """Calls a bound method when autograd has added to a parameter's gradient."""

    def __init__(self, on_gradient: OnGradient) -> None:
        self._told = weakref.WeakMethod(on_gradient)
        self._handles: list[RemovableHandle] = []
        self._keeper: RemovableHandle | None = None  # None: there are no parameters

    def add(self, parameters: Sequence[torch.nn.Parameter], first: int) -> None:
        """first: the number of the first one."""
        for number, parameter in enumerate(parameters, start=first):
            hook = partial(self._tell, number)
            self._handles.append(parameter.register_post_accumulate_grad_hook(hook))
        # One is enough: autograd holds it as long as the parameter lives.
        if self._keeper is None and parameters:
            self._keeper = parameters[0].register_hook(partial(_keep, self._told()))

    def loosen(self) -> None:
        """From now on nobody is kept alive by the hooks."""
        if self._keeper is not None:
            self._keeper.remove()

    def remove(self) -> None:
        self.loosen()
        for handle in self._handles:
            handle.remove()

    def _tell(self, number: int, parameter: torch.Tensor) -> None:
        if (told := self._told()) is not None:
            told(number, parameter)
            return
        owner = between_runs().engines.get(parameter)
        # Wrapped again, the module has another model that watches it.
        if owner is None or owner() is None:
            raise RuntimeError(
                f"a parameter of shape {tuple(parameter.shape)} has a gradient that nobody "
                "reduces: the DistributedDataParallel around its module is gone since its run has "
                "ended. Keep it with ctx.keep, or wrap the module again"
            )


def _keep(_: OnGradient | None, gradient: torch.Tensor) -> None:
    """The hook on a gradient: it does nothing but to hold its first argument."""


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
