"""What a worker does, as Ray metrics, which Prometheus collects from every node.

A thread of its own looks twice a second at counters that exist anyway, so a step or a collective
does nothing for it. The time that each rank waits for the others shows the skew: the rank that
waits least is the one that the others wait for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ray.util.metrics import Counter, Gauge

from ..messages.run_status import RunStatus

if TYPE_CHECKING:
    from chorusline.collectives.group import Group

SAMPLE_S = 0.5

MOST_REPORTED = 64
"""Names of reported numbers that are published; a report may make names without end."""

GAUGES = {
    "chorusline_step_seconds": "seconds of an optimizer step, averaged over the last sample",
    "chorusline_joined": "1 on a rank that has run out of data and shadows the steps of others",
    "chorusline_batches_left": "batches left of the shard that is iterated",
    "chorusline_generation": "number of the generation; it grows when ranks are lost or join",
    "chorusline_rank": "rank of the worker, -1 between runs",
    "chorusline_world_size": "ranks of the generation",
    "chorusline_memory_bytes": "memory of the worker's process",
    "chorusline_device_memory_bytes": "memory of the worker's tensors on its GPU",
}
COUNTERS = {
    "chorusline_steps": "optimizer steps taken, on all ranks together",
    "chorusline_communication_seconds": "time in which a collective was in flight",
    "chorusline_wait_seconds": "time for which a step waited until its gradients were reduced",
    "chorusline_sent_bytes": "bytes that collectives ask this rank to send",
    "chorusline_collectives": "collectives issued",
}
REPORTED = {
    "chorusline_reported": "the last number that the rank reported by this name (ctx.report)",
}
"""Its tag `name` is the name in the report, or `accuracy.top1` for a number in a dictionary."""
OF_DRIVER = {
    "chorusline_lost_workers": "workers that died, or were given up, during a run",
    "chorusline_recoveries": "times that a run continued without workers that it had lost",
    "chorusline_failed_runs": "runs that ended with a failure; cancelled runs do not count",
}
"""Prometheus shows these names with the prefix `ray_`, and counters with the suffix `_total`."""


@dataclass(frozen=True, slots=True)
class Look:
    """What the metrics are made of. status: of the run in progress, or of the last one. group: the
    same; None before the first run. reported: the last numbers of this run, by name."""

    status: RunStatus
    group: Group | None
    is_running: bool
    generation: int
    memory_bytes: int
    device_memory_bytes: int
    reported: Mapping[str, float] = field(default_factory=dict)


class Meter:
    """Turns looks into readings: values of gauges, and increments of counters. No Ray."""

    def __init__(self) -> None:
        self._status: RunStatus | None = None  # None: before the first run
        self._taken = 0
        self._waited_s = 0.0
        self._group: Group | None = None  # None: before the first group
        self._num_issued = 0
        self._elements = 0.0
        self._at = time.monotonic()
        self._stepped_at = self._at

    def read(self, look: Look) -> dict[str, float]:
        """Readings by name, GAUGES and COUNTERS together, without those that are not known yet."""
        now, since = time.monotonic(), self._at
        self._at = now
        status, group = look.status, look.group
        values = {
            "chorusline_generation": float(look.generation),
            "chorusline_joined": float(look.is_running and status.has_joined),
            "chorusline_batches_left": float(status.batches_left or 0) if look.is_running else 0.0,
            "chorusline_rank": -1.0,
            "chorusline_memory_bytes": float(look.memory_bytes),
            "chorusline_device_memory_bytes": float(look.device_memory_bytes),
        }
        if status is not self._status:  # Another run has begun.
            self._status, self._taken, self._waited_s = status, 0, 0.0
            self._stepped_at = since
        taken, waited_s = status.taken, status.waited_s
        if taken > self._taken:
            values["chorusline_steps"] = taken - self._taken
            values["chorusline_step_seconds"] = (now - self._stepped_at) / (taken - self._taken)
            self._stepped_at = now
        values["chorusline_wait_seconds"] = max(0.0, waited_s - self._waited_s)
        self._taken, self._waited_s = taken, waited_s
        if group is not None:
            if look.is_running:
                values["chorusline_rank"] = float(group.rank)
            values["chorusline_world_size"] = float(group.size)
            values |= self._traffic(group, since, now)
        return values

    def _traffic(self, group: Group, since: float, now: float) -> dict[str, float]:
        if group is not self._group:
            self._group, self._num_issued, self._elements = group, 0, 0.0
        num_issued = group.statistics.total_operations()
        elements = group.statistics.total_elements_sent()
        activity = group.activity(since, now)
        read = {
            "chorusline_communication_seconds": activity.in_flight_s,
            "chorusline_collectives": float(num_issued - self._num_issued),
            "chorusline_sent_bytes": (elements - self._elements) * activity.bytes_per_element,
        }
        self._num_issued, self._elements = num_issued, elements
        return read


def in_ascii(text: str) -> str:
    """The value of a tag: Ray encodes no other than ASCII, and an error would end the thread."""
    return text.encode("ascii", "backslashreplace").decode()


class Publisher:
    """The thread that publishes. look: called in that thread; it must not block."""

    def __init__(self, session: str, seat: int, look: Callable[[], Look]) -> None:
        tags = {"session": in_ascii(session), "seat": str(seat)}
        self._tags = tags
        self._metrics: dict[str, Any] = {}
        for kind, names in ((Gauge, GAUGES), (Counter, COUNTERS)):
            for name, says in names.items():
                metric = kind(name, description=says, tag_keys=tuple(tags))
                metric.set_default_tags(tags)
                self._metrics[name] = metric
        ((name, says),) = REPORTED.items()
        self._reported = Gauge(name, description=says, tag_keys=(*tags, "name"))
        self._reported.set_default_tags(tags)
        self._metrics[name] = self._reported
        self._named: dict[str, float] = {}
        self._meter = Meter()
        self._look = look
        threading.Thread(target=self._main, name="metrics", daemon=True).start()

    def move_to(self, seat: int) -> None:
        """Publish as the worker in another seat from now on."""
        self._tags = self._tags | {"seat": str(seat)}
        for metric in self._metrics.values():
            metric.set_default_tags(self._tags)

    def _main(self) -> None:
        while True:
            time.sleep(SAMPLE_S)
            look = self._look()
            self._publish_reported(look.reported)
            for name, value in self._meter.read(look).items():
                if name in GAUGES:
                    self._metrics[name].set(value)
                elif value > 0:
                    self._metrics[name].inc(value)

    def _publish_reported(self, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            # Each name is a series of its own for whoever stores them, forever.
            if name in self._named or len(self._named) < MOST_REPORTED:
                if self._named.get(name) != value:
                    self._reported.set(value, tags={"name": in_ascii(name)})
                self._named[name] = value


class DriverCounters:
    """The metrics of what only the driver knows."""

    def __init__(self, session: str) -> None:
        self._counters = {
            name: Counter(name, description=says, tag_keys=("session",))
            for name, says in OF_DRIVER.items()
        }
        for counter in self._counters.values():
            counter.set_default_tags({"session": in_ascii(session)})

    def add(self, name: str) -> None:
        self._counters[name].inc(1)
