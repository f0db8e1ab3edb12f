"""The memory of a worker's process, and giving back what a run has left behind.

What a function leaves in cycles of references (a dataset in the frames of an exception, a model
that knows itself) stays until Python next looks for cycles, and what is freed may stay in the heap
of the C library. Both are looked after between two runs, if the process has grown.
"""

from __future__ import annotations

import ctypes
import gc
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_GROWN_BYTES = 32 * 2**20
"""Growth that is worth the search, which takes a tenth of a second where torch is loaded."""


def resident_bytes() -> int:
    """Memory of this process, as the kernel counts it."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def spare_modules() -> None:
    """Leave all objects there are now out of Python's garbage collection; call it before anything
    of a user's exists. 216,000 objects of torch, Ray and this package take 90 ms of each
    collection, and it may fall into a recovery, for which all ranks wait."""
    gc.freeze()


def device_memory_bytes(device: torch.device) -> int:
    """Memory of tensors on the GPU. For the training thread only.

    The question takes the lock of torch's allocator, with Python's lock held. An allocation of the
    training thread may hold the allocator's for as long as kernels run, which may wait for a lost
    rank: a control loop that asks then answers nobody, and cannot abort either.
    """
    import torch  # Not at the top of the file: see Worker.__init__, which has imported it.

    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def give_back_device_memory() -> None:
    """Free what a function has left on the GPU in cycles of references, and torch's cache. For the
    training thread only, and not after an error: a kernel may hang, and torch would wait for it."""
    import torch  # As above.

    if torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()


class Leftovers:
    """Gives memory back after runs. What remains then counts as wanted: it is searched for again
    only when the process has grown further."""

    def __init__(self) -> None:
        self._wanted_bytes = resident_bytes()
        # Of the GNU C library; others give memory back by themselves.
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)

    def give_back(self) -> None:
        """Called after each run; does nothing unless the process has grown."""
        now = resident_bytes()
        if now > self._wanted_bytes + _GROWN_BYTES:
            gc.collect()
            if self._trim is not None:
                self._trim(0)
            now = resident_bytes()
            self._wanted_bytes = now
        self._wanted_bytes = min(self._wanted_bytes, now)
