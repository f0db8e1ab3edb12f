"""What a start waits for, told once if it takes long."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

from chorusline.actors.crew.crew import Crew
from chorusline.actors.messages import WorkerSnapshot

TOLD_AFTER_S = 8.0
"""Longer than a start on an idle machine takes."""

_LOOK_S = 0.5

_log = logging.getLogger("chorusline")


@contextlib.contextmanager
def told_if_slow(what: str) -> Iterator[None]:
    """While the body blocks this thread: say after TOLD_AFTER_S what it waits for."""
    timer = threading.Timer(TOLD_AFTER_S, _tell, [what])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextlib.asynccontextmanager
async def telling(what: Callable[[], Awaitable[str]]) -> AsyncIterator[None]:
    """While the body suspends: as `told_if_slow`. what: asked when it is time."""

    async def tell() -> None:
        await asyncio.sleep(TOLD_AFTER_S)
        _tell(await what())

    task = asyncio.create_task(tell(), name="start-notice")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


async def awaited(crew: Crew | None, fewest: int, timeout_s: float) -> str:
    """What a session's start waits for now, as the end of a sentence. crew: None before there is
    room. timeout_s: the session's startup_timeout_s."""
    if crew is None:
        what = f"room in the cluster for {fewest} workers"
    elif not crew.num_workers:
        return "the driver actor: Ray starts its process"
    else:
        said = await crew.workers_seen(_LOOK_S)
        ready = sum(isinstance(word, WorkerSnapshot) for word in said)
        what = (
            f"{len(said) - ready} of {len(said)} workers: Ray starts their processes, or they "
            "import torch"
        )
    return f"{what} (up to {timeout_s:g} s, startup_timeout_s)"


def _tell(what: str) -> None:
    _log.warning("the session has waited %g s for %s", TOLD_AFTER_S, what)
