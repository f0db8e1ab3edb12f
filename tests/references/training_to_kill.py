"""A small training in float64, for tests in which processes die: equal numbers mean equal bits.

That of benchmarks/faults/chaos.py, over fewer samples.
"""

from __future__ import annotations

import os
import signal
import time

from benchmarks.faults import chaos_training

NUM_SAMPLES, BATCH_SIZE, LEARNING_RATE = 61, 4, 0.05


class Samples(chaos_training.Samples):
    def __init__(self, num_samples: int = NUM_SAMPLES) -> None:
        super().__init__(num_samples)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
