"""Copy-on-write views of memory in Ray's object store.

Ray maps the store's memory into each worker for reading and writing, and only asks politely that
nobody writes: a tensor on it that is written to changes in every process of the node. A private
mapping of the same pages costs nothing either, and a page that is written to becomes the process's
own.

A private mapping needs a descriptor of the store's file. The store runs in the raylet, which has it
open. Where it cannot be found or opened (another user, a sandbox), the buffers are copied.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy

_PAGE = mmap.PAGESIZE
_LOOK_BYTES = 64  # at both ends of a buffer, to see that the mapping shows the same memory


class _Mapping(mmap.mmap):
    """Keeps the buffers that it shows: the store may reuse their memory once they are gone."""

    shown: tuple[numpy.ndarray, ...]


def privately_mapped(buffers: Sequence[numpy.ndarray]) -> Sequence[memoryview | bytearray]:
    """The same bytes, in memory of this process that may be written to.

    buffers: (n,) uint8 each, in one shared mapping; else they are copied.
    """
    if not buffers:
        return []
    with suppress(OSError, ValueError):
        return _mapped(buffers)
    return [bytearray(buffer) for buffer in buffers]


def _mapped(buffers: Sequence[numpy.ndarray]) -> list[memoryview]:
    starts = [_address(buffer) for buffer in buffers]
    first = min(starts)
    last = max(start + buffer.nbytes for start, buffer in zip(starts, buffers, strict=True))
    begins_at, offset, device, inode = _mapping_of(first, last)
    descriptor = _opened(device, inode)
    try:
        page = (first - begins_at + offset) // _PAGE * _PAGE
        page_address = page - offset + begins_at
        mapping = _Mapping(
            descriptor,
            last - page_address,
            flags=mmap.MAP_PRIVATE,
            prot=mmap.PROT_READ | mmap.PROT_WRITE,
            offset=page,
        )
    finally:
        os.close(descriptor)
    mapping.shown = tuple(buffers)
    whole = memoryview(mapping)
    views = []
    for start, buffer in zip(starts, buffers, strict=True):
        at = start - page_address
        view = whole[at : at + buffer.nbytes]
        for part in (slice(_LOOK_BYTES), slice(-_LOOK_BYTES, None)):
            if view[part] != buffer.data[part]:
                raise ValueError("the mapping shows other memory")
        views.append(view)
    return views


def _address(buffer: numpy.ndarray) -> int:
    return int(buffer.__array_interface__["data"][0])


def _mapping_of(first: int, last: int) -> tuple[int, int, int, int]:
    """The shared mapping that has the addresses from `first` to `last`: its first address, the
    offset of this address in the file, and the file's device and inode. Raises ValueError."""
    for line in Path("/proc/self/maps").read_text(errors="replace").splitlines():
        addresses, rights, offset, device, inode, *_ = line.split()
        begin, end = (int(address, 16) for address in addresses.split("-"))
        if begin <= first < end:
            if last > end or not rights.endswith("s"):
                break
            major, minor = (int(part, 16) for part in device.split(":"))
            return begin, int(offset, 16), os.makedev(major, minor), int(inode)
    raise ValueError("the buffers are not in one shared mapping")


def _opened(device: int, inode: int) -> int:
    """A new descriptor, for reading, of a file that the raylet has open. Raises OSError."""
    # Ray tells its workers, whose parent it usually is, unless a program has started them for it.
    raylet = os.environ.get("RAY_RAYLET_PID") or os.getppid()
    for path in Path(f"/proc/{raylet}/fd").iterdir():
        with suppress(OSError):  # Closed meanwhile.
            found = path.stat()
            if (found.st_dev, found.st_ino) == (device, inode):
                return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    raise FileNotFoundError(f"no process has file {inode} open")
