"""Moves optimizer state between one rank's shard and the format of the plain optimizer.

The plain format is torch's: `state` maps the number of a parameter, counted through the groups, to
its tensors, and `param_groups` holds options and numbers. A shard holds pieces of parameters. A
tensor of the state either has an element for each of the piece's, or belongs to the parameter as
a whole: a scalar (`step`), equal wherever a piece of it lives, or, where parameters are not cut,
anything (Adafactor's row and column sums).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from collectives import Group
from collectives.objects import all_gather_object
from collectives.shards import Piece, shard_numel

_CHUNK_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class PieceState:
    """A piece of a parameter and its optimizer state on this rank.

    bucket: where it is cut from. shape: of the piece; a tensor of this shape has an element for
    each of the piece's.
    """

    piece: Piece
    bucket: int
    shape: torch.Size
    state: Mapping[str, Any]


def gather_state(
    pieces: Sequence[PieceState],
    spans: Sequence[Sequence[tuple[int, int, int]]],
    contents: Sequence[int],
    shapes: Sequence[torch.Size],
    group: Group,
    to: int,
) -> dict[int, dict[str, Any]]:
    """The state of all parameters on rank `to`, on the CPU; empty on the others.

    spans, contents: of the buckets, as in `BucketPlan`. shapes: of the parameters.

    1. Ranks tell each other which tensors their pieces have; scalars travel with that.
    2. For each bucket and name, the shards are gathered chunk by chunk, so that other ranks than
       `to` never hold more than a chunk of each.
    """
    told: dict[int, dict[str, Any]] = {}
    for mine in pieces:
        told[mine.piece.parameter] = {
            name: ("elements", value.dtype)
            if isinstance(value, torch.Tensor) and value.shape == mine.shape and name != "step"
            else ("whole", value.cpu() if isinstance(value, torch.Tensor) else value)
            for name, value in mine.state.items()
        }
    found: dict[int, dict[str, Any]] = {}
    for theirs in all_gather_object(group, told):  # 1
        for parameter, described in theirs.items():
            if described:
                found.setdefault(parameter, described)
    result: dict[int, dict[str, Any]] = {}
    if group.rank == to:
        for parameter, described in sorted(found.items()):
            result[parameter] = {
                name: torch.empty(shapes[parameter], dtype=what) if kind == "elements" else what
                for name, (kind, what) in described.items()
            }
    for bucket, content in enumerate(contents):  # 2
        named = sorted(
            {
                (name, str(what), what)
                for parameter, _, _ in spans[bucket]
                for name, (kind, what) in found.get(parameter, {}).items()
                if kind == "elements"
            },
            key=lambda entry: entry[:2],
        )
        here = [mine for mine in pieces if mine.bucket == bucket]
        for name, _, dtype in named:
            _gather_bucket(name, dtype, here, content, spans[bucket], result, group, to)
    return result


def _gather_bucket(
    name: str,
    dtype: torch.dtype,
    pieces: Sequence[PieceState],
    content: int,
    spans: Sequence[tuple[int, int, int]],
    result: dict[int, dict[str, Any]],
    group: Group,
    to: int,
) -> None:
    """Gather one tensor of the state for all parameters of one bucket into `result` on `to`."""
    length = shard_numel(content, group.size)
    own = torch.zeros(length, dtype=dtype, device=group.device)
    for mine in pieces:
        value = mine.state.get(name)
        if isinstance(value, torch.Tensor) and value.dtype == dtype:
            start = mine.piece.shard_start
            own[start : start + mine.piece.numel] = value.reshape(-1)
    chunk = max(1, _CHUNK_BYTES // dtype.itemsize)
    for start in range(0, length, chunk):
        part = own[start : start + chunk]
        everybody = part.new_empty(group.size * len(part))
        group.all_gather(everybody, part).wait()
        if group.rank != to:
            continue
        for rank, row in enumerate(everybody.view(group.size, -1).cpu()):
            _place(row, rank * length + start, name, spans, result)


def _place(
    row: torch.Tensor,
    at: int,
    name: str,
    spans: Sequence[tuple[int, int, int]],
    result: dict[int, dict[str, Any]],
) -> None:
    """Copy elements [at, at + len(row)) of a bucket to the parameters that they belong to."""
    for parameter, offset, numel in spans:
        first, last = max(at, offset), min(at + len(row), offset + numel)
        target = result.get(parameter, {}).get(name)
        if first < last and isinstance(target, torch.Tensor):
            target.view(-1)[first - offset : last - offset] = row[first - at : last - at]


def slice_state(
    state: Mapping[str, Any], piece: Piece, piece_shape: torch.Size, shape: torch.Size, name: str
) -> dict[str, Any]:
    """A piece's part of the state of a parameter of `shape`, in memory of its own.

    name: for the error. Raises ValueError for a tensor that fits neither parameter nor piece.
    """
    sliced: dict[str, Any] = {}
    for key, value in state.items():
        if not isinstance(value, torch.Tensor) or key == "step":
            sliced[key] = value.clone() if isinstance(value, torch.Tensor) else value
        elif value.shape == shape:
            start = piece.parameter_start
            part = value.reshape(-1)[start : start + piece.numel]
            sliced[key] = part.clone().view(piece_shape)
        elif value.dim() == 0 or (piece_shape == shape and _is_a_summary(value, shape)):
            sliced[key] = value.clone()
        else:
            raise ValueError(
                f"the state {key!r} of parameter {name} has shape {tuple(value.shape)}, but the "
                f"parameter has {tuple(shape)}; was this state saved for another model?"
            )
    return sliced


def _is_a_summary(value: torch.Tensor, shape: torch.Size) -> bool:
    """Whether a tensor sums a parameter up: its shape, with some lengths made 1."""
    return value.dim() == len(shape) and all(
        ours in (1, whole) for ours, whole in zip(value.shape, shape, strict=True)
    )
