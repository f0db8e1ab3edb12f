"""What a worker gets from the others when it has run its function by itself and comes to them.

A **replay log** comes first, between two steps of a rank that continues: what the function's
constructors and the code before its first step would find after a restart. The worker makes a dry
run with it.

A **state transfer** comes last, in the generation that the worker enters: where the ranks are in
their steps and in the data, what a step counts on, and the state of everything that is registered
and not sharded. The shards move as they do after a death (in_place.py), and the parameters are
gathered.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from chorusline.actors.messages.messages import OptimizerProgress
from chorusline.actors.parcels.pickling import pickled
from chorusline.collectives.group import Group
from chorusline.collectives.kept_results import MOST_BYTES, KeptResult, KeptResults
from chorusline.collectives.objects.blocking import broadcast_object

from ..data.dealer import DataPosition
from ..data.dealing import Remainder
from ..data.steps.steps import Steps
from ..data_parallel.distributed_data_parallel import DistributedDataParallel
from ..data_parallel.same_model import broadcast_tensors
from ..partition.shards import padded_numel
from ..process.random_state import RandomState
from ..process.registry import Registered
from ..process.step_boundary import boundary
from ..zero.state_changes import Changes
from ..zero.zero_redundancy_optimizer import ZeroRedundancyOptimizer, optimizer_engine_of
from .live_objects import LiveObjects, RunningCall
from .module_flags import ModuleFlags, flags_of
from .restart import OptimizerOptions, load_beside, state_beside


@dataclass(frozen=True, slots=True)
class ReplayLog:
    """data: of the call (FunctionCall.data_state). taken: steps of the run. checkpoints: as
    Checkpoints.place. optimizers, states: of registered objects, by name; those that each rank has
    for itself, and modules, are left out. outside, body: what the function's own collectives gave
    (collectives/kept_results.py)."""

    data: dict[str, Any]
    taken: int
    checkpoints: Any
    optimizers: Mapping[str, OptimizerOptions]
    states: Mapping[str, Any]
    outside: Sequence[KeptResult] = ()
    body: Sequence[KeptResult] = ()

    def restore(self, entry: Registered) -> bool:
        """Load what the function would find after a restart; whether there was anything."""
        if isinstance(entry.object, ZeroRedundancyOptimizer):
            # The rank that gave the log had not registered it by then.
            if entry.name not in self.optimizers:
                return False
            self.optimizers[entry.name].load(entry.object)
            return True
        if isinstance(entry.object, torch.nn.Module):
            return True  # Its tensors come with the state transfer.
        # What a rank has for itself is in no other rank's log; a new rank begins without it.
        if entry.per_rank or entry.name not in self.states:
            return False
        entry.object.load_state_dict(copy.deepcopy(self.states[entry.name]))
        return True


def replay_log_of(objects: LiveObjects, kept: KeptResults) -> tuple[bytes, str]:
    """The pickled replay log, between two steps of this rank; or why it cannot be given."""
    call = objects.call
    registered = {entry.name: entry.object for entry in call.registry}
    replay_log = ReplayLog(
        call.data_state(),
        boundary().status.taken,
        call.checkpoints.place if call.checkpoints is not None else None,
        {
            name: OptimizerOptions.of(made)
            for name, made in registered.items()
            if isinstance(made, ZeroRedundancyOptimizer)
        },
        _plain_states(call),
        *kept.results(),
    )
    try:
        payload = pickled(replay_log)
    except Exception as error:
        return b"", f"a registered object's state cannot be pickled ({error})"
    # It travels through the driver, which answers all other calls of the run meanwhile.
    if len(payload) > MOST_BYTES:
        return b"", (
            f"what its beginning depends on has {len(payload) >> 20} MiB, and at most "
            f"{MOST_BYTES >> 20} MiB are sent for that"
        )
    return payload, ""


def digest_of(objects: LiveObjects) -> str:
    """Equal on ranks that have made and registered the same, in the same order."""
    call = objects.call
    parts: list[object] = [
        [(entry.name, type(entry.object).__qualname__, entry.per_rank) for entry in call.registry]
    ]
    for number, optimizer in objects.optimizers().items():
        layout = optimizer.shard.layout
        kinds = [str(dtype) for dtype in layout.dtypes]
        parts += [number, layout.shapes, layout.plans, kinds, optimizer.shard.replicas]
    for number, model in objects.models().items():
        parts += [number, model.steps.signature]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class OptimizerPlace:
    """progress, last_live: as in its engine. changes: of its state, since the last step."""

    progress: OptimizerProgress
    last_live: tuple[int, ...]
    changes: Changes
    options: OptimizerOptions


@dataclass(frozen=True, slots=True)
class StateTransfer:
    """number, rest, paces: of the pass over steps that the ranks are in. position: in all passes.
    taken: steps of the run. data: of the call. checkpoints: as Checkpoints.place. generators: the
    state of the random generators. optimizers: by number. passes, synced: of the models, by number,
    as in RankReport (in_place.py). states: of registered objects, by name. beside: of registered
    modules, by name, what they have beside their tensors. flags: of the same, as ModuleFlags."""

    number: int
    rest: Remainder
    paces: Sequence[float]
    position: DataPosition
    taken: int
    data: dict[str, Any]
    checkpoints: Any
    generators: dict[str, Any]
    optimizers: Mapping[int, OptimizerPlace]
    passes: Mapping[int, int]
    synced: Mapping[int, int]
    states: Mapping[str, Any]
    beside: Mapping[str, dict[str, Any]]
    flags: Mapping[str, ModuleFlags]


def _transfer_of(objects: LiveObjects, steps: Steps) -> StateTransfer:
    call, models = objects.call, objects.models()
    return StateTransfer(
        steps.counts.number,
        steps.rest,
        steps.paces,
        call.dealer.position(),
        boundary().status.taken,
        call.data_state(),
        call.checkpoints.place if call.checkpoints is not None else None,
        RandomState().state_dict(),
        {
            number: OptimizerPlace(
                one.progress,
                one.last_live,
                one.state_changes.own,
                OptimizerOptions.of(one.optimizer),
            )
            for number, one in objects.optimizers().items()
        },
        {number: model.reducer.num_passes for number, model in models.items()},
        {number: model.buffers.synced_step for number, model in models.items()},
        _plain_states(call),
        {
            entry.name: state_beside(entry.object)
            for entry in call.registry
            if isinstance(entry.object, torch.nn.Module) and not entry.per_rank
        },
        flags_of(call.registry),
    )


def _plain_states(call: RunningCall) -> dict[str, Any]:
    """By name, of the objects whose state does not come as shards or as tensors."""
    ours = ZeroRedundancyOptimizer | torch.nn.Module
    return {
        entry.name: entry.object.state_dict()
        for entry in call.registry
        if not (isinstance(entry.object, ours) or entry.per_rank)
    }


def transfer_state(
    objects: LiveObjects, steps: Steps, root: int, group: Group, *, is_new: bool
) -> None:
    """All ranks of a generation that workers enter call it. root: a rank that was there before.
    is_new: this rank is such a worker."""
    mine = _transfer_of(objects, steps) if group.rank == root else None
    # States may be of classes that only the script has.
    transfer: StateTransfer = broadcast_object(group, mine, root, pickled)
    if is_new:
        _take(transfer, objects, steps)
    # All ranks call it, as in every collective; the others have these values already.
    broadcast_tensors(_tensors_beside(objects), root, group, on_host=True)
    if is_new:
        # Last: objects that take their state may draw numbers.
        RandomState().load_state_dict(transfer.generators)


def _take(transfer: StateTransfer, objects: LiveObjects, steps: Steps) -> None:
    call, bound = objects.call, boundary()
    steps.take_place(transfer.number, transfer.position, transfer.rest, transfer.paces)
    bound.status.taken = transfer.taken
    call.take_data(transfer.data)
    if call.checkpoints is not None:
        call.checkpoints.place = transfer.checkpoints
    for number, engine in objects.optimizers().items():
        place = transfer.optimizers[number]
        place.options.load(engine.optimizer)
        engine.take_place(place.progress, place.last_live, place.changes)
    for number, model in objects.models().items():
        model.reducer.num_passes = transfer.passes[number]
        model.buffers.synced_step = transfer.synced[number]
    for entry in call.registry:
        if entry.name in transfer.states:
            entry.object.load_state_dict(copy.deepcopy(transfer.states[entry.name]))
        if isinstance(entry.object, torch.nn.Module) and entry.name in transfer.beside:
            load_beside(entry.object, transfer.beside[entry.name])
            if entry.name in transfer.flags:
                transfer.flags[entry.name].set(entry.object)


def _tensors_beside(objects: LiveObjects) -> list[torch.Tensor]:
    """What of the registered modules does not come with the shards: parameters that no optimizer
    steps, buffers, and modules beside the models, such as an average."""
    # Those come with the shards.
    sharded = {id(p) for one in objects.optimizers().values() for p in one.shard.parameters}
    found: list[torch.Tensor] = []
    for entry in objects.call.registry:
        made = entry.object
        # What each rank has for itself stays; the parameters of a model are equal on all ranks.
        is_own = entry.per_rank and not isinstance(made, DistributedDataParallel)
        if isinstance(made, torch.nn.Module) and not is_own:
            found += [p.detach() for p in made.parameters() if id(p) not in sharded]
            # All ranks are between two steps (arrivals.py), so these are also what the code after
            # the last one has written.
            if not isinstance(made, DistributedDataParallel) or made.broadcast_buffers:
                found += list(made.buffers())
    return found


def has_room(objects: LiveObjects, num_ranks: int) -> bool:
    """Whether the buckets are long enough to be cut for so many ranks where they lie."""
    models, optimizers = objects.models().values(), objects.optimizers().values()
    buckets = [(one.plan, one.flat) for model in models for one in model.reducer.buckets]
    buckets += [(one.plan, one.flat) for made in optimizers for one in made.shard.buckets]
    return all(padded_numel(plan.content, num_ranks) <= flat.numel() for plan, flat in buckets)


def why_not_within(objects: LiveObjects) -> str:
    """Why no worker can come to this rank's function between two steps; empty if one can."""
    facts = objects.facts()
    if facts.missing:
        return facts.missing
    living = list(objects.optimizers().values())
    registered = (entry.object for entry in objects.call.registry)
    sharded = [
        optimizer_engine_of(one) for one in registered if isinstance(one, ZeroRedundancyOptimizer)
    ]
    if not living or any(one not in living for one in sharded) or facts.has_plain_steps:
        return (
            "not all of its optimizers are a ZeroRedundancyOptimizer of its DistributedDataParallel"
        )
    # Its scale travels with what is registered, and a step needs the same scale on all ranks.
    scalers = [one.optimizer._scaler_of_losses for one in living]
    known = {id(entry.object) for entry in objects.call.registry}
    if any(scaler is not None and id(scaler) not in known for scaler in scalers):
        return "it has not registered its GradScaler (ctx.register)"
    # Parameters reach a worker as shards; those of such a model are in none.
    if len(living) < len(objects.models()):
        return "one of its models has no ZeroRedundancyOptimizer"
    return ""
