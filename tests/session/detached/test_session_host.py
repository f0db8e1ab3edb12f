"""What a session host knows of its last runs: after a restart, and for several programs at once."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray import cloudpickle

import chorusline as cl
from chorusline.actors.errors import StartupError
from chorusline.actors.messages.messages import RunRequest, RunSucceeded
from chorusline.actors.parcels.parcel import Parcel
from chorusline.actors.reporting.report_buffer import Pulled, ReportBuffer
from chorusline.actors.worker_group.news import Listener, News
from chorusline.collectives.diagnosis.debug import DebugLevel
from chorusline.runtime.session.detached import session_host
from chorusline.runtime.session.detached.session_host import SessionHost
from chorusline.runtime.session.holding.local_session import LocalSession
from chorusline.runtime.session.placing.seats import PlacedSeats
from chorusline.runtime.session.showing.news_pump import Audience


class Memory:
    """What the head remembers of a session."""

    def __init__(self, **saved: object) -> None:
        self.values = saved
        self.save, self.saved = self.values.__setitem__, self.values.get

    def remove_groups(self, kept: object) -> None:
        pass

    def end_actors(self) -> None:
        pass

    def clear(self) -> None:
        self.values.clear()


def host_of(local: Any, memory: Memory) -> Any:
    """A session host that has begun, and has had no run yet."""
    host: Any = object.__new__(SessionHost)
    host._name, host._id, host._ended, host._again = "night", "a", "", None
    host._local, host._detached = local, memory
    host._runs, host._clients, host._tasks = [], {}, set()
    host._is_up = asyncio.Event()
    host._is_up.set()
    return host


async def closed() -> None:
    """A session's workers that end at once."""


def starting(host: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The host as it is before its `live`; it stays when it is told to leave."""
    actor = SimpleNamespace(get_actor_id=lambda: "of the host")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: actor)
    monkeypatch.setattr(ray, "kill", lambda actor: None)
    monkeypatch.setattr(session_host, "_REASON_S", 0.01)
    monkeypatch.setattr(session_host, "_STOP_S", 0.01)
    host._is_up.clear()
    host._self, host._has_begun, host._start_error = None, False, None
    host._restarts, host._ended_at, host._busy_at, host._idle_timeout_s = 0, 0.0, 0.0, 60.0
    host._options = cl.Session()._options
    return host


async def ended(host: Any) -> None:
    """Cancel what the host does beside its calls."""
    for task in [*host._tasks]:
        task.cancel()
    await asyncio.gather(*host._tasks, return_exceptions=True)


async def begun(host: Any, token: str) -> int:
    number = await host.begin(token, Parcel(b""), DebugLevel.OFF)
    assert isinstance(number, int)
    return number


async def test_a_run_that_two_programs_interrupt_ends_by_the_first_interrupt() -> None:
    asked, may_answer = asyncio.Event(), asyncio.Event()

    async def ask_workers(timeout_s: float) -> tuple[SimpleNamespace]:
        asked.set()
        await may_answer.wait()
        return (SimpleNamespace(generation=3),)

    async def run(*_: object) -> None:
        await asyncio.Event().wait()

    host = host_of(SimpleNamespace(run=run, ask_workers=ask_workers), Memory())
    number = await begun(host, "first")
    waits = asyncio.create_task(host.ending(number))
    await asyncio.sleep(0)  # The run is in progress.
    first = asyncio.create_task(host.interrupt("of the first"))
    await asked.wait()
    second = asyncio.create_task(host.interrupt("of the second"))
    for _ in range(5):
        await asyncio.sleep(0)
    may_answer.set()
    ending = await waits
    assert isinstance(ending, cl.GroupAborted)
    assert "of the first" in str(ending) and ending.generation == 3
    assert await first and await second


async def test_a_run_that_is_interrupted_before_it_begins_is_over() -> None:
    host = host_of(SimpleNamespace(run=None), Memory())
    # Both calls wait for a session host that was started again.
    host._is_up.clear()
    begins = asyncio.create_task(begun(host, "first"))
    interrupts = asyncio.create_task(host.interrupt("at once"))
    await asyncio.sleep(0)
    host._is_up.set()
    number = await begins
    assert await asyncio.wait_for(interrupts, 5)
    ending = await host.ending(number)
    assert isinstance(ending, cl.GroupAborted) and "at once" in str(ending)
    assert not host._is_running


async def test_a_run_that_could_not_be_recorded_has_not_begun() -> None:
    class FullMemory(Memory):
        def __init__(self) -> None:
            super().__init__()
            self.save = self.refuse

        def refuse(self, name: str, value: object) -> None:
            raise OSError("the head takes no more")

    host = host_of(SimpleNamespace(run=None), FullMemory())
    with pytest.raises(OSError, match="takes no more"):
        await begun(host, "first")
    assert not host._is_running and not await host.interrupt("nothing")


async def test_a_call_for_the_end_of_a_run_does_not_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_host, "_ENDING_S", 0.05)

    async def run(*_: object) -> None:
        await asyncio.Event().wait()

    host = host_of(SimpleNamespace(run=run), Memory())
    number = await begun(host, "first")
    assert await host.ending(number) is None, "the client asks again"
    host._runs[-1].task.cancel()


async def test_a_session_that_trains_is_not_idle_though_no_program_is_attached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(session_host, "_LOOK_S", 0.01)
    monkeypatch.setattr(session_host, "RESULTS_KEPT_S", 60.0)
    may_end, closed = asyncio.Event(), asyncio.Event()

    async def run(*_: object) -> RunSucceeded:
        await may_end.wait()
        return RunSucceeded(0, ())

    async def close() -> None:
        closed.set()

    host = host_of(SimpleNamespace(run=run, close=close), Memory())
    host._idle_timeout_s, host._busy_at, host._restarts = 0.1, time.monotonic(), 0
    monkeypatch.setattr(host, "_note_restarts", lambda restarts: None)
    number = await begun(host, "of a program that is gone")
    watch = asyncio.create_task(host._watch_idleness())
    await asyncio.sleep(0.5)
    assert not host._ended
    may_end.set()
    assert await host.ending(number) == RunSucceeded(0, ())
    async with asyncio.timeout(20):
        await closed.wait()
    assert "idle for its limit of 0.1 s" in host._ended
    watch.cancel()


class BusyWorker:
    """A worker that holds the reports of its last run, and takes a moment for each answer."""

    def __init__(self) -> None:
        self.runs: list[int] = []
        self.pull = SimpleNamespace(remote=self._pull)

    def runs_now(self, run: int, *losses: float) -> None:
        """Each run has a report buffer of its own (Worker.run)."""
        self.runs.append(run)
        self.reports = ReportBuffer(keep=True, history=10)
        for step, loss in enumerate(losses):
            self.reports.append(cl.Report(0, step, float(step), {"loss": loss}))

    async def _pull(self, run: int, since: int, printed_until: Any) -> Pulled:
        await asyncio.sleep(0.1)
        if run != self.runs[-1]:
            return Pulled([], None, None, {})
        return self.reports.pulled(since, None, None)


@pytest.mark.parametrize("num_repeats", [0, 1])
async def test_a_session_host_restarted_after_a_run_hears_that_run_and_the_next_one(
    num_repeats: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_host, "_SNAPSHOT_S", 0.02)
    monkeypatch.setattr(PlacedSeats, "recalled", lambda state: SimpleNamespace(groups=()))
    monkeypatch.setattr(ray, "put", lambda program: program)
    # The last run was run 0, or began once more under the next number.
    last, worker = RunRequest(num_repeats, 1.0, True), BusyWorker()
    worker.runs_now(last.run, 0.5, 0.25)
    ended = (0, "first", 0.0, 1.0, cloudpickle.dumps(RunSucceeded(0, ())))

    async def nothing(*_: object) -> None:
        pass

    async def run(request: RunRequest, payload: object) -> RunSucceeded:
        worker.runs_now(request.run, 0.125)
        return RunSucceeded(0, ())

    memory = Memory(run=ended, request=last)
    local: Any = LocalSession(cl.Session()._options, memory)  # type: ignore[arg-type]
    worker_group = SimpleNamespace(
        find=nothing, assemble=nothing, run=run, listener=Listener({0: worker}, ())
    )
    local._worker_group_of = lambda seats: worker_group
    host = host_of(local, memory)
    await host._wake(0, "", 0.0)
    assert [one.values["loss"] for one in await host.reports()] == [0.5, 0.25]
    assert await host.ending(await begun(host, "second")) == RunSucceeded(0, ())
    assert [one.values["loss"] for one in await host.reports()] == [0.125]
    assert worker.runs == [last.run, last.run + 1]


async def test_the_end_of_a_run_is_heard_after_another_program_has_begun_the_next_one() -> None:
    number = 0

    async def run(program: Parcel, audience: Audience, begun: None) -> RunSucceeded:
        audience.deliver(News([cl.Report(0, 0, 0.0, {"number": number})]))
        return RunSucceeded(number, ())

    host = host_of(SimpleNamespace(run=run), Memory())
    for number, token in enumerate(("of the slow one", "of another", "of a third")):
        assert await begun(host, token) == number
        await host.ending(number)
        for kept in range(max(0, number - 1), number + 1):
            news, _ = await host.news_since("slow", kept, None, True)
            assert [one.values["number"] for one in news.reports] == [kept]
            assert await host.ending(kept) == RunSucceeded(kept, ())
        if number == 1:
            assert await begun(host, "of the slow one") == 0, "a call that is repeated begins none"
    assert "of its last two runs" in str(await host.ending(0)), "no more are kept"
    assert [one.values["number"] for one in await host.reports()] == [2]


@pytest.mark.parametrize("is_over", [True, False])
async def test_a_session_that_has_ended_keeps_its_results_when_its_host_is_started_again(
    is_over: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = cloudpickle.dumps(RunSucceeded(0, (b"a result",))) if is_over else None
    memory = Memory(run=(4, "first", 0.0, 7.0, outcome), request=RunRequest(4, 1.0, True))
    host = starting(host_of(SimpleNamespace(worker_group=None), memory), monkeypatch)
    host._again = (0, "it was idle for its limit of 3 s", time.time() - 60.0)
    await host.live()
    try:
        ending = await host.ending(4)
        if is_over:
            assert ending == RunSucceeded(0, (b"a result",))
        else:
            assert isinstance(ending, cl.GroupAborted) and "it was idle" in str(ending)
        status = await host.status()
        assert status.ended == "it was idle for its limit of 3 s" and status.run == 4
        assert 59.0 < status.ended_s < 90.0
        assert status.ran_s == 7.0 if is_over else status.ran_s > 1e9, "it began in 1970"
        assert "was idle for its limit" in await host.begin("second", Parcel(b""), DebugLevel.OFF)
        assert memory.values["session"][1:3] == (1, status.ended), "for the next restart"
    finally:
        await ended(host)


async def test_a_host_that_dies_after_its_session_has_ended_leaves_a_note_of_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = Memory()
    host = starting(host_of(SimpleNamespace(close=closed), memory), monkeypatch)
    await host._end("it was idle")
    actor_id, restarts, why, ended_at = memory.values["session"]
    assert (actor_id, restarts, why) == ("of the host", 0, "it was idle")
    assert ended_at == pytest.approx(time.time(), abs=30)


async def test_a_stopped_session_whose_host_dies_right_after_does_not_come_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = Memory()
    host = starting(host_of(SimpleNamespace(close=closed), memory), monkeypatch)
    await host.stop()
    await ended(host)
    again = starting(host_of(SimpleNamespace(close=closed), memory), monkeypatch)
    again._again = memory.values["session"][1:]
    try:
        await asyncio.wait_for(again.live(), 5)
        assert not memory.values, "it has left, and its name is free"
        assert again._ended == "it was stopped"
    finally:
        await ended(again)


async def test_a_session_whose_start_has_failed_takes_no_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def start(starting: object, *, is_local: bool) -> None:
        raise StartupError("there is no room", "for 2 workers")

    async def close() -> None:
        pass

    local = SimpleNamespace(start=start, close=close, worker_group=None)
    host = starting(host_of(local, Memory()), monkeypatch)
    # Of a program that has attached while the session waited for room.
    begins = asyncio.create_task(host.begin("first", Parcel(b""), DebugLevel.OFF))
    await host.live()
    try:
        refused = await begins
        assert isinstance(refused, str)
        assert "has ended: it did not start: there is no room" in refused
        assert host._runs == [] and "it did not start" in (await host.status()).ended
        with pytest.raises(StartupError, match="there is no room"):
            await host.started()
    finally:
        await ended(host)


class WatchedParcel(Parcel):
    """One that can be watched by a weak reference."""


async def run_of_a_watched_parcel(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> tuple[Any, weakref.ref[Parcel]]:
    """A session host whose worker group has `run`, with a run that has begun; and its arguments."""
    monkeypatch.setattr(ray, "put", lambda program: "a reference")

    async def nobody(timeout_s: float) -> tuple[()]:
        return ()

    local: Any = LocalSession(cl.Session()._options)
    local.worker_group = SimpleNamespace(
        assemble=nobody, run=run, listener=Listener({}, ()), workers_seen=nobody
    )
    host = host_of(local, Memory())
    parcel = WatchedParcel(b"")
    await host.begin("first", parcel, DebugLevel.OFF)
    return host, weakref.ref(parcel)


async def test_a_session_host_does_not_hold_the_arguments_beside_the_object_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    has_begun = asyncio.Event()

    async def run(request: RunRequest, payload: object) -> RunSucceeded:
        has_begun.set()
        await asyncio.Event().wait()
        raise AssertionError

    host, parcel = await run_of_a_watched_parcel(run, monkeypatch)
    await asyncio.wait_for(has_begun.wait(), 5)
    gc.collect()
    assert parcel() is None
    host._runs[-1].task.cancel()
    await asyncio.wait([host._runs[-1].task])


async def test_the_error_of_a_run_does_not_hold_what_its_functions_had(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held: list[weakref.ref[Parcel]] = []

    async def run(request: RunRequest, payload: object) -> RunSucceeded:
        argument = WatchedParcel(b"")
        held.append(weakref.ref(argument))
        try:
            raise ValueError("first")
        except ValueError as error:
            cause = error
        raise ExceptionGroup("both", [cause, KeyError("second")]) from cause

    host, _ = await run_of_a_watched_parcel(run, monkeypatch)
    ending = await host.ending(0)
    assert isinstance(ending, ExceptionGroup) and "both" in str(ending)
    assert [str(one) for one in ending.exceptions] == ["first", "'second'"]
    gc.collect()
    assert held[0]() is None
