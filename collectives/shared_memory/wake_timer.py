"""A timer that wakes one thread, and that is set and stopped without waking it."""

from __future__ import annotations

import ctypes
import os
import time

_libc = ctypes.PyDLL(None, use_errno=True)  # keeps the interpreter's lock: calls take 1 us


class _Itimerspec(ctypes.Structure):
    _fields_ = (
        ("interval_seconds", ctypes.c_long),
        ("interval_nanoseconds", ctypes.c_long),
        ("seconds", ctypes.c_long),
        ("nanoseconds", ctypes.c_long),
    )


class WakeTimer:
    """A timerfd. `wait` returns once for each set time that has come."""

    def __init__(self) -> None:
        self._descriptor = _libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_CLOEXEC)
        if self._descriptor < 0:
            number = ctypes.get_errno()
            raise OSError(number, f"timerfd_create: {os.strerror(number)}")
        self._never = _Itimerspec()

    def set(self, delay_s: float) -> None:
        """Let `wait` return after `delay_s` seconds; this replaces an earlier setting."""
        nanoseconds = max(1, int(delay_s * 1e9))
        time_ = _Itimerspec(0, 0, nanoseconds // 1_000_000_000, nanoseconds % 1_000_000_000)
        _libc.timerfd_settime(self._descriptor, 0, ctypes.byref(time_), None)

    def cancel(self) -> None:
        """Remove the setting if its time has not come yet."""
        _libc.timerfd_settime(self._descriptor, 0, ctypes.byref(self._never), None)

    def wait(self) -> None:
        os.read(self._descriptor, 8)

    def close(self) -> None:
        os.close(self._descriptor)
