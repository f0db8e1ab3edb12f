"""Finishes steps that count, before functions run again in a new generation.

A rank may be inside such a step when its generation ends: it has stepped its shard, and does not
have the other ranks' parameters yet. The loop's body continues after the step before the function
is left, and may read the parameters, for a moving average for example. So all ranks first meet,
also newcomers and those that have left their functions:

    (a) Each rank reports which ranges it holds, and whether it waits inside a step that counts.
    (b) For each range that a waiting rank lacks, one rank that holds it sends the values.
    (c) The buffers come from a rank that has ended the step, or else the highest live rank of it.

A range that no rank holds any more stays unchanged. That state is lost, and the ranks raise
StateLost where their functions begin.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from chorusline.collectives.group import Group
from chorusline.collectives.objects.blocking import all_gather_object, broadcast_object

from ..data_parallel.distributed_data_parallel import DistributedDataParallel, engine_of
from ..partition.resharding import Range, plan_transfers
from ..process.registry import Registry
from ..zero.shards.shard_state import Layout, ShardState, exchange
from ..zero.zero_redundancy_optimizer import (
    OptimizerEngine,
    ZeroRedundancyOptimizer,
    optimizer_engine_of,
)
from .restart import RestartState


@dataclass(frozen=True, slots=True)
class _Want:
    """The step in which a rank waits.

    optimizer, model: their names.
    layout: of the optimizer's parameters.
    step: number of the step's ballot.
    buffers: names of the model's buffers; empty if they are not sent.
    newest: this rank's number in the group of the step, -1 if it had no data.
    """

    optimizer: str
    model: str
    layout: Layout
    step: int
    buffers: tuple[str, ...]
    newest: int


@dataclass(frozen=True, slots=True)
class Holdings:
    """The state with which a rank comes to the meeting.

    held: by optimizer.
    synced: by model, the step whose buffers the rank has.
    buffers: by model, the buffers of that step by name, without what the code after it has written.
    """

    held: Mapping[str, ShardState] = field(default_factory=dict)
    synced: Mapping[str, int] = field(default_factory=dict)
    buffers: Mapping[str, Mapping[str, torch.Tensor]] = field(default_factory=dict)

    @classmethod
    def of_retained(cls, retained: RestartState) -> Holdings:
        """The holdings of a newcomer, or of a rank that has left its function."""
        held = {name: one.held for name, one in retained.optimizers.items()}
        return cls(held, retained.synced, retained.buffers)

    @classmethod
    def of_live(cls, registry: Registry, held: Mapping[int, ShardState]) -> Holdings:
        """The holdings of a rank that waits. held: by id() of an optimizer engine, the state that
        earlier attempts to continue have brought."""
        states: dict[str, ShardState] = {}
        synced: dict[str, int] = {}
        buffers: dict[str, Mapping[str, torch.Tensor]] = {}
        for entry in registry:
            made = entry.object
            if isinstance(made, ZeroRedundancyOptimizer):
                engine = optimizer_engine_of(made)
                states[entry.name] = held.get(id(engine)) or engine.shard.held()
            elif isinstance(made, DistributedDataParallel):
                model = engine_of(made)
                synced[entry.name] = model.buffers.synced_step
                buffers[entry.name] = model.buffers.agreed()
        return cls(states, synced, buffers)


@dataclass(frozen=True, slots=True)
class _RankHoldings:
    want: _Want | None  # None: no step waits here
    held: Mapping[str, Sequence[Range]]
    synced: Mapping[str, int]


@torch.no_grad()
def complete(
    group: Group,
    has: Holdings,
    registry: Registry | None = None,
    waiting: OptimizerEngine | None = None,
) -> None:
    """Complete the parameters of ranks that wait inside a step that counts. All ranks call it.

    waiting: the optimizer in whose step this rank waits, registered in `registry`.
    """
    want = _want(registry, waiting) if registry is not None and waiting is not None else None
    held = {name: state.ranges for name, state in has.held.items()}
    holdings: list[_RankHoldings] = all_gather_object(
        group, _RankHoldings(want, held, has.synced)
    )  # (a)
    wants = {rank: one.want for rank, one in enumerate(holdings) if one.want is not None}
    for name in sorted({one.optimizer for one in wants.values()}):
        targets = [rank for rank, one in wants.items() if one.optimizer == name]
        first = wants[targets[0]]
        by_rank = {rank: one.held.get(name, ()) for rank, one in enumerate(holdings)}
        wanted = dict.fromkeys(targets, first.layout.everything())
        # What no rank holds is lost. The error comes where the functions begin, on all ranks alike;
        # here it would leave a step unfinished that counts.
        plan = plan_transfers(by_rank, wanted, missing_ok=True)
        mine = has.held[name].copy() if name in has.held else ShardState()
        exchange(mine, plan, first.layout.travelling({}), group)  # (b)
        # The others have left their functions, and need no parameters before they make new ones.
        if group.rank in targets and waiting is not None:
            waiting.shard.publish(mine)
        if first.buffers:
            _send_buffers(group, has, holdings, targets, waiting)  # (c)
    if waiting is not None and waiting.model is not None:
        waiting.model.buffers.end_step(waiting.progress.ballots)


def _want(registry: Registry, waiting: OptimizerEngine) -> _Want:
    names = {id(entry.object): entry.name for entry in registry}
    model = waiting.model
    assert model is not None
    # Without a live rank no forward pass of this step has changed a buffer.
    travel = model.buffers.travel and bool(waiting.last_live)
    return _Want(
        names[id(waiting.optimizer)],
        names[id(model.wrapper)],
        waiting.shard.layout,
        waiting.progress.ballots,
        tuple(name for name, _ in model.module.named_buffers()) if travel else (),
        waiting.group.rank if waiting.group.rank in waiting.last_live else -1,
    )


def _send_buffers(
    group: Group,
    has: Holdings,
    holdings: Sequence[_RankHoldings],
    targets: Sequence[int],
    waiting: OptimizerEngine | None,
) -> None:
    want = holdings[targets[0]].want
    assert want is not None
    ended = [r for r, one in enumerate(holdings) if one.synced.get(want.model, -1) == want.step]
    # They ended the step as far as its buffers, and lack only parameters.
    if set(targets) <= set(ended):
        return
    newest = {rank: one.want.newest for rank in targets if (one := holdings[rank]).want}
    # As the step itself chooses: the highest rank that took it with data.
    root = ended[0] if ended else max(newest, key=lambda rank: newest[rank])
    mine = None
    if group.rank == root:
        buffers = has.buffers[want.model]
        if not ended and waiting is not None and waiting.model is not None:
            # The buffers of this step's forward pass have not been committed on any rank yet.
            buffers = dict(waiting.model.module.named_buffers())
        # As an object, by way of the host: the ranks that listen may not have the model any more.
        mine = {name: buffers[name].cpu() for name in want.buffers}
    theirs = broadcast_object(group, mine, root)
    if group.rank in targets and group.rank not in ended and waiting is not None:
        assert waiting.model is not None
        for name, buffer in waiting.model.module.named_buffers():
            buffer.copy_(theirs[name])
