"""Gathers sharded optimizer state on one rank, and checks state before it is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from collectives import Group
from collectives.objects.blocking import all_gather_object

from ..partition.resharding import Range
from ..partition.shards import shard_numel
from .shard_state import Description, Layout, ShardState

CHUNK_BYTES = 4 << 20
"""Size of a chunk, all ranks together, while state is gathered."""


def gather_state(
    layout: Layout, state: ShardState, group: Group, to: int
) -> dict[int, dict[str, Any]]:
    """The state of all parameters on rank `to`, by number, on the CPU; empty on the others.

    state: the state that this rank keeps.

    1. The ranks exchange descriptions, which include the state of whole parameters.
    2. For each bucket and name, the shards are gathered chunk by chunk. So besides its shard and
       the result a rank holds one chunk only, and rank `to` one chunk of each rank.
    """
    mine = {
        parameter: Description(one.elements, {k: _on_cpu(v) for k, v in one.whole.items()})
        for parameter, one in state.described.items()
    }
    described: dict[int, Description] = {}
    for theirs in all_gather_object(group, mine):  # 1
        described = {**theirs, **described}
    result: dict[int, dict[str, Any]] = {}
    for everything in layout.everything():  # 2
        kinds: set[tuple[str, torch.dtype]] = set()
        for parameter, _, _ in layout.plans[everything.bucket].spans:
            one = described.get(parameter)
            elements = layout.saved(everything.bucket, one)
            kinds.update(elements.items())
            if group.rank == to and (one is not None or elements):
                shape = layout.shapes[parameter]
                result[parameter] = {
                    **(one.whole if one is not None else {}),
                    **{name: torch.empty(shape, dtype=dtype) for name, dtype in elements.items()},
                }
        for name, dtype in sorted(kinds, key=str):
            _gather_bucket(name, dtype, everything, layout, state, result, group, to)
    return dict(sorted(result.items()))


def _gather_bucket(
    name: str,
    dtype: torch.dtype,
    everything: Range,
    layout: Layout,
    state: ShardState,
    result: Mapping[int, Mapping[str, Any]],
    group: Group,
    to: int,
) -> None:
    """Gather one named tensor of all parameters of one bucket into `result` on rank `to`."""
    bucket, length = everything.bucket, shard_numel(everything.stop, group.size)
    chunk = max(1, CHUNK_BYTES // dtype.itemsize // group.size)
    own = torch.zeros(min(chunk, length), dtype=dtype, device=group.device)
    everybody = own.new_empty(group.size * len(own)) if group.rank == to else None
    for start in range(0, length, chunk):
        part = own[: min(chunk, length - start)]
        begin = group.rank * length + start
        state.cut(Range(bucket, begin, begin + len(part)), name, part)
        parts = None if everybody is None else everybody[: group.size * len(part)]
        group.gather(part, parts, to).wait()
        for rank, row in enumerate(parts.view(group.size, -1).cpu() if parts is not None else ()):
            at = rank * length + start
            for number, first, where in layout.parameters_in(Range(bucket, at, at + len(row))):
                target = result.get(number, {}).get(name)
                if isinstance(target, torch.Tensor) and target.dtype == dtype:
                    target.view(-1)[first : first + where.numel] = row[
                        where.start - at : where.stop - at
                    ]


def _on_cpu(value: Any) -> Any:
    return value.cpu() if isinstance(value, torch.Tensor) else value


def check_fits(state: Mapping[str, Any], shape: torch.Size, name: str, *, may_be_cut: bool) -> None:
    """Raises ValueError if a state tensor cannot belong to a parameter of `shape`.

    name: of the parameter. may_be_cut: state of the whole parameter must be a scalar then.
    """
    for key, value in state.items():
        if not isinstance(value, torch.Tensor) or value.shape == shape or value.dim() == 0:
            continue
        if may_be_cut or not is_summary(value.shape, shape):
            raise ValueError(
                f"the state {key!r} of parameter {name} has shape {tuple(value.shape)}, but the "
                f"parameter has {tuple(shape)}; was this state saved for another model?"
            )


def is_summary(shape: Sequence[int], parameter_shape: Sequence[int]) -> bool:
    """Whether `shape` is the parameter's shape with some lengths replaced by 1 (row sums)."""
    return len(shape) == len(parameter_shape) and all(
        ours in (1, whole) for ours, whole in zip(shape, parameter_shape, strict=True)
    )
