"""Which cell of the notebook started which session, so that a cell can run again."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from chorusline.actors.ray_calls.detached_actors import OF_PROGRAM

from .interrupt import in_kernel, shell

Error = TypeVar("Error", bound=BaseException)


class Closable(Protocol):
    """A session, as far as a cell ends it."""

    async def close(self) -> None: ...


_started: list[tuple[weakref.ref[Any], str, str]] = []  # session, its cell, the cell's execution


async def close_earlier_session(
    session: Closable, which: Callable[[Any], bool] = lambda earlier: True
) -> None:
    """Close the sessions that earlier executions of the current cell started; record `session`.
    It may be called again, for those that `which` has left open."""
    # Of the first call: another cell may have begun since.
    recorded = (entry[1:] for entry in _started if entry[0]() is session)
    cell, execution = next(recorded, None) or _current_cell()
    earlier = [
        old
        for started, its_cell, its_execution in _started
        if cell and its_cell == cell and its_execution != execution
        if (old := started()) is not None and which(old)
    ]
    # In place: other functions of this file look at the same list.
    _started[:] = [entry for entry in _started if entry[0]() not in (None, session, *earlier)]
    _started.append((weakref.ref(session), cell, execution))
    # Only now: closing suspends, and another cell may start a session meanwhile.
    for old in earlier:
        await old.close()


def forget_session(session: Closable) -> None:
    """Its start has failed."""
    _started[:] = [entry for entry in _started if entry[0]() is not session]


def open_sessions() -> list[tuple[str, Any]]:
    """The sessions of this process that have workers, each with the notebook's variable that holds
    it; an empty text outside of a notebook."""
    names = getattr(shell(), "user_ns", {})
    return [
        (next((n for n, value in names.items() if value is one and n[:1] != "_"), ""), one)
        for ref, _, _ in _started
        if (one := ref()) is not None and one.state.value in ("ready", "running")
    ]


def hint_at_other_sessions(error: Error) -> Error:
    """The same error, with a note about other sessions of this notebook that hold workers."""
    # A detached one that is closed keeps its workers.
    num_open = sum(one.name.startswith(OF_PROGRAM) for _, one in open_sessions())
    if num_open and isinstance(error, Exception) and in_kernel():
        error.add_note(
            f"{num_open} session{'s' if num_open > 1 else ''} of this notebook, started in another "
            "cell, may hold what is missing: close it with `await session.close()`"
        )
    return error


def latest_session() -> Any:
    """The session that was started last and still exists, closed or not; None without one."""
    return next((found for ref, _, _ in reversed(_started) if (found := ref())), None)


def _current_cell() -> tuple[str, str]:
    """The current cell's identity and that of its execution; empty texts outside a kernel.

    If the front end names the cell, it stays the same cell when it is edited. Otherwise its text
    identifies it.
    """
    kernel = getattr(shell(), "kernel", None)
    if kernel is None:
        return "", ""
    request = kernel.get_parent("shell")
    cell = request.get("metadata", {}).get("cellId") or request.get("content", {}).get("code", "")
    return str(cell), str(request.get("header", {}).get("msg_id", ""))
