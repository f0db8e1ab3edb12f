"""Prompt interrupts in a notebook.

The kernel turns an interrupt into a cancellation of the cell, but does not wake the event loop for
it: a sleeping loop notices the cancellation only when its sleep is over.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

_TICK_S = 0.1


def shell() -> Any:
    """IPython's shell in this process; None without one. It never imports IPython."""
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython else None


def in_kernel() -> bool:
    """Whether this process is the kernel of a notebook."""
    return getattr(shell(), "kernel", None) is not None


@asynccontextmanager
async def waking() -> AsyncIterator[None]:
    """In a kernel, wake the event loop ten times a second while the body waits."""
    timer: asyncio.TimerHandle | None = None  # None: this process is no kernel

    def tick() -> None:
        nonlocal timer
        timer = asyncio.get_running_loop().call_later(_TICK_S, tick)

    if in_kernel():
        tick()
    try:
        yield
    finally:
        if timer is not None:
            timer.cancel()
