"""Sleep on a word of memory that several processes share, and wake who sleeps: Linux's futex.

It tells nobody who sleeps: a sleeper says so in a word of its own, which the waker reads. Both
sides then write one word and read the other's, which a processor may reorder, so a wake-up can be
missed in theory; therefore sleep comes in slices.
"""

from __future__ import annotations

import ctypes
import platform
import threading

WEAKLY_ORDERED = platform.machine() not in ("x86_64", "AMD64")
"""Whether stores may become visible in another order than that of the program: then `fence`."""

_fence_lock = threading.Lock()
_libc = ctypes.CDLL(None, use_errno=True)
_libc_with_lock = ctypes.PyDLL(None)  # for calls that never wait
_SYS_FUTEX = {"x86_64": 202, "AMD64": 202, "aarch64": 98}.get(platform.machine(), 0)
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_EVERYBODY = 0x7FFFFFFF


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def fence() -> None:
    """Order what was read and written before it against what comes after."""
    # Release then acquire, twice: a full barrier on every architecture that CPython runs on.
    for _ in range(2):
        with _fence_lock:
            pass


def sleep_on(address: int, seen: int, slice_s: float) -> None:
    """Return when woken, after `slice_s` < 1 seconds, or at once if the word is not `seen`.

    address: of 32 bits, the lower half of a word. seen: of which the lower 32 bits count.
    """
    _libc.syscall(
        _SYS_FUTEX,
        ctypes.c_void_p(address),
        _FUTEX_WAIT,
        ctypes.c_uint32(seen & 0xFFFFFFFF),
        ctypes.byref(_Timespec(0, int(slice_s * 1e9))),
        None,
        0,
    )


def wake(address: int) -> None:
    """Wake all that sleep on the word at `address`."""
    _libc_with_lock.syscall(
        _SYS_FUTEX, ctypes.c_void_p(address), _FUTEX_WAKE, _EVERYBODY, None, None, 0
    )
