"""What ranks did when, as a file that chrome://tracing and ui.perfetto.dev show.

A process for each rank, a row for each group in it, a box for each collective from its issue to its
end, arrows from the lowest rank's to the same collective on the others. What is in flight at once
needs rows of its own: boxes of one row have to be nested, or viewers drop them.

It is made of the flight recorders, which are always on, so it shows the last collectives before it
was asked for: a trace need not be begun in advance.

Clocks of different hosts differ. No rank leaves a collective in which all wait for all before the
last one has come to it, and all leave it at nearly the same moment: the median of what the ends of
many collectives differ by is what the clocks differ by.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from actors.messages import WorkerSnapshot
from actors.whereabouts import Whereabouts
from collectives import FlightRecording, RecordedCollective
from collectives.contract.operation import State

_FEWEST_ENDS = 3  # to tell a clock by
_SYNCHRONIZING = ("barrier", "all_reduce", "all_gather")


@dataclass(frozen=True, slots=True)
class RankTraced:
    """host: ranks of one host have one clock. seat: its place in the session; after a failure two
    workers may have had the same rank."""

    seat: int
    rank: int
    host: str
    whereabouts: Whereabouts


def traced(
    said: Mapping[int, tuple[WorkerSnapshot, Whereabouts] | str],
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
        who, whereabouts = word
        if not whereabouts.recordings:
            silent[seat] = "has not met the other ranks"
            continue
        host = f"{who.info.hostname} ({who.info.node_id[:8]})"
        ranks.append(RankTraced(seat, whereabouts.recordings[0].rank, host, whereabouts))
    return sorted(ranks, key=lambda one: one.rank), silent


def events(ranks: Sequence[RankTraced]) -> list[dict[str, Any]]:
    """In the format of Chrome's trace viewer; times in microseconds since the first issue."""
    offset_s = clock_offsets(ranks)
    issued = [c.issued_at - offset_s[r.seat] for r, _, c in _all(ranks)]
    if not issued:
        return []
    first_s = min(issued)
    made: list[dict[str, Any]] = []
    ends: dict[str, dict[int, dict[str, Any]]] = defaultdict(dict)  # by flow, by rank
    for traced in ranks:
        pid = traced.seat + 1  # 0 is the idle process of viewers.
        made.append(_named("process_name", pid, 0, f"rank {traced.rank} on {traced.host}"))
        made.append(
            {"name": "process_sort_index", "ph": "M", "pid": pid, "tid": 0}
            | {"args": {"sort_index": traced.rank}}
        )
        tid = 0
        for recording in traced.whereabouts.recordings:
            free_at: list[float] = []  # by row
            for collective in recording.collectives:
                start_us = (collective.issued_at - offset_s[traced.seat] - first_s) * 1e6
                ended_at = collective.ended_at or recording.read_at
                stop_us = start_us + max(0.0, (ended_at - collective.issued_at) * 1e6)
                row = next((n for n, free in enumerate(free_at) if free <= start_us), len(free_at))
                if row == len(free_at):
                    free_at.append(0.0)
                    told = f"group {recording.name}" + (f", {row + 1} at once" if row else "")
                    made.append(_named("thread_name", pid, tid + 1 + row, told))
                free_at[row] = stop_us
                where = {"pid": pid, "tid": tid + 1 + row, "ts": start_us, "cat": "collective"}
                made.append(where | _box(recording, collective, stop_us - start_us))
                if collective.state is State.DONE and not _is_message(collective):
                    flow = f"{recording.name}/{recording.generation}/{collective.sequence}"
                    ends[flow][traced.rank] = where | {"name": "same collective"}
            tid += len(free_at)
    return [*made, *_arrows(ends)]


def _box(
    recording: FlightRecording, collective: RecordedCollective, length_us: float
) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": collective.place.split(" ")[0],
        "dur": length_us,
        "args": {
            "collective": collective.told,
            "line": f"{collective.file}:{collective.line}",
            "state": collective.state.value,
            "generation": recording.generation,
        },
    }


def _arrows(ends: Mapping[str, Mapping[int, dict[str, Any]]]) -> Iterable[dict[str, Any]]:
    """From the lowest rank to each other one: an arrow has one beginning and one end."""
    for flow, by_rank in ends.items():
        first, *others = sorted(by_rank)
        for rank in others:
            arrow = {"id": f"{flow}/{rank}"}
            yield by_rank[first] | arrow | {"ph": "s"}
            yield by_rank[rank] | arrow | {"ph": "f", "bp": "e"}


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


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
        for recording in traced.whereabouts.recordings
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
        for recording in traced.whereabouts.recordings:
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
