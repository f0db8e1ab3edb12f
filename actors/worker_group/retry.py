"""What a session does beside a run, again and again until it has worked.

A run continues by itself: nobody awaits the fill of an empty seat. If the cluster answers a
question of it with an error, the seat must not stay empty for that, and the error must not stay
unseen.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

from ..ray_calls.calls import ActorGone

AGAIN_S, AGAIN_AT_MOST_S = 1.0, 30.0
"""Seconds between two attempts: at first, and at most. It doubles."""

_log = logging.getLogger("chorusline")


@contextlib.asynccontextmanager
async def beside(coroutine: Coroutine[Any, Any, None], name: str) -> AsyncIterator[None]:
    """Run `coroutine` while the body suspends; it has ended before the block has. name: of its
    task. What it raises is left in the task."""
    task = asyncio.create_task(coroutine, name=name)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


async def persist(attempt: Callable[[], Awaitable[bool]], what: str) -> None:
    """Return when an attempt has returned true. Errors are logged; but raises ActorGone at once,
    since an actor that is gone does not come back.

    what: that has not worked, for the log.
    """
    pause_s = AGAIN_S
    while True:
        try:
            if await attempt():
                return
        except Exception as error:
            causes = error.exceptions if isinstance(error, ExceptionGroup) else (error,)
            # Errors of a TaskGroup come together; another error among them may pass.
            if all(isinstance(one, ActorGone) for one in causes):
                raise causes[0] from None
            why = "; ".join(f"{type(one).__name__}: {one}" for one in causes)
            _log.warning("%s: retrying in %g s, after %s", what, pause_s, why)
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, AGAIN_AT_MOST_S)
