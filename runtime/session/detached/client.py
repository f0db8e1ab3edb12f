"""A detached session, as a program sees it that has started it or is attached to it.

The client asks the session host, and shows what it hears as any session does. It holds nothing that
the session needs: when its process ends, however that comes about, the run continues.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
import uuid
import weakref
from typing import Any

import ray

from chorusline.actors.errors import StartupError
from chorusline.actors.messages.messages import Report, RunFailed, RunSucceeded, WorkerSnapshot
from chorusline.actors.parcels.parcel import Parcel
from chorusline.actors.ray_calls.calls import Actor, ActorGone, NoAnswer, answer
from chorusline.actors.ray_calls.detached_actors import SESSION_HOST, DetachedActors, names_of
from chorusline.actors.reporting.worker_logs import Position, Printed, unseen
from chorusline.actors.worker_group.news import News
from chorusline.collectives.diagnosis.debug import get_debug_level

from ..holding.options import SessionOptions
from ..showing.news_pump import Audience, delivered_news
from .history import Bookmark
from .session_host import SessionHost
from .status import RESULTS_KEPT_S, DetachedStatus, duration, not_found, taken

_HERE_S = 5.0
"""Seconds between two words of a client to the session host."""

_ANSWER_S = 30.0
_SOON_S = 1.0
_STOP_S = 40.0
"""Seconds for a session host to end its workers, for which it gives itself 30 s, and itself."""

_RESTART_S = 120.0
"""Seconds that Ray has to start a session host again that died. Its processes run at a low
priority: on a machine that is busy with other things they take far longer than the usual 4 s."""

_AGAIN_S = 0.2
_LOOK_S = 0.5

_log = logging.getLogger("chorusline")


class DetachedClient:
    """A session host, asked by this process. knows_all: as of a Listener (worker_group/news.py).
    is_over: the session has ended, as far as this client has heard."""

    knows_all = True

    def __init__(self, name: str, host: Actor) -> None:
        self.name = name
        self._host = host
        self._id = uuid.uuid4().hex
        self._place: Bookmark | None = None  # None: at the beginning of what the session host has
        self._whole = False
        self._latest: dict[int, float] = {}  # by rank, when its last report was made
        # By a worker's files, how far its output was shown.
        self._shown: dict[tuple[str, tuple[str, str]], Position] = {}
        self._reads_again = False  # Another session host reads what was read before.
        self._is_away = threading.Event()
        self.is_over = False
        self.last: DetachedStatus | None = None  # None: before the first answer

    # ── How to come by one ───────────────────────────────────────────────────────────────────────

    @classmethod
    async def started(
        cls,
        name: str,
        options: SessionOptions,
        idle_timeout_s: float,
    ) -> DetachedClient:
        """Start a session under a name. Raises StartupError, even if the name is taken.

        A session of that name that has ended makes room.
        """
        detached = DetachedActors(name)
        # A name stands for one session: another one is refused, unless it has ended.
        if (there := detached.host()) is not None:
            await cls._make_room(name, there)
        environment = options.environment
        of_actor = detached.options_of_host()
        of_actor |= {"runtime_env": environment} if environment else {}
        try:
            actor: Any = ray.remote(SessionHost)
            host = actor.options(**of_actor).remote(name, options, idle_timeout_s)
        except ValueError:  # Another program was faster.
            raise taken(name, None) from None
        client = cls(name, host)
        try:
            await client._tell_until_up(host.started.remote())
            await client.status()
            client._stay()
        except ActorGone as gone:
            raise StartupError(
                f"the session actor of {name!r} did not start", gone.detail
            ) from None
        # Even after a cancellation: a session that nobody has got must not keep workers.
        except BaseException:
            await asyncio.shield(cls._undo(detached, host))
            raise
        return client

    @staticmethod
    async def _undo(detached: DetachedActors, host: Actor) -> None:
        """End a session host, and what it has started or asked for: its placement groups outlive
        it."""
        ray.kill(host)
        # What is there may be another program's, which has got the name: that session clears what
        # the one before has left.
        if await _until_gone(detached.name, host) and not await asyncio.to_thread(detached.host):
            await asyncio.to_thread(detached.clear)

    @staticmethod
    async def _make_room(name: str, host: Actor) -> None:
        status = None
        with contextlib.suppress(ActorGone, NoAnswer):
            status = await answer(host.status.remote(), _ANSWER_S)
        if status is None or not status.ended:
            raise taken(name, status)
        if status.run is not None:
            _log.warning(
                "the earlier session %r %s; the new one takes its name, and deletes the results of "
                "its last run",
                name,
                status.in_words,
            )
        with contextlib.suppress(ActorGone, NoAnswer):
            await answer(host.stop.remote(), _ANSWER_S)
        await _until_gone(name, host)

    async def _tell_until_up(self, start: Any) -> None:
        """Wait for the session's start, and say meanwhile what it says."""
        up = asyncio.ensure_future(answer(start))
        num_shown = 0
        try:
            while not up.done():
                await asyncio.wait([up], timeout=_LOOK_S)
                with contextlib.suppress(ActorGone, NoAnswer):
                    lines = await answer(self._host.start_lines.remote(num_shown), _ANSWER_S)
                    num_shown += len(lines)
                    for line in lines:
                        _log.warning("%s", line)
            up.result()
        finally:
            up.cancel()

    @classmethod
    async def found(cls, name: str) -> DetachedClient:
        """The client of a session that is there. Raises StartupError."""
        client = await cls.named(name)
        await client.status()
        client._stay()
        return client

    @classmethod
    async def named(cls, name: str) -> DetachedClient:
        """A client that is not attached: the session host may not answer. Raises StartupError if
        there is none."""
        host = await asyncio.to_thread(DetachedActors(name).host)
        if host is None:
            raise not_found(name, await asyncio.to_thread(names_of, SESSION_HOST))
        return cls(name, host)

    def _stay(self) -> None:
        """Be attached until `close`, or until nobody has this client any more, even while this
        process's loop is busy with other things."""
        host, its_id, is_away = self._host, self._id, self._is_away  # A thread holds what it names.

        def say() -> None:
            # Ray would start or join a cluster for a call after a ray.shutdown().
            while not is_away.wait(_HERE_S) and ray.is_initialized():
                with contextlib.suppress(Exception):
                    host.here.remote(its_id)

        host.here.remote(its_id)
        weakref.finalize(self, is_away.set)
        threading.Thread(target=say, name=f"attached-{self.name}", daemon=True).start()

    async def close(self) -> None:
        """Detach from the session, which continues."""
        self._is_away.set()  # First: a cancellation may come while the session host is asked.
        is_connected = ray.is_initialized()
        # It may have ended since the last answer: another program has stopped it, perhaps.
        if is_connected and not self.is_over:
            await self._look()
        if not self.is_over and not (self.last and self.last.ended):
            _log.warning("%s", self.how_interrupted())
        if is_connected:
            with contextlib.suppress(ActorGone, NoAnswer):
                await answer(self._host.gone.remote(self._id), _SOON_S)

    # ── What is asked ────────────────────────────────────────────────────────────────────────────

    async def _ask(self, method: str, *arguments: Any, timeout_s: float | None = _ANSWER_S) -> Any:
        """Call the session host, again if it dies meanwhile: Ray starts another one."""
        give_up_at: float | None = None
        while True:
            self._check_connected()
            try:
                return await answer(getattr(self._host, method).remote(*arguments), timeout_s)
            except ActorGone as gone:
                self._check_connected()
                is_there = await self.is_there()
                give_up_at = give_up_at or time.monotonic() + _RESTART_S
                if is_there and time.monotonic() > give_up_at:
                    raise RuntimeError(
                        f"the session actor of the detached session {self.name!r} has died, and "
                        f"Ray has not started it again within {_RESTART_S:g} s ({gone.detail}); "
                        f"{self._remedy}"
                    ) from None
                if not is_there:
                    self.is_over = True
                    raise RuntimeError(
                        f"the detached session {self.name!r} has ended: it was stopped by another "
                        f"program, was idle for its limit, or its cluster has ended ({gone.detail})"
                    ) from None
                await asyncio.sleep(_AGAIN_S)
            except NoAnswer as silent:
                raise RuntimeError(
                    f"the session actor of the detached session {self.name!r} {silent.detail}; "
                    f"{self._remedy}"
                ) from None

    @property
    def _remedy(self) -> str:
        """Of a session host that does not answer."""
        return (
            "its head node may be busy: try again, or end the session with `chorusline stop "
            f"{self.name}`"
        )

    def _check_connected(self) -> None:
        """Raise RuntimeError after a ray.shutdown(): Ray would start or join a cluster for a call,
        and say nothing."""
        if not ray.is_initialized():
            raise RuntimeError(
                "this process is no longer connected to Ray (ray.shutdown() was called, or another "
                "session that had started the cluster was closed). If the cluster is there still, "
                f"cl.attach({self.name!r}) attaches to the session again"
            )

    async def is_there(self) -> bool:
        """Whether the session has its name still. It may have ended, and keep its results."""
        return await _is_there(self.name, self._host)

    async def status(self, workers_s: float = _SOON_S) -> DetachedStatus:
        """workers_s: seconds that silent workers delay it."""
        self.last = await self._ask("status", workers_s, timeout_s=_ANSWER_S + workers_s)
        return self.last

    async def _look(self) -> None:
        """Hear how the session is, unless its host is busy."""
        try:
            self.last = await answer(self._host.status.remote(_SOON_S / 2), _SOON_S)
        except ActorGone:
            self.is_over = not await self.is_there()
        except NoAnswer:
            pass

    @property
    def seen(self) -> tuple[WorkerSnapshot | str, ...]:
        return self.last.workers if self.last is not None else ()

    @property
    def num_workers(self) -> int:
        return len(self.seen)

    @property
    def num_spares(self) -> int:
        return self.last.num_spares if self.last is not None else 0

    async def ask_workers(self, timeout_s: float) -> tuple[WorkerSnapshot | str, ...]:
        return (await self.status(timeout_s)).workers

    async def snapshots(self, timeout_s: float) -> tuple[None, tuple[WorkerSnapshot | str, ...]]:
        # The driver is an actor of the host, and this process has no handle of it.
        return None, await self.ask_workers(timeout_s)

    async def begin(self, program: Parcel) -> int:
        """Begin a run; return its number. Raises RuntimeError if the session rejects it."""
        self._check_connected()
        token = uuid.uuid4().hex
        parcel = ray.put(program)  # Once, however often it has to be sent.
        reply = await self._ask("begin", token, parcel, get_debug_level(), timeout_s=None)
        # Refused in words, since an exception of an actor would come with Ray's frames.
        if isinstance(reply, str):
            raise RuntimeError(reply)
        assert isinstance(reply, int)
        return reply

    async def current(self) -> int:
        """The run in progress, or else the last one. Raises RuntimeError."""
        status = await self.status()
        if status.run is None:
            raise RuntimeError(
                f"the session {self.name!r} has run nothing yet; begin with `await session.run("
                "train, ...)`"
            )
        return status.run

    async def run(self, program: Parcel | None, audience: Audience) -> RunSucceeded | RunFailed:
        """Have a function run; None: wait for what runs already, or has run last."""
        try:
            run = await (self.current() if program is None else self.begin(program))
            # With all of its output, as the program wants it that has begun it.
            self._place, self._latest, self._whole = None, {}, program is not None
            self._reads_again = False
            async with delivered_news(self, run, audience):
                return await self.ending(run)
        except asyncio.CancelledError as error:
            error.add_note(self.how_interrupted())  # interrupts.py shows it.
            raise

    async def ending(self, run: int) -> RunSucceeded | RunFailed:
        """How a run has ended, when it has. Raises what ended it before there was an outcome."""
        while (ending := await self._ask("ending", run, timeout_s=None)) is None:
            pass  # The call itself has waited.
        await self._look()  # Workers may have come and gone in the run.
        if isinstance(ending, BaseException):
            raise ending
        assert isinstance(ending, RunSucceeded | RunFailed)
        return ending

    async def pull(self, run: int, timeout_s: float) -> News:
        """What the run has said that was not pulled yet; as a Listener's."""
        try:
            news, place = await self._ask("news_since", self._id, run, self._place, self._whole)
        except RuntimeError:
            return News()  # The call for the ending raises it.
        assert isinstance(news, News)
        if self._place is not None and place is not None and place.host != self._place.host:
            # Another session host, which begins with what the workers still hold.
            latest = self._latest
            news.reports = [one for one in news.reports if one.time > latest.get(one.rank, 0.0)]
            self._reads_again = True
        self._place = place
        news.printed = [(seat, self._unseen(printed)) for seat, printed in news.printed]
        for report in news.reports:
            self._latest[report.rank] = report.time
        return news

    def _unseen(self, printed: Printed) -> Printed:
        if printed.is_notice:
            return printed
        worker = printed.node_id, printed.files
        seen = self._shown.get(worker, Position())
        until = printed.until
        self._shown[worker] = Position(
            max(seen.out, until.out), max(seen.err, until.err), max(seen.marks, until.marks)
        )
        return unseen(printed, seen) if self._reads_again else printed

    async def reports(self) -> list[Report]:
        found: list[Report] = await self._ask("reports")
        return found

    async def interrupt(self) -> bool:
        why = "it was interrupted by an attached program"
        return bool(await self._ask("interrupt", why, timeout_s=None))

    async def stop(self) -> None:
        self._check_connected()
        # It hangs, or had ended already. A call to a process that hangs may fail as to a dead one.
        with contextlib.suppress(RuntimeError, TimeoutError):
            async with asyncio.timeout(_STOP_S):
                await self._ask("stop", timeout_s=None)
                await _until_gone(self.name, self._host)
        self.is_over = True
        if await self.is_there():
            _log.warning(
                "the session actor of %r did not end the session, and was killed with its workers",
                self.name,
            )
            await self._undo(DetachedActors(self.name), self._host)

    async def whereabouts(self, timeout_s: float) -> Any:
        return await self._ask("whereabouts", timeout_s)

    def how_interrupted(self) -> str:
        """A line for one who stops looking."""
        freed = ""
        if self.last:
            limit, kept = duration(self.last.idle_timeout_s), duration(RESULTS_KEPT_S)
            freed = (
                f" {limit} after its last run its workers are freed; its results stay for {kept}."
            )
        return (
            f"The session {self.name!r} trains in the background: `chorusline attach {self.name}`, "
            f"or cl.attach({self.name!r}), shows it, and `chorusline stop {self.name}` ends it."
            f"{freed}"
        )


async def _is_there(name: str, host: Actor) -> bool:
    """Whether a session host lives, or Ray means to start it again: then it has the name, and it
    keeps its id. A session that has ended leaves the name to others."""
    found = await asyncio.to_thread(DetachedActors(name).host)
    return found is not None and found._actor_id == host._actor_id


async def _until_gone(name: str, host: Actor) -> bool:
    """Wait for a session host's end; whether it came in time."""
    give_up_at = time.monotonic() + _ANSWER_S
    while await _is_there(name, host):
        if time.monotonic() > give_up_at:
            return False
        await asyncio.sleep(_AGAIN_S)
    return True
