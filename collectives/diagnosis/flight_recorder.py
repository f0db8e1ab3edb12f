"""The last collectives of one group on one rank, to read when a run hangs.

The recorder is always on. Recording is one append to a ring of operations, whose states the
transports update; line numbers, texts and wall-clock times are computed only on reading.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import FrameType

from ..contract.call_site import line_of, users_frame
from ..contract.errors import name_ranks
from ..contract.operation import DTYPE_BYTES, Operation, State, described

CAPACITY = 512
_ITEM_BYTES = list(DTYPE_BYTES.values())


@dataclass(frozen=True, slots=True)
class RecordedCollective:
    """One collective, in the state that it had when the recorder was read.

        group.barrier().wait()
        for collective in group.flight_recorder.collectives:
            print(collective.description, collective.state, collective.place)

    description: operation, sequence, size, dtype, and reduce op or root.
    place: `all_gather #117, train.py:41`.
    file, line: the caller's, outside of Chorusline and torch.
    issued_at, ended_at: seconds since the epoch, by this rank's clock; None while in flight.
    """

    sequence: int
    description: str
    place: str
    file: str
    line: int
    state: State
    issued_at: float
    ended_at: float | None


@dataclass(frozen=True, slots=True)
class FlightRecording:
    """The content of a group's flight recorder at `read_at` (seconds since the epoch).

        print(group.flight_recorder)  # A line for each collective.
        for recording in group.flight_recorders():  # And of the groups that were made of it.
            print(recording.position())

    collectives: the last ones, oldest first. num_issued: the number issued in the group.
    ranks: the root group's number of each rank.
    """

    rank: int
    size: int
    name: str
    generation: int
    read_at: float
    num_issued: int
    collectives: tuple[RecordedCollective, ...]
    ranks: tuple[int, ...]

    def position(self, before: float | None = None) -> RecordedCollective | None:
        """The first collective that is not done, else the last one; None before the first.

        before: seconds since the epoch; collectives issued later do not count.
        """
        last = None
        for recorded in self.collectives:
            if before is not None and recorded.issued_at > before:
                break
            last = recorded
            if recorded.state is not State.DONE:
                break
        return last

    def __str__(self) -> str:
        lines = [
            f"flight recorder of group {self.name!r}, generation {self.generation}, rank "
            f"{self.rank} of {self.size}: the last {len(self.collectives)} of "
            f"{self.num_issued} collectives"
        ]
        for c in self.collectives:
            if c.ended_at is None:
                took = f"for {self.read_at - c.issued_at:.1f} s"
            else:
                took = f"{(c.ended_at - c.issued_at) * 1e3:.2f} ms"
            lines.append(f"  {c.description:<56} {c.state.value:<8}{took:>12}  {c.file}:{c.line}")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Activity:
    """in_flight_s: seconds in which at least one collective was in flight. bytes_per_element: the
    average over the elements issued."""

    in_flight_s: float
    bytes_per_element: float


class FlightRecorder:
    """The ring of operations. One thread at a time issues in a group, so there is no lock."""

    def __init__(self, rank: int, size: int, name: str, generation: int) -> None:
        self._rank = rank
        self._size = size
        self._name = name
        self._generation = generation
        self._operations: deque[Operation] = deque(maxlen=CAPACITY)

    def record(self, operation: Operation, frame: FrameType) -> None:
        """Record `operation`. frame: where the search for the user's frame begins, outwards."""
        frame = users_frame(frame)
        operation.caller = frame.f_code
        operation.caller_at = frame.f_lasti
        self._operations.append(operation)

    @property
    def has_pending(self) -> bool:
        return any(operation.ended_at is None for operation in self._operations.copy())

    @property
    def has_misled(self) -> bool:
        """Whether an operation that is still recorded, and was relied on, has not succeeded."""
        operations = self._operations.copy()
        return any(one.relied_on and one.state is not State.DONE for one in operations)

    def activity(self, since: float, until: float) -> Activity:
        """The activity between two times of time.monotonic(); any thread may call it.

        If the ring has lost operations of that time, the remaining ones are extrapolated.
        """
        # A copy, as other threads record meanwhile.
        operations = self._operations.copy()
        held_since = since
        if len(operations) == CAPACITY:
            # The ring is full: what was issued before its first operation may be lost.
            held_since = min(max(since, operations[0].issued_at), until)
        in_flight_s, reached, nbytes, numel = 0.0, held_since, 0, 0
        for operation in operations:
            if operation.issued_at >= since and operation.dtype >= 0 and operation.numel > 0:
                numel += operation.numel
                nbytes += operation.numel * _ITEM_BYTES[operation.dtype]
            ended_at = until if operation.ended_at is None else min(operation.ended_at, until)
            if ended_at > reached:
                # Operations overlap: count what this one adds to the time covered so far.
                in_flight_s += ended_at - min(max(reached, operation.issued_at), ended_at)
                reached = ended_at
        if until > held_since:
            in_flight_s *= (until - since) / (until - held_since)
        return Activity(in_flight_s, nbytes / numel if numel else 4.0)

    def read(self, ranks: tuple[int, ...]) -> FlightRecording:
        """A snapshot; any thread may call it. ranks: the root group's number of each rank."""
        operations = self._operations.copy()
        now = time.time()
        epoch = now - time.monotonic()
        return FlightRecording(
            self._rank,
            self._size,
            self._name,
            self._generation,
            now,
            operations[-1].sequence + 1 if operations else 0,
            tuple(_recorded(operation, epoch) for operation in operations),
            ranks,
        )


def _recorded(operation: Operation, epoch: float) -> RecordedCollective:
    caller = operation.caller
    return RecordedCollective(
        sequence=operation.sequence,
        description=described(operation),
        place=operation.place(),
        file=caller.co_filename if caller else "",
        line=line_of(caller, operation.caller_at) if caller else 0,
        state=operation.state,
        issued_at=operation.issued_at + epoch,
        ended_at=None if operation.ended_at is None else operation.ended_at + epoch,
    )


def describe_positions(places: Mapping[int, str], late: Sequence[int]) -> str:
    """`rank 2 is at all_gather #117, train.py:41, the others at all_reduce #118, train.py:57`.

    places: of all ranks, by rank, without `is at`. late: the ranks to name first.
    """
    ranks_at: dict[str, list[int]] = {}
    for rank in (*late, *(r for r in places if r not in late)):
        ranks_at.setdefault(places[rank], []).append(rank)
    clauses = []
    left = len(places)
    for number, (place, ranks) in enumerate(ranks_at.items()):
        left -= len(ranks)
        last = number > 0 and left == 0
        if len(ranks) == 1:
            # Of two ranks the second needs no number: the sentence has named the first.
            who = "the other" if last and len(places) == 2 else f"rank {ranks[0]}"
        elif len(ranks) == len(places):
            who = "all ranks"
        else:
            who = "the others" if last else name_ranks(ranks)
        # The verb of the first clause holds for all: `rank 2 is at …, the others at …`.
        verb = "" if number else " is" if len(ranks) == 1 else " are"
        clauses.append(f"{who}{verb} at {place}")
    return ", ".join(clauses)
