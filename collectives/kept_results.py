"""What a rank keeps of the collectives of its function's beginning, for a worker that comes later.

That worker runs the function from the top by itself (rehearsal.py), and gets what this rank got.
The results of operations that give all ranks the same are kept, up to MOST_BYTES.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .contract.operation import Operation, named

MOST_BYTES = 16 << 20
"""Of results that a rank keeps, and of all that a worker gets before it runs the function."""


@dataclass(frozen=True, slots=True)
class KeptResult:
    """name: of the operation, for people. values: flat, on the CPU; None: it cannot be answered."""

    signature: tuple[int, ...]
    name: str
    values: torch.Tensor | None


def signature_of(operation: Operation, tensor: torch.Tensor) -> tuple[int, ...]:
    """What the operations of two ranks must have in common for one result to be that of both."""
    return int(operation.kind), tensor.numel(), operation.dtype, operation.detail


def kept_of(operation: Operation, tensor: torch.Tensor) -> KeptResult:
    """tensor: flat, with the result."""
    return KeptResult(signature_of(operation, tensor), named(operation), tensor.detach().cpu())
