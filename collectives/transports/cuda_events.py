"""Whether a CUDA event has ended, asked without holding Python's lock.

`torch.cuda.Event.query` holds it during the call, and the call may block: in the driver, waiting
for another one that holds the lock of the GPU's context, such as a launch into a queue that is full
of kernels which wait for a lost rank. Then no thread of the process could run any more, and so none
could end those kernels. ctypes gives Python's lock back around a call.

Of an event's methods only `query` does that. torch gives the lock back in `record`, which blocks on
a full queue as a launch does, in `wait`, in `synchronize` and at an event's end (read in
torch/csrc/cuda/Event.cpp; old versions held it in `record`). One call is left: when a tensor goes
that `record_stream` was called for, the allocator records an event on that stream, and Python holds
its lock around the end of a tensor. That blocks if this very event is the one too many for a queue
of about a thousand, where the launches around it, which are many more, would have blocked first.

The driver's library is asked and not the runtime's: it has one name for all versions of CUDA, and
an event of the one is an event of the other.

While any thread captures a CUDA graph in the global mode, which is torch's default, a query from a
thread that is not relaxed fails, and invalidates the capture. The events here are recorded outside
of captures, since a collective in one is refused, so that a relaxed thread may query them.
"""

from __future__ import annotations

import ctypes
import functools
import threading

import torch

_ENDED, _NOT_READY = 0, 600  # CUDA_SUCCESS, CUDA_ERROR_NOT_READY
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


class _Thread(threading.local):
    is_relaxed = False


_thread = _Thread()


@functools.cache
def driver() -> ctypes.CDLL | None:
    """The driver's library, which torch has loaded; None where there is none, as on ROCm."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
        library.cuEventQuery.argtypes = [ctypes.c_void_p]
        library.cuThreadExchangeStreamCaptureMode.argtypes = [ctypes.POINTER(ctypes.c_int)]
    except (OSError, AttributeError):
        return None
    return library


def relax_this_thread() -> None:
    """For a thread that queries often: each call of the driver takes Python's lock again."""
    library = driver()
    if library is not None:
        library.cuThreadExchangeStreamCaptureMode(ctypes.c_int(_RELAXED))
        _thread.is_relaxed = True


def has_ended(event: torch.cuda.Event) -> bool:
    """`event.query()`, for an event that was recorded. Raises RuntimeError if the GPU has failed,
    perhaps by an earlier kernel."""
    library = driver()
    if library is None:
        return bool(event.query())
    if _thread.is_relaxed:
        status = library.cuEventQuery(event.cuda_event)
    else:
        # For this query only: the mode is the caller's, and guards what else it does.
        mode = ctypes.c_int(_RELAXED)
        library.cuThreadExchangeStreamCaptureMode(mode)
        try:
            status = library.cuEventQuery(event.cuda_event)
        finally:
            library.cuThreadExchangeStreamCaptureMode(mode)
    if status in (_ENDED, _NOT_READY):
        return bool(status == _ENDED)
    raise RuntimeError(f"CUDA error {status} of an event")
