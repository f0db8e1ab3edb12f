"""SIGTERM to a worker's process, heard.

In a worker of Ray the main thread is in C++ for good, so no Python handler ever runs: the signal is
caught, and nothing happens. Nor can another thread have Python do better: `set_wakeup_fd` wants the
main thread, and `sigwait` a signal that every thread blocks. What is left is a handler in C. A
callback of ctypes would want the interpreter's lock in the middle of anything. But libc's `alarm`
is a handler as it stands: safe in a signal, and it leaves a trace that any thread can read. It gets
the signal's number as its argument, so 15 s later the process would end, as one that cannot hear
should.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable

_LOOK_S = 0.2


def hear_sigterm(heard: Callable[[], None]) -> None:
    """Call `heard` in a thread of its own, once, when this process is sent SIGTERM."""
    libc = ctypes.CDLL(None)
    set_handler = libc.signal
    set_handler.argtypes, set_handler.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    alarm = ctypes.cast(libc.alarm, ctypes.c_void_p)

    def listen() -> None:
        while not signal.getitimer(signal.ITIMER_REAL)[0]:
            time.sleep(_LOOK_S)
        signal.setitimer(signal.ITIMER_REAL, 0)
        set_handler(signal.SIGTERM, signal.SIG_IGN)  # The next one tells nothing new.
        heard()

    # Processes that the user's code forks end by it, as they would elsewhere.
    os.register_at_fork(after_in_child=lambda: set_handler(signal.SIGTERM, signal.SIG_DFL))
    set_handler(signal.SIGTERM, alarm)
    threading.Thread(target=listen, name="sigterm", daemon=True).start()
