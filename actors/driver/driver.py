"""The driver actor: it carries out what `membership.py` decides.

It hosts the store in which the ranks meet. A store of its own would be one more process, one more
thing that can die, and would save nothing: a rendezvous happens only when the driver forms a
generation, so the driver lives then; and a driver that was started again needs no old keys, since
numbers of generations never repeat.

The driver knows nothing that the workers do not know: a new driver adopts the workers of the old
one by asking them. A training step sends it no message.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Coroutine, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import ray

from chorusline.collectives.contract.endpoint import Endpoint
from chorusline.collectives.stores.signed_store import new_secret

from ..messages import messages
from ..messages.admission import GivenReplayLog, Readiness, ReadyToken
from ..messages.messages import RunFailed, RunRequest, RunSucceeded
from ..ray_calls.actor_store import STORE_CONCURRENCY, ActorStore, StoreActor
from ..ray_calls.calls import (
    FOR_MEMORY,
    KILLED,
    Actor,
    ActorGone,
    NoAnswer,
    actor_class,
    answer,
    answers,
    answers_or_why,
    end_with_parent,
    first_answer,
)
from ..ray_calls.detached_actors import end_without
from ..ray_calls.versions import difference
from ..reporting.metrics import DriverCounters
from . import events, instructions
from .arrivals import DryRun
from .departures import MAX_ATTEMPTS
from .events import Event
from .instructions import Instruction
from .membership import Membership

GRACE_S = 5.0
"""Seconds that ranks have to stop after they were told to; a rank that still runs then is stuck."""

SAVING_S = 600.0
"""Seconds that they have at most if one of them writes down what it holds (RunStatus.is_saving)."""

_ANSWER_S, _STEP_S = 2.0, 1.0
"""Seconds for a control loop to answer; one that is silent for longer counts as stopped. And for a
rank to come to its next step."""

_IDLE_WATCH_S = 1.0
"""Seconds between two looks whether workers without a rank still live."""

_KERNEL_ANSWER_S = 0.2
"""Seconds that the others may have to wait for what the kernel says of a death."""

_AGAIN_S, _AGAIN_AT_MOST_S = 0.5, 10.0
"""Seconds between two questions whether ranks are ready for a newcomer: at first, and at most. It
doubles."""


@dataclass(frozen=True, slots=True)
class Unfit:
    """A worker that cannot take part: it is gone, silent, or still busy. will_be_idle: it has no
    rank, or is about to have none."""

    seat: int
    is_gone: bool
    reason: str
    will_be_idle: bool = False


class Driver(StoreActor):
    """One per session; num_cpus=0. Everything here runs on one loop, the store on its own.

    incarnation: how many drivers the session has had before this one.
    is_detached: the session has a session host, without which this actor ends.
    """

    def __init__(self, incarnation: int, session: str = "", is_detached: bool = False) -> None:
        super().__init__()
        self._incarnation = incarnation
        self._session = session
        end_with_parent()
        if is_detached:
            end_without(session)
        self._counters = DriverCounters(session)
        self._membership = Membership()
        self._workers: dict[str, Actor] = {}  # by worker id
        self._events: asyncio.Queue[Event] | None = None  # None: between two runs
        self._run: int | None = None  # None: between two runs
        self._over = -1  # the last run that has ended
        self._run_is_over = asyncio.Event()
        self._early_cancels: set[int] = set()  # A cancellation may overtake its run.
        self._lost: list[tuple[int, str]] = []  # of the run in progress: seats and worker ids
        self._has_lost = asyncio.Event()
        self._counted: set[str] = set()  # ids of workers that count as lost by the run in progress
        self._paused_at = 0.0  # time.monotonic(); 0.0 while no run is paused
        self._has_turned = asyncio.Event()  # A pause may have begun, changed or ended.
        self._request: RunRequest | None = None  # None: between two runs
        self._num_ready = 0  # spare workers
        self._holds: Counter[str] = Counter()  # of ranks that leave, by the notice's node or worker

    def __repr__(self) -> str:
        """As Ray's dashboard and logs name this actor."""
        return f"driver of {self._session or 'a session'}"

    async def adopt(
        self, workers: Mapping[int, Actor], timeout_s: float, versions: dict[str, str]
    ) -> tuple[Unfit, ...]:
        """Ask workers who they are, and register those that are idle; return the others.

        The first start, a replacement and a new driver all come this way.

        workers: by seat.
        versions: of the caller, whose functions the workers are to run.
        """
        # All at once, so that one that hangs costs the others nothing.
        calls = {seat: worker.snapshot.remote() for seat, worker in workers.items()}
        ending = messages.WorkerState.DRY_RUN, messages.WorkerState.STOPPING
        unfit = []
        for seat, reply in (await answers(calls, timeout_s)).items():
            if isinstance(reply, ActorGone | NoAnswer):
                unfit.append(Unfit(seat, isinstance(reply, ActorGone), reply.detail))
            # It would refuse the call of a run while another one is in it.
            elif reply.state is not messages.WorkerState.IDLE:
                busy = f"is still {reply.state.value}"
                unfit.append(Unfit(seat, False, busy, reply.state in ending))
            # A function pickled here may mean something else, or nothing, to other versions there.
            elif unlike := difference(reply.info.versions, versions):
                unfit.append(Unfit(seat, False, unlike))
            else:
                self._workers[reply.info.worker_id] = workers[seat]
                arrival = events.WorkerRegistered(reply.info, reply.generation)
                # In a run it is an event, in order with all others; between two runs there is no
                # queue.
                if self._events is not None:
                    self._events.put_nowait(arrival)
                else:
                    self._membership.handle(arrival)
        # In a run the session empties a seat by the death of its worker, which is an event.
        if self._events is not None:
            return tuple(unfit)
        for one in unfit:
            self._membership.handle(events.SeatEmptied(one.seat))
        members = {info.worker_id for info, _ in self._membership.snapshot(0).members}
        self._workers = {key: self._workers[key] for key in members}  # Forget the replaced.
        return tuple(unfit)

    async def run(self, request: RunRequest, program: list[Any]) -> RunSucceeded | RunFailed:
        """Run a program on all workers. Returns how the run has ended; never raises a rank's
        exception.

        program: one reference to the program's Parcel, in a list so that Ray hands the reference
        on and the driver never holds the bytes.
        """
        return await self._carry_on(request, program, events.RunStarted(request))

    async def take_over(
        self, request: RunRequest, program: list[Any], workers: Mapping[int, Actor]
    ) -> RunSucceeded | RunFailed | None:
        """See a run to its end that another driver has begun; None if no worker is in it.

        workers: by seat, all that may be in it. They know where the run is, and they continued.
        """
        calls = {seat: worker.place_in_run.remote(request.run) for seat, worker in workers.items()}
        places, silent = [], []
        for seat, reply in (await answers(calls, GRACE_S)).items():
            if isinstance(reply, messages.PlaceInRun):
                places.append(reply)
                self._workers[reply.info.worker_id] = workers[seat]
                arrival = events.WorkerRegistered(reply.info, reply.assignment.generation)
                self._membership.handle(arrival)
            # In the run it counts as lost, as one that is dead. If it is only stopped, nobody would
            # ever answer it when it continues, and it would keep its seat.
            elif isinstance(reply, NoAnswer):
                ray.kill(workers[seat])
                silent.append((seat, str(workers[seat]._actor_id.hex())))
        # The run has begun on no worker, or all that knew of it are gone
        # (WorkerGroup._nobody_is_in).
        if not places:
            return None
        taken = events.RunTakenOver(request, tuple(places))
        # A rank that the previous driver has put into the generation meets those that are told now.
        return await self._carry_on(request, program, taken, silent, places[0].secret)

    async def _carry_on(
        self,
        request: RunRequest,
        program: list[Any],
        event: Event,
        lost: Iterable[tuple[int, str]] = (),
        secret: bytes | None = None,
    ) -> RunSucceeded | RunFailed:
        begun = self._membership.handle(event)
        self._run, self._events, self._request = request.run, asyncio.Queue(), request
        self._lost = list(lost)
        self._has_lost.set()
        self._counted.clear()
        self._holds.clear()
        self._run_is_over.clear()
        if request.run in self._early_cancels:
            # The run begins and is ended by its first event, so that its ending is told as any
            # other.
            self._early_cancels.discard(request.run)
            self._events.put_nowait(events.RunCancelled("it was cancelled before it began"))
        try:
            async with asyncio.TaskGroup() as tasks:
                in_flight = _InstructionTasks(
                    self, request, program[0], self._events, tasks, secret or new_secret()
                )
                in_flight.watch_idle()
                outcome = in_flight.carry_out(begun)
                self._note_pause()
                while outcome is None:
                    event = await self._events.get()
                    todo = self._membership.handle(event)
                    self._note_losses(event, todo)
                    outcome = in_flight.carry_out(todo)
                    self._note_pause()
                    self._count(event, todo)
                in_flight.drop()
            return outcome
        finally:
            self._run, self._events, self._over = None, None, request.run
            self._request, self._paused_at = None, 0.0
            # Questions that wait for news of this run are answered: there will be none.
            self._run_is_over.set()
            self._has_turned.set()
            self._has_lost.set()

    def _note_losses(self, event: Event, todo: list[Instruction]) -> None:
        # A dismissed worker lives, but its seat is free for another one.
        lost = {one.worker_id for one in todo if isinstance(one, instructions.DismissRank)}
        if isinstance(event, events.WorkerDied):
            lost.add(event.worker_id)
        self._note_lost(lost)

    def _note_lost(self, worker_ids: Iterable[str]) -> None:
        """Have the seats of these workers filled, once for each."""
        lost = set(worker_ids) - {worker_id for _, worker_id in self._lost}
        if lost:
            members = self._membership.snapshot(0).members
            self._lost += [
                (info.seat, info.worker_id) for info, _ in members if info.worker_id in lost
            ]
            self._has_lost.set()

    def _note_pause(self) -> None:
        is_paused = self._membership.missing > 0
        self._paused_at = (self._paused_at or time.monotonic()) if is_paused else 0.0
        self._has_turned.set()

    def _pause(self) -> messages.RunPause | None:
        # Between two runs too the session asks, and a run that is not paused has nothing to say.
        if self._request is None or not self._paused_at:
            return None
        waited_s = time.monotonic() - self._paused_at
        return messages.RunPause(
            self._membership.missing, self._request.fewest, waited_s, self._request.pause_s
        )

    def _count(self, event: Event, todo: list[Instruction]) -> None:
        # A rank may have seen a death, and the run may end before Ray reports it.
        lost = set(self._membership.lost)
        if isinstance(event, events.WorkerDied):
            lost.add(event.worker_id)  # It may have had no rank, or the run is over by it.
        for _ in lost - self._counted:
            self._counters.add("chorusline_lost_workers")
        self._counted |= lost
        if any(isinstance(one, instructions.ResumeRank) for one in todo):
            self._counters.add("chorusline_recoveries")
        for one in todo:
            outcome = one.outcome if isinstance(one, instructions.EndRun) else None
            # A run that no rank has begun is begun again by the session.
            if not isinstance(outcome, RunFailed) or outcome.nobody_began:
                continue
            if not isinstance(outcome.cause, messages.Cancellation):
                self._counters.add("chorusline_failed_runs")

    async def cancel(self, run: int, reason: str) -> None:
        """End a run from outside; returns when it is over (GRACE_S at the latest)."""
        # Another run may be in progress: the one that is meant has not come, or is over already.
        if self._run == run and self._events is not None:
            self._events.put_nowait(events.RunCancelled(reason))
            await self._run_is_over.wait()
        else:
            self._early_cancels.add(run)

    async def lost_workers(self, run: int, known: int) -> list[tuple[int, str]]:
        """Seats and ids of workers that the run in progress has lost or dismissed, without the
        first `known` of them. Suspends while there are none; returns none when the run is over.

        The question may overtake its run, and comes before the ranks have answered `take_over`.
        """
        while run > self._over and (self._run != run or len(self._lost) <= known):
            self._has_lost.clear()
            await self._has_lost.wait()
        return self._lost[known:] if self._run == run else []

    async def next_pause(self, run: int, missing: int) -> messages.RunPause | None:
        """Suspends until the run waits for another number of workers than `missing`. Returns its
        pause; None if it is not paused, or over. The question may overtake its run."""
        while run > self._over and (self._run != run or self._membership.missing == missing):
            self._has_turned.clear()
            await self._has_turned.wait()
        return self._pause() if self._run == run else None

    async def why_waits(self, run: int, worker_id: str) -> str:
        """Why a worker that has come to a run has no rank in it yet: what the ranks lack to take it
        in. Empty if it has one, or they lack nothing."""
        states = {info.worker_id: state for info, state in self._membership.snapshot(0).members}
        # Only a READY worker waits: the others have a rank, are in a dry run, or do not answer.
        if self._run != run or states.get(worker_id) is not messages.MemberState.READY:
            return ""
        calls = {
            one: self._workers[one].missing.remote(run)
            for one, state in states.items()
            if state is messages.MemberState.RUNNING and one in self._workers
        }
        replies = (await answers(calls, _ANSWER_S)).values()
        return next((why for why in replies if isinstance(why, str) and why), "")

    async def leaves(self, run: int, who: str, why: str) -> None:
        """A node or a worker was told to go; its ranks leave the run first. who: the id."""
        if self._run != run:
            return
        # The notice comes again: if the ranks could not continue now, perhaps they can then.
        seen = self._membership.snapshot(0)
        # A worker without a rank does not get one any more. The previous driver may have
        # dismissed it and died before the session heard that its seat is empty.
        self._note_lost(self._membership.without_rank(who))
        running = [one for one, state in seen.members if state is messages.MemberState.RUNNING]
        ids = [one.worker_id for one in running if one.worker_id in self._workers]
        replies = await self.readiness(run, ids, for_departure=True)
        # NOT_YET of one rank decides it. Where all would run again or admit, no rank need be held.
        is_sure = Readiness.PARKS not in replies or Readiness.NOT_YET in replies
        if not is_sure and self._holds[who] < MAX_ATTEMPTS:
            # After its last step no rank parks. One that waits before a step holds all of them.
            self._holds[who] += 1
            leave = {one.worker_id for one in running if who in (one.worker_id, one.node_id)}
            held = [self._workers[one].hold.remote(run) for one in ids if one in leave]
            await first_answer(held, _STEP_S)
            replies = await self.readiness(run, ids, for_departure=True)
        # The ranks of the next generation have not been asked; the notice comes again.
        can_end = Readiness.NOT_YET not in replies and self.is_in(seen.generation)
        self._report(run, events.Leaving(who, why, can_end, self._num_ready))

    async def has_spares(self, num_ready: int) -> None:
        """So many workers of the session could take a seat now."""
        self._num_ready = num_ready

    async def froze(self, run: int, frozen: messages.Frozen) -> None:
        """A rank of the run has frozen itself; `Worker.resume` will tell it how to continue."""
        self._report(run, events.RankFroze(frozen))

    async def finished(self, run: int, rank: int, generation: int) -> None:
        """The function has returned on a rank, which waits for `Worker.release`."""
        self._report(run, events.RankFinished(rank, generation))

    async def dry_run_ready(
        self, run: int, worker_id: str, token: ReadyToken, endpoint: Endpoint | None
    ) -> None:
        """A worker that comes waits at its first step; `Worker.resume` will tell it to continue."""
        self._report(run, events.DryRunReady(worker_id, token, endpoint))

    async def declined(
        self, run: int, generation: int, number: int, why: str, is_final: bool
    ) -> None:
        """A rank does not admit the workers, as it was asked."""
        self._report(run, events.Declined(generation, number, why, is_final))

    def _report(self, run: int, event: Event) -> None:
        if self._run == run and self._events is not None:
            self._events.put_nowait(event)

    async def snapshot(self) -> messages.DriverSnapshot:
        return replace(self._membership.snapshot(self._incarnation), pause=self._pause())

    async def survey(self, timeout_s: float) -> messages.Survey:
        """Snapshots of the driver and of the workers, for a process that does not own them."""
        seen = await self.snapshot()
        calls = {
            info.seat: self._workers[info.worker_id].snapshot.remote()
            for info, _ in seen.members
            if info.worker_id in self._workers
        }
        replies = await answers_or_why(calls, timeout_s)
        workers = tuple(replies.get(info.seat, "is gone") for info, _ in seen.members)
        return messages.Survey(seen, workers)

    async def readiness(
        self, run: int, worker_ids: Iterable[str], *, for_departure: bool = False
    ) -> list[Readiness]:
        """What would become of these ranks if their generation were ended now. for_departure: so
        that some of them leave."""
        calls = {
            worker_id: self._workers[worker_id].readiness.remote(run, for_departure)
            for worker_id in worker_ids
            if worker_id in self._workers
        }
        replies = await answers(calls, _ANSWER_S)
        return [
            one if isinstance(one, Readiness) else Readiness.NOT_YET for one in replies.values()
        ]

    async def some_rank_saves(self) -> bool:
        """Whether a worker writes down what it holds before its run ends."""
        calls = {worker_id: worker.snapshot.remote() for worker_id, worker in self._workers.items()}
        seen = (await answers(calls, _ANSWER_S)).values()
        return any(one.status.is_saving for one in seen if isinstance(one, messages.WorkerSnapshot))

    async def kernel_killed_some(self, worker_id: str) -> bool:
        """Whether the kernel of this worker's machine has just killed a process for lack of
        memory, as far as another worker of its node can tell."""
        nodes = {info.worker_id: info.node_id for info, _ in self._membership.snapshot(0).members}
        calls = {
            other: self._workers[other].memory_kills.remote()
            for other, node_id in nodes.items()
            if node_id == nodes.get(worker_id) and other != worker_id and self.knows(other)
        }
        replies = await answers(calls, _KERNEL_ANSWER_S)
        return any(isinstance(kills, int) and kills > 0 for kills in replies.values())

    def worker(self, worker_id: str) -> Actor:
        return self._workers[worker_id]

    def idle(self) -> list[str]:
        """Ids of the workers without a rank, but those whose seats are being filled: the session
        ends them."""
        members = self._membership.snapshot(0).members
        ready = {one.worker_id for one, state in members if state is messages.MemberState.READY}
        left = {worker_id for _, worker_id in self._lost}
        return [worker_id for worker_id in ready - left if self.knows(worker_id)]

    def dry_run_of(self, worker_id: str) -> DryRun | None:
        return self._membership.dry_run_of(worker_id)

    def is_in(self, generation: int) -> bool:
        return self._membership.snapshot(0).generation == generation

    def knows(self, worker_id: str) -> bool:
        return worker_id in self._workers


class _InstructionTasks:
    """Instructions on their way: each is a task of the run's group, and ends as an event."""

    def __init__(
        self,
        driver: Driver,
        request: RunRequest,
        program: Any,
        queue: asyncio.Queue[Event],
        tasks: asyncio.TaskGroup,
        secret: bytes,
    ) -> None:
        self._driver = driver
        self._request = request
        self._program = program
        self._events = queue
        self._group = tasks
        self._tasks: set[asyncio.Task[None]] = set()
        self._generation = 0  # the newest one that ranks were told to begin
        self._uncalled: set[str] = set()  # workers that wait for the replay log of their dry run
        self._actor = ray.get_runtime_context().current_actor
        self._store = ActorStore(self._actor, secret)

    def carry_out(self, todo: list[Instruction]) -> RunSucceeded | RunFailed | None:
        """Send instructions on their way; the outcome if one of them says that the run is over."""
        begun = [
            one.assignment.generation
            if isinstance(one, instructions.StartRank)
            else one.resumption.assignment.generation
            for one in todo
            if isinstance(one, instructions.StartRank | instructions.ResumeRank)
        ]
        # What ranks wrote into the store to meet is read in their generation only.
        if max(begun, default=0) > self._generation:
            self._generation = max(begun)
            # A rank of the generation before may still be on its way out of it.
            self._start(self._forget(self._generation - 1), f"forget-{self._generation - 2}")
        for one in todo:
            match one:
                case instructions.StartRank(worker_id, assignment, resumption):
                    rank = f"rank-{assignment.rank}"
                    self._start(self._await_rank(worker_id, assignment, resumption), rank)
                case instructions.BeginDryRun(worker_id):
                    self._uncalled.add(worker_id)
                    dry_run = self._driver.dry_run_of(worker_id)
                    assert dry_run is not None  # This instruction began it.
                    self._start(self._begin_dry_run(one, dry_run), f"dry-run-{worker_id}")
                case instructions.RequestAdmission(worker_id, request):
                    self._start(
                        self._call(worker_id, "request_admission", request),
                        f"admission-{worker_id}",
                    )
                # The previous driver started it: the call of `run` is not repeated, and this
                # one stands for it.
                case instructions.AttachRank(worker_id):
                    attached = self._await_end(worker_id, "attach", self._request.run, self._actor)
                    self._start(attached, f"attach-{worker_id}")
                case instructions.ExplainLoss(worker_id, pid, why):
                    explained = self._call(worker_id, "explain_loss", pid, why)
                    self._start(explained, f"explain-{worker_id}")
                case instructions.AskRanks(worker_ids):
                    self._start(self._ask(worker_ids), "ask-ranks")
                case instructions.AwaitReadiness(worker_ids, generation):
                    self._start(self._await_readiness(worker_ids, generation), "readiness")
                case instructions.FreezeRank(worker_id):
                    self._start(self._freeze(one), f"freeze-{worker_id}")
                # Not awaited here: the rank may need the whole grace, and its end is an event of
                # its own.
                case instructions.AbortRank(worker_id, error):
                    # A worker that waits for its replay log was not called: an order that it kept
                    # would end its next dry run.
                    if worker_id in self._uncalled:
                        self._uncalled.discard(worker_id)
                        self._events.put_nowait(events.DryRunEnded(worker_id, str(error)))
                        continue
                    self._start(self._call(worker_id, "abort", error), f"abort-{worker_id}")
                # The worker is told the same; what differs is whether its seat is empty then.
                case instructions.DismissRank() | instructions.RestRank():
                    rested = self._call(one.worker_id, "rest", one.error)
                    self._start(rested, f"rest-{one.worker_id}")
                case instructions.ResumeRank(worker_id, resumption):
                    resumed = self._call(worker_id, "resume", resumption, self._store)
                    self._start(resumed, f"resume-{worker_id}")
                case instructions.ReleaseRank(worker_id):
                    self._start(self._call(worker_id, "release"), f"release-{worker_id}")
                case instructions.Fence(worker_id):
                    # Its run call ends with that, and becomes the event.
                    ray.kill(self._driver.worker(worker_id))
                case instructions.StartPatience(generation):
                    # A rank that computes notices at its next collective, perhaps a long step away.
                    patience_s = self._request.timeout_s + _ANSWER_S
                    ended: Event = events.PatienceEnded(generation)
                    self._start(self._after(patience_s, ended), "patience")
                case instructions.StartPause(generation):
                    ended = events.PauseEnded(generation)
                    self._start(self._after(self._request.pause_s, ended), "pause")
                case instructions.StartLastSave(generation):
                    ended = events.LastSaveEnded(generation)
                    self._start(self._after(self._request.last_save_s or 0.0, ended), "last-save")
                case instructions.StartGrace(is_for_ranks):
                    self._start(self._grace(is_for_ranks), "grace")
                case instructions.EndRun(outcome):
                    return outcome
        return None

    def watch_idle(self) -> None:
        """Report the deaths of workers that wait for a rank."""
        self._start(self._watch_idle(), "idle")

    def drop(self) -> None:
        """The run is over: nobody waits for stuck ranks any more."""
        # They would keep the task group open, and with it the answer to the session.
        for task in list(self._tasks):
            task.cancel()

    def _start(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = self._group.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _forget(self, newest: int) -> None:
        """On the store's loop, where its waiters are."""
        with contextlib.suppress(ActorGone, NoAnswer):  # The next generation forgets more.
            await answer(self._actor.store_forget.remote(newest), _ANSWER_S)

    async def _await_rank(
        self,
        worker_id: str,
        assignment: messages.Assignment,
        resumption: messages.Resumption | None,
        replay_log: bytes = b"",
    ) -> None:
        arguments = (assignment, self._request, self._store, self._program, self._actor)
        await self._await_end(worker_id, "run", *arguments, resumption, replay_log)

    async def _begin_dry_run(self, one: instructions.BeginDryRun, dry_run: DryRun) -> None:
        counts = True
        try:
            # The rank gives it between two steps.
            call = self._remote(one.source, "replay_log", self._request.run)
            given: GivenReplayLog | None = await answer(call, self._request.timeout_s)
            if given is None:
                raise NoAnswer(self._request.timeout_s)
        except (ActorGone, NoAnswer) as error:
            given, is_final = GivenReplayLog(why_not=error.detail), False
            counts = isinstance(error, ActorGone)
        else:
            is_final = not given.payload
        # It was called off meanwhile, and may be in its next attempt already.
        if one.worker_id not in self._uncalled or not self._is_under_way(dry_run):
            return
        self._uncalled.discard(one.worker_id)
        if not given.payload:
            ended = events.DryRunEnded(one.worker_id, given.why_not, is_final, counts)
            self._events.put_nowait(ended)
            return
        # From here on the worker has the log, so that only its own function can keep it.
        self._start(self._end_if_late(dry_run), f"late-{one.worker_id}")
        await self._await_rank(one.worker_id, one.assignment, None, given.payload)

    def _is_under_way(self, dry_run: DryRun) -> bool:
        """Whether it is still the worker's present attempt to come in."""
        return self._driver.dry_run_of(dry_run.member.info.worker_id) is dry_run

    async def _end_if_late(self, dry_run: DryRun) -> None:
        """A worker still in its dry run when the run has waited long enough may hang, and others
        would never come: its seat is filled again. One that is ready waits for the ranks."""
        await asyncio.sleep(self._request.pause_s)
        # The death is an event like any other, and the session fills the seat.
        if self._is_under_way(dry_run) and dry_run.token is None:
            ray.kill(self._driver.worker(dry_run.member.info.worker_id))

    async def _await_end(self, worker_id: str, method: str, *arguments: object) -> None:
        """Make the call that lasts as long as the rank runs."""
        event: Event
        try:
            ending = await answer(self._remote(worker_id, method, *arguments))
            event = events.RankEnded(ending, worker_id)
        # The call of `run` ends with the process: no heartbeat is needed to see a death.
        except ActorGone as gone:
            why = gone.detail
            if why == KILLED and await self._driver.kernel_killed_some(worker_id):
                why += FOR_MEMORY
            event = events.WorkerDied(worker_id, why)
        self._events.put_nowait(event)

    async def _call(self, worker_id: str, method: str, *arguments: object) -> None:
        """Tell a worker something about the run. That it has died is reported by `_await_end`, and
        that it hangs by the end of a deadline."""
        with contextlib.suppress(ActorGone, NoAnswer):
            await answer(self._remote(worker_id, method, self._request.run, *arguments), GRACE_S)

    async def _freeze(self, freeze: instructions.FreezeRank) -> None:
        call = self._remote(
            freeze.worker_id, "freeze", self._request.run, freeze.generation, freeze.error
        )
        try:
            # A rank that a timeout names has had its time, and gets only what an answer takes.
            await answer(call, _ANSWER_S if freeze.is_late else self._request.timeout_s)
        # The control loop is never blocked by a function, so a silent one belongs to a process that
        # is stopped, or whose node is unreachable: it will not report how far it is.
        except NoAnswer:
            self._events.put_nowait(events.RankSilent(freeze.worker_id, freeze.generation))
        except ActorGone:
            pass  # `_await_end` reports it.

    async def _watch_idle(self) -> None:
        # There is no call of theirs that would end with them: a run would be formed with one that
        # is gone, and lose it, before its seat is filled.
        while True:
            await asyncio.sleep(_IDLE_WATCH_S)
            calls = {one: self._remote(one, "snapshot") for one in self._driver.idle()}
            for worker_id, reply in (await answers(calls, _ANSWER_S)).items():
                if isinstance(reply, ActorGone):
                    self._events.put_nowait(events.WorkerDied(worker_id, reply.detail))

    async def _ask(self, worker_ids: tuple[str, ...]) -> None:
        # A worker that died with the previous driver cannot be asked.
        calls = {
            rank: self._remote(worker_id, "whereabouts")
            for rank, worker_id in enumerate(worker_ids)
            if self._driver.knows(worker_id)
        }
        by_rank = await answers_or_why(calls, _ANSWER_S)
        self._events.put_nowait(events.RanksAnswered(by_rank))

    async def _await_readiness(self, worker_ids: tuple[str, ...], generation: int) -> None:
        pause_s = _AGAIN_S
        while self._driver.is_in(generation):
            # Asked again, not awaited in the workers: a function may register what has to survive
            # at any time, and nothing tells when it has.
            replies = await self._driver.readiness(self._request.run, worker_ids)
            if all(one in (Readiness.RUNS_AGAIN, Readiness.ADMITS) for one in replies):
                can_admit = all(one is Readiness.ADMITS for one in replies)
                self._events.put_nowait(events.RanksReady(generation, can_admit))
                return
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _AGAIN_AT_MOST_S)

    async def _grace(self, is_for_ranks: bool) -> None:
        give_up_at = time.monotonic() + SAVING_S
        pause_s = GRACE_S
        while True:
            await asyncio.sleep(pause_s)
            if time.monotonic() > give_up_at or not await self._driver.some_rank_saves():
                break
            pause_s = _AGAIN_S
        self._events.put_nowait(events.GraceEnded(is_for_ranks))

    async def _after(self, delay_s: float, event: Event) -> None:
        await asyncio.sleep(delay_s)
        self._events.put_nowait(event)

    def _remote(self, worker_id: str, method: str, *arguments: object) -> Any:
        return getattr(self._driver.worker(worker_id), method).remote(*arguments)


def driver_class() -> Any:
    """The Ray class of Driver. The session starts a new one itself when it is needed."""
    return actor_class(Driver, concurrency_groups=STORE_CONCURRENCY, num_cpus=0)
