"""What is said of a detached session: by its session host, and in sentences for people."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from chorusline.actors.errors import StartupError
from chorusline.actors.messages.messages import WorkerSnapshot
from chorusline.actors.ray_calls.detached_actors import OF_PROGRAM

IDLE_TIMEOUT_S = 1800.0

RESULTS_KEPT_S = 24 * 3600.0
"""Seconds for which the session host of a session that has ended has its results and reports."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True)
class DetachedStatus:
    """A detached session as its session host sees it.

    run: the number of the run in progress, or of the last one; None before the first.
    is_running: whether that run is in progress.
    ran_s: seconds since its beginning, or that it took.
    workers: their answers, by seat; a text says why one gave none.
    num_clients: processes that are attached.
    idle_s: seconds without a run and without a client; None while there is one of them.
    restarts: how often the session host was started again.
    ended: why the session has ended; empty as long as it has not.
    ended_s: seconds since then.
    checkpoint, seed: of its Session. Its other arguments may hold secrets, such as env_vars.
    """

    name: str
    run: int | None
    is_running: bool
    ran_s: float
    workers: tuple[WorkerSnapshot | str, ...]
    num_spares: int
    num_clients: int
    idle_s: float | None
    idle_timeout_s: float
    restarts: int
    ended: str
    ended_s: float
    checkpoint: Any
    seed: int | None  # None: no seed was given

    def __str__(self) -> str:
        if self.ended:
            left_s = max(0.0, RESULTS_KEPT_S - self.ended_s)
            return (
                f"it ended {duration(self.ended_s)} ago: {self.ended}. `chorusline attach "
                f"{self.name}` shows its last run and the results for {duration(left_s)} more"
            )
        programs = "1 program is" if self.num_clients == 1 else f"{self.num_clients} programs are"
        words = [f"it trains in the background; {programs} attached"]
        limit = duration(self.idle_timeout_s)
        if not self.is_running:
            words = [f"it waits for a run; {programs} attached"]
        freed = f"its workers are freed {limit} after its last run, if no program is attached"
        if self.idle_s is not None:
            left = duration(max(0.0, self.idle_timeout_s - self.idle_s))
            freed = f"its workers are freed in {left}, unless a run begins or a program attaches"
        kept = duration(RESULTS_KEPT_S)
        words.append(f"{freed}; its results can be had for {kept} more")
        if self.restarts:
            words.append(f"its actor was restarted ({self.restarts})")
        return "; ".join(words)

    @property
    def in_words(self) -> str:
        """What it does, for a sentence that names it."""
        if self.ended:
            return f"ended {duration(self.ended_s)} ago ({self.ended})"
        if self.run is None:
            return "has run nothing yet"
        doing = "has been running for" if self.is_running else "has ended, after"
        return f"run {self.run} {doing} {duration(self.ran_s)}"


def duration(seconds: float) -> str:
    """As people say it: 90 s, 5 min, 3 h."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


def check_name(name: object, detached: bool) -> None:
    """Raise ValueError or TypeError for a name that no detached session can have, for one without a
    name, and for a name without `detached`."""
    if not detached:
        if name is not None:
            raise ValueError(
                f"name={name!r} is for sessions that outlive their program; write "
                f"Session(name={name!r}, detached=True), or leave the name out"
            )
        return
    if name is None:
        raise ValueError(
            "detached=True needs a name, by which another program attaches; write "
            "Session(name='night', detached=True)"
        )
    if not isinstance(name, str):
        raise TypeError(f"name must be a string, got {type(name).__name__}")
    if not _NAME.fullmatch(name) or name.startswith(OF_PROGRAM):
        raise ValueError(
            f"name must be of letters, digits, '.', '_' and '-', at most 64, and not begin with "
            f"{OF_PROGRAM!r}, as other sessions do; got {name!r}"
        )


def check_attachable(name: object) -> None:
    """Raise as `check_name`, and ValueError for the name of a session that is not detached."""
    if isinstance(name, str) and name.startswith(OF_PROGRAM):
        raise ValueError(
            f"{name!r} is a session that belongs to the program which has started it, and ends "
            "with it; only detached sessions can be attached to and stopped"
        )
    check_name(name, True)


def taken(name: str, status: DetachedStatus | None) -> StartupError:
    what = f"its {status.in_words}" if status and status.run is not None else "it is open"
    return StartupError(
        f"there is a detached session {name!r} on this cluster already",
        f"{what}. Attach to it with cl.attach({name!r}), end it with `chorusline stop {name}`, or "
        "choose another name",
    )


def not_found(name: str, others: list[str]) -> StartupError:
    has = f"there are {', '.join(others)}" if others else "there is none"
    return StartupError(
        f"there is no detached session {name!r} on this cluster",
        f"{has}. It may have ended: when idle for its limit, by `chorusline stop`, or with the "
        "cluster. `chorusline status` lists what runs; address= names another cluster; "
        f"Session(name={name!r}, detached=True) starts one",
    )
