"""What a spare worker does so that the ranks do not feel it."""

from __future__ import annotations

import gc
import os
import threading

from chorusline.actors.worker.memory import spare_modules
from chorusline.actors.worker.worker import patient


def priority() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_a_patient_thread_gives_way_and_the_others_keep_their_priority() -> None:
    before = priority()
    with patient() as thread:
        assert thread.submit(priority).result() == min(before + 5, 19)
    assert priority() == before
    with patient() as another:
        assert another.submit(priority).result() == min(before + 5, 19)


def test_what_is_spared_is_not_looked_through_again() -> None:
    knows_itself: list[object] = []
    knows_itself.append(knows_itself)
    try:
        spare_modules()
        assert len(gc.get_objects()) < 1000
        assert gc.get_freeze_count() > 10_000
    finally:
        gc.unfreeze()
