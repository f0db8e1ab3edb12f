"""The state of registered objects that a rank keeps while its function runs again from the top.

The function makes its objects again and registers them under the same names. Each object then takes
over the state of the one before it:

- a sharded optimizer takes its shards, from the ranks that keep them;
- a model, or an object that is equal on all ranks, takes the state of one rank, the *leader*;
- an object that is registered per rank takes the state of its own rank.

The leader is not a newcomer, and has taken the last step of a plain optimizer
(plain_optimizer_steps.py): the functions of other ranks may have been left in that step.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from chorusline.actors.messages.messages import OptimizerProgress
from chorusline.actors.parcels.pickling import pickled
from chorusline.collectives.group import Group
from chorusline.collectives.objects.blocking import broadcast_object

from ..checkpoint.contents import is_dense, loads_itself
from ..data_parallel.distributed_data_parallel import (
    DistributedDataParallel,
    engine_of,
    engines_of,
)
from ..data_parallel.gradients.held_gradients import ClearPattern
from ..data_parallel.same_model import broadcast_tensors
from ..join.pass_pattern import PassPattern
from ..process.between_runs import between_runs
from ..process.option_numbers import copied_options
from ..process.registry import Registered, Registry
from ..zero.digests.digest_checks import Correction
from ..zero.shards.shard_state import Inventory, Layout, ShardState
from ..zero.state_changes import Changes, dropped_by_some
from ..zero.zero_redundancy_optimizer import (
    Additions,
    ZeroRedundancyOptimizer,
    optimizer_engine_of,
)
from . import fully_sharded
from .module_flags import ModuleFlags
from .plain_optimizer_steps import StepCount

_MADE_OTHERWISE = (
    "a ZeroRedundancyOptimizer has other parameters, or in another order, than before its function "
    "was left, so it cannot take over the state. When the function begins again it has to make the "
    "same model, with the same parameters trainable, before DistributedDataParallel(module): set "
    "requires_grad of each of them there"
)


@dataclass(frozen=True, slots=True)
class OptimizerOptions:
    """The applied steps of a sharded optimizer, the options of its groups, its max_norm, what it
    has got since it was registered, and its corrections."""

    num_steps: int
    groups: list[dict[str, Any]]
    max_norm: float | None  # None: it does not clip
    additions: Additions
    corrections: Sequence[Correction] = ()

    @classmethod
    def of(cls, optimizer: ZeroRedundancyOptimizer) -> OptimizerOptions:
        groups = copied_options(optimizer.param_groups)
        additions, corrections = optimizer_engine_of(optimizer).additions, [*optimizer.corrections]
        return cls(optimizer.num_steps, groups, optimizer.max_norm, additions, corrections)

    def load(self, optimizer: ZeroRedundancyOptimizer) -> None:
        engine = optimizer_engine_of(optimizer)
        engine.take_additions(self.additions, self.groups)
        if len(optimizer.param_groups) != len(self.groups):
            raise RuntimeError(_MADE_OTHERWISE)
        optimizer.num_steps, optimizer.max_norm = self.num_steps, self.max_norm
        optimizer.corrections[:] = self.corrections
        engine.take_options(self.groups)


@dataclass(frozen=True, slots=True)
class RetainedOptimizer:
    """The kept state of a sharded optimizer. held: this rank's part of the state. changes: what the
    program has done to it on this rank since the last step. num_corrected: how often something was
    made right on this rank. The rest is equal on all ranks; but of ranks that were left while they
    laid out parameters some may have more."""

    held: ShardState
    changes: Changes
    num_corrected: int
    progress: OptimizerProgress
    layout: Layout
    options: OptimizerOptions


@dataclass(frozen=True, slots=True)
class Summary:
    """A rank's report on its kept state, for the other ranks, before the function runs again.

    was_there: the rank is not a newcomer that has yet to take its first step.
    place: position in the steps of plain optimizers.
    steps_taken: number of steps in the run, of all optimizers.
    held: by name of a sharded optimizer, the inventory of its state.
    data: position of the rank in its data (FunctionCall.data_state).
    shard: number of the shard of fully_shard's models that the rank has kept (fully_sharded.py).
    laid_out: by name of a sharded optimizer, how often its additions have laid out parameters.
    changes: by name of a sharded optimizer, as in RetainedOptimizer.
    """

    was_there: bool
    place: StepCount
    steps_taken: int
    held: Mapping[str, Inventory]
    data: Any
    shard: int = 0
    laid_out: Mapping[str, int] = field(default_factory=dict)
    changes: Mapping[str, Changes] = field(default_factory=dict)


@dataclass(slots=True)
class RestartState:
    """The kept state of one rank, by name of the registered object.

    optimizers: the sharded optimizers, in the order in which they were made.
    tensors: of each module, by their names in the module.
    synced: of each model, the last step that it has agreed on.
    buffers: of each model, those with which the code after this step began.
    patterns: of each model, what its steps usually are.
    states: of all other objects.
    flags: of modules, as module_flags.py has noted them last.
    beside: of each module, what its state_dict() has beside its tensors (state_beside).
    to_set: modules that were made again, with the flags that they get when all objects are.
    place, steps_taken, shard: as in Summary; steps_taken None: not known yet.
    """

    optimizers: dict[str, RetainedOptimizer] = field(default_factory=dict)
    tensors: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    synced: dict[str, int] = field(default_factory=dict)
    buffers: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    patterns: dict[str, tuple[PassPattern | None, ClearPattern]] = field(default_factory=dict)
    states: dict[str, Any] = field(default_factory=dict)
    beside: dict[str, dict[str, Any]] = field(default_factory=dict)
    flags: dict[str, ModuleFlags] = field(default_factory=dict)
    to_set: list[tuple[torch.nn.Module, ModuleFlags]] = field(default_factory=list)
    place: StepCount = (0, 0)
    steps_taken: int | None = None
    shard: int = 0

    @classmethod
    def of(
        cls,
        registry: Registry,
        place: StepCount,
        on_the_way: Mapping[int, ShardState],
        shard: int = 0,
    ) -> RestartState:
        """on_the_way: by id() of an optimizer engine, its state with parts that were received in
        attempts to continue in place."""
        retained = cls(place=place, shard=shard)
        for entry in registry:
            made = entry.object
            if isinstance(made, torch.nn.Module):
                with _copying(entry):
                    retained.beside[entry.name] = copy.deepcopy(state_beside(made))
            # State is kept as it is, and not copied: the function makes another optimizer.
            # Parameters are copied: the function may have its module from outside.
            if isinstance(made, ZeroRedundancyOptimizer):
                sharded = optimizer_engine_of(made)
                held = on_the_way.get(id(sharded)) or sharded.shard.held(takes_parameters=True)
                retained.optimizers[entry.name] = RetainedOptimizer(
                    sharded.shard.apart(held),
                    # What comes before the first step comes again when the function does.
                    sharded.state_changes.own if sharded.progress.ballots else Changes(),
                    sharded.digests.num_here,
                    sharded.progress,
                    sharded.shard.layout,
                    OptimizerOptions.of(made),
                )
            elif fully_sharded.is_sharded(made):
                retained.states[entry.name] = fully_sharded.kept(made)
            elif isinstance(made, torch.nn.Module):
                tensors = retained.tensors[entry.name] = _tensors_of(made, committed=True)
                beside = retained.beside[entry.name]
                beside.update({key: tensors[key] for key in beside.keys() & tensors.keys()})
                if isinstance(made, DistributedDataParallel):
                    engine = engine_of(made)
                    retained.synced[entry.name] = engine.buffers.synced_step
                    retained.buffers[entry.name] = engine.buffers.agreed()
                    retained.patterns[entry.name] = engine.patterns
            else:
                # A copy: state_dict() may give the object's own, which the function changes
                # further.
                with _copying(entry):
                    retained.states[entry.name] = copy.deepcopy(made.state_dict())
        return retained

    def summary(self, was_there: bool, data: Any) -> Summary:
        held = {name: one.held.inventory for name, one in self.optimizers.items()}
        laid_out = {n: len(one.options.additions.laid_out) for n, one in self.optimizers.items()}
        changes = {name: one.changes for name, one in self.optimizers.items()}
        taken = self.steps_taken or 0
        return Summary(was_there, self.place, taken, held, data, self.shard, laid_out, changes)

    def restore(
        self,
        entry: Registered,
        summaries: Sequence[Summary],
        group: Group,
        replica_size: int = 1,
    ) -> int | None:
        """Load the kept state into an object that was registered again. All ranks call it.

        Returns the bytes of sharded state that this rank sent for it, or None if no state of this
        name was kept: the object is new, and stays unchanged.
        """
        leader = leader_of(summaries)
        made = entry.object
        if fully_sharded.is_sharded(made):
            last = summaries[leader].place[0]
            holders = [s.shard if s.was_there and s.place[0] == last else None for s in summaries]
            mine = self.states.get(entry.name)
            kept = fully_sharded.shard_for(group, holders, replica_size, mine, entry.name)
            if kept is None:
                return None
            if isinstance(made, torch.nn.Module):
                self._restore_beside(entry, made, leader, group)
            fully_sharded.load(made, kept)
            return 0
        if isinstance(made, ZeroRedundancyOptimizer):
            # Any rank may hold a part of it: the leader has only its own shards and replicas.
            if not any(entry.name in one.held for one in summaries):
                return None
            return self._restore_optimizer(entry.name, made, summaries, group)
        if isinstance(made, torch.nn.Module):
            # First: it may give buffers another shape.
            self._restore_beside(entry, made, leader, group)
            here, own = _tensors_of(made, committed=False), _own_names(made, entry.per_rank)
            kept = self.tensors.get(entry.name, {})
            for name, tensor in here.items():
                # A module may have grown; what is new is the leader's own.
                if name in kept and (name in own or group.rank == leader):
                    tensor.copy_(kept[name])
            alike = [tensor for name, tensor in here.items() if name not in own]
            broadcast_tensors(alike, leader, group)
            if isinstance(made, DistributedDataParallel):
                # A rank without data takes part in the first steps as the others do.
                patterns = broadcast_object(group, self.patterns.get(entry.name), leader)
                if patterns is not None:
                    engine_of(made).patterns = patterns
            return 0
        state = self.states.get(entry.name)
        # Each rank has kept its own, such as the place in its data; else the leader's counts.
        if not entry.per_rank:
            # It may be of classes that only the script has.
            state = copy.deepcopy(broadcast_object(group, state, leader, pickled))
        if state is None:
            return None
        made.load_state_dict(state)
        return 0

    def _restore_beside(
        self, entry: Registered, module: torch.nn.Module, leader: int, group: Group
    ) -> None:
        """What a module has beside its tensors."""
        beside = self.beside.get(entry.name)
        if not entry.per_rank:
            beside = broadcast_object(group, beside, leader, pickled)
        load_beside(module, beside or {})
        flags = broadcast_object(group, self.flags.get(entry.name), leader)
        # An optimizer that is made next has to get the same parameters as the one before.
        if flags is not None:
            self.to_set.append((module, flags))

    def _restore_optimizer(
        self,
        name: str,
        optimizer: ZeroRedundancyOptimizer,
        summaries: Sequence[Summary],
        group: Group,
    ) -> int:
        mine = self.optimizers.get(name)
        own = (mine.progress, mine.layout, mine.options) if mine else None
        progress, layout, options = broadcast_object(group, own, leader_of(summaries), pickled)
        # Of what only some ranks had laid out when they were left no step counts.
        everywhere = min(one.laid_out[name] for one in summaries if name in one.laid_out)
        additions = replace(options.additions, laid_out=options.additions.laid_out[:everywhere])
        replace(options, additions=additions).load(optimizer)
        engine = optimizer_engine_of(optimizer)
        if not engine.shard.layout.begins(layout):
            raise RuntimeError(_MADE_OTHERWISE)
        engine.digests.num_here = mine.num_corrected if mine else 0
        # A copy: a loss while it moves begins all of this again, from what was kept.
        held = ShardState() if mine is None else mine.held.copy()
        inventories = [one.held.get(name, Inventory()) for one in summaries]
        sent_bytes = engine.take_over(held, inventories, progress)
        engine.shard.drop_state(dropped(name, summaries, group))
        return sent_bytes


class _WithoutGraphs(TorchFunctionMode):
    """copy.deepcopy refuses a tensor with a graph, such as an average of losses. Here it copies
    the tensor's values, as a checkpoint does."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.__deepcopy__ and not args[0].is_leaf:
            tensor, memo = args
            return copy.deepcopy(tensor.detach(), memo)
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _copying(entry: Registered) -> Iterator[None]:
    """An error of the state's copy names the object."""
    try:
        with _WithoutGraphs():
            yield
    except Exception as error:
        error.add_note(f"This came of copying the state of {entry.name!r} (ctx.register).")
        raise


def leader_of(summaries: Sequence[Summary]) -> int:
    """The rank that leads: the furthest rank that is not a newcomer; of equal ones the lowest."""
    there = [rank for rank, one in enumerate(summaries) if one.was_there]
    return max(there, key=lambda rank: (summaries[rank].place, -rank))


def dropped(name: str, summaries: Sequence[Summary], group: Group) -> frozenset[int]:
    """The parameters whose state is gone, of the sharded optimizer of this name."""
    changes = {rank: one.changes[name] for rank, one in enumerate(summaries) if name in one.changes}
    return dropped_by_some(changes, group)


def up_to_date(summaries: Sequence[Summary]) -> list[Summary]:
    """The summaries of ranks that have the leader's step; the data of others is one step older."""
    last = summaries[leader_of(summaries)].place[0]
    return [one for one in summaries if one.was_there and one.place[0] == last]


def state_beside(module: torch.nn.Module) -> dict[str, Any]:
    """What a module's state_dict() has beside its parameters and buffers, by key: what
    get_extra_state() gives, and what a class adds itself, as metrics of torchmetrics do. And the
    buffers of parts that load them in their own way, which may have another shape by now."""
    inner = module.module if isinstance(module, DistributedDataParallel) else module
    reshaped = {
        id(b) for part in inner.modules() if loads_itself(part) for b in part.buffers(False)
    }
    named: list[tuple[str, torch.Tensor]] = [*inner.named_parameters(remove_duplicate=False)]
    named += [
        (name, buffer)
        for name, buffer in inner.named_buffers(remove_duplicate=False)
        if id(buffer) not in reshaped
    ]
    # By memory: a hook of the module may have given its tensors other names there.
    names, own = {name for name, _ in named}, {tensor.data_ptr() for _, tensor in named}
    return {
        key: value
        for key, value in inner.state_dict().items()
        if key not in names and not (is_dense(value) and value.data_ptr() in own)
    }


def load_beside(module: torch.nn.Module, state: Mapping[str, Any]) -> None:
    """Load what `state_beside` has given; all other tensors stay."""
    inner = module.module if isinstance(module, DistributedDataParallel) else module
    if state:
        # With all else: a module's own _load_from_state_dict may read more than its buffers, and
        # converts a state that has no versions.
        whole = inner.state_dict()
        # Copies: set_extra_state() may keep what it is given, and a loss begins all of this again.
        whole.update(copy.deepcopy(dict(state)))
        inner.load_state_dict(whole, strict=False)


def _own_names(module: torch.nn.Module, per_rank: bool) -> set[str]:
    """The names of the tensors that each rank has for itself, by `_tensors_of`."""
    if not per_rank:
        return set()
    # The ranks of a model step the same parameters, and a step may send their buffers.
    alike: set[int] = set()
    for model in engines_of([*module.parameters()]):
        alike |= {id(parameter) for parameter in model.module.parameters()}
        if model.buffers.travel:
            alike |= {id(buffer) for buffer in model.module.buffers()}
    inner = module.module if isinstance(module, DistributedDataParallel) else module
    named = (*inner.named_parameters(), *inner.named_buffers())
    return {name for name, tensor in named if id(tensor) not in alike}


@torch.no_grad()
def _tensors_of(module: torch.nn.Module, *, committed: bool) -> dict[str, torch.Tensor]:
    """Parameters and buffers of a module.

    committed: return copies, with the buffers after the last step that counts, because a forward
        pass may have changed them since. Copies are needed also because the function may wrap the
        same module again, which overwrites its tensors with those of rank 0.
    """
    inner = module.module if isinstance(module, DistributedDataParallel) else module
    tensors = {name: p.detach() for name, p in inner.named_parameters()}
    tensors |= dict(inner.named_buffers())
    if not committed:
        return tensors
    # A module may be a part of a model, or share parts with one. Its own model says it best.
    living = [reference() for reference in between_runs().models]
    models = [model for model in living if model is not None]
    models.sort(key=lambda model: model.module is inner)
    own = {id(buffer) for buffer in inner.buffers()}
    kept: dict[int, torch.Tensor] = {}  # by id() of the buffer
    for model in models:
        shared = [(name, one) for name, one in model.module.named_buffers() if id(one) in own]
        copies = model.buffers.committed() if shared else {}
        # Present ones may be those of a step of another model.
        kept |= {id(one): copies[name] for name, one in shared if copies[name] is not one}
    return {name: kept.get(id(tensor), tensor).clone() for name, tensor in tensors.items()}
