"""The error that ended a generation, in the memory that its ranks share. The first error stands."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Callable

from ..contract.errors import CollectiveError, error_from_json, error_to_json
from .futex import WEAKLY_ORDERED, fence
from .layout import ABORT_WORD, RECORD_BYTES

_LOCK_S = 1.0  # the longest wait for a lock that is held for microseconds


def apart(task: Callable[[], None]) -> None:
    """Run `task` in a thread of its own, which can wait until this one has left a lock."""
    threading.Thread(target=task, name="chorusline-after-a-signal", daemon=True).start()


class EndRecord:
    """The record: 8 bytes of length, then JSON. It is valid once the abort word is set.

    descriptor: of the memory; the record owns it. A writer holds a lock on the file, which the
    kernel releases if the writer dies.
    """

    def __init__(self, memory: memoryview, words: memoryview, at: int, descriptor: int) -> None:
        self._memory = memory
        self._words = words
        self._at = at
        self._descriptor = descriptor
        self._lock = threading.RLock()
        self._is_writing = False

    def read(self) -> CollectiveError:
        """The error, once the abort word is set."""
        if WEAKLY_ORDERED:
            fence()
        at = self._at
        length = int.from_bytes(self._memory[at : at + 8], "little")
        return error_from_json(bytes(self._memory[at + 8 : at + 8 + length]).decode())

    def has_interrupted_a_write(self) -> bool:
        """Whether this is a signal handler within a write: the record has that one's error."""
        with self._lock:
            return self._is_writing

    def write(self, error: CollectiveError) -> bool:
        """Write `error` unless there is a record already. Returns False after `close`, and in a
        signal handler that has interrupted a write: the record has that one's error."""
        with self._lock:
            if self._descriptor < 0 or self._is_writing:
                return False
            self._is_writing = True
            try:
                self._exclude_others()
                if not self._words[ABORT_WORD]:
                    record = fitting_record(error)
                    at = self._at
                    self._memory[at + 8 : at + 8 + len(record)] = record
                    self._memory[at : at + 8] = len(record).to_bytes(8, "little")
                    if WEAKLY_ORDERED:
                        fence()
                    self._words[ABORT_WORD] = 1
            finally:
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
                self._is_writing = False
        return True

    def close(self) -> None:
        with self._lock:
            # A signal handler has interrupted a write, which needs the file.
            if self._is_writing:
                apart(self.close)
                return
            if self._descriptor >= 0:
                os.close(self._descriptor)
            self._descriptor = -1

    def _exclude_others(self) -> None:
        """Lock the file; continue without the lock if a stopped rank holds it for _LOCK_S."""
        give_up_at = time.monotonic() + _LOCK_S
        while True:
            try:
                return fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > give_up_at:
                    return None
            time.sleep(0.001)


def fitting_record(error: CollectiveError) -> bytes:
    """The error as JSON. Its longest text is cut in the middle until the record fits."""
    record = error_to_json(error).encode()
    while len(record) > RECORD_BYTES - 8:
        fields = list(error.args)
        longest = max(
            (i for i, field in enumerate(fields) if isinstance(field, str)),
            key=lambda i: len(fields[i]),
        )
        text = fields[longest]
        keep = len(text) // 4
        fields[longest] = f"{text[:keep]}\n[... cut ...]\n{text[-keep:]}"
        error = type(error)(*fields)
        record = error_to_json(error).encode()
    return record
