"""Digests of what a rank keeps: sums of bits, at memory speed.

A digest is the sum, modulo 2^64, of a tensor's memory in words of eight bytes (the last few bytes
one by one). One pass over the memory makes it, without a copy and in any order of words. A flipped
bit always changes it, even in a NaN or in the sign of a zero: one word changes by a power of two,
and so does the sum. Flips in several words may cancel each other, with odds of about one in 2^64 if
they are random; a flip and its opposite at the same bit of two words do. Tensors of several names
are told apart by an odd factor of each name. The optimizer's state is in state_digests.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import torch

from ...data_parallel.gradients.gradient_bucket import ordered_sum
from ..shards.parameter_shard import ParameterShard

WORD = 8


def digest(tensor: torch.Tensor) -> torch.Tensor:
    """(), int64, on the tensor's device."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    if not tensor.is_contiguous():
        # Copies have one format, so dense memory of any format is read as it lies.
        if torch.empty_like(tensor).stride() == tensor.stride():
            tensor = tensor.as_strided((tensor.numel(),), (1,))
        else:
            tensor = tensor.contiguous()
    if tensor.dim() != 1:
        tensor = tensor.view(-1)
    num_bytes = tensor.nbytes
    # torch views memory as words only where it begins at a multiple of their size.
    if num_bytes % WORD == 0 and tensor.storage_offset() * tensor.itemsize % WORD == 0:
        return tensor.view(torch.int64).sum()
    octets = tensor.view(torch.uint8)
    head = min(num_bytes, -octets.storage_offset() % WORD)
    # Bytes before and after the whole words are added one by one.
    if num_bytes < head + WORD:
        return octets.sum(dtype=torch.int64)
    tail = head + (num_bytes - head) // WORD * WORD
    words = octets[head:tail].view(torch.int64).sum()
    return words + octets[:head].sum(dtype=torch.int64) + octets[tail:].sum(dtype=torch.int64)


def parameters_digest(shard: ParameterShard) -> torch.Tensor:
    """The digest of all parameters on this rank: the sum of what their owners have written."""
    each = (bucket.flat[: bucket.plan.content] for bucket in shard.buckets)
    return total([digest(flat) for flat in each], shard.group.device)


def ordered_digest(shard: ParameterShard) -> torch.Tensor:
    """The digest of all parameters on this rank and of their order. Programs rotate and sort
    weights, which no flipped bit does. It reads the memory twice."""
    each: list[torch.Tensor] = []
    for number, bucket in enumerate(shard.buckets):
        octets = bucket.flat[: bucket.plan.content].view(torch.uint8)
        cut = octets.numel() // WORD * WORD
        words = ordered_sum(octets[:cut].view(torch.int64)) * factor_of(f"{number} words")
        each += [words, ordered_sum(octets[cut:]) * factor_of(f"{number} bytes")]
    return total(each, shard.group.device)


def written_digests(shard: ParameterShard, portion: Iterable[int]) -> torch.Tensor:
    """The digests of the parameters that this rank steps in the buckets of these numbers: of its
    own shard, then of replicas."""
    by_distance: list[list[torch.Tensor]] = [[] for _ in range(num_copies(shard))]
    for bucket in (shard.buckets[number] for number in portion):
        for distance, kept in enumerate(bucket.ranges):
            length = kept.values.numel()
            content = max(0, min(length, bucket.plan.content - kept.owner * length))
            by_distance[distance].append(digest(kept.values[:content]))
    return torch.stack([total(digests, shard.group.device) for digests in by_distance])


def gradient_digests(shard: ParameterShard) -> list[torch.Tensor]:
    """The digests of the reduced gradients, before they are divided: of this rank's shard, then of
    replicas; zeros where gradients are read from `.grad`."""
    by_distance: list[list[torch.Tensor]] = [[] for _ in range(num_copies(shard))]
    for bucket in shard.buckets:
        for distance, kept in enumerate(bucket.ranges):
            if kept.reduced is not None:
                by_distance[distance].append(digest(kept.reduced))
    return [total(digests, shard.group.device) for digests in by_distance]


def num_copies(shard: ParameterShard) -> int:
    """The number of shards that a rank keeps: its own, and those of which it has replicas."""
    return min(shard.replicas, shard.group.size)


def factor_of(name: str) -> int:
    """An odd number of 64 bits, as int64: a product with it is as good a digest."""
    drawn = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return as_int64(int.from_bytes(drawn, "little") | 1)


def as_int64(number: int) -> int:
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def total(digests: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    if not digests:
        return torch.zeros((), dtype=torch.int64, device=device)
    return torch.stack([one if one.device == device else one.to(device) for one in digests]).sum()


def as_votes(numbers: torch.Tensor) -> torch.Tensor:
    """(n,) int64 as (2 n,) float64, which hold halves of 64 bits exactly."""
    return numbers.view(torch.int32).to(torch.float64)
