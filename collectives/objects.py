"""Collectives of Python objects: pickled, and sent as the bits of int64.

They unpickle what other ranks of the group sent, so they execute what those ranks want executed:
use them among processes of one user only, as all ranks of a group are.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .group import Group


def broadcast_object(
    group: Group, value: Any, root: int = 0, dumps: Callable[[Any], bytes] = pickle.dumps
) -> Any:
    """Rank `root`'s value on every rank; there it is the very object, elsewhere a copy.

    value: anything that pickles; ignored on the other ranks. dumps: what pickles it.
    """
    is_root = group.rank == root
    payload = dumps(value) if is_root else b""
    size = torch.tensor([len(payload)], dtype=torch.int64, device=group.device)
    group.broadcast(size, root).wait()
    words = _words(payload, int(size), group)
    group.broadcast(words, root).wait()
    return value if is_root else _loads(words, int(size))


def all_gather_object(group: Group, value: Any) -> list[Any]:
    """The values of all ranks, by rank, on every rank."""
    payload = pickle.dumps(value)
    size = torch.tensor([len(payload)], dtype=torch.int64, device=group.device)
    sizes = size.new_empty(group.size)
    group.all_gather(sizes, size).wait()
    largest = int(sizes.max())
    words = _words(payload, largest, group)
    everybody = words.new_empty(group.size * len(words))
    group.all_gather(everybody, words).wait()
    rows = everybody.view(group.size, -1)
    return [_loads(row, int(size)) for row, size in zip(rows, sizes, strict=True)]


def _words(payload: bytes, size: int, group: Group) -> Tensor:
    """`payload` in (ceil(size / 8),) int64: the widest dtype that every backend copies as bits."""
    words = torch.zeros(-(-size // 8), dtype=torch.int64)
    if payload:
        source = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        words.view(torch.uint8)[: len(payload)] = source
    return words.to(group.device)


def _loads(words: Tensor, size: int) -> Any:
    return pickle.loads(words.cpu().view(torch.uint8)[:size].numpy().tobytes())
