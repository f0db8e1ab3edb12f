"""What the ranks report right before their function ends has been heard when the run is over."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

import chorusline as cl
from chorusline.actors.ray_calls.calls import ActorGone
from chorusline.actors.reporting import worker_logs
from chorusline.actors.reporting.report_buffer import Pulled, ReportBuffer
from chorusline.actors.reporting.worker_logs import ERR, OUT, Output, Position, Printed
from chorusline.actors.worker.worker import Worker
from chorusline.actors.worker_group.news import Listener, News
from chorusline.runtime.session.showing import news_pump
from chorusline.runtime.session.showing.news_pump import Audience, delivered_news
from chorusline.runtime.tracking.tracking import Tracking
from tests.harness.arrivals import FEW, at_full_size, has_ended, spares_ready

received: list[cl.Report] = []
MANY = 700


def hear(report: cl.Report) -> None:
    received.append(report)
    if len(received) % 50 == 0:
        time.sleep(0.01)  # Slower than the ranks report.


@pytest.fixture(scope="module")
async def session(cluster: None) -> AsyncIterator[cl.Session]:
    few = {"CPU": 0.1}
    async with cl.Session(2, resources_per_worker=few, timeout_s=30, on_report=hear) as session:
        yield session


def report_to_the_end(ctx: cl.Context, run: int, failing: int | None) -> int:
    """failing: the rank that fails then; None: both return."""
    for number in range(MANY):
        ctx.report(run=run, number=number)
    ctx.barrier()
    if ctx.rank == failing:
        raise LookupError("a slip of the user's")
    ctx.report(run=run, number=MANY)
    return ctx.rank


@pytest.mark.parametrize("failing", [None, 0, 1], ids=str)
async def test_all_reports_are_heard_before_a_run_is_over(
    session: cl.Session, failing: int | None
) -> None:
    received.clear()
    run = time.monotonic_ns()
    if failing is None:
        assert await session.run(report_to_the_end, run=run, failing=None) == [0, 1]
    else:
        with pytest.raises(LookupError, match="a slip"):
            await session.run(report_to_the_end, run=run, failing=failing)
    heard = list(received)
    assert {report.values["run"] for report in heard} == {run}, "none is of the run before"
    for rank in range(2):
        numbers = [report.values["number"] for report in heard if report.rank == rank]
        # The other rank may have reported once more before it was stopped.
        expected = [*range(MANY + 1)]
        assert numbers == expected or (failing is not None and numbers == expected[:-1])


async def test_the_only_report_of_a_short_run_is_heard(session: cl.Session) -> None:
    for number in range(10):
        received.clear()
        await session.run(lambda ctx, number=number: ctx.report(number=number))
        assert [(one.rank, one.values) for one in sorted(received, key=lambda one: one.rank)] == [
            (rank, {"number": number}) for rank in range(2)
        ]


class Stopped:
    """A worker whose process is stopped, and answers no pull until it goes on."""

    def __init__(self) -> None:
        self.reports = ReportBuffer(keep=True)
        self.num_asked = 0
        self.was_silent, self.goes_on = asyncio.Event(), asyncio.Event()
        self.pull = SimpleNamespace(remote=self._pull)

    async def _pull(self, run: int, since: int, printed_until: Any) -> Pulled:
        self.num_asked += 1
        try:
            await self.goes_on.wait()
        except asyncio.CancelledError:  # Nobody waits for the answer any more.
            self.was_silent.set()
            raise
        return self.reports.pulled(since, None, None)


async def test_the_last_reports_of_a_worker_that_was_silent_a_moment_ago_are_heard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(news_pump, "_ANSWER_S", 0.05)
    received.clear()
    worker, last = Stopped(), cl.Report(0, 0, 0.0, {"done": 1})
    audience = Audience(hear, None, None, has_output=False)
    async with delivered_news(Listener({0: worker}, ()), 0, audience):
        await worker.was_silent.wait()
        worker.reports.append(last)
        worker.goes_on.set()
    assert received == [last]


class Answering:
    """A worker that answers at once. printed: what it says of its output."""

    def __init__(self, printed: Printed | None = None) -> None:
        self.reports, self.printed = ReportBuffer(keep=True), printed
        self.is_silent = False
        self.read_rest_for: list[Any] = []
        self.pull = SimpleNamespace(remote=self._pull)
        self.read_rest = SimpleNamespace(remote=self._read_rest)

    async def _pull(self, run: int, since: int, printed_until: Any) -> Pulled:
        if self.is_silent:
            await asyncio.Event().wait()
        return self.reports.pulled(since, self.printed, None)

    async def _read_rest(self, *given: Any) -> None:
        self.read_rest_for.append(given)


async def test_a_long_backlog_is_heard_in_parts_before_the_run_returns() -> None:
    received.clear()
    worker = Answering()
    reports = [cl.Report(0, step, 0.0, {"loss": 1.0}) for step in range(50_000)]
    for one in reports:
        worker.reports.append(one)
    sizes = []
    listener = Listener({0: worker}, ())
    news = await listener.pull(0, 1.0)
    while news.reports:
        sizes.append(len(news.reports))
        received.extend(news.reports)
        assert news.has_more or len(received) == len(reports)
        news = await listener.pull(0, 1.0)
    assert received == reports and max(sizes) <= 10_000 and not news.has_more
    received.clear()
    audience = Audience(received.append, None, None, has_output=False)
    async with delivered_news(Listener({0: worker}, ()), 1, audience):
        for one in reports:
            worker.reports.append(one)
    assert received[-len(reports) :] == reports


def report_until_stopped(ctx: cl.Context, folder: Path) -> None:
    """Each process has a file with the number of its last report."""
    model = ctx.register("model", cl.DistributedDataParallel(torch.nn.Linear(1, 1)))
    optim = cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.1, replicas=2)
    ctx.register("optim", optim)
    number, pid = 0, os.getpid()
    for _ in ctx.epochs(1):
        with cl.Join([model, optim]):
            while not (folder / "stop").exists():
                ctx.report(number=number, pid=pid)
                (folder / f"{pid}").write_text(f"{ctx.world_size} {number}")
                number += 1
                time.sleep(0.02)
                model(torch.ones(1, 1)).sum().backward()
                optim.step()
                optim.zero_grad()


async def test_the_last_reports_of_a_worker_that_leaves_are_heard_though_a_spare_has_its_seat(
    cluster: None, tmp_path: Path
) -> None:
    heard: list[cl.Report] = []
    async with cl.Session(
        (1, 2), spares=1, resources_per_worker=FEW, timeout_s=30, on_report=heard.append
    ) as session:
        run = asyncio.create_task(session.run(report_until_stopped, folder=tmp_path))
        leaver = max(await at_full_size(tmp_path, 2, run))
        await spares_ready(session, 1)
        os.kill(leaver, signal.SIGTERM)
        await has_ended(leaver)
        (tmp_path / "stop").touch()
        await run
    _, last = (tmp_path / f"{leaver}").read_text().split()
    numbers = [one.values["number"] for one in heard if one.values["pid"] == leaver]
    assert numbers == [*range(int(last) + 1)]


def test_a_rank_that_has_rested_goes_on_counting_its_reports() -> None:
    worker: Any = object.__new__(Worker)
    of_before = ReportBuffer(keep=True)
    worker._output, worker._last = None, (3, of_before)
    request = SimpleNamespace(run=3, keep_reports=True, report_history=0)
    assert worker._buffer_of(request) is of_before
    of_next = worker._buffer_of(SimpleNamespace(**(vars(request) | {"run": 4})))
    assert of_next is not of_before and of_next.dropped == 0


def test_a_buffer_knows_whether_all_reports_have_arrived() -> None:
    reports = ReportBuffer(keep=True)
    assert reports.has_told_all()
    for _ in range(2):
        reports.append(cl.Report(0, 0, 0.0, {}))
    assert not reports.has_told_all()
    first = reports.pulled(0, None, None)
    assert not reports.has_told_all(), "the answer may not have arrived"
    reports.pulled(first.first + len(first.reports), None, None)
    assert reports.has_told_all()
    unheard = ReportBuffer(keep=False)
    unheard.append(cl.Report(0, 0, 0.0, {}))
    assert unheard.has_told_all()


async def test_a_worker_that_was_replaced_between_two_runs_is_no_loss_of_the_second() -> None:
    workers = {0: Answering(), 1: Answering()}
    listener = Listener(workers, ())
    assert (await listener.pull(0, 1.0)).num_lost == 0
    workers[0] = Answering()
    assert (await listener.pull(1, 1.0)).num_lost == 0
    workers[1] = Answering()
    assert (await listener.pull(1, 1.0)).num_lost == 1


async def test_a_silent_worker_is_not_asked_for_what_is_in_its_files() -> None:
    elsewhere = Printed((), Position(0, 0, 0), 0, False, ("/nowhere/out", "/nowhere/err"), "node")
    workers = {seat: Answering(elsewhere) for seat in range(2)}
    listener = Listener(workers, ())
    await listener.pull(0, 0.05)
    workers[0].is_silent = True
    for _ in range(2):
        await listener.pull(0, 0.05)
    assert not workers[0].read_rest_for
    assert len(workers[1].read_rest_for) == 2
    workers[0].is_silent = False
    await listener.pull(0, 0.06)  # With more patience it is asked, and answers.
    workers[1].is_silent = True
    await listener.pull(0, 0.05)
    assert len(workers[0].read_rest_for) == 1


async def test_where_the_output_of_a_lost_worker_is_comes_as_a_notice() -> None:
    """It is in no file: who has seen the files up to there has not seen it."""
    elsewhere = Printed((), Position(4, 10), 0, False, ("/nowhere/out", "/nowhere/err"), "node")
    worker = Answering(elsewhere)
    listener = Listener({0: worker}, ())
    await listener.pull(0, 1.0)

    async def is_gone(*_: object) -> None:
        raise ActorGone("killed")

    worker.pull = SimpleNamespace(remote=is_gone)
    ((_, printed),) = (await listener.pull(0, 1.0)).printed
    assert printed.is_notice and not printed.has_more
    assert b"its last output is in /nowhere/out" in printed.pieces[0].data


@pytest.mark.parametrize("keeps_its_seat", [True, False])
async def test_what_a_dead_worker_has_printed_is_heard_in_parts(
    keeps_its_seat: bool, tmp_path: Path
) -> None:
    files = str(tmp_path / "out"), str(tmp_path / "err")
    texts = {OUT: b"of stdout\n" * 500_000, ERR: b"of stderr\n" * 10}
    for file, text in zip(files, texts.values(), strict=True):
        Path(file).write_bytes(text)
    worker = Answering(Printed((), Position(0, 0, 0), 0, False, files, "node"))
    workers = {0: worker}
    listener = Listener(workers, ())
    await listener.pull(0, 1.0)

    async def is_gone(*_: object) -> None:
        raise ActorGone("killed")

    worker.pull = SimpleNamespace(remote=is_gone)
    if not keeps_its_seat:
        workers[0] = Answering()
    heard = dict.fromkeys(texts, b"")
    has_more = True
    while has_more:
        news = await listener.pull(0, 1.0)
        has_more = news.has_more
        pieces = [piece for _, printed in news.printed for piece in printed.pieces]
        assert sum(len(piece.data) for piece in pieces) <= 2 << 20
        for piece in pieces:
            heard[piece.kind] += piece.data
    assert heard == texts
    assert not (await listener.pull(0, 1.0)).printed and news.num_lost == 1


def test_output_that_cannot_be_read_now_costs_nothing(tmp_path: Path) -> None:
    output: Any = Output("node")
    output._beginning = Position(0, 0, 0)
    output._files = (str(tmp_path / "out"), str(tmp_path / "err"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker_logs, "_sizes", lambda: (3, 3))
        assert output.read(None) is None
        for file in output._files:
            Path(file).write_bytes(b"abc")
        assert [piece.data for piece in output.read(None).pieces] == [b"abc", b"abc"]


async def test_a_worker_that_hangs_holds_up_one_pull_of_each_patience() -> None:
    worker = Stopped()
    listener = Listener({0: worker}, ())
    for timeout_s, num_asked in ((0.01, 1), (0.01, 1), (0.02, 2), (0.02, 2), (0.01, 2)):
        await listener.pull(0, timeout_s)
        assert worker.num_asked == num_asked


class Saying:
    """A source of news, which are said in this order."""

    knows_all = True

    def __init__(self, *news: News) -> None:
        self.news = [*news]

    async def pull(self, run: int, timeout_s: float) -> News:
        return self.news.pop(0) if self.news else News()


class Steps(cl.Tracker):
    def __init__(self) -> None:
        self.taken: list[int] = []

    def log(self, step: int, numbers: Mapping[str, float], time: float) -> None:
        self.taken.append(step)


def said(notice: str, *steps: int) -> News:
    reports = [cl.Report(0, step - 1, float(step), {"loss": step}, step, step) for step in steps]
    return News(reports, notices=[notice])


@pytest.mark.parametrize("takes_s", [30, 0], ids=["stopped", "ended"])
async def test_an_error_in_on_report_keeps_nothing_from_the_trackers_and_the_progress(
    takes_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    received.clear()
    slip, shown, tracker = LookupError("a slip of the user's"), io.StringIO(), Steps()

    def fail(report: cl.Report) -> None:
        received.append(report)
        raise slip

    source, tracking = Saying(said("one came", 1, 2)), Tracking([tracker], "train", {}, {})
    progress = cl.Progress(console=Console(file=shown))
    audience = Audience(fail, None, progress, has_output=False, tracking=tracking)
    with pytest.raises(LookupError) as raised:
        async with delivered_news(source, 0, audience):
            try:
                await asyncio.sleep(takes_s)
            finally:
                source.news.append(said("one left", 3))  # While the ranks are stopped.
    await audience.finish(slip)
    assert raised.value is slip
    assert [report.step for report in received] == [0], "it was called again"
    assert tracker.taken == [1, 2, 3]
    assert "results are returned" not in caplog.text
    assert all(text in shown.getvalue() for text in ("one came", "one left", "loss 3"))


async def test_who_does_not_wait_for_the_last_output_gets_the_results_of_the_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Slow(Saying):
        """Always has more."""

        is_asked = asyncio.Event()

        async def pull(self, run: int, timeout_s: float) -> News:
            self.is_asked.set()
            await asyncio.sleep(0.01)
            return News(has_more_reports=True)

    source = Slow()

    async def results() -> str:
        audience = Audience(received.append, None, None, has_output=False)
        async with delivered_news(source, 0, audience):
            return "of the run"

    waiting = asyncio.create_task(results(), name="results")
    await source.is_asked.wait()
    await asyncio.sleep(0.1)
    waiting.cancel()
    assert await waiting == "of the run"
    assert "lines of its output may be missing" in caplog.text
