"""Deadlines as callers pass them: seconds, or a timedelta, as torch's users write it."""

from __future__ import annotations

import reprlib
from datetime import timedelta
from typing import TypeAlias

from .plain_numbers import real

Seconds: TypeAlias = float | timedelta
"""How a caller gives a deadline."""

LONGEST_S = 366 * 86400.0
"""A year. A deadline is finite: with infinity or NaN, a wait for a lost rank would never end."""


def checked_seconds(given: object, name: str = "timeout_s", *, may_be_zero: bool = False) -> float:
    """A deadline in seconds. Raises TypeError for what is not a time, ValueError for one that is
    not positive, or is longer than a year; both name the argument.

    may_be_zero: 0 asks once and does not wait."""
    if isinstance(given, timedelta):
        given = given.total_seconds()
    seconds = real(given)
    if seconds is None:
        raise TypeError(
            f"{name} must be a number of seconds, or a timedelta, got {type(given).__name__} "
            f"{reprlib.repr(given)}"
        )
    if may_be_zero and seconds < 0:
        raise ValueError(f"{name} must not be negative, got {seconds}")
    if not (seconds > 0 or (may_be_zero and seconds == 0)):  # NaN is neither.
        raise ValueError(f"{name} must be positive, got {seconds}")
    if seconds > LONGEST_S:
        raise ValueError(
            f"{name} must be at most a year ({LONGEST_S:.0f} s), got {seconds}; a wait for a lost "
            "rank has to end"
        )
    return float(seconds)
