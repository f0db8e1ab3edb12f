"""Memory of the stand-in GPU: given back in the order of its stream, and then overwritten.

A caching allocator hands memory to its next user as soon as the host has dropped it. Kernels of the
stream that it was allocated on come first, by order; those of other streams only if `record_stream`
has named these. Here memory that was dropped is poisoned in the order of its stream, and a kernel
of another stream that comes to it later is a misuse.
"""

from __future__ import annotations

import bisect
import threading
import weakref
from collections.abc import Iterable

import torch

from . import streams


class Allocation:
    """Memory from its allocation until no kernel refers to it.

    memory: on the host. stream: where it was allocated. recorded: streams that keep it.
    heard: by stream of a communicator, the last collective there that it depends on (heard.py).
    """

    def __init__(self, memory: torch.Tensor, stream: int) -> None:
        self.memory = memory
        self.stream = stream
        self.recorded: set[int] = set()
        self.heard: dict[int, int] = {}
        self.is_poisoned = False
        self.at = memory.untyped_storage().data_ptr()
        self.nbytes = memory.untyped_storage().nbytes()

    def poison(self) -> None:
        fill_with_poison(self.memory)
        self.is_poisoned = True

    def touch(self, stream: int, what: str) -> None:
        """A kernel of `stream` uses it now."""
        if self.is_poisoned and stream != self.stream:
            shape = tuple(self.memory.shape)
            streams.machine().misuses.append(
                f"{what} on stream {stream} uses {shape} of stream {self.stream} after they were "
                f"given back; record_stream named {sorted(self.recorded)}"
            )


class Block:
    """Held by the tensors in an allocation; the memory is given back when the last one is gone."""

    def __init__(self, allocation: Allocation) -> None:
        self.allocation = allocation
        weakref.finalize(self, _give_back, allocation)


_lock = threading.RLock()
_by_address: dict[int, Allocation] = {}
_addresses: list[int] = []  # ascending
num_emptied = 0


def allocate(size: Iterable[int], stride: Iterable[int] | None, dtype: torch.dtype) -> Block:
    """Undefined memory, and so poisoned."""
    streams.note_thread()
    size = tuple(size)
    with torch.inference_mode(False):
        if stride is None:
            memory = torch.empty(size, dtype=dtype)
        else:
            memory = torch.empty_strided(size, tuple(stride), dtype=dtype)
        fill_with_poison(memory)
    allocation = Allocation(memory, streams.current())
    with _lock:
        if allocation.nbytes and allocation.at not in _by_address:
            bisect.insort(_addresses, allocation.at)
        _by_address[allocation.at] = allocation
    return Block(allocation)


def allocation_at(address: int) -> Allocation | None:
    """The one that holds this address; None if nothing is allocated there."""
    with _lock:
        place = bisect.bisect_right(_addresses, address) - 1
        if place < 0:
            return None
        found = _by_address[_addresses[place]]
        return found if address < found.at + found.nbytes else None


def _give_back(allocation: Allocation) -> None:
    with _lock:
        if _by_address.get(allocation.at) is allocation:
            del _by_address[allocation.at]
            if allocation.nbytes:
                _addresses.remove(allocation.at)
    if not allocation.recorded - {allocation.stream}:
        # With record_stream the allocator waits for those streams, and nothing can go wrong.
        streams.thread_of(allocation.stream).launch(allocation.poison, always=True)


def empty_cache() -> None:
    """There is no cache here: what was asked is counted."""
    global num_emptied
    num_emptied += 1


def allocated() -> int:
    """Bytes of tensors; as torch.cuda.memory_allocated, which holds Python's lock and waits for the
    allocator's. A thread that allocates may hold that while it waits for kernels."""
    if threading.get_ident() not in streams.machine().users:
        name = threading.current_thread().name
        streams.machine().misuses.append(f"{name}, which does not compute, waits for the allocator")
    with _lock:
        return sum(allocation.nbytes for allocation in _by_address.values())


def fill_with_poison(tensor: torch.Tensor) -> None:
    with torch.inference_mode(False), torch.no_grad():
        if tensor.dtype is torch.bool:
            tensor.fill_(True)
        elif tensor.is_floating_point() or tensor.is_complex():
            tensor.fill_(float("nan"))
        else:
            tensor.fill_(0x5A)
