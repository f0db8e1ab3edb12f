"""What ranks did when, as a file that chrome://tracing and ui.perfetto.dev show.

A row for each rank and group, a box for each collective from its issue to its end, arrows between
the same collective on all ranks. It is made of the flight recorders, which are always on, so it
shows the last collectives before it was asked for: a trace need not be begun in advance.

Clocks of different hosts differ. No rank leaves a collective in which all wait for all before the
last one has come to it, and all leave it at nearly the same moment: the median of what the ends of
many collectives differ by is what the clocks differ by.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from actors.messages import WorkerSnapshot
from actors.testimony import Testimony
from collectives import FlightRecording, RecordedCollective
from collectives.operation import State

_FEWEST_ENDS = 3  # to tell a clock by
_SYNCHRONIZING = ("barrier", "all_reduce", "all_gather")


@dataclass(frozen=True, slots=True)
class RankTraced:
    """host: ranks of one host have one clock. seat: its place in the session; after a failure two
    workers may have had the same rank."""

    seat: int
    rank: int
    host: str
    testimony: Testimony


def traced(
    said: Mapping[int, tuple[WorkerSnapshot, Testimony] | str],
) -> tuple[list[RankTraced], dict[int, str]]:
    """The ranks, and by seat why a worker said nothing. said: by seat.

    The rank is that of the last generation, as the session's group counts it.
    """
    ranks: list[RankTraced] = []
    silent: dict[int, str] = {}
    for seat, word in said.items():
        if isinstance(word, str):
            silent[seat] = word
            continue
        who, testimony = word
        if not testimony.recordings:
            silent[seat] = "has not met the other ranks"
            continue
        host = f"{who.info.hostname} ({who.info.node_id[:8]})"
        ranks.append(RankTraced(seat, testimony.recordings[0].rank, host, testimony))
    return sorted(ranks, key=lambda one: one.rank), silent


def events(ranks: Sequence[RankTraced]) -> list[dict[str, Any]]:
    """In the format of Chrome's trace viewer; times in microseconds since the first issue."""
    offset_s = clock_offsets(ranks)
    issued = [c.issued_at - offset_s[r.seat] for r, _, c in _all(ranks)]
    if not issued:
        return []
    first_s = min(issued)
    made: list[dict[str, Any]] = []
    for traced in ranks:
        made.append(_named("process_name", traced.seat, 0, f"rank {traced.rank} on {traced.host}"))
        made.append(
            {"name": "process_sort_index", "ph": "M", "pid": traced.seat}
            | {"args": {"sort_index": traced.rank}}
        )
        for row, recording in enumerate(traced.testimony.recordings):
            made.append(_named("thread_name", traced.seat, row, f"group {recording.name}"))
            for collective in recording.collectives:
                at_us = (collective.issued_at - offset_s[traced.seat] - first_s) * 1e6
                made += _boxes(traced, row, recording, collective, at_us)
    return made


def _boxes(
    traced: RankTraced,
    row: int,
    recording: FlightRecording,
    collective: RecordedCollective,
    at_us: float,
) -> Iterable[dict[str, Any]]:
    ended_at = collective.ended_at or recording.read_at
    where = {"pid": traced.seat, "tid": row, "ts": at_us, "cat": "collective"}
    yield where | {
        "ph": "X",
        "name": collective.place.split(" ")[0],
        "dur": max(0.0, (ended_at - collective.issued_at) * 1e6),
        "args": {
            "collective": collective.told,
            "line": f"{collective.file}:{collective.line}",
            "state": collective.state.value,
            "generation": recording.generation,
        },
    }
    if collective.state is State.DONE and not _is_message(collective):
        # From the lowest rank to the others.
        flow = f"{recording.name}/{recording.generation}/{collective.sequence}"
        start = {"ph": "s"} if traced.rank == min(recording.ranks) else {"ph": "f", "bp": "e"}
        yield where | {"name": "same collective", "id": flow} | start


def _named(what: str, seat: int, row: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": seat, "tid": row, "args": {"name": name}}


def clock_offsets(ranks: Sequence[RankTraced]) -> dict[int, float]:
    """By seat, seconds to take from its times, so that they are those of the first host's clock.

    0 for a host that shares no collective with it in which all wait for all.
    """
    if not ranks:
        return {}
    first = ranks[0]
    theirs = _ends(first)
    by_host: dict[str, list[float]] = {}
    for traced in ranks:
        differences = [at - theirs[key] for key, at in _ends(traced).items() if key in theirs]
        by_host.setdefault(traced.host, []).extend(differences)
    offset_of = {
        host: statistics.median(differences) if len(differences) >= _FEWEST_ENDS else 0.0
        for host, differences in by_host.items()
    }
    offset_of[first.host] = 0.0
    return {traced.seat: offset_of[traced.host] for traced in ranks}


def _ends(traced: RankTraced) -> dict[tuple[str, int, int], float]:
    return {
        (recording.name, recording.generation, collective.sequence): collective.ended_at
        for recording in traced.testimony.recordings
        for collective in recording.collectives
        if collective.state is State.DONE
        and collective.ended_at is not None
        and collective.place.startswith(_SYNCHRONIZING)
    }


def _is_message(collective: RecordedCollective) -> bool:
    return collective.place.startswith(("send", "recv"))


def _all(
    ranks: Sequence[RankTraced],
) -> Iterable[tuple[RankTraced, FlightRecording, RecordedCollective]]:
    for traced in ranks:
        for recording in traced.testimony.recordings:
            for collective in recording.collectives:
                yield traced, recording, collective


def as_json(ranks: Sequence[RankTraced], silent: Mapping[int, str]) -> dict[str, Any]:
    """The whole file. silent: by seat, why a worker said nothing."""
    offsets = clock_offsets(ranks)
    return {
        "traceEvents": events(ranks),
        "displayTimeUnit": "ms",
        "metadata": {
            "clock_offset_s": {str(seat): offset for seat, offset in offsets.items()},
            "silent": {str(seat): why for seat, why in silent.items()},
        },
    }
