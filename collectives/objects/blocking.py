"""Collectives of integers, bytes and Python objects among a group's tensors, in the same order.

These functions block, and use no channel of their own: call them only where nothing else is in
flight. Users call the methods of `Group`, which can be awaited.

The functions on objects unpickle what other ranks sent, and unpickling runs code that the sender
chooses: use them only among processes of one user, as all ranks of a group are. A group with a seal
reads only what its ranks have signed, and raises SecretMismatch for anything else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from ..contract.deadlines import Seconds
from ..contract.work import Work
from ..operations.arguments import Array
from ..stores.signed_store import Seal
from .payloads import GpusTo, bytes_of, loads, opened, pickled, sealed, words_of


class BytesGroup(Protocol):
    """What a group (group.py) does for objects: it moves their bytes as tensors.

    seal: signs pickles; None: they are not signed. is_dry_run: it answers with what the other ranks
    have got, even from this one."""

    is_dry_run: bool
    rank: int
    size: int
    device: torch.device
    timeout_s: float
    seal: Seal | None

    def broadcast(self, tensor: Array, root: int, *, timeout_s: Seconds | None = None) -> Work: ...
    def all_gather(
        self, output: Array, input: Array, *, timeout_s: Seconds | None = None
    ) -> Work: ...
    def gather(self, tensor: Array, output: Sequence[Array] | None, dst: int) -> Work: ...
    def scatter(self, tensor: Array, input: Array | None, src: int) -> Work: ...


def all_gather_row(
    group: BytesGroup, row: Sequence[int], timeout_s: Seconds | None = None
) -> list[list[int]]:
    """The integers of all ranks, by rank. All ranks pass the same number of integers."""
    mine = torch.tensor(row, dtype=torch.int64, device=group.device)
    everybody = mine.new_empty(group.size * len(row))
    group.all_gather(everybody, mine, timeout_s=timeout_s).wait_on_host()
    rows: list[list[int]] = everybody.view(group.size, -1).tolist()
    return rows


def broadcast_object(
    group: BytesGroup,
    value: Any,
    root: int = 0,
    dumps: Callable[[Any], bytes] = pickled,
    timeout_s: Seconds | None = None,
) -> Any:
    """The value of rank `root` on every rank: the object itself on `root`, a copy elsewhere, with
    the tensors of root's GPU on the group's device.

    value: anything that pickles; ignored on the other ranks. dumps: pickles the value.
    timeout_s: seconds until all ranks have come; None: as the group's.
    """
    is_root = _sends(group, root)
    payload = sealed(group.seal, dumps(value), root) if is_root else b""
    payload = broadcast_bytes(group, payload, root, timeout_s=timeout_s)
    return value if is_root else _loaded(group, payload, root)


def all_gather_object(group: BytesGroup, value: Any, timeout_s: Seconds | None = None) -> list[Any]:
    """The values of all ranks, by rank, on every rank. timeout_s: as in `broadcast_object`."""
    payload = sealed(group.seal, pickled(value), group.rank)
    lengths = [length for (length,) in all_gather_row(group, [len(payload)], timeout_s)]
    everybodys = enumerate(all_gather_bytes(group, payload, lengths))
    return [_loaded(group, theirs, rank) for rank, theirs in everybodys]


def _loaded(group: BytesGroup, payload: bytes, rank: int) -> Any:
    return loads(opened(group.seal, payload, rank), GpusTo(group.device))


def broadcast_bytes(
    group: BytesGroup,
    payload: bytes,
    root: int,
    length: int | None = None,
    *,
    timeout_s: Seconds | None = None,
) -> bytes:
    """The payload of rank `root`. length: in bytes, if all ranks know it. timeout_s: as in
    `broadcast_object`."""
    if length is None:
        size = torch.tensor([len(payload)], dtype=torch.int64, device=group.device)
        group.broadcast(size, root, timeout_s=timeout_s).wait_on_host()
        length = int(size)
    words = words_of(payload, length).to(group.device)
    group.broadcast(words, root, timeout_s=timeout_s).wait_on_host()
    return payload if _sends(group, root) else bytes_of(words, length)


def _sends(group: BytesGroup, root: int) -> bool:
    """A rank that takes the place of a lost `root` gets what that one had sent."""
    return group.rank == root and not group.is_dry_run


def all_gather_bytes(group: BytesGroup, payload: bytes, lengths: Sequence[int]) -> list[bytes]:
    """The payloads of all ranks. lengths: by rank, in bytes."""
    words = words_of(payload, max(lengths)).to(group.device)
    everybody = words.new_empty(group.size * len(words))
    group.all_gather(everybody, words).wait_on_host()
    rows = everybody.cpu().view(group.size, -1)
    return [bytes_of(row, length) for row, length in zip(rows, lengths, strict=True)]


def gather_bytes(
    group: BytesGroup, payload: bytes, root: int, lengths: Sequence[int]
) -> list[bytes] | None:
    """The payloads of all ranks on `root`, None elsewhere; for CPU groups. lengths: in bytes."""
    into = [words_of(b"", length) for length in lengths] if group.rank == root else None
    group.gather(words_of(payload, len(payload)), into, root).wait_on_host()
    if into is None:
        return None
    return [bytes_of(words, length) for words, length in zip(into, lengths, strict=True)]


def scatter_bytes(group: BytesGroup, payloads: Sequence[bytes] | None, root: int) -> bytes:
    """This rank's element of `payloads`, which rank `root` passes; for groups between CPUs."""
    length = torch.zeros(1, dtype=torch.int64, device="cpu")
    counts = None if payloads is None else [len(one) for one in payloads]
    lengths = None if counts is None else torch.tensor(counts, device="cpu")
    group.scatter(length, lengths, root).wait_on_host()
    words = words_of(b"", int(length))
    parts = None if payloads is None else [words_of(one, len(one)) for one in payloads]
    group.scatter(words, parts, root).wait_on_host()
    return bytes_of(words, int(length))
