"""Linux's futex: sleep on a word of memory that processes share, and wake the sleepers.

A futex does not show whether any process sleeps on it, so a sleeper sets a word of its own, which
the waker reads. Each side writes one word and reads the other's. A processor may reorder that, so
a wake-up can be missed in theory; therefore sleep is split into slices.
"""

from __future__ import annotations

import ctypes
import platform
import threading
import time

WEAKLY_ORDERED = platform.machine() not in ("x86_64", "AMD64")
"""Whether stores may become visible out of program order, so that `fence` is needed."""

_fence_lock = threading.Lock()
_libc = ctypes.CDLL(None, use_errno=True)
_libc_with_lock = ctypes.PyDLL(None)  # for calls that never wait
_SYS_FUTEX = {
    **dict.fromkeys(("x86_64", "AMD64"), 202),
    **dict.fromkeys(("aarch64", "riscv64", "loongarch64"), 98),
    **dict.fromkeys(("ppc64", "ppc64le"), 221),
    "s390x": 238,
}.get(platform.machine())
"""The number of the call; None for a processor that is not listed, where sleepers look again."""
_LOOK_AGAIN_S = 0.001
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_EVERYBODY = 0x7FFFFFFF


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def fence() -> None:
    """Order the reads and writes before this call against those after it."""
    # Two pairs of release and acquire are a full barrier wherever CPython runs.
    for _ in range(2):
        with _fence_lock:
            pass


def sleep_on(address: int, seen: int, slice_s: float) -> None:
    """Return when woken, after `slice_s` < 1 seconds, or at once if the word is not `seen`.

    address: of the lower 32 bits of a word. seen: the value; only its lower 32 bits are compared.
    """
    if _SYS_FUTEX is None:
        time.sleep(min(slice_s, _LOOK_AGAIN_S))
        return
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
    """Wake all threads that sleep on the word at `address`."""
    if _SYS_FUTEX is None:
        return
    _libc_with_lock.syscall(
        _SYS_FUTEX, ctypes.c_void_p(address), _FUTEX_WAKE, _EVERYBODY, None, None, 0
    )
