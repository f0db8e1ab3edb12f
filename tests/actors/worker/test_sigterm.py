"""SIGTERM in a worker is told from the timers that the user's code sets."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from chorusline.actors.worker.sigterm import is_alarm
from tests import ROOT


@pytest.mark.parametrize(
    ("before_s", "left_s", "every_s", "elapsed_s", "is_signal"),
    [
        (0, 0, 0, 0.2, False),  # no timer
        (0, 14.9, 0, 0.2, True),
        (0, 12.0, 0, 3.5, True),  # The thread had to wait for a core.
        (0, 12.0, 0, 0.2, False),  # alarm(12) of the user's
        (0, 300, 0, 0.2, False),
        (15.1, 14.9, 0, 0.2, False),  # alarm(300) of the user's, nearly over
        (200, 14.9, 0, 0.2, True),  # The signal took the user's timer.
        (0, 14.9, 15, 0.2, False),  # It rings again and again.
    ],
)
def test_only_the_timer_of_the_signal_counts(
    before_s: float, left_s: float, every_s: float, elapsed_s: float, is_signal: bool
) -> None:
    assert is_alarm(before_s, left_s, every_s, elapsed_s) == is_signal


PROGRAM = """
import os, signal, threading, time
from chorusline.actors.worker.sigterm import watch_sigterm
heard = threading.Event()
watch_sigterm(heard.set)
signal.setitimer(signal.ITIMER_REAL, 300)
time.sleep(1)
left = signal.getitimer(signal.ITIMER_REAL)[0]
print(heard.is_set(), 290 < left < 300, flush=True)
os.kill(os.getpid(), signal.SIGTERM)
print(heard.wait(10), flush=True)
"""


def test_a_timer_of_the_user_goes_on_and_sigterm_is_heard_all_the_same() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.stdout.split() == ["False", "True", "True"], ran.stderr
    assert ran.returncode in (0, -signal.SIGALRM)
