"""Sets of sample numbers as text, for what is written down of an epoch under way: a bit for each
number up to the largest one, so that a checkpoint does not grow by a word with every sample."""

from __future__ import annotations

import base64
import zlib
from array import array
from collections.abc import Iterable, Sequence

import torch


def _bits() -> torch.Tensor:
    return torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8)


def as_text(numbers: Sequence[int]) -> str:
    """The set of `numbers`, none of which is negative; their order is lost."""
    if not numbers:
        return ""
    # All ranks wait for this at a checkpoint, and `torch.tensor` takes three times as long.
    chosen = torch.frombuffer(array("q", numbers), dtype=torch.int64)
    mask = torch.zeros(-(-(int(chosen.max()) + 1) // 8) * 8, dtype=torch.uint8)
    mask[chosen] = 1
    packed = (mask.view(-1, 8) * _bits()).sum(1, dtype=torch.uint8)
    return base64.b64encode(zlib.compress(bytes(packed.tolist()), 1)).decode()


def from_text(text: str) -> list[int]:
    """The numbers of a set, ascending."""
    if not text:
        return []
    packed = torch.frombuffer(bytearray(zlib.decompress(base64.b64decode(text))), dtype=torch.uint8)
    return (packed.view(-1, 1) & _bits()).view(-1).nonzero().view(-1).tolist()


def numbers_of(told: str | Iterable[int] | None) -> Iterable[int]:
    """The numbers that a state has: as text, or one by one, as checkpoints had them before."""
    if told is None:
        return ()
    return from_text(told) if isinstance(told, str) else told
