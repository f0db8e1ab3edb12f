"""How a worker's process ends that was told to: its rank leaves the run first."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import ray
from ray.exceptions import RayError

from ..messages import WorkerInfo

if TYPE_CHECKING:
    from .run_here import RunHere

SIGTERM_EXIT = 128 + signal.SIGTERM

_NOTICE_S = 0.5
_LAST_WORDS_S = 2.0
"""Seconds without a run after which a process that was told to end does so: the result and the
reports of the last run are read by then."""


def leave(in_progress: Callable[[], RunHere | None], info: WorkerInfo) -> None:
    """Leave the run in progress, if it can be left, or see it through; then end this process.

    in_progress: the run that this worker is in now. info: of this worker.
    """
    idle_s = 0.0
    while idle_s < _LAST_WORDS_S:
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
