"""While a run is in progress: pull what its workers say, and deliver it to the listeners."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

from chorusline.actors.messages.messages import Report
from chorusline.actors.messages.run_status import RunStatus
from chorusline.actors.worker_group.news import News

from ... import notebook
from ...tracking.run_events import RunEvents
from ...tracking.tracker import TrackedEvent
from ...tracking.tracking import Tracking
from .progress import Progress
from .rank_output import RankLines
from .rays_notices import expect_deaths

_log = logging.getLogger("chorusline")

_PULL_S = 0.3
"""Seconds between two pulls. Each pull wakes the event loop, and a notebook sees an interrupt only
when the loop wakes."""

_ANSWER_S = 2.0
"""For a worker to answer a pull: a wait for one rank that hangs delays the news of all others."""

LAST_PULL_S = 5.0
"""More than _ANSWER_S: a worker that was silent a moment ago is asked, too (Listener)."""


class Source(Protocol):
    """Where the news of a run come from: a Listener, or the session host of a detached session."""

    @property
    def knows_all(self) -> bool: ...

    async def pull(self, run: int, timeout_s: float) -> News: ...


class Audience:
    """The listeners of one run.

    on_report: the user's function. view: a notebook's. progress: on the terminal or in the log.
    has_output: whether the ranks' output is shown here.
    tracking: on its way to the session's trackers.
    record: of a session host, which shows nothing, and holds the news for those who look.
    """

    def __init__(
        self,
        on_report: Callable[[Report], None] | None,
        view: notebook.LiveView | None,
        progress: Progress | None,
        has_output: bool,
        tracking: Tracking | None = None,
        record: Callable[[News], None] | None = None,
    ) -> None:
        self.view = view
        self._record = record
        self._tracking = tracking
        self._progress = progress
        self._events = RunEvents()
        self._statuses: tuple[RunStatus, ...] = ()
        listeners = (
            on_report,
            view.add if view is not None else None,
            progress.on_report if progress is not None and progress.counts_reports else None,
        )
        self._listeners = [one for one in listeners if one is not None]
        self.has_raised = False
        """Whether a listener has raised. It is not called again."""
        show_line = progress.show_line if progress is not None else notebook.show_line
        self._output = RankLines(show_line, notebook.show_figure) if has_output else None

    @property
    def wants_reports(self) -> bool:
        return bool(self._listeners or self._tracking or self._record)

    @property
    def is_there(self) -> bool:
        return self.wants_reports or self._output is not None or self._progress is not None

    def deliver(self, news: News) -> None:
        """Raises what a listener has raised, after the others have received everything."""
        # In a session host: its clients show what it hears, each from where it was.
        if self._record is not None:
            self._record(news)
            return
        if self._output is not None:
            for seat, printed in news.printed:
                self._output.take(seat, printed)
        raised: BaseException | None = None
        for report in news.reports:
            for listener in [*self._listeners]:
                try:
                    listener(report)
                except BaseException as error:
                    self._listeners.remove(listener)
                    self.has_raised, raised = True, raised or error
        if self._tracking is not None:
            self._tracking.look(news.reports, news.statuses)
        # A death is told here in one line: Ray's ten lines about it are left out from now on.
        if news.statuses:
            self._statuses = tuple(news.statuses.values())
            expect_deaths(one.pid for one in self._statuses)
            changes = (change for one in self._statuses for change in one.generation_changes)
            expect_deaths(gone.pid for change in changes for gone in change.gone)
        self._tell(self._events.look(self._statuses))
        for notice in news.notices:
            self._say(notice)
        if self._progress is not None:
            self._progress.look(news.statuses, news.numbers, news.num_lost, news.pause)
        if self.view is not None:
            self.view.pause = news.pause
        if raised is not None:
            raise raised

    def _tell(self, happened: Sequence[TrackedEvent]) -> None:
        """Show what has happened to the workers, wherever the run is shown."""
        for one in happened:
            if self._progress is not None:
                self._progress.happened(one)
            if self.view is not None:
                self.view.happened(one)
            self._say(one.text)

    def _say(self, line: str) -> None:
        if self._progress is not None:
            self._progress.say(line)
        elif self.view is not None:
            self.view.say(line)
        elif self.is_there:
            _log.warning("%s", line)

    def begin(self) -> None:
        if self._progress is not None:
            self._progress.begin()

    def end(self) -> None:
        """The run is over, and all was heard."""
        self._tell(self._events.look(self._statuses, is_over=True))
        if self._output is not None:
            self._output.end()
        if self._progress is not None:
            self._progress.end()

    async def finish(self, error: BaseException | None) -> None:
        """The call of `Session.run` is about to return, or to raise `error`."""
        try:
            if self.view is not None:
                await self.view.finish(error)
        finally:  # A second interrupt cancels the view while it asks the workers.
            if self._tracking is not None:
                await self._tracking.end(error)


def results_come_first(lacks: str) -> None:
    """The caller was cancelled while it waited for the last news of a run that has ended: it
    continues with the results. lacks: what may be missing then, for the log."""
    task = asyncio.current_task()
    assert task is not None
    task.uncancel()
    _log.warning(
        "interrupted while the last reports were written: the run had ended, and its results are "
        "returned; %s",
        lacks,
    )


@asynccontextmanager
async def delivered_news(listener: Source, run: int, audience: Audience) -> AsyncIterator[None]:
    """Hand on what the workers say while the body runs, and the rest when it has ended.

    If the audience raises, the body is cancelled, and the error is raised as it is, after the other
    listeners have received the rest.
    """
    is_over = asyncio.Event()

    async def pull_all(timeout_s: float) -> None:
        has_more = audience.is_there
        while has_more:
            news = await listener.pull(run, timeout_s)
            audience.deliver(news)
            has_more = news.has_more

    async def pass_on() -> None:
        is_last = False
        while not is_last:
            if listener.knows_all or not audience.is_there:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_PULL_S):
                        await is_over.wait()
            is_last = is_over.is_set()  # What comes during a pull needs another one.
            await pull_all(LAST_PULL_S if is_last else _ANSWER_S)

    audience.begin()
    try:
        async with asyncio.TaskGroup() as tasks:
            listening = [tasks.create_task(pass_on(), name="reports")]
            if audience.view is not None:
                drawing = audience.view.keep_drawing(is_over)
                listening.append(tasks.create_task(drawing, name="view"))
            try:
                yield
            except BaseException:
                is_over.set()
                # After an interrupt, too: the task group would cancel the last pull. It begins
                # when the pull that is under way has ended.
                await asyncio.wait(listening[:1], timeout=_ANSWER_S + LAST_PULL_S)
                raise
            is_over.set()
            try:
                await asyncio.wait(listening)
            except asyncio.CancelledError:
                # The task group cancels this one if a listener has raised.
                if any(one.done() and not one.cancelled() and one.exception() for one in listening):
                    raise
                results_come_first("lines of its output may be missing")
                for one in listening:
                    one.cancel()
    except BaseExceptionGroup as group:
        if audience.has_raised:  # What the ranks have said while they were stopped.
            await pull_all(LAST_PULL_S)
        if len(group.exceptions) == 1:
            raise group.exceptions[0] from None
        raise
    finally:
        audience.end()
