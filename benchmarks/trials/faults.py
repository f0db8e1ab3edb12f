"""What happens to a system under test, drawn from a seed, and carried out from outside by pid."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

KINDS = {
    "kill": "SIGKILL of one rank",
    "two": "SIGKILL of two ranks at once",
    "again": "SIGKILL of one rank, and of another one while the others recover",
    "newcomer": "SIGKILL of one rank, and of the first process that comes for it",
    "stop": "SIGSTOP of one rank for 3 s, then SIGCONT",
    "throttle": "one rank is stopped for half of each 60 ms, for 3 s",
    "coordinator": "SIGKILL of the process that coordinates the ranks",
}

_STOPPED_S = 3.0
_PERIOD_S = 0.06
_NEWCOMER_S = 60.0


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
    drawn = [
        Fault(rng.choice(kinds), rng.random(), rng.random(), rng.random(), rng.random() / 2)
        for _ in range(number)
    ]
    # The last tenth is left alone: what strikes when all is over strikes nothing.
    places = sorted(0.05 + 0.85 * fault.at for fault in drawn)
    return [
        Fault(fault.kind, at, fault.first, fault.second, fault.delay_s)
        for fault, at in zip(drawn, places, strict=True)
    ]


def is_alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def strike(
    fault: Fault, ranks: Callable[[], Collection[int]], coordinators: Callable[[], Collection[int]]
) -> list[int]:
    """Carry a fault out; returns the pids that were struck. ranks: the living ones, by pid."""
    if fault.kind == "coordinator":
        return [pid for pid in coordinators() if _send(pid, signal.SIGKILL)]
    before = sorted(ranks())
    if not before:
        return []
    first = before[int(fault.first * len(before))]
    others = [pid for pid in before if pid != first] or [first]
    second = others[int(fault.second * len(others))]
    match fault.kind:
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
        case _:
            _send(first, signal.SIGKILL)
    if fault.kind in ("two", "again") and len(before) > 2:
        time.sleep(fault.delay_s if fault.kind == "again" else 0.0)
        _send(second, signal.SIGKILL)
        return [first, second]
    if fault.kind == "newcomer":
        gives_up_at = time.monotonic() + _NEWCOMER_S
        while time.monotonic() < gives_up_at:
            if came := sorted(set(ranks()) - set(before)):
                _send(came[0], signal.SIGKILL)
                return [first, came[0]]
            time.sleep(0.01)
    return [first]


def _send(pid: int, number: signal.Signals) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
        return True
    return False
