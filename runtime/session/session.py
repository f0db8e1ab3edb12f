"""`Session`: workers that run the user's functions; `run`: a session for one function."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import ray
from ray import cloudpickle

from actors import fault_plan
from actors.calls import head_stays_gone
from actors.crew.crew import HEAD_ANSWER_S, Crew
from actors.errors import DriverLost
from actors.messages import Report, RunRequest, RunSucceeded, WorkerSnapshot
from actors.outcomes import raise_failure
from actors.parcels.parcel import Parcel
from collectives.diagnosis.debug import get_debug_level

from .. import notebook
from ..checkpoint.config import CheckpointConfig
from ..program.sending import HEAVY_BYTES, check_not_own, heavy_parts, packed_program
from . import placement
from .hearing import Audience, hearing
from .holders import telling_who_holds
from .options import (
    DEFAULT,
    Default,
    check_accelerator,
    check_gpus_are_rays_to_deal,
    check_kinds,
    check_seconds,
    checked_environment,
    checked_failures,
    checked_labels,
    checked_progress,
    checked_range,
    checked_spares,
)
from .progress import Progress
from .seats import Seats
from .state import REMEDIES, SessionSnapshot, SessionState, how_interrupted
from .trace import as_json, traced
from .waiting import awaited, telling, told_if_slow

_log = logging.getLogger("chorusline")

_ASK_S = 5.0

_BEGINNINGS = 3
"""How often one call of `run` may begin: workers may have died since the last run, and more
workers while those were replaced."""


class Session:
    """Workers that stay: start them once, and run one function after another on them.

        async with Session(num_workers=4) as session:
            results = await session.run(train, epochs=3)

    num_workers: the number of workers, or a pair (fewest, most). With a pair the session starts
        with as many workers as fit, and adds workers when there is room; in the middle of a run
        only if its function can run again (ctx.register). Ray's autoscaler, if the cluster has
        one, is asked for the workers that are missing.
    max_failures: a run fails when it loses more workers than this; None: any number may be lost,
        as long as `fewest` are left. Default: 0, or None if num_workers is a pair. A run goes on
        without the lost workers where its function can (ZeroRedundancyOptimizer, `replicas`).
    spares: workers that have started and loaded the program, and wait: one takes the seat of a lost
        worker at once, and another one is started behind it. They need room of their own.
    use_gpu: whether each worker gets a GPU, `ctx.device`; it sees all GPUs of its node.
    resources_per_worker: Ray's resource names and amounts, over the default of one CPU (a share of
        the CPUs on a cluster that the session starts itself).
    placement_strategy: "PACK", "SPREAD", "STRICT_PACK" or "STRICT_SPREAD", as in Ray.
    timeout_s: deadline of each collective and of the ranks' meeting.
    startup_timeout_s: deadline for placing the workers, also while an autoscaler starts nodes for
        them, and again for starting them.
    address: of a running cluster; default RAY_ADDRESS; without both the session starts a local
        cluster, and `close` stops it.
    on_report: called in this process's event loop with each Report of each rank.
    live_view: in a notebook, show the ranks and plots of their reports while a function runs.
    progress: elsewhere, show on stderr how far a run is, as bars on a terminal and as lines in a
        log. False: not at all. A Progress: in that one, which may know the number of steps.
    checkpoint: where every run saves what it has registered, and where it resumes from.
    seed: what `ctx.seed(seed)` does, at the beginning of every run.
    pause_s: how long a run waits for new workers when fewer than `fewest` are left.
    env_vars: environment variables of the workers and of the driver actor.
    runtime_env: their environment, as Ray takes it ("pip", "env_vars", …).
    label_selector: of the nodes on which workers may run, as in Ray:
        {"ray.io/market-type": "spot"}.
    accelerator_type: the GPU that their nodes have, as in Ray ("A100"); with use_gpu.
    log_to_driver: whether the ranks' output is printed here, in lines that begin with `[rank 0]`;
        and, if the session connects to Ray, whether Ray prints the output of other processes.

    Raises StartupError if the workers cannot be started. A session must be closed: Ray runs no
    clean-up code in abandoned actors.
    """

    def __init__(
        self,
        num_workers: int | tuple[int, int] = 1,
        *,
        spares: int = 0,
        use_gpu: bool = False,
        resources_per_worker: Mapping[str, float] | None = None,
        placement_strategy: str = "PACK",
        timeout_s: float = 60.0,
        startup_timeout_s: float = 60.0,
        address: str | None = None,
        on_report: Callable[[Report], None] | None = None,
        live_view: bool = True,
        progress: bool | Progress = True,
        checkpoint: CheckpointConfig | None = None,
        seed: int | None = None,
        max_failures: int | None | Default = DEFAULT,
        pause_s: float = 300.0,
        env_vars: Mapping[str, str] | None = None,
        runtime_env: Mapping[str, Any] | None = None,
        label_selector: Mapping[str, str] | None = None,
        accelerator_type: str | None = None,
        log_to_driver: bool = True,
    ) -> None:
        self._fewest, self._most = checked_range(num_workers)
        self._max_failures = checked_failures(max_failures, isinstance(num_workers, tuple))
        self._spares = checked_spares(spares, self._max_failures, placement_strategy)
        placement.check(resources_per_worker, use_gpu, placement_strategy)
        check_seconds(timeout_s=timeout_s, startup_timeout_s=startup_timeout_s, pause_s=pause_s)
        check_accelerator(accelerator_type, use_gpu)
        self._labels = checked_labels(label_selector, placement_strategy)
        self._environment = checked_environment(runtime_env, env_vars)
        check_gpus_are_rays_to_deal(self._environment, use_gpu)
        check_kinds(address, on_report, checkpoint, seed)
        self._progress = checked_progress(progress, on_report)
        self._fault_plan = fault_plan.ordered(self._most)
        self._use_gpu = use_gpu
        self._accelerator_type = accelerator_type
        self._pause_s = pause_s
        self._resources_per_worker = resources_per_worker
        self._placement_strategy = placement_strategy
        self._timeout_s = timeout_s
        self._startup_timeout_s = startup_timeout_s
        self._address = address
        self._on_report = on_report
        self._live_view = live_view
        self._seen: tuple[WorkerSnapshot | str, ...] = ()  # the workers' last answers, by seat
        self._checkpoint, self._seed = checkpoint, seed
        self._log_to_driver = log_to_driver
        self._state = SessionState.NEW
        self._is_local = False  # True: this session has started the cluster, and stops it.
        self._seats: Seats | None = None
        self._crew: Crew | None = None
        self._next_run = 0
        self._has_told_weight = False

    @property
    def num_workers(self) -> int:
        """The number of workers now; before the start, the most that were asked for."""
        return self._crew.num_workers if self._crew else self._most

    @property
    def num_spares(self) -> int:
        """The number of workers in reserve that could take a seat now."""
        return self._crew.num_in_reserve if self._crew else 0

    @property
    def name(self) -> str:
        """As `chorusline status` lists it; empty unless the session is open."""
        return self._crew.name if self._crew else ""

    @property
    def state(self) -> SessionState:
        return self._state

    async def start(self) -> Session:
        """Connect to Ray, place and start the workers; return this session. `async with` calls it.

        If the start fails, nothing stays behind. A notebook's cell that runs again closes the
        session that it had started before.
        """
        if self._state is not SessionState.NEW:
            raise RuntimeError(f"the session is {self._state.value}; make a new Session to start")
        async with notebook.waking():
            await notebook.close_earlier_session(self)
            await self._start()
        return self

    async def _start(self) -> None:
        try:
            with told_if_slow("Ray: a cluster that starts here, or the answer of one that runs"):
                self._is_local = placement.connect(self._address, self._log_to_driver)
            async with telling(lambda: awaited(self._crew, self._fewest, self._startup_timeout_s)):
                bundle = placement.bundle_of_worker(
                    self._most + self._spares,
                    use_gpu=self._use_gpu,
                    resources_per_worker=self._resources_per_worker,
                    accelerator_type=self._accelerator_type,
                    is_local=self._is_local,
                )
                strategy = self._placement_strategy
                wait_s = self._startup_timeout_s
                async with telling_who_holds(bundle, self._fewest, self, wait_s):
                    first = await placement.place(
                        bundle,
                        self._fewest,
                        self._most,
                        strategy,
                        wait_s,
                        may_grow=not self._is_local,
                        labels=self._labels,
                    )
                self._seats = Seats(first, bundle, self._most, strategy, self._labels, self._spares)
                self._crew = Crew(
                    self._seats,
                    self._fewest,
                    use_gpu=self._use_gpu,
                    driver_options=placement.options_of_driver(),
                    environment=self._environment,
                )
                await self._crew.assemble(self._startup_timeout_s)
            if notebook.in_kernel():
                await self._ask_workers(_ASK_S)  # _repr_html_ shows the answers.
        except BaseException as error:
            await self.close()  # Also after a cancellation: nothing may stay behind.
            notebook.show_once(notebook.hint_at_other_sessions(error, self))
            raise
        self._state = SessionState.READY

    async def close(self) -> None:
        """End everything that the session started; may be called more than once.

        The session's resources are free in the cluster when it returns. A function that still runs
        is aborted: its caller gets GroupAborted.
        """
        was_running = self._state is SessionState.RUNNING
        self._state = SessionState.CLOSED
        crew, self._crew = self._crew, None
        seats, self._seats = self._seats, None
        is_local, self._is_local = self._is_local, False
        if crew and ray.is_initialized() and await head_stays_gone(HEAD_ANSWER_S):
            crew = seats = None  # Ray's calls would wait for it for a minute, and end this process.
        # End actors, then their resources, then the cluster, also if one of these fails. After a
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
                    ray.shutdown()

    async def __aenter__(self) -> Session:
        return await self.start()

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def run(self, train: Callable[..., Any], /, **kwargs: Any) -> list[Any]:
        """Call `train(ctx, **kwargs)` on every rank; return the results, by rank.

        train: `def` or `async def`. The function, its arguments and its results are pickled.

        If a rank raises, all ranks are stopped, and this method raises the same exception, with
        the rank and its traceback in a note. It raises RankFailed if the exception cannot be
        rebuilt in this process, WorkerLost or DriverLost if a process died, StateLost if the run
        went on and nobody holds some part of the state any more, StartupError if a lost worker
        cannot be replaced, CheckpointError if the storage path cannot be used or its content does
        not fit, and TypeError, before anything is sent, if `train` or an argument cannot be
        pickled. Afterwards the session can run again;
        with checkpoints the next run resumes from the newest complete one.

        If the call is cancelled, it stops all ranks before it returns.
        """
        return await self._run(self._packed(train, kwargs), self._audience())

    def _audience(self, *, always_prints: bool = False) -> Audience:
        """Who hears of a run: the live view in a notebook, and elsewhere the progress."""
        view = progress = None
        if notebook.in_kernel():
            view = notebook.LiveView(self._ask_workers) if self._live_view else None
        else:
            progress = Progress.of_places() if self._progress is True else self._progress or None
        has_output = always_prints or self._log_to_driver
        return Audience(self._on_report, view, progress, has_output)

    def _packed(self, train: Callable[..., Any], kwargs: Mapping[str, Any]) -> Parcel:
        program = packed_program(train, kwargs, self._checkpoint, self._seed)
        if program.nbytes > HEAVY_BYTES and not self._has_told_weight:
            self._has_told_weight = True
            _log.warning("%s", heavy_parts(train, kwargs, program.nbytes))
        return program

    async def snapshot(self, timeout_s: float = 2.0) -> SessionSnapshot:
        """The state of the session, its driver and its workers, also while a function runs. Silent
        workers delay it by at most `timeout_s`."""
        if self._crew is None:
            return SessionSnapshot(self._state, None, ())
        driver, self._seen = await self._crew.snapshots(timeout_s)
        return SessionSnapshot(self._state, driver, self._seen)

    async def trace(self, path: str | Path, timeout_s: float = 2.0) -> int:
        """Write the last collectives of all ranks to a file for ui.perfetto.dev (session/trace.py);
        return their number. It works while a function runs, and after one has failed."""
        if self._crew is None:
            raise RuntimeError(REMEDIES[self._state])
        document = as_json(*traced(await self._crew.whereabouts(timeout_s)))
        await asyncio.to_thread(Path(path).write_text, json.dumps(document))
        return sum(event["ph"] == "X" for event in document["traceEvents"])

    def why_not_ready(self) -> str:
        """The reason why `run` would refuse, and the remedy; empty if the session is ready."""
        if self._state is SessionState.READY and not ray.is_initialized():
            return (
                "the session is gone: this process is no longer connected to Ray (ray.shutdown() "
                "was called, or another session that had started the cluster was closed); close "
                "this one and make a new Session"
            )
        return REMEDIES[self._state]

    async def _ask_workers(self, timeout_s: float) -> tuple[WorkerSnapshot | str, ...]:
        if self._crew is not None:
            self._seen = await self._crew.workers_seen(timeout_s)
        return self._seen

    def __repr__(self) -> str:
        return f"<Session {self._state.value}, {self.num_workers} workers>"

    def _repr_html_(self) -> str:
        return notebook.session_as_html(
            self._state.value, self._seen if self._state is not SessionState.CLOSED else ()
        )

    async def _run(self, program: Parcel, audience: Audience) -> list[Any]:
        """1. Replace the workers that are missing since the last run. 2. Run, and hand on reports
        meanwhile; if the run failed before any worker began, repeat from 1. 3. Rebuild the results,
        or the failure."""
        why_not = self.why_not_ready()
        if why_not:
            raise notebook.show_once(RuntimeError(why_not), f"RuntimeError: {why_not}")
        crew, view = self._crew, audience.view
        assert crew is not None
        self._state = SessionState.RUNNING
        error: BaseException | None = None
        try:
            payload = ray.put(program)  # Now: later the caller may change what it has passed.
            async with notebook.waking():
                for left in reversed(range(_BEGINNINGS)):
                    request = self._new_request(audience)
                    await crew.assemble(self._startup_timeout_s)  # 1.
                    try:  # 2.
                        async with hearing(crew.listener, request.run, audience):
                            outcome = await crew.run(request, payload)
                    except DriverLost as lost:
                        if lost.nobody_began and left:
                            continue
                        raise
                    if isinstance(outcome, RunSucceeded):
                        break
                    # A function that has begun may have had effects: it is not called again here.
                    if not (outcome.nobody_began and left):
                        raise_failure(outcome)
        except BaseException as raised:
            error = raised
            raise
        finally:
            if self._state is SessionState.RUNNING:  # `close` may have been called meanwhile.
                self._state = SessionState.READY
            if view is not None:
                await view.finish(error)
            if error is not None:
                notebook.show_once(error, how_interrupted(error, crew.is_assembled))
        assert isinstance(outcome, RunSucceeded)
        return [cloudpickle.loads(result) for result in outcome.results]

    def _new_request(self, audience: Audience) -> RunRequest:
        self._next_run += 1
        return RunRequest(
            self._next_run - 1,
            self._timeout_s,
            audience.wants_reports,
            get_debug_level(),
            self._fewest,
            self._max_failures,
            self._pause_s,
            last_save_s=self._checkpoint.timeout_s if self._checkpoint is not None else None,
            fault_plan=self._fault_plan,
        )


def run(
    train: Callable[..., Any],
    /,
    *,
    num_workers: int | tuple[int, int] = 1,
    spares: int = 0,
    use_gpu: bool = False,
    resources_per_worker: Mapping[str, float] | None = None,
    placement_strategy: str = "PACK",
    timeout_s: float = 60.0,
    startup_timeout_s: float = 60.0,
    address: str | None = None,
    on_report: Callable[[Report], None] | None = None,
    progress: bool | Progress = True,
    checkpoint: CheckpointConfig | None = None,
    seed: int | None = None,
    max_failures: int | None | Default = DEFAULT,
    pause_s: float = 300.0,
    env_vars: Mapping[str, str] | None = None,
    runtime_env: Mapping[str, Any] | None = None,
    label_selector: Mapping[str, str] | None = None,
    accelerator_type: str | None = None,
    log_to_driver: bool = True,
    **kwargs: Any,
) -> list[Any]:
    """Call `train(ctx, **kwargs)` on `num_workers` ranks; return the results, by rank.

    A session for one function, for programs without asyncio. The arguments that are named here are
    those of Session; all others go to `train`, whose own parameters need other names. Wrong
    arguments raise before Ray is started. Raises what Session and `Session.run` raise.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        pass
    else:
        raise RuntimeError(
            "chorusline.run starts an event loop, and this thread runs one already (a notebook, an "
            "async function); use `async with Session(...) as session: await session.run(...)`"
        )
    session = Session(
        num_workers,
        spares=spares,
        use_gpu=use_gpu,
        resources_per_worker=resources_per_worker,
        placement_strategy=placement_strategy,
        timeout_s=timeout_s,
        startup_timeout_s=startup_timeout_s,
        address=address,
        on_report=on_report,
        progress=progress,
        checkpoint=checkpoint,
        seed=seed,
        max_failures=max_failures,
        pause_s=pause_s,
        env_vars=env_vars,
        runtime_env=runtime_env,
        label_selector=label_selector,
        accelerator_type=accelerator_type,
        log_to_driver=log_to_driver,
    )
    check_not_own(train, seed)
    program = session._packed(train, kwargs)

    async def main() -> list[Any]:
        async with session:
            return await session._run(program, session._audience())

    return asyncio.run(main())
