"""What a program leaves of its client when it drops the session, or its connection to Ray."""

from __future__ import annotations

import asyncio
import gc
import itertools
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError

import chorusline as cl
from chorusline.actors.errors import StartupError
from chorusline.actors.messages.messages import RunSucceeded
from chorusline.actors.parcels.parcel import Parcel
from chorusline.actors.ray_calls.detached_actors import DetachedActors
from chorusline.actors.reporting.worker_logs import (
    FIGURE,
    OUT,
    Position,
    Printed,
    PrintedPiece,
)
from chorusline.actors.worker_group.news import News
from chorusline.runtime.notebook import cells
from chorusline.runtime.session import connecting
from chorusline.runtime.session.detached import client as clients
from chorusline.runtime.session.detached.client import DetachedClient
from chorusline.runtime.session.detached.history import Bookmark
from chorusline.runtime.session.detached.session_host import SessionHost
from chorusline.runtime.session.detached.status import DetachedStatus, taken

READY = cl.SessionState.READY
STATUS = DetachedStatus("night", 0, True, 1.0, (), 0, 1, None, 60.0, 0, "", 0.0, None, None)


class Host:
    """A session host that counts what it is asked."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __getattr__(self, method: str) -> SimpleNamespace:
        return SimpleNamespace(remote=self._count)

    def _count(self, *_: object) -> None:
        self.num_calls += 1


def thread_of(name: str) -> threading.Thread:
    """The thread that says that the program is there still."""
    return next(one for one in threading.enumerate() if one.name == f"attached-{name}")


def test_a_session_that_nobody_holds_any_more_is_not_attached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    session: Any = cl.attach("dropped")
    session._holder = DetachedClient("dropped", Host())
    session._holder._stay()
    thread = thread_of("dropped")
    del session
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


async def test_attaching_waits_for_one_answer_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less than 2 s, as the page says: the session host waits for workers 1 s at most."""
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    asked: list[tuple[object, ...]] = []

    class Answering:
        def __getattr__(self, method: str) -> SimpleNamespace:
            def called(*arguments: object) -> Any:
                asked.append((method, *arguments))
                return remembered() if method == "status" else None

            return SimpleNamespace(remote=called)

    async def remembered() -> SimpleNamespace:
        return SimpleNamespace(ended="")

    monkeypatch.setattr(clients.DetachedActors, "host", lambda _: Answering())
    client = await DetachedClient.found("night")
    (_, workers_s), _ = asked
    assert asked == [("status", workers_s), ("here", client._id)]
    assert isinstance(workers_s, float) and workers_s <= 1
    client._is_away.set()


async def test_a_client_whose_process_has_left_the_cluster_calls_nothing_of_ray(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ray would start or join a cluster for the call."""
    monkeypatch.setattr(clients, "_HERE_S", 0.01)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "put", lambda _: pytest.fail("it joins a cluster"))
    monkeypatch.setattr(ray, "get_actor", lambda *_, **__: pytest.fail("it joins a cluster"))
    host = Host()
    client = DetachedClient("left", host)
    client._stay()
    # It may have ended already.
    threads = [one for one in threading.enumerate() if one.name == "attached-left"]
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    for call in (client.status(), client.begin(Parcel(b"")), client.reports(), client.stop()):
        with pytest.raises(RuntimeError, match=r"no longer connected to Ray.*cl.attach\('left'\)"):
            await call
    await client.close()
    assert host.num_calls == 1, "when it attached"


def answering(host: Any, *methods: str) -> Any:
    """A handle of a session host in this process."""
    return SimpleNamespace(
        _actor_id="ours", **{one: SimpleNamespace(remote=getattr(host, one)) for one in methods}
    )


class DeadHost:
    """A session host that has ended. who: its id."""

    def __init__(self, who: str) -> None:
        self._actor_id = who

    def __getattr__(self, method: str) -> SimpleNamespace:
        async def is_gone(*_: object) -> None:
            raise RayActorError

        return SimpleNamespace(remote=is_gone)


async def test_a_new_session_of_the_same_name_is_none_of_the_clients_of_the_old_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "kill", lambda host: pytest.fail("it may be another program's"))
    monkeypatch.setattr(DetachedActors, "host", lambda _: DeadHost("of the new session"))
    client = DetachedClient("night", DeadHost("of the old session"))
    async with asyncio.timeout(10):  # Far less than Ray has to start a session host again.
        with pytest.raises(RuntimeError, match="'night' has ended: it was stopped by another"):
            await client.status()
        await client.stop()
        await client.close()
    assert caplog.text == ""


async def test_a_start_that_is_given_up_leaves_a_new_session_of_the_same_name_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray, "kill", lambda host: None)
    monkeypatch.setattr(DetachedActors, "clear", lambda _: pytest.fail("they are not its own"))
    monkeypatch.setattr(DetachedActors, "host", lambda _: DeadHost("of the new session"))
    async with asyncio.timeout(10):
        await DetachedClient._undo(DetachedActors("night"), DeadHost("of the old session"))


async def test_a_client_whose_close_is_cancelled_is_not_attached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    is_asked = asyncio.Event()

    async def status(*_: object) -> None:
        is_asked.set()
        await asyncio.sleep(60)

    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    client = DetachedClient("night", SimpleNamespace(status=SimpleNamespace(remote=status)))
    closes = asyncio.create_task(client.close())
    await is_asked.wait()
    closes.cancel()
    await asyncio.wait([closes])
    assert closes.cancelled() and client._is_away.is_set()


@pytest.mark.parametrize("host", ["ended", "gone", "busy"])
async def test_a_program_that_closes_is_not_told_that_a_session_trains_that_has_ended(
    host: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def status(*_: object) -> DetachedStatus:
        if host == "gone":
            raise RayActorError
        await asyncio.sleep(60 if host == "busy" else 0)
        return replace(STATUS, ended="it was stopped")

    async def gone(*_: object) -> None:
        pass

    monkeypatch.setattr(clients, "_SOON_S", 0.05)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(DetachedActors, "host", lambda _: None)
    remote = {"status": SimpleNamespace(remote=status), "gone": SimpleNamespace(remote=gone)}
    client = DetachedClient("night", SimpleNamespace(**remote))
    client.last = STATUS
    await client.close()
    assert ("trains in the background" in caplog.text) == (host == "busy")


async def test_a_new_session_says_that_it_deletes_the_results_of_the_one_of_before(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    there: list[Any] = []

    async def status(*_: object) -> DetachedStatus:
        return replace(STATUS, is_running=False, ended="it was idle", ended_s=3 * 3600.0)

    async def stop() -> None:
        there.clear()

    host = SimpleNamespace(
        status=SimpleNamespace(remote=status), stop=SimpleNamespace(remote=stop), _actor_id="ours"
    )
    there.append(host)
    monkeypatch.setattr(DetachedActors, "host", lambda _: there[0] if there else None)
    await DetachedClient._make_room("night", host)
    assert (
        "the earlier session 'night' ended 3 h ago (it was idle); the new one takes its name, and "
        "deletes the results of its last run" in caplog.text
    )


async def test_a_snapshot_of_a_detached_session_waits_for_its_workers_as_long_as_it_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waited: list[float] = []

    async def ask_workers(timeout_s: float) -> tuple[str]:
        waited.append(timeout_s)
        return ("it is silent",)

    host: Any = object.__new__(SessionHost)
    host._name, host._runs, host._clients, host._again = "night", [], {}, None
    host._local = SimpleNamespace(ask_workers=ask_workers, worker_group=None)
    host._idle_timeout_s, host._restarts, host._ended, host._busy_at = 1.0, 0, "", 0.0
    host._options = cl.Session()._options
    session: Any = cl.attach("night")
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    session._holder = DetachedClient("night", answering(host, "status"))
    assert (await session.snapshot(timeout_s=7.0)).workers == ("it is silent",)
    assert waited == [7.0]


@pytest.mark.parametrize("answers", [True, False])
async def test_a_client_knows_the_workers_that_a_run_has_ended_with(
    answers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ending(run: int) -> RunSucceeded:
        return RunSucceeded(0, (b"a result",))

    async def status(*_: object) -> DetachedStatus:
        if not answers:
            raise RayActorError
        return replace(STATUS, workers=("one", "another"))

    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(DetachedActors, "host", lambda _: None)
    host = answering(SimpleNamespace(ending=ending, status=status), "ending", "status")
    client = DetachedClient("night", host)
    client.last = replace(STATUS, workers=("one",))
    assert await client.ending(0) == RunSucceeded(0, (b"a result",))
    assert client.num_workers == (2 if answers else 1)


async def test_a_session_host_that_was_started_again_shows_no_line_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    figure = PrintedPiece(FIGURE, b"a figure", 0, 2)

    def heard(
        host: str, printed: int, until: int, *texts: bytes | PrintedPiece, is_notice: bool = False
    ) -> tuple[News, Bookmark]:
        pieces = tuple(
            text if isinstance(text, PrintedPiece) else PrintedPiece(OUT, text, 0) for text in texts
        )
        marks = 3 if figure in pieces else 0
        position = Position(until, 0, marks)
        one = Printed(pieces, position, 0, False, ("out", "err"), "node", is_notice)
        return News(printed=[(0, one)]), Bookmark(0, printed, host)

    # The second one reads the run's output from its beginning, in other parts.
    replies = iter(
        (
            heard("a", 1, 4, b"one\n"),
            heard("a", 2, 8, b"two\n", figure),
            heard("b", 1, 6, b"one\ntw"),
            heard("b", 2, 14, b"o\n", figure, b"three\n"),
            heard("b", 3, 19, b"four\n"),
            heard("b", 4, 19, b"(it is gone)\n", is_notice=True),
        )
    )

    async def news_since(*_: object) -> tuple[News, Bookmark]:
        return next(replies)

    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    host = answering(SimpleNamespace(news_since=news_since), "news_since")
    client = DetachedClient("night", host)
    shown = [
        piece.data
        for _ in range(6)
        for _, printed in (await client.pull(0, 1.0)).printed
        for piece in printed.pieces
    ]
    assert shown == [b"one\n", b"two\n", b"a figure", b"three\n", b"four\n", b"(it is gone)\n"]


class StoppableHost:
    """A session host that counts how often it is stopped, and then is no longer there."""

    def __init__(self, who: str) -> None:
        self._actor_id, self.num_stops = who, 0

    def __getattr__(self, method: str) -> SimpleNamespace:
        async def reply(*_: object) -> None:
            self.num_stops += method == "stop"

        return SimpleNamespace(remote=reply)


@pytest.mark.parametrize("kind", ["detached", "attached"])
@pytest.mark.parametrize("owner", ["ours", "another program's"])
async def test_a_session_that_was_let_go_of_can_be_stopped(
    kind: str, owner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = StoppableHost("ours"), StoppableHost("another program's")
    there = ours if owner == "ours" else theirs
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(connecting, "connect", lambda *_, **__: connecting.Connection(None, False))
    monkeypatch.setattr(DetachedActors, "host", lambda _: None if there.num_stops else there)
    session: Any = cl.attach("night")
    if kind == "detached":
        session = cl.Session(name="night", detached=True)
    session._holder, session._state = DetachedClient("night", ours), cl.SessionState.READY
    await session.close()
    await session.stop()
    assert (ours.num_stops, theirs.num_stops) == (owner == "ours", 0)
    assert session.state is cl.SessionState.CLOSED
    await session.stop()
    assert ours.num_stops <= 1, "it was stopped already"


@pytest.mark.parametrize("now_at", ["10.0.0.1:6379", "10.0.0.2:6379"])
async def test_a_session_in_a_cluster_that_the_process_has_left_is_not_stopped_in_silence(
    now_at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def connection(address: str) -> connecting.Connection:
        return connecting.Connection(SimpleNamespace(gcs_address=address), False)

    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(connecting, "connect", lambda *_, **__: connection(now_at))
    monkeypatch.setattr(DetachedActors, "host", lambda _: None)
    session: Any = cl.Session(name="night", detached=True)
    session._holder, session._state = DetachedClient("night", StoppableHost("ours")), READY
    session._connection = connection("10.0.0.1:6379")
    await session.close()
    if now_at == "10.0.0.1:6379":
        await session.stop()  # It has ended since.
    else:
        with pytest.raises(StartupError, match=r"stop night --address 10\.0\.0\.1:6379"):
            await session.stop()


async def test_a_session_that_has_not_started_stops_no_other_one_of_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connecting, "connect", lambda *_, **__: pytest.fail("it asks Ray"))
    session = cl.Session(name="night", detached=True)
    with pytest.raises(RuntimeError, match="has not started"):
        await session.stop()
    assert session.state is cl.SessionState.NEW
    await session.close()  # As after a start that has failed.
    await session.stop()
    await cl.Session().stop()


def run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have each look at the current cell find one more execution of it."""
    executions = itertools.count()
    monkeypatch.setattr(cells, "_started", [])
    monkeypatch.setattr(cells, "in_kernel", lambda: True)
    monkeypatch.setattr(cells, "_current_cell", lambda: ("a cell", str(next(executions))))
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(connecting, "connect", lambda *_, **__: connecting.Connection(None, False))
    # The other tests' cluster is one of this process.
    monkeypatch.setattr(connecting, "check_stays", lambda *_: None)


async def test_a_cell_ends_its_own_session_before_it_starts_a_detached_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second = cl.Session(), cl.Session(name="night", detached=True)

    async def start(*_: object) -> DetachedClient:
        assert first.state is cl.SessionState.CLOSED, "it may hold the room that this one needs"
        client = DetachedClient("night", StoppableHost("ours"))
        client.last = STATUS
        return client

    run_again(monkeypatch)
    monkeypatch.setattr(DetachedClient, "started", start)
    await cells.close_earlier_session(first)
    await second
    assert second.state is READY and cells.latest_session() is second
    assert len(cells._started) == 1


async def test_a_detached_session_whose_start_is_interrupted_at_its_end_is_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host, is_closing = StoppableHost("ours"), asyncio.Event()

    async def start(*_: object) -> DetachedClient:
        client = DetachedClient("night", host)
        client.last = STATUS
        return client

    async def close() -> None:
        is_closing.set()
        await asyncio.sleep(60)

    run_again(monkeypatch)
    monkeypatch.setattr(DetachedActors, "host", lambda _: None if host.num_stops else host)
    monkeypatch.setattr(DetachedClient, "started", start)
    first: Any = cl.attach("evening")
    first.close = close
    await cells.close_earlier_session(first)
    second = cl.Session(name="night", detached=True)
    starts = asyncio.create_task(second.start())
    await is_closing.wait()
    starts.cancel()
    await asyncio.wait([starts])
    assert starts.cancelled() and host.num_stops == 1
    assert second.state is cl.SessionState.CLOSED


@pytest.mark.parametrize("attaches", [False, True])
async def test_a_cell_that_runs_again_detaches_from_its_session_when_it_has_another_one(
    attaches: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def come_by(*_: object) -> DetachedClient:
        if not attaches:
            raise taken("night", None)
        client = DetachedClient("night", StoppableHost("ours"))
        client.last = STATUS
        return client

    run_again(monkeypatch)
    monkeypatch.setattr(DetachedClient, "started", come_by)
    monkeypatch.setattr(DetachedClient, "found", come_by)

    def of_the_cell() -> Any:
        return cl.attach("night") if attaches else cl.Session(name="night", detached=True)

    first = of_the_cell()
    first._holder, first._state = DetachedClient("night", StoppableHost("ours")), READY
    await cells.close_earlier_session(first)
    second = of_the_cell()
    if attaches:
        assert await second is second
        assert first.state is cl.SessionState.CLOSED and second.state is READY
    else:
        with pytest.raises(StartupError, match="there is a detached session 'night'") as raised:
            await second
        assert not hasattr(raised.value, "__notes__"), "to close the first one frees nothing"
        assert first.state is READY and cells.latest_session() is first
