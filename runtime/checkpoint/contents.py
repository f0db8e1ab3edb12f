"""What a rank writes: its ranges of tensors, and small objects, copied to the host.

    collect    looks at the registered objects; nothing is copied
    HostCopy   copies what was collected, while training stands still

A state is a tree of dictionaries. Dense tensors in it are cut into ranges; all else (numbers,
lists, what only pickle knows) is a leaf, one small object. Paths through the tree are what names a
tensor in the checkpoint, as in torch.distributed.checkpoint.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ..data_parallel.distributed_data_parallel import DistributedDataParallel
from ..process.registry import Registered
from ..zero.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from .format.boxes import split_evenly
from .format.pieces import Contents, Path, TensorRange

MODEL, ZERO, STATE, PER_RANK = "model", "zero", "state", "per-rank"
"""Kinds of objects: a DistributedDataParallel; a sharded optimizer; anything that is the same on
all ranks; anything that is not."""


def kind_of(entry: Registered) -> str:
    if isinstance(entry.object, ZeroRedundancyOptimizer):
        return ZERO
    if entry.per_rank:
        return PER_RANK
    return MODEL if isinstance(entry.object, DistributedDataParallel) else STATE


def is_dense(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.layout == torch.strided and value.numel() > 0


def leaves_of(path: Path, value: Any) -> Iterator[tuple[Path, Any]]:
    """A tree's leaves and their paths. A dictionary without any tensor in it is a leaf, whole."""
    if isinstance(value, dict) and value and _has_tensors(value):
        for key, below in value.items():
            yield from leaves_of((*path, key), below)
    else:
        yield path, value


def _has_tensors(value: dict[Any, Any]) -> bool:
    if not all(type(key) in (str, int) for key in value):
        return False
    return any(
        is_dense(below) or (isinstance(below, dict) and _has_tensors(below))
        for below in value.values()
    )


def tree_of(leaves: Iterator[tuple[Path, Any]]) -> Any:
    """The tree with these leaves; the inverse of `leaves_of`."""
    tree: Any = {}
    for path, value in leaves:
        if not path:
            return value
        at = tree
        for key in path[:-1]:
            at = at.setdefault(key, {})
        at[path[-1]] = value
    return tree


def pickled(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def state_of(entry: Registered) -> dict[str, Any]:
    """Of a wrapped model the state of what is wrapped, which a plain module can load."""
    if isinstance(entry.object, DistributedDataParallel):
        return entry.object.module.state_dict()
    return entry.object.state_dict()


def collect_replicated(
    entries: Sequence[Registered], rank: int, writers: Sequence[int]
) -> Contents:
    """This rank's part of what all ranks have alike: its share of the bytes, and on the first of
    the writers the leaves.

    writers: ranks whose state is current. One that has joined may have missed steps.
    """
    found = Contents()
    if rank not in writers:
        return found
    tensors: list[tuple[Path, torch.Tensor]] = []
    for entry in entries:
        for path, value in leaves_of((entry.name,), state_of(entry)):
            if is_dense(value):
                tensors.append((path, value.detach()))
            elif rank == writers[0]:
                found.leaves[path] = pickled(value)
    ranges = split_evenly(
        [(tensor.numel(), tensor.element_size()) for _, tensor in tensors],
        list(writers).index(rank),
        len(writers),
    )
    for (path, tensor), (start, stop) in zip(tensors, ranges, strict=True):
        if start < stop:
            part = tensor.reshape(-1)[start:stop]
            found.ranges.append(
                TensorRange(path, tuple(tensor.shape), tensor.dtype, start, stop, (part,))
            )
    return found


def whole_of(path: Path, tensor: torch.Tensor) -> TensorRange:
    flat = tensor.detach().reshape(-1)
    return TensorRange(path, tuple(tensor.shape), tensor.dtype, 0, flat.numel(), (flat,))


def add_leaf(path: Path, value: Any, found: Contents) -> None:
    """Add a tensor, whole, or any other object."""
    if is_dense(value):
        found.ranges.append(whole_of(path, value))
    else:
        found.leaves[path] = pickled(value)


def collect_own(path: Path, state: Any, found: Contents) -> None:
    """Add a state that this rank alone has, whole."""
    for below, value in leaves_of(path, state):
        add_leaf(below, value, found)


class HostCopy:
    """Buffers on the host that are kept from one checkpoint to the next: fresh memory costs more
    than the copy. Only one checkpoint is in flight, so there is one set of them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[tuple[Path, int, int, torch.dtype], torch.Tensor] = {}

    def take(self, ranges: Sequence[TensorRange]) -> list[TensorRange]:
        """The same ranges, each in one buffer on the host that nothing changes until the next
        call. Returns when the copy is complete."""
        is_cuda = self._device.type == "cuda"
        kept, copied = self._buffers, []
        self._buffers = {}
        for ranged in ranges:
            key = (ranged.path, ranged.start, ranged.stop, ranged.dtype)
            buffer = kept.get(key)
            if buffer is None:
                buffer = torch.empty(
                    ranged.stop - ranged.start, dtype=ranged.dtype, pin_memory=is_cuda
                )
            self._buffers[key] = buffer
            at = 0
            for part in ranged.parts:
                buffer[at : at + part.numel()].copy_(part, non_blocking=is_cuda)
                at += part.numel()
            copied.append(
                TensorRange(
                    ranged.path, ranged.shape, ranged.dtype, ranged.start, ranged.stop, (buffer,)
                )
            )
        if is_cuda:
            torch.cuda.synchronize(self._device)
        return copied


Collector = Callable[[], Contents]
