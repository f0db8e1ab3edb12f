"""Collectives under torch.inference_mode, which evaluations use.

A tensor made in inference mode may be written only in it. A transport's threads are not in that
mode, and tensors that a group keeps must not be made in it. So operations leave the mode wherever
they make or move tensors, and work on an alias of the caller's tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_T = TypeVar("_T")


def outside_inference_mode(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """`function`, which then runs as if its caller were not in torch.inference_mode."""

    @functools.wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode(False):
            return function(*args, **kwargs)

    return run


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """An ordinary tensor in the memory of a tensor that was made in inference mode."""
    ordinary = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    ordinary.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())
    if tensor.is_conj():
        ordinary = ordinary.conj()
    return torch._neg_view(ordinary) if tensor.is_neg() else ordinary
