"""A session seen from outside: its trace, its metrics, and a driver that nobody needs meanwhile."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from chorusline.actors.driver.driver import Driver
from chorusline.actors.driver.events import (
    RankEnded,
    RankFinished,
    RankFroze,
    RunStarted,
    WorkerRegistered,
)
from chorusline.actors.driver.membership import Membership
from chorusline.actors.messages.messages import Frozen, Success
from chorusline.actors.messages.run_status import RunStatus
from chorusline.actors.messages.whereabouts import Whereabouts
from chorusline.actors.ray_calls.versions import difference, versions_here
from chorusline.actors.reporting.metrics import (
    COUNTERS,
    GAUGES,
    OF_DRIVER,
    REPORTED,
    Look,
    Meter,
    Publisher,
)
from chorusline.collectives.diagnosis.flight_recorder import CAPACITY, FlightRecording
from chorusline.collectives.group import Group
from chorusline.collectives.stores.store import HashStore
from chorusline.runtime.data_parallel.distributed_data_parallel import DistributedDataParallel
from chorusline.runtime.join.join import Join
from chorusline.runtime.program.context import Context
from chorusline.runtime.session.session import Session
from chorusline.runtime.session.trace import RankTraced, clock_offsets, events
from chorusline.runtime.zero.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from tests import ROOT
from tests.harness.programs import last_line_of
from tests.references.driver_events import GONE, death, request, worker


@pytest.fixture(scope="module")
async def session(cluster: None) -> AsyncIterator[Session]:
    async with Session(
        num_workers=(1, 2),
        resources_per_worker={"CPU": 0.1},
        timeout_s=30,
        on_report=lambda report: None,
    ) as session:
        yield session


def take_steps(ctx: Context, count: int, pause_s: float = 0.0) -> int:
    model = DistributedDataParallel(torch.nn.Linear(4, 3))
    optim = ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.1)
    for _ in range(count):
        model(torch.ones(2, 4)).sum().backward()
        optim.step()
        optim.zero_grad()
        time.sleep(pause_s)
        ctx.report(loss=1.0)
    return count


def take_steps_of_epochs(ctx: Context, count: int) -> None:
    """In Join, and in ctx.steps: a worker could come after each of these."""
    model = ctx.register("model", DistributedDataParallel(torch.nn.Linear(4, 3)))
    optim = ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.1, replicas=2)
    ctx.register("optim", optim)
    for epoch in ctx.epochs(2):
        with Join([model, optim]):
            for batch in ctx.shard(torch.ones(2 * count, 4), 1, epoch=epoch):
                model(batch).sum().backward()
                optim.step()
                optim.zero_grad()
        for step in ctx.steps(torch.ones(2 * count, 4), 2, 1, epoch=epoch):
            for batch in step:
                model(batch).sum().backward()
            optim.step()
            optim.zero_grad()


# ── Trace ────────────────────────────────────────────────────────────────────────────────────────


async def test_a_trace_holds_the_collectives_of_all_ranks_with_times_and_arrows(
    session: Session, tmp_path: Path
) -> None:
    await session.run(take_steps, count=3)
    path = tmp_path / "trace.json"
    count = await session.trace(path)
    told = json.loads(path.read_text())["traceEvents"]
    boxes = [event for event in told if event["ph"] == "X"]
    assert count == len(boxes)
    of_rank = [sorted_boxes(boxes, seat + 1) for seat in range(2)]
    assert [b["name"] for b in of_rank[0]] == [b["name"] for b in of_rank[1]]
    assert {"all_reduce", "reduce_scatter", "all_gather"} <= {b["name"] for b in of_rank[0]}
    for box in boxes:
        assert box["dur"] >= 0 and box["ts"] >= 0
        assert box["args"]["state"] == "done"
    assert any("test_observing.py:" in box["args"]["line"] for box in boxes)
    # All wait for all: no rank has ended a collective before the other has begun it.
    for ours, theirs in zip(*of_rank, strict=True):
        assert ours["ts"] + ours["dur"] >= theirs["ts"] - 1000
        assert theirs["ts"] + theirs["dur"] >= ours["ts"] - 1000
    starts = [event["id"] for event in told if event["ph"] == "s"]
    assert starts and sorted(starts) == sorted(e["id"] for e in told if e["ph"] == "f")
    names = {event["args"]["name"] for event in told if event["name"] == "process_name"}
    assert {name.split(" on ")[0] for name in names} == {"rank 0", "rank 1"}


def sorted_boxes(boxes: list[dict[str, Any]], pid: int) -> list[dict[str, Any]]:
    return sorted((b for b in boxes if b["pid"] == pid), key=lambda box: float(box["ts"]))


async def test_a_trace_is_what_viewers_ask_for(session: Session, tmp_path: Path) -> None:
    """Chrome's trace event format; Perfetto drops boxes of a row that overlap without nesting."""
    await session.run(take_steps, count=2)
    path = tmp_path / "trace.json"
    await session.trace(path)
    told = json.loads(path.read_text())["traceEvents"]
    rows: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for event in told:
        assert event["ph"] in ("X", "M", "s", "f")
        assert type(event["pid"]) is int and event["pid"] > 0 and type(event["tid"]) is int
        assert event["name"]
        if event["ph"] == "X":
            rows.setdefault((event["pid"], event["tid"]), []).append(event)
    named = {(e["pid"], e["tid"]) for e in told if e["name"] == "thread_name"}
    assert set(rows) == named and {pid for pid, _ in named} == {1, 2}
    for boxes in rows.values():
        for before, after in pairwise(sorted(boxes, key=lambda box: float(box["ts"]))):
            assert before["ts"] + before["dur"] <= after["ts"]
    ends = {e["id"]: e for e in told if e["ph"] == "f"}
    starts = [e for e in told if e["ph"] == "s"]
    assert len(starts) == len(ends) == len({e["id"] for e in starts})
    assert all(e["pid"] == 1 and ends[e["id"]]["pid"] == 2 for e in starts)


def test_what_is_in_flight_at_once_has_rows_of_its_own() -> None:
    with Group.create(HashStore(), 0, 1) as group:
        for _ in range(4):
            group.barrier().wait()
        recording = group.flight_recorder
    times = [(0.0, 3.0), (1.0, 2.0), (2.5, 5.0), (4.0, 6.0)]
    collectives = tuple(
        replace(collective, issued_at=start, ended_at=stop)
        for collective, (start, stop) in zip(recording.collectives, times, strict=True)
    )
    told = Whereabouts((replace(recording, collectives=collectives),), "", True)
    made = events([RankTraced(0, 0, "a", told)])
    rows = [event["tid"] for event in made if event["ph"] == "X"]
    assert rows == [1, 2, 2, 1]
    assert [e["tid"] for e in made if e["name"] == "thread_name"] == [1, 2]


@pytest.mark.parametrize(("place", "num_arrows"), [("barrier", 3), ("send to rank 1", 0)])
def test_arrows_lead_to_the_same_collective_and_from_no_message(
    place: str, num_arrows: int
) -> None:
    """Ranks count messages by themselves, so that equal numbers say nothing."""
    with Group.create(HashStore(), 0, 1) as group:
        for _ in range(3):
            group.barrier().wait()
        recording = group.flight_recorder
    issued = tuple(replace(collective, place=place) for collective in recording.collectives)
    told = Whereabouts((replace(recording, collectives=issued),), "", True)
    made = events([RankTraced(rank, rank, "a", told) for rank in range(2)])
    assert [event["ph"] for event in made if event["ph"] in "sf"] == ["s", "f"] * num_arrows


def shifted(recording: FlightRecording, by_s: float) -> FlightRecording:
    return replace(
        recording,
        read_at=recording.read_at + by_s,
        collectives=tuple(
            replace(c, issued_at=c.issued_at + by_s, ended_at=(c.ended_at or 0) + by_s)
            for c in recording.collectives
        ),
    )


def test_clocks_of_hosts_are_aligned_by_the_ends_of_collectives() -> None:
    with Group.create(HashStore(), 0, 1) as group:
        for _ in range(9):
            group.barrier().wait()
        recording = group.flight_recorder
    ranks = [
        RankTraced(seat, seat, host, Whereabouts((shifted(recording, by_s),), "", True))
        for seat, (host, by_s) in enumerate([("a", 0.0), ("b", 7.5), ("b", 7.5), ("c", -2.0)])
    ]
    offsets = clock_offsets(ranks)
    assert offsets == pytest.approx({0: 0.0, 1: 7.5, 2: 7.5, 3: -2.0}, abs=1e-6)
    boxes = [event for event in events(ranks) if event["ph"] == "X"]
    first = [box["ts"] for box in boxes if box["pid"] == 1]
    for seat in (1, 2, 3):
        assert [b["ts"] for b in boxes if b["pid"] == seat + 1] == pytest.approx(first, abs=5)


# ── Metrics ──────────────────────────────────────────────────────────────────────────────────────


def look(steps: RunStatus, group: Group | None, *, is_running: bool = True) -> Look:
    return Look(steps, group, is_running, 4, 1 << 20, 0)


def test_a_worker_that_moves_publishes_all_of_its_metrics_from_its_new_seat() -> None:
    publisher = Publisher("night", 3, sys.exit)  # Ends the thread at its first look.
    publisher.move_to(1)
    seats = {name: one.info["default_tags"]["seat"] for name, one in publisher._metrics.items()}
    assert seats == dict.fromkeys([*GAUGES, *COUNTERS, *REPORTED], "1")
    assert publisher._reported.info["default_tags"]["seat"] == "1"


def test_a_meter_reads_what_happened_since_its_last_look() -> None:
    meter, steps = Meter(), RunStatus(rank=0)
    with Group.create(HashStore(), 0, 1) as group:
        assert "chorusline_steps" not in meter.read(look(steps, group))
        began_at = time.monotonic()
        for _ in range(5):
            group.all_reduce(torch.ones(10, dtype=torch.float64)).wait()
        steps.taken, steps.waited_s, steps.has_joined, steps.batches_left = 5, 0.25, True, 3
        time.sleep(0.05)
        read = meter.read(look(steps, group))
        elapsed_s = time.monotonic() - began_at
        assert read["chorusline_steps"] == read["chorusline_collectives"] == 5
        assert read["chorusline_step_seconds"] >= 0.01
        assert read["chorusline_wait_seconds"] == 0.25
        assert 0 < read["chorusline_communication_seconds"] <= elapsed_s
        assert (read["chorusline_joined"], read["chorusline_batches_left"]) == (1, 3)
        assert (read["chorusline_generation"], read["chorusline_world_size"]) == (4, 1)
        again = meter.read(look(steps, group))
        assert "chorusline_steps" not in again
        assert again["chorusline_wait_seconds"] == again["chorusline_collectives"] == 0
        between = meter.read(look(steps, group, is_running=False))
        assert (between["chorusline_joined"], between["chorusline_rank"]) == (0, -1)
        another = RunStatus(rank=0, taken=2)
        assert meter.read(look(another, group))["chorusline_steps"] == 2
        assert set(read) <= set(GAUGES) | set(COUNTERS)


def test_activity_stands_for_what_the_ring_has_lost_and_counts_overlaps_once() -> None:
    with Group.create(HashStore(), 0, 1) as group:
        since = time.monotonic()
        for _ in range(3 * CAPACITY):
            group.all_reduce(torch.ones(7, dtype=torch.int16)).wait()
        until = time.monotonic()
        activity = group.activity(since, until)
        assert 0 < activity.in_flight_s <= until - since
        assert activity.bytes_per_element == 2
        assert group.activity(until, until + 1).in_flight_s == 0


def test_the_dashboard_asks_for_metrics_that_exist_and_for_all_of_them() -> None:
    board = json.loads((ROOT / "docs/grafana-dashboard.json").read_text())
    asked = " ".join(t["expr"] for panel in board["panels"] for t in panel.get("targets", []))
    exist = {f"ray_{name}" for name in (*GAUGES, *REPORTED)}
    exist |= {f"ray_{name}_total" for name in (*COUNTERS, *OF_DRIVER)}
    named = set(re.findall(r"ray_chorusline\w+", asked))
    assert named <= exist
    left_out = {"ray_chorusline_rank", "ray_chorusline_world_size", "ray_chorusline_batches_left"}
    assert exist - named <= left_out


SCRAPED = """
import asyncio, json, re, sys, time, urllib.request
from pathlib import Path
import ray, torch
import chorusline as cl

def train(ctx, over):
    model = cl.DistributedDataParallel(torch.nn.Linear(64, 64))
    optim = cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.1)
    while ctx.reduce(float(not over.exists()), "min"):
        model(torch.ones(2, 64)).sum().backward()
        optim.step(); optim.zero_grad()
        ctx.report(loss=0.25, top={"one": 0.5}, note="no number")
        time.sleep(0.02)

def scraped():
    port = ray.nodes()[0]["MetricsExportPort"]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        return answer.read().decode()

async def main():
    ray.init("local", num_cpus=2, include_dashboard=False,
             _system_config={"metrics_report_interval_ms": 1000})
    seen, over, until = {}, Path(sys.argv[1]), time.monotonic() + 60
    async with cl.Session(num_workers=2) as session:
        running = asyncio.create_task(session.run(train, over=over))
        while not over.exists():
            await asyncio.sleep(0.2)
            for line in (await asyncio.to_thread(scraped)).splitlines():
                if line.startswith("ray_chorusline") and (
                    found := re.match(r'(\\w+)\\{.*seat="(\\d)".*\\} (.*)', line)):
                    if name := re.search(r'[{,]name="([^"]*)"', line):
                        seen[f"{name[1]} of {found[2]}"] = float(found[3])
                    seen[found[1] + found[2]] = max(
                        float(found[3]), seen.get(found[1] + found[2], -1.0))
            steps = [seen.get("ray_chorusline_steps_total" + seat, 0) for seat in "01"]
            told = [seen.get("top.one of " + seat, 0) for seat in "01"]
            if min(*steps, *told) > 0.2 and min(steps) > 10 or time.monotonic() > until:
                over.touch()
        await running
    print(json.dumps(seen))

asyncio.run(main())
"""


def test_prometheus_scrapes_what_workers_do(tmp_path: Path) -> None:
    seen = last_line_of("-c", SCRAPED, tmp_path / "over", timeout_s=110)
    for seat in "01":
        assert seen[f"ray_chorusline_steps_total{seat}"] > 10
        assert 0 < seen[f"ray_chorusline_step_seconds{seat}"] < 5
        assert seen[f"ray_chorusline_communication_seconds_total{seat}"] > 0
        assert seen[f"ray_chorusline_wait_seconds_total{seat}"] > 0
        assert seen[f"ray_chorusline_sent_bytes_total{seat}"] > 10 * 64 * 64 * 4
        assert seen[f"ray_chorusline_rank{seat}"] == float(seat)
        assert seen[f"ray_chorusline_world_size{seat}"] == 2
        assert seen[f"ray_chorusline_memory_bytes{seat}"] > 50e6
        assert (seen[f"loss of {seat}"], seen[f"top.one of {seat}"]) == (0.25, 0.5)


# ── A driver that nobody needs ───────────────────────────────────────────────────────────────────


async def test_ranks_take_steps_while_the_drivers_process_is_stopped(session: Session) -> None:
    """A step in steady state sends the driver nothing that it waits for."""
    before = await session.snapshot()
    assert before.driver is not None
    running = asyncio.create_task(session.run(take_steps, count=250, pause_s=0.02))
    assert session._holder.worker_group is not None
    driver = await session._holder.worker_group._driver.__ray_call__.remote(lambda _: os.getpid())
    deadline = time.monotonic() + 60

    async def steps_taken() -> int:
        assert session._holder.worker_group is not None
        seen = await session._holder.worker_group.workers_seen(5)
        assert not running.done() and time.monotonic() < deadline
        # One that is not in the run yet tells of the run before.
        begun = [word for word in seen if not isinstance(word, str) and word.rank is not None]
        return min(word.status.taken for word in begun) if len(begun) == 2 else 0

    while not 0 < await steps_taken() < 100:
        await asyncio.sleep(0.02)
    os.kill(driver, signal.SIGSTOP)
    try:
        at_stop = await steps_taken()
        while await steps_taken() < at_stop + 30:
            await asyncio.sleep(0.02)
    finally:
        os.kill(driver, signal.SIGCONT)
    assert await running == [250, 250]


def take_steps_and_count(ctx: Context, count: int, driver: Any) -> tuple[list[str], list[str]]:
    """Which methods of actors this process calls during its steps; and with one call, to see that
    it is counted."""
    sent: list[str] = []
    send = ray.actor.ActorMethod._remote

    def counted(method: Any, *args: Any, **kwargs: Any) -> Any:
        sent.append(method._method_name)
        return send(method, *args, **kwargs)

    take_steps(ctx, count=3)
    ray.actor.ActorMethod._remote = counted
    try:
        take_steps(ctx, count)
        take_steps_of_epochs(ctx, count)
        during = list(sent)
        driver.snapshot.remote()
    finally:
        ray.actor.ActorMethod._remote = send
    return during, sent


@pytest.mark.promise("a step without a failure")
async def test_a_step_sends_no_message_to_the_driver_or_any_actor(session: Session) -> None:
    assert session._holder.worker_group is not None
    driver = session._holder.worker_group._driver
    for during, all_of_them in await session.run(take_steps_and_count, count=50, driver=driver):
        assert during == []
        assert all_of_them == ["snapshot"]


# ── What the driver counts ───────────────────────────────────────────────────────────────────────


class Noted:
    """In the place of the driver's counters, which can be written only."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def add(self, name: str) -> None:
        self.names.append(name)


def noted_by(driver: Any) -> list[str]:
    """What has been counted since this was asked last."""
    before, driver._counters = driver._counters, Noted()
    return list(getattr(before, "names", ()))


def lose_rank_1(ctx: Context) -> int:
    model = DistributedDataParallel(torch.nn.Linear(4, 3))
    optim = ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.1, replicas=2)
    for step in range(3):
        model(torch.ones(2, 4)).sum().backward()
        if (ctx.rank, step) == (1, 1):
            os.kill(os.getpid(), signal.SIGKILL)
        optim.step()
        optim.zero_grad()
    return ctx.world_size


@pytest.mark.parametrize("is_reported", [False, True])
def test_a_worker_counts_as_lost_once_whether_or_not_ray_reports_its_death(
    is_reported: bool,
) -> None:
    driver: Any = object.__new__(Driver)
    driver._membership, driver._counters, driver._counted = Membership(), Noted(), set()
    for seat in range(2):
        driver._membership.handle(WorkerRegistered(worker(seat)))
    driver._membership.handle(RunStarted(request(max_failures=None)))
    saw = Frozen(0, 0, (), GONE, 0, missing="no model is registered", ended=(1,))
    ended = RankEnded(Success(0, b"", collectives=0), "worker-0-0")
    for event in (RankFroze(saw), *([death(1)] * is_reported), RankFinished(0, 1), ended):
        driver._count(event, driver._membership.handle(event))
    assert driver._membership.handle(death(1)) == [], "the run is over"
    assert driver._counters.names == ["chorusline_lost_workers", "chorusline_recoveries"]


async def test_lost_workers_recoveries_and_failed_runs_are_counted_and_generations_shown(
    session: Session,
) -> None:
    assert session._holder.worker_group is not None
    look = session._holder.worker_group._driver.__ray_call__
    await look.remote(noted_by)
    assert await session.run(lambda ctx: ctx.world_size) == [2, 2]
    assert await look.remote(noted_by) == []
    with pytest.raises(ZeroDivisionError):
        await session.run(lambda ctx: 1 / 0)
    assert await look.remote(noted_by) == ["chorusline_failed_runs"]
    running = asyncio.create_task(session.run(take_steps, count=1000, pause_s=0.05))
    await asyncio.sleep(0.2)
    running.cancel()
    await asyncio.wait([running])
    assert await look.remote(noted_by) == [], "who cancels a run knows of it"
    assert await session.run(lose_rank_1) == [1]
    # A rank may have seen the death before Ray reports it.
    counted = sorted(await look.remote(noted_by))
    assert counted == ["chorusline_lost_workers", "chorusline_recoveries"]
    # And the gauge of the survivor has the generation in which it continued.
    driver = (await session.snapshot()).driver
    of_rank_0 = session._holder.worker_group._workers[0].__ray_call__
    generation = await of_rank_0.remote(lambda worker: worker._look().generation)
    assert driver is not None and generation == driver.generation > 0
    async with asyncio.timeout(60):
        while await session.run(lambda ctx: ctx.world_size) != [2, 2]:
            await asyncio.sleep(0.2)


# ── Versions ─────────────────────────────────────────────────────────────────────────────────────


def test_workers_with_other_versions_are_told_apart_by_what_matters() -> None:
    ours = {"Python": "3.11.7", "torch": "2.13.0+cpu", "chorusline": "0.1.0"}
    assert difference(ours | {"torch": "2.13.0+cu130", "Python": "3.11.9"}, ours) == ""
    assert difference(ours | {"chorusline": "unknown"}, ours) == ""
    told = difference(ours | {"torch": "2.12.1", "Python": "3.12.1"}, ours)
    assert told.startswith("runs Python 3.12.1 (the caller has 3.11.7) and torch 2.12.1 (")
    assert "install the same on all nodes" in told
    assert difference(versions_here(), versions_here()) == ""


async def test_a_driver_refuses_workers_whose_torch_is_not_the_callers(session: Session) -> None:
    worker_group = session._holder.worker_group
    assert worker_group is not None
    theirs = versions_here() | {"torch": "1.0.0"}
    unfit = await worker_group._driver.adopt.remote(worker_group._workers, 5.0, theirs)
    assert [one.seat for one in unfit] == [0, 1]
    assert f"runs torch {torch.__version__} (the caller has 1.0.0)" in unfit[0].reason
    assert ray.is_initialized()
