"""What a session does with its actors; session.py has what a person sees of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray

from chorusline.actors.calls import HEAD_ANSWER_S, head_stays_gone
from chorusline.actors.crew.crew import Crew
from chorusline.actors.crew.listening import News
from chorusline.actors.errors import DriverLost
from chorusline.actors.fault_plan import Order
from chorusline.actors.lasting import Lasting
from chorusline.actors.messages import RunFailed, RunRequest, RunSucceeded, WorkerSnapshot
from chorusline.actors.parcels.parcel import Parcel
from chorusline.actors.whereabouts import Whereabouts
from chorusline.collectives.diagnosis.debug import get_debug_level

from ..checkpoint.config import CheckpointConfig
from . import connecting
from .holders import telling_who_holds
from .placing import placement
from .placing.placement import Needs
from .placing.seats import PlacedSeats
from .placing.trials import of_this_trial
from .showing.hearing import Audience, hearing
from .showing.starting import Starting
from .state import SessionState
from .waiting import awaited, telling

_BEGINNINGS = 3
"""How often one call of `run` may begin: workers may have died since the last run, and more
workers while those were replaced."""


class Holding:
    """The part of a session that starts, uses and ends actors. In a detached session, its keeper
    does so (detached/keeper.py), and the keeper's `lasting` names them."""

    _fewest: int
    _most: int
    _spares: int
    _max_failures: int | None
    _labels: dict[str, str]
    _environment: dict[str, Any]
    _fault_plan: tuple[Order, ...]
    _use_gpu: bool
    _accelerator_type: str | None
    _pause_s: float
    _replaces_stragglers: bool
    _resources_per_worker: Mapping[str, float] | None
    _placement_strategy: str
    _timeout_s: float
    _startup_timeout_s: float
    _checkpoint: CheckpointConfig | None
    _state: SessionState

    def __init__(self) -> None:
        self._is_local = False  # True: sessions of this process have started the cluster.
        self._seats: PlacedSeats | None = None
        self._crew: Crew | None = None
        self._next_run = 0
        self._seen: tuple[WorkerSnapshot | str, ...] = ()  # the workers' last answers, by seat
        self._lasting: Lasting | None = None  # in a keeper
        self._starting: Starting | None = None  # while the session starts

    async def _start_actors(self) -> None:
        limit = f"gives up after {self._startup_timeout_s:g} s, startup_timeout_s"
        async with telling(self._starting, lambda: awaited(self._crew, self._fewest), limit):
            bundle = placement.bundle_of_worker(
                self._most + self._spares,
                use_gpu=self._use_gpu,
                resources_per_worker=self._resources_per_worker,
                accelerator_type=self._accelerator_type,
                is_local=self._is_local,
            )
            lasting = self._lasting.name if self._lasting is not None else ""
            needs = Needs(bundle, self._placement_strategy, self._labels, lasting)
            wait_s = self._startup_timeout_s
            of_trial = None if lasting else of_this_trial(needs, self._fewest, self._spares)
            async with telling_who_holds(bundle, self._fewest, self, wait_s):
                first = of_trial or await placement.place(
                    needs,
                    self._fewest,
                    self._most,
                    wait_s,
                    may_grow=not self._is_local,
                    goes_on=self._max_failures != 0,
                )
            self._seats = PlacedSeats(first, needs, self._most, self._spares)
            self._crew = self._crew_of(self._seats)
            await self._crew.assemble(self._startup_timeout_s)

    def _crew_of(self, seats: PlacedSeats) -> Crew:
        if (lasting := self._lasting) is not None:
            seats.whenever_changed(lambda: lasting.save("seats", seats.state()))
        return Crew(
            seats,
            self._fewest,
            use_gpu=self._use_gpu,
            driver_options=placement.options_of_driver(),
            environment=self._environment,
            lasting=lasting,
        )

    async def _start_again(self) -> None:
        """In a keeper that was started again: take over what the one before had."""
        assert self._lasting is not None
        self._seats = PlacedSeats.recalled(self._lasting.saved("seats"))
        self._crew = self._crew_of(self._seats)
        await self._crew.find()
        self._state = SessionState.READY

    async def _end_actors(self, was_running: bool) -> None:
        crew, self._crew = self._crew, None
        seats, self._seats = self._seats, None
        is_local, self._is_local = self._is_local, False
        if crew and ray.is_initialized() and await head_stays_gone(HEAD_ANSWER_S):
            crew = seats = None  # Ray's calls would wait for it for a minute, and end this process.
        # End actors, then their resources, then the cluster, even if one of these fails. After a
        # ray.shutdown() of the user there is nothing left to end.
        try:
            if crew is not None and ray.is_initialized():
                if was_running:
                    await crew.cancel(self._next_run - 1, "the session was closed")
                await crew.dismiss()
        finally:
            try:
                if seats is not None and ray.is_initialized():
                    await seats.give_back()
            finally:
                if is_local:
                    connecting.leave()

    async def _ask_workers(self, timeout_s: float) -> tuple[WorkerSnapshot | str, ...]:
        if self._crew is not None:
            self._seen = await self._crew.workers_seen(timeout_s)
        return self._seen

    async def _whereabouts(
        self, timeout_s: float
    ) -> dict[int, tuple[WorkerSnapshot, Whereabouts] | str]:
        return await self._crew.whereabouts(timeout_s) if self._crew is not None else {}

    async def _outcome(
        self, program: Parcel | None, audience: Audience, begun: RunRequest | None = None
    ) -> RunSucceeded | RunFailed:
        """1. Replace the workers that are missing since the last run. 2. Run, and hand on reports
        meanwhile; if the run failed before any worker began, repeat from 1.

        begun: a run that workers are in already, or have ended; without 1."""
        crew = self._crew
        assert crew is not None
        payload = ray.put(program)  # Now: later the caller may change what it has passed.
        for left in reversed(range(_BEGINNINGS)):
            request = begun or self._new_request(audience)
            if begun is None:
                await crew.assemble(self._startup_timeout_s)  # 1.
            try:  # 2.
                async with hearing(crew.listener, request.run, audience):
                    if begun is not None:
                        return await crew.go_on_with(request)
                    outcome = await crew.run(request, payload)
            except DriverLost as lost:
                if lost.nobody_began and left and begun is None:
                    continue
                raise
            # A function that has begun may have had effects: it is not called again here.
            if isinstance(outcome, RunSucceeded) or not (outcome.nobody_began and left):
                return outcome
        raise AssertionError("the last beginning returns or raises")

    async def _kept_outcome(
        self, program: Parcel | None, audience: Audience, begun: RunRequest | None = None
    ) -> RunSucceeded | RunFailed:
        """As `_outcome`, in a keeper, where nobody shows it."""
        self._state = SessionState.RUNNING
        if begun is not None:
            self._next_run = begun.run + 1
        try:
            return await self._outcome(program, audience, begun)
        finally:
            if self._state is SessionState.RUNNING:
                self._state = SessionState.READY

    async def _news_of(self, run: int, timeout_s: float) -> News:
        """What the workers still hold of a run that has ended, and was not pulled yet."""
        return await self._crew.listener.pull(run, timeout_s) if self._crew is not None else News()

    def _new_request(self, audience: Audience) -> RunRequest:
        self._next_run += 1
        request = RunRequest(
            self._next_run - 1,
            self._timeout_s,
            audience.wants_reports,
            get_debug_level(),
            self._fewest,
            self._max_failures,
            self._pause_s,
            last_save_s=self._checkpoint.deadline_s if self._checkpoint is not None else None,
            fault_plan=self._fault_plan,
            report_history=audience.report_history,
            replaces_stragglers=self._replaces_stragglers,
        )
        if self._lasting is not None:
            self._lasting.save("request", request)
        return request
