"""Lists of several tensors, where torch's operations once had one for each device of a process.

Gloo still takes them: the tensors of a process count as those of as many ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from ..contract.arithmetic import reduce_into
from ..contract.operation import ReduceOp

_Item = TypeVar("_Item")


def only(items: Sequence[_Item], what: str = "tensor") -> _Item:
    """The one item of a list of tensors, or of lists of them."""
    if len(items) != 1:
        raise ValueError(f"requires a list of one {what}, got {len(items)}")
    return items[0]


def some(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    if not tensors:
        raise ValueError("requires a list of one tensor or more, got an empty one")
    return tensors


def alike(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The first of `tensors`, which count as one: they must agree in all but their elements."""
    first = some(tensors)[0]
    for i, tensor in enumerate(tensors):
        if (tensor.shape, tensor.dtype, tensor.layout) != (first.shape, first.dtype, first.layout):
            raise ValueError(
                f"invalid tensor at index {i}: it is {tuple(tensor.shape)} {tensor.dtype} "
                f"{tensor.layout}, but that at index 0 is {tuple(first.shape)} {first.dtype} "
                f"{first.layout}; pass tensors of one shape, dtype and layout"
            )
    return first


def reduced(tensors: Sequence[torch.Tensor], op: ReduceOp) -> torch.Tensor:
    """A new tensor, `tensors` reduced; an average is divided by the number of ranks alone."""
    first = alike(tensors)
    if first.layout is not torch.strided:
        with torch.no_grad():
            return sum(tensors[1:], start=first.clone())
    local = ReduceOp.SUM if op in (ReduceOp.AVG, ReduceOp.PREMUL_SUM) else op
    total = first.detach().clone(memory_format=torch.contiguous_format)
    reduce_into(total, [tensor.detach().contiguous() for tensor in tensors], local)
    return total


def copying(source: torch.Tensor, tensors: Sequence[torch.Tensor]) -> Callable[[], None]:
    def copy() -> None:
        for tensor in tensors:
            if tensor is source:
                continue
            if tensor.layout is torch.strided:
                tensor.data.copy_(source.data)
            else:
                with torch.no_grad():  # What `.data` of a sparse tensor receives, itself does not.
                    tensor.copy_(source)

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
        begin = int(tensor.storage_offset()) * tensor.element_size()
        steps = zip(tuple(tensor.shape), tuple(tensor.stride()), strict=True)
        span = sum((int(n) - 1) * int(step) for n, step in steps)
        if begin < ends.get(storage, 0):
            result[i] = tensor.detach().clone()
            copies.append((tensor, result[i]))
        end = begin + (span + 1) * tensor.element_size()
        ends[storage] = max(ends.get(storage, 0), end)
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
    alike(inputs)
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
