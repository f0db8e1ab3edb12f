"""Messages about workers that join a run in progress.

A worker that comes makes a **dry run**: it runs the function from the top by itself, with the rank
that it will have, up to its first step of `ctx.steps`, while the others train. What it needs for
that, a **replay log**, it gets from one of them. When it waits at its first step, all ranks admit
it between two steps of theirs, and continue where they are. If the functions cannot admit it so,
they run again from the top on all ranks, with the newcomer.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Readiness(enum.Enum):
    """What would become of the function of a rank if its generation were ended now. A driver asks
    before it ends one that could continue: to admit a newcomer, or to let ranks leave."""

    RUNS_AGAIN = "runs again"
    """It can run again from the top: all that has to survive is registered."""

    ADMITS = "admits"
    """As above, and it continues where it is when a worker comes after its dry run."""

    PARKS = "parks"
    """It cannot run again, or would not let a rank leave that has to hand over; and it waits in its
    next step of a sharded optimizer."""

    NOT_YET = "not yet"
    """It could not continue, or the rank could not leave: what has to survive is not registered,
    perhaps not yet; or, if that will not be or does not help, no step of a sharded optimizer may
    come any more."""


@dataclass(frozen=True, slots=True)
class GivenReplayLog:
    """For the dry run of a worker. payload: pickled by a rank's runtime; empty if that rank cannot
    give it. why_not: why."""

    payload: bytes = b""
    why_not: str = ""


@dataclass(frozen=True, slots=True)
class ReadyToken:
    """Where a worker waits after its dry run; it is admitted where the others have equal tokens.

    iteration: the pass over an epoch that it is in. objects: a digest of all that it has made.
    num_ranks: with those that are to come.
    """

    iteration: str
    objects: str
    num_ranks: int


@dataclass(frozen=True, slots=True)
class AdmissionRequest:
    """All ranks of a generation are asked to admit workers. number: of the attempt."""

    number: int
    generation: int
    token: ReadyToken
