"""Deadlines as callers pass them: seconds, or a timedelta, as torch's users write it."""

from __future__ import annotations

from datetime import timedelta

LONGEST_S = 366 * 86400.0
"""A year. A deadline is finite: with infinity or NaN, a wait for a lost rank would never end."""


def checked_seconds(given: object, name: str = "timeout_s") -> float:
    """A deadline in seconds. Raises TypeError for what is not a time, ValueError for one that is
    not positive, or is longer than a year; both name the argument."""
    if isinstance(given, timedelta):
        given = given.total_seconds()
    if isinstance(given, bool) or not isinstance(given, int | float):
        raise TypeError(
            f"{name} must be a number of seconds, or a timedelta, got {type(given).__name__} "
            f"{given!r}"
        )
    if not given > 0:  # NaN is not, either.
        raise ValueError(f"{name} must be positive, got {given!r}")
    if given > LONGEST_S:
        raise ValueError(
            f"{name} must be at most a year ({LONGEST_S:.0f} s), got {given!r}; a wait for a lost "
            "rank has to end"
        )
    return float(given)
