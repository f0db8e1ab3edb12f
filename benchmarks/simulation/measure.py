"""The constants of the simulation, measured on this machine.

CPU times are read from the processes' own clocks, per thread, so that a machine that is busy with
other work changes them little. A process's threads are taken in two parts: the busiest one, which
holds Python's lock and serves one message after the other (`serial`), and all the others, which
belong to Ray and run beside it (`beside`).
"""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray

from benchmarks.simulation.constants import Constants, Cost, Line
from benchmarks.simulation.kills import (
    Change,
    changes,
    cpu_s,
    idle_share,
    processes_of_ray,
    until_exit,
)
from benchmarks.simulation.scale import fastest
from chorusline.actors.messages.messages import (
    Assignment,
    FormerRanks,
    Frozen,
    OptimizerProgress,
    Resumption,
)
from chorusline.actors.ray_calls.actor_store import STORE_CONCURRENCY, ActorStore, StoreActor
from chorusline.actors.ray_calls.calls import ActorGone, actor_class, answer
from chorusline.collectives.contract.errors import PeerLost

_CALLS, _ROUNDS = 400, 3
_SESSIONS = 3
_SIZES = (16, 1000, 4000)
"""Of the gatherings that are measured."""
_CARD = b"x" * 120
"""As long as what a rank tells the others of itself: its host, its pid."""


def _payload() -> Resumption:
    assignment = Assignment(1, 3, 8, 3, 8, 0)
    return Resumption(
        assignment, FormerRanks.of(range(8)), (OptimizerProgress(100, (0.0,) * 32),), 0
    )


def _report() -> Frozen:
    error = PeerLost("all_reduce", 0, [2], "process 100 ended")
    return Frozen(3, 0, (OptimizerProgress(100, (0.0,) * 32),), error)


class Meter:
    """The CPU time of this process between two moments, in its busiest thread and beside it."""

    def __init__(self) -> None:
        self._before: dict[str, float] = {}

    def _now(self) -> dict[str, float]:
        return {
            task.name: int((task / "schedstat").read_text().split()[0]) * 1e-9
            for task in Path("/proc/self/task").iterdir()
        }

    def start(self) -> None:
        self._before = self._now()

    def stop(self) -> tuple[float, float]:
        now = self._now()
        spent = sorted(used - self._before.get(name, 0.0) for name, used in now.items())
        return spent[-1], sum(spent[:-1])


class Metered:
    """An actor that can say what CPU time it took."""

    _meter: Meter

    async def pid(self) -> int:
        return os.getpid()

    async def start(self) -> None:
        self._meter = Meter()
        self._meter.start()

    async def stop(self) -> tuple[float, float]:
        return self._meter.stop()


class Node(Metered):
    """Makes calls and takes them, as the driver and a worker do."""

    async def tell(self, what: object) -> None:
        """A call as those that the driver makes."""

    async def call_all(self, nodes: list[Any], calls: int) -> float:
        """As the driver's instructions: each call a task of its own. Returns the seconds."""
        payload, began_at = _payload(), time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            for number in range(calls):
                tasks.create_task(self._call(nodes[number % len(nodes)], payload))
        return time.monotonic() - began_at

    async def _call(self, node: Any, payload: object) -> None:
        await answer(node.tell.remote(payload), 30.0)

    async def one_by_one(self, node: Any, calls: int) -> list[float]:
        payload, times = _payload(), []
        for _ in range(calls):
            began_at = time.monotonic()
            await self._call(node, payload)
            times.append(time.monotonic() - began_at)
        return times

    async def report_to(self, node: Any, calls: int) -> None:
        """As a training thread reports to the driver: calls that nobody awaits."""
        report = _report()

        def make() -> None:
            for _ in range(calls):
                node.tell.remote(report)

        await asyncio.to_thread(make)

    async def use_store(
        self, store: ActorStore, operation: str, keys: int, calls: int
    ) -> list[float]:
        """Operations of a training thread; the seconds of each."""
        times = []

        def use() -> None:
            for _ in range(calls):
                began_at = time.monotonic()
                if operation == "gather":
                    store.gather("card", 0, keys, _CARD)
                else:
                    store.add("counter", 1)
                times.append(time.monotonic() - began_at)

        thread = threading.Thread(target=use, name="training")
        thread.start()
        await asyncio.to_thread(thread.join)
        return times

    async def notices_death(self, node: Any) -> float:
        """The time (time.monotonic, which all processes of a host share) at which a call that
        lasts learned that its actor was killed."""
        try:
            await answer(node.last.remote())
        except ActorGone:
            return time.monotonic()
        raise AssertionError("it was to die")

    async def last(self) -> None:
        await asyncio.Event().wait()


class MeteredStore(Metered, StoreActor):
    """The store in an actor of its own, as a session has it."""

    async def gather_all(self, size: int) -> None:
        """So many ranks have come, and one still waits for its answer."""
        self._store.multi_set([f"card/{rank}" for rank in range(size)], [_CARD] * size)
        self._begin_gathering(b"card", size).num_waiters = 1


def _get(call: Any, timeout_s: float = 60.0) -> Any:
    return ray.get(call, timeout=timeout_s)


def _spent(nodes: list[Any], work: Any, calls: int) -> list[Cost]:
    """The CPU time per call of each node, while `work` is done: the median of a few rounds."""
    rounds: list[list[tuple[float, float]]] = []
    for _ in range(_ROUNDS):
        _get([node.start.remote() for node in nodes])
        _get(work())
        time.sleep(0.1)
        rounds.append(_get([node.stop.remote() for node in nodes]))
    return [
        Cost(
            statistics.median(one[place][0] for one in rounds) / calls,
            statistics.median(one[place][1] for one in rounds) / calls,
        )
        for place in range(len(nodes))
    ]


def decide_s() -> float:
    """Of the driver's decisions, for each message of a change."""
    change = fastest(1000)
    return change.change_s / change.messages_change


def measured(most: int, seed: int) -> Constants:
    """Measure everything, in Ray as it is running. most: ranks in the run that is measured for a
    rank's own work."""
    options = {"num_cpus": 0}
    node_class = actor_class(Node, **options)
    driver, *nodes = [node_class.remote() for _ in range(4)]
    _get([node.pid.remote() for node in (driver, *nodes)], 120.0)
    _get(driver.call_all.remote(nodes, _CALLS))  # Connections are made.

    sender, *receivers = _spent(
        [driver, *nodes], lambda: driver.call_all.remote(nodes, _CALLS), _CALLS
    )
    each = Cost(
        statistics.fmean(one.serial_s for one in receivers) * len(nodes),
        statistics.fmean(one.beside_s for one in receivers) * len(nodes),
    )
    round_trip = statistics.median(_get(driver.one_by_one.remote(nodes[0], 100)))
    reporter, reported = _spent(
        [nodes[0], driver], lambda: nodes[0].report_to.remote(driver, _CALLS), _CALLS
    )
    store_actor = actor_class(
        MeteredStore, concurrency_groups=STORE_CONCURRENCY, **options
    ).remote()
    store = ActorStore(store_actor)
    client, server = _spent(
        [nodes[0], store_actor],
        lambda: nodes[0].use_store.remote(store, "add", 0, _CALLS // 2),
        _CALLS // 2,
    )
    store_trip = statistics.median(_get(nodes[0].use_store.remote(store, "add", 0, 100)))

    points: list[list[tuple[float, float]]] = [[], []]
    for size in _SIZES:
        calls = max(20, 20_000 // size)
        _get(store_actor.gather_all.remote(size))
        spent = _spent(
            [nodes[0], store_actor],
            lambda: nodes[0].use_store.remote(store, "gather", size, calls),  # noqa: B023
            calls,
        )
        for at, cost in zip(points, spent, strict=True):
            at.append((size, cost.serial_s))
    gathers = [Line.through(one) for one in points]
    deaths, ray_s = [], []
    for node in nodes:
        noticed = driver.notices_death.remote(node)
        pid = _get(node.pid.remote())
        time.sleep(0.3)
        before = sum(map(cpu_s, processes_of_ray()))
        end = os.pidfd_open(pid)
        os.kill(pid, signal.SIGKILL)
        ended_at = until_exit(end)
        deaths.append(_get(noticed) - ended_at)
        time.sleep(0.2)
        ray_s.append(sum(map(cpu_s, processes_of_ray())) - before)
    idle = idle_share([_get(actor.pid.remote()) for actor in (driver, store_actor)])
    for actor in (driver, store_actor):
        ray.kill(actor)

    runs = [one for session in range(_SESSIONS) for one in changes(most, seed + session)]
    by_phase = {
        phase: Line.through([(one.survivors, one.thread_s[phase]) for one in runs])
        for phase in ("freeze", "connect", "meet", "step")
    }
    told = each.serial_s + each.beside_s

    def rest_s(one: Change) -> float:
        """What the process of a rank computes in a change, without what is known of it: its
        training thread, two calls of the driver, its report, four operations of the store."""
        known = sum(one.thread_s[phase] for phase in ("freeze", "connect", "meet"))
        known += one.steps * one.per_step_s
        known += 2 * told + reporter.beside_s + 4 * client.beside_s
        return one.cpu_s["ranks"] / one.survivors - known

    return Constants(
        call_out=sender,
        call_in=each,
        call_trip_s=round_trip,
        report_out=reporter,
        report_in=reported,
        store_client=client,
        store_server=server,
        store_trip_s=store_trip,
        gather_client=gathers[0],
        gather_server=gathers[1],
        decide_s=decide_s(),
        exit_s=statistics.median(one.exited_s for one in runs),
        death_s=max(0.0, statistics.median(deaths)),  # Ray may see the process's end before us.
        death_cpu_s=statistics.median(ray_s),
        freeze_s=by_phase["freeze"],
        connect_s=by_phase["connect"],
        meet_s=by_phase["meet"],
        step_s=by_phase["step"],
        rest_s=statistics.median(max(0.0, rest_s(one)) for one in runs),
        idle=idle,
    )


def as_json(constants: Constants) -> dict[str, Any]:
    return asdict(constants)
