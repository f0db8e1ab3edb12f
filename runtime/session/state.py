"""What a session can say of itself."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from chorusline.actors.messages.messages import DriverSnapshot, WorkerSnapshot

_COLUMNS = (
    *("rank", "model", "steps", "buckets", "bytes", "forward", "backward", "communication"),
    *("overlap", "wait", "never got a gradient"),
)


class SessionState(enum.Enum):
    """What `session.state` says.

        if session.state is cl.SessionState.READY:
            await session.run(train)

    After a run it is READY again, and so it is after one that has failed.
    """

    NEW = "new"
    """Nothing was started."""

    READY = "ready"
    """The workers are idle."""

    RUNNING = "running"
    """A function runs."""

    CLOSED = "closed"
    """The session has ended everything that it started, and cannot start again."""


class SessionKind(enum.Enum):
    """OWN: its actors end with this process, or before. DETACHED: it is started here, and outlives
    this process. ATTACHED: it is detached, and there already."""

    OWN = "own"
    DETACHED = "detached"
    ATTACHED = "attached"


@dataclass(frozen=True, slots=True)
class SessionSnapshot:
    """The state of the session, its driver and its workers; print it when something hangs.

        snapshot = await session.snapshot()
        print(snapshot)

    workers: by seat; a string in place of a snapshot says why that worker did not answer.
    """

    state: SessionState
    driver: DriverSnapshot | None  # None: it did not answer, or belongs to a session host
    workers: tuple[WorkerSnapshot | str, ...]

    def statistics(self) -> str:
        """A table of what `DistributedDataParallel.statistics()` says on each rank, of each of its
        models; empty below debug level INFO, and before the first step.

            print((await session.snapshot()).statistics())
        """
        rows: list[tuple[str, ...]] = [_COLUMNS]
        for worker in self.workers:
            if isinstance(worker, str):  # The worker did not answer.
                continue
            for number, (_, one) in enumerate(sorted(worker.status.models.items())):
                ms = (one.forward_s, one.backward_s, one.communication_s, one.overlap_s, one.wait_s)
                rows.append(
                    (
                        *map(str, (worker.status.rank, number, one.steps, len(one.buckets))),
                        f"{sum(one.buckets):,}",
                        *(f"{1e3 * seconds:.2f} ms" for seconds in ms),
                        ", ".join(one.without_gradient) or "none",
                    )
                )
        if len(rows) == 1:
            return ""
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        aligned = [map(str.rjust, row[:-1], widths) for row in rows]
        return "\n".join("  ".join([*a, row[-1]]) for a, row in zip(aligned, rows, strict=True))

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
