"""What a start waits for, told while it does."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from chorusline.actors.worker_group.retry import beside
from chorusline.actors.worker_group.worker_group import WorkerGroup

from ..showing.starting import Starting

_LOOK_S = 0.25


@contextlib.asynccontextmanager
async def telling(starting: Starting, what: Callable[[], str], limit: str) -> AsyncIterator[None]:
    """While the body suspends: have `starting` say what it waits for. limit: until when."""

    async def tell() -> None:
        while True:
            starting.phase(what(), limit)
            await asyncio.sleep(_LOOK_S)

    async with beside(tell(), "start-notice"):
        yield


def awaited(worker_group: WorkerGroup | None, fewest: int) -> str:
    """What a session's start waits for now. worker_group: None before there is room."""
    if worker_group is None:
        return f"waiting for room in the cluster for {_workers(fewest)}"
    if not worker_group.num_workers:
        return "starting the driver actor"
    return f"starting {_workers(worker_group.num_workers)}, importing torch"


def _workers(count: int) -> str:
    return f"{count} worker{'s' * (count > 1)}"
