"""The checkpoint that the ranks of a run write when it is given up: of what they hold, as it lies.

The functions of the ranks have been left, as for running them again from the top, and what they had
registered is retained (restart.py). No state is moved and no object is made for the checkpoint:

    (a) the ranks tell each other what they hold, and where each was in its data,
    (b) of each range of a sharded state, the lowest rank that holds it writes it,
    (c) the leader writes what all ranks have alike, each rank what it has of its own,
    (d) and the manifest comes last, as in any checkpoint (checkpoint/checkpoints.py).

A layout tells what the ranges are of: in a checkpoint state has the names of parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch

from actors.errors import StateLost
from collectives import Group
from collectives.objects.blocking import all_gather_object

from ..checkpoint.checkpoints import Checkpoints
from ..checkpoint.config import NEVER, CheckpointConfig
from ..checkpoint.contents import (
    PER_RANK,
    ZERO,
    collect_own,
    kind_of,
    pickled,
    whole_of,
)
from ..checkpoint.format import catalog
from ..checkpoint.format.pieces import Contents, Path, TensorRange
from ..checkpoint.format.storage import open_storage
from ..checkpoint.sharded_state import GROUPS, NUM_STEPS, STATE, ShardedState
from ..data_parallel.distributed_data_parallel import DistributedDataParallel
from ..partition.resharding import Range, RangesLost, by_holders, merged, overlap
from ..process.registry import Registry
from ..zero.optimizer_state import MASTER
from ..zero.shard_state import VALUES, HeldState
from ..zero.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from .restart import RestartState, Summary, leader_of, up_to_date


@dataclass(frozen=True, slots=True)
class Layout:
    """Of a sharded optimizer. names, shapes: of its parameters, by number. contents, spans: of its
    buckets, as in BucketPlan. has_masters: whether what is stepped is a float32 copy, by bucket.
    groups: options, with the names of their parameters."""

    names: Sequence[str]
    shapes: Sequence[tuple[int, ...]]
    contents: Sequence[int]
    spans: Sequence[Sequence[tuple[int, int, int]]]
    has_masters: Sequence[bool]
    groups: list[dict[str, Any]]

    @classmethod
    def of(cls, name: str, optimizer: ZeroRedundancyOptimizer) -> Self:
        state, buckets = ShardedState(name, optimizer), optimizer.shard.buckets
        return cls(
            [state.name_of_parameter(p) for p in state.parameters],
            [tuple(p.shape) for p in state.parameters],
            [bucket.plan.content for bucket in buckets],
            [bucket.plan.spans for bucket in buckets],
            [bucket.own.has_master for bucket in buckets],
            state.named_groups(),
        )


@dataclass(slots=True)
class Saveable:
    """What a checkpoint needs besides what is retained. kinds: of all that is registered, by name.
    modules: their state_dict, of the tensors that are retained. step: ctx.step."""

    kinds: dict[str, str] = field(default_factory=dict)
    layouts: dict[str, Layout] = field(default_factory=dict)
    modules: dict[str, dict[str, Any]] = field(default_factory=dict)
    step: int = 0

    @classmethod
    def of(cls, registry: Registry, retained: RestartState, step: int) -> Self:
        made = cls({entry.name: kind_of(entry) for entry in registry}, step=step)
        for entry in registry:
            if isinstance(entry.object, ZeroRedundancyOptimizer):
                made.layouts[entry.name] = Layout.of(entry.name, entry.object)
            elif isinstance(entry.object, torch.nn.Module):
                made.modules[entry.name] = _state_of(entry.object, retained.tensors[entry.name])
        return made


def _state_of(module: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """What a checkpoint has of a module. tensors: by name; one that has several is in it once."""
    inner = module.module if isinstance(module, DistributedDataParallel) else module
    name_of: dict[int, str] = {}
    known = dict(tensors)
    for name, tensor in (
        *inner.named_parameters(remove_duplicate=False),
        *inner.named_buffers(remove_duplicate=False),
    ):
        first = name_of.setdefault(id(tensor), name)
        if first in tensors:
            known[name] = tensors[first]
    return {name: known.get(name, value) for name, value in inner.state_dict().items()}


@dataclass(frozen=True, slots=True)
class _Word:
    summary: Summary
    kinds: dict[str, str]
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

    saveable, retained: empty on a rank that was not there before the end, which writes nothing.
    was_there: whether this rank was there before the end.
    data: where this rank was in its data, up to the last step that counts.

    Raises StateLost on all ranks if no rank has some part of the state any more, what saving
    raises, and what ends the group.
    """
    mine = _Word(retained.summary(was_there, data), saveable.kinds, saveable.step)
    words: list[_Word] = all_gather_object(group, mine)  # (a)
    there = [rank for rank, word in enumerate(words) if word.summary.was_there]
    if not there:
        raise StateLost(group.generation, 1, "all that was registered and had taken a step")
    leader = leader_of([word.summary for word in words])
    kinds = words[leader].kinds
    found = Contents()
    for name, kind in kinds.items() if was_there else ():
        if kind == ZERO:
            held = {rank: words[rank].summary.held[name][0] for rank in there}
            layout = saveable.layouts[name]
            writes = _written_by(group, held, layout)  # (b)
            _collect_sharded(name, layout, retained.optimizers[name].held, writes, found)
            if group.rank == leader:
                found.leaves[name, GROUPS] = pickled(layout.groups)
                found.leaves[name, NUM_STEPS] = pickled(retained.optimizers[name].num_steps)
            continue
        state = saveable.modules[name] if name in saveable.modules else retained.states[name]
        more = Contents()
        if kind == PER_RANK:  # (c)
            more = collect_own((name, there.index(group.rank)), state)
        elif group.rank == leader:
            more = collect_own((name,), state)
        found.ranges += more.ranges
        found.leaves |= more.leaves
    # Not those of the call, which may have been writing one when the function was left.
    checkpoints = Checkpoints(group, Registry(), replace(config, resume=NEVER))
    checkpoints.begin()
    newest = up_to_date([word.summary for word in words])
    first = words[leader].summary
    told = [first.data, *(one.data for one in newest if one is not first)]
    step = words[leader].step
    saving = checkpoints.save_contents(step, found, kinds, told, len(there))  # (d)
    saving.wait(config.timeout_s)
    return saving.path


def newest(config: CheckpointConfig) -> str | None:
    """The path of the newest checkpoint in the session's storage."""
    storage = open_storage(config.storage_path)
    return next((storage.path_of(name) for name in catalog.listing(storage).whole), None)


def _written_by(
    group: Group, held: Mapping[int, Sequence[Range]], layout: Layout
) -> Iterator[Range]:
    """The ranges that this rank writes. Raises StateLost for those that nobody holds."""
    lost: list[Range] = []
    mine: list[Range] = []
    for bucket, content in enumerate(layout.contents):
        for part, holders in by_holders(Range(bucket, 0, content), held):
            if not holders:
                lost.append(part)
            elif min(holders) == group.rank:
                mine.append(part)
    if lost:
        raise StateLost(group.generation, 1, str(RangesLost(merged(lost))))
    return iter(mine)


def _collect_sharded(
    name: str, layout: Layout, held: HeldState, writes: Iterator[Range], found: Contents
) -> None:
    for written in writes:
        for number, offset, numel in layout.spans[written.bucket]:
            common = overlap(written, Range(written.bucket, offset, offset + numel))
            if common is None:
                continue
            start = common.start - offset

            def path(key: str, number: int = number) -> Path:
                return (name, STATE, layout.names[number], key)

            state = held.state_of(number, common, torch.device("cpu"))
            described = held.described.get(number)
            elements = described.elements if described is not None else {}
            if layout.has_masters[written.bucket]:
                values = torch.zeros(common.numel)
                state[MASTER] = held.cut(common, VALUES, values)
            for key, value in state.items():
                if key in elements or key == MASTER:
                    found.ranges.append(
                        TensorRange(
                            path(key),
                            layout.shapes[number],
                            value.dtype,
                            start,
                            start + common.numel,
                            (value,),
                        )
                    )
                elif start > 0:
                    continue  # Equal wherever a piece lives; who has the beginning writes it.
                elif isinstance(value, torch.Tensor) and value.numel() > 0:
                    found.ranges.append(whole_of(path(key), value))
                else:
                    found.leaves[path(key)] = pickled(value)
