"""The worker actor: one device, a control loop that always answers, and a training thread.

    control loop    is Ray's, of the concurrency group "control": snapshot, abort, pull, stop.
                    It is never blocked, whatever the user's function does.
    default loop    holds the call of `run` while the training thread works.
    training thread makes the group and calls the user's function. When a generation ends and the
                    run continues, it waits in its lifeline (lifeline.py) and makes the next group.

The loops are two threads (Ray gives each concurrency group one), so what they share has a lock,
which no thread holds while it blocks.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import ray

from chorusline.collectives.contract.endpoint import Endpoint
from chorusline.collectives.contract.errors import (
    CollectiveError,
    CollectiveTimeout,
    GroupAborted,
    StoreLost,
    fresh_copy,
)
from chorusline.collectives.diagnosis.debug import get_debug_level, set_debug_level

from ..errors import ends_a_generation
from ..memory_kills import MemoryKills
from ..messages import outcomes
from ..messages.admission import AdmissionRequest, GivenReplayLog, Readiness
from ..messages.messages import (
    Assignment,
    Failure,
    PlaceInRun,
    Resumption,
    RunRequest,
    Success,
    WorkerInfo,
    WorkerSnapshot,
    WorkerState,
)
from ..messages.run_status import RunStatus
from ..messages.whereabouts import Whereabouts
from ..parcels.parcel import Parcel
from ..ray_calls.actor_store import ActorStore
from ..ray_calls.calls import Actor, actor_class
from ..ray_calls.detached_actors import end_without
from ..ray_calls.versions import versions_here
from ..reporting.metrics import Look, Publisher
from ..reporting.report_buffer import Pulled, ReportBuffer
from ..reporting.worker_logs import Output, Position, Printed, read_rest
from .current_run import CurrentRun, EarlyOrders, RunnableProgram, meet_again
from .gpu import own_gpu
from .lifeline import AdmittingRank, Lifeline
from .memory import Leftovers, device_memory_bytes, resident_bytes, spare_modules
from .sigterm import SIGTERM_EXIT, leave, watch_sigterm
from .training_thread import TrainingThread

if TYPE_CHECKING:
    import torch

    from chorusline.collectives.group import Group
    from chorusline.collectives.transports.host import PreparedEndpoint

LEADS_TO_USERS_CODE = True  # Tracebacks leave out the frames of this file (outcomes.py).

COROUTINE_GRACE_S = 1.0
"""Seconds for a function to end by the error of its collectives before its coroutine is cancelled,
and as many more before it is interrupted in its Python code. Code that sees the error can tell its
story; code that waits for something else, or only computes, would never see it."""


LAST_REPORTS_S, _LOOK_S = 1.0, 0.05
"""The most seconds that the process of a rank that leaves waits until its last reports are pulled,
which is done a few times a second."""


LOADED_LATE = "torch._dynamo"
"""torch loads it, and sympy with it, when the first optimizer is made: 2 to 4 s (torch 2.13)."""


_NICER = 5
"""What gives way to the ranks is nicer by this: as Ray's own workers at 15 are to the lowest
priority. At the lowest, beside ranks at 0 that keep all cores busy, it would not get on at all."""


def patient() -> ThreadPoolExecutor:
    """A thread for what may take its time: it gives way to whatever else wants a core. Linux has a
    priority for each thread, so that of the process stays, which could not be raised again."""

    def give_way() -> None:
        with contextlib.suppress(OSError):  # A sandbox without the call.
            thread = threading.get_native_id()
            nicer = min(os.getpriority(os.PRIO_PROCESS, thread) + _NICER, 19)
            os.setpriority(os.PRIO_PROCESS, thread, nicer)

    return ThreadPoolExecutor(1, "patient", give_way)


class Worker:
    """Runs the user's functions, one at a time, as one rank of one generation after another."""

    def __init__(
        self,
        seat: int,
        use_gpu: bool,
        session: str = "",
        is_detached: bool = False,
        is_spare: bool = False,
    ) -> None:
        # Before what may raise: Ray asks for it then as well.
        self._name = f"worker in seat {seat} of {session or 'a session'}"
        if is_spare:
            with patient() as thread:
                thread.submit(importlib.import_module, "torch").result()
        # Not at the top: Ray imports this file wherever the handle of a worker is, so also the
        # driver, which starts with 0.7 s of CPU time without torch, not 1.8.
        import torch

        if is_detached:  # The session has a session host, without which this worker ends.
            end_without(session)
        runtime = ray.get_runtime_context()
        self._device = own_gpu() if use_gpu else torch.device("cpu")
        self._num_threads = max(1, int(runtime.get_assigned_resources().get("CPU", 0)))
        self._info = WorkerInfo(
            worker_id=runtime.get_actor_id() or "",
            seat=seat,
            node_id=runtime.get_node_id(),
            hostname=socket.gethostname(),
            pid=os.getpid(),
            device=str(self._device),
            versions=versions_here(),
        )
        self._lock = threading.Lock()
        self._run: CurrentRun | None = None  # None: between two runs
        self._group: Group | None = None
        """Of the last generation, also between runs; None before the first, and after `stop`."""
        self._group_store: ActorStore  # where its ranks have met
        self._prepared: PreparedEndpoint | None = None
        """Of the training thread, for the next group; None if it has prepared none."""
        self._last: tuple[int, ReportBuffer] = (-1, ReportBuffer(False))  # a run and its reports
        self._last_status = RunStatus()  # of the run in progress, or of the last one
        self._generation = -1
        self._ended: CurrentRun | None = None  # the run before; None: this is the first
        self._early = EarlyOrders()
        self._output = Output(self._info.node_id)
        self._memory_kills = MemoryKills()
        self._publisher = Publisher(session, seat, self._look)
        self._is_leaving = False
        self._leftovers = Leftovers()
        self._has_seat = asyncio.Event()
        watch_sigterm(self._leave)

    def __repr__(self) -> str:
        """As Ray's dashboard and logs name this actor; Ray asks once, when it has started."""
        return self._name

    async def run(
        self,
        assignment: Assignment,
        request: RunRequest,
        store: ActorStore,
        program: Parcel,
        driver: Actor,
        resumption: Resumption | None = None,
        replay_log: bytes = b"",
    ) -> Success | Failure:
        """Run the program as this rank. Returns how it has ended; never raises an exception of it.

        resumption: what the other ranks are told of the generation, if they are in the run already.
        replay_log: for the dry run of this worker before it is a rank (messages/admission.py).

        1. The training thread unpickles the program (a module missing here must not cost the
           others a rendezvous),
        2. meets the other ranks: by a barrier in the group that it already has of this generation,
           else by making one,
        3. knows by another barrier that they all have met,
        4. calls the program,
        5. and if that raised, ends the generation for the peers at once: they stop waiting for this
           rank before the driver has heard of it and has told them.

        A rank that fails in 2 has not come to 3, so no rank has left 3: the function was not called
        on any rank (`Failure.nobody_began`), and a worker that died between two runs costs a run
        nothing. One barrier alone would not prove it, as some leave it while others are in it.
        Where the group is made for a run that continues, the lifeline deals with a rank that does
        not come.
        """
        report_buffer = self._buffer_of(request)
        run = CurrentRun(assignment, request, store, report_buffer, driver, program, resumption)
        run.is_dry_run = bool(replay_log)
        with self._lock:
            if self._run is not None:
                # Two functions in one process would issue collectives in each other's order.
                raise RuntimeError(f"run {self._run.request.run} is still in progress here")
            self._run = run
            if request.run != self._last[0]:
                self._output.begin_run()
            self._last = (request.run, run.report_buffer)
            self._last_status = run.status
            self._generation = assignment.generation
            self._output.set_rank(assignment.rank)
            run.stop_error, frozen = self._early.taken_by(request.run, assignment.generation)
            if frozen is not None:
                run.freezes[assignment.generation] = frozen
            run.thread = TrainingThread(
                lambda: self._train(run, program, resumption, replay_log),
                lambda value, error: self._conclude(run, value, error),
                name=f"training-rank-{assignment.rank}",
                num_threads=self._num_threads,
                may_interrupt=lambda: not run.status.is_saving,
            )
        try:
            ending = await run.thread.run()
            if self._is_leaving and run.stop_error is not None:
                # The rank has left, and the death of its process frees the seat.
                await self._until_heard()
                os._exit(SIGTERM_EXIT)
            run.ending.set_result(ending)
            return ending
        finally:
            with self._lock:
                self._run, run.program = None, None
                # For a driver that takes the run over, and asks how this rank has ended.
                self._ended = run
                lifeline = run.lifeline
            if lifeline is not None:
                lifeline.let_go()
            # After the answer, which refers to nothing of the user's.
            asyncio.get_running_loop().call_soon(self._leftovers.give_back)

    def _buffer_of(self, request: RunRequest) -> ReportBuffer:
        """Where this rank's reports wait. Of a worker that has rested and is a rank of the same run
        again, whoever pulls knows how many it has had: they count on."""
        number, before = self._last
        if number == request.run:
            return before
        return ReportBuffer(request.keep_reports, self._output, request.report_history)

    def _leave(self) -> None:
        """This process was told to end. Called in a thread of its own."""
        self._is_leaving = True
        leave(lambda: self._run, self._info)

    def _look(self) -> Look:
        # One look, so that the figures belong to one run.
        with self._lock:
            run, group, (_, report_buffer) = self._run, self._group, self._last
        return Look(
            status=self._last_status,
            group=group,
            is_running=run is not None,
            generation=self._generation,
            memory_bytes=resident_bytes(),
            device_memory_bytes=self._last_status.device_memory_bytes,
            reported=report_buffer.latest_numbers(),
        )

    # ── Control loop ─────────────────────────────────────────────────────────────────────────────

    @ray.method(concurrency_group="control")
    async def snapshot(self) -> WorkerSnapshot:
        with self._lock:
            run, group = self._run, self._group
        return WorkerSnapshot(
            info=self._info,
            state=run.state if run else WorkerState.IDLE,
            generation=self._generation,
            rank=run.assignment.rank if run else None,
            running_s=time.monotonic() - run.began_at if run else None,
            collectives=dict(group.statistics.operations) if group else {},
            last_report=self._last[1].last,
            status=replace(self._last_status),
            memory_bytes=resident_bytes(),
            device_memory_bytes=self._last_status.device_memory_bytes,
        )

    @ray.method(concurrency_group="control")
    async def whereabouts(self) -> Whereabouts:
        """What this rank has done last, and where its training thread is now."""
        with self._lock:
            run, group = self._run, self._group
        return Whereabouts(
            recordings=tuple(group.flight_recorders()) if group else (),
            stack=run.thread.stack() if run and run.thread else "",
            is_over=run is None or run.thread is None or run.thread.wait_ended(0),
        )

    @ray.method(concurrency_group="control")
    async def pull(self, run: int, since: int, printed_until: Position | None) -> Pulled:
        """The reports of a run from number `since` on, and what was printed since a position."""
        with self._lock:
            number, report_buffer = self._last
            status = replace(self._last_status)
        printed = self._output.read(printed_until)
        # The next run has begun, and with it another buffer; what was printed is of both.
        if number != run:
            return Pulled([], printed, None, {})
        return report_buffer.pulled(since, printed, status)

    @ray.method(concurrency_group="control")
    async def until_heard(self) -> None:
        """Return when all reports so far were pulled, or have had the time for that: this process
        is about to end."""
        await self._until_heard()

    async def _until_heard(self) -> None:
        _, report_buffer = self._last
        give_up_at = time.monotonic() + LAST_REPORTS_S
        # Once in a process's life, and for a buffer of two threads.
        while not report_buffer.has_told_all() and time.monotonic() < give_up_at:  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_S)

    @ray.method(concurrency_group="control")
    async def read_rest(
        self, files: tuple[str, str], node_id: str, since: Position, rank: int | None
    ) -> Printed | None:
        """What another worker of this node, which is gone, has printed last (worker_logs.py)."""
        return read_rest(files, node_id, since, rank)

    @ray.method(concurrency_group="control")
    async def memory_kills(self) -> int:
        """How many processes of this machine the kernel has just killed for lack of memory."""
        return self._memory_kills.recent()

    @ray.method(concurrency_group="control")
    async def stop_after_step(self, run: int) -> bool:
        """Have all ranks stop a run after their step, by this rank's next vote; False if this rank
        takes no steps."""
        with self._lock:
            current = self._run
            if current is None or current.request.run != run:
                return False
            # The next vote carries the wish, so that all ranks stop after the same step.
            current.status.stop_is_wanted = True
            return current.status.taken > 0

    @ray.method(concurrency_group="control")
    async def attach(self, run: int, driver: Actor) -> Success | Failure:
        """Answer to another driver from now on. Returns how this rank has ended, when it has."""
        with self._lock:
            current = self._in_run(run)
            if current is None:
                raise RuntimeError(f"this worker is not in run {run}")
            current.driver = driver
            current.store.move_to(driver)
            lifeline = current.lifeline
        if lifeline is not None:
            lifeline.attach(driver)
        return await asyncio.wrap_future(current.ending)

    def _in_run(self, run: int) -> CurrentRun | None:
        # The run before as well: a new driver, or a session host, may ask for its end.
        for one in (self._run, self._ended):
            if one is not None and one.request.run == run:
                return one
        return None

    @ray.method(concurrency_group="control")
    async def abort(self, run: int, error: CollectiveError) -> None:
        """Stop a run: every call that waits in it raises `error`.

        Returns when the function is over, or was interrupted.
        """
        await self._abort(run, error)

    @ray.method(concurrency_group="control")
    async def rest(self, run: int, error: CollectiveError) -> None:
        """As `abort`, for a worker that has no rank from now on in a run that continues."""
        if (here := self._in_run(run)) is not None:
            here.status.rank = None
        await self._abort(run, error)

    async def _abort(self, run: int, error: CollectiveError) -> None:
        with self._lock:
            current = self._run
            if current is None or current.request.run != run:
                self._early.note_stop(run, error)
                return
            # The first reason stays; what follows it is an echo.
            current.stop_error = current.stop_error or error
            current.state = WorkerState.STOPPING
            group = self._group
            thread = current.thread
            store, lifeline = current.store, current.lifeline
        # All that the training thread may wait in: the store while it meets, its lifeline between
        # two generations, the group in a collective; and then the code of the function.
        store.cancel(error)
        if lifeline is not None:
            lifeline.stop(error)
        if group is not None:
            await asyncio.to_thread(group.abort, error)  # ncclCommAbort may take its time.
        if thread is not None:
            await thread.stop(COROUTINE_GRACE_S)

    @ray.method(concurrency_group="control")
    async def freeze(self, run: int, generation: int, error: CollectiveError) -> None:
        """A generation is over, and the run continues: its collectives raise.

        The training thread then reports how far it is (Lifeline.regenerate).
        """
        with self._lock:
            current = self._run
            if current is None or current.request.run != run:
                self._early.note_freeze(run, generation, error)
                return
            if not current.notes_freeze(generation, error):
                return  # This rank has continued already, or continues in that generation later.
            group, store, lifeline = self._group, current.store, current.lifeline
        store.cancel(error)
        # The thread may be about to make the group of this generation, and have that of the one
        # before: it asks `ends_with` when the group is made.
        if group is not None and group.generation == generation:
            await asyncio.to_thread(group.abort, error)
        if lifeline is not None:
            lifeline.freeze(generation, error)

    @ray.method(concurrency_group="control")
    async def resume(self, run: int, resumption: Resumption, store: ActorStore) -> None:
        """Tell the frozen training thread how it continues. store: of the new generation."""
        with self._lock:
            current = self._run
            # The run has ended here while the order was on its way.
            if current is None or current.request.run != run or current.lifeline is None:
                return
            if not current.continues_in(resumption, store):
                return
            self._generation = resumption.assignment.generation
            self._output.set_rank(resumption.assignment.rank)
            lifeline = current.lifeline
        lifeline.resume(resumption)

    @ray.method(concurrency_group="control")
    async def release(self, run: int) -> None:
        """The function has returned on all ranks: this one may end."""
        with self._lock:
            current = self._run
        if current is not None and current.request.run == run and current.lifeline is not None:
            current.lifeline.release()

    @ray.method(concurrency_group="control")
    async def explain_loss(self, run: int, pid: int, why: str) -> None:
        """Why the process of a lost rank has ended."""
        here = self._in_run(run)
        if here is not None and here.lifeline is not None:
            here.lifeline.explain_loss(pid, why)

    @ray.method(concurrency_group="control")
    async def stop(self, reason: str) -> None:
        """End the run, if there is one, and close the group: the driver is gone, or this worker is
        about to be killed."""
        with self._lock:
            run = self._run
        if run is not None:
            error = GroupAborted(run.assignment.generation, [], reason)
            await self._abort(run.request.run, error)
        with self._lock:
            group, self._group = self._group, None
        if group is not None:
            await asyncio.to_thread(group.close)

    # ── Control loop: a spare worker takes a seat (worker_group/spare_workers.py) ─────────────

    @ray.method(concurrency_group="control")
    async def prepare(self, program: Parcel) -> None:
        """Import what the program needs: open it once, and drop it."""
        # A program that cannot be opened fails where it is called, with the reason.
        loop = asyncio.get_running_loop()
        with patient() as thread, contextlib.suppress(Exception):
            await loop.run_in_executor(thread, program.opened)
            await loop.run_in_executor(thread, importlib.import_module, LOADED_LATE)
        gc.collect()  # The program that was opened, if it knows itself.
        spare_modules()

    @ray.method(concurrency_group="control")
    async def wait_for_seat(self) -> None:
        """Return when this worker has a seat; the death of its process ends the call as well."""
        await self._has_seat.wait()

    @ray.method(concurrency_group="control")
    async def take_seat(self, seat: int) -> None:
        """Take the seat of a worker that is gone."""
        self._info = replace(self._info, seat=seat)
        self._publisher.move_to(seat)
        self._has_seat.set()

    # ── Control loop: another worker comes to the run (messages/admission.py) ─────────────────────

    @ray.method(concurrency_group="control")
    async def readiness(self, run: int, for_departure: bool) -> Readiness:
        """Whether the generation could be ended now without need, as far as this rank knows.
        for_departure: so that ranks leave."""
        here = self._in_run(run)
        if here is None or here.lifeline is None:
            return Readiness.NOT_YET
        try:
            return here.lifeline.readiness(for_departure)
        except RuntimeError:  # The training thread has changed what was looked through.
            return Readiness.NOT_YET

    @ray.method(concurrency_group="control")
    async def missing(self, run: int) -> str:
        """Why the function cannot run again with a worker that comes; empty if it can."""
        here = self._in_run(run)
        if here is None or here.lifeline is None:
            return ""
        try:
            return here.lifeline.missing()
        except RuntimeError:  # The training thread has changed what was looked through.
            return ""

    @ray.method(concurrency_group="control")
    async def hold(self, run: int) -> None:
        """Return when this rank waits before its next step, as its generation is about to end."""
        here = self._in_run(run)
        if here is not None and here.lifeline is not None:
            await asyncio.wrap_future(here.lifeline.hold())

    @ray.method(concurrency_group="control")
    async def replay_log(self, run: int) -> GivenReplayLog | None:
        """What a worker needs for a dry run of the function; when this rank is between two of
        its steps. None if it does not come there in time, or the function ends."""
        here, arrivals = self._in_run(run), self._arrivals_of(run)
        if here is None or arrivals is None:
            return GivenReplayLog(why_not="the function has not started here, or has returned")
        # The driver waits no longer either, and asks again: the calls would fill this loop.
        asked = asyncio.wrap_future(arrivals.give_replay_log())
        await asyncio.wait([asked], timeout=here.request.timeout_s)
        return asked.result() if asked.done() else None

    @ray.method(concurrency_group="control")
    async def request_admission(self, run: int, request: AdmissionRequest) -> None:
        """Take in workers that wait, after the next step."""
        arrivals = self._arrivals_of(run)
        if arrivals is not None:
            arrivals.request_admission(request)

    def _arrivals_of(self, run: int) -> AdmittingRank | None:
        here = self._in_run(run)
        return here.lifeline.arrivals if here is not None and here.lifeline is not None else None

    # ── Control loop: a new driver, or a session host that was started again, asks ──────────────

    @ray.method(concurrency_group="control")
    async def place_in_run(self, run: int) -> PlaceInRun | None:
        """Where this worker is in a run, for a new driver; None if it is not a rank of it. A worker
        in a dry run stops: the driver is gone that was to call it in, and the next one hears of
        it as of any idle worker."""
        with self._lock:
            current = self._in_run(run)
            if current is None:
                return None
            is_dry_run, secret = current.is_dry_run, current.store.secret
            place = PlaceInRun(self._info, current.assignment, current.resumption, secret)
        # Outside the lock, which `_abort` takes.
        if is_dry_run:
            gone = GroupAborted(current.assignment.generation, [], "its driver is gone")
            # Not awaited: the ranks wait for this driver, and an import of the function may take
            # long.
            self._stopping = asyncio.create_task(self._abort(run, gone), name="dry-run-stops")
            return None
        return place

    @ray.method(concurrency_group="control")
    async def program_of(self, run: int) -> Parcel | None:
        """The program of a run in progress, for workers that come to it later; else None. The
        session host that had it is gone, and its objects with it."""
        here = self._in_run(run)
        return here.program if here is not None else None

    # ── Training thread ──────────────────────────────────────────────────────────────────────────

    def _train(
        self, run: CurrentRun, parcel: Parcel, resumption: Resumption | None, replay_log: bytes
    ) -> object:
        import torch

        if self._device.type == "cuda":
            # A library that asks for "cuda" without a number would take the first GPU, of another
            # worker.
            torch.cuda.set_device(self._device)
        # A level that the environment has set on this node is not lowered by a session.
        set_debug_level(max(run.request.debug_level, get_debug_level()))
        if self._ended is None:
            spare_modules()
        program: RunnableProgram = parcel.opened()
        lifeline = Lifeline(
            *(run.request, run.driver, run.assignment),
            lambda: self._meet(run),
            resumption,
            self._info.seat if resumption is None and not replay_log else -1,
            run.status,
            self._info.worker_id,
            lambda: self._prepare(run.assignment.world_size),
        )
        with self._lock:
            run.lifeline = lifeline
            if run.stop_error is not None:
                lifeline.stop(run.stop_error)
            group, early_error = self._group, run.ends_with(run.assignment.generation)
        # It meets nobody, so that its failure costs the others nothing.
        if replay_log:
            self._group = dry_run_group(run, self._device, group)
            reports = run.report_buffer
            return program(
                run.assignment, self._group, reports, lifeline, run.status, None, replay_log
            )
        has_met = group is not None and group.generation == run.assignment.generation
        run.nobody_began = resumption is None and (has_met or not run.request.survives_loss)
        if has_met:
            assert group is not None
            try:
                meet_again(group, early_error)
            # The group lives on between two runs, and a rank may have stopped since.
            except CollectiveTimeout:
                if not run.request.survives_loss:
                    raise
                # A rank that hangs is killed, and the others continue (Lifeline.begin).
                run.nobody_began = False
        assignment, group, resumption = lifeline.begin()
        return program(assignment, group, run.report_buffer, lifeline, run.status, resumption)

    def _prepare(self, world_size: int) -> Endpoint | None:
        """Where other ranks of this host can meet this one in the next generation; None if they
        meet in a store. world_size: of the generation that is over."""
        from chorusline.collectives.transports.host import PreparedEndpoint

        self._drop_prepared()
        if self._device.type != "cpu":
            return None
        with contextlib.suppress(OSError):  # No memory: `Group.create` says what is wrong.
            # One worker more may come; where several do, the ranks meet in the store.
            self._prepared = PreparedEndpoint(world_size + 1)
        return self._prepared.endpoint if self._prepared is not None else None

    def _drop_prepared(self) -> None:
        prepared, self._prepared = self._prepared, None
        if prepared is not None:
            prepared.close()

    def _meet(self, run: CurrentRun) -> Group:
        """The group of the run's generation."""
        from chorusline.collectives.group import Group

        with self._lock:
            assignment, store, resumption = run.assignment, run.store, run.resumption
            group, self._group = self._group, None
            frozen = run.freezes.get(assignment.generation)
        # The order has overtaken this thread: a group made now would wait for ranks that do not
        # come.
        if frozen is not None:
            if group is not None:
                group.abort(frozen)
                group.close()
            raise fresh_copy(frozen)
        # Closed before the next one is made: both would hold memory, and with NCCL a communicator.
        if group is not None and group.generation != assignment.generation:
            group.close()
            group = None
        endpoints = resumption.endpoints if resumption is not None else ()
        if group is None and endpoints:
            assert self._prepared is not None
            group = Group._create_prepared(
                self._prepared,
                endpoints,
                store.raise_if_cancelled,
                store,
                assignment.rank,
                generation=assignment.generation,
                timeout_s=run.request.timeout_s,
            )
        elif group is None:
            group = Group.create(
                store,
                assignment.rank,
                assignment.world_size,
                self._device,
                generation=assignment.generation,
                timeout_s=run.request.timeout_s,
            )
        # It may have ended between two runs, by the death of a worker that nobody waited for.
        elif (failure := group.failure()) is not None:
            group.close()
            raise fresh_copy(failure)
        else:  # It lives on, with the store that it has; the driver may be another one.
            store = self._group_store
        self._drop_prepared()
        with self._lock:
            # Under the lock in which `abort` and `freeze` read them: either they find this group,
            # or their order is found below.
            self._group, self._group_store, run.store = group, store, store
            store.move_to(run.driver)
            ended = run.ends_with(assignment.generation)
            if run.stop_error is None:
                run.state = WorkerState.TRAINING
        if ended is not None:
            # The order came before there was a group that `abort` or `freeze` could have aborted.
            group.abort(ended)
            raise fresh_copy(ended)
        if run.nobody_began:
            run.nobody_began = False
            group.meet().wait_on_host()  # 3
        return group

    def _conclude(
        self, run: CurrentRun, value: object, error: BaseException | None
    ) -> Success | Failure:
        self._drop_prepared()
        rank = run.assignment.rank
        run.status.device_memory_bytes = device_memory_bytes(self._device)
        if error is None:
            group = self._group
            issued = group.statistics.total_operations() if group else 0
            if group is not None:
                # A peer that waits for an operation of this rank learns at once that none comes.
                group.rest()
            is_over = group is not None and group.failure() is not None
            ending = outcomes.success(rank, value, issued, is_group_over=is_over)
        else:
            # It crosses to processes that may lack the modules of the error: it travels as text and
            # parts.
            ending = outcomes.failure(
                rank,
                error,
                was_told_to_stop=run.stop_error is not None,
                as_counted=self._group.as_counted_here if self._group else None,
            )
            if run.nobody_began and ends_a_generation(error):
                # The driver has died, and the store with it: no rank is to blame.
                is_echo = ending.is_echo or isinstance(error, StoreLost)
                ending = replace(ending, nobody_began=True, is_echo=is_echo)
        if isinstance(ending, Failure) and self._group is not None:
            generation = run.assignment.generation
            # Phase 5 of `run`: the peers learn it from the group, faster than from the driver.
            self._group.abort(
                GroupAborted(generation, list(ending.culprits), ending.reason, ending.traceback)
            )
        return ending


def dry_run_group(run: CurrentRun, device: torch.device, before: Group | None) -> Group:
    """The group of a worker in its dry run. before: of an earlier generation, which it closes."""
    from chorusline.collectives.dry_run import DryRunGroup

    if before is not None:
        before.close()
    run.state = WorkerState.DRY_RUN
    return DryRunGroup(
        run.assignment.rank,
        run.assignment.world_size,
        device,
        generation=run.assignment.generation,
        timeout_s=run.request.timeout_s,
        store=run.store,
    )


def worker_class() -> Any:
    """The Ray class of Worker. Ray does not restart a dead worker: the session replaces it."""
    return actor_class(Worker, concurrency_groups={"control": 100})
