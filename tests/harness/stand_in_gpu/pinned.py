"""Pinned host memory: copies between it and the GPU continue while the host does other things.

What a copy brings down is undefined until it has ended, so the memory is poisoned when the copy is
launched. A copy up reads what the memory holds when the stream comes to it. What came down depends
on other ranks as its source does (heard.py), and on the place of the copy in its stream: the event
of a copy is reached, too, when a collective before it was stopped.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from . import heard, streams
from .memory import Allocation, fill_with_poison

_pinned: dict[int, weakref.ref[torch.Tensor]] = {}  # by address
_heard: dict[int, heard.Places] = {}  # by address: what the last copy down depends on


def pin(tensor: torch.Tensor) -> torch.Tensor:
    address = tensor.untyped_storage().data_ptr()
    if tensor.numel():
        _pinned[address] = weakref.ref(tensor)
        weakref.finalize(tensor, _forget, address)
    return tensor


def _forget(address: int) -> None:
    known = _pinned.get(address)
    if known is not None and known() is None:
        del _pinned[address]
        _heard.pop(address, None)


def is_pinned(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.untyped_storage().data_ptr() in _pinned


def begin_down(tensor: torch.Tensor, source: Allocation) -> None:
    """The next kernel of this thread's stream copies `source` to `tensor`."""
    fill_with_poison(tensor)
    number = streams.current()
    places = {**heard.of([source]), number: streams.thread_of(number).launched + 1}
    _heard[tensor.untyped_storage().data_ptr()] = places


def install() -> None:
    any_tensor: Any = torch.Tensor
    for name in ("tolist", "item", "numpy"):
        setattr(any_tensor, name, _checking(name, getattr(any_tensor, name)))


def _checking(name: str, plain: Any) -> Any:
    def read(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if _pinned and is_pinned(self):
            heard.check_read(_heard.get(self.untyped_storage().data_ptr(), {}), name)
        return plain(self, *args, **kwargs)

    return read
