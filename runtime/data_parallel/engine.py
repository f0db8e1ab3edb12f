"""The engine of a model: the interface for recovery, sharded optimizers and checkpoints.

A user holds, calls and joins a `DistributedDataParallel`, which has torch's public names and a few
more. All other operations on a model (reduce more parameters, continue in another group, end a step
once more) are methods of its engine, which the rest of the package uses.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Sequence

import torch
from torch._compile import _disable_dynamo

from chorusline.collectives import Group
from chorusline.collectives.contract.errors import named

from ..join.join import Joinable, JoinEngine
from ..join.pass_pattern import PassPattern
from ..process.between_runs import between_runs
from ..process.running import recovery_of
from .buffers import Buffers
from .gradients.gradient_bucket import GradientBucket
from .gradients.held_gradients import Habits
from .gradients.reducer import Reducer
from .model_steps import ModelSteps, StepEnder
from .same_model import broadcast_tensors, check_devices, check_same_model
from .sync_batch_norm import SyncBatchNorm
from .unreduced_steps import UnreducedSteps


def owner_of(parameters: Sequence[torch.Tensor]) -> ModelEngine | None:
    """The engine whose module has all these parameters and which reduces no others, or None."""
    engines = between_runs().engines
    references = [reference for p in parameters if (reference := engines.get(p))]
    owner: ModelEngine | None = references[0]() if references else None
    if owner is None:
        return None
    given = {id(p) for p in parameters}
    reduced = {id(p) for p in owner.reducer.parameters}
    # Beside what is reduced, parameters of the module may be given that are frozen so far.
    return owner if reduced <= given <= {id(p) for p in owner.module.parameters()} else None


def reducers_of(parameters: Sequence[torch.Tensor]) -> list[Reducer]:
    """What reduces the gradients of these parameters, of whichever models; nothing if one of them
    is in no model."""
    known = between_runs().engines
    engines = [reference() if (reference := known.get(p)) else None for p in parameters]
    reducers = [engine.reducer for engine in engines if engine is not None]
    return list(dict.fromkeys(reducers)) if len(reducers) == len(parameters) else []


def names_of(parameters: Sequence[torch.Tensor]) -> dict[int, str]:
    """By id(), the names of all parameters of the models that reduce any of `parameters`."""
    known = between_runs().engines
    engines = {id(r): r() for p in parameters if (r := known.get(p))}
    return {
        id(parameter): name
        for engine in engines.values()
        if engine is not None
        for name, parameter in engine.module.named_parameters()
    }


@_disable_dynamo
def _has_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Called after each step of an optimizer in this process: the models whose parameters it has
    note that, if their ranks step by themselves."""
    groups = optimizer.param_groups
    known = between_runs().stepped_by.get(optimizer)
    num_parameters = sum([len(options["params"]) for options in groups])
    # A group may have been added since; to compare all parameters would cost time in each step.
    if known is None or known[0] != num_parameters:
        known = between_runs().stepped_by[optimizer] = num_parameters, _models_of(optimizer)
    for reference, numbers in known[1]:
        engine = reference()
        if engine is None or not engine.reducer.ends_steps:
            continue
        # Without a gradient a step changes nothing, and no rank need take it.
        if any(p.grad is not None for number in numbers for p in groups[number]["params"]):
            engine.has_stepped(optimizer, numbers)


def _models_of(
    optimizer: torch.optim.Optimizer,
) -> list[tuple[weakref.ref[ModelEngine], list[int]]]:
    """The engines whose models have parameters of the optimizer, and the groups that hold them."""
    engines = between_runs().engines
    found: dict[int, tuple[weakref.ref[ModelEngine], list[int]]] = {}
    for number, options in enumerate(optimizer.param_groups):
        references = {id(r): r for p in options["params"] if (r := engines.get(p))}
        for key, reference in references.items():
            found.setdefault(key, (reference, []))[1].append(number)
    return [*found.values()]


class ModelEngine:
    """The engine of one model on one rank.

    wrapper: the model as the user holds, registers and joins it.
    module: the module that the model wraps.
    reducer: reduces the gradients of the module.
    broadcast_buffers: whether all ranks copy the buffers of one rank after each step.
    """

    def __init__(
        self,
        wrapper: Joinable,
        module: torch.nn.Module,
        reducer: Reducer,
        *,
        broadcast_buffers: bool,
    ) -> None:
        self.wrapper = wrapper
        self.module = module
        self.reducer = reducer
        self.recovery = recovery_of(reducer.group)
        """Takes the model to the next generation; None without recovery, and after the run."""
        is_kept = self.recovery is not None
        self.buffers = Buffers(module, travel=broadcast_buffers, is_kept=is_kept)
        self.steps = ModelSteps(module, reducer, self._begin_step, buffers_travel=broadcast_buffers)
        """The model in the steps of `ctx.steps`."""
        self._frozen = [p for p in module.parameters() if not p.requires_grad]
        self._sharded_by: weakref.ref[object] | None = None  # None: by no optimizer
        self._own(reducer.parameters)
        between_runs().watch(_has_stepped)
        self._num_registrations = -1
        of_group = between_runs().of_group(reducer.group)
        of_group.num_models += 1
        reducer.number = of_group.num_models - 1
        self._unreduced = UnreducedSteps(reducer.gradients, of_group.num_models)
        between_runs().wrap(self)
        between_runs().models.append(weakref.ref(self))
        if self.recovery is not None:
            self.recovery.watch_model(self)

    @property
    def group(self) -> Group:
        return self.reducer.group

    def _own(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        for parameter in parameters:
            between_runs().engines[parameter] = weakref.ref(self)
        between_runs().stepped_by.clear()

    @property
    def habits(self) -> tuple[PassPattern | None, Habits]:
        """What the steps of the model usually are: how many passes they have, as its Joins have
        seen it (None before one), and when the program clears the gradients."""
        return copy.copy(self.wrapper._pattern), self.reducer.held.habits

    @habits.setter
    def habits(self, habits: tuple[PassPattern | None, Habits]) -> None:
        self.wrapper._pattern, self.reducer.held.habits = copy.copy(habits[0]), habits[1]

    # -- parameters ------------------------------------------------------------------------------

    def check_has(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Raises ValueError for a parameter that the module does not have."""
        own = {id(p) for p in self.module.parameters()}
        for parameter in parameters:
            if id(parameter) not in own:
                raise ValueError(
                    f"a parameter of shape {tuple(parameter.shape)} does not belong to the "
                    "module, so its gradient would not be reduced. Register it in the module, or "
                    "give it an optimizer of its own"
                )

    def reduce_also(self, parameters: Sequence[torch.nn.Parameter]) -> list[GradientBucket]:
        """Reduce the gradients of these parameters too; all ranks call it with the same ones.

        parameters: of the module, with requires_grad. Those that the reducer does not have yet
        start from rank 0's values, and their buckets are returned.

        Raises ValueError for a parameter that the module does not have; CollectiveMismatch, on all
        ranks, if the parameters of the ranks differ.
        """
        self.check_has(parameters)
        names = {id(p): name for name, p in self.module.named_parameters()}
        known = {id(p) for p in self.reducer.parameters}
        fresh = [p for p in parameters if id(p) not in known]
        if not fresh:
            return []
        named = [(names[id(p)], p) for p in fresh]
        check_devices(named, self.group)
        # Before the broadcast, so that the error names the parameter that differs.
        check_same_model("DistributedDataParallel", named, self.group)
        broadcast_tensors([p.detach() for p in fresh], 0, self.group)
        self._own(fresh)
        taken = {id(p) for p in fresh}
        self._frozen = [p for p in self._frozen if id(p) not in taken]
        return self.reducer.add_parameters(named)

    def reduce_unfrozen(self) -> None:
        """Reduce parameters too that were frozen when the model was wrapped, and no longer are."""
        # An optimizer that shards the gradients adds them itself, since it lays out its shards.
        if self._frozen and not self.reducer.is_sharded:
            self.reduce_also([p for p in self._frozen if p.requires_grad])

    def why_thawed(self) -> str:
        """Names the parameters that are trainable, and that nothing reduces or steps; empty if the
        sharded optimizer has all that it steps next."""
        thawed = {id(p) for p in self._frozen if p.requires_grad}
        if not thawed:
            return ""
        names = [name for name, p in self.module.named_parameters() if id(p) in thawed]
        return (
            "parameters that were frozen when the module was wrapped are trainable now "
            f"({named(names, 3)}), but the model's "
            "ZeroRedundancyOptimizer does not have them. Call optimizer.add_param_group("
            "{'params': [...]}) on all ranks when you thaw them, or make the optimizer with all "
            "parameters, ZeroRedundancyOptimizer(model.parameters(), ...): those that are frozen "
            "are stepped when they are thawed"
        )

    def reduce_grown(self) -> None:
        """Reduce the parameters too that the module has got since it was wrapped. Collective, if
        there are any: every rank grows its module before the same forward pass.

        Raises RuntimeError inside a Join, and if a sharded optimizer has not got them.
        """
        num_registrations = between_runs().num_registrations
        # Nothing in this process was registered: the usual case, in each forward pass.
        if num_registrations == self._num_registrations:
            return
        self._num_registrations = num_registrations
        known = {id(p) for p in (*self.reducer.parameters, *self._frozen)}
        fresh = {name: p for name, p in self.module.named_parameters() if id(p) not in known}
        self._frozen += [p for p in fresh.values() if not p.requires_grad]
        grown = {name: p for name, p in fresh.items() if p.requires_grad}
        if not grown:
            return
        self._num_registrations = -1  # Until they are reduced, each forward pass refuses them.
        names = named(list(grown), 3)
        living = {id(p) for p in self.module.parameters()}
        if any(id(p) not in living for p in self.reducer.parameters):
            raise RuntimeError(
                f"parameters of the module ({names}) were replaced since it was wrapped, as "
                "load_state_dict(assign=True) does, but the optimizer and the reduction still "
                "use the former ones. Load with assign=False, which copies into them, or assign "
                "before DistributedDataParallel(module)"
            )
        if self.reducer.is_sharded:
            raise RuntimeError(
                f"the module has new parameters since it was wrapped ({names}) that its "
                "ZeroRedundancyOptimizer does not step, so the ranks would drift apart. Call "
                "optimizer.add_param_group({'params': [...]}) on all ranks before the next "
                "forward pass"
            )
        if self.wrapper._join is not None:
            raise RuntimeError(
                f"the module has new parameters ({names}) inside a Join, but a rank that has run "
                "out of data does not run the code that makes them. Add them outside of the "
                "Join, on all ranks"
            )
        self.reduce_also(list(grown.values()))
        self._num_registrations = num_registrations

    # -- steps -----------------------------------------------------------------------------------

    def has_stepped(self, optimizer: torch.optim.Optimizer, groups: Sequence[int]) -> None:
        """A plain optimizer has stepped, with `groups` of its parameters in this model."""
        self.reducer.has_stepped(optimizer, groups)
        # What is in no_sync is this rank's own as well, and the vote after it says so.
        if not (self.reducer.has_leftover or self.steps.plan is not None):
            self._unreduced.note(optimizer, self.reducer.num_passes, self.group)

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The plain optimizers with parameters of this model that have stepped on this rank."""
        stepped = between_runs().stepped_by.items()
        return [one for one, (_, models) in stepped if any(ref() is self for ref, _ in models)]

    def leave_steps_to_optimizer(self, optimizer: object, ender: StepEnder | None) -> None:
        """A sharded optimizer ends the steps from now on; a step counts after its ballot. ender:
        the optimizer, if it takes the sums of the gradients in shards."""
        self._sharded_by = weakref.ref(optimizer)
        self.reducer.ends_steps = False
        self.steps.ender = ender
        self.buffers.count_when_agreed = True

    def is_sharded_by(self, optimizer: object) -> bool:
        """Whether no other sharded optimizer has been made over the model since this one."""
        return self._sharded_by is not None and self._sharded_by() is optimizer

    def _begin_step(self) -> None:
        """A step of `ctx.steps` begins. On each rank, even if it gets no micro-batch of it."""
        self.buffers.begin_forward()
        self.reduce_unfrozen()
        self.reduce_grown()

    def sync_buffers(
        self, live: tuple[int, ...], join: JoinEngine | None, *, on_host: bool = False
    ) -> bool:
        """Copy the buffers of rank 0, or inside a Join of a rank that had the newest batch.

        on_host: also on a GPU, return when it is known that the buffers have come.
        Returns whether any were sent.
        """
        if self.steps.is_under_way:  # All ranks have those of the last micro-batch already.
            self.steps.buffers.commit()
            return self.buffers.sync(None, self.group)
        root = None
        if live:
            root = join.newest_rank(live) if join else 0
        return self.buffers.sync(root, self.group, on_host=on_host)

    @property
    def has_whole_gradients(self) -> bool:
        """Whether the operations have succeeded on whose results this rank's gradients may depend:
        statistics of layers, and what the program itself communicates. Asked when a generation
        has ended: on a GPU the passes went through, even if one was stopped and left anything."""
        norms = [layer for layer in self.module.modules() if isinstance(layer, SyncBatchNorm)]
        groups = [self.group, *(norm.group for norm in norms if norm.group is not None)]
        return not any(group.has_misled for group in groups)

    # -- from one generation, and one run, to the next -------------------------------------------

    def change_group(self, group: Group) -> None:
        """Continue as a rank of another group, also inside a sharded step."""
        if self.group is not group:  # Else its sharded optimizer has changed it.
            self.reducer.change_group(group)

    def move_to(self, group: Group) -> None:
        """Continue in a group of the same ranks, at the beginning of a step."""
        self.reducer.move_to(group)

    def leave_run(self) -> None:
        """Called when the run that made the model is over, and so is its recovery."""
        self.recovery = None
        self.buffers.drop_kept()
        self.reducer.parks = False
        self.reducer.tell_no_samples()
        self.reducer.loosen()

    def release(self) -> None:
        """Stop reducing gradients, so that another model can wrap the same module."""
        self.reducer.release()
        between_runs().drop_model(self)
        engines = between_runs().engines
        for parameter in self.reducer.parameters:
            # Another model may wrap the same module already.
            if parameter in engines and engines[parameter]() is self:
                del engines[parameter]
        between_runs().stepped_by.clear()

    def let_go(self) -> None:
        """Called when the train function was left in the middle of a step: it begins again, perhaps
        with the same module, which must hold no gradients."""
        self.release()
        self.reducer.gradients.drop()
