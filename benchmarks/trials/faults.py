"""What happens to a system under test, drawn from a seed, and carried out from outside by pid."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

KINDS = {
    "kill": "SIGKILL of one rank",
    "two": "SIGKILL of two ranks at once",
    "again": "SIGKILL of one rank, and of another one while the others recover",
    "newcomer": "SIGKILL of one rank, and of the first process that comes for it",
    "stop": "SIGSTOP of one rank for 3 s, then SIGCONT",
    "throttle": "one rank is stopped for half of each 60 ms, for 3 s",
    "drain": "SIGTERM of one rank, as a scheduler that takes a machine back, and SIGKILL 5 s later",
    "coordinator": "SIGKILL of the process that coordinates the ranks",
    "disk": "the disk with the checkpoints is full for 3 s",
    "exception": "one rank raises an exception in its training function",
}

_DEADLY = ("kill", "two", "again", "newcomer", "drain")
_STOPPED_S = 3.0
_PERIOD_S = 0.06
_NEWCOMER_S = 60.0
_GRACE_S = 5.0


class Target(Protocol):
    """A training under way, as the faults see it. num_workers: that it began with."""

    num_workers: int

    def ranks(self) -> Collection[int]:
        """The living ranks, by pid: who has taken a step. What starts, or is in a dry run, is none:
        it has no state that could continue without the others."""

    def processes(self) -> Collection[int]:
        """All living processes that train, or are about to, by pid."""

    def coordinators(self) -> Collection[int]: ...

    def full_disk(self) -> contextlib.AbstractContextManager[None]:
        """The disk with its checkpoints takes nothing in here."""

    def plant(self, pid: int) -> None:
        """That process raises an exception before its next batch."""


@dataclass(frozen=True)
class Fault:
    """kind: of KINDS. at: in [0, 1), of the steps of the training. first, second: in [0, 1), which
    of the living ranks. delay_s: until the second one is struck."""

    kind: str
    at: float
    first: float
    second: float
    delay_s: float


def draw(seed: int, number: int, kinds: Sequence[str]) -> list[Fault]:
    """The faults of one trial, in their order."""
    rng = random.Random(seed)
    # An exception ends the training of some systems, rightly: only the last fault can be one.
    rest = [kind for kind in kinds if kind != "exception"] or list(kinds)
    drawn = [
        Fault(
            rng.choice(kinds if one == number - 1 else rest),
            *(rng.random(), rng.random(), rng.random(), rng.random() / 2),
        )
        for one in range(number)
    ]
    # The last tenth is left alone: what strikes when all is over strikes nothing.
    places = sorted(0.05 + 0.85 * fault.at for fault in drawn)
    return [replace(fault, at=at) for fault, at in zip(drawn, places, strict=True)]


def is_alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def strike(fault: Fault, target: Target) -> tuple[list[int], float]:
    """Carry a fault out; returns the pids that were struck, and when the first of them was."""
    if fault.kind == "coordinator":
        pids = list(target.coordinators())
    else:
        pids = _struck_among(fault, target)
    at = time.time()
    return _carry_out(fault, target, pids) if pids else [], at


def _carry_out(fault: Fault, target: Target, pids: list[int]) -> list[int]:
    """pids: of the coordinators, or of the living ranks in order. Returns those it has struck."""
    if fault.kind == "coordinator":
        return [pid for pid in pids if _send(pid, signal.SIGKILL)]
    first = pids[int(fault.first * len(pids))]
    others = [pid for pid in pids if pid != first] or [first]
    second = others[int(fault.second * len(others))]
    match fault.kind:
        case "kill":
            _send(first, signal.SIGKILL)
        case "two" | "again":
            _send(first, signal.SIGKILL)
            if len(pids) > 2:
                time.sleep(fault.delay_s if fault.kind == "again" else 0.0)
                _send(second, signal.SIGKILL)
                return [first, second]
        case "newcomer":
            before = set(target.processes())
            _send(first, signal.SIGKILL)
            return [first, *_strike_newcomer(target, before)]
        case "stop":
            _send(first, signal.SIGSTOP)
            time.sleep(_STOPPED_S)
            _send(first, signal.SIGCONT)
        case "throttle":
            ends_at = time.monotonic() + _STOPPED_S
            while time.monotonic() < ends_at and _send(first, signal.SIGSTOP):
                time.sleep(_PERIOD_S / 2)
                _send(first, signal.SIGCONT)
                time.sleep(_PERIOD_S / 2)
        case "drain":
            _send(first, signal.SIGTERM)
            gives_up_at = time.monotonic() + _GRACE_S
            while is_alive(first) and time.monotonic() < gives_up_at:
                time.sleep(0.05)
            _send(first, signal.SIGKILL)
        case "disk":
            with target.full_disk():
                time.sleep(_STOPPED_S)
        case "exception":
            target.plant(first)
    return [first]


def _struck_among(fault: Fault, target: Target) -> list[int]:
    """The living ranks, in order. Nobody ends the last one of several: that of all at once is
    another fault, and systems without a copy elsewhere rightly end with it."""
    fewest = 2 if fault.kind in _DEADLY and target.num_workers > 1 else 1
    gives_up_at = time.monotonic() + _NEWCOMER_S
    while len(living := sorted(target.ranks())) < fewest:
        if time.monotonic() > gives_up_at:
            return []
        time.sleep(0.02)
    return living


def _strike_newcomer(target: Target, before: set[int]) -> list[int]:
    gives_up_at = time.monotonic() + _NEWCOMER_S
    while time.monotonic() < gives_up_at:
        if came := sorted(set(target.processes()) - before):
            _send(came[0], signal.SIGKILL)
            return [came[0]]
        time.sleep(0.01)
    return []


def _send(pid: int, number: signal.Signals) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
        return True
    return False
