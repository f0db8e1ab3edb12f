"""What the start of a session waits for, in one line: redrawn in place on a terminal and in a
notebook, in the place of the bars of a Progress that is shown already, and in a log once, if it
takes long."""

from __future__ import annotations

import logging
import sys
import threading
import time
from typing import Any

from ... import notebook
from .progress import Progress, is_terminal

SHOWN_AFTER_S = 1.0
LOGGED_AFTER_S = 8.0
"""Longer than a phase of a start on an idle machine takes."""

_TICK_S = 0.25
_WIPE = "\r\x1b[2K"

_log = logging.getLogger("chorusline")


class Starting:
    """The scope of a start. progress: of the session, if it has one."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress
        self._what = self._limit = ""
        self._began_s = self._phase_began_s = time.monotonic()
        self._is_logged = False
        self._is_drawn = False
        self._handle: Any = None  # of a notebook's display
        self._lock = threading.RLock()
        self._is_over = threading.Event()
        self._is_on_terminal = progress is not None and is_terminal(sys.stderr)
        self._has_bars = progress is not None and progress.is_shown
        self._thread = threading.Thread(target=self._keep_telling, name="starting", daemon=True)
        self._filters: list[_Above] = []

    def phase(self, what: str, limit: str = "") -> None:
        """What it waits for from now on: "starting Ray on this machine". limit: until when."""
        with self._lock:
            if what != self._what:
                self._what, self._limit = what, limit
                self._phase_began_s, self._is_logged = time.monotonic(), False
                if self._has_bars and self._progress is not None:
                    self._progress.waits_for(what)

    def __enter__(self) -> Starting:
        # Ray's log would be glued to the line, and so would ours.
        if self._is_on_terminal:
            self._filters = [_Above(self, one) for one in logging.getLogger("ray").handlers]
            self._filters.append(_Above(self, _log))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()
        with self._lock:
            self.wipe()
            for one in self._filters:
                one.where.removeFilter(one)
            if self._handle is not None:
                self._handle.update({"text/plain": ""}, raw=True)

    def above(self, line: str) -> bool:
        """A line of a log is about to be written. Returns whether its handler is to write it."""
        if self._has_bars and self._progress is not None:
            self._progress.say(line)
            return False
        with self._lock:
            self.wipe()
        return True

    def wipe(self) -> None:
        if self._is_drawn:
            sys.stderr.write(_WIPE)
            sys.stderr.flush()
            self._is_drawn = False

    def _keep_telling(self) -> None:
        while not self._is_over.wait(_TICK_S):
            with self._lock:
                self._tell(time.monotonic())

    def _tell(self, now_s: float) -> None:
        if not self._what or now_s - self._began_s < SHOWN_AFTER_S:
            return
        seconds = now_s - self._phase_began_s
        line = f"{self._what} … {seconds:.0f} s"
        if self._has_bars:
            return  # The bars' own line says it.
        if self._is_on_terminal:
            sys.stderr.write(f"{_WIPE}{line}")
            sys.stderr.flush()
            self._is_drawn = True
        elif notebook.in_kernel():
            self._show(line)
        elif seconds >= LOGGED_AFTER_S and not self._is_logged:
            self._is_logged = True
            limit = f"; {self._limit}" if self._limit else ""
            _log.warning("still %s (%.0f s%s)", self._what, seconds, limit)

    def _show(self, line: str) -> None:
        data = {"text/plain": line}
        if self._handle is None:
            display = sys.modules["IPython"].display.display
            self._handle = display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)


class _Above(logging.Filter):
    """Makes room for a record on the terminal. where: it passes here on its way."""

    def __init__(self, starting: Starting, where: logging.Filterer) -> None:
        super().__init__()
        self._starting = starting
        self.where = where
        where.addFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(self.where, logging.Handler):
            return self._starting.above(self.where.format(record))
        return self._starting.above(record.getMessage())
