"""Tensors that are wrappers: what is inside them, or the error that says what to pass instead.

The memory of a wrapper is not its own: it lies in tensors that it holds, or there is none. A
transport that took it for a tensor would read memory that means nothing, or fail in a thread where
that ends the generation for all. So wrappers are found before anything is issued. For torch's own
backends an operator is dispatched to the class of the wrapper; that is done by our process group
(torch_backend/dispatcher.py), and not by a `Group`, whose operations are not operators of torch.
"""

from __future__ import annotations

import sys

import torch
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from ..contract.errors import with_article

_NO_DISPATCH = torch._C._disabled_torch_dispatch_impl


def unwrapped(value: torch.Tensor, name: str) -> torch.Tensor:
    """The tensor that holds the memory of `value`, whose class is not torch's own.

    A class that only adds Python to a tensor is left out; the result of a functional collective is
    waited for. Raises TypeError for a wrapper.
    """
    kind = type(value)
    functional = sys.modules.get("torch.distributed._functional_collectives")
    if functional is not None and isinstance(value, functional.AsyncCollectiveTensor):
        behind: torch.Tensor = value.trigger_wait()
        return behind
    if isinstance(value, UninitializedTensorMixin):
        raise TypeError(
            f"{name} is an {kind.__name__}, which has no elements yet; run the model once first"
        )
    if kind.__torch_dispatch__ == _NO_DISPATCH:
        return value.as_subclass(torch.Tensor)
    raise TypeError(f"{name} is {with_article(kind)}, {_mend(kind)}")


def check_memory(tensor: torch.Tensor, name: str) -> None:
    """Raise TypeError if a tensor of torch.Tensor itself has elements and no memory."""
    try:
        if tensor.data_ptr() or not tensor.numel():
            return
        what = "is a tensor without memory (of zeros, or of a functionalized program)"
    except RuntimeError:
        what = "is a wrapper of a transform (vmap, grad, jvp)"
    raise TypeError(
        f"{name} {what}; call the operation outside of the transform, on tensors that have memory "
        "(.clone() gives one to a tensor of zeros)"
    )


def _mend(kind: type) -> str:
    if kind.__name__ == "DTensor":
        return "of which each rank holds only a part; pass .to_local(), or redistribute it"
    if kind.__name__ == "FakeTensor":
        return "which has no data; run the operation outside of FakeTensorMode"
    return (
        "a wrapper around other tensors, and has no data itself; pass the tensors inside it, "
        "each in an operation of its own"
    )
