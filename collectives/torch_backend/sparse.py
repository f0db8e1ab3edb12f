"""The sum of sparse tensors, which DDP needs for embeddings with sparse gradients."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..contract.deadlines import Seconds
from ..contract.operation import ReduceOp
from ..contract.work import Work
from ..group import Group
from ..objects.blocking import all_gather_row


def all_reduce(
    group: Group, tensor: torch.Tensor, op: ReduceOp, timeout_s: Seconds | None
) -> tuple[Work, Callable[[], None]]:
    """Gather the elements of all ranks: the work, and the function that adds them up after it.

    tensor: COO, of the same shape on all ranks, with any number of elements; written in place.
    Blocks until all ranks have sent their number of elements.
    """
    mine = checked(group, tensor, op)
    indices, values = mine.indices(), mine.values()
    numbers = [n for (n,) in all_gather_row(group, [indices.shape[1]], timeout_s)]
    # (sparse dimensions, n) by rank, and (n, dense dimensions) by rank
    all_indices = [indices.new_empty(indices.shape[0], n) for n in numbers]
    all_values = [values.new_empty(n, *values.shape[1:]) for n in numbers]
    with group.coalesce(timeout_s=timeout_s) as work:
        group.all_gather(all_indices, indices)
        group.all_gather(all_values, values)

    def add_up() -> None:
        total = torch.sparse_coo_tensor(
            torch.cat(all_indices, 1), torch.cat(all_values), tensor.shape
        )
        tensor.copy_(total.coalesce())

    return work, add_up


def checked(group: Group, tensor: torch.Tensor, op: ReduceOp) -> torch.Tensor:
    """`tensor` with each of its elements once; raises if `all_reduce` cannot sum it."""
    if tensor.layout is not torch.sparse_coo:
        raise ValueError(f"all_reduce of {tensor.layout}; convert with .to_sparse_coo()")
    if op is not ReduceOp.SUM:
        raise ValueError(f"all_reduce of a sparse tensor with {op.name}; only SUM is defined")
    mine = tensor.coalesce()
    group._checked(mine.values(), "tensor", False)
    return mine
