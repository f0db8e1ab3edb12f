"""What a rank says it is about to do, and what follows when ranks say different things."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .errors import CollectiveMismatch
from .operation import Operation, describe, with_detail


class Signature(NamedTuple):
    """An operation as five integers, with the meanings of `Operation`; equal on all ranks."""

    sequence: int
    kind: int
    dtype: int
    detail: int
    numel: int

    @classmethod
    def of(cls, operation: Operation) -> Signature:
        o = operation
        return cls(o.sequence, int(o.kind), o.dtype, int(o.detail), o.numel)

    def __str__(self) -> str:
        """`all_reduce #118 (1048576 float32) with SUM`"""
        told = describe(self.kind, self.sequence, self.numel, self.dtype)
        return with_detail(told, self.kind, self.detail)


def mismatch(generation: int, signatures: Sequence[Signature]) -> CollectiveMismatch | None:
    """The error if the ranks do not all do the same. It is equal on whichever rank makes it.

    signatures: one per rank. Where more than half of the ranks agree, the others are to blame;
    without such a majority, all are.
    """
    if len(set(signatures)) == 1:
        return None
    ranks_of: dict[Signature, list[int]] = {}
    for rank, signature in enumerate(signatures):
        ranks_of.setdefault(signature, []).append(rank)
    usual = max(ranks_of, key=lambda signature: len(ranks_of[signature]))
    majority = 2 * len(ranks_of[usual]) > len(signatures)
    blamed = [r for r, s in enumerate(signatures) if not majority or s != usual]
    told = ", ".join(f"ranks {ranks} issued {s}" for s, ranks in ranks_of.items())
    operation = describe(usual.kind, usual.sequence, usual.numel, usual.dtype)
    return CollectiveMismatch(operation, generation, blamed, told)
