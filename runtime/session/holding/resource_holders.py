"""Names the sessions that hold resources which a starting session waits for, and how to close
them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Protocol

from chorusline.actors.ray_calls.detached_actors import INCARNATION, OF_PROGRAM, names_of
from chorusline.actors.worker_group.retry import beside

from ... import notebook
from ..placing import placement

_LOOK_AFTER_S = 1.0
"""Longer than a placement takes where there is room, and than Ray needs to count what a session
that was closed has given back."""

_log = logging.getLogger("chorusline")


class Holder(Protocol):
    """An open session of this process."""

    @property
    def name(self) -> str: ...

    @property
    def num_workers(self) -> int: ...


@contextlib.asynccontextmanager
async def telling_who_holds(
    bundle: Mapping[str, float], fewest: int, timeout_s: float
) -> AsyncIterator[None]:
    """While the body waits for room for `fewest` workers: say soon which sessions hold it."""

    async def tell() -> None:
        await asyncio.sleep(_LOOK_AFTER_S)
        short = placement.shortage(bundle, fewest)
        # Ray's answer may take its time on a busy head.
        names = await asyncio.to_thread(names_of, INCARNATION) if short else []
        if names:
            held = who_holds(names, notebook.open_sessions())
            _log.warning("%s: %s. Waiting up to %g s (startup_timeout_s)", short, held, timeout_s)

    async with beside(tell(), "holders"):
        yield


def who_holds(names: Sequence[str], ours: Sequence[tuple[str, Holder]]) -> str:
    """A sentence. names: of all sessions of the cluster. ours: those of this process, each with the
    variable that holds it, or an empty text."""
    here = {holder.name: (variable, holder) for variable, holder in ours}
    sentences = []
    for name in names:
        is_detached = not name.startswith(OF_PROGRAM)
        if name in here:
            variable, holder = here[name]
            workers = f"{holder.num_workers} worker{'s' if holder.num_workers > 1 else ''}"
            # `close` only lets go of a detached one, which keeps what it holds.
            how = (
                f"end it with `await {variable or 'session'}.stop()`"
                if is_detached
                else f"close it with `await {variable or 'session'}.close()`, or let its `async "
                "with` end first"
            )
            sentences.append(f"{name}, which this program has open, holds {workers}; {how}")
        elif is_detached:
            sentences.append(f"{name} is a detached session; `chorusline stop {name}` ends it")
        else:
            sentences.append(f"{name} belongs to another program; see `chorusline status`")
    return ". ".join(sentences)
