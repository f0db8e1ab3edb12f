"""What a session does with its actors; session/session.py has what a person sees of it."""

from __future__ import annotations

import asyncio
from typing import Any

import ray

from chorusline.actors.driver.driver import GRACE_S
from chorusline.actors.errors import DriverLost
from chorusline.actors.messages.messages import (
    DriverSnapshot,
    RunFailed,
    RunRequest,
    RunSucceeded,
    WorkerSnapshot,
)
from chorusline.actors.messages.whereabouts import Whereabouts
from chorusline.actors.parcels.parcel import Parcel
from chorusline.actors.ray_calls.calls import HEAD_ANSWER_S, head_stays_gone
from chorusline.actors.ray_calls.detached_actors import DetachedActors
from chorusline.actors.worker_group.worker_group import CLOSED, STEP_S, Stop, WorkerGroup
from chorusline.collectives.diagnosis.debug import get_debug_level

from ..placing import placement
from ..placing.placement import Needs
from ..placing.seats import PlacedSeats
from ..placing.trials import of_this_trial
from ..showing.news_pump import Audience, delivered_news
from ..showing.starting import Starting
from .options import SessionOptions
from .resource_holders import telling_who_holds
from .slow_start_notice import awaited, telling

_LOADED_BY_WORKERS = (
    "chorusline.runtime.program.context",
    "chorusline.runtime.program.program",
    "chorusline.runtime.data_parallel.distributed_data_parallel",
    "chorusline.runtime.zero.zero_redundancy_optimizer",
)
"""Until their first step, as most functions are."""

_BEGINNINGS = 3
"""How often one call of `run` may begin: workers may have died since the last run, and more
workers while those were replaced."""

_REPORT_HISTORY = 4000
"""Reports of each rank that its worker holds for a session host that is started again."""


class LocalSession:
    """The actors of a session: starts, uses and ends them. The one of a detached session is its
    session host's (detached/session_host.py). detached: names its actors; None for other
    sessions."""

    def __init__(self, options: SessionOptions, detached: DetachedActors | None = None) -> None:
        # None before there is room for the workers, and at the end.
        self.worker_group: WorkerGroup | None = None
        self.seen: tuple[WorkerSnapshot | str, ...] = ()  # the workers' last answers, by seat
        self._options = options
        self._detached = detached
        self._seats: PlacedSeats | None = None  # None before there is room, and at the end.
        self._next_run = 0
        self._is_running = False
        self._forks_workers = False

    async def start(
        self, starting: Starting, *, is_local: bool, forks_workers: bool = False
    ) -> None:
        """is_local: sessions of this process have started the cluster. forks_workers: those that
        come later, as this process has started its node. If it raises, `close` ends what has
        started."""
        self._forks_workers = forks_workers
        options, detached = self._options, self._detached
        wait_s = options.startup_timeout_s
        limit = f"gives up after {wait_s:g} s, startup_timeout_s"
        async with telling(starting, lambda: awaited(self.worker_group, options.fewest), limit):
            bundle = placement.bundle_of_worker(
                options.most + options.spares,
                use_gpu=options.use_gpu,
                resources_per_worker=options.resources_per_worker,
                accelerator_type=options.accelerator_type,
                is_local=is_local,
            )
            name = detached.name if detached is not None else ""
            needs = Needs(bundle, options.placement_strategy, options.labels, name)
            # A session host is no part of a trial that has started the session.
            of_trial = None if name else of_this_trial(needs, options.fewest, options.spares)
            # A wait that is long says which sessions hold what it waits for.
            async with telling_who_holds(bundle, options.fewest, wait_s):
                first = of_trial or await placement.place(
                    needs,
                    options.fewest,
                    options.most,
                    wait_s,
                    may_grow=not is_local,
                    survives_loss=options.max_failures != 0,
                )
                # Here: a cancellation may come on leaving the block, and `close` gives them back.
                self._seats = PlacedSeats(first, needs, options.most, options.spares)
            self.worker_group = self._worker_group_of(self._seats)
            await self.worker_group.assemble(wait_s)

    def _worker_group_of(self, seats: PlacedSeats) -> WorkerGroup:
        if (detached := self._detached) is not None:
            seats.whenever_changed(lambda: detached.save("seats", seats.state()))
        return WorkerGroup(
            seats,
            self._options.fewest,
            use_gpu=self._options.use_gpu,
            driver_options=placement.options_of_driver(),
            environment=self._options.environment,
            modules=_LOADED_BY_WORKERS if self._forks_workers else (),
            detached=detached,
        )

    async def start_again(self, next_run: int) -> None:
        """In a session host that was started again: take over what the one before had."""
        assert self._detached is not None
        # Numbers of runs do not repeat: workers, and the listener, know a run by its number.
        self._next_run = next_run
        self._seats = PlacedSeats.recalled(self._detached.saved("seats"))
        # The one before may have died between a new group and the note of it.
        self._detached.remove_groups(kept=self._seats.groups)
        self.worker_group = self._worker_group_of(self._seats)
        await self.worker_group.find()

    async def close(self) -> None:
        """End the actors, even of a start that has failed; may be called more than once."""
        worker_group, self.worker_group = self.worker_group, None
        seats, self._seats = self._seats, None
        # After a ray.shutdown() of the user there is nothing left to end.
        if not ray.is_initialized():
            return
        if worker_group is None:
            await _end(None, seats)
            return
        # Where the head has gone, Ray's calls would wait for it for a minute, and end this process.
        asking = asyncio.create_task(head_stays_gone(HEAD_ANSWER_S), name="head")
        try:
            # A function that runs is aborted, and not killed: its caller gets the reason.
            if not await asyncio.shield(asking) and self._is_running:
                await worker_group.cancel(self._next_run - 1, CLOSED)
        finally:
            # Even if this was cancelled: nobody else knows the actors any more.
            if not await asking:
                await _end(worker_group, seats)

    @property
    def num_workers(self) -> int:
        return self.worker_group.num_workers if self.worker_group else self._options.most

    @property
    def num_spares(self) -> int:
        return self.worker_group.num_spares if self.worker_group else 0

    @property
    def name(self) -> str:
        return self.worker_group.name if self.worker_group else ""

    def how_interrupted(self) -> str:
        """A text for the user who interrupted a cell: what happened to the run."""
        stop = self.worker_group.last_stop if self.worker_group is not None else Stop.AT_ONCE
        if stop is Stop.AFTER_STEP:
            where = "all ranks stopped between the same two steps"
        elif stop is Stop.OVER:
            where = "the run had ended"
        else:
            why = {
                Stop.IN_STEP: f"no step ended within {STEP_S:g} s, so ",
                Stop.WITHOUT_STEPS: "no rank takes steps, so ",
            }.get(stop, "")
            where = (
                f"{why}the run was aborted (a rank that stays stuck for {GRACE_S:g} s is replaced, "
                "and loses what it keeps)"
            )
        return (
            f"Interrupted: {where}. The session is ready, and keeps what ctx.keep made and the "
            "variables of %%ranks; run the cell again to continue."
        )

    async def snapshots(
        self, timeout_s: float
    ) -> tuple[DriverSnapshot | None, tuple[WorkerSnapshot | str, ...]]:
        if self.worker_group is None:
            return None, ()
        driver, self.seen = await self.worker_group.snapshots(timeout_s)
        return driver, self.seen

    async def ask_workers(self, timeout_s: float) -> tuple[WorkerSnapshot | str, ...]:
        if self.worker_group is not None:
            self.seen = await self.worker_group.workers_seen(timeout_s)
        return self.seen

    async def whereabouts(
        self, timeout_s: float
    ) -> dict[int, tuple[WorkerSnapshot, Whereabouts] | str]:
        return await self.worker_group.whereabouts(timeout_s) if self.worker_group else {}

    async def run(
        self, program: Parcel | None, audience: Audience, begun: RunRequest | None = None
    ) -> RunSucceeded | RunFailed:
        """Run a function on all ranks, and return how the run ended.

        begun: a run that workers are in already, or have ended, in a session host that was started
            again.
        """
        self._is_running = True
        try:
            payload = ray.put(program)  # Now: later the caller may change what it has passed.
            del program  # A session host holds it nowhere else.
            return await self._run(payload, audience, begun)
        finally:
            self._is_running = False

    async def _run(
        self, payload: Any, audience: Audience, begun: RunRequest | None
    ) -> RunSucceeded | RunFailed:
        """1. Replace the workers that are missing since the last run. 2. Run, and hand on reports
        meanwhile; if the run failed before any worker began, repeat from 1.

        payload: a reference to the function's Parcel. begun: without 1."""
        worker_group = self.worker_group
        assert worker_group is not None
        for left in reversed(range(_BEGINNINGS)):
            request = begun or self._new_request(audience)
            if begun is None:
                await worker_group.assemble(self._options.startup_timeout_s)  # 1.
            try:  # 2.
                async with delivered_news(worker_group.listener, request.run, audience):
                    if begun is not None:
                        return await worker_group.resume_run(request)
                    outcome = await worker_group.run(request, payload)
            except DriverLost as lost:
                # No function was called, so that to begin again repeats nothing.
                if lost.nobody_began and left and begun is None:
                    continue
                raise
            # A function that has begun may have had effects: it is not called again here.
            if isinstance(outcome, RunSucceeded) or not (outcome.nobody_began and left):
                return outcome
        raise AssertionError("the last beginning returns or raises")

    def _new_request(self, audience: Audience) -> RunRequest:
        options, checkpoint = self._options, self._options.checkpoint
        self._next_run += 1
        request = RunRequest(
            self._next_run - 1,
            options.timeout_s,
            audience.wants_reports,
            get_debug_level(),
            options.fewest,
            options.max_failures,
            options.pause_s,
            last_save_s=checkpoint.deadline_s if checkpoint is not None else None,
            fault_plan=options.fault_plan,
            report_history=_REPORT_HISTORY if self._detached is not None else 0,
            replaces_stragglers=options.replaces_stragglers,
            replica_size=options.replica_size,
        )
        if self._detached is not None:
            self._detached.save("request", request)
        return request


async def _end(worker_group: WorkerGroup | None, seats: PlacedSeats | None) -> None:
    """First the actors, then their resources, even if ending the actors fails."""
    try:
        if worker_group is not None:
            await worker_group.dismiss()
    finally:
        if seats is not None and ray.is_initialized():
            await seats.give_back()
