"""A process that ends with another one: a loader process with its rank, a rank with its command."""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Callable

_LOOK_S = 0.5
"""Seconds between two looks at the other process, where the kernel has no pidfd."""


def end_with(pid: int) -> None:
    """End this process when the process `pid` ends. Returns at once."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        os._exit(1)
    # A kernel before 5.3, or a sandbox without the call; a Python that was built without.
    except (OSError, AttributeError):
        wait: Callable[[], None] = lambda: _look_until_gone(pid)  # noqa: E731
    else:
        exits = select.poll()
        exits.register(descriptor, select.POLLIN)

        def wait() -> None:
            exits.poll()

    def end() -> None:
        wait()
        os._exit(1)  # Without the clean-up of torch's queues, which may wait for a reader.

    threading.Thread(target=end, name=f"end with {pid}", daemon=True).start()


def _look_until_gone(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        while True:
            os.kill(pid, 0)
            time.sleep(_LOOK_S)
