"""Goodput under failures: the part of wall time that becomes progress. Pure.

Two ways to continue after a failure:

- **Restart from a checkpoint.** Saving stalls the training for `save_s` every `interval_s`. A
  failure costs what was computed since the last save, and `restart_s` until the job trains again.
- **Continue in place**, with replicas of the state. A failure costs `change_s`, in which all wait.
  A worker that is gone is missing until another has come, `replace_s` later, and its coming costs
  `arrival_s`. A failure that takes a shard with all its copies ends in a restart from a checkpoint.

Failures are a Poisson process: `mtbf_s` between two of them, for the whole job. They strike while
it restarts, too.

Source: Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, FGCS
22(3), 2006.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Checkpointed:
    """Training that continues from its last checkpoint, and how long its parts take."""

    save_s: float
    restart_s: float
    interval_s: float

    def __post_init__(self) -> None:
        if self.save_s < 0 or self.restart_s < 0 or self.interval_s <= 0:
            raise ValueError(f"times must not be negative, and the interval not 0: {self}")


@dataclass(frozen=True)
class InPlace:
    """workers: of the job. lost_at_once: workers that a failure takes, on average. fatal: the part
    of failures that take all copies of some shard; `fallback` then says what follows."""

    change_s: float
    arrival_s: float
    replace_s: float
    workers: int
    lost_at_once: float = 1.0
    fatal: float = 0.0
    fallback: Checkpointed | None = None

    def __post_init__(self) -> None:
        if self.fatal and self.fallback is None:
            raise ValueError("where some failures are fatal, say what follows them: fallback=...")


def daly_s(save_s: float, mtbf_s: float) -> float:
    """The best interval of computing between two saves; equation 37 of Daly."""
    if save_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = save_s / (2 * mtbf_s)
    return math.sqrt(2 * save_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_s


def checkpointed(mtbf_s: float, way: Checkpointed) -> float:
    """The goodput, exactly: Daly's equation 20 without what is left over at the end.

    A segment of interval and save, which a failure makes begin again after a restart, takes
    mtbf * exp(restart / mtbf) * (exp(segment / mtbf) - 1) on average.
    """
    segment_s = way.interval_s + way.save_s
    exponent = (way.restart_s + segment_s) / mtbf_s
    if exponent > 700:
        return 0.0
    taken_s = mtbf_s * math.exp(way.restart_s / mtbf_s) * math.expm1(segment_s / mtbf_s)
    return way.interval_s / taken_s


def in_place(mtbf_s: float, way: InPlace) -> float:
    """The goodput to first order in the failure rate, for short changes: 1 / (1 + what a failure
    costs over what lies between two)."""
    missing = way.lost_at_once / way.workers * way.replace_s
    lost_s = way.change_s + way.arrival_s + missing
    goodput = 1 / (1 + lost_s / mtbf_s)
    if way.fatal and way.fallback is not None:
        # Saves are few, as only fatal failures need them.
        goodput *= checkpointed(mtbf_s / way.fatal, way.fallback)
    return goodput


def simulated_checkpointed(
    mtbf_s: float, way: Checkpointed, failures: int, draw: random.Random
) -> float:
    """The same by drawing failures: work that was saved over the time that it took."""
    now, saved_s = 0.0, 0.0
    next_failure = draw.expovariate(1 / mtbf_s)
    while failures:
        segment_end = now + way.interval_s + way.save_s
        if segment_end <= next_failure:
            now, saved_s = segment_end, saved_s + way.interval_s
            continue
        failures -= 1
        now = next_failure
        next_failure = now + draw.expovariate(1 / mtbf_s)
        while now + way.restart_s > next_failure:  # It fails while it restarts.
            failures -= 1
            now = next_failure
            next_failure = now + draw.expovariate(1 / mtbf_s)
            if failures <= 0:
                return saved_s / now
        now += way.restart_s
    return saved_s / now


def simulated_in_place(mtbf_s: float, way: InPlace, failures: int, draw: random.Random) -> float:
    """The same by drawing failures, without fatal ones: those that come while others are missing
    add up, and a failure in a change begins it again."""
    now, done_s = 0.0, 0.0
    back: list[float] = []  # when the missing workers are back
    next_failure = draw.expovariate(1 / mtbf_s)
    while failures:
        until = min([next_failure, *back])
        missing = min(len(back) * way.lost_at_once, way.workers)
        done_s += (until - now) * (1 - missing / way.workers)
        now = until
        if now == next_failure:
            failures -= 1
            next_failure = now + draw.expovariate(1 / mtbf_s)
            back.append(now + way.replace_s)
            pause_s = way.change_s
        else:
            back.remove(now)
            pause_s = way.arrival_s
        ready = now + pause_s
        while next_failure < ready and failures:
            failures -= 1
            ready = next_failure + way.change_s
            back.append(next_failure + way.replace_s)
            next_failure += draw.expovariate(1 / mtbf_s)
        now = ready
        back = [max(one, now) for one in back]
    return done_s / now
