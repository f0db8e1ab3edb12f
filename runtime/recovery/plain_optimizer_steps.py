"""Steps of plain optimizers, in a run that recovers when a worker is lost.

A plain optimizer steps each rank's own full copy of the parameters. So such a step is never left
half-way, and no rank can take it for another rank. The ranks share only the agreement in the last
bucket of the backward pass. This module counts agreements and steps:

    a backward pass is reduced      agreement n is *seen*, the same one on all ranks
    optimizer.step() has returned   step n is *taken*, on this rank;
                                    the samples in the agreement count now

The samples do not count before: between the two moments the scaler may skip the step, or a
collective in the user's code may fail.

When ranks are lost, the remaining ranks are at most one step apart: no rank sees agreement n + 1
before all have voted in it, and so have taken step n. (Joined ranks take no steps.) The functions
run again from the top, and all ranks take over the registered objects of the furthest rank, with
its view of the samples (restart.py). So a step that one of them has taken counts. A step that none
has taken is taken again, by the remaining ranks, over samples that were dealt again.

Several optimizers that step with one backward pass count as one. If each has a backward pass of its
own, a loss may come between the two steps: then these samples skip the second step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch.utils.hooks import RemovableHandle

from ..data_parallel.distributed_data_parallel import ModelEngine
from ..join.join import Joinable
from ..process.registry import Registered, Registry

Cursors = tuple[tuple[int, ...], ...]
"""By rank, the number of samples that it has taken of each iteration (Dealer)."""

OnTaken = Callable[[Cursors, list[int]], None]

StepCount = tuple[int, int]
"""Number of the last step in a rank's parameters, and of the last step that its own optimizer took.
The second is less on a joined rank, which got the parameters of a rank that took more steps."""


@dataclass(slots=True)
class _Watched:
    """One registered optimizer.

    stepped_at: number of agreements seen at its last step, -1 before the first.
    inside: number of agreements seen since `step` was called; None outside of `step`.
    is_apart: it has stepped twice without an agreement in between.
    """

    name: str
    optimizer: weakref.ref[torch.optim.Optimizer]
    stepped_at: int = -1
    inside: int | None = None
    is_apart: bool = False


class PlainSteps:
    """Counts the steps of plain optimizers on one rank, for one run.

    on_taken: called when a step counts, with the agreement's cursors and the numbers of their
        iterations (Dealer.inside).
    """

    def __init__(self, on_taken: OnTaken) -> None:
        self._on_taken = on_taken
        self._seen = 0
        self._taken = 0
        self._stepped = 0
        self._agreed: tuple[Cursors, list[int]] | None = None  # None: no step waits to be taken
        self._watched: list[_Watched] = []
        self._handles: list[RemovableHandle] = []

    @property
    def place(self) -> StepCount:
        return self._taken, self._stepped

    @property
    def has_begun(self) -> bool:
        """Whether the ranks have agreed on a step of a plain optimizer."""
        return self._seen > 0

    @property
    def num_untaken(self) -> int:
        """Number of agreements seen whose steps this rank has not taken."""
        return self._seen - self._taken

    @property
    def is_watching(self) -> bool:
        return bool(self._watched)

    def begin(self) -> None:
        """The function begins to run, and will make its optimizers."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._watched = [], []

    def continue_at(self, number: int) -> None:
        """All ranks have taken over the state of a rank that had taken this step."""
        self._seen = self._taken = self._stepped = number
        self._agreed = None

    def watch(self, entry: Registered) -> None:
        optimizer = entry.object
        if not _is_plain(optimizer):
            return
        watched = _Watched(entry.name, weakref.ref(optimizer))
        self._watched.append(watched)
        # A weak reference, because an optimizer may live on in a later run (`ctx.keep`).
        mine = weakref.ref(self)

        def before(*_: Any) -> None:
            watched.inside = 0

        def after(*_: Any) -> None:
            watched.inside = None
            if (steps := mine()) is not None:
                steps._has_stepped(watched)

        self._handles += [
            optimizer.register_step_pre_hook(before),
            optimizer.register_step_post_hook(after),
        ]

    def agreed(self, cursors: Cursors, iterations: list[int]) -> None:
        """The ranks have reduced a backward pass."""
        self._seen += 1
        self._agreed = cursors, iterations
        for one in self._watched:
            # A backward pass inside step() is a closure's.
            if one.inside is not None:
                one.inside += 1

    def _has_stepped(self, watched: _Watched) -> None:
        # No agreement since its last step: what it stepped with was this rank's own gradient.
        watched.is_apart |= watched.stepped_at == self._seen
        # Several optimizers that step after one agreement are one step.
        watched.stepped_at = self._stepped = self._seen
        self.take_over()

    def take_over(self) -> None:
        """This rank has the parameters that resulted from the last agreement."""
        if self._agreed is not None:
            (cursors, iterations), self._agreed = self._agreed, None
            # Before it is told: what is called next asks for the place.
            self._taken = self._seen
            self._on_taken(cursors, iterations)

    def why_not_again(self, registry: Registry, models: Iterable[ModelEngine]) -> str:
        """The reason why the function cannot run again from the top with these models; empty if it
        can."""
        registered = {id(entry.object) for entry in registry}
        for model in models:
            if id(model.wrapper) not in registered:
                return f"{_name(model)} is not registered (ctx.register)"
            # A sharded optimizer's state is kept by range, whatever the rank has done with it.
            if not model.reducer.is_sharded and (why := self._why_not_stepped(model)):
                return why
        return ""

    def _why_not_stepped(self, model: ModelEngine) -> str:
        reducer = model.reducer
        # The function runs again from the parameters of any surviving rank: so all have the same.
        if reducer.hook is not None and reducer.hook.trains_apart:
            return (
                f"{_name(model)} has the communication hook {reducer.hook.name}, with which each "
                "rank has parameters of its own, and those of a lost rank are gone"
            )
        if not reducer.ends_steps:
            return (
                f"the ZeroRedundancyOptimizer of {_name(model)} gives each rank whole parameters, "
                "as Muon needs them, and keeps no replicas of their state"
            )
        # Only a registered optimizer is watched: of another nobody knows whether it has stepped.
        steps_it: dict[int, _Watched] = {}
        for watched in self._watched:
            optimizer = watched.optimizer()
            for group in optimizer.param_groups if optimizer is not None else ():
                steps_it.update((id(parameter), watched) for parameter in group["params"])
        for name, parameter in zip(reducer.gradients.names, reducer.parameters, strict=True):
            if not parameter.requires_grad:
                continue
            stepping = steps_it.get(id(parameter))
            if stepping is None:
                return (
                    f"no registered optimizer has parameter {name} of {_name(model)}; register the "
                    "optimizer that steps it (ctx.register), or, if none does, freeze it with "
                    "requires_grad_(False)"
                )
            if stepping.is_apart:
                return (
                    f"optimizer {stepping.name!r} has stepped {_name(model)} with gradients that "
                    "were not reduced (two steps without a backward pass outside no_sync() between "
                    "them), so each rank has parameters of its own, and those of a lost rank are "
                    "gone"
                )
            # Only a closure runs a backward pass inside step().
            if stepping.inside:
                return (
                    f"optimizer {stepping.name!r} was interrupted inside step(), after an earlier "
                    "call of its closure, so it may have changed the parameters already, as LBFGS "
                    "does"
                )
        return ""


def _is_plain(stateful: object) -> TypeGuard[torch.optim.Optimizer]:
    # A wrapper such as PostLocalSGDOptimizer has no hooks of its own: its inner optimizer has them.
    return (
        isinstance(stateful, torch.optim.Optimizer)
        and not isinstance(stateful, Joinable)
        and hasattr(stateful, "_optimizer_step_post_hooks")
    )


def _name(model: ModelEngine) -> str:
    return f"the DistributedDataParallel over {type(model.module).__name__}"
