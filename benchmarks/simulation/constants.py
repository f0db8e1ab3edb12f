"""The constants of the simulation: what a message, an operation of the store and a rank's own work
cost. `run.py --measure` measures them; constants.json has those of one machine, and of what it was
doing then.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent / "constants.json"


@dataclass(frozen=True)
class Cost:
    """CPU seconds in one process. serial_s: in its busiest thread, one after the other. beside_s:
    in Ray's own threads, which run beside it if there is a core."""

    serial_s: float
    beside_s: float


@dataclass(frozen=True)
class Line:
    """A cost that grows with a number: `fixed` + `each` * number."""

    fixed: float
    each: float

    def at(self, number: float) -> float:
        return self.fixed + self.each * number

    @classmethod
    def through(cls, points: Sequence[tuple[float, float]]) -> Line:
        """The line of least squares. Neither part is negative: a cost is not."""
        count = len(points)
        mean_x = sum(x for x, _ in points) / count
        mean_y = sum(y for _, y in points) / count
        spread = sum((x - mean_x) ** 2 for x, _ in points)
        slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0
        if slope <= 0:
            return cls(mean_y, 0.0)
        if mean_y - slope * mean_x < 0:
            return cls(0.0, sum(x * y for x, y in points) / sum(x * x for x, _ in points))
        return cls(mean_y - slope * mean_x, slope)


@dataclass(frozen=True)
class Constants:
    """Seconds; of CPU time where it is a Cost or a Line.

    call_out, call_in: a call that the driver makes and awaits: on its side, and on the worker's.
    call_trip_s: of such a call and its answer, between idle processes.
    report_out, report_in: a call of a worker to the driver that is not awaited.
    store_client, store_server, store_trip_s: an operation of the store with one key.
    gather_client, gather_server: a gathering of so many ranks, with values of the length of a
        rank's card: in the busiest thread.
    decide_s: of the driver's decisions, for each message of a change.
    exit_s: of the kernel's work to end the process of a worker, from SIGKILL on.
    death_s: from then on, until the driver has heard of it from Ray.
    death_cpu_s: what Ray's own servers compute for that.
    freeze_s, connect_s, meet_s, step_s: of a rank's training thread, by the number of ranks: to end
        a generation and report; to connect, its part of the store's operations included; to
        exchange what it holds, and a barrier; and of a step.
    rest_s: what else the process of a rank computes in a change, in other threads.
    idle: the part of a core that a process of Ray takes when it has nothing to do.
    """

    call_out: Cost
    call_in: Cost
    call_trip_s: float
    report_out: Cost
    report_in: Cost
    store_client: Cost
    store_server: Cost
    store_trip_s: float
    gather_client: Line
    gather_server: Line
    decide_s: float
    exit_s: float
    death_s: float
    death_cpu_s: float
    freeze_s: Line
    connect_s: Line
    meet_s: Line
    step_s: Line
    rest_s: float
    idle: float

    @classmethod
    def of(cls, said: dict[str, Any]) -> Constants:
        made: dict[str, Any] = {}
        for one in fields(cls):
            value = said[one.name]
            if isinstance(value, dict):
                value = Cost(**value) if "serial_s" in value else Line(**value)
            made[one.name] = value
        return cls(**made)

    @classmethod
    def here(cls) -> Constants:
        return cls.of(json.loads(HERE.read_text())["constants"])
