"""Which rank is late, where, and in which line: what the ranks answer, and a text made of it.

When a collective times out or does not match, the driver asks all workers. Their control loops
answer while their training threads are blocked. What follows from the answers is pure.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType

from chorusline.collectives.contract.call_site import is_users_file
from chorusline.collectives.contract.operation import State
from chorusline.collectives.diagnosis.flight_recorder import FlightRecording, describe_positions

GroupId = tuple[str, tuple[int, ...]]
"""The name, and the ranks as the session counts them: groups that one `split` has made may share a
name."""


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """What one worker says about its rank.

    recordings: of its groups, the session's first; none before the first group.
    stack: the user's frames of the training thread; empty if there are none.
    is_over: the user's function has ended.
    """

    recordings: tuple[FlightRecording, ...]
    stack: str
    is_over: bool


def describe(of_ranks: Mapping[int, Whereabouts | str], late: Sequence[int]) -> str:
    """The text for a person: a sentence about all ranks, then the late ones, each with its stack.

    It is about the group whose collective failed first. If that is not the session's group, the
    sentence names it; ranks are always those of the session.

    of_ranks: by rank; a text says why a rank said nothing. late: the ranks to blame.
    """
    answers = {rank: reply for rank, reply in of_ranks.items() if isinstance(reply, Whereabouts)}
    session = next(
        (_id(reply.recordings[0]) for reply in answers.values() if reply.recordings), None
    )
    group, before = _first_failure(answers.values()) or (session, None)
    lines = []
    # A rank that is not in the group takes no part in its collectives: it cannot be late there.
    places = {
        rank: _place(reply, group, before)
        for rank, reply in answers.items()
        if reply.recordings and group is not None and rank in group[1]
    }
    if places:
        sentence = describe_positions(places, [r for r in late if r in places])
        if group is not None and group != session:
            sentence = f"in group {group[0]!r}, of ranks {list(group[1])}: {sentence}"
        lines.append(sentence)
    for rank in sorted(of_ranks):
        reply = of_ranks[rank]
        if isinstance(reply, str):  # Told of every such rank: whether it is late, nobody knows.
            lines.append(f"rank {rank} {reply}; its process may be stopped, or stuck in a loop")
        elif rank in late:
            lines.append(f"rank {rank} {_doing(reply, group, session, before)}")
            if reply.stack:
                lines.append(reply.stack.rstrip())
    return "\n".join(lines)


def _id(recording: FlightRecording) -> GroupId:
    return recording.name, recording.ranks


def _place(reply: Whereabouts, group: GroupId | None, before: float | None) -> str:
    for recording in reply.recordings:
        if _id(recording) == group and (at := recording.position(before)):
            return at.place
    return "nothing yet"


def _doing(
    reply: Whereabouts, group: GroupId | None, session: GroupId | None, before: float | None
) -> str:
    if not reply.recordings:
        return "has not met the other ranks" + ("; its Python stack:" if reply.stack else "")
    words = "has issued nothing"
    elsewhere = []  # What the rank does in other groups may be why it is late in this one.
    for recording in reply.recordings:
        at = recording.position(before)
        if _id(recording) == group and at is not None:
            if at.state is State.DONE:
                words = f"has finished {at.place}, and issued nothing since"
            else:
                words = f"is in {at.place}"
        elif at is not None and at.state is not State.DONE:
            elsewhere.append(f"; in group {recording.name!r} it is in {at.place}")
    if group != session and group is not None:
        words += f" in group {group[0]!r}"
    words += "".join(elsewhere)
    if reply.is_over:
        return f"{words}; its function is over"
    return f"{words}; its Python stack:" if reply.stack else words


def _first_failure(of_ranks: Iterable[Whereabouts]) -> tuple[GroupId, float] | None:
    """In which group the generation ended, and when, in seconds since the epoch. A collective that
    was issued later is left out, as it would hide where its rank was at that moment."""
    ends = [
        (recorded.ended_at, _id(recording))
        for reply in of_ranks
        for recording in reply.recordings
        for recorded in recording.collectives
        if recorded.state is State.FAILED and recorded.ended_at is not None
    ]
    if not ends:
        return None
    ended_at, group = min(ends)
    return group, ended_at


def users_stack(frames: Iterable[tuple[FrameType, int]]) -> str:
    """Frames as text, from the first to the last of the user's. frames: with their lines, outermost
    first."""
    found = list(frames)
    users = [i for i, (frame, _) in enumerate(found) if is_users_file[frame.f_code.co_filename]]
    if not users:
        return ""
    summary = traceback.StackSummary.extract(iter(found[users[0] : users[-1] + 1]))
    return "".join(summary.format())
