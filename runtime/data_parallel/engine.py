"""The engine of a model: what recovery, sharded optimizers and checkpoints do with it.

A user holds, calls and joins a `DistributedDataParallel`, whose public names are torch's and a few
more. Everything else that a model can do (reduce more parameters, go on in another group, end a
step once more) is in its engine, which the rest of the package is handed.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch.utils.weak import WeakIdKeyDictionary

from collectives import Group

from ..join.join import Join, Joinable
from ..process.between_runs import between_runs
from ..process.running import recovery_of
from .buffers import Buffers
from .gradient_bucket import GradientBucket
from .reducer import Reducer
from .same_model import broadcast_tensors, check_devices, check_same_model

_engines: WeakIdKeyDictionary = WeakIdKeyDictionary()  # parameter -> weak reference to its engine


def owner_of(parameters: Sequence[torch.Tensor]) -> ModelEngine | None:
    """The engine whose model has all these parameters and reduces no others, if there is one."""
    references = [reference for p in parameters if (reference := _engines.get(p))]
    owner: ModelEngine | None = references[0]() if references else None
    if owner is None:
        return None
    given = {id(p) for p in parameters}
    reduced = {id(p) for p in owner.reducer.parameters}
    return owner if reduced <= given <= {id(p) for p in owner.module.parameters()} else None


def names_of(parameters: Sequence[torch.Tensor]) -> dict[int, str]:
    """By id(), the names that modules give their parameters; for those that some engine reduces."""
    engines = {id(r): r() for p in parameters if (r := _engines.get(p))}
    return {
        id(parameter): name
        for engine in engines.values()
        if engine is not None
        for name, parameter in engine.module.named_parameters()
    }


class ModelEngine:
    """The engine of one model on one rank.

    face: the model as the user holds, registers and joins it.
    module: what it wraps.
    broadcast_buffers: whether all ranks take over the buffers of one after each step.
    """

    def __init__(
        self,
        face: Joinable,
        module: torch.nn.Module,
        reducer: Reducer,
        *,
        broadcast_buffers: bool,
    ) -> None:
        self.face = face
        self.module = module
        self.reducer = reducer
        self.recovery = recovery_of(reducer.group)
        """What takes the model from one generation of its run to the next; None where nothing does,
        and when the run is over."""
        is_kept = self.recovery is not None
        self.buffers = Buffers(module, travel=broadcast_buffers, is_kept=is_kept)
        self._frozen = [p for p in module.parameters() if not p.requires_grad]
        self._own(reducer.parameters)
        between_runs().wrap(self)
        if self.recovery is not None:
            self.recovery.watch_model(self)

    @property
    def group(self) -> Group:
        return self.reducer.group

    def _own(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        for parameter in parameters:
            _engines[parameter] = weakref.ref(self)

    # -- parameters ------------------------------------------------------------------------------

    def check_has(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Raises ValueError for a parameter that is none of the module's."""
        own = {id(p) for p in self.module.parameters()}
        for parameter in parameters:
            if id(parameter) not in own:
                raise ValueError(
                    f"a parameter of shape {tuple(parameter.shape)} is none of the module's, so "
                    "nothing would reduce its gradient. Register it in the module, or give it an "
                    "optimizer of its own"
                )

    def reduce_also(self, parameters: Sequence[torch.nn.Parameter]) -> list[GradientBucket]:
        """Reduce the gradients of these too, from now on; every rank calls it alike.

        parameters: of the module, with gradients required; they start from rank 0's values, and
        those that are reduced already stay as they are. Returns the buckets of the others.

        Raises ValueError for a parameter that the module does not have; CollectiveMismatch, on all
        ranks, if theirs differ.
        """
        self.check_has(parameters)
        names = {id(p): name for name, p in self.module.named_parameters()}
        known = {id(p) for p in self.reducer.parameters}
        fresh = [p for p in parameters if id(p) not in known]
        if not fresh:
            return []
        named = [(names[id(p)], p) for p in fresh]
        check_devices(named, self.group)
        check_same_model("DistributedDataParallel", named, self.group)
        broadcast_tensors([p.detach() for p in fresh], 0, self.group)
        self._own(fresh)
        taken = {id(p) for p in fresh}
        self._frozen = [p for p in self._frozen if id(p) not in taken]
        return self.reducer.add_parameters(named)

    def reduce_unfrozen(self) -> None:
        """Take up parameters that were frozen when the model was wrapped and are no more."""
        # An optimizer that shards the gradients takes them up itself, and lays out its shards.
        if self._frozen and not self.reducer.is_sharded:
            self.reduce_also([p for p in self._frozen if p.requires_grad])

    # -- steps -----------------------------------------------------------------------------------

    def leave_steps_to_optimizer(self) -> None:
        """From now on a sharded optimizer ends the steps, which count once it has held a ballot."""
        self.reducer.ends_steps = False
        self.buffers.count_when_agreed = True

    def sync_buffers(self, live: tuple[int, ...], join: Join | None) -> None:
        """Take over the buffers of one of the ranks that took this step: rank 0, or inside a Join
        one that saw the last batch of it."""
        root = None
        if live:
            root = join.newest_rank(live) if join else 0
        self.buffers.sync(root, self.group)

    # -- from one generation, and one run, to the next -------------------------------------------

    def change_group(self, group: Group) -> None:
        """Go on as a rank of another group, also inside a sharded step."""
        if self.group is not group:  # Else its sharded optimizer has taken the gradients along.
            self.reducer.change_group(group)

    def move_to(self, group: Group) -> None:
        """Go on in a group of the same ranks, at the beginning of a step."""
        self.reducer.move_to(group)

    def leave_run(self) -> None:
        """The run in which the model was made is over, and so is its recovery."""
        self.recovery = None
        self.buffers.drop_kept()
        self.reducer.parks = False
        self.reducer.tell_no_samples()

    def release(self) -> None:
        """Reduce no gradients any more, so that another model can be made of the same module."""
        self.reducer.release()
        for parameter in self.reducer.parameters:
            if _engines.get(parameter) is not None and _engines[parameter]() is self:
                del _engines[parameter]

    def let_go(self) -> None:
        """The function that has made the model was left in the middle of a step, and begins anew,
        perhaps with the same module."""
        self.release()
        self.reducer.gradients.drop()
