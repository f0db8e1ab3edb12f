"""`Session`: workers that run the user's functions."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from ray import cloudpickle

from chorusline.actors.errors import StartupError
from chorusline.actors.messages.messages import Report, RunFailed
from chorusline.actors.messages.outcomes import raise_failure
from chorusline.actors.parcels.parcel import Parcel
from chorusline.actors.worker_group.worker_group import CLOSED
from chorusline.collectives.contract.argument_kinds import check_kinds
from chorusline.collectives.contract.deadlines import Seconds, checked_seconds
from chorusline.collectives.contract.errors import GroupAborted
from chorusline.collectives.contract.torch_hints import TOO_MANY, says

from .. import notebook
from ..checkpoint.config import CheckpointConfig
from ..program.argument_owners import naming_owners
from ..program.edited_modules import EditedModules
from ..program.packing import HEAVY_BYTES, heavy_parts, packed_program
from ..tracking.tracker import Tracker
from ..tracking.tracker_names import checked_trackers
from ..tracking.tracking import Tracking
from . import connecting
from .connecting import Connection
from .detached.client import DetachedClient
from .detached.status import IDLE_TIMEOUT_S, check_attachable, check_name
from .holding.local_session import LocalSession
from .holding.options import DEFAULT, Default, SessionOptions, checked_progress
from .placing import placement
from .showing.news_pump import Audience, results_come_first
from .showing.progress import Progress
from .showing.starting import Starting
from .state import REMEDIES, SessionKind, SessionSnapshot, SessionState
from .trace import as_json, traced

_log = logging.getLogger("chorusline")

_ASK_S = 5.0

ARGUMENTS_BY_NAME = (
    "arguments of train are passed by name: run(train, lr=0.1), which calls train(ctx, lr=0.1). "
    "For a dictionary such as Ray Train's train_loop_config: run(train, config=config) for a "
    "function train(ctx, config), or run(train, **config)"
)
"""What to write in place of positional arguments."""

_WORKERS = "write num_workers=, the number of workers on all nodes together"

_OF_LAUNCHERS = {
    **dict.fromkeys(
        ("world_size", "nprocs", "nproc_per_node", "num_processes", "nnodes"), _WORKERS
    ),
    "num_gpus": "write use_gpu=True: each worker has a GPU",
    "timeout": "write timeout_s=, in seconds",
    "max_restarts": "write max_failures=",
    "scaling_config": "its fields are arguments of the session, such as num_workers= and use_gpu=",
    "failure_config": "write max_failures=",
    "run_config": "write checkpoint=CheckpointConfig(storage_path=...), and max_failures=",
}
"""By argument of torchrun, accelerate or Ray Train, what to write."""


class Session:
    """Workers that stay: start them once, and run one function after another on them.

        async with Session(num_workers=4) as session:
            results = await session.run(train, epochs=3)

    num_workers: the number of workers, or a pair (fewest, most). With a pair the session starts
        with as many workers as fit, and adds workers when there is room; in the middle of a run
        only if its function can run again (ctx.register). Ray's autoscaler, if the cluster has
        one, is asked for the workers that are missing.
    max_failures: a run fails when it loses more workers than this; None: any number may be lost,
        as long as `fewest` are left. Default: 0, or None if num_workers is a pair. A run continues
        without the lost workers if its function can (ZeroRedundancyOptimizer, `replicas`).
    spares: workers that have started, loaded the program, and wait. One takes the place of a lost
        worker at once, and another spare is started after it. They need resources of their own.
    replace_stragglers: replace a worker that stays much slower than the others (`ctx.steps` warns
        of it). Uses a spare if there is one; otherwise num_workers must be a pair that allows one
        worker less. At most once per seat and run.
    replica_size: workers that hold one copy of a model of torch's `fully_shard` between them
        (torch's `init_device_mesh` with two dimensions). A run continues with the replicas that
        have lost no worker.
    use_gpu: whether each worker gets a GPU, `ctx.device`; it sees all GPUs of its node.
    resources_per_worker: Ray's resource names and amounts, over the default of one CPU (a share of
        the CPUs on a cluster that the session starts itself).
    placement_strategy: "PACK", "SPREAD", "STRICT_PACK" or "STRICT_SPREAD", as in Ray.
    timeout_s: deadline of each collective and of the ranks' meeting.
    startup_timeout_s: deadline for placing the workers, including the time in which an autoscaler
        starts nodes, and again for starting them.
    address: of a running cluster; default RAY_ADDRESS; without both the session starts a local
        cluster, and `close` stops it; a detached one takes the cluster of this machine ("auto"). A
        process that is connected to a cluster uses that one; the address of another one is an
        error.
    on_report: called in this process's event loop with each Report of each rank.
    live_view: in a notebook, show the ranks and plots of their reports during a run.
    progress: elsewhere, show on stderr how far a run is, as bars on a terminal and as lines in a
        log. False: not at all. A Progress: use that one, which may know the number of steps.
    trackers: where the runs are recorded: names ("tensorboard", "mlflow", "wandb", "jsonl",
        "opentelemetry"; "jsonl:FILE"), and objects of Tracker.
    checkpoint: where every run saves what it has registered, and where it resumes from.
    seed: call `ctx.seed(seed)` at the start of every run.
    pause_s: how long a run waits for new workers when fewer than `fewest` are left.
    env_vars: environment variables of the workers and of the driver actor.
    runtime_env: their environment, as Ray takes it ("pip", "env_vars", …).
    label_selector: of the nodes on which workers may run, as in Ray:
        {"ray.io/market-type": "spot"}.
    accelerator_type: the GPU that their nodes have, as in Ray ("A100"); with use_gpu.
    name, detached: detached=True keeps the session alive after this program ends. It needs a name,
        and a cluster that keeps running. `cl.attach(name)` in another program shows the session,
        waits for its results, or stops it. `close` detaches from it; only `stop` ends it.
    idle_timeout_s: end a detached session after this many seconds without a run and without an
        attached program. The results of its last run stay available for one more day.
    log_to_driver: whether the ranks' output is printed here, in lines that begin with `[rank 0]`;
        and, if the session connects to Ray, whether Ray prints the output of other processes.

    Raises StartupError if the workers cannot be started. A session must be closed, because Ray does
    not run clean-up code in abandoned actors.
    """

    @naming_owners
    @says(**_OF_LAUNCHERS)
    def __init__(
        self,
        num_workers: int | tuple[int, int] = 1,
        *,
        spares: int = 0,
        replace_stragglers: bool = False,
        replica_size: int = 1,
        use_gpu: bool = False,
        resources_per_worker: Mapping[str, float] | None = None,
        placement_strategy: str = "PACK",
        timeout_s: Seconds = 60.0,
        startup_timeout_s: Seconds = 60.0,
        address: str | None = None,
        on_report: Callable[[Report], None] | None = None,
        live_view: bool = True,
        progress: bool | Progress = True,
        trackers: str | Tracker | Sequence[str | Tracker] = (),
        checkpoint: CheckpointConfig | None = None,
        seed: int | None = None,
        max_failures: int | None | Default = DEFAULT,
        pause_s: Seconds = 300.0,
        env_vars: Mapping[str, str] | None = None,
        runtime_env: Mapping[str, Any] | None = None,
        label_selector: Mapping[str, str] | None = None,
        accelerator_type: str | None = None,
        log_to_driver: bool = True,
        name: str | None = None,
        detached: bool = False,
        idle_timeout_s: Seconds = IDLE_TIMEOUT_S,
    ) -> None:
        arguments = dict(locals())
        check_name(name, detached)
        self._options = SessionOptions.checked(arguments)
        self._idle_timeout_s = checked_seconds(idle_timeout_s, "idle_timeout_s")
        self._progress = checked_progress(progress, on_report)
        self._trackers = checked_trackers(trackers)
        # After the checks of each argument, whose sentences say more than a wrong kind does.
        check_kinds(Session.__init__, arguments)
        placement.check(resources_per_worker, use_gpu, placement_strategy)
        self._address = address
        self._on_report = on_report
        self._live_view = live_view
        self._log_to_driver = log_to_driver
        self._detached_name = name or ""
        self._kind = SessionKind.DETACHED if detached else SessionKind.OWN
        self._connection: Connection | None = None  # None: before the start, and after the end
        self._starting: asyncio.Task[Any] | None = None  # None: no start is in progress
        self._start_ended = asyncio.Event()
        self._is_closed_in_start = False
        # Has the actors, or asks the host that has them while a detached session is open.
        self._holder: LocalSession | DetachedClient = LocalSession(self._options)
        # Of the detached session that `close` has let go of; None: of none.
        self._former_client: DetachedClient | None = None
        self._former_connection: Connection | None = None  # None: of none
        self._state = SessionState.NEW
        self._has_told_weight = False
        self._edited_modules = EditedModules()

    @property
    def num_workers(self) -> int:
        """The present number of workers; before the start, the largest number that was asked
        for."""
        return self._holder.num_workers

    @property
    def num_spares(self) -> int:
        """The number of spare workers that are ready to take a seat."""
        return self._holder.num_spares

    @property
    def name(self) -> str:
        """As `chorusline status` lists it; empty unless the session is open."""
        return self._detached_name or self._holder.name

    @property
    def state(self) -> SessionState:
        """What the session does now."""
        return self._state

    async def start(self) -> Session:
        """Connect to Ray, place and start the workers; return this session. `async with` calls it.

        If the start fails, nothing is left over. A notebook cell that runs again first closes the
        session that it started before; after the start, if both are detached or attached.
        Raises StartupError if the workers do not come in time, NoCluster without a cluster,
        GroupAborted if the session is closed meanwhile, and RuntimeError for a session that was
        started before.
        """
        if self._state is not SessionState.NEW:
            raise RuntimeError(f"the session is {self._state.value}; make a new Session to start")
        # Two starts would place its workers twice, and only one placement would have an owner.
        if self._starting is not None:
            raise RuntimeError("the session is starting already; await that start")
        caller = asyncio.current_task()
        async with notebook.waking():
            self._starting = caller
            try:
                await self._start()
            except asyncio.CancelledError:
                # By `close`, and not by the caller's program as well.
                if self._is_closed_in_start and caller is not None and not caller.uncancel():
                    raise GroupAborted(0, [], CLOSED) from None
                raise
            finally:
                self._starting = None
                self._start_ended.set()
        return self

    async def _start(self) -> None:
        try:
            # It needs a cluster that outlives this program.
            if self._kind is SessionKind.DETACHED:
                connecting.check_stays(self._detached_name, self._address)
            await notebook.close_earlier_session(self, self._makes_room_for_this)
            with Starting(self._shown_progress) as starting:
                may_start = self._kind is SessionKind.OWN
                starting.phase(connecting.what_it_does(self._address, may_start=may_start))
                self._connection = connecting.connect(
                    self._address, self._log_to_driver, may_start=may_start
                )
                # Its host starts the actors, and has what this process would hold.
                if self._kind is not SessionKind.OWN:
                    starting.phase(f"waiting for the session {self._detached_name!r}")
                    await self._take_client()
                    await notebook.close_earlier_session(self)
                    return
                assert isinstance(self._holder, LocalSession)
                forks_workers = connecting.has_started_node()
                await self._holder.start(
                    starting, is_local=self._connection.is_local, forks_workers=forks_workers
                )
            if notebook.in_kernel():
                await self._holder.ask_workers(_ASK_S)  # _repr_html_ shows the answers.
        except BaseException as error:
            # Even after a cancellation: nothing may be left over.
            await (self.stop() if self._kind is SessionKind.DETACHED else self.close())
            notebook.forget_session(self)
            notebook.show_once(notebook.hint_at_other_sessions(error))
            raise
        self._state = SessionState.READY

    def _makes_room_for_this(self, earlier: Session) -> bool:
        """Whether a session that the cell has started before is closed before this one starts. A
        detached one would keep its workers: until this start has come through, it is the one that
        the user has."""
        return SessionKind.OWN in (self._kind, earlier._kind)

    async def _take_client(self) -> None:
        name = self._detached_name
        if self._kind is SessionKind.ATTACHED:
            client = await DetachedClient.found(name)
        else:
            client = await DetachedClient.started(name, self._options, self._idle_timeout_s)
        self._holder, status = client, client.last
        assert status is not None
        if self._kind is SessionKind.ATTACHED:
            # A function is packed here with both, and the host's are those of the session.
            its = {"checkpoint": status.checkpoint, "seed": status.seed}
            self._options = replace(self._options, **its)
        _log.warning("the session %r %s: %s", name, status.in_words, status)
        self._state = SessionState.READY

    async def close(self) -> None:
        """End everything that the session started; may be called more than once. A detached session
        continues; `stop` ends it.

        The session's resources are free in the cluster when it returns. A function that still runs
        is aborted: its caller gets GroupAborted, as does the caller of a start in progress.
        """
        self._state = SessionState.CLOSED
        starting, self._starting = self._starting, None
        # A start that fails calls this itself.
        if starting is not None and starting is not asyncio.current_task():
            self._is_closed_in_start = True
            starting.cancel()
            await self._start_ended.wait()
        # Taken first: a second close, or one while this one waits, finds nothing to do.
        holder = self._holder
        if isinstance(holder, DetachedClient):
            self._holder, self._former_client = LocalSession(self._options), holder
            self._former_connection = self._connection
        connection, self._connection = self._connection, None
        # After a ray.shutdown() of the user there is nothing left to end, and this process may be
        # connected to another cluster, with sessions of its own.
        if isinstance(holder, LocalSession) and connection and not connection.is_alive:
            return
        try:
            await holder.close()
        finally:
            # Last: the actors are ended by calls to the cluster.
            if connection is not None:
                connection.leave()

    def __enter__(self) -> NoReturn:
        raise TypeError(
            "a Session must be awaited: write `async with Session(...) as session:` in an `async "
            "def`, and asyncio.run() it; or, without asyncio, chorusline.run(train, "
            "num_workers=2)"
        )

    def __exit__(self, *_: object) -> None:
        """Here for `with`, which looks for it before it calls __enter__."""

    async def __aenter__(self) -> Session:
        return await self.start()

    def __await__(self) -> Generator[Any, None, Session]:
        """`session = await cl.attach("night")`, as start() does it."""
        return self.start().__await__()

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @says(**{TOO_MANY: ARGUMENTS_BY_NAME})
    async def run(self, train: Callable[..., Any], /, **kwargs: Any) -> list[Any]:
        """Call `train(ctx, **kwargs)` on every rank; return the results, by rank.

        train: `def` or `async def`. The function, its arguments and its results are pickled.

        If a rank raises, all ranks are stopped, and this method raises the same exception, with
        the rank and its traceback in a note. It raises RankFailed if the exception cannot be
        rebuilt in this process, WorkerLost or DriverLost if a process died, StateLost if no
        surviving rank holds some part of the optimizer's state, StartupError if a lost worker
        cannot be replaced, CheckpointError if the storage path cannot be used or its content does
        not fit, and TypeError, before anything is sent, if `train` or an argument cannot be
        pickled. Afterwards the session can run again; with checkpoints the next run resumes from
        the newest complete one.

        If the call is cancelled, it stops all ranks before it returns; the run of a detached
        session continues.
        """
        return await self._run(self._packed(train, kwargs), self._audience_of(train, kwargs))

    @property
    def _shown_progress(self) -> Progress | None:
        """Where the session shows how its runs are; None if it does not, or in a notebook."""
        if notebook.in_kernel() or self._progress is False:
            return None
        return self._progress if isinstance(self._progress, Progress) else Progress.of_places()

    def _audience_of(self, train: Callable[..., Any], kwargs: Mapping[str, Any]) -> Audience:
        """The listeners of a call of the user's function."""
        if not self._trackers:
            return self._audience()
        name = getattr(train, "__name__", type(train).__name__)
        beside = {"num_workers": self.num_workers, "seed": self._options.seed}
        return self._audience(tracking=Tracking(self._trackers, name, kwargs, beside))

    def _audience(
        self, *, always_prints: bool = False, tracking: Tracking | None = None
    ) -> Audience:
        """The live view in a notebook, and elsewhere the progress."""
        is_drawn = self._live_view and notebook.in_kernel()
        view = notebook.LiveView(self._holder.ask_workers) if is_drawn else None
        has_output = always_prints or self._log_to_driver
        return Audience(self._on_report, view, self._shown_progress, has_output, tracking)

    def _packed(self, train: Callable[..., Any], kwargs: Mapping[str, Any]) -> Parcel:
        program = packed_program(train, kwargs, self._options.checkpoint, self._options.seed)
        # Once: a notebook runs such a cell many times.
        if program.nbytes > HEAVY_BYTES and not self._has_told_weight:
            self._has_told_weight = True
            _log.warning("%s", heavy_parts(train, kwargs, program.nbytes))
        if stale := self._edited_modules.look():
            _log.warning("%s", stale)
        return program

    async def snapshot(self, timeout_s: Seconds = 2.0) -> SessionSnapshot:
        """The state of the session, its driver and its workers, even during a run. Silent
        workers delay it by at most `timeout_s`."""
        seen = await self._holder.snapshots(checked_seconds(timeout_s))
        return SessionSnapshot(self._state, *seen)

    async def trace(self, path: str | Path, timeout_s: Seconds = 2.0) -> int:
        """Write the last collectives of all ranks to a file for ui.perfetto.dev (session/trace.py);
        return their number. It works while a function runs, and after one has failed.

        timeout_s: seconds that a silent worker delays it. Raises RuntimeError if the session is not
        open, OSError if the file cannot be written."""
        if self._state in (SessionState.NEW, SessionState.CLOSED):
            raise RuntimeError(REMEDIES[self._state])
        document = as_json(*traced(await self._holder.whereabouts(checked_seconds(timeout_s))))
        await asyncio.to_thread(Path(path).write_text, json.dumps(document))
        return sum(event["ph"] == "X" for event in document["traceEvents"])

    def _why_not_ready(self) -> str:
        """The reason why `run` would raise, and the remedy; empty if the session is ready."""
        if self._connection is not None and not self._connection.is_alive:
            return (
                "the session is gone: this process is no longer connected to Ray (ray.shutdown() "
                "was called, or another session that had started the cluster was closed); close "
                "this one and make a new Session"
            )
        return REMEDIES[self._state]

    def __repr__(self) -> str:
        return f"<Session {self._state.value}, {self.num_workers} workers>"

    def _repr_html_(self) -> str:
        seen = self._holder.seen if self._state is not SessionState.CLOSED else ()
        return notebook.session_as_html(self._state.value, seen)

    async def _run(self, program: Parcel | None, audience: Audience) -> list[Any]:
        """Have a function run, show what it does, and rebuild its results, or its failure.

        program: None for what a detached session runs already, or has run last."""
        if why_not := self._why_not_ready():
            raise notebook.show_once(RuntimeError(why_not), f"RuntimeError: {why_not}")
        holder = self._holder
        error: BaseException | None = None
        self._state = SessionState.RUNNING
        try:
            async with notebook.waking():
                outcome = await holder.run(program, audience)
            if isinstance(outcome, RunFailed):
                raise_failure(outcome, await self._last_step(outcome))
        except BaseException as raised:
            error = raised
            raise
        finally:
            if self._state is SessionState.RUNNING:  # `close` may have been called meanwhile.
                self._state = SessionState.READY
            # Even of a failed run: the last reports say how far it was.
            await self._finish(audience, error)
            if error is not None:
                is_interrupt = isinstance(error, asyncio.CancelledError)
                notebook.show_once(error, holder.how_interrupted() if is_interrupt else None)
        return [cloudpickle.loads(result) for result in outcome.results]

    async def _finish(self, audience: Audience, error: BaseException | None) -> None:
        """Bring the view and the trackers to their end."""
        try:
            await audience.finish(error)
        except asyncio.CancelledError:
            if error is not None:
                raise
            results_come_first("a tracker may lack its last lines")

    async def _last_step(self, failed: RunFailed) -> int:
        """How many optimizer steps a run had taken that has lost a worker; 0 if nobody knows."""
        if not failed.losses:
            return 0
        seen = await self._holder.ask_workers(_ASK_S)
        statuses = [one.status for one in seen if not isinstance(one, str)]
        return max((one.step for one in statuses), default=0)

    # ── A session that outlives its program ──────────────────────────────────────────────────────

    @says(**{TOO_MANY: ARGUMENTS_BY_NAME})
    async def submit(self, train: Callable[..., Any], /, **kwargs: Any) -> int:
        """Begin `train(ctx, **kwargs)` on every rank of a detached session, without waiting for its
        end; return the number of the run. `results()` waits, here or where it is attached. Raises
        ValueError if the session has trackers."""
        client = self._detached_client()
        if self._trackers:
            raise ValueError(
                "trackers record in the program that waits for the run, and submit() does not "
                "wait; write `await session.run(train, ...)`, or leave trackers= out"
            )
        return await client.begin(self._packed(train, kwargs))

    async def results(self) -> list[Any]:
        """The results of a detached session's run that is in progress, or else of the last one.

        It shows the run with its history, waits for its end, and raises what `run` raises. If it is
        cancelled, the run continues."""
        self._detached_client()
        return await self._run(None, self._audience())

    async def reports(self) -> list[Report]:
        """The reports of a detached session's run that is in progress, or else of the last one: the
        newest 20 000, and of older ones every n-th step, at most 10 000."""
        return await self._detached_client().reports()

    async def interrupt(self) -> bool:
        """End the run of a detached session after its step, if that ends within 2 s, or in it.
        A program that waits for the run gets GroupAborted. Returns whether there was a run."""
        return await self._detached_client().interrupt()

    async def stop(self) -> None:
        """End the session, even a detached one: a run in progress is aborted, the actors end, and
        their resources are free when this returns. A program that waits for the run gets
        GroupAborted.

        It ends a detached session even after `close` or the end of `async with`, but raises
        StartupError if this process has changed clusters since; before the start it raises
        RuntimeError. `await cl.attach("night").stop()` does not attach first, so that it also ends
        a session whose host hangs; it raises StartupError if there is no such session."""
        # What has the name now may be another program's.
        is_new = self._state is SessionState.NEW and self._starting is None
        if is_new and self._kind is SessionKind.DETACHED:
            raise RuntimeError(REMEDIES[self._state])
        try:
            if not isinstance(self._holder, DetachedClient):
                await self._find_client()
            if isinstance(self._holder, DetachedClient):
                await self._holder.stop()
        finally:
            await self.close()

    async def _find_client(self) -> None:
        """Have a client for `stop`, where this object has none and its session may be there."""
        former = self._former_client
        # Nothing is left of a start that has failed.
        if self._kind is not SessionKind.ATTACHED and former is None:
            return
        if former is not None and former.is_over:
            return
        self._connection = connecting.connect(self._address, self._log_to_driver, may_start=False)
        if former is None or await former.is_there():
            self._holder = await DetachedClient.named(self._detached_name)
            return
        there = self._former_connection
        if there is not None and there.cluster != self._connection.cluster:
            raise StartupError(
                "this process is connected to another cluster than the one of the session "
                f"{self._detached_name!r}",
                f"`chorusline stop {self._detached_name} --address {there.cluster}` ends it",
            )

    def _detached_client(self) -> DetachedClient:
        if not isinstance(self._holder, DetachedClient):
            raise RuntimeError(
                REMEDIES[self._state]
                if self._kind is not SessionKind.OWN
                else "only a detached session outlives its call: write Session(name='night', "
                "detached=True), or cl.attach('night') for one that is there"
            )
        return self._holder


def attach(
    name: str,
    *,
    address: str | None = None,
    on_report: Callable[[Report], None] | None = None,
    live_view: bool = True,
    progress: bool | Progress = True,
    log_to_driver: bool = True,
) -> Session:
    """The detached session of that name, which this program or another one has started.

        night = await cl.attach("night")
        results = await night.results()    # shows the run, with its history, until it has ended

    name: as in `Session(name=..., detached=True)`.
    address: of the session's cluster; default RAY_ADDRESS, or else the cluster of this machine.
    on_report, live_view, progress, log_to_driver: as in Session.

    `async with cl.attach("night") as night:` attaches, and detaches at the end;
    `await cl.attach("night")` only attaches. Both raise StartupError if there is no such session.
    """
    check_attachable(name)
    session = Session(
        address=address,
        on_report=on_report,
        live_view=live_view,
        progress=progress,
        log_to_driver=log_to_driver,
        name=name,
        detached=True,
    )
    session._kind = SessionKind.ATTACHED
    return session
