"""What a new driver finds of a run that another one had begun: the workers know it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..messages.messages import MemberState, PlaceInRun, Resumption
from .run_state import Member


@dataclass(frozen=True, slots=True)
class Found:
    """A run, as its workers report it.

    generation: the newest that any worker was put into.
    members: of that generation, by rank; LOST for a rank that no worker has.
    by_rank: the places.
    late: ranks whose workers do not know yet that they are in this generation.
    without_rank: of workers that rest or have left; the previous driver may not have told them.
    resumption: how the generation was formed; None if it is the first, or none of them knows.
    """

    generation: int
    members: tuple[Member, ...]
    by_rank: Mapping[int, PlaceInRun]
    late: tuple[int, ...]
    without_rank: tuple[PlaceInRun, ...]
    resumption: Resumption | None

    @property
    def lost(self) -> list[int]:
        return [rank for rank in range(len(self.members)) if rank not in self.by_rank]


def found_in(places: Sequence[PlaceInRun], by_seat: Mapping[int, Member]) -> Found:
    """places: of the workers in the run, at least one. by_seat: the members of the session."""
    # Of the places in the newest generation, one that knows how it came about.
    newest = max(
        places,
        key=lambda place: (place.assignment.generation, place.resumption is not None),
    )
    generation, resumption = newest.assignment.generation, newest.resumption
    former_ranks = resumption.former_ranks if resumption is not None else ()
    by_rank: dict[int, PlaceInRun] = {}
    late: dict[int, PlaceInRun] = {}  # The previous driver had told some of them only.
    for place in places:
        rank = place.assignment.rank
        if place.assignment.generation == generation:
            by_rank[rank] = place
        # The former ranks are those of the generation before. A worker of an earlier one has left
        # the run, for example because its node is drained; another one has its number since.
        elif place.assignment.generation == generation - 1 and rank in former_ranks:
            late[former_ranks.index(rank)] = place
    by_rank |= late
    with_rank = {place.info.worker_id for place in by_rank.values()}
    without_rank = tuple(place for place in places if place.info.worker_id not in with_rank)
    members = []
    for rank in range(newest.assignment.world_size):
        if rank in by_rank:
            members.append(by_seat[by_rank[rank].info.seat])
        else:
            # Nobody can tell which worker had this rank; there is none to be called.
            unknown = replace(newest.info, worker_id=f"lost with the driver, rank {rank}", pid=0)
            members.append(Member(unknown, MemberState.LOST))
    return Found(generation, tuple(members), by_rank, tuple(late), without_rank, resumption)
