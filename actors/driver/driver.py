"""The driver actor: carries out what `membership.py` decides.

It hosts the store in which the ranks meet. A store of its own would be one more process, one more
thing that can die, and would save nothing: a rendezvous happens only when the driver forms a
generation, so the driver lives then; and a driver that was started anew needs no old keys, since
numbers of generations never repeat.

It knows nothing that the workers do not: a new driver adopts the workers of the old one by asking
them. A training step sends it no message.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray

from ..actor_store import STORE_CONCURRENCY, ActorStore, StoreActor
from ..calls import Actor, ActorGone, NoAnswer, actor_class, answer, answers
from ..messages import (
    Cancellation,
    DriverSnapshot,
    Frozen,
    RunFailed,
    RunRequest,
    RunSucceeded,
    Stand,
    Survey,
    WorkerState,
)
from ..meter import DriverCounters
from ..versions import difference
from .events import (
    Event,
    GraceEnded,
    LastSaveEnded,
    Leaving,
    PatienceEnded,
    PauseEnded,
    RankEnded,
    RankFinished,
    RankFroze,
    RankSilent,
    RanksTold,
    RunCancelled,
    RunStarted,
    RunTakenOver,
    SeatEmptied,
    WorkerDied,
    WorkerRegistered,
)
from .instructions import (
    AbortRank,
    AskRanks,
    AttachRank,
    DismissRank,
    EndRun,
    Fence,
    FreezeRank,
    Instruction,
    ReleaseRank,
    ResumeRank,
    StartGrace,
    StartLastSave,
    StartPatience,
    StartPause,
    StartRank,
)
from .membership import Membership

GRACE_S = 5.0
"""Seconds that ranks have to stop after they were told to; who still runs then is stuck."""

_TESTIMONY_S = 2.0
"""Seconds for a control loop to answer; who is silent that long is stopped, and told as such."""


@dataclass(frozen=True, slots=True)
class Unfit:
    """A worker that cannot take part: it is gone, silent, or still busy with an earlier run."""

    seat: int
    is_gone: bool
    reason: str


class Driver(StoreActor):
    """One per session; num_cpus=0. Everything here runs on one loop, the store on its own.

    incarnation: how many drivers the session has had before this one.
    """

    def __init__(self, incarnation: int, session: str = "") -> None:
        super().__init__()
        self._incarnation = incarnation
        self._counters = DriverCounters(session)
        self._membership = Membership()
        self._workers: dict[str, Actor] = {}  # by worker id
        self._events: asyncio.Queue[Event] | None = None  # of the run in progress
        self._run: int | None = None
        self._run_is_over = asyncio.Event()
        self._early_cancels: set[int] = set()  # A cancellation may overtake its run.
        self._lost: list[tuple[int, str]] = []  # of the run in progress
        self._has_lost = asyncio.Event()

    async def adopt(
        self, workers: Mapping[int, Actor], timeout_s: float, versions: dict[str, str]
    ) -> tuple[Unfit, ...]:
        """Ask the workers, by seat, who they are, and register those that are idle.

        versions: of the caller, whose functions they are to run.

        The first start, a replacement and a new driver all come this way. Returns the others.
        """
        calls = {seat: worker.snapshot.remote() for seat, worker in workers.items()}
        unfit = []
        for seat, said in (await answers(calls, timeout_s)).items():
            if isinstance(said, ActorGone | NoAnswer):
                unfit.append(Unfit(seat, isinstance(said, ActorGone), said.detail))
            elif said.state is not WorkerState.IDLE:
                unfit.append(Unfit(seat, False, f"is still {said.state.value}"))
            elif told := difference(said.info.versions, versions):
                unfit.append(Unfit(seat, False, told))
            else:
                self._workers[said.info.worker_id] = workers[seat]
                arrival = WorkerRegistered(said.info, said.generation)
                if self._events is not None:
                    self._events.put_nowait(arrival)
                else:
                    self._membership.handle(arrival)
        if self._events is not None:
            return tuple(unfit)
        for one in unfit:
            self._membership.handle(SeatEmptied(one.seat))
        members = {info.worker_id for info, _ in self._membership.snapshot(0).members}
        self._workers = {key: self._workers[key] for key in members}  # Forget the replaced.
        return tuple(unfit)

    async def run(self, request: RunRequest, program: list[Any]) -> RunSucceeded | RunFailed:
        """Run a program on all workers; its end, never a rank's exception.

        program: one reference to the pickled program, in a list so that Ray hands the reference
        on and the driver never holds the bytes.
        """
        started = RunStarted(
            request.run, request.fewest, request.max_failures, request.last_save_s is not None
        )
        return await self._carry_on(request, program, started)

    async def take_over(
        self, request: RunRequest, program: list[Any], workers: Mapping[int, Actor]
    ) -> RunSucceeded | RunFailed | None:
        """See a run to its end that another driver has begun; None if no worker is in it.

        workers: by seat, all of the session. They know where the run is, and they went on.
        """
        calls = {seat: worker.stand.remote(request.run) for seat, worker in workers.items()}
        stands = []
        for seat, said in (await answers(calls, GRACE_S)).items():
            if isinstance(said, Stand):
                stands.append(said)
                self._workers[said.info.worker_id] = workers[seat]
                self._membership.handle(WorkerRegistered(said.info, said.assignment.generation))
        if not stands:
            return None
        taken = RunTakenOver(
            request.run,
            request.fewest,
            request.max_failures,
            tuple(stands),
            request.last_save_s is not None,
        )
        return await self._carry_on(request, program, taken)

    async def _carry_on(
        self, request: RunRequest, program: list[Any], event: Event
    ) -> RunSucceeded | RunFailed:
        begun = self._membership.handle(event)
        self._run, self._events = request.run, asyncio.Queue()
        self._lost = []
        self._run_is_over.clear()
        if request.run in self._early_cancels:
            self._early_cancels.discard(request.run)
            self._events.put_nowait(RunCancelled("it was cancelled before it began"))
        try:
            async with asyncio.TaskGroup() as tasks:
                errands = _Errands(self, request, program[0], self._events, tasks)
                outcome = errands.carry_out(begun)
                while outcome is None:
                    event = await self._events.get()
                    instructions = self._membership.handle(event)
                    self._note_losses(event, instructions)
                    outcome = errands.carry_out(instructions)
                    self._count(event, instructions)
                errands.drop()
            return outcome
        finally:
            self._run, self._events = None, None
            self._run_is_over.set()
            self._has_lost.set()

    def _note_losses(self, event: Event, instructions: list[Instruction]) -> None:
        lost = {one.worker_id for one in instructions if isinstance(one, DismissRank)}
        if isinstance(event, WorkerDied):
            lost.add(event.worker_id)
        if lost:
            members = self._membership.snapshot(0).members
            self._lost += [
                (info.seat, info.worker_id) for info, _ in members if info.worker_id in lost
            ]
            self._has_lost.set()

    def _count(self, event: Event, instructions: list[Instruction]) -> None:
        if isinstance(event, WorkerDied):
            self._counters.add("chorusline_lost_workers")
        if any(isinstance(instruction, ResumeRank) for instruction in instructions):
            self._counters.add("chorusline_recoveries")
        for instruction in instructions:
            outcome = instruction.outcome if isinstance(instruction, EndRun) else None
            if not isinstance(outcome, RunFailed) or outcome.nobody_began:
                continue
            if not isinstance(outcome.cause, Cancellation):
                self._counters.add("chorusline_failed_runs")

    async def cancel(self, run: int, reason: str) -> None:
        """End a run from outside; returns when it is over (GRACE_S at the latest)."""
        if self._run == run and self._events is not None:
            self._events.put_nowait(RunCancelled(reason))
            await self._run_is_over.wait()
        else:
            self._early_cancels.add(run)

    async def lost_workers(self, run: int, known: int) -> list[tuple[int, str]]:
        """Seats and ids of workers that the run in progress has lost, or let go, those known left
        out; suspends while there are none. Empty when the run is over."""
        while self._run == run and len(self._lost) <= known:
            self._has_lost.clear()
            await self._has_lost.wait()
        return self._lost[known:] if self._run == run else []

    async def leaves(self, run: int, who: str, why: str) -> None:
        """A node has been told to go, or a worker; their ranks leave the run first."""
        self._tell(run, Leaving(who, why))

    async def froze(self, run: int, frozen: Frozen) -> None:
        """A rank of the run has frozen itself; `Worker.resume` will tell it how to go on."""
        self._tell(run, RankFroze(frozen))

    async def finished(self, run: int, rank: int, generation: int) -> None:
        """The function has returned on a rank, which waits for `Worker.release`."""
        self._tell(run, RankFinished(rank, generation))

    def _tell(self, run: int, event: Event) -> None:
        if self._run == run and self._events is not None:
            self._events.put_nowait(event)

    async def snapshot(self) -> DriverSnapshot:
        return self._membership.snapshot(self._incarnation)

    async def survey(self, timeout_s: float) -> Survey:
        """Snapshots of the driver and of the workers, for who does not own them."""
        seen = await self.snapshot()
        calls = {
            info.seat: self._workers[info.worker_id].snapshot.remote()
            for info, _ in seen.members
            if info.worker_id in self._workers
        }
        said = await answers(calls, timeout_s)
        words = [said.get(info.seat, "is gone") for info, _ in seen.members]
        return Survey(
            seen,
            tuple(
                word.detail if isinstance(word, ActorGone | NoAnswer) else word for word in words
            ),
        )

    def worker(self, worker_id: str) -> Actor:
        return self._workers[worker_id]

    def knows(self, worker_id: str) -> bool:
        return worker_id in self._workers


class _Errands:
    """Instructions on their way: each is a task of the run's group and ends as an event."""

    def __init__(
        self,
        driver: Driver,
        request: RunRequest,
        program: Any,
        events: asyncio.Queue[Event],
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._driver = driver
        self._request = request
        self._program = program
        self._events = events
        self._group = tasks
        self._tasks: list[asyncio.Task[None]] = []
        self._actor = ray.get_runtime_context().current_actor
        self._store = ActorStore(self._actor)

    def carry_out(self, instructions: list[Instruction]) -> RunSucceeded | RunFailed | None:
        """Send them on their way; the outcome if they say that the run is over."""
        for instruction in instructions:
            match instruction:
                case StartRank(worker_id, assignment):
                    self._start(self._run_rank(instruction), f"rank-{assignment.rank}")
                case AttachRank(worker_id):
                    self._start(self._attach_rank(instruction), f"attach-{worker_id}")
                case AskRanks():
                    self._start(self._ask_ranks(instruction), "ask-ranks")
                case AbortRank(worker_id) | DismissRank(worker_id):
                    self._start(self._abort_rank(instruction), f"abort-{worker_id}")
                case StartGrace():
                    self._start(self._end_grace(), "grace")
                case FreezeRank(worker_id):
                    self._start(self._freeze_rank(instruction), f"freeze-{worker_id}")
                case StartPatience():
                    self._start(self._end_patience(instruction), "patience")
                case StartPause():
                    self._start(self._end_pause(instruction), "pause")
                case StartLastSave():
                    self._start(self._end_last_save(instruction), "last-save")
                case Fence(worker_id):
                    # Its run call ends with that, and says so.
                    ray.kill(self._driver.worker(worker_id))
                case ResumeRank(worker_id):
                    self._start(self._resume_rank(instruction), f"resume-{worker_id}")
                case ReleaseRank(worker_id):
                    self._start(self._release_rank(instruction), f"release-{worker_id}")
                case EndRun(outcome):
                    return outcome
        return None

    def drop(self) -> None:
        """The run is over: nobody waits for stuck ranks any more."""
        for task in self._tasks:
            task.cancel()

    def _start(self, errand: Any, name: str) -> None:
        self._tasks.append(self._group.create_task(errand, name=name))

    async def _run_rank(self, start: StartRank) -> None:
        worker = self._driver.worker(start.worker_id)
        event: Event
        try:
            ending = await answer(
                worker.run.remote(
                    start.assignment,
                    self._request,
                    self._store,
                    self._program,
                    self._actor,
                    start.resumption,
                )
            )
            event = RankEnded(ending, start.worker_id)
        except ActorGone as gone:
            event = WorkerDied(start.worker_id, gone.detail)
        self._events.put_nowait(event)

    async def _attach_rank(self, attach: AttachRank) -> None:
        worker = self._driver.worker(attach.worker_id)
        event: Event
        try:
            ending = await answer(worker.attach.remote(self._request.run, self._actor))
            event = RankEnded(ending, attach.worker_id)
        except ActorGone as gone:
            event = WorkerDied(attach.worker_id, gone.detail)
        self._events.put_nowait(event)

    async def _abort_rank(self, abort: AbortRank | DismissRank) -> None:
        worker = self._driver.worker(abort.worker_id)
        # Whether it died is told by its run call; whether it hangs, by the grace period.
        with contextlib.suppress(ActorGone, NoAnswer):
            await answer(worker.abort.remote(self._request.run, abort.error), GRACE_S)

    async def _freeze_rank(self, freeze: FreezeRank) -> None:
        worker = self._driver.worker(freeze.worker_id)
        try:
            await answer(
                worker.freeze.remote(self._request.run, freeze.generation, freeze.error),
                _TESTIMONY_S if freeze.is_late else self._request.timeout_s,
            )
        except NoAnswer:
            self._events.put_nowait(RankSilent(freeze.worker_id, freeze.generation))
        except ActorGone:
            pass  # Its run call says so.

    async def _end_patience(self, patience: StartPatience) -> None:
        # Who computes finds out at its next collective, which may be a long step away.
        await asyncio.sleep(self._request.timeout_s + _TESTIMONY_S)
        self._events.put_nowait(PatienceEnded(patience.generation))

    async def _end_pause(self, pause: StartPause) -> None:
        await asyncio.sleep(self._request.pause_s)
        self._events.put_nowait(PauseEnded(pause.generation))

    async def _end_last_save(self, saving: StartLastSave) -> None:
        await asyncio.sleep(self._request.last_save_s or 0.0)
        self._events.put_nowait(LastSaveEnded(saving.generation))

    async def _resume_rank(self, resume: ResumeRank) -> None:
        worker = self._driver.worker(resume.worker_id)
        with contextlib.suppress(ActorGone, NoAnswer):  # As in _abort_rank.
            await answer(worker.resume.remote(self._request.run, resume.resumption), GRACE_S)

    async def _release_rank(self, release: ReleaseRank) -> None:
        worker = self._driver.worker(release.worker_id)
        with contextlib.suppress(ActorGone, NoAnswer):
            await answer(worker.release.remote(self._request.run), GRACE_S)

    async def _ask_ranks(self, ask: AskRanks) -> None:
        # A worker that died with the driver before this one is nobody that could be asked.
        calls = {
            rank: self._driver.worker(worker_id).testify.remote()
            for rank, worker_id in enumerate(ask.worker_ids)
            if self._driver.knows(worker_id)
        }
        said = await answers(calls, _TESTIMONY_S)
        told = {
            rank: word.detail if isinstance(word, ActorGone | NoAnswer) else word
            for rank, word in said.items()
        }
        self._events.put_nowait(RanksTold(told))

    async def _end_grace(self) -> None:
        await asyncio.sleep(GRACE_S)
        self._events.put_nowait(GraceEnded())


def driver_class() -> Any:
    """The Ray class of Driver. The session starts a new one itself when it is needed."""
    return actor_class(Driver, concurrency_groups=STORE_CONCURRENCY, num_cpus=0)
