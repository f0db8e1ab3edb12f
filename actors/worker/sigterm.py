"""How a worker's process notices SIGTERM, and ends: its rank leaves the run first.

The main thread of Ray's worker processes never leaves C++, so no Python handler ever runs there:
the signal is caught, and nothing happens. Another thread cannot do better in Python:
`set_wakeup_fd` works in the main thread only, and `sigwait` needs a signal that every thread
blocks. What is left is a handler in C. A callback of ctypes would take the interpreter's lock at
any point of the program. But libc's `alarm` can be used as a handler as it stands: it is safe in a
signal handler, and it starts a timer that any thread can read. Its argument is the signal's number,
so the timer would end the process 15 s later, which is right for one that does not notice it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import ray
from ray.exceptions import RayError

from ..messages.messages import WorkerInfo

if TYPE_CHECKING:
    from .current_run import CurrentRun

SIGTERM_EXIT = 128 + signal.SIGTERM

_NOTICE_S = 0.5
_IDLE_S = 2.0
"""Seconds without a run after which a process that was told to end does so: the result and the
reports of the last run are read by then."""

_LOOK_S = 0.2
_ALARM_S = float(signal.SIGTERM)
_SLACK_S = 0.1


def watch_sigterm(notice: Callable[[], None]) -> None:
    """Call `notice` in a thread of its own, once, when this process is sent SIGTERM."""
    libc = ctypes.CDLL(None)
    set_handler = libc.signal
    set_handler.argtypes, set_handler.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    alarm = ctypes.cast(libc.alarm, ctypes.c_void_p)

    def listen() -> None:
        looked_at, before_s = time.monotonic(), 0.0
        while True:
            left_s, every_s = signal.getitimer(signal.ITIMER_REAL)
            now = time.monotonic()
            if is_alarm(before_s, left_s, every_s, now - looked_at):
                break
            looked_at, before_s = now, left_s
            time.sleep(_LOOK_S)
        signal.setitimer(signal.ITIMER_REAL, 0)
        set_handler(signal.SIGTERM, signal.SIG_IGN)  # Another one would say nothing new.
        notice()

    # A process that the user's code forks ends by SIGTERM, as it would elsewhere.
    os.register_at_fork(after_in_child=lambda: set_handler(signal.SIGTERM, signal.SIG_DFL))
    set_handler(signal.SIGTERM, alarm)
    threading.Thread(target=listen, name="sigterm", daemon=True).start()


def is_alarm(before_s: float, left_s: float, every_s: float, elapsed_s: float) -> bool:
    """Whether the timer is that of the handler, and not one that the user's code has set.

    before_s: what was left at the look before; 0 if no timer ran.
    left_s: what is left now.
    every_s: with what it begins again; `alarm` rings once.
    elapsed_s: since the look before, since when the handler has begun it.
    """
    if every_s or not _ALARM_S - elapsed_s - _SLACK_S <= left_s <= _ALARM_S:
        return False
    # A longer timer of the user's passes through these seconds, too: it was there before.
    return not (before_s and abs(before_s - left_s - elapsed_s) < _SLACK_S)


def leave(in_progress: Callable[[], CurrentRun | None], info: WorkerInfo) -> None:
    """Leave the run in progress, if it can be left, or see it through; then end this process.

    in_progress: the run that this worker is in now. info: of this worker.
    """
    idle_s = 0.0
    while idle_s < _IDLE_S:
        run = in_progress()
        idle_s = 0.0 if run is not None else idle_s + _NOTICE_S
        if run is not None and run.request.survives_loss:
            call = run.driver.leaves.remote(
                run.request.run, info.worker_id, f"process {info.pid} was sent SIGTERM"
            )
            with contextlib.suppress(RayError):  # A new driver is told it in the next round.
                ray.get(call, timeout=_NOTICE_S)
        time.sleep(_NOTICE_S)
    os._exit(SIGTERM_EXIT)
