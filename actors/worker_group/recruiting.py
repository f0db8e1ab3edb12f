"""During a run: a worker for every seat, as soon as there is room for it.

A seat is empty from the start if the cluster had no room for it, or becomes empty because its
worker has died, or has left a node that goes. To fill a seat may take as long as a node takes to
come, so each seat has a task of its own, and none keeps another waiting.

The driver hears of a new worker when that has opened the program, and so has loaded its modules:
the other ranks, which will wait for the worker to meet them, train until then.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from ..driver.driver import Unfit
from ..messages.messages import RunRequest
from ..ray_calls.calls import Actor, ActorGone, NoAnswer, answer, nodes_leaving
from ..ray_calls.versions import versions_here
from ..worker.worker import LAST_REPORTS_S
from .news import Listener
from .replacing import replace_stragglers
from .retry import beside, persist
from .seats import Seats
from .spare_workers import SpareWorkers

NODE_WATCH_S = 1.0

_ANSWER_S = 5.0

WAITS_S = 10.0
"""Seconds after which it is said why a worker that has come is not in the run."""

_STOP_S, _LOOK_S = 10.0, 0.1
"""Seconds that a busy worker has to become idle, and between two looks whether it is."""


class Recruiter:
    """Fills the seats of one run, as long as one driver carries it out.

    workers: by seat; the worker group's own mapping, as it changes.
    start: makes a worker in a seat, in the place of the one that was there.
    spares: the worker group's spare workers.
    take: gives one of them a seat, if there is one.
    starting: seats whose workers have not answered yet; the worker group's own set.
    program: a reference to the run's Parcel.
    listener: takes sentences for whoever looks at the run, and its pauses.
    """

    def __init__(
        self,
        driver: Actor,
        request: RunRequest,
        seats: Seats,
        workers: Mapping[int, Actor],
        start: Callable[[int], Actor],
        spares: SpareWorkers,
        take: Callable[[int], Awaitable[Actor | None]],
        starting: set[int],
        program: Any,
        listener: Listener,
    ) -> None:
        self._driver = driver
        self._request = request
        self._seats = seats
        self._workers = workers
        self._start = start
        self._spares = spares
        self._take = take
        self._starting = starting
        self._program = program
        self._listener = listener
        self._noted: set[str] = set()

    @asynccontextmanager
    async def at_work(self, *, has_taken_over: bool) -> AsyncIterator[None]:
        """While the body runs, fill seats, and tell the driver of nodes that are to go.

        has_taken_over: the driver has replaced another one, which knew of losses before.
        """
        watches = {
            "the seats of lost workers are not filled": lambda: self._recruit(has_taken_over),
            "draining nodes are not noticed": self._watch_nodes,
            "a pause is not noticed": self._watch_pauses,
        }
        if self._request.replaces_stragglers:
            watches["stragglers are not replaced"] = partial(
                replace_stragglers, self._driver, self._request.run, self._workers, self._starting
            )
        async with contextlib.AsyncExitStack() as stack:
            for what, watch in watches.items():
                watcher = self._until_driver_dies(watch, what)
                await stack.enter_async_context(beside(watcher, f"watch: {what}"))
            yield

    async def _until_driver_dies(self, watch: Callable[[], Awaitable[None]], what: str) -> None:
        async def attempt() -> bool:
            await watch()
            return True

        with contextlib.suppress(ActorGone):  # Then the call that waits for the run raises.
            await persist(attempt, what)

    async def _recruit(self, has_taken_over: bool) -> None:
        replaced: set[Actor] = set()
        async with asyncio.TaskGroup() as tasks:

            def fill(seats: Iterable[int]) -> None:
                for seat in seats:
                    # A driver that takes over reports a death that `_sorted_before` has found, too.
                    # Two that fill one seat would each end the worker of the other.
                    if (worker := self._workers.get(seat)) is not None:
                        if worker in replaced:
                            continue
                        replaced.add(worker)
                    tasks.create_task(self._fill(seat), name=f"seat-{seat}")

            async def fill_unless(
                comes: Callable[[int, Actor], Awaitable[bool]], seat: int
            ) -> None:
                worker = self._workers[seat]
                with contextlib.suppress(ActorGone):
                    # The driver may have told of its end, too, and another one may sit there now.
                    if not await comes(seat, worker) and self._workers.get(seat) is worker:
                        fill([seat])

            with contextlib.suppress(ActorGone):
                # Those that the cluster had no room for when the run began.
                fill(seat for seat in range(self._seats.most) if seat not in self._workers)
                if has_taken_over:
                    # No process knows which workers were starting when the previous driver died.
                    for seat in [seat for seat in self._starting if seat in self._workers]:
                        comes = partial(self._has_come, is_prepared=False)
                        tasks.create_task(fill_unless(comes, seat), name=f"seat-{seat}")
                    lost_before, busy = await self._sorted_before()
                    fill(lost_before)
                    for seat in busy:
                        tasks.create_task(
                            fill_unless(self._becomes_idle, seat), name=f"seat-{seat}"
                        )
                known, run = 0, self._request.run
                while lost := await answer(self._driver.lost_workers.remote(run, known)):
                    known += len(lost)
                    # Another worker may sit there by now.
                    fill(seat for seat, worker_id in lost if self._is_there(seat, worker_id))

    def _is_there(self, seat: int, worker_id: str) -> bool:
        worker = self._workers.get(seat)
        return worker is not None and str(worker._actor_id.hex()) == worker_id

    async def _sorted_before(self) -> tuple[list[int], list[int]]:
        """Seats whose workers died with the previous driver; and those whose workers were in a dry
        run for it. The new driver registers the idle workers, which the previous one had not put
        into the run yet."""
        known = {s: worker for s, worker in self._workers.items() if s not in self._starting}
        unfit = await self._unfit(known, _ANSWER_S)
        lost = [one.seat for one in unfit if one.is_gone]
        return lost, [one.seat for one in unfit if one.will_be_idle]

    async def _becomes_idle(self, seat: int, worker: Actor) -> bool:
        """Wait until a worker has stopped that was in a dry run for the former driver. Then it is
        registered. If the former driver had admitted the worker, it is a rank by now. False if it
        dies, or does not stop."""
        give_up_at = time.monotonic() + _STOP_S
        while time.monotonic() < give_up_at:
            unfit = await self._unfit({seat: worker}, _ANSWER_S)
            # It is registered, or it is a rank: the driver knows of it.
            if not unfit or not (unfit[0].is_gone or unfit[0].will_be_idle):
                return True
            if unfit[0].is_gone:
                return False
            await asyncio.sleep(_LOOK_S)
        return False

    async def _unfit(self, workers: Mapping[int, Actor], timeout_s: float) -> tuple[Unfit, ...]:
        call = self._driver.adopt.remote(dict(workers), timeout_s, versions_here())
        unfit: tuple[Unfit, ...] = await answer(call)
        return unfit

    async def _fill(self, seat: int) -> None:
        # One that was dismissed lives, and is ended as another one gets its seat.
        if (worker := self._workers.get(seat)) is not None:
            with contextlib.suppress(ActorGone, NoAnswer):
                await answer(worker.until_heard.remote(), LAST_REPORTS_S)

        async def attempt() -> bool:
            worker, is_prepared = await self._newcomer(seat)
            return await self._has_come(seat, worker, is_prepared=is_prepared)

        with contextlib.suppress(ActorGone):
            await persist(attempt, f"seat {seat} is not filled")
            await asyncio.sleep(WAITS_S)
            await self._tell_why_it_waits(seat)

    async def _tell_why_it_waits(self, seat: int) -> None:
        """A worker has come to the seat: say what keeps it out of the run, if something does."""
        worker = self._workers.get(seat)
        if worker is None:
            return
        asked = self._driver.why_waits.remote(self._request.run, str(worker._actor_id.hex()))
        with contextlib.suppress(NoAnswer):
            why = await answer(asked, _ANSWER_S)
            if why:
                self._note(f"a new worker is ready, but the function cannot admit it: {why}")

    def _note(self, notice: str) -> None:
        """Once: many seats may be filled, and mostly they wait for the same."""
        if notice not in self._noted:
            self._noted.add(notice)
            self._listener.note(notice)

    async def _newcomer(self, seat: int) -> tuple[Actor, bool]:
        """A spare worker; or, if there is room for the seat before one is ready, a new
        worker. And whether it has opened the program."""
        # To wait here for a spare worker that is starting was tried: of three workers, one
        # process fewer was on its way when the next kill came, and the third seat stayed empty.
        while (spare := await self._take(seat)) is None:
            if await self._has_room_first(seat):
                return self._start(seat), False
        return spare, True

    async def _has_room_first(self, seat: int) -> bool:
        """Wait for room for a seat, or for a spare worker; whether it was the room."""
        room = asyncio.create_task(self._seats.wait_for(seat), name=f"room-{seat}")
        spare = asyncio.create_task(self._spares.wait_for_one(), name=f"spare-{seat}")
        try:
            await asyncio.wait((room, spare), return_when=asyncio.FIRST_COMPLETED)
            # Where both are there the spare worker is quicker: it has loaded its modules.
            if spare.done():
                return False
            room.result()
            return True
        finally:
            room.cancel()
            spare.cancel()

    async def _has_come(self, seat: int, newcomer: Actor, *, is_prepared: bool) -> bool:
        # Its node may have gone just now: the worker has as long to come as the run waits.
        if not is_prepared:
            try:
                await answer(newcomer.prepare.remote(self._program), self._request.pause_s)
            except ActorGone as gone:
                self._note(f"a new worker could not start: {gone.detail}; another one is started")
                return False
            except NoAnswer:
                pass  # The driver says what is wrong with it.
        # The driver registers it by that, and what is left over could not be registered.
        if unfit := await self._unfit({seat: newcomer}, self._request.pause_s):
            self._note(
                f"a new worker {unfit[0].reason}; it cannot take part, and another one is started"
            )
            return False
        self._starting.discard(seat)
        return True

    async def _watch_pauses(self) -> None:
        """Tell of pauses, as the driver tells of them: in a run without any it has one question."""
        run, missing = self._request.run, 0
        try:
            while (
                pause := await answer(self._driver.next_pause.remote(run, missing))
            ) is not None or missing:
                self._listener.note_pause(pause)
                # A pause that changes is the same pause: it is told with the first number.
                if not missing:
                    self._listener.note(f"the run is paused, {pause}")
                missing = pause.missing if pause is not None else 0
        finally:
            self._listener.note_pause(None)

    async def _watch_nodes(self) -> None:
        """Tell the driver of nodes that are drained or preempted, while they are still there; and
        how many workers could take seats of those that leave."""
        last = 0
        while True:
            await asyncio.sleep(NODE_WATCH_S)
            leaving = await asyncio.to_thread(nodes_leaving)
            # First: those on such a node replace no rank that leaves.
            self._spares.leave_nodes(leaving.keys())
            if (num_ready := self._spares.num_ready) != last:
                await answer(self._driver.has_spares.remote(num_ready))
                last = num_ready
            # Again each time: the driver may not have been able to act on it before.
            for node_id, why in leaving.items():
                await answer(self._driver.leaves.remote(self._request.run, node_id, why))
