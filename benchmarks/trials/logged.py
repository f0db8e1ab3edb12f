"""What the ranks' logs of a training say: the steps that were taken again, and where time went."""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

Line = tuple[float, str, int, int, int]
"""When, the word, rank, pid, and the number of the step."""

_STILL = 4
"""So many times a usual step, and no step: the training stood still."""


def steps_in(lines: Sequence[Line]) -> list[tuple[float, int, int]]:
    """When, pid, and number of each step of each rank."""
    return [(at, pid, number) for at, word, _, pid, number in lines if word == "step"]


def taken_again(lines: Sequence[Line]) -> int:
    """The number of steps that some rank has logged when the newest one was two or more ahead."""
    newest, again = 0, set()
    for _, _, number in steps_in(lines):
        if number <= newest - 2:
            again.add(number)
        newest = max(newest, number)
    return len(again)


def seconds_to_new(lines: Sequence[Line], at: float) -> float | None:
    """From `at` to the second step that nobody had taken before: the first one may have been under
    way. None if there was none."""
    steps = steps_in(lines)
    newest = max((number for when, _, number in steps if when <= at), default=0)
    return next((when - at for when, _, number in steps if number >= newest + 2), None)


@dataclass(frozen=True)
class Spent:
    """Where the seconds went from the first step to the last.

    step: of a usual step in which all ranks took part, the median; None if there was none.
    still: in which no rank took a step, beyond what a usual one takes.
    fewer: besides these, in steps of fewer ranks than the training began with.
    """

    step: float | None
    still: float
    fewer: float


def spent(lines: Sequence[Line], num_workers: int) -> Spent:
    steps = steps_in(lines)
    pids = defaultdict(set)
    for _, pid, number in steps:
        pids[number].add(pid)
    # A step of all ranks ends when the first of them logs it. Steps taken again count as they come.
    ends: list[tuple[float, int]] = []
    for at, _, number in steps:
        if not ends or (number != ends[-1][1] and number != ends[-1][1] - 1):
            ends.append((at, number))
    took = [
        (after - before, len(pids[number]) < num_workers)
        for (before, _), (after, number) in itertools.pairwise(ends)
    ]
    whole = [seconds for seconds, is_smaller in took if not is_smaller]
    if not took:
        return Spent(None, 0.0, 0.0)
    usual = statistics.median(whole or [seconds for seconds, _ in took])
    still = sum(seconds - usual for seconds, _ in took if seconds > _STILL * usual)
    fewer = sum(
        usual if seconds > _STILL * usual else seconds for seconds, is_smaller in took if is_smaller
    )
    return Spent(usual if whole else None, still, fewer)
