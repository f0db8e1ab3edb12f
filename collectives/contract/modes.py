"""Collectives under torch's modes: inference_mode, which evaluations use, and dispatch modes.

A tensor made in inference mode may be written only in it. A transport's threads are not in that
mode, and tensors that a group keeps must not be made in it. A dispatch mode (CommDebugMode, a
profiler of FLOPs) would see the transport's own arithmetic, as far as this thread does it, and may
change it. So operations leave the modes wherever they make or move tensors, and work on an alias of
a tensor made in inference mode.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

import torch
from torch.utils._python_dispatch import _disable_current_modes

_P = ParamSpec("_P")
_T = TypeVar("_T")

_FAKE = torch._C._TorchDispatchModeKey.FAKE
_num_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack


def in_a_mode() -> bool:
    return torch.is_inference_mode_enabled() or _num_dispatch_modes() > 0


@contextlib.contextmanager
def modes_left() -> Iterator[None]:
    with torch.inference_mode(False), _disable_current_modes():
        yield


def outside_modes(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """`function`, which then runs as if its caller were in no mode."""

    @functools.wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if not (torch.is_inference_mode_enabled() or _num_dispatch_modes()):
            return function(*args, **kwargs)
        with modes_left():
            return function(*args, **kwargs)

    return run


def refuse_fake_mode() -> None:
    """Raise TypeError under FakeTensorMode, in which no operation has data."""
    if torch._C._get_dispatch_mode(_FAKE) is not None:
        raise TypeError(
            "FakeTensorMode is on, and its tensors have no data that ranks could exchange; run "
            "the operation outside of it"
        )


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """An ordinary tensor in the memory of a tensor that was made in inference mode."""
    ordinary = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    ordinary.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())
    if tensor.is_conj():
        ordinary = ordinary.conj()
    return torch._neg_view(ordinary) if tensor.is_neg() else ordinary
