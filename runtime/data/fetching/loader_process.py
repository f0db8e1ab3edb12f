"""What a loader process does before its first sample, and how a dataset comes to it.

A loader process is a child of a rank's process: torch's DataLoader starts it, and it makes batches.
By default it is a fork. Then it shares the memory of the dataset, and nothing is sent. But it also
has a copy of everything else that the rank's process had at that instant, hence four precautions:

1. *It ends with its rank.* torch's own watchdog looks every 5 s, and not while a batch waits to be
   written to a full pipe that nobody reads any more. A thread here waits for the exit of the rank's
   process instead (process/torch_loaders.py). So it is with all torch DataLoaders of a rank, and
   torchdata's StatefulDataLoaders, including those of a script.
2. *It closes the rank's connections.* A connection is closed for the other side only when all
   processes that have it have closed it. So the loader processes would keep alive what a rank
   closes, or what a killed rank leaves: the other ranks and Ray would learn of it late.
3. *It leaves inherited objects alone.* Its garbage collector would free objects of the rank's, such
   as handles of Ray, whose clean-up needs threads and locks that a fork does not have; and it would
   write into pages that are shared until then.
4. *It prints by streams of its own.* Those of a worker have a lock that another thread may have
   held at the instant of the fork.
"""

from __future__ import annotations

import contextlib
import gc
import io
import mmap
import os
import pickle
import stat
import sys
from collections import ChainMap
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy
from ray import cloudpickle
from torch.utils.data import IterableDataset
from torch.utils.data._utils import worker

from .seeded_dataset import SeededDataset


class AtStart:
    """DataLoader's `worker_init_fn`. is_fork: the process that calls this is a fork of the rank's.
    then: the user's worker_init_fn, or None."""

    def __init__(self, is_fork: bool, then: Callable[[int], object] | None) -> None:
        self.is_fork = is_fork
        self.then = then

    def __call__(self, number: int) -> None:
        """number: of the loader process, from 0."""
        if self.is_fork:
            close_connections()
            gc.freeze()
            sys.stdout, sys.stderr = _stream(1), _stream(2)
        info: Any = worker._worker_info
        if isinstance(info.dataset, SeededDataset):  # The user's own, which `then` may change.
            object.__setattr__(info, "dataset", info.dataset.dataset)
        if self.then is not None:
            self.then(number)


def end_processes(batches: object) -> None:
    """End the loader processes of a DataLoader's iterator, if it has some.

    torch does so when nothing refers to the iterator, but a caught error may refer to it; and where
    the garbage collector finds it, its processes may not be told, and are waited for: 5 s each.
    """
    end = getattr(batches, "_shutdown_workers", None)
    if end is not None:
        end()


def close_connections() -> None:
    """Close all sockets of this process. Pipes stay: the queues of batches are pipes."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for entry in Path("/proc/self/fd").iterdir():
        descriptor = int(entry.name)
        with contextlib.suppress(OSError):  # That of the listing is closed by now.
            if descriptor > 2 and stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                # The number stays taken: an inherited object may close it once more.
                os.dup2(nothing, descriptor, inheritable=False)
    os.close(nothing)


def _stream(descriptor: int) -> io.TextIOWrapper:
    return open(descriptor, "w", buffering=1, errors="backslashreplace", closefd=False)


# -- for "spawn" and "forkserver" ------------------------------------------------------------------


class _Pickler(cloudpickle.Pickler):
    """Pickles functions and classes that the loader process cannot import, and shares memory as
    torch does: a tensor moves to shared memory once, and every process maps it."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        reducers: Any = (ForkingPickler._extra_reducers, self.dispatch_table)  # type: ignore[attr-defined]
        self.dispatch_table = ChainMap(*reducers)

    def reducer_override(self, value: Any) -> Any:
        mapping: Any = value if type(value) is numpy.memmap else None
        if mapping is None or not isinstance(mapping.base, mmap.mmap) or mapping.filename is None:
            return super().reducer_override(value)
        # Opened again from its file. numpy alone would send what the file contains.
        order = "F" if mapping.flags.fnc else "C"
        # "c": what a process writes stays its own, as in a pickled copy. "w+" would empty the file.
        mode = "r" if mapping.mode == "r" else "c"
        place = (mapping.filename, mapping.dtype, mode, mapping.offset, mapping.shape, order)
        return numpy.memmap, place


class ByValue:
    """Stands for `value` in the arguments of a loader process, which gets the value itself."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __reduce__(self) -> Any:
        # Pickled for each process: torch's handles of shared memory belong to one process.
        written = io.BytesIO()
        _Pickler(written).dump(self.value)
        return cloudpickle.loads, (written.getvalue(),)


class IterableByValue(ByValue, IterableDataset[Any]):
    """The same for an IterableDataset: a DataLoader looks at the class."""

    def __iter__(self) -> Iterator[Any]:
        return iter(self.value)


def by_value(value: Any) -> Any:
    """`value`, or what stands for it in the arguments of a loader process that is no fork."""
    return IterableByValue(value) if isinstance(value, IterableDataset) else ByValue(value)


def why_unpicklable(value: Any) -> Exception | None:
    """The error of pickling `value` for another process; None if it can be pickled."""
    try:
        _Pickler(io.BytesIO()).dump(value)
    except Exception as error:
        return error
    return None
