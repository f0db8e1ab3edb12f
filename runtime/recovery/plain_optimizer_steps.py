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

An optimizer whose parameters are sharded over ranks (fully_sharded.py) has no such last bucket. Its
ranks agree in a vote of its own, at the beginning of `optimizer.step()`. There is no whole copy of
the parameters to take over, so a vote that any rank has seen counts for all, as that of a
ZeroRedundancyOptimizer: the others have their shard of the gradient, and take the step.

Several optimizers of whole parameters that step with one backward pass count as one. If each has a
backward pass of its own, a loss may come between the two steps: then these samples skip the second
step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch.utils.hooks import RemovableHandle

from chorusline.actors.messages.messages import OptimizerProgress

from ..data_parallel.distributed_data_parallel import ModelEngine, engines_of
from ..join.engine import Joinable
from ..process.agreement import MAX_ITERATIONS
from ..process.between_runs import between_runs
from ..process.registry import Registered, Registry
from ..process.sharded_tensors import steps_shards

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
    has_closure: `step` was called with one, whose first pass comes before any change.
    is_sharded: its ranks agree at the beginning of `step`.
    is_apart: it has stepped twice without an agreement in between.
    num_groups: of its parameters, when it was registered.
    is_own: it was registered with per_rank=True.
    before: the handle of our hook before `step`. None: it is being made.
    """

    name: str
    optimizer: weakref.ref[torch.optim.Optimizer]
    num_groups: int
    is_own: bool
    before: RemovableHandle | None = None
    stepped_at: int = -1
    inside: int | None = None
    has_closure: bool = False
    is_sharded: bool = False
    is_apart: bool = False

    @property
    def was_interrupted(self) -> bool:
        """Whether it has left `step` by an error, and may have changed parameters before."""
        # A vote, or the first pass of a closure, comes before any change.
        return self.inside is not None and (
            self.inside > 0 or not (self.is_sharded or self.has_closure)
        )


class PlainSteps:
    """Counts the steps of plain optimizers on one rank, for one run.

    on_taken: called when a step counts, with the agreement's cursors and the numbers of their
        iterations (Dealer.inside).
    vote: called at the beginning of a step of an optimizer whose parameters are sharded.
    """

    def __init__(self, on_taken: OnTaken, vote: Callable[[], None] = lambda: None) -> None:
        self._on_taken = on_taken
        self._vote = vote
        self._payload: tuple[float, ...] = ()
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
    def num_seen(self) -> int:
        """Number of agreements seen."""
        return self._seen

    @property
    def num_untaken(self) -> int:
        """Number of agreements seen whose steps this rank has not taken."""
        return self._seen - self._taken

    @property
    def is_watching(self) -> bool:
        return bool(self._watched)

    @property
    def votes(self) -> tuple[OptimizerProgress, ...]:
        """The votes on steps of sharded parameters that this rank has seen; empty if no registered
        optimizer has such parameters."""
        if not any(one.is_sharded for one in self._watched):
            return ()
        return (OptimizerProgress(self._seen, self._payload),)

    def catch_up(self, votes: OptimizerProgress, iterations: list[int]) -> None:
        """Other ranks may have seen a vote that this one, which is in it, has not."""
        if votes.ballots > self._seen:
            self.voted(votes.payload, iterations)

    def voted(self, payload: tuple[float, ...], iterations: list[int]) -> None:
        """The ranks have agreed on a step of sharded parameters. payload: by rank, what `vote` has
        sent."""
        self._payload = payload
        self.agreed(rows_of(payload)[1], iterations)

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
        """Raises ValueError for a second optimizer whose parameters are sharded."""
        optimizer = entry.object
        if not is_plain(optimizer):
            return
        sharded = steps_shards(optimizer)
        first = next((one for one in self._watched if one.is_sharded), None)
        if sharded and first is not None:
            raise ValueError(
                f"optimizers {first.name!r} and {entry.name!r} both step sharded parameters, and "
                "each counts its steps by itself: a worker that is lost between the two would cost "
                "the second one its step. Give all these parameters to parameter groups of one "
                "optimizer"
            )
        watched = _Watched(
            entry.name,
            weakref.ref(optimizer),
            len(optimizer.param_groups),
            entry.per_rank,
            is_sharded=sharded,
        )
        self._watched.append(watched)
        # A weak reference, because an optimizer may live on in a later run (`ctx.keep`).
        mine = weakref.ref(self)

        def before(_: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
            watched.inside = 0
            watched.has_closure = any(callable(one) for one in (*args, kwargs.get("closure")))
            if watched.is_sharded and (steps := mine()) is not None:
                if watched.has_closure:
                    raise RuntimeError(
                        f"optimizer {watched.name!r} steps sharded parameters with a closure, and "
                        "the ranks agree on a step before it begins; call the closure first, and "
                        "then step() without it"
                    )
                steps._vote()

        def after(*_: Any) -> None:
            # torch calls the hooks for the step of a derived class, and for that of its base which
            # it calls, if there is an optimizer of the base, too: the inner one is over already.
            if watched.inside is None:
                return
            watched.inside = None
            if (steps := mine()) is not None:
                steps._has_stepped(watched)

        watched.before = optimizer.register_step_pre_hook(before)
        self._handles += [watched.before, optimizer.register_step_post_hook(after)]

    def agreed(self, cursors: Cursors, iterations: list[int]) -> None:
        """The ranks have reduced a backward pass."""
        self._seen += 1
        self._agreed = cursors, iterations
        for one in self._watched:
            # A backward pass inside step() is a closure's.
            if one.inside is not None:
                one.inside += 1
            # A rank that is lost in a collective of another hook has yet to begin the step.
            elif (optimizer := one.optimizer()) is not None and one.before is not None:
                optimizer._optimizer_step_pre_hooks.move_to_end(one.before.id)  # type: ignore[attr-defined]

    def _has_stepped(self, watched: _Watched) -> None:
        # One of a net that only this rank has does not take the step of the model.
        if watched.is_own and not engines_of(_parameters_of(watched.optimizer())):
            return
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

    def why_regrouped(self) -> str:
        """Says that the function would begin again with fewer groups than the kept state has; empty
        if it would not."""
        for one in self._watched:
            optimizer = one.optimizer()
            if optimizer is not None and len(optimizer.param_groups) != one.num_groups:
                return (
                    f"optimizer {one.name!r} has got parameter groups by add_param_group() since "
                    "it was registered, and begins again without them. Give it all parameters when "
                    "it is made (those that are frozen are not stepped), or use a "
                    "ZeroRedundancyOptimizer, whose groups come back"
                )
        return ""

    def why_not_again(self, registry: Registry, models: Iterable[ModelEngine]) -> str:
        """The reason why the function cannot run again from the top with these models; empty if it
        can."""
        registered = {id(entry.object) for entry in registry}
        for entry in registry:
            if any(p in between_runs().averaged for p in _parameters_of(entry.object)):
                return (
                    f"model averaging takes the mean of parameters of {entry.name!r}, and between "
                    "two averages each rank has parameters of its own, and those of a lost rank "
                    "are gone"
                )
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
        parameters = zip(reducer.gradients.names, reducer.parameters, strict=True)
        return self.why_not_stepped(_name(model), parameters)

    def why_not_stepped(self, model: str, parameters: Iterable[tuple[str, torch.Tensor]]) -> str:
        """The reason why the function cannot run again with these parameters of a model."""
        # Only a registered optimizer is watched: of another nobody knows whether it has stepped.
        steps_it: dict[int, _Watched] = {}
        for watched in self._watched:
            optimizer = watched.optimizer()
            for group in optimizer.param_groups if optimizer is not None else ():
                steps_it.update((id(parameter), watched) for parameter in group["params"])
        for name, parameter in parameters:
            if not parameter.requires_grad:
                continue
            stepping = steps_it.get(id(parameter))
            if stepping is None:
                return (
                    f"no registered optimizer has parameter {name} of {model}; register the "
                    "optimizer that steps it (ctx.register), or, if none does, freeze it with "
                    "requires_grad_(False)"
                )
            if stepping.is_apart:
                return (
                    f"optimizer {stepping.name!r} has stepped {model} with gradients that "
                    "were not reduced (two steps without a backward pass outside no_sync() between "
                    "them), so each rank has parameters of its own, and those of a lost rank are "
                    "gone"
                )
            if stepping.was_interrupted and not stepping.has_closure:
                return (
                    f"optimizer {stepping.name!r} was interrupted inside step(), as by a "
                    "collective of its own or of a hook, so it may have changed some of its "
                    "parameters already"
                )
            if stepping.was_interrupted:
                return (
                    f"optimizer {stepping.name!r} was interrupted inside step(), after an earlier "
                    "call of its closure, so it may have changed the parameters already, as LBFGS "
                    "does"
                )
        return ""


def rows_of(payload: Sequence[float]) -> tuple[bool, Cursors]:
    """Whether some rank was asked to stop, and the cursors by rank, in a vote on a step of sharded
    parameters: of each rank MAX_ITERATIONS cursors, and whether it was asked."""
    rows = [
        [int(number) for number in payload[at : at + 1 + MAX_ITERATIONS]]
        for at in range(0, len(payload), 1 + MAX_ITERATIONS)
    ]
    return any(row[0] for row in rows), tuple(tuple(row[1:]) for row in rows)


def is_plain(stateful: object) -> TypeGuard[torch.optim.Optimizer]:
    """Whether it is an optimizer of torch that each rank steps by itself, and that has hooks."""
    # A wrapper such as PostLocalSGDOptimizer has no hooks of its own: its inner optimizer has them.
    return (
        isinstance(stateful, torch.optim.Optimizer)
        and not isinstance(stateful, Joinable)
        and hasattr(stateful, "_optimizer_step_post_hooks")
    )


def _parameters_of(thing: object) -> list[torch.Tensor]:
    """Those of a module or an optimizer; empty for anything else."""
    if isinstance(thing, torch.nn.Module):
        return [*thing.parameters()]
    groups = thing.param_groups if isinstance(thing, torch.optim.Optimizer) else ()
    return [parameter for group in groups for parameter in group["params"]]


def _name(model: ModelEngine) -> str:
    return f"the DistributedDataParallel over {type(model.module).__name__}"
