"""Digests of what a rank keeps: sums of bits, at memory speed.

A digest is the sum, modulo 2^64, of a tensor's memory in words of eight bytes (the last few bytes
one by one). One pass over the memory makes it, without a copy and in any order of words. A flipped
bit always changes it, also in a NaN or in the sign of a zero: one word changes by a power of two,
and so does the sum. Flips in several words may cancel each other, with odds of about one in 2^64 if
they are random; a flip and its opposite at the same bit of two words do. Tensors of several names
are told apart by an odd factor of each name.
"""

from __future__ import annotations

import hashlib
import struct
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch

from .parameter_shard import ParameterShard
from .shard_state import MASTER

_WORD = 8
_MASK = (1 << 32) - 1


def digest(tensor: torch.Tensor) -> torch.Tensor:
    """(), int64, on the tensor's device."""
    tensor = tensor.detach()
    if not tensor.is_contiguous():
        # Copies have one format, so dense memory of any format is read as it lies.
        if torch.empty_like(tensor).stride() == tensor.stride():
            tensor = tensor.as_strided((tensor.numel(),), (1,))
        else:
            tensor = tensor.contiguous()
    num_bytes = tensor.numel() * tensor.element_size()
    if num_bytes % _WORD == 0 and tensor.storage_offset() * tensor.element_size() % _WORD == 0:
        return tensor.view(-1).view(torch.int64).sum()
    octets = tensor.view(-1).view(torch.uint8)
    head = min(num_bytes, -octets.storage_offset() % _WORD)
    if num_bytes < head + _WORD:
        return octets.sum(dtype=torch.int64)
    tail = head + (num_bytes - head) // _WORD * _WORD
    words = octets[head:tail].view(torch.int64).sum()
    return words + octets[:head].sum(dtype=torch.int64) + octets[tail:].sum(dtype=torch.int64)


def parameters_digest(shard: ParameterShard) -> torch.Tensor:
    """Of all parameters on this rank. The sum of what the owners have written."""
    each = (bucket.flat[: bucket.plan.content] for bucket in shard.buckets)
    return _total([digest(flat) for flat in each], shard)


def written_digests(shard: ParameterShard) -> list[torch.Tensor]:
    """Of the parameters in the ranges that this rank steps: of its own shard, then of replicas."""
    by_distance: list[list[torch.Tensor]] = [[] for _ in range(num_copies(shard))]
    for bucket in shard.buckets:
        for distance, kept in enumerate(bucket.ranges):
            length = kept.values.numel()
            content = max(0, min(length, bucket.plan.content - kept.owner * length))
            by_distance[distance].append(digest(kept.values[:content]))
    return [_total(digests, shard) for digests in by_distance]


def gradient_digests(shard: ParameterShard) -> list[torch.Tensor]:
    """Of the reduced gradients, before they are divided: of this rank's shard, then of replicas;
    zeros where gradients are read from `.grad`."""
    by_distance: list[list[torch.Tensor]] = [[] for _ in range(num_copies(shard))]
    for bucket in shard.buckets:
        for distance, kept in enumerate(bucket.ranges):
            if kept.reduced is not None:
                by_distance[distance].append(digest(kept.reduced))
    return [_total(digests, shard) for digests in by_distance]


def state_digests(shard: ParameterShard) -> list[torch.Tensor]:
    """Of the optimizer's state and the masters: of this rank's shard, then of its replicas."""
    tensors: list[dict[Any, list[torch.Tensor]]] = [
        defaultdict(list) for _ in range(num_copies(shard))
    ]
    scalars: list[dict[Any, list[torch.Tensor]]] = [defaultdict(list) for _ in tensors]
    constants = [0] * len(tensors)
    for distance, name, value in _entries(shard):
        if not isinstance(value, torch.Tensor):
            constants[distance] += factor_of(f"{name}={struct.pack('d', value).hex()}")
        elif value.dim():
            tensors[distance][name].append(digest(value))
        else:  # A counter: all of a kind in one operation.
            scalars[distance][name, value.dtype, value.device].append(value)
    return [
        _total(
            [
                *(_total(sums, shard) * factor_of(name) for name, sums in of_names.items()),
                *(
                    digest(torch.stack(values)) * factor_of(key[0])
                    for key, values in of_scalars.items()
                ),
            ],
            shard,
        )
        + _as_int64(constant)
        for of_names, of_scalars, constant in zip(tensors, scalars, constants, strict=True)
    ]


def _entries(shard: ParameterShard) -> Iterator[tuple[int, str, Any]]:
    """What is kept beside the parameters: distance to the owner, name, a tensor or a number."""
    if shard.optimizer is None:
        return
    state = shard.optimizer.state
    for bucket, pieces in zip(shard.buckets, shard.pieces, strict=True):
        distance_of = {id(kept): distance for distance, kept in enumerate(bucket.ranges)}
        for mine in pieces:
            distance = distance_of[id(mine.range)]
            if mine.range.has_master:
                yield distance, MASTER, mine.tensor
            for name, value in state.get(mine.tensor, {}).items():
                if isinstance(value, torch.Tensor | bool | int | float):
                    yield distance, str(name), value


def num_copies(shard: ParameterShard) -> int:
    """The number of shards that a rank keeps: its own, and those of which it has replicas."""
    return min(shard.replicas, shard.group.size)


def factor_of(name: str) -> int:
    """An odd number of 64 bits, as int64: a product with it is as good a digest."""
    drawn = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return _as_int64(int.from_bytes(drawn, "little") | 1)


def _as_int64(number: int) -> int:
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def _total(digests: list[torch.Tensor], shard: ParameterShard) -> torch.Tensor:
    device = shard.group.device
    if not digests:
        return torch.zeros((), dtype=torch.int64, device=device)
    return torch.stack([one.to(device) for one in digests]).sum()


def as_votes(numbers: torch.Tensor) -> torch.Tensor:
    """(n,) int64 as (2 n,) float64, which hold halves of 64 bits exactly."""
    halves = torch.stack([numbers & _MASK, (numbers >> 32) & _MASK], dim=1)
    return halves.view(-1).to(torch.float64)
