"""Tensors whose memory the other ranks of the host can map, so that they read it in place.

Each has a nameless file of its own (memfd). Its descriptor stays open as long as the tensor's
memory is in use; the others open it through /proc, and map it when they first read from it. So
such a tensor belongs to no group and to no generation: it outlives
the groups that have moved it.

What is known of the memory hangs on torch's storage, which all views of the tensor share.
"""

from __future__ import annotations

import ctypes
import errno
import os
from typing import NamedTuple

import torch

from .layout import mapped_file, nameless_file

_ON_STORAGE = "_chorusline_symmetric_memory"
_libc = ctypes.CDLL(None, use_errno=True)
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # of fallocate(2)


class MemoryPlace(NamedTuple):
    """Where a tensor lies, as one rank shows it to the others. inode 0: where none can map it.

    descriptor: of the file, in the process of the rank. inode: of the file, since numbers of
    descriptors come again. offset: of the tensor's first byte.
    """

    descriptor: int
    inode: int
    offset: int


NOWHERE = MemoryPlace(0, 0, 0)


class SymmetricMemory:
    """The file under a tensor's storage. It goes with the storage, its pages at once."""

    def __init__(self, descriptor: int, nbytes: int, address: int) -> None:
        """address: where this process has mapped the file."""
        self._address = address
        self._pid = os.getpid()
        self._descriptor = descriptor
        self._nbytes = nbytes
        self._inode = os.fstat(descriptor).st_ino

    def place_of(self, tensor: torch.Tensor) -> MemoryPlace:
        if os.getpid() != self._pid:
            return NOWHERE  # A fork: the descriptor's number is another file's, or will be.
        if tensor.untyped_storage().data_ptr() != self._address:
            return NOWHERE  # The storage has moved, as by `share_memory_`.
        offset = int(tensor.storage_offset()) * tensor.element_size()
        return MemoryPlace(self._descriptor, self._inode, offset)

    def __del__(self) -> None:
        if os.getpid() == self._pid:  # In a fork the memory is its parent's.
            # Peers that have mapped the file would keep its pages until they end their group. None
            # reads them any more: an operation is over when all have read, and one that fails
            # discards what it has read since.
            _libc.fallocate(
                self._descriptor,
                _KEEP_SIZE | _PUNCH_HOLE,
                ctypes.c_long(0),
                ctypes.c_long(self._nbytes),
            )
        os.close(self._descriptor)


def empty_symmetric(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor, (numel,), on the CPU, that other processes of this host can map; an ordinary one
    where the limits of this process do not allow such memory (`doctor` shows it)."""
    try:
        return make_symmetric(numel, dtype)
    except OSError:
        return torch.empty(numel, dtype=dtype, device="cpu")


def make_symmetric(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """The same without a way out. Raises OSError."""
    nbytes = numel * dtype.itemsize
    if nbytes <= 0:
        return torch.empty(numel, dtype=dtype, device="cpu")
    descriptor = nameless_file("chorusline-tensor", nbytes)
    try:
        tensor = mapped_file(descriptor)
    except OSError:
        os.close(descriptor)
        raise
    memory = SymmetricMemory(descriptor, nbytes, tensor.data_ptr())
    setattr(tensor.untyped_storage(), _ON_STORAGE, memory)
    return tensor.view(dtype)


def place_of(tensor: torch.Tensor) -> MemoryPlace:
    """Where `tensor`, contiguous, lies; NOWHERE if its memory is ordinary."""
    memory = getattr(tensor.untyped_storage(), _ON_STORAGE, None)
    return memory.place_of(tensor) if memory is not None else NOWHERE


def mapped(pid: int, place: MemoryPlace) -> torch.Tensor:
    """The whole file of a tensor in process `pid`, as (nbytes,) uint8; without a descriptor of its
    own. Raises OSError."""
    descriptor = os.open(f"/proc/{pid}/fd/{place.descriptor}", os.O_RDWR | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        if found.st_ino != place.inode:
            raise OSError(errno.ESTALE, f"descriptor {place.descriptor} is another file now")
        return mapped_file(descriptor)
    finally:
        os.close(descriptor)
