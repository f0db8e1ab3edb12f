"""Spare workers: they have started and wait, so that a lost worker's seat is not empty long.

A process, torch and the program's modules take seconds to load. A spare worker has them. When
a seat is empty, the worker takes it with the place that it has (`Seats.swap`), and the place of the
lost worker is filled after it, without haste.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import ray

from ..ray_calls.calls import Actor, ActorGone, NoAnswer, answer, nodes_leaving
from .retry import AGAIN_AT_MOST_S, AGAIN_S, beside, persist
from .seats import Seats

_BEHIND_S = 3.0
"""Seconds until the next worker is started after one that has taken a seat: a process that starts
needs the cores of the node, and so does the recovery."""

_ANSWER_S = 2.0
"""Seconds in which a worker that does nothing else takes a seat; then another one is asked."""


class SpareWorkers:
    """The spare workers of one session, by seat (`Seats.spare_seats`).

    make: starts a worker in a seat that there is room for.
    """

    def __init__(self, seats: Seats, make: Callable[[int], Actor]) -> None:
        self._seats = seats
        self._make = make
        self._workers: dict[int, Actor] = {}
        self._seated: dict[int, Any] = {}
        """By spare seat, the call that ends when its worker has another seat. One for each worker:
        the call stays in the worker when the run that waits for it ends."""
        self._ready: dict[int, str] = {}  # by spare seat, the node of its worker
        self._is_ready = asyncio.Event()

    @property
    def num_ready(self) -> int:
        """The number of workers that could take a seat now."""
        return len(self._ready)

    @asynccontextmanager
    async def kept(self, program: Any) -> AsyncIterator[None]:
        """While the body runs, see that a worker waits in every spare seat, and has opened
        the program. Those that wait at the end continue to wait."""
        async with AsyncExitStack() as stack:
            for seat in self._seats.spare_seats:
                what = f"seat {seat} of the spares is not filled"
                keep = partial(self._keep, seat, program)
                await stack.enter_async_context(beside(persist(keep, what), f"spare-{seat}"))
            yield

    async def _keep(self, seat: int, program: Any) -> bool:
        pause_s = AGAIN_S
        while True:
            # The first one, or the one before was taken or is gone.
            if seat not in self._workers:
                await self._seats.wait_for(seat)
                self._workers[seat] = self._make(seat)
                self._seated[seat] = self._workers[seat].wait_for_seat.remote()
            worker, seated = self._workers[seat], self._seated[seat]
            try:
                await answer(worker.prepare.remote(program))
                node_id = (await answer(worker.snapshot.remote())).info.node_id
                if self._workers.get(seat) is worker:  # It may have been taken meanwhile.
                    self._ready[seat] = node_id
                    self._is_ready.set()
                await answer(seated)
                pause_s = AGAIN_S
                await asyncio.sleep(_BEHIND_S)
            except ActorGone:
                if self._workers.get(seat) is worker:
                    self._drop(seat)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, AGAIN_AT_MOST_S)

    def _drop(self, seat: int) -> None:
        self._ready.pop(seat, None)
        ray.kill(self._workers.pop(seat))

    def leave_nodes(self, node_ids: Collection[str]) -> None:
        """End the workers that wait on these nodes, and would take no seat: others are started
        elsewhere (`_keep`)."""
        for seat in [seat for seat, node_id in self._ready.items() if node_id in node_ids]:
            self._drop(seat)

    async def wait_for_one(self) -> None:
        """Return when a worker is ready, which another seat may take first."""
        while not self._ready:
            self._is_ready.clear()
            await self._is_ready.wait()

    async def take(self, seat: int) -> Actor | None:
        """A worker that sits in `seat` from now on; None if none is ready."""
        while self._ready:
            spare = min(self._ready)
            node_id = self._ready.pop(spare)
            worker = self._workers.pop(spare)
            try:
                await self._seat_worker(worker, seat, node_id)
                self._seats.swap(seat, spare)
                return worker
            except (ActorGone, NoAnswer):
                ray.kill(worker)
            except BaseException:  # The caller is cancelled: nobody knows this worker any more.
                ray.kill(worker)
                raise
        return None

    async def _seat_worker(self, worker: Actor, seat: int, node_id: str) -> None:
        if node_id in await asyncio.to_thread(nodes_leaving):
            raise ActorGone("its node is drained")
        await answer(worker.take_seat.remote(seat), _ANSWER_S)

    def leave(self) -> list[Actor]:
        """The spare workers, which are the caller's to end."""
        workers, self._workers = list(self._workers.values()), {}
        self._ready.clear()
        return workers
