"""How a worker's process notices SIGTERM.

The main thread of Ray's worker processes never leaves C++, so no Python handler ever runs there:
the signal is caught, and nothing happens. Another thread cannot do better in Python:
`set_wakeup_fd` works in the main thread only, and `sigwait` needs a signal that every thread
blocks. What is left is a handler in C. A callback of ctypes would take the interpreter's lock at
any point of the program. But libc's `alarm` can be used as a handler as it stands: it is safe in a
signal handler, and it starts a timer that any thread can read. Its argument is the signal's number,
so the timer would end the process 15 s later, which is right for one that does not notice it.
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
        set_handler(signal.SIGTERM, signal.SIG_IGN)  # Another one would say nothing new.
        heard()

    # A process that the user's code forks ends by SIGTERM, as it would elsewhere.
    os.register_at_fork(after_in_child=lambda: set_handler(signal.SIGTERM, signal.SIG_DFL))
    set_handler(signal.SIGTERM, alarm)
    threading.Thread(target=listen, name="sigterm", daemon=True).start()
