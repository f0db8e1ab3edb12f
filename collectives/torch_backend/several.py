"""Lists of several tensors, where torch's operations once had one for each device of a process.

Gloo still takes them: the tensors of a process count as those of so many ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..contract.arithmetic import reduce_into
from ..contract.operation import ReduceOp


def only(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    if len(tensors) != 1:
        raise ValueError(f"requires a single-element tensor list, got {len(tensors)} tensors")
    return tensors[0]


def reduced(tensors: Sequence[torch.Tensor], op: ReduceOp) -> torch.Tensor:
    """A new tensor, `tensors` reduced; an average is divided by the number of ranks alone."""
    first = tensors[0]
    for i, tensor in enumerate(tensors):
        if tensor.shape != first.shape or tensor.dtype != first.dtype:
            raise ValueError(
                f"invalid tensor size at index {i} (expected {tuple(first.shape)} {first.dtype}, "
                f"got {tuple(tensor.shape)} {tensor.dtype})"
            )
    if first.layout is not torch.strided:
        return sum(tensors[1:], start=first.clone())
    local = ReduceOp.SUM if op in (ReduceOp.AVG, ReduceOp.PREMUL_SUM) else op
    total = first.detach().clone(memory_format=torch.contiguous_format)
    reduce_into(total, [tensor.detach().contiguous() for tensor in tensors], local)
    return total


def copying(source: torch.Tensor, tensors: Sequence[torch.Tensor]) -> Callable[[], None]:
    def copy() -> None:
        for tensor in tensors:
            if tensor is not source:
                tensor.data.copy_(source.data)

    return copy


def apart(
    tensors: Sequence[torch.Tensor],
) -> tuple[Sequence[torch.Tensor], Callable[[], None] | None]:
    """`tensors`, with copies for those that share memory with one before; and what copies back.

    An operation on each in turn would else meet the result of another.
    """
    if len(tensors) == 1:
        return tensors, None
    ends: dict[int, int] = {}  # by storage, how far tensors before take it
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []
    result = list(tensors)
    for i in sorted(range(len(tensors)), key=lambda i: tensors[i].storage_offset()):
        tensor = tensors[i]
        if not tensor.numel():
            continue
        storage = tensor.untyped_storage().data_ptr()
        begin = tensor.storage_offset() * tensor.element_size()
        span = sum((n - 1) * abs(s) for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        if begin < ends.get(storage, 0):
            result[i] = tensor.detach().clone()
            copies.append((tensor, result[i]))
        ends[storage] = max(ends.get(storage, 0), begin + (span + 1) * tensor.element_size())
    if not copies:
        return tensors, None

    def copy_back() -> None:
        for tensor, copy in copies:
            tensor.data.copy_(copy)

    return result, copy_back


def gathered(
    inputs: Sequence[torch.Tensor], outputs: Sequence[Sequence[torch.Tensor]], size: int
) -> tuple[list[torch.Tensor], list[list[torch.Tensor]], Callable[[], None]]:
    """One input and one output instead of several, and what copies their parts."""
    count = len(inputs)
    if len(outputs) != count or any(len(output) != size * count for output in outputs):
        raise ValueError(
            f"allgather of {count} tensors on {size} ranks needs {count} lists of {size * count} "
            f"tensors, got {[len(output) for output in outputs]}"
        )
    whole = torch.stack([tensor.detach() for tensor in inputs])
    received = [torch.empty_like(whole) for _ in range(size)]

    def copy() -> None:
        for output in outputs:
            for target, source in zip(output, torch.cat(received), strict=True):
                target.data.copy_(source)

    return [whole], [received], copy
