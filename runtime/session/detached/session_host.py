"""The actor that holds a detached session, as a program holds any other session.

It has the same `LocalSession` as a session of a program, on its own event loop: recruiting, seats,
the next driver after one that died, spare workers. It never imports the user's code: functions
come, and results go, as bytes. A program that starts the session or attaches to it has a client
(client.py), which asks the session host. Clients may come and go.

If the session host dies, Ray starts it again; meanwhile the ranks train on. It finds its workers,
ends the driver, which had answered to the session host before, and a new driver asks the ranks how
things stand, as after the death of a driver.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import threading
import time
import uuid
from collections import deque
from typing import Any

import ray
from ray import cloudpickle

from chorusline.actors.errors import StartupError
from chorusline.actors.messages.messages import (
    Report,
    RunFailed,
    RunRequest,
    RunSucceeded,
    WorkerSnapshot,
)
from chorusline.actors.messages.whereabouts import Whereabouts
from chorusline.actors.parcels.parcel import Parcel
from chorusline.actors.ray_calls.calls import GONE, end_with_parent
from chorusline.actors.ray_calls.detached_actors import DetachedActors
from chorusline.actors.worker_group.news import News
from chorusline.collectives.contract.errors import GroupAborted
from chorusline.collectives.diagnosis.debug import DebugLevel, set_debug_level

from ..holding.local_session import LocalSession
from ..holding.options import SessionOptions
from ..showing.news_pump import LAST_PULL_S, Audience
from ..showing.starting import Starting
from .history import Bookmark, RunHistory
from .status import RESULTS_KEPT_S, DetachedStatus

_LINES = 200
"""Lines of the log that are kept for a program that waits for the start."""

_CLIENT_S = 15.0
"""Seconds after which a client that says nothing is gone."""

_ENDING_S = 10.0
"""Seconds for which a client's call waits for the end of a run; it asks again."""

_AGAIN_S = 0.1
_LOOK_S = 1.0
_SNAPSHOT_S = 1.0
_STOP_S = 30.0
_REASON_S = 2.0
"""Seconds for the clients to read why the session has ended."""

_NOT_AGAIN = -1
"""In place of the number of restarts: the session is starting, and nobody knows its seats yet, or
it was stopped. A session host that is started again then ends."""

_MOST_OUTCOME_BYTES = 1 << 20
"""Bytes of results that the cluster's head remembers for a session host that is started again."""

Ending = RunSucceeded | RunFailed | BaseException


class _Run:
    """One run. ending: None while it is in progress. token: of the call that has begun it."""

    def __init__(self, number: int, token: str, host: str, began: float) -> None:
        self.number = number
        self.token = token
        self.began = began  # seconds since the epoch: one that is started again reads it
        self.took_s = 0.0
        self.history = RunHistory(host)
        self.ending: Ending | None = None  # None: the run is in progress
        self.is_over = asyncio.Event()
        self.task: asyncio.Task[None] | None = None  # None: before it begins
        self.is_interrupted = False
        self.why = ""


class SessionHost:
    """Holds the actors of the detached session `name`."""

    def __init__(self, name: str, options: SessionOptions, idle_timeout_s: float) -> None:
        end_with_parent()
        self._name = name
        self._detached = DetachedActors(name)
        self._options = options
        self._idle_timeout_s = idle_timeout_s
        self._local = LocalSession(options, self._detached)
        self._id = uuid.uuid4().hex[:8]
        self._runs: list[_Run] = []  # the run before the last one, and the last one
        self._clients: dict[str, float] = {}  # when each was heard last
        self._busy_at = time.monotonic()
        self._ended = ""
        self._ended_at = 0.0  # seconds since the epoch, as `began` of a run
        self._restarts = 0
        self._is_up = asyncio.Event()
        self._start_error: BaseException | None = None  # None: the start has not failed
        # Ray starts a session host again with its id.
        saved = self._detached.saved("session")
        is_again = saved is not None and saved[0] == ray.get_runtime_context().get_actor_id()
        # The restarts, and the end of the session, that were noted; None: this is the first start.
        self._again: tuple[int, str, float] | None = saved[1:] if is_again else None
        self._tasks: set[asyncio.Task[None]] = set()
        self._start_lines: deque[tuple[int, str]] = deque(maxlen=_LINES)
        log = logging.getLogger("chorusline")
        log.addHandler(_Collecting(self._start_lines))
        log.propagate = False
        self._self = ray.get_runtime_context().current_actor
        self._has_begun = False
        threading.Thread(target=self._begin_to_live, name="live", daemon=True).start()

    def __repr__(self) -> str:
        """As Ray's dashboard and logs name this actor."""
        return f"session host of {self._name}"

    # ── Beginning and end ────────────────────────────────────────────────────────────────────────

    def _begin_to_live(self) -> None:
        """Have this session host call itself: Ray drops the calls of a program that dies before
        they begin. A session host that Ray has started again is refused its own first call if Ray
        does not count it as alive yet; it would be silent forever."""
        while not self._has_begun:
            with contextlib.suppress(*GONE):
                self._self.live.remote().future().result()
            time.sleep(_AGAIN_S)

    async def live(self) -> None:
        """Start the session, or continue with it; this session host's own call."""
        # It may be called more than once, until one call has come through.
        if self._has_begun:
            return
        self._has_begun = True
        try:
            if self._again is not None:
                await self._wake(*self._again)
            else:
                self._detached.clear()  # What a session host has left that was killed for good.
                # Until it has started: a host that dies now leaves nothing that could be taken
                # over.
                self._note_restarts(_NOT_AGAIN)
                with Starting(None) as starting:
                    await self._local.start(starting, is_local=False)
            self._note_restarts(self._restarts)
        # Its client hears the reason, and then the name is free again.
        except Exception as error:
            await self._local.close()
            self._start_error = error
            # For programs that have attached meanwhile: there is nothing to run a function on.
            if not self._ended:
                self._ended, self._ended_at = f"it did not start: {error}", time.time()
            self._is_up.set()
            await asyncio.sleep(_REASON_S)
            await self.leave()
        self._busy_at = time.monotonic()
        self._is_up.set()
        self._own(self._watch_idleness(), "idleness")

    async def started(self) -> None:
        """Returns when the workers have started. Raises what LocalSession.start raises."""
        await self._is_up.wait()
        if self._start_error is not None:
            raise self._start_error

    async def _wake(self, restarts: int, ended: str, ended_at: float) -> None:
        """This session host was started again: find what the one before had."""
        self._ended, self._ended_at = ended, ended_at
        if restarts == _NOT_AGAIN:
            raise StartupError(f"the session {self._name!r} has not started", "its host died")
        self._restarts = restarts + 1
        record, request = self._detached.saved("run"), self._detached.saved("request")
        if ended:
            # The host before may have died before it had ended them.
            self._detached.end_actors()
            request = None  # No worker holds anything of it.
        else:
            # Workers know a run by the number of its request: a run that had to begin more than
            # once has taken several.
            last = request.run if request else record[0] if record else -1
            await self._local.start_again(last + 1)
        if record is not None:
            number, token, began, took_s, ending = record
            run = _Run(number, token, self._id, began)
            self._runs = [run]
            # The run had not ended, so workers may still be in it.
            if ending is None and request is not None:
                self._carry_out(run, None, request)
            else:
                run.took_s = took_s
                run.ending = cloudpickle.loads(ending) if ending else _forgotten(ending)
                if ended and ending is None:
                    run.ending, run.took_s = GroupAborted(0, [], ended), ended_at - began
                # What the workers still hold of it, for clients that have not heard all.
                if request is not None:
                    await self._read_again(run.history, request.run)
                run.is_over.set()

    async def _read_again(self, history: RunHistory, run: int) -> None:
        has_more, worker_group = True, self._local.worker_group
        while has_more and worker_group is not None:
            news = await worker_group.listener.pull(run, LAST_PULL_S)
            history.add(news)
            has_more = news.has_more

    def _note_restarts(self, restarts: int) -> None:
        """For a session host that is started again."""
        actor_id = ray.get_runtime_context().get_actor_id()
        self._detached.save("session", (actor_id, restarts, self._ended, self._ended_at))

    def _own(self, what: Any, name: str) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.create_task(what, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _watch_idleness(self) -> None:
        while not self._ended:
            await asyncio.sleep(_LOOK_S)
            self._forget_clients()
            # A client that only looks keeps the session as well.
            if self._clients or self._is_running:
                self._busy_at = time.monotonic()
            elif self._idle_s > self._idle_timeout_s:
                await self._end(f"it was idle for its limit of {self._idle_timeout_s:g} s")
        # The workers are gone; results cost only this process.
        await asyncio.sleep(RESULTS_KEPT_S - (time.time() - self._ended_at))
        self._self.leave.remote()

    async def _end(self, why: str) -> None:
        """End the workers and give their resources back; results and reports stay here."""
        self._ended, self._ended_at = why, time.time()
        self._note_restarts(self._restarts)
        run = self._run
        if run is not None and run.task is not None and not run.is_over.is_set():
            run.why = why
        # A node that does not answer must not keep the session from ending.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STOP_S):
                await self._local.close()
                if run is not None:
                    await run.is_over.wait()

    async def stop(self) -> None:
        """End the session at once. Returns when its resources are free."""
        if not self._ended:
            await self._end("it was stopped")
        self._note_restarts(_NOT_AGAIN)  # Else its results would keep its name, for a day.
        self._own(self._leave_soon(), "leave")

    async def _leave_soon(self) -> None:
        await asyncio.sleep(_REASON_S)
        self._self.leave.remote()

    async def leave(self) -> None:
        """End this process for good."""
        self._detached.clear()
        # Not exit_actor: it waits for calls of clients that are on their way.
        ray.kill(self._self)
        await asyncio.sleep(_STOP_S)

    # ── Runs ─────────────────────────────────────────────────────────────────────────────────────

    async def begin(self, token: str, program: Parcel, debug_level: DebugLevel) -> int | str:
        """Begin a run; return its number, or why it is refused. The same token begins one run."""
        await self._is_up.wait()
        # A client that has had no answer asks again, perhaps the host that was started since.
        for one in self._runs:
            if one.token == token:
                return one.number
        if self._ended:
            return f"the session {self._name!r} has ended: {self._ended}; make a new one"
        if self._is_running:
            return (
                f"the session {self._name!r} runs another function; wait for it with results(), or "
                "end it with interrupt()"
            )
        set_debug_level(debug_level)
        number = self._run.number + 1 if self._run else 0
        run = _Run(number, token, self._id, time.time())
        self._detached.save("request", None)  # First: the record is not to go with an older one.
        self._record(run)
        # The run before is kept: its clients may hear of its end after another one has begun a run.
        self._runs = [*self._runs[-1:], run]
        self._carry_out(run, program, None)
        return number

    def _carry_out(self, run: _Run, program: Parcel | None, begun: RunRequest | None) -> None:
        run.task = self._own(self._until_over(run, [program], begun), f"run-{run.number}")
        # Not in the coroutine: a task that is cancelled before its first step never enters it.
        run.task.add_done_callback(lambda _: self._note_end(run))

    def _note_end(self, run: _Run) -> None:
        if run.ending is None:
            run.ending = GroupAborted(0, [], run.why or "it was cancelled")
        run.took_s = time.time() - run.began
        self._busy_at = time.monotonic()
        run.is_over.set()
        self._record(run)

    async def _until_over(
        self, run: _Run, program: list[Parcel | None], begun: RunRequest | None
    ) -> None:
        """program: taken out of the list, so that no frame of this process holds the arguments
        beside Ray's object store as long as the run lasts."""
        audience = Audience(None, None, None, has_output=False, record=run.history.add)
        try:
            run.ending = await self._local.run(program.pop(), audience, begun)
        except asyncio.CancelledError:
            run.ending = GroupAborted(await self._generation(), [], run.why or "it was cancelled")
        except Exception as error:
            _drop_frames(error)
            run.ending = error

    async def _generation(self) -> int:
        seen = await self._local.ask_workers(_SNAPSHOT_S)
        return max((one.generation for one in seen if not isinstance(one, str)), default=0)

    def _record(self, run: _Run) -> None:
        """For a session host that is started again."""
        ending = None
        if run.ending is not None:
            with contextlib.suppress(Exception):
                ending = cloudpickle.dumps(run.ending)
            # What cannot be pickled, or is too large for the head's memory, is told as forgotten.
            ending = ending if ending and len(ending) < _MOST_OUTCOME_BYTES else b""
        self._detached.save("run", (run.number, run.token, run.began, run.took_s, ending))

    @property
    def _run(self) -> _Run | None:
        """The last run; None before the first one."""
        return self._runs[-1] if self._runs else None

    def _kept(self, number: int) -> _Run | None:
        return next((one for one in self._runs if one.number == number), None)

    @property
    def _is_running(self) -> bool:
        return self._run is not None and not self._run.is_over.is_set()

    @property
    def _idle_s(self) -> float:
        return time.monotonic() - self._busy_at

    async def ending(self, run: int) -> Ending | None:
        """How a run has ended; None if it has not after a while. Raises nothing of the run's."""
        await self._is_up.wait()
        this = self._kept(run)
        if this is None:
            return _forgotten(b"")
        # Of a client that is gone, the call would stay here until the run is over; Ray answers
        # nobody any more when a thousand have come together.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(this.is_over.wait(), _ENDING_S)
        return this.ending if this.is_over.is_set() else None

    async def interrupt(self, why: str) -> bool:
        """Stop the run in progress, after its step if that ends soon; whether there was one.
        Returns when the ranks have stopped."""
        await self._is_up.wait()
        run = self._run
        if run is None or run.task is None or run.is_over.is_set():
            return False
        # Once: a second cancellation would break off what the first one does to end the run.
        if not run.is_interrupted:
            run.is_interrupted, run.why = True, why
            run.task.cancel()
        await run.is_over.wait()
        return True

    # ── Who looks ────────────────────────────────────────────────────────────────────────────────

    async def news_since(
        self, client: str, run: int, place: Bookmark | None, whole: bool
    ) -> tuple[News, Bookmark | None]:
        """What a run has reported and printed since a place; None: since the beginning
        (RunHistory.beginning)."""
        await self.here(client)
        await self._is_up.wait()
        this = self._kept(run)
        if this is None:
            return News(), place
        return this.history.since(place or this.history.beginning(whole=whole))

    async def reports(self) -> list[Report]:
        await self._is_up.wait()
        return self._run.history.reports() if self._run is not None else []

    async def here(self, client: str) -> None:
        """A client is there, and stays attached for a while."""
        self._clients[client] = time.monotonic()

    async def gone(self, client: str) -> None:
        self._clients.pop(client, None)

    def _forget_clients(self) -> None:
        late = time.monotonic() - _CLIENT_S
        self._clients = {who: at for who, at in self._clients.items() if at > late}

    async def start_lines(self, since: int) -> list[str]:
        """Lines about the start, for whoever waits for it."""
        return [line for number, line in self._start_lines if number >= since]

    async def status(self, timeout_s: float = _SNAPSHOT_S) -> DetachedStatus:
        """timeout_s: seconds that silent workers delay it."""
        if self._again is not None:
            await self._is_up.wait()  # It does not know yet what it has.
        run = self._run
        seen = await self._local.ask_workers(timeout_s) if not self._ended else ()
        ran_s = 0.0
        if run is not None:
            ran_s = run.took_s if run.is_over.is_set() else time.time() - run.began
        self._forget_clients()
        worker_group = self._local.worker_group
        is_idle = not (self._clients or self._is_running or self._ended)
        return DetachedStatus(
            self._name,
            None if run is None else run.number,
            self._is_running,
            ran_s,
            seen,
            worker_group.num_spares if worker_group is not None else 0,
            len(self._clients),
            self._idle_s if is_idle else None,
            self._idle_timeout_s,
            self._restarts,
            self._ended,
            time.time() - self._ended_at if self._ended else 0.0,
            self._options.checkpoint,
            self._options.seed,
        )

    async def whereabouts(
        self, timeout_s: float
    ) -> dict[int, tuple[WorkerSnapshot, Whereabouts] | str]:
        return await self._local.whereabouts(timeout_s)


def _drop_frames(error: BaseException) -> None:
    """Have an error hold no frames: their variables would keep the arguments of its run for as long
    as the run is kept. A client gets the error pickled, without them."""
    error.__traceback__ = error.__context__ = error.__cause__ = None
    for part in error.exceptions if isinstance(error, BaseExceptionGroup) else ():
        _drop_frames(part)


def _forgotten(recorded: bytes | None) -> RuntimeError:
    """recorded: how the run has ended; None if it had not, and empty if that was too large."""
    if recorded is None:
        return RuntimeError(
            "the session actor died before the ranks received the run; call it again"
        )
    return RuntimeError(
        "the results of this run are gone: the session keeps those of its last two runs or, if its "
        "actor has died since, up to 1 MiB of the last one's. Have the function write large "
        "results to files"
    )


class _Collecting(logging.Handler):
    """Keeps the log's newest lines, with their numbers: they have no other reader here."""

    def __init__(self, lines: deque[tuple[int, str]]) -> None:
        super().__init__(logging.WARNING)
        self._lines = lines
        self._numbers = itertools.count()

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append((next(self._numbers), record.getMessage()))
