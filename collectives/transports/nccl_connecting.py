"""Connecting the ranks of a group by NCCL, with an end: ncclCommInitRank itself has none.

NCCL waits in it for every rank, and forever if one has died. A communicator that is being made
cannot be aborted: CuPy (14.2) makes blocking ones only, and NCCL's abort would free what the thread
inside still uses. (NCCL_COMM_BLOCKING=0 would make all communicators of the process non-blocking,
also torch's, which do not expect it, and have NCCL start a thread for launches.)

So NCCL connects in a thread of its own. The thread that wants the communicator looks at the store
meanwhile: it answers roll calls, leaves with an error that another rank has published or that the
session's store raises, and calls the roll at the deadline. The thread inside NCCL is left behind;
if it ever comes back, it gives its communicator back.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from ..contract.errors import CollectiveError, CollectiveTimeout
from .liveness import LOOK_S, RollCall
from .nccl_codes import described

CONNECTING = "connecting by NCCL"
_SLOW = (
    "If there are only many ranks, or slow ones, raise the timeout (timeout_s); otherwise "
    "NCCL_DEBUG=INFO shows where NCCL waits, and NCCL_SOCKET_IFNAME names the interface between "
    "hosts."
)


class Attempt:
    """One rank's way into NCCL.

    make: returns the communicator, or never.
    device: of the rank.
    version: of NCCL, as it counts.
    """

    def __init__(self, make: Callable[[], Any], device: torch.device, version: int) -> None:
        self._make = make
        self._device = device
        self._version = version
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._is_given_up = False
        self._communicator: Any = None
        self._error: BaseException | None = None  # None: unless connecting has failed

    def result(self, roll_call: RollCall) -> Any:
        """NCCL's communicator. Raises CollectiveError, the same one on all ranks; or, at once, what
        the store raises when the session ends the meeting."""
        began_at = time.monotonic()
        limit_s = roll_call.store.timeout_s
        threading.Thread(target=self._connect, name="chorusline-nccl-connect", daemon=True).start()
        try:
            # NCCL's init blocks its thread until all ranks come, and takes no deadline of ours.
            while not self._is_over.wait(min(LOOK_S, limit_s / 4)):
                roll_call.answer()
                news = _reported_error(roll_call)
                if news is not None:
                    raise news
                if time.monotonic() - began_at > limit_s:
                    raise roll_call.publish(_late(roll_call, limit_s))
            if self._error is not None:
                raise roll_call.publish(self._broken(self._error, roll_call)) from self._error
            return self._communicator
        except BaseException:
            self._give_up()
            raise

    def _connect(self) -> None:
        torch.cuda.set_device(self._device)
        try:
            made = self._make()
        except BaseException as error:
            self._error = error
        else:
            with self._lock:
                is_late = self._is_given_up
                if not is_late:
                    self._communicator = made
            if is_late:
                made.abort()
        self._is_over.set()

    def _give_up(self) -> None:
        with self._lock:
            self._is_given_up = True
            made, self._communicator = self._communicator, None
        if made is not None:
            made.abort()

    def _broken(self, error: BaseException, roll_call: RollCall) -> CollectiveError:
        """NCCL's own error (KeyError is a status that CuPy has no name for): a peer may have died
        after it had connected, or the mistake is on this rank."""
        reason = (
            f"NCCL could not connect on {self._device}: {described(error, self._version)}. "
            "NCCL_DEBUG=WARN shows more"
        )
        return roll_call.why_broken(CONNECTING, reason)


def _reported_error(roll_call: RollCall) -> CollectiveError | None:
    """The session's word to stop, which its store raises, or what another rank has published."""
    try:
        roll_call.store.check(["abort/error"])
    except CollectiveError as error:
        return error
    except Exception:
        return None  # A store that fails says nothing, and NCCL may connect all the same.
    return roll_call.news()


def _late(roll_call: RollCall, limit_s: float) -> CollectiveError:
    lost = roll_call.lost(CONNECTING, f"NCCL had not connected within {limit_s:.1f} s")
    if lost is not None:
        return lost
    story = "all ranks answer, and NCCL has not connected them"
    waited_s = round(limit_s, 1)  # What was left for it of the time to meet.
    return CollectiveTimeout(CONNECTING, roll_call.generation, [], waited_s, story, _SLOW)
