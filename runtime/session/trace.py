"""The last collectives of all ranks on a time axis, as a file for chrome://tracing or perfetto.

The file has a process for each rank, a row for each of its groups, a box for each collective from
its issue to its end, and arrows from the lowest rank's box to the same collective on the others.
Collectives that are in flight at once get rows of their own: viewers drop boxes of one row that
overlap without being nested.

The data comes from the flight recorders. They are always on, so the file shows the last collectives
before the request, and no trace has to be started in advance.

Clocks of different hosts differ. In a collective in which all ranks wait for all, every rank leaves
at nearly the same moment, after the last rank's arrival. So the median difference of the ends of
many such collectives is the difference of the clocks.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from chorusline.actors.messages.messages import WorkerSnapshot
from chorusline.actors.messages.whereabouts import Whereabouts
from chorusline.collectives.contract.operation import State
from chorusline.collectives.diagnosis.flight_recorder import FlightRecording, RecordedCollective

_FEWEST_ENDS = 3  # fewer shared collectives do not show the difference of two clocks
_SYNCHRONIZING = ("barrier", "all_reduce", "all_gather")


@dataclass(frozen=True, slots=True)
class RankTraced:
    """One rank's recordings. host: ranks of one host share a clock. seat: the worker's place in the
    session, since two workers may have had the same rank after a failure."""

    seat: int
    rank: int
    host: str
    whereabouts: Whereabouts


def traced(
    replies: Mapping[int, tuple[WorkerSnapshot, Whereabouts] | str],
) -> tuple[list[RankTraced], dict[int, str]]:
    """The ranks that have recordings, and by seat the reason why a worker has none. replies: the
    workers' answers, by seat.

    The rank is that of the last generation, in the session's group.
    """
    ranks: list[RankTraced] = []
    silent: dict[int, str] = {}
    for seat, reply in replies.items():
        if isinstance(reply, str):
            silent[seat] = reply
            continue
        worker, whereabouts = reply
        if not whereabouts.recordings:
            silent[seat] = "has not met the other ranks"
            continue
        host = f"{worker.info.hostname} ({worker.info.node_id[:8]})"
        ranks.append(RankTraced(seat, whereabouts.recordings[0].rank, host, whereabouts))
    return sorted(ranks, key=lambda one: one.rank), silent


def events(ranks: Sequence[RankTraced]) -> list[dict[str, Any]]:
    """The events in the format of Chrome's trace viewer; times in µs since the first issue."""
    offset_s = clock_offsets(ranks)
    issued = [c.issued_at - offset_s[r.seat] for r, _, c in _all(ranks)]
    if not issued:
        return []
    first_s = min(issued)
    made: list[dict[str, Any]] = []
    ends: dict[str, dict[int, dict[str, Any]]] = defaultdict(dict)  # by flow, by rank
    for traced in ranks:
        pid = traced.seat + 1  # Viewers treat process 0 as idle.
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
                    label = f"group {recording.name}" + (f", {row + 1} at once" if row else "")
                    made.append(_named("thread_name", pid, tid + 1 + row, label))
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
            "collective": collective.description,
            "line": f"{collective.file}:{collective.line}",
            "state": collective.state.value,
            "generation": recording.generation,
        },
    }


def _arrows(ends: Mapping[str, Mapping[int, dict[str, Any]]]) -> Iterable[dict[str, Any]]:
    """One arrow from the lowest rank to each other rank: an arrow has one start and one end."""
    for flow, by_rank in ends.items():
        first, *others = sorted(by_rank)
        for rank in others:
            arrow = {"id": f"{flow}/{rank}"}
            yield by_rank[first] | arrow | {"ph": "s"}
            yield by_rank[rank] | arrow | {"ph": "f", "bp": "e"}


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


def clock_offsets(ranks: Sequence[RankTraced]) -> dict[int, float]:
    """By seat, the seconds to subtract from its times, so that they fit the first host's clock.

    0 for a host that shares too few collectives with it in which all ranks wait for all.
    """
    if not ranks:
        return {}
    first = ranks[0]
    theirs = _ends(first)
    by_host: dict[str, list[float]] = {}
    for traced in ranks:
        # Ranks that wait for all end such a collective at about the same moment.
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
    """The whole file. silent: by seat, the reason why a worker has no recordings."""
    offsets = clock_offsets(ranks)
    return {
        "traceEvents": events(ranks),
        "displayTimeUnit": "ms",
        "metadata": {
            "clock_offset_s": {str(seat): offset for seat, offset in offsets.items()},
            "silent": {str(seat): why for seat, why in silent.items()},
        },
    }
