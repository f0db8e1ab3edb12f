"""`mixed_precision` of `DistributedDataParallel`: a forward pass on copies of another dtype.

The parameters stay as they are, and so do their gradients and the state of their optimizer. Each
forward pass of the wrapper runs the module on copies of the parameters in `param_dtype`. Copying is
part of the graph, so the backward pass leaves gradients in the dtype of the parameters, in the
buckets that they have anyway. `reduce_dtype` is a communication hook.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.func import functional_call
from torch.nn.parallel.distributed import _MixedPrecision
from torch.utils._pytree import tree_map

from chorusline.collectives.contract.operation import ReduceOp
from chorusline.collectives.group import Group

from .gradients.comm_hooks import CommHook, GradBucket

_DTYPES = (None, torch.float16, torch.bfloat16, torch.float32, torch.float64)


class DtypeOption(int):
    """A place in _DTYPES, which ranks compare as a number; as text it is the dtype."""

    def __str__(self) -> str:
        return str(_DTYPES[self])


def dtype_options(given: _MixedPrecision | None) -> dict[str, DtypeOption]:
    """The fields, by their names for people. Raises ValueError for another dtype."""
    options = {}
    for name in ("param_dtype", "reduce_dtype", "buffer_dtype"):
        dtype = getattr(given, name, None)
        if dtype not in _DTYPES:
            kinds = ", ".join(map(str, _DTYPES))
            raise ValueError(f"mixed_precision.{name} must be one of {kinds}, got {dtype}")
        options[f"mixed_precision.{name}"] = DtypeOption(_DTYPES.index(dtype))
    return options


def cast_buffers(module: torch.nn.Module, dtype: torch.dtype) -> None:
    """Floating-point buffers get the dtype for good; counters and masks keep theirs."""
    for buffer in module.buffers():
        if buffer.is_floating_point():
            buffer.data = buffer.to(dtype)


def run_in(
    dtype: torch.dtype, module: torch.nn.Module, inputs: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """The module's output, computed in `dtype`, from floating-point inputs in it."""

    def cast(value: Any) -> Any:
        is_floating = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(dtype) if is_floating else value

    copies = {name: cast(parameter) for name, parameter in module.named_parameters()}
    return functional_call(module, copies, tree_map(cast, tuple(inputs)), tree_map(cast, kwargs))


def reducing_in(dtype: torch.dtype, group_of: Callable[[], Group]) -> CommHook:
    """A hook that sends gradients in `dtype`. group_of: returns the model's present group."""

    def hook(group_of: Callable[[], Group], bucket: GradBucket) -> torch.futures.Future[Any]:
        work = group_of().all_reduce(bucket.buffer().to(dtype), ReduceOp.AVG)
        return work.get_future()

    hook.__qualname__ = f"mixed_precision(reduce_dtype={dtype})"
    return CommHook(group_of, hook)
