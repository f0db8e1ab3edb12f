"""What the driver and the workers of a crew say of themselves; it changes nothing."""

from __future__ import annotations

import asyncio

from ..calls import Actor, ActorGone, NoAnswer, answers
from ..messages import DriverSnapshot, WorkerSnapshot
from ..whereabouts import Whereabouts


class Asking:
    """The part of a crew that asks. Silent actors delay it by at most `timeout_s`."""

    _driver: Actor | None
    _workers: dict[int, Actor]

    async def snapshots(
        self, timeout_s: float
    ) -> tuple[DriverSnapshot | None, tuple[WorkerSnapshot | str, ...]]:
        """Snapshots of the driver and, by seat, of the workers; a text says why one gave none."""
        calls = {"driver": self._driver.snapshot.remote()} if self._driver is not None else {}
        async with asyncio.TaskGroup() as tasks:
            asked = tasks.create_task(answers(calls, timeout_s), name="driver-snapshot")
            workers = await self.workers_seen(timeout_s)
        driver = (await asked).get("driver")
        return driver if isinstance(driver, DriverSnapshot) else None, workers

    async def workers_seen(self, timeout_s: float) -> tuple[WorkerSnapshot | str, ...]:
        """Snapshots of the workers, by seat, without asking the driver."""
        calls = {seat: worker.snapshot.remote() for seat, worker in self._workers.items()}
        said = await answers(calls, timeout_s)
        return tuple(
            word.detail if isinstance(word, ActorGone | NoAnswer) else word
            for _, word in sorted(said.items())
        )

    async def whereabouts(
        self, timeout_s: float
    ) -> dict[int, tuple[WorkerSnapshot, Whereabouts] | str]:
        """The snapshot of each worker, and what it has done last; by seat."""
        workers = sorted(self._workers.items())
        calls = {(seat, 0): worker.snapshot.remote() for seat, worker in workers}
        calls |= {(seat, 1): worker.whereabouts.remote() for seat, worker in workers}
        said = await answers(calls, timeout_s)
        seen: dict[int, tuple[WorkerSnapshot, Whereabouts] | str] = {}
        for seat, _ in workers:
            who, what = said[seat, 0], said[seat, 1]
            if isinstance(who, ActorGone | NoAnswer):
                seen[seat] = who.detail
            else:
                seen[seat] = what.detail if isinstance(what, ActorGone | NoAnswer) else (who, what)
        return seen
