"""The operation that a rank is about to run, as numbers, and the error when ranks disagree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..contract.errors import CollectiveMismatch
from ..contract.operation import Operation, describe, elements, with_detail
from .blame import describe_issued, usual_and_blamed


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
        """`all_reduce #118 (1048576 float32) with SUM`."""
        name = describe(self.kind, self.sequence, self.numel, self.dtype)
        return with_detail(name, self.kind, self.detail)


def mismatch(generation: int, signatures: Sequence[Signature]) -> CollectiveMismatch | None:
    """The error if the ranks' operations differ; every rank computes the same error.

    signatures: one per rank.
    """
    usual, blamed = usual_and_blamed(signatures)
    if not blamed:
        return None
    operation = describe(usual.kind, usual.sequence, usual.numel, usual.dtype)
    return CollectiveMismatch(operation, generation, blamed, describe_issued(signatures))


def pair_mismatch(
    operation: Operation, generation: int, tables: Sequence[Sequence[int]]
) -> CollectiveMismatch | None:
    """The error if a rank sends another number of elements than the receiver expects.

    tables: by rank, the elements it sends to each rank, then those it expects from each: 2 * size
    numbers, of elements as they travel.
    """
    size = len(tables)
    wrong = [
        (sender, receiver, tables[sender][receiver], tables[receiver][size + sender])
        for sender in range(size)
        for receiver in range(size)
        if tables[sender][receiver] != tables[receiver][size + sender]
    ]
    if not wrong:
        return None
    detail = "; ".join(
        f"rank {sender} sends {sent} elements to rank {receiver}, which expects {expected}"
        for sender, receiver, sent, expected in wrong
    )
    blamed = sorted({rank for pair in wrong for rank in pair[:2]})
    remedy = "A rank must expect from another rank as many elements as that one sends to it."
    return CollectiveMismatch(str(operation), generation, blamed, detail, remedy)


def message_mismatch(
    operation: Operation, generation: int, rank: int, numel: int, dtype: int
) -> CollectiveMismatch | None:
    """The error if a message has another count or dtype than `operation`, a recv on `rank`."""
    if (numel, dtype) == (operation.numel, operation.dtype):
        return None
    detail = (
        f"rank {operation.peer} sent {elements(numel, dtype)} and rank {rank} expects "
        f"{elements(operation.numel, operation.dtype)}"
    )
    blamed = sorted({rank, operation.peer})
    remedy = "A message and its recv must have equal sizes and dtypes."
    return CollectiveMismatch(str(operation), generation, blamed, detail, remedy)
