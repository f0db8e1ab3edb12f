"""Pinned host memory: copies between it and the GPU go on while the host does other things.

What a copy brings down is undefined until it has ended, so the memory is poisoned when the copy is
launched. A copy up reads what the memory holds when the stream comes to it. In a strict process the
host must not read what came down before a collective behind it is known to have succeeded: the
event of a copy is reached too when a collective was stopped.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from collectives.transports.nccl_works import NcclWork

from . import streams
from .memory import fill_with_poison

_pinned: dict[int, weakref.ref[torch.Tensor]] = {}  # by address
_launched: dict[int, tuple[int, int]] = {}  # by address: the stream of the last copy, and its place
_succeeded: dict[int, int] = {}  # by stream: the place up to which works have succeeded


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
        _launched.pop(address, None)


def is_pinned(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.untyped_storage().data_ptr() in _pinned


def begin_down(tensor: torch.Tensor) -> None:
    """The next kernel of this thread's stream copies to `tensor`."""
    fill_with_poison(tensor)
    number = streams.current()
    place = streams.thread_of(number).launched + 1
    _launched[tensor.untyped_storage().data_ptr()] = number, place


def check_read(tensor: torch.Tensor, what: str) -> None:
    """The host is about to read it."""
    number, place = _launched.get(tensor.untyped_storage().data_ptr(), (0, 0))
    if place > _succeeded.get(number, 0) and streams.machine().strict:
        where = streams.place_of_ours()
        if where:
            streams.machine().misuses.append(
                f"{what} at {where} of what comes down, behind no wait_on_host"
            )


def install() -> None:
    any_tensor: Any = torch.Tensor
    for name in ("tolist", "item", "numpy"):
        setattr(any_tensor, name, _checking(name, getattr(any_tensor, name)))
    plain_wait = NcclWork._block_host

    def wait_on_host(self: NcclWork) -> None:
        if not self.done:
            streams.note_wait("wait_on_host")
        plain_wait(self)
        number, place = self.ended.at  # type: ignore[attr-defined]
        _succeeded[number] = max(place, _succeeded.get(number, 0))

    NcclWork._block_host = wait_on_host  # type: ignore[method-assign]


def _checking(name: str, plain: Any) -> Any:
    def read(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if _pinned and is_pinned(self):
            check_read(self, name)
        return plain(self, *args, **kwargs)

    return read
