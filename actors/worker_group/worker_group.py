"""The actors of one session, as the process that owns them sees them.

The session's process creates the driver and the workers, so none of them dies with another. Seats
are numbered. When the next run needs them (`assemble`), a worker that died or hangs is replaced in
its seat, and a driver that died by its next incarnation.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import ray

from chorusline.collectives.contract.errors import GroupAborted

from ..driver.driver import GRACE_S, Unfit, driver_class
from ..errors import DriverLost, HeadLost, StartupError
from ..forking.command import forked
from ..messages.messages import DriverSnapshot, RunFailed, RunRequest, RunSucceeded, WorkerSnapshot
from ..messages.whereabouts import Whereabouts
from ..ray_calls.calls import (
    HEAD_ANSWER_S,
    HEAD_S,
    Actor,
    ActorGone,
    NoAnswer,
    answer,
    answers,
    answers_or_why,
    head_stays_gone,
    until_head_is_gone,
)
from ..ray_calls.detached_actors import INCARNATION, NAMESPACE, OF_PROGRAM, DetachedActors
from ..ray_calls.versions import versions_here
from ..worker.devices import environment_of_workers
from ..worker.worker import LOADED_LATE, Worker, worker_class
from .news import Listener
from .recruiting import Recruiter
from .retry import beside, persist
from .seats import Seats
from .spare_workers import SpareWorkers

STEP_S = 2.0
"""Seconds that a run which is to stop has for the step in progress, before it is aborted in it."""

_DRIVERS_IN_A_ROW = 6
"""A run that kills its drivers has to end; but one that took the run over, and lived for a while,
did not die of that."""

_PROVEN_S = 5.0

_DRIVER_START_S = 30.0

CLOSED = "the session was closed"
_IF_SLOW = ". If nodes are only slow to start processes, raise startup_timeout_s"
_LOOK_S = 0.5
_LOOK_AFTER_S = 2.0

_ANSWER_S = 5.0
"""Seconds in which a live control loop answers, on a machine that is busy with training."""


class _DriverGone(StartupError):
    """The driver died while it met the workers; another one can do that."""


class Stop(enum.Enum):
    """How a run was stopped whose caller was cancelled."""

    AFTER_STEP = "after a step"
    """Between the same two steps on all ranks."""

    IN_STEP = "in a step"
    """It was aborted: no rank had ended its step within STEP_S."""

    WITHOUT_STEPS = "without steps"
    """It was aborted at once: no rank takes steps."""

    AT_ONCE = "at once"
    """It was aborted at once: it had not begun, or its caller was cancelled once more."""

    OVER = "over"
    """It was not: it had ended before."""


class WorkerGroup:
    """The driver and the workers. `assemble` comes before each run, `dismiss` once, at the end.

    fewest: the smallest number of workers with which a run begins.
    driver_options: Ray's actor options of the driver, which say where it is to run. If there is no
        such node, or it takes no actors because it is drained, the driver runs anywhere.
    environment: Ray's runtime environment of all actors.
    modules: what a worker loads until its first step, if it is forked; none where this process
        has not started its node.
    detached: of a detached session, whose actors outlive the process that starts them.
    """

    def __init__(
        self,
        seats: Seats,
        fewest: int,
        *,
        use_gpu: bool,
        driver_options: Mapping[str, Any],
        environment: Mapping[str, Any],
        modules: Sequence[str],
        detached: DetachedActors | None,
    ) -> None:
        self._seats = seats
        self._fewest = fewest
        self._detached = detached
        self.name = detached.name if detached else f"{OF_PROGRAM}{uuid.uuid4().hex[:8]}"
        self._use_gpu = use_gpu
        self._modules = modules
        self._driver_options = driver_options
        # Only if there is one: Ray starts processes for an environment of their own.
        self._environment = {"runtime_env": dict(environment)} if environment else {}
        of_workers = environment_of_workers(environment, use_gpu)
        self._workers_environment = {"runtime_env": of_workers} if of_workers else {}
        self._worker_class = worker_class()
        self._workers: dict[int, Actor] = {}  # by seat
        self._starting: set[int] = set()
        """Seats whose workers have not answered yet: a run may end while some are starting."""
        self._spares = SpareWorkers(seats, lambda seat: self._made(seat, is_spare=True))
        self.listener = Listener(self._workers, self._starting)
        """Hears what the workers report and print."""
        self._driver: Actor | None = None  # None: before the start, and after the end
        self._incarnation = -1
        self.is_assembled = False
        """Whether the last run left all actors as they were, so that the next one just begins."""
        self._was_assembled = False  # Ever.
        self.last_stop = Stop.AT_ONCE
        """Of the run whose caller was cancelled last."""
        self._is_dismissed = False

    @property
    def num_workers(self) -> int:
        return len(self._workers)

    @property
    def num_spares(self) -> int:
        """The number of workers that have started, and wait for a seat."""
        return self._spares.num_ready

    async def assemble(self, timeout_s: float) -> None:
        """See that there is a driver, and that every seat with room has an idle worker known to it.

        1. Start a driver, if there is none.
        2. Have it ask the workers that are there, and kill those that are gone, hang, or are busy.
        3. Fill the empty seats: with spare workers, then with workers that start where there is
           room; they have `timeout_s` to answer.

        A driver that dies meanwhile is replaced by another. While all is well nothing is asked, so
        that a run costs no questions. Raises StartupError; GroupAborted after `dismiss`.
        """
        self.last_stop = Stop.AT_ONCE
        for left in reversed(range(_DRIVERS_IN_A_ROW)):
            try:
                await self._assemble(timeout_s)
                break
            except _DriverGone:
                if not left:
                    raise

    async def _assemble(self, timeout_s: float) -> None:
        # The last run left all as it was: a run in a notebook begins without a question.
        if self.is_assembled and self._seats.has_all:
            return
        # Before any worker is asked for, although they could start beside it: where a node runs low
        # on memory, Ray ends the youngest actor first, and that has to be a worker.
        if self._driver is None:
            await self._start_driver(timeout_s)
        # Before empty seats are counted: it empties those of workers that are gone or hang.
        if self._workers and not self.is_assembled:
            await self._sort_out(timeout_s)
        self.is_assembled = False  # Until the driver knows those that come now.
        fresh = {}
        # Before there is room for these seats: their nodes may be gone, and a spare worker has one.
        for seat in range(self._seats.most):
            if seat not in self._workers and (spare := await self._take_spare(seat)) is not None:
                fresh[seat] = spare
        fresh |= {seat: self._start_worker(seat) for seat in await self._empty_seats(timeout_s)}
        if fresh:
            async with self._looking_after_seats():
                failed = await self._adopt(fresh, timeout_s)
            self._starting.clear()
            for unfit in failed:
                self._kill_worker(unfit.seat)
            # Between two runs a node may go under a worker that starts; the others can do.
            # At the first start too few means that the session does not fit, which a person has to
            # hear.
            can_do = self._was_assembled and len(self._workers) >= self._fewest
            if failed and not (can_do and all(unfit.is_gone for unfit in failed)):
                why = "; ".join(f"seat {unfit.seat} {unfit.reason}" for unfit in failed)
                raise StartupError(
                    f"{len(failed)} of {len(self._workers) + len(failed)} workers did not start",
                    f"{why}{_IF_SLOW}",
                )
        self.is_assembled = self._was_assembled = True

    @contextlib.asynccontextmanager
    async def _looking_after_seats(self) -> AsyncIterator[None]:
        """While the body runs, give up the places of nodes that die: the session would wait
        forever for a worker that is to start on one, and Ray would place nothing else meanwhile
        (seats)."""

        async def look() -> bool:
            while True:
                await asyncio.sleep(_LOOK_AFTER_S)
                placed = await asyncio.to_thread(self._seats.placed)
                for seat in self._starting.difference(placed):
                    # Ray may leave a worker pending whose node died as it was asked for (2.60).
                    ray.kill(self._workers[seat])

        async with beside(persist(look, "dead nodes are not noticed"), "seats"):
            yield

    async def _sort_out(self, timeout_s: float) -> None:
        """Kill the workers that cannot take part. Those that are starting have longer to answer."""
        placed = await asyncio.to_thread(self._seats.placed)
        for seat in self._starting.difference(placed):
            self._kill_worker(seat)  # Its start waits for a node that is gone.
        starting = {seat: self._workers[seat] for seat in self._starting}
        known = {seat: self._workers[seat] for seat in self._workers.keys() - self._starting}
        # A worker that still imports torch answers nothing; one that has answered before does at
        # once.
        for some, patience_s in ((known, _ANSWER_S), (starting, timeout_s)):
            for unfit in await self._adopt(some, patience_s) if some else ():
                self._kill_worker(unfit.seat)
        self._starting.clear()

    async def _empty_seats(self, timeout_s: float) -> list[int]:
        """Seats without a worker that there is room for. Waits until the fewest can be had."""
        give_up_at = time.monotonic() + timeout_s
        while True:
            self._check_not_dismissed()
            empty = await asyncio.to_thread(self._seats.vacant, set(self._workers))
            num_workers = len(self._workers) + len(empty)
            # The run begins with those; the others come when there is room (Recruiter).
            if num_workers >= self._fewest:
                return empty
            if time.monotonic() > give_up_at:
                raise StartupError(
                    f"there is room for {num_workers} workers, and {self._fewest} are the fewest",
                    "nodes were lost or drained, and none was added within "
                    f"{timeout_s:g} s. Add nodes, raise startup_timeout_s if they are still "
                    "starting, or ask for fewer with num_workers=(fewest, most)",
                )
            await asyncio.sleep(_LOOK_S)

    async def _start_driver(self, timeout_s: float) -> Actor:
        try:
            try:
                return await self._try_to_start_driver(self._driver_options, timeout_s)
            except ActorGone as gone:
                # It has had a place, and died there: another place would not help.
                if not gone.had_no_place:
                    raise
                return await self._try_to_start_driver({}, timeout_s)
        except (ActorGone, NoAnswer) as error:
            why = error.detail + (_IF_SLOW if isinstance(error, NoAnswer) else "")
            raise StartupError("the driver actor did not start", why) from None

    async def _try_to_start_driver(self, place: Mapping[str, Any], timeout_s: float) -> Actor:
        self._check_not_dismissed()
        self._incarnation += 1
        # Other processes find the session by this name, which dies with the actor.
        name = {"name": f"{self.name}{INCARNATION}{self._incarnation}", "namespace": NAMESPACE}
        if self._detached:
            name = self._detached.options_of_driver(self._incarnation)
        made = driver_class().options(**name, **place, **self._environment)
        driver = made.remote(self._incarnation, self.name, self._detached is not None)
        self._driver = driver
        try:
            await answer(driver.snapshot.remote(), timeout_s)
        except (ActorGone, NoAnswer):
            self._kill_driver()
            raise
        return driver

    async def find(self) -> None:
        """Take over the living workers of a detached session whose host has died. Its driver is
        ended, since what it knows was for that host; the workers continue."""
        assert self._detached is not None
        drivers = await asyncio.to_thread(self._detached.drivers)
        for driver in drivers.values():
            ray.kill(driver)
        self._incarnation = max(drivers, default=self._incarnation)
        workers = dict(enumerate(await asyncio.to_thread(self._detached.workers)))
        calls = {number: worker.snapshot.remote() for number, (_, worker) in workers.items()}
        for number, reply in sorted((await answers(calls, _ANSWER_S)).items()):
            seat, worker = workers[number]
            if isinstance(reply, WorkerSnapshot):
                seat = reply.info.seat  # A spare worker may sit elsewhere than it began.
            if (
                isinstance(reply, ActorGone)
                or seat in self._seats.spare_seats
                or seat in self._workers
            ):
                ray.kill(worker)
                continue
            self._workers[seat] = worker
            # It may still be starting; the next assembly gives it the time for that.
            if isinstance(reply, NoAnswer):
                self._starting.add(seat)
        self._was_assembled = True

    async def resume_run(self, request: RunRequest) -> RunSucceeded | RunFailed:
        """As `run`, with a run that the workers found (`find`) may be in, or have ended."""
        program = None
        for worker in [*self._workers.values()]:
            payload = worker.program_of.remote(request.run)
            with contextlib.suppress(ActorGone, NoAnswer):
                # A worker whose run is over has dropped the program.
                if await answer(payload, _ANSWER_S) is not None:
                    program = payload
                    break
        return await self.run(request, program or ray.put(None), has_begun=True)

    async def run(
        self, request: RunRequest, payload: Any, *, has_begun: bool = False
    ) -> RunSucceeded | RunFailed:
        """Have the driver run a program. Returns how the run has ended.

        payload: a reference to the program's Parcel.
        has_begun: under a driver that is gone.

        If the driver dies, the ranks continue, and a new driver takes the run over. If this call is
        cancelled, it ends the run on all ranks first.
        """
        driver: Actor | None = None if has_begun else self._living_driver()
        self.is_assembled = False  # Until the run has ended well.
        program = [payload]
        call = driver.run.remote(request, program) if driver is not None else None
        began_with = dict(self._workers)
        has_taken_over = False
        num_failed = 0
        began_at = time.monotonic()
        try:
            while True:
                try:
                    if driver is None:
                        driver = await self._start_driver(_DRIVER_START_S)
                        began_at = time.monotonic()
                        # One that starts answers nothing while it imports torch, for seconds in
                        # which another loss may meet this one.
                        workers = {
                            s: w for s, w in self._workers.items() if s not in self._starting
                        }
                        call = driver.take_over.remote(request, program, workers)
                        has_taken_over = True
                    async with self._recruiting(driver, request, program[0], has_taken_over):
                        outcome = await self._outcome(call)
                    break
                except (ActorGone, StartupError):
                    self._kill_driver()
                    driver = call = None
                    has_lived = time.monotonic() - began_at > _PROVEN_S
                    num_failed = 1 if has_lived else num_failed + 1
                    # It is the run, or the place, that kills drivers: another one would die as
                    # well.
                    if num_failed == _DRIVERS_IN_A_ROW:
                        raise
        except asyncio.CancelledError:
            asking = asyncio.create_task(head_stays_gone(HEAD_ANSWER_S), name="head")
            with contextlib.suppress(asyncio.CancelledError):  # Once more: the ranks still run.
                await asyncio.shield(asking)
            if await asking:
                raise  # Ray's calls would only keep the caller waiting.
            if call is None:  # No driver has taken the run over yet.
                await self._stop_workers("the caller of run() was cancelled")
            elif not await self._stopped_after_step(request.run, call):
                await self.cancel(request.run, "the caller of run() was cancelled")
                with contextlib.suppress(ActorGone, NoAnswer):
                    await answer(call, _ANSWER_S)  # The cancellation may have overtaken the call.
            raise
        except ActorGone as gone:
            incarnation = self._incarnation
            self._kill_driver()
            await self._stop_workers("the driver actor died")
            raise DriverLost(incarnation, gone.detail) from None
        except Exception:
            # An error in the driver itself: what it knows cannot be trusted, the workers can.
            self._kill_driver()
            await self._stop_workers("the driver actor failed")
            raise
        if outcome is None:
            raise await self._nobody_is_in(began_with)
        self.is_assembled = self._leaves_all(outcome)
        self.last_stop = Stop.OVER
        return outcome

    async def _outcome(self, call: Any) -> RunSucceeded | RunFailed | None:
        """What the driver returns. Raises HeadLost if the cluster's head is gone for HEAD_S: Ray
        would wait forever."""
        watch = asyncio.create_task(until_head_is_gone(), name="head-watch")
        outcome = asyncio.ensure_future(answer(call))
        try:
            await asyncio.wait((watch, outcome), return_when=asyncio.FIRST_COMPLETED)
            if outcome.done():
                return outcome.result()  # type: ignore[no-any-return]
        finally:
            watch.cancel()
            outcome.cancel()
        raise HeadLost(self._incarnation, f"it has accepted no connections for {HEAD_S:g} s")

    async def _nobody_is_in(self, began_with: Mapping[int, Actor]) -> DriverLost:
        """The error of a run that a driver died in, and that no worker is in which lives."""
        self._kill_driver()
        await self._stop_workers("the driver actor died")  # A call of it may be on its way.
        calls = {seat: worker.snapshot.remote() for seat, worker in began_with.items()}
        replies = (await answers(calls, _ANSWER_S)).values()
        if any(isinstance(one, WorkerSnapshot) for one in replies):
            # Functions are called when all ranks have met, and this worker knows of no run. One
            # that does not answer may know of it.
            early = "it died before any worker had received the run"
            return DriverLost(self._incarnation - 1, early, nobody_began=True)
        return DriverLost(
            self._incarnation - 1,
            f"it died, and none of {len(began_with)} workers answers: no process is left that "
            "knows how far the run was, so it is not started again. With checkpoint= the next "
            "run resumes from the last checkpoint",
        )

    async def _stopped_after_step(self, run: int, call: Any) -> bool:
        """Ask the ranks to stop at the end of their step. Returns whether that has ended the run.

        It has not if no rank takes steps, or if the caller is cancelled once more.
        """
        asked = {seat: worker.stop_after_step.remote(run) for seat, worker in self._workers.items()}
        try:
            replies = (await answers(asked, _ANSWER_S)).values()
            if not any(reply is True for reply in replies):
                if all(reply is False for reply in replies):
                    self.last_stop = Stop.WITHOUT_STEPS
                return False
            outcome = await answer(call, STEP_S)
        except NoAnswer:
            self.last_stop = Stop.IN_STEP
            return False
        except (ActorGone, asyncio.CancelledError):
            return False
        if isinstance(outcome, RunSucceeded):
            self.last_stop = Stop.AFTER_STEP
        self.is_assembled = self._leaves_all(outcome)
        return True

    def _leaves_all(self, outcome: object) -> bool:
        """Whether a run with this outcome has left all workers in their seats."""
        if not isinstance(outcome, RunSucceeded) or not outcome.leaves_all_idle:
            return False
        return len(outcome.results) == self.num_workers and not self._starting

    @contextlib.asynccontextmanager
    async def _recruiting(
        self, driver: Actor, request: RunRequest, payload: Any, has_taken_over: bool
    ) -> AsyncIterator[None]:
        """While the body runs, start spare workers, and new ones, if the run can admit them."""
        async with self._spares.kept(payload):
            # A loss ends such a run, so that a new worker would have nothing to join; a spare
            # worker takes the seat in the next run (`_assemble`).
            if not request.survives_loss:
                yield
                return
            recruiter = Recruiter(
                driver,
                request,
                self._seats,
                self._workers,
                self._start_worker,
                self._spares,
                self._take_spare,
                self._starting,
                payload,
                self.listener,
            )
            async with recruiter.at_work(has_taken_over=has_taken_over):
                yield

    async def cancel(self, run: int, reason: str) -> None:
        """End a run; returns when its ranks have stopped, or their time to stop is over."""
        self.is_assembled = False
        if self._driver is not None:
            with contextlib.suppress(ActorGone, NoAnswer):
                await answer(self._driver.cancel.remote(run, reason), GRACE_S + _ANSWER_S)
                return
            self._kill_driver()
        await self._stop_workers(reason)

    async def dismiss(self) -> None:
        """End everything: close the groups, kill the actors, and wait until they are dead."""
        self.is_assembled, self._is_dismissed = False, True
        try:
            await self._stop_workers(CLOSED)
        finally:
            # Even if a worker did not stop in time, or this was cancelled: no actor outlives its
            # session.
            workers, driver = dict(self._workers), self._driver
            # Below the seats, and below the driver's -1.
            workers |= {-2 - n: worker for n, worker in enumerate(self._spares.leave())}
            for worker in workers.values():
                ray.kill(worker)
            if driver is not None:
                ray.kill(driver)
            self._workers.clear()
            self._starting.clear()
            self._driver = None
        # A call to a dead actor raises: when all have raised, their resources are free.
        dying = {seat: worker.snapshot.remote() for seat, worker in workers.items()}
        if driver is not None:
            dying[-1] = driver.snapshot.remote()
        await answers(dying, _ANSWER_S)

    async def _adopt(self, workers: Mapping[int, Actor], timeout_s: float) -> tuple[Unfit, ...]:
        call = self._living_driver().adopt.remote(dict(workers), timeout_s, versions_here())
        try:
            return await answer(call, timeout_s + _ANSWER_S)  # type: ignore[no-any-return]
        except (ActorGone, NoAnswer) as error:
            self._kill_driver()
            raise _DriverGone(
                "the driver actor was lost while it connected to the workers", error.detail
            ) from None

    async def _stop_workers(self, reason: str) -> None:
        calls = {seat: worker.stop.remote(reason) for seat, worker in self._workers.items()}
        await answers(calls, _ANSWER_S)

    def _living_driver(self) -> Actor:
        self._check_not_dismissed()
        if self._driver is None:
            raise DriverLost(self._incarnation, "it was found dead before")
        return self._driver

    def _start_worker(self, seat: int) -> Actor:
        """Start a new worker in a seat, in the place of the one that was there."""
        if seat in self._workers:
            self._kill_worker(seat)
        worker = self._workers[seat] = self._made(seat)
        self._starting.add(seat)
        return worker

    def _check_not_dismissed(self) -> None:
        """Before anything is started: nobody would end it."""
        if self._is_dismissed:
            raise GroupAborted(0, [], CLOSED)

    def _made(self, seat: int, is_spare: bool = False) -> Actor:
        self._check_not_dismissed()
        options = {**self._seats.options(seat), **self._workers_environment}
        # The first ones import at the same time, in processes that Ray may have waiting for them.
        if self._was_assembled and self._modules and self._seats.is_here(seat):
            plain, num_cpus = options.get("runtime_env", {}), options.get("num_cpus", 0)
            modules = (LOADED_LATE, Worker.__module__, *self._modules)
            options["runtime_env"] = forked(plain, num_cpus, modules)
        if self._detached:
            options |= self._detached.options_of_worker(seat, uuid.uuid4().hex[:8])
        made = self._worker_class.options(**options)
        return made.remote(seat, self._use_gpu, self.name, self._detached is not None, is_spare)

    async def _take_spare(self, seat: int) -> Actor | None:
        """Seat a spare worker in the place of the one that was there; None if there is
        none."""
        worker = await self._spares.take(seat)
        if worker is not None:
            if seat in self._workers:
                self._kill_worker(seat)
            self._workers[seat] = worker
        return worker

    def _kill_worker(self, seat: int) -> None:
        ray.kill(self._workers.pop(seat))
        self._starting.discard(seat)
        self.is_assembled = False

    def _kill_driver(self) -> None:
        driver, self._driver = self._driver, None
        self.is_assembled = False
        if driver is not None:
            ray.kill(driver)

    # ── What the driver and the workers say of themselves. Silent actors delay it by `timeout_s`. ─

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
        replies = await answers_or_why(calls, timeout_s)
        return tuple(replies[seat] for seat in sorted(replies))

    async def whereabouts(
        self, timeout_s: float
    ) -> dict[int, tuple[WorkerSnapshot, Whereabouts] | str]:
        """The snapshot of each worker, and what it has done last; by seat."""
        workers = sorted(self._workers.items())
        calls = {(seat, 0): worker.snapshot.remote() for seat, worker in workers}
        calls |= {(seat, 1): worker.whereabouts.remote() for seat, worker in workers}
        replies: dict[tuple[int, int], Any] = await answers_or_why(calls, timeout_s)
        seen: dict[int, tuple[WorkerSnapshot, Whereabouts] | str] = {}
        for seat, _ in workers:
            who, what = replies[seat, 0], replies[seat, 1]
            # Its loop may answer, and what it holds could not be read in time.
            why = next((one for one in (who, what) if isinstance(one, str)), "")
            seen[seat] = why or (who, what)
        return seen
