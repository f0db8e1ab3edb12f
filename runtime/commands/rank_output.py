"""The output of the ranks, shown on the terminal in whole lines with the rank of each line.

Ray shows its workers' output from their log files: with the process's number instead of the rank,
and with equal lines of several ranks merged into one. So the function is wrapped: whole lines
travel with the rank's reports, in their order, and the session's process prints all of them. The
lines also go to the worker's log file, which has the last lines of a killed worker.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from actors.journal import PRINTED

from ..program.context import Context, call_of

LEADS_TO_USERS_CODE = True  # Tracebacks leave out the frames of this file (actors/outcomes.py).


def lines_of(text: str, rank: int) -> Iterator[str]:
    """`[rank 0] line`, for each line of `text`."""
    for line in text.splitlines() or [""]:
        yield f"[rank {rank}] {line}"


class ByRank:
    """A train function whose output travels with its reports."""

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self.function = function

    def __call__(self, ctx: Context, **kwargs: Any) -> Any:
        if inspect.iscoroutinefunction(self.function):
            return self._awaited(ctx, kwargs)
        with _carried(ctx):
            return self.function(ctx, **kwargs)

    async def _awaited(self, ctx: Context, kwargs: dict[str, Any]) -> Any:
        with _carried(ctx):
            return await self.function(ctx, **kwargs)


@contextlib.contextmanager
def _carried(ctx: Context) -> Iterator[None]:
    output, errors = _Lines(ctx, sys.stdout), _Lines(ctx, sys.stderr)
    if line := call_of(ctx).resume_line:  # It was said before the function was called.
        output.send(line.replace("CheckpointConfig(resume='never')", "--fresh"))
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
            yield
    finally:
        output.end()
        errors.end()


class _Lines(io.TextIOBase):
    """A stream that sends whole lines. As on a terminal, a carriage return begins the line again,
    so only the last state of a progress bar is sent."""

    def __init__(self, ctx: Context, log: TextIO) -> None:
        self._call = call_of(ctx)
        self._log = log
        self._begun = ""
        self._lock = threading.Lock()  # The function may have threads that print.

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        return self._log.fileno()  # Native code writes to the file descriptor of the log.

    def write(self, text: str) -> int:
        with self._lock:
            self._log.write(text)
            *lines, self._begun = (self._begun + text).split("\n")
            for line in lines:
                self.send(line)
        return len(text)

    def flush(self) -> None:
        self._log.flush()

    def end(self) -> None:
        if self._begun:
            self.send(self._begun)
            self._begun = ""
        self._log.flush()

    def send(self, line: str) -> None:
        """Send a line that is whole."""
        self._call.say({PRINTED: line.rstrip("\r").rpartition("\r")[2]})
