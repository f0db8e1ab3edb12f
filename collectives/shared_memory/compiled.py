"""The compiled bodies of operations (ticks.c), where the installation could build them.

An installation compiles the library if it finds a C compiler; without the library, and with
CHORUSLINE_COMPILED=0, the bodies of algorithms.py run instead. Both do the same in the same ticks,
so that ranks with and without it meet in one group. The library knows no Python: ctypes calls it,
without the interpreter's lock.
"""

from __future__ import annotations

import ctypes
import functools
import os
import struct
from collections.abc import Generator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..contract.call_site import SITE_BYTES
from ..contract.dtypes import DTYPE_INDEX
from ..contract.operation import Kind, Operation, ReduceOp
from .layout import ABORT_WORD, BLOCK_WORDS, SIGNATURE, SLEEPS_ON, TICK, block_at
from .segment import SharedSegment, what_of

DONE, ABORTED, MISMATCH = 0, -1, -2
"""What `advance` returns besides a tick."""

_ONE_TICK, _NO_WAIT, _PAUSE, _YIELD = range(-1, 3)
"""How long it waits for a tick; _ONE_TICK: it publishes one, and returns it."""

Task = tuple[bytes, bool, int, int]
"""What is the same in all operations of a signature, as in `struct task`; whether such an operation
takes less time than other threads notice; where its input and its output are."""

_QUICK_BYTES = 64 << 10
_MOST_KNOWN = 512

_PLACE = struct.Struct("=14q")
_SAME = struct.Struct("=11q")
_TASK = struct.Struct(f"={_SAME.size}s5q{SITE_BYTES}s")


class Library(NamedTuple):
    """advance_quickly: keeps the interpreter's lock, which costs less than to take it again."""

    advance: Any
    advance_quickly: Any
    can_add: Any


@functools.cache
def library() -> Library | None:
    """The library; None if it was not built, or is not for this machine."""
    source = Path(__file__).with_name("ticks.c")  # Only a checkout has it.
    for path in source.parent.glob("ticks*.so"):
        # One of an earlier commit may have other structs.
        if source.exists() and source.stat().st_mtime > path.stat().st_mtime:
            continue
        try:
            found = Library(
                ctypes.CDLL(str(path)).advance,
                ctypes.PyDLL(str(path)).advance,
                ctypes.CDLL(str(path)).can_add,
            )
        except (OSError, AttributeError):
            continue
        for advance in found[:2]:
            advance.restype = ctypes.c_int64
        found.can_add.argtypes = (ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
        return found
    return None


def compiled(segment: SharedSegment) -> Compiled | None:
    """None where the bodies of algorithms.py are to run."""
    found = None if os.environ.get("CHORUSLINE_COMPILED") == "0" else library()
    return None if found is None else Compiled(found, segment)


class Compiled:
    """The operation that a lane runs, in C. The lane gives it one after the other."""

    def __init__(self, found: Library, segment: SharedSegment) -> None:
        place = _PLACE.pack(
            *(segment.address, segment.rank, segment.size, segment.slots_at, segment.slot_bytes),
            *(segment.sites_at, SITE_BYTES, segment.size <= (os.cpu_count() or 1)),
            *(ABORT_WORD, block_at(0), BLOCK_WORDS, TICK, SLEEPS_ON, SIGNATURE),
        )
        self._segment = segment
        self._place = ctypes.create_string_buffer(place)
        self._place_at = ctypes.addressof(self._place)
        task = ctypes.create_string_buffer(_TASK.size)
        self._task = memoryview(task)
        self._task_at = ctypes.byref(task)
        self._advance = found.advance
        self._advance_quickly = found.advance_quickly
        self._can_add = functools.cache(found.can_add)
        self._same: dict[tuple[int, ...], tuple[bytes, bool]] = {}  # the first two of a `Task`

    def task(
        self,
        operation: Operation,
        kind: Kind,
        ticks: int,
        output: torch.Tensor,
        input: torch.Tensor,
        chunk: int,
        op: ReduceOp | None = None,
        root: int = -1,
    ) -> Task | None:
        """None if C does not have it. kind: the algorithm. chunk: elements of a tick, or a rank's
        in an all_reduce of several ticks. op: None where nothing is added."""
        numel = operation.numel
        key = kind, input.numel(), operation.kind, operation.dtype, operation.detail, numel
        same = self._same.get(key)
        if same is None:
            dtype, width = DTYPE_INDEX[input.dtype], input.itemsize
            if op is not None and not self._can_add(dtype, op, self._segment.size):
                return None
            if len(self._same) >= _MOST_KNOWN:  # Ever new sizes must not pile up.
                self._same.clear()
            count = min(input.numel(), output.numel())
            reduction = -1 if op is None else op
            packed = _SAME.pack(
                *(self._place_at, ticks, kind, dtype, width, reduction, root, count, chunk),
                *(what_of(operation), numel + 1),
            )
            same = self._same[key] = packed, ticks == 1 and count * width <= _QUICK_BYTES
        place = input.data_ptr()
        return *same, place, place if output is input else output.data_ptr()

    def begin(self, task: Task, operation: Operation, first_tick: int) -> None:
        same, _, place, to = task
        site = operation.padded_site()
        _TASK.pack_into(self._task, 0, same, first_tick, 0, operation.sequence, place, to, site)

    def body(
        self, tick: int, task: Task, operation: Operation, num_ticks: int
    ) -> Generator[int, bool, None]:
        """`task` as a body of algorithms.py, for an operation that finds out in its first tick
        whether this is its way. It is sent whether to spin."""
        self.begin(task, operation, tick)
        last = tick + num_ticks - 1
        wait = _ONE_TICK
        while (tick := self._advance(self._task_at, wait)) != DONE:
            if tick == ABORTED:
                self._segment.raise_failure()
            if tick < 0:
                self._segment.check_signatures(operation)
            wait = _YIELD if (yield tick) else _NO_WAIT
        yield last  # The lane counts on from what it got last.

    def advance(self, spin: bool) -> int:
        """Do what can be done of the operation that has begun; see ticks.c."""
        return self._advance(self._task_at, _YIELD if spin else _NO_WAIT)  # type: ignore[no-any-return]

    def advance_quickly(self) -> int:
        """The same for little data, for whose ranks it waits a microsecond or two."""
        return self._advance_quickly(self._task_at, _PAUSE)  # type: ignore[no-any-return]
