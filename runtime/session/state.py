"""What a session can say of itself."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from actors.messages import DriverSnapshot, WorkerSnapshot


class SessionState(enum.Enum):
    """NEW: nothing was started. READY: the workers are idle. RUNNING: a function runs. CLOSED: the
    session has ended everything that it started, and cannot start again."""

    NEW = "new"
    READY = "ready"
    RUNNING = "running"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class SessionSnapshot:
    """The state of the session, its driver and its workers; print it when something hangs.

    workers: by seat; a text in place of a snapshot says why that worker did not answer."""

    state: SessionState
    driver: DriverSnapshot | None
    workers: tuple[WorkerSnapshot | str, ...]

    def __str__(self) -> str:
        lines = [f"session {self.state.value}", str(self.driver or "no driver")]
        lines += [f"  seat {seat}: {worker}" for seat, worker in enumerate(self.workers)]
        return "\n".join(lines)


REMEDIES = {
    SessionState.NEW: "the session has not started; use `async with Session(...)` or start()",
    SessionState.RUNNING: (
        "the session runs another function; await that first, or make a second Session"
    ),
    SessionState.CLOSED: "the session is closed; make a new Session",
    SessionState.READY: "",
}
"""Why a session does not run a function now, and what to do."""
