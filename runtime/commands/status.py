"""`chorusline status`: what the sessions of a cluster do, seen from another process.

A session's driver is a named actor. It asks the workers' control loops, which answer whatever their
training threads do. Without this command running, it asks nothing.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from chorusline.actors.messages.messages import (
    DriverSnapshot,
    MemberState,
    Report,
    Survey,
    WorkerSnapshot,
)
from chorusline.actors.ray_calls.calls import ActorGone, NoAnswer, answers, answers_or_why
from chorusline.actors.ray_calls.detached_actors import (
    INCARNATION,
    NAMESPACE,
    SESSION_HOST,
    DetachedActors,
    names_of,
)
from chorusline.collectives.contract.errors import ChoruslineError, plain

from ..data.stragglers import FAR
from ..session import connecting
from ..session.detached.status import DetachedStatus
from ..session.showing.progress import is_terminal
from ..tracking.run_events import RunEvents
from .script import INTERRUPTED

_REFRESH_S = 1.0
_ANSWER_S = 3.0
_COLUMNS = (
    *("rank", "worker", "device", "state", "for", "step", "batches left", "memory"),
    "last report",
)
_NUMBERS = ("rank", "for", "step", "batches left", "memory")
_MAX_VALUES = 4  # of a report
_LINES_SHOWN = 5  # about losses and arrivals


def show_status(session: str | None, address: str | None, once: bool) -> int:
    """Exit code: 0; 1 if there is no cluster, or no such session; 130 after an interrupt."""
    # In a file or a pipe, each row stays on one line.
    console = Console() if is_terminal(sys.stdout) else Console(width=200)
    try:
        with connecting.connected(address):
            return asyncio.run(_show(session, console, once or not console.is_interactive))
    except KeyboardInterrupt:
        return INTERRUPTED
    except (ChoruslineError, ConnectionError) as error:
        print(error, file=sys.stderr)
        return 1


async def _show(session: str | None, console: Console, once: bool) -> int:
    surveys, statuses = await survey(session), await detached(session)
    if not surveys and not statuses:
        print(nothing_found(session, await survey(None)), file=sys.stderr)
        return 1
    if once:
        console.print(drawn(surveys, statuses))
        return 0
    with Live(drawn(surveys, statuses), console=console, auto_refresh=False) as live:
        while surveys or statuses:
            await asyncio.sleep(_REFRESH_S)
            surveys, statuses = await survey(session), await detached(session)
            # With none left the last state stays on the screen.
            if surveys or statuses:
                live.update(drawn(surveys, statuses), refresh=True)
    console.print("The session has ended." if session else "No session is running any more.")
    return 0


async def survey(session: str | None) -> dict[str, Survey | str]:
    """The drivers' answers, by name of the session; a text says why a driver did not answer."""
    calls: dict[str, Any] = {}
    foreign: dict[str, Survey | str] = {}
    for entry in ray.util.list_named_actors(all_namespaces=True):
        name, is_driver, _ = entry["name"].partition(INCARNATION)
        if entry["namespace"] != NAMESPACE or not is_driver or session not in (None, name):
            continue
        try:
            driver = ray.get_actor(entry["name"], namespace=NAMESPACE)
        except ValueError:
            continue  # The session has ended since Ray listed it.
        try:
            calls[name] = driver.survey.remote(_ANSWER_S)
        except (TypeError, AttributeError):  # The driver's class has no such method.
            foreign[name] = (
                "has another version of chorusline than this command, and cannot be queried; run "
                "`chorusline status` where the session's program runs"
            )
    received = await answers(calls, _ANSWER_S + 1.0)
    found = foreign | {
        name: answer.detail if isinstance(answer, NoAnswer) else answer
        for name, answer in received.items()
        if not isinstance(answer, ActorGone)
    }
    return dict(sorted(found.items()))


async def detached(session: str | None) -> dict[str, DetachedStatus | str]:
    """What the hosts of detached sessions say, by name; a text says why one said nothing."""
    hosts = {
        name: host
        for name in names_of(SESSION_HOST)
        if session in (None, name) and (host := DetachedActors(name).host()) is not None
    }
    calls = {name: host.status.remote() for name, host in hosts.items()}
    return await answers_or_why(calls, _ANSWER_S + 1.0)


def nothing_found(session: str | None, others: Mapping[str, object]) -> str:
    if session is None:
        return (
            f"no session runs on the cluster at {ray.get_runtime_context().gcs_address}. A "
            "session is listed from its start to its close; --address queries another cluster"
        )
    has = f"there are {', '.join(others)}" if others else "no session runs there"
    return f"the session {session!r} is gone, or was never on this cluster; {has}"


def drawn(
    surveys: Mapping[str, Survey | str], statuses: Mapping[str, DetachedStatus | str] | None = None
) -> RenderableType:
    # rich would take brackets in a bare string for its markup, so each text goes into a Text.
    parts: list[RenderableType] = []
    statuses = statuses or {}
    # A detached session that has ended has a session host only, and other sessions have none.
    for name in sorted({*surveys, *statuses}):
        answer, status = surveys.get(name), statuses.get(name)
        if isinstance(answer, str):
            parts.append(Text(plain(f"{name}: its driver {answer}")))
        elif answer is not None:
            parts.append(Text(headline(name, answer.driver), style="bold"))
        if status is not None:
            words = status if isinstance(status, DetachedStatus) else f"its session host {status}"
            parts.append(Text(plain(f"{'  ' if answer else f'{name}: '}{words}")))
        if answer is not None and not isinstance(answer, str):
            parts += [Text(plain(f"  {line}")) for line in happened(answer)]
            parts.append(table(answer))
    return Group(*parts)


def happened(seen: Survey) -> list[str]:
    """What has happened to the workers of the run in progress, or of the last one: how many were
    lost, and the last lines."""
    statuses = [worker.status for worker in seen.workers if isinstance(worker, WorkerSnapshot)]
    # As if it were over: this command looks once, so no later look will complete a change.
    events = RunEvents().look(statuses, is_over=True)
    if not events:
        return []
    lost = [one for one in events if one.lost]
    steps = ", ".join(str(one.step) for one in lost)
    # The statuses remember the last changes only, and a worker that has come those since.
    known = sum(len(one.lost) for one in lost)
    num_lost = max(known, *(status.num_lost for status in statuses))
    at = "at step" if num_lost == known else "the last ones at step"
    summed = [f"lost so far: {num_lost}, {at} {steps}"] if lost else []
    return [*summed, *(one.text for one in events[-_LINES_SHOWN:])]


def headline(name: str, driver: DriverSnapshot) -> str:
    doing = "idle" if driver.run is None else f"run {driver.run}"
    if driver.pause is not None:
        doing += f" paused, {driver.pause}"
    ready = sum(state in (MemberState.READY, MemberState.RUNNING) for _, state in driver.members)
    return f"{name}: {doing}, generation {driver.generation}, {ready} of {len(driver.members)} live"


def table(seen: Survey) -> Table:
    """A table with a row for each seat."""
    made = Table(box=None, pad_edge=False, header_style="dim")
    for title in _COLUMNS:
        made.add_column(title, justify="right" if title in _NUMBERS else "left")
    for (info, member), worker in zip(seen.driver.members, seen.workers, strict=True):
        where = f"{info.pid} on {info.hostname}"
        if isinstance(worker, str):
            # The driver knows of a death; a worker that only does not answer may be busy.
            state = member.value if member is MemberState.LOST else "silent"
            cells: Sequence[str] = ("", where, info.device, state, "", "", "", "", worker)
            style = "red"
        else:
            cells, style = _cells(worker, where), ""
        made.add_row(*(Text(plain(cell)) for cell in cells), style=style)
    return made


def _cells(worker: WorkerSnapshot, where: str) -> Sequence[str]:
    return (
        "" if worker.rank is None else str(worker.rank),
        where,
        worker.info.device,
        _state(worker),
        "" if worker.running_s is None else f"{worker.running_s:.0f} s",
        f"{worker.status.step:,}",
        _left(worker),
        f"{(worker.memory_bytes + worker.device_memory_bytes) / (1 << 20):,.0f} MiB",
        _last_report(worker.last_report),
    )


def _state(worker: WorkerSnapshot) -> str:
    """With how slow the rank is, where that is worth a word."""
    slowness = worker.status.slowness
    return worker.state.value + (f", {slowness:.1f}x as slow" if slowness >= FAR else "")


def _left(worker: WorkerSnapshot) -> str:
    if worker.status.has_joined:
        return "joined"
    return "" if worker.status.batches_left is None else str(worker.status.batches_left)


def _last_report(report: Report | None) -> str:
    if report is None:
        return ""
    values = list(report.values.items())[:_MAX_VALUES]
    text = "  ".join(f"{name} {_shown(value)}" for name, value in values)
    return f"#{report.step}  {text}  ({max(0.0, time.time() - report.time):.0f} s ago)"


def _shown(value: object) -> str:
    is_long = isinstance(value, float) or (isinstance(value, int) and abs(value) >= 1e15)
    return f"{value:.4g}" if is_long else str(value)
