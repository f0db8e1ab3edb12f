"""Moves optimizer state between the ranks' shards and whole parameters.

A shard holds pieces of parameters. A tensor of the state either has an element for each of the
piece's, or belongs to the parameter as a whole: a scalar (`step`), equal wherever a piece of it
lives, or, where parameters are not cut, anything (Adafactor's row and column sums).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from collectives import Group
from collectives.objects.blocking import all_gather_object

from ..partition.shards import Piece, shard_numel

CHUNK_BYTES = 4 << 20
"""Of all ranks together, while state is gathered."""


MASTER = "master"
"""The state's name for the float32 copy of a parameter in half precision. Plain optimizers carry
it along and do not look at it."""


@dataclass(frozen=True, slots=True)
class PieceState:
    """A piece of a parameter and its optimizer state on this rank.

    shape: of the piece; a tensor of this shape has an element for each of the piece's.
    """

    piece: Piece
    shape: torch.Size
    state: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """A bucket, as in `BucketPlan`, and what this rank has of it."""

    content: int
    spans: Sequence[tuple[int, int, int]]
    pieces: Sequence[PieceState]


def gather_state(
    buckets: Sequence[BucketLayout], shapes: Sequence[torch.Size], group: Group, to: int
) -> dict[int, dict[str, Any]]:
    """The state of all parameters on rank `to`, by number, on the CPU; empty on the others.

    shapes: of the parameters.

    1. Ranks tell each other which tensors their pieces have; scalars travel with that.
    2. For each bucket and name, the shards are gathered chunk by chunk, so that besides its shard
       and the result no rank holds more than a chunk, and rank `to` one from all.
    """
    told: dict[int, dict[str, Any]] = {}
    for mine in (mine for bucket in buckets for mine in bucket.pieces):
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
    for bucket in buckets:  # 2
        named = sorted(
            {
                (name, str(what), what)
                for parameter, _, _ in bucket.spans
                for name, (kind, what) in found.get(parameter, {}).items()
                if kind == "elements"
            },
            key=lambda entry: entry[:2],
        )
        for name, _, dtype in named:
            _gather_bucket(name, dtype, bucket, result, group, to)
    return result


def _gather_bucket(
    name: str,
    dtype: torch.dtype,
    bucket: BucketLayout,
    result: dict[int, dict[str, Any]],
    group: Group,
    to: int,
) -> None:
    """Gather one tensor of the state for all parameters of one bucket into `result` on `to`."""
    length = shard_numel(bucket.content, group.size)
    chunk = max(1, CHUNK_BYTES // dtype.itemsize // group.size)
    own = torch.zeros(min(chunk, length), dtype=dtype, device=group.device)
    everybody = own.new_empty(group.size * len(own)) if group.rank == to else None
    for start in range(0, length, chunk):
        part = own[: min(chunk, length - start)]
        for mine in bucket.pieces:
            value, at = mine.state.get(name), mine.piece.shard_start
            first, last = max(start, at), min(start + len(part), at + mine.piece.numel)
            if first < last and isinstance(value, torch.Tensor) and value.dtype == dtype:
                part[first - start : last - start] = value.reshape(-1)[first - at : last - at]
        parts = None if everybody is None else everybody[: group.size * len(part)]
        group.gather(part, parts, to).wait()
        if parts is not None:
            for rank, row in enumerate(parts.view(group.size, -1).cpu()):
                _place(row, rank * length + start, name, bucket.spans, result)


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
    state: Mapping[str, Any], piece: Piece, piece_shape: torch.Size, shape: torch.Size
) -> dict[str, Any]:
    """A piece's part of the state of a parameter of `shape`, in memory of its own."""
    sliced: dict[str, Any] = {}
    for key, value in state.items():
        if not isinstance(value, torch.Tensor):
            sliced[key] = value
        elif value.shape == shape and key != "step":
            start = piece.parameter_start
            part = value.reshape(-1)[start : start + piece.numel]
            sliced[key] = part.clone().view(piece_shape)
        else:
            sliced[key] = value.clone()
    return sliced


def check_fits(state: Mapping[str, Any], shape: torch.Size, name: str, *, may_be_cut: bool) -> None:
    """Raises ValueError for a tensor that is none of a parameter of `shape`.

    name: of the parameter. may_be_cut: what is kept for a parameter as a whole is a scalar then.
    """
    for key, value in state.items():
        if not isinstance(value, torch.Tensor) or value.shape == shape or value.dim() == 0:
            continue
        if may_be_cut or not _is_a_summary(value, shape):
            raise ValueError(
                f"the state {key!r} of parameter {name} has shape {tuple(value.shape)}, but the "
                f"parameter has {tuple(shape)}; was this state saved for another model?"
            )


def _is_a_summary(value: torch.Tensor, shape: torch.Size) -> bool:
    """Whether a tensor sums a parameter up: its shape, with some lengths made 1."""
    return value.dim() == len(shape) and all(
        ours in (1, whole) for ours, whole in zip(value.shape, shape, strict=True)
    )
