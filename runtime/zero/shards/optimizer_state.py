"""Gathers sharded optimizer state on one rank, and checks state before it is loaded."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from chorusline.collectives.group import Group
from chorusline.collectives.objects.blocking import all_gather_object

from ...partition.resharding import Range
from ...partition.shards import shard_numel
from .optimizer_trial import Shardability
from .shard_state import MASTER, Layout, ShardState, StateDescription

CHUNK_BYTES = 4 << 20
"""Size of a chunk, all ranks together, while state is gathered."""


def gather_state(
    layout: Layout, state: ShardState, group: Group, to: int, without_state: Container[int]
) -> dict[int, dict[str, Any]]:
    """The state of all parameters on rank `to`, by number, on the CPU; empty on the others.

    state: the state that this rank keeps.
    without_state: parameters that are stepped without state; the same on all ranks. Of others that
        have none there is no entry: with a master alone in it, it would be taken for begun.

    1. The ranks exchange descriptions, which include the state of whole parameters.
    2. For each bucket and name, the shards are gathered chunk by chunk. So besides its shard and
       the result a rank holds one chunk only, and rank `to` one chunk of each rank.
    """
    mine = {
        parameter: StateDescription(
            one.elements, tree_map_only(torch.Tensor, torch.Tensor.cpu, dict(one.whole))
        )
        for parameter, one in state.described.items()
    }
    described: dict[int, StateDescription] = {}
    for theirs in all_gather_object(group, mine):  # 1
        described = {**theirs, **described}
    result: dict[int, dict[str, Any]] = {}
    targets: dict[int, dict[str, torch.Tensor]] = {}
    for everything in layout.everything():  # 2
        kinds: set[tuple[str, torch.dtype]] = set()
        for parameter, _, _ in layout.plans[everything.bucket].spans:
            one = described.get(parameter)
            if one is None and parameter not in without_state:
                continue
            elements = layout.saved(everything.bucket, one)
            kinds.update(elements.items())
            if group.rank == to and (one is not None or elements):
                shape = layout.shapes[parameter]
                targets[parameter] = {
                    name: torch.empty(shape, dtype=dtype, device="cpu")
                    for name, dtype in elements.items()
                }
                whole = one.whole if one is not None else {}
                result[parameter] = {**whole, **targets[parameter]}
        for name, dtype in sorted(kinds, key=str):
            _gather_bucket(name, dtype, everything, layout, state, targets, group, to)
    return dict(sorted(result.items()))


def _gather_bucket(
    name: str,
    dtype: torch.dtype,
    everything: Range,
    layout: Layout,
    state: ShardState,
    targets: Mapping[int, Mapping[str, torch.Tensor]],
    group: Group,
    to: int,
) -> None:
    """Gather one named tensor of all parameters of one bucket into `targets` on rank `to`."""
    bucket, length = everything.bucket, shard_numel(everything.stop, group.size)
    # Rank `to` holds one chunk of each rank beside the result.
    chunk = max(1, CHUNK_BYTES // dtype.itemsize // group.size)
    own = torch.zeros(min(chunk, length), dtype=dtype, device=group.device)
    everybody = own.new_empty(group.size * len(own)) if group.rank == to else None
    for start in range(0, length, chunk):
        part = own[: min(chunk, length - start)]
        begin = group.rank * length + start
        state.cut(Range(bucket, begin, begin + len(part)), name, part)
        parts = None if everybody is None else everybody[: group.size * len(part)]
        group.gather(part, parts, to).wait_on_host()
        for rank, row in enumerate(parts.view(group.size, -1).cpu() if parts is not None else ()):
            at = rank * length + start
            for number, first, where in layout.parameters_in(Range(bucket, at, at + len(row))):
                target = targets.get(number, {}).get(name)
                # Another parameter's state of this name may have another dtype, and its own gather.
                if target is not None and target.dtype == dtype:
                    target.view(-1)[first : first + where.numel] = row[
                        where.start - at : where.stop - at
                    ]


def check_fits(
    state: Mapping[str, Any], shape: torch.Size, name: str, verdict: Shardability
) -> None:
    """Raises ValueError if a state tensor cannot belong to a parameter of `shape`.

    name: of the parameter. verdict: on the optimizer.
    """
    for key, value in state.items():
        if not isinstance(value, torch.Tensor) or value.shape == shape or value.dim() == 0:
            continue
        if key == MASTER or not verdict.has_any_shape(key):
            raise ValueError(
                f"the state {key!r} of parameter {name} has shape {tuple(value.shape)}, but the "
                f"parameter has {tuple(shape)}; was this state saved for another model?"
            )
