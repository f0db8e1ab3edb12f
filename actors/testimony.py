"""Who is behind, where, and in which line: what the ranks testify, and the sentence made of it.

When a collective times out or does not match, the driver asks all workers. Their control loops
answer while their training threads are blocked. What follows from the answers is pure.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType

from collectives import FlightRecording
from collectives.call_site import is_users_file
from collectives.flight_recorder import tell_positions
from collectives.operation import State


@dataclass(frozen=True, slots=True)
class Testimony:
    """What one worker says of its rank.

    recording: None before it had a group. stack: of the training thread, the user's frames; empty
    if it is over, or in no code of the user's.
    """

    __test__ = False  # For pytest, which takes the name for that of a test.

    recording: FlightRecording | None
    stack: str
    is_over: bool


def tell(testimonies: Mapping[int, Testimony | str], late: Sequence[int]) -> str:
    """The story for a person: one sentence of all ranks, then the late ones, each with its stack.

    testimonies: by rank; a text says why a rank said nothing. late: the ranks to blame.
    """
    before = _first_failure(testimonies.values())
    places = {}
    for rank, said in testimonies.items():
        if isinstance(said, Testimony) and said.recording is not None:
            at = said.recording.position(before)
            places[rank] = at.place if at else "nothing yet"
    lines = [tell_positions(places, [r for r in late if r in places])] if places else []
    for rank in sorted(testimonies):
        said = testimonies[rank]
        if isinstance(said, str):
            lines.append(f"rank {rank} {said}; its process may be stopped, or busy without end")
        elif rank in late:
            lines.append(f"rank {rank} {_doing(said, before)}")
            if said.stack:
                lines.append(said.stack.rstrip())
    return "\n".join(lines)


def _doing(said: Testimony, before: float | None) -> str:
    if said.recording is None:
        return "has not met the other ranks" + ("; its Python stack:" if said.stack else "")
    at = said.recording.position(before)
    if at is None:
        words = "has issued nothing"
    elif at.state is State.DONE:
        words = f"has finished {at.place}, and issued nothing since"
    else:
        words = f"is in {at.place}"
    if said.is_over:
        return f"{words}; its function is over"
    return f"{words}; its Python stack:" if said.stack else words


def _first_failure(testimonies: Iterable[Testimony | str]) -> float | None:
    """When the generation ended, in seconds since the epoch: what was issued later came too late,
    and would hide where its rank was when it mattered."""
    ends = [
        recorded.ended_at
        for said in testimonies
        if isinstance(said, Testimony) and said.recording is not None
        for recorded in said.recording.collectives
        if recorded.state is State.FAILED and recorded.ended_at is not None
    ]
    return min(ends, default=None)


def users_stack(frames: Iterable[tuple[FrameType, int]]) -> str:
    """frames with their lines, outermost first: as text, from the user's first to their last."""
    found = list(frames)
    users = [i for i, (frame, _) in enumerate(found) if is_users_file[frame.f_code.co_filename]]
    if not users:
        return ""
    summary = traceback.StackSummary.extract(iter(found[users[0] : users[-1] + 1]))
    return "".join(summary.format())
