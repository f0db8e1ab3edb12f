"""The checkpoint that the ranks write when a run is given up.

The functions of the ranks have been left, as if they were to run again from the top, and the state
of their registered objects is retained (restart.py). The checkpoint moves no state between ranks
and makes no object:

    (a) The ranks exchange which ranges they hold, and their positions in the data.
    (b) Each range of a sharded state is written by one of the ranks that hold it.
    (c) The leader writes the state that is equal on all ranks; each rank its per-rank state.
    (d) The manifest comes last, as in any checkpoint (checkpoint/writing.py).

A `SavedOptimizer` maps ranges to names of parameters, which a checkpoint uses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch.optim.lr_scheduler import LRScheduler

from chorusline.actors.errors import StateLost
from chorusline.collectives.group import Group
from chorusline.collectives.objects.blocking import all_gather_object

from ..checkpoint.checkpoints import Checkpoints
from ..checkpoint.config import NEVER, CheckpointConfig
from ..checkpoint.contents import (
    PER_RANK,
    ZERO,
    RegisteredObjects,
    collect_own,
    without_functions,
)
from ..checkpoint.format import catalog
from ..checkpoint.format.pieces import Contents
from ..checkpoint.format.storage import open_storage
from ..checkpoint.sharded_state import SavedOptimizer
from ..data_parallel.distributed_data_parallel import DistributedDataParallel
from ..partition.resharding import RangesLost, plan_transfers
from ..process.registry import Registry
from ..zero.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from .restart import RestartState, Summary, dropped, leader_of, up_to_date

_CHECKPOINT = -1
"""Target of the transfers that are writes: it is no rank."""


@dataclass(slots=True)
class Saveable:
    """The data that a checkpoint needs besides the retained state.

    objects: all that is registered.
    optimizers: the sharded optimizers, by name.
    states: by name, those that a checkpoint has in another form than the retained state: of a
        module its state_dict, with the retained tensors; of a schedule that without functions.
    step: ctx.step.
    """

    objects: RegisteredObjects = field(default_factory=RegisteredObjects)
    optimizers: dict[str, SavedOptimizer] = field(default_factory=dict)
    states: dict[str, dict[str, Any]] = field(default_factory=dict)
    step: int = 0

    @classmethod
    def of(cls, registry: Registry, retained: RestartState, step: int) -> Self:
        made = cls(RegisteredObjects.of(registry), step=step)
        for entry in registry:
            if isinstance(entry.object, ZeroRedundancyOptimizer):
                made.optimizers[entry.name] = SavedOptimizer.of(entry.name, entry.object)
            elif isinstance(entry.object, torch.nn.Module):
                made.states[entry.name] = _state_of(entry.object, retained.tensors[entry.name])
            elif isinstance(entry.object, LRScheduler):
                made.states[entry.name] = without_functions(retained.states[entry.name])
        return made


def _state_of(module: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The module's state_dict with retained tensors. tensors: by name; a tensor with several names
    is listed once."""
    inner = module.module if isinstance(module, DistributedDataParallel) else module
    name_of: dict[int, str] = {}
    known = dict(tensors)
    for name, tensor in (
        *inner.named_parameters(remove_duplicate=False),
        *inner.named_buffers(remove_duplicate=False),
    ):
        first = name_of.setdefault(id(tensor), name)
        # Tied names share what was retained under the first.
        if first in tensors:
            known[name] = tensors[first]
    return {name: known.get(name, value) for name, value in inner.state_dict().items()}


@dataclass(frozen=True, slots=True)
class _RankSummary:
    summary: Summary
    objects: RegisteredObjects
    step: int


def save(
    saveable: Saveable,
    retained: RestartState,
    was_there: bool,
    data: Any,
    group: Group,
    config: CheckpointConfig,
) -> str:
    """Write the checkpoint; all ranks of `group` call it. Returns its path, once it is whole.

    saveable, retained: empty on a newcomer, which writes nothing.
    was_there: whether this rank took part in the run before, and is no newcomer.
    data: this rank's position in its data, after the last step that counts.

    Raises StateLost, on all ranks, if no rank holds some part of the state any more; errors of the
    storage; and errors that end the group.
    """
    of_rank = retained.summary(was_there, data)
    one = _RankSummary(of_rank, saveable.objects, saveable.step)
    summaries: list[_RankSummary] = all_gather_object(group, one)  # (a)
    there = [rank for rank, one in enumerate(summaries) if one.summary.was_there]
    if not there:
        raise StateLost(group.generation, 0, "every rank that had taken a step died")
    leader = leader_of([one.summary for one in summaries])
    objects, step = summaries[leader].objects, summaries[leader].step
    found = Contents()
    for name, kind in objects.kinds.items() if was_there else ():
        if kind == ZERO:
            saved, mine = saveable.optimizers[name], retained.optimizers[name]
            held = {rank: summaries[rank].summary.held[name].ranges for rank in there}
            try:
                plan = plan_transfers(held, {_CHECKPOINT: saved.layout.everything()})  # (b)
            except RangesLost as lost:
                raise StateLost(group.generation, 1, str(lost)) from None
            for parameter in dropped(name, [one.summary for one in summaries], group):
                mine.held.described.pop(parameter, None)
            ranges = [one.range for one in plan if one.source == group.rank]
            saved.collect(mine.held, ranges, found)
            if group.rank == leader:
                saved.collect_leaves(mine.options.num_steps, mine.options.max_norm, found)
            continue
        state = saveable.states[name] if name in saveable.states else retained.states[name]
        if kind == PER_RANK:  # (c)
            collect_own((name, there.index(group.rank)), state, found)
        elif group.rank == leader:
            collect_own((name,), state, found)
    # The Checkpoints of the call may have been writing one when the function was left.
    checkpoints = Checkpoints(group, Registry(), replace(config, resume=NEVER))
    checkpoints.begin()
    newest = up_to_date([one.summary for one in summaries])
    first = summaries[leader].summary
    progress = [first.data, *(one.data for one in newest if one is not first)]
    saving = checkpoints.save_contents(step, found, objects, progress, len(there))  # (d)
    saving.wait(config.timeout_s)
    return saving.path


def newest(config: CheckpointConfig) -> str | None:
    """The path of the newest checkpoint in the session's storage."""
    storage = open_storage(config.storage_path)
    listed = catalog.listing(storage)
    whole = (name for name in listed.written if name not in listed.damaged)
    return next((storage.path_of(name) for name in whole), None)
