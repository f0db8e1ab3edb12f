"""Collectives of Python objects that travel among a group's tensors, in the same order.

Blocking, and without a channel of their own: for use where nothing else is in flight. Users take
those of `Group`, which they can await.

They unpickle what other ranks of the group sent, so they execute what those ranks want executed:
use them among processes of one user only, as all ranks of a group are.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import torch

from ..operations.operations import Operations
from .payloads import bytes_of, loads, words_of


def broadcast_object(
    group: Operations, value: Any, root: int = 0, dumps: Callable[[Any], bytes] = pickle.dumps
) -> Any:
    """Rank `root`'s value on every rank; there it is the very object, elsewhere a copy.

    value: anything that pickles; ignored on the other ranks. dumps: what pickles it.
    """
    is_root = group.rank == root
    payload = dumps(value) if is_root else b""
    size = torch.tensor([len(payload)], dtype=torch.int64, device=group.device)
    group.broadcast(size, root).wait()
    words = words_of(payload, int(size)).to(group.device)
    group.broadcast(words, root).wait()
    return value if is_root else loads(bytes_of(words.cpu(), int(size)))


def all_gather_object(group: Operations, value: Any) -> list[Any]:
    """The values of all ranks, by rank, on every rank."""
    payload = pickle.dumps(value)
    size = torch.tensor([len(payload)], dtype=torch.int64, device=group.device)
    sizes = size.new_empty(group.size)
    group.all_gather(sizes, size).wait()
    largest = int(sizes.max())
    words = words_of(payload, largest).to(group.device)
    everybody = words.new_empty(group.size * len(words))
    group.all_gather(everybody, words).wait()
    rows = everybody.cpu().view(group.size, -1)
    return [loads(bytes_of(row, int(size))) for row, size in zip(rows, sizes, strict=True)]
