"""A discrete-event simulation: a clock, processors that processes share, and servers with queues.

A *task* is a generator. What it yields is a wait: a callable that is given `resume`, and calls it
once, now or later. `Simulation.start` runs a task until its first wait, and from each wait to the
next. Events at one instant happen in the order in which they were asked for, so that a simulation
with the same seed is the same simulation.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Generator
from typing import TypeAlias

Resume: TypeAlias = Callable[[], None]
Wait: TypeAlias = Callable[[Resume], None]
Task: TypeAlias = Generator[Wait, None, None]


class Simulation:
    """The clock, in seconds, and what is to happen."""

    def __init__(self) -> None:
        self.now = 0.0
        self._order = itertools.count()
        self._events: list[tuple[float, int, Resume]] = []

    def at(self, when: float, what: Resume) -> None:
        assert when >= self.now, "an event cannot happen in the past"
        heapq.heappush(self._events, (when, next(self._order), what))

    def after(self, delay_s: float, what: Resume) -> None:
        self.at(self.now + delay_s, what)

    def sleep(self, delay_s: float) -> Wait:
        return lambda resume: self.after(delay_s, resume)

    def start(self, task: Task) -> None:
        def go_on() -> None:
            wait = next(task, None)
            if wait is not None:
                wait(go_on)

        go_on()

    def run(self) -> float:
        """Until nothing is left to happen. Returns the time of the last event."""
        while self._events:
            self.now, _, what = heapq.heappop(self._events)
            what()
        return self.now


class Cores:
    """Cores that running processes share evenly, as a fair scheduler does.

    count: of cores; infinite where every process has a core of its own.
    others: processes of other programs that never stop, and take their even part.

    With n processes running, each gets min(1, count / (n + others)) of a core. Work is kept by
    *virtual time*, which passes at that rate: work ends when virtual time has gained its length,
    so the order of ends does not change when the rate does.
    """

    def __init__(
        self, simulation: Simulation, count: float = math.inf, others: float = 0.0
    ) -> None:
        self._simulation = simulation
        self._count = count
        self._others = others
        self._order = itertools.count()
        self._running: list[tuple[float, int, Resume]] = []  # by the virtual time of the end
        self._virtual = 0.0
        self._since = 0.0
        self._change = 0  # number of the last change; an end that was planned before it is void
        self.busy_s = 0.0
        """Seconds of work that was asked for."""

    def work(self, seconds: float) -> Wait:
        """Wait until a process has computed for `seconds` of a core."""
        self.busy_s += seconds
        if math.isinf(self._count):
            return self._simulation.sleep(seconds)

        def wait(resume: Resume) -> None:
            self._catch_up()
            heapq.heappush(self._running, (self._virtual + seconds, next(self._order), resume))
            self._plan()

        return wait

    @property
    def rate(self) -> float:
        """The part of a core that each running process gets."""
        return min(1.0, self._count / max(len(self._running) + self._others, 1e-12))

    def _catch_up(self) -> None:
        self._virtual += (self._simulation.now - self._since) * self.rate
        self._since = self._simulation.now

    def _plan(self) -> None:
        self._change += 1
        if not self._running:
            return
        change = self._change
        left_s = max(self._running[0][0] - self._virtual, 0.0) / self.rate

        def end() -> None:
            if change == self._change:
                self._catch_up()
                _, _, resume = heapq.heappop(self._running)
                self._plan()
                resume()

        self._simulation.after(left_s, end)


class Server:
    """One thread that serves requests in the order in which they come: a process whose Python code
    runs one request at a time, on cores that it shares with others."""

    def __init__(self, simulation: Simulation, cores: Cores) -> None:
        self._simulation = simulation
        self._cores = cores
        self._waiting: deque[tuple[float, Resume]] = deque()
        self._is_busy = False
        self.busy_s = 0.0
        self.served = 0

    def serve(self, seconds: float) -> Wait:
        """Wait until the request was served. seconds: of work."""

        def wait(resume: Resume) -> None:
            self._waiting.append((seconds, resume))
            if not self._is_busy:
                self._next()

        return wait

    def _next(self) -> None:
        if not self._waiting:
            self._is_busy = False
            return
        self._is_busy = True
        seconds, resume = self._waiting.popleft()
        self.busy_s += seconds
        self.served += 1

        def done() -> None:
            # A client continues before the next one is served: it may ask again, after the others.
            resume()
            self._next()

        self._cores.work(seconds)(done)


class Gate:
    """Closed until it is opened; tasks wait at it."""

    def __init__(self) -> None:
        self.is_open = False
        self._waiting: list[Resume] = []

    def open(self) -> None:
        self.is_open = True
        waiting, self._waiting = self._waiting, []
        for resume in waiting:
            resume()

    def passed(self) -> Wait:
        def wait(resume: Resume) -> None:
            if self.is_open:
                resume()
            else:
                self._waiting.append(resume)

        return wait


class Meeting:
    """A gate that opens when `count` tasks have come to it."""

    def __init__(self, count: int) -> None:
        self._missing = count
        self.gate = Gate()

    def come(self) -> Wait:
        self._missing -= 1
        if self._missing == 0:
            self.gate.open()
        return self.gate.passed()
