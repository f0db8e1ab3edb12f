"""A log handler for tests of what is logged."""

from __future__ import annotations

import logging


class LogLines(logging.Handler):
    """Keeps the messages, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
