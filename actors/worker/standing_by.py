"""What a worker does while it has no seat: it has started, has the program's modules, and waits."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import ray

from ..messages import WorkerInfo
from ..meter import Publisher
from ..parcels.parcel import Parcel
from .memory import spare_modules

_LOADED_LATE = "torch._dynamo"
"""torch loads it, and sympy with it, when the first optimizer is made: 2 to 4 s (torch 2.13)."""


_LOWEST = 19  # of the priorities that every process may take: the ranks' cores come first


def patient() -> ThreadPoolExecutor:
    """A thread for what may take its time: it gives way to whatever else wants a core. Linux has a
    priority for each thread, so that of the process stays, which could not be raised again."""

    def give_way() -> None:
        with contextlib.suppress(OSError):  # A sandbox without the call.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST)

    return ThreadPoolExecutor(1, "patient", give_way)


class StandingBy:
    """The part of a worker that takes a seat (crew/reserve.py). All of it runs on the control loop.

    A worker that begins in its seat is never asked for any of this.
    """

    _info: WorkerInfo
    _publisher: Publisher

    def __init__(self) -> None:
        self._has_seat = asyncio.Event()

    @ray.method(concurrency_group="control")
    async def prepare(self, program: Parcel) -> None:
        """Import what the program needs: open it once, and drop it."""
        # A program that cannot be opened fails where it is called, with the reason.
        loop = asyncio.get_running_loop()
        with patient() as thread, contextlib.suppress(Exception):
            await loop.run_in_executor(thread, program.opened)
            await loop.run_in_executor(thread, importlib.import_module, _LOADED_LATE)
        gc.collect()  # The program that was opened, if it knows itself.
        spare_modules()

    @ray.method(concurrency_group="control")
    async def stand_by(self) -> None:
        """Return when this worker has a seat; the death of its process ends the call as well."""
        await self._has_seat.wait()

    @ray.method(concurrency_group="control")
    async def sit(self, seat: int) -> None:
        """Take the seat of a worker that is gone."""
        self._info = replace(self._info, seat=seat)
        self._publisher.move_to(seat)
        self._has_seat.set()
