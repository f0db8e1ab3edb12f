"""Sessions with real actors: results, arguments, reports, bad input, and nothing left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import ray
import torch
from ray.util import placement_group_table

import chorusline as cl
from chorusline.actors.errors import StartupError
from chorusline.actors.messages.messages import Report, WorkerSnapshot
from chorusline.actors.ray_calls.calls import refuses
from chorusline.collectives.contract.errors import CollectiveError, GroupAborted
from chorusline.collectives.diagnosis.debug import DebugLevel, set_debug_level
from chorusline.runtime.data_parallel.distributed_data_parallel import DistributedDataParallel
from chorusline.runtime.notebook import cells
from chorusline.runtime.process.running import current, current_group
from chorusline.runtime.program.context import Context, call_of
from chorusline.runtime.session import connecting
from chorusline.runtime.session.holding.local_session import LocalSession
from chorusline.runtime.session.one_run import run
from chorusline.runtime.session.session import Session, SessionState
from tests.harness.forked_workers import STARTED_BY_RAY
from tests.harness.head_node import free_ports, head_node
from tests.harness.open_sockets import ports
from tests.harness.programs import output_of
from tests.harness.sessions import WITHIN_S, assert_usable, name_ranks


class Listener:
    """The `on_report` of the shared session."""

    def __init__(self) -> None:
        self.received: list[Report] = []
        self.error: Exception | None = None

    def __call__(self, report: Report) -> None:
        self.received.append(report)
        if self.error is not None:
            raise self.error


@pytest.fixture(scope="module")
def listener() -> Listener:
    return Listener()


@pytest.fixture(scope="module")
async def session(cluster: None, listener: Listener) -> AsyncIterator[Session]:
    """Two workers for all tests here: each must leave them usable."""
    async with Session(num_workers=2, timeout_s=30, on_report=listener) as session:
        yield session


# ── All is well ──────────────────────────────────────────────────────────────────────────────────


async def test_each_rank_returns_one_result(session: Session) -> None:
    def train(ctx: Context, base: int) -> tuple[int, float]:
        total = torch.tensor([float(base + ctx.rank)])
        ctx.group.all_reduce(total).wait()
        return ctx.rank, total.item()

    assert await session.run(train, base=10) == [(0, 21.0), (1, 21.0)]


async def test_an_async_function_has_a_loop_of_its_own(session: Session) -> None:
    async def train(ctx: Context) -> tuple[float, str]:
        helper = asyncio.create_task(asyncio.sleep(0.01, "slept"))
        total = torch.tensor([1.0])
        await ctx.group.all_reduce(total)
        assert current() is call_of(ctx)
        return total.item(), await helper

    assert await session.run(train) == [(2.0, "slept")] * 2


async def test_a_plain_function_may_start_a_loop_itself(session: Session) -> None:
    def train(ctx: Context) -> str:
        return asyncio.run(asyncio.sleep(0, threading.current_thread().name))

    assert await session.run(train) == ["training-rank-0", "training-rank-1"]


async def test_a_healthy_generation_serves_the_next_run_in_the_same_process(
    session: Session,
) -> None:
    def train(ctx: Context) -> tuple[int, int, int]:
        return ctx.generation, id(ctx.group), os.getpid()

    assert await session.run(train) == await session.run(train)


def catch_a_mismatch(ctx: Context) -> str:
    try:
        ctx.group.all_reduce(torch.ones(3 + ctx.rank)).wait()
    except CollectiveError:
        return "caught"
    return ""


async def test_an_error_that_a_function_has_caught_is_not_that_of_the_next_run(
    session: Session,
) -> None:
    num_workers = len(await session.run(sum_of_ranks))
    assert await session.run(catch_a_mismatch) == ["caught"] * num_workers
    assert await session.run(sum_of_ranks) == [sum(range(num_workers))] * num_workers


def sum_of_ranks(ctx: Context) -> float:
    return float(ctx.reduce(ctx.rank, "sum"))


async def test_small_things_are_shared_between_ranks(session: Session) -> None:
    def train(ctx: Context) -> list[Any]:
        loss = torch.tensor([1.0 + ctx.rank, 2.0])
        counts = torch.tensor([ctx.rank, 3])
        shared = [
            ctx.broadcast({"name": "of rank 1", "data": torch.arange(3)} if ctx.rank else None, 1),
            ctx.broadcast(b"", root=0),
            ctx.reduce(loss).tolist(),
            ctx.reduce(counts, "sum").tolist(),
            ctx.reduce(counts).tolist(),
            ctx.reduce(ctx.rank + 1),
            ctx.reduce(ctx.rank + 1, "sum"),
            ctx.reduce(0.5 + ctx.rank, "max"),
            ctx.reduce("words pass"),
            loss.tolist(),
        ]
        ctx.barrier()
        alone = ctx.group.split(color=ctx.rank)
        assert alone is not None
        shared.append(ctx.reduce(1.0 + ctx.rank, "avg", group=alone))
        shared.append(ctx.reduce(1.0 + ctx.rank, "avg"))
        return shared

    results = await session.run(train)
    for rank, shared in enumerate(results):
        assert shared[0]["name"] == "of rank 1"
        assert shared[0]["data"].tolist() == [0, 1, 2]
        assert shared[1] == b""
        assert shared[2:9] == [[1.5, 2.0], [1, 6], [0.5, 3.0], 1.5, 3, 1.5, "words pass"]
        assert shared[9] == [1.0 + rank, 2.0], "reduce leaves its argument alone"
        assert isinstance(shared[6], int)
        assert shared[10:] == [1.0 + rank, 1.5]


async def test_a_table_has_the_statistics_of_the_models_of_all_ranks(session: Session) -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> Any:
            return self.used(x)

    def train(ctx: Context) -> None:
        models = [DistributedDataParallel(Net(), ctx.group) for _ in range(2)]
        for step in range(3):
            for model in models[: 1 if step == 2 else 2]:
                model(torch.ones(1, 2)).sum().backward()

    await session.run(train)
    assert (await session.snapshot()).statistics() == ""
    set_debug_level(DebugLevel.INFO)
    try:
        await session.run(train)
    finally:
        set_debug_level(DebugLevel.OFF)
    titles, *rows = (await session.snapshot()).statistics().splitlines()
    assert titles.split()[:5] == ["rank", "model", "steps", "buckets", "bytes"]
    expected = [[rank, model, steps] for rank in "01" for model, steps in ("03", "12")]
    assert [row.split()[:3] for row in rows] == expected
    assert all(row.endswith("idle.weight, idle.bias") for row in rows)


async def test_the_running_context_is_known_inside_and_only_there(session: Session) -> None:
    def train(ctx: Context) -> bool:
        return current() is call_of(ctx) and current_group() is ctx.group

    assert await session.run(train) == [True, True]
    with pytest.raises(RuntimeError, match="no train function of a session runs"):
        current()
    with pytest.raises(RuntimeError, match=r"Group\.create"):
        current_group()


@ray.remote(num_cpus=0.1)
class Plain:
    def ports(self) -> int:
        return len(ports())


async def test_a_worker_listens_where_any_actor_does_and_nowhere_else(session: Session) -> None:
    def train(ctx: Context) -> int:
        ctx.group.all_gather_object("anything").wait()
        return len(ports())

    plain = Plain.remote()  # type: ignore[attr-defined]
    expected = await plain.ports.remote()
    ray.kill(plain)
    assert expected, "the watch sees nothing"
    assert await session.run(train) == [expected] * 2


async def test_a_control_loop_answers_while_the_function_blocks(session: Session) -> None:
    def train(ctx: Context) -> None:
        ctx.report(phase="blocking")
        time.sleep(1.5)

    running = asyncio.create_task(session.run(train))
    deadline = time.monotonic() + 10
    while True:
        asked_at = time.monotonic()
        snapshot = await session.snapshot()
        assert time.monotonic() - asked_at < 1.5
        workers = [said for said in snapshot.workers if isinstance(said, WorkerSnapshot)]
        if len(workers) == 2 and all(said.last_report is not None for said in workers):
            break
        assert time.monotonic() < deadline
    assert snapshot.state is SessionState.RUNNING
    assert "training" in str(snapshot)
    assert "phase=blocking" in str(snapshot)
    with pytest.raises(RuntimeError, match="runs another function"):
        await session.run(train)
    await running


async def test_reports_arrive_complete_and_in_order(session: Session, listener: Listener) -> None:
    def train(ctx: Context, steps: int) -> None:
        for step in range(steps):
            ctx.report(loss=torch.tensor(0.5), step=step, name=f"rank {ctx.rank}")
            if step % 100 == 0:
                time.sleep(0.05)

    listener.received.clear()
    await session.run(train, steps=1000)
    first_run = listener.received[:]
    listener.received.clear()
    await session.run(train, steps=3)
    for rank in range(2):
        reports = [report for report in first_run if report.rank == rank]
        assert [report.step for report in reports] == list(range(1000))
        assert reports[7].values == {"loss": 0.5, "step": 7, "name": f"rank {rank}"}
    assert [(report.step, report.rank) for report in listener.received] == [
        (step, rank) for step in range(3) for rank in range(2)
    ]


async def test_an_error_in_on_report_ends_the_run_as_itself(
    session: Session, listener: Listener
) -> None:
    def train(ctx: Context) -> None:
        ctx.report(loss=1.0)
        while True:
            ctx.barrier()

    listener.error = LookupError("no place for it")
    with pytest.raises(LookupError, match="no place for it"):
        await session.run(train)
    listener.error = None
    await assert_usable(session)


# ── Bad input, told before anything starts ───────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"num_workers": 0}, ValueError, "num_workers must be at least 1, got 0"),
        ({"num_workers": 1.5}, TypeError, "num_workers must be a number of workers"),
        ({"num_workers": (3, 2)}, ValueError, "must be in order"),
        ({"timeout_s": 0}, ValueError, "timeout_s must be positive"),
        ({"startup_timeout_s": "1"}, TypeError, "startup_timeout_s must be a number of seconds"),
        ({"placement_strategy": "HEAP"}, ValueError, "placement_strategy must be one of PACK"),
        ({"resources_per_worker": {"CPU": -1}}, ValueError, r"resources_per_worker\['CPU'\]"),
        ({"resources_per_worker": {"GPU": 1}}, ValueError, "use_gpu is False"),
        ({"resources_per_worker": {"CPU": 0}}, ValueError, "asks for nothing"),
        ({"address": 6379}, TypeError, "address must be a string or None, got int"),
        ({"on_report": "print"}, TypeError, "on_report must be a function"),
    ],
)
def test_bad_arguments_are_told_in_the_constructor(
    arguments: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        Session(**arguments)


async def test_what_cannot_be_pickled_is_named(session: Session) -> None:
    lock = threading.Lock()

    def train(ctx: Context) -> None:
        with lock:
            pass

    with pytest.raises(TypeError, match=r"the variable lock \(lock\), used by .*train, cannot be"):
        await session.run(train)
    with pytest.raises(TypeError, match=r"the argument guard \(lock\) cannot be sent"):
        await session.run(lambda ctx, guard: None, guard=lock)
    with pytest.raises(TypeError, match="train must be a function of a Context, got int"):
        await session.run(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"\(ctx, epoch=...\), but its parameters are .*epochs"):
        await session.run(lambda ctx, epochs: None, epoch=3)
    await assert_usable(session)


async def test_a_result_that_cannot_be_pickled_is_told_with_its_rank(session: Session) -> None:
    with pytest.raises(TypeError, match=r"the lock that rank [01] returned cannot be pickled"):
        await session.run(lambda ctx: threading.Lock())
    await assert_usable(session)


async def test_more_workers_than_the_cluster_has_room_for(cluster: None) -> None:
    with pytest.raises(StartupError) as caught:
        await Session(num_workers=50).start()
    assert "num_workers=50 with CPU 1 each" in str(caught.value)
    assert "the cluster has CPU 5 (" in str(caught.value)
    assert "Lower num_workers" in str(caught.value)


async def test_workers_that_find_no_room_in_time(session: Session) -> None:
    began_at = time.monotonic()
    with pytest.raises(StartupError, match=r"not placed within 1 s: the cluster has CPU 5 \([23]"):
        await Session(num_workers=4, startup_timeout_s=1).start()
    assert time.monotonic() - began_at < 5


async def test_closing_ends_a_start_that_waits_for_room(session: Session) -> None:
    def waiting() -> list[Any]:
        groups = placement_group_table().values()
        return [group for group in groups if group["state"] not in ("CREATED", "REMOVED")]

    other = Session(num_workers=4, startup_timeout_s=20)
    starting = asyncio.create_task(other.start())
    while not waiting():
        await asyncio.sleep(0.05)
    began_at = time.monotonic()
    await other.close()
    with pytest.raises(GroupAborted, match="the session was closed"):
        await starting
    assert time.monotonic() - began_at < WITHIN_S
    assert other.state is SessionState.CLOSED and not waiting()
    await assert_usable(session)


async def test_a_session_that_is_starting_is_not_started_once_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connected, has_room = [], asyncio.Event()

    def connect(*_: object, **__: object) -> connecting.Connection:
        connected.append(connecting.Connection(None, False))
        return connected[-1]

    async def wait(*_: object, **__: object) -> None:
        await has_room.wait()

    monkeypatch.setattr(connecting, "connect", connect)
    monkeypatch.setattr(LocalSession, "start", wait)
    session = Session()
    starting = asyncio.create_task(session.start())
    while not connected:
        await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="is starting already; await that start"):
        await asyncio.wait_for(session.start(), 5)
    assert len(connected) == 1
    has_room.set()
    assert await starting is session and session.state is SessionState.READY
    await session.close()


@pytest.mark.slow  # The tests' own cluster has been told of GPUs.
def test_a_gpu_where_there_is_none() -> None:
    code = """
import asyncio
import chorusline as cl
from chorusline.actors.errors import StartupError

try:
    asyncio.run(cl.Session(num_workers=1, use_gpu=True).start())
except StartupError as error:
    print(error)
"""
    assert "use_gpu=True: the cluster has no GPU" in output_of("-c", code, timeout_s=100)


async def test_as_many_workers_as_fit_between_fewest_and_most(session: Session) -> None:
    free = ray.available_resources()["CPU"]
    async with Session(num_workers=(1, 8)) as other:
        assert 1 <= other.num_workers == int(free) < 8
    assert ray.available_resources()["CPU"] == free, "and who starts now has them again"


async def test_run_inside_a_loop_says_what_to_do() -> None:
    with pytest.raises(RuntimeError, match=r"await session.run"):
        run(name_ranks)


async def test_a_session_that_is_not_open_says_what_to_do(cluster: None) -> None:
    session = Session()
    with pytest.raises(RuntimeError, match="has not started"):
        await session.run(name_ranks)
    await session.close()
    await session.close()
    with pytest.raises(RuntimeError, match="is closed; make a new Session"):
        await session.run(name_ranks)
    with pytest.raises(RuntimeError, match="is closed"):
        await session.start()


async def test_an_address_where_this_process_is_not_connected_is_refused_and_not_left_out(
    cluster: None,
) -> None:
    ours = ray.get_runtime_context().gcs_address
    nowhere = f"'127.0.0.1:1' does not answer.*connected to the cluster at '{ours}'.*shutdown"
    with pytest.raises(StartupError, match=nowhere):
        await Session(1, address="127.0.0.1:1").start()
    with pytest.raises(StartupError, match="ray job submit"):
        await Session(1, address="ray://127.0.0.1:10001").start()
    of_this_machine = f"localhost:{ours.rpartition(':')[2]}"
    for address in (None, "auto", "local", ours, of_this_machine):
        connecting.connect(address).leave()


@pytest.mark.slow
async def test_the_address_of_another_cluster_is_refused_and_its_own_goes_on(
    session: Session,
) -> None:
    gcs, client, agent = free_ports(3)
    other = f"127.0.0.1:{gcs}"
    flags = (
        *(f"--port={gcs}", "--num-cpus=1", "--include-dashboard=false"),
        *(f"--ray-client-server-port={client}", f"--dashboard-agent-listen-port={agent}"),
    )
    with head_node(*flags, is_up=lambda: not refuses(other, 1.0)):
        with pytest.raises(StartupError, match=f"{other}' is another cluster, and this process"):
            await Session(1, address=other).start()
        assert await session.run(lambda ctx: ctx.world_size) == [2, 2]


def loop_forever(ctx: Context) -> None:
    while True:
        ctx.barrier()
        time.sleep(0.01)


# ── The caller leaves ────────────────────────────────────────────────────────────────────────────


async def test_a_cancelled_run_stops_the_ranks_before_it_returns(session: Session) -> None:
    before = await session.run(lambda ctx: os.getpid())
    running = asyncio.create_task(session.run(loop_forever))
    await asyncio.sleep(0.5)
    running.cancel()
    began_at = time.monotonic()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert time.monotonic() - began_at < WITHIN_S
    snapshot = await session.snapshot()
    assert [w.state.value for w in snapshot.workers if isinstance(w, WorkerSnapshot)] == [
        "idle"
    ] * 2
    assert await session.run(lambda ctx: os.getpid()) == before


async def test_closing_ends_a_run_in_progress(cluster: None) -> None:
    session = await Session(num_workers=2).start()
    running = asyncio.create_task(session.run(loop_forever))
    await asyncio.sleep(0.5)
    await session.close()
    with pytest.raises(GroupAborted, match="the session was closed"):
        await running


async def test_closing_ends_a_run_that_still_replaces_a_worker_and_starts_nothing(
    cluster: None,
) -> None:
    session = await Session(num_workers=2).start()
    name = session.name
    first = await session.run(lambda ctx: os.getpid())
    worker_group = session._holder.worker_group
    assert worker_group is not None
    os.kill(first[0], signal.SIGKILL)
    running = asyncio.create_task(session.run(lambda ctx: os.getpid()))
    give_up_at = time.monotonic() + 30
    while not worker_group._starting and time.monotonic() < give_up_at:
        await asyncio.sleep(0.005)
    began_at = time.monotonic()
    await session.close()
    with pytest.raises(GroupAborted, match="the session was closed"):
        await running
    assert time.monotonic() - began_at < WITHIN_S
    named = [one["name"] for one in ray.util.list_named_actors(all_namespaces=True)]
    assert not any(one.startswith(name) for one in named), named


class EndsLate(cl.Tracker):
    """Waits at its end."""

    def __init__(self) -> None:
        self.ending, self.gate = threading.Event(), threading.Event()

    def end(self, status: str, error: str) -> None:
        self.ending.set()
        self.gate.wait(30)


async def test_an_interrupt_while_a_tracker_writes_its_end_keeps_the_results(
    cluster: None, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = EndsLate()
    async with Session(num_workers=2, trackers=[tracker]) as session:
        running = asyncio.create_task(session.run(lambda ctx: ctx.rank))
        assert await asyncio.to_thread(tracker.ending.wait, 60)
        running.cancel()
        assert await running == [0, 1]
        assert "the run had ended, and its results are returned" in caplog.text
        tracker.gate.set()
        assert await session.run(lambda ctx: ctx.rank) == [0, 1]


async def test_a_session_whose_start_has_failed_is_not_the_latest_one(cluster: None) -> None:
    async with Session(num_workers=1) as session:
        few = {"CPU": 0.1, "none_has_it": 1.0}
        with pytest.raises(StartupError):
            await Session(1, resources_per_worker=few, startup_timeout_s=1).start()
        assert cells.latest_session() is session


@pytest.mark.promise("the end of a session")
def test_a_session_of_a_cluster_that_is_gone_leaves_the_next_one_alone() -> None:
    script = """
import asyncio
import ray
import chorusline as cl

async def main():
    first = await cl.Session(1, progress=False).start()
    ray.shutdown()
    second = await cl.Session(1, progress=False).start()
    try:
        await first.run(lambda ctx: ctx.rank)
    except RuntimeError as error:
        assert "no longer connected to Ray" in str(error), error
    else:
        raise AssertionError("it has run")
    await first.close()
    assert await second.run(lambda ctx: ctx.rank) == [0]
    await second.close()
    assert not ray.is_initialized()
    print("both closed")

asyncio.run(main())
"""
    assert "both closed" in output_of("-c", script, timeout_s=90)


@pytest.mark.promise("the end of a session")
def test_run_starts_a_local_cluster_and_leaves_nothing() -> None:
    script = """
import os, threading, time
import ray
from chorusline.actors.errors import StartupError
from chorusline.runtime.session.one_run import run

def train(ctx, base):
    ctx.barrier()
    return base + ctx.rank, os.getpid()

def refused(error, text, *arguments, **options):
    try:
        run(*arguments, **options)
    except error as caught:
        assert text in str(caught), caught
    else:
        raise AssertionError(f"no {error.__name__}")
    assert not ray.is_initialized(), "told before Ray is touched"

if __name__ == "__main__":
    refused(TypeError, "argument base (lock)", train, base=threading.Lock())
    refused(ValueError, "num_workers must be at least 1", train, num_workers=0, base=10)
    refused(StartupError, "no Ray cluster answers", train, address="127.0.0.1:1", base=10)
    refused(StartupError, "ray job submit", train, address="ray://127.0.0.1:10001", base=10)
    os.environ["RAY_ADDRESS"] = "127.0.0.1:1"  # As in a Ray job, whose cluster has to be taken.
    refused(StartupError, "no Ray cluster answers at '127.0.0.1:1'", train, base=10)
    del os.environ["RAY_ADDRESS"]
    results = run(train, num_workers=2, base=10)
    assert [value for value, _ in results] == [10, 11], results
    assert not ray.is_initialized()
    deadline = time.monotonic() + 10
    while any(os.path.exists(f"/proc/{pid}") for _, pid in results):
        assert time.monotonic() < deadline, "workers are left behind"
        time.sleep(0.05)
    print("nothing left")
"""
    assert "nothing left" in output_of("-c", script, timeout_s=90, is_forked=False)


@pytest.mark.slow
async def test_a_worker_that_ray_starts_has_one_thread_for_one_cpu_and_its_driver_no_torch(
    cluster: None,
) -> None:
    async with Session(1, env_vars=STARTED_BY_RAY) as session:
        assert await session.run(lambda ctx: torch.get_num_threads()) == [1]
        assert session._holder.worker_group is not None
        look = session._holder.worker_group._driver.__ray_call__
        assert not await look.remote(lambda _: "torch" in sys.modules), "it starts slowly with it"


@pytest.mark.slow
async def test_a_worker_computes_with_as_many_threads_as_it_has_cpus(cluster: None) -> None:
    def threads(ctx: Context) -> tuple[int, int, str | None]:
        given = torch.get_num_threads()
        torch.set_num_threads(3)
        return given, torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")

    async with Session(1, resources_per_worker={"CPU": 2}, env_vars=STARTED_BY_RAY) as session:
        assert await session.run(threads) == [(2, 3, "2")]
