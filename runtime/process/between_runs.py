"""What stays on a rank from one run to the next: objects by name, places in loops, wrapped models.

    objects   what `ctx.keep` made; also the namespace of `%%ranks`.
    places    where each loop over `ctx.epochs(..., resume=name)` was left.
    wrapped   living models and sharded optimizers: when a generation has ended, they move to the
              group of the next one, if its ranks are the same.
    engines   which model reduces the gradient of a parameter.
    of_group  what is known of a group, which may serve several runs.
    world     torch's default process group, if a run has made it.
    verdicts  how finely the state of an optimizer class may be cut.

A process has one BetweenRuns, since a worker process serves one rank of one session.

An aborted run may have ended inside a step: some ranks have applied it and others have not, or the
parameters were not gathered. Each rank counts the steps that it began to apply, and marks a step
that it did not finish. So `keep` can refuse objects in such a state.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary

from chorusline.collectives.group import Group
from chorusline.collectives.stores.torch_store import TorchStore


class OfGroup:
    """What is known of a group in all runs that it serves."""

    def __init__(self) -> None:
        self.num_saves = 0
        """The number of checkpoints saved in it, for the names of their keys in the store."""
        self.num_models = 0
        """The number of models wrapped in it, for the names of their keys in the store."""
        self.num_optimizers = 0
        """The number of sharded optimizers made in it."""
        self.ended_saves: list[str] = []
        """The prefixes of the keys of saves whose outcome stands, which are still in the store."""
        self.over_key = ""
        """By which this rank has said that the function of the last run is over."""
        self.beside: weakref.ref[Group] | None = None
        """The second group of its ranks (data_parallel/sync_batch_norm.py). The reference is weak,
        since a group refers to the groups made from it, and they refer to it. None: not made."""


class Wrapped(Protocol):
    """An object that holds a group and can move to another one of the same ranks."""

    @property
    def group(self) -> Group: ...

    def move_to(self, group: Group) -> None:
        """Continue in `group` at the beginning of a step; drop the gradients of an unfinished
        step."""

    def leave_run(self) -> None:
        """The run that used the object is over: forget that run's recovery. If a later run uses the
        object and loses a worker inside a step, that run ends."""


@dataclass(frozen=True, slots=True)
class LoopPlace:
    """Where a rank left a loop over `ctx.epochs(..., resume=name)`. The next run may have other
    ranks, and asks each of them whose place it has kept.

    epoch: the epoch in progress or, between two, the next one.
    seat: the rank, and the number of ranks; None if no step of the epoch was agreed on.
    was_live: whether the rank had data for the epoch's last step.
    iterations: the iterations of the epoch (Cursor.state).
    """

    epoch: int = 0
    seat: tuple[int, int] | None = None
    was_live: bool = False
    iterations: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        within = " as rank {} of {}".format(*self.seat) if self.seat else ""
        return f"{self.epoch}{within}"


@dataclass
class World:
    """torch's default process group, if `ctx.init_torch_distributed` has made it.

    group: the group of its ranks.
    environment: the former values of the environment variables that describe it.
    """

    process_group: object
    group: Group
    store: TorchStore
    environment: dict[str, str | None]


class BetweenRuns:
    """All that stays on this rank. No method runs a collective."""

    def __init__(self) -> None:
        self.objects: dict[str, Any] = {}
        self.places: dict[str, LoopPlace] = {}
        self._wrapped: weakref.WeakSet[Any] = weakref.WeakSet()
        self.num_optimizers = 0
        """How many sharded optimizers were made in this process."""
        self._group: Group | None = None  # None: before the first run
        self._made_at: dict[str, int] = {}  # by name: _num_steps when `keep` made the object
        self._num_steps = 0  # steps that this process began to apply
        self._is_applying = False
        self._torn_at = -1  # _num_steps at the last unfinished step
        self.engines = WeakIdKeyDictionary()
        """By parameter, a weak reference to the engine of the model that reduces its gradient."""
        self.averaged = WeakIdKeyDictionary()
        """The parameters that ranks train apart and average (averaging/model_averaging.py)."""
        self.models: list[weakref.ref[Any]] = []
        """The engines of models, in the order in which they were made."""
        self.num_registrations = 0
        """How often a module of this process got a parameter or a module, since the first model was
        wrapped: while it stays, no model has grown."""
        self.stepped_by: weakref.WeakKeyDictionary[torch.optim.Optimizer, Any] = (
            weakref.WeakKeyDictionary()
        )
        """By optimizer, the models whose parameters it steps (`ModelEngine`)."""
        self._watches = False
        self.verdicts: weakref.WeakKeyDictionary[type, dict[Hashable, Any]] = (
            weakref.WeakKeyDictionary()
        )
        """By class of optimizers, and by the options and shapes, the result of the trial
        (zero/shards/optimizer_trial.py)."""
        self.world: World | None = None
        """None without one. A function that has failed leaves it, and the next call ends it
        (torch_distributed.py)."""
        self._of_group: weakref.WeakKeyDictionary[Group, OfGroup] = weakref.WeakKeyDictionary()

    def enter(self, group: Group) -> None:
        """A run begins in `group`: move the objects of the last run's group to it."""
        before, self._group = self._group, group
        # The run before was aborted inside a step: this rank has applied it, or others have.
        if self._is_applying:
            self._torn_at, self._is_applying = self._num_steps, False
        # Objects of the run before must not ask its recovery, which has ended with it.
        for wrapped in list(self._wrapped):
            wrapped.leave_run()
        # The same workers in the same order: nothing moves.
        if before is None or before is group:
            return
        if (before.rank, before.size) != (group.rank, group.size):
            return  # Shards are cut for their rank. Using them raises an error on a closed group.
        for wrapped in [each for each in self._wrapped if each.group is before]:
            wrapped.move_to(group)

    def begin_again(self) -> None:
        """The function runs again from the top, in the same run. Drop what `keep` made, since some
        ranks may not have it; recovery restores the state of registered objects."""
        for name in tuple(self._made_at):
            self.forget((name,))  # One by one: `forget(())` would drop everything.
        self.places.clear()
        self._is_applying = False

    def follow(self, group: Group) -> None:
        """The run continues in another generation; recovery has moved the objects."""
        self._group = group

    def wrap(self, wrapped: Wrapped) -> None:
        if wrapped.group is self._group:  # Not the groups that the user made.
            self._wrapped.add(wrapped)
            self.num_optimizers += hasattr(wrapped, "num_steps")

    def models_of(self, group: Group) -> list[Any]:
        """The engines of the models that live in `group`, in the order of their making."""
        self.models = [reference for reference in self.models if reference() is not None]
        living = [reference() for reference in self.models]
        return [engine for engine in living if engine is not None and engine.group is group]

    def forget_dropped_models(self, group: Group) -> None:
        """Afterwards `models_of` gives the same models on all ranks: garbage is collected first."""
        # It takes tenths of a second; a single model is the one that the program has.
        if len(self.models_of(group)) > 1:
            gc.collect()

    def drop_model(self, engine: object) -> None:
        self.models = [reference for reference in self.models if reference() is not engine]

    def watch(self, on_step: Callable[[torch.optim.Optimizer], None]) -> None:
        """Count registrations from now on, and call `on_step` after each step of an optimizer."""
        # torch's hooks are those of the process, and stay: one registration serves all models.
        if not self._watches:
            self._watches = True
            register_module_parameter_registration_hook(self._has_registered)
            register_module_module_registration_hook(self._has_registered)
            register_optimizer_step_post_hook(lambda optimizer, *_: on_step(optimizer))

    def _has_registered(self, *_: object) -> None:
        self.num_registrations += 1

    def of_group(self, group: Group) -> OfGroup:
        return self._of_group.setdefault(group, OfGroup())

    def begin_applying(self, group: Group) -> None:
        """All ranks have agreed on a step, and this rank changes parameters next."""
        # A step in a group that the user has made says nothing of the objects of the run.
        if group is self._group:
            self._num_steps += 1
            self._is_applying = True

    def end_applying(self) -> None:
        self._is_applying = False

    def put(self, name: str, value: Any) -> None:
        self.objects[name] = value
        self._made_at[name] = self._num_steps

    def age_of(self, name: str) -> tuple[bool, int, bool]:
        """Whether the object is here, how many steps were begun since it was made, and whether one
        of them was not finished."""
        if name not in self.objects:
            return False, 0, False
        made_at = self._made_at.get(name, 0)
        return True, self._num_steps - made_at, self._torn_at > made_at

    def forget(self, names: tuple[str, ...]) -> None:
        """Drop these objects; without names drop everything, places too."""
        for name in names or tuple(self.objects):
            self.objects.pop(name, None)
            self._made_at.pop(name, None)
        if not names:
            self.places.clear()


_kept = BetweenRuns()


def between_runs() -> BetweenRuns:
    return _kept
