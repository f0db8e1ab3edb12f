"""From the statuses of ranks to the events of a run, for trackers. Pure: no clock, no Ray."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from chorusline.actors.run_status import Passage, RunStatus

from .tracker import TrackedEvent

LOST, LEFT, CAME = "ranks lost", "ranks left", "workers came"


class Happenings:
    """The passages of one run from generation to generation, each told once."""

    def __init__(self) -> None:
        self._told = -1
        self._latest: dict[int, dict[int, Passage]] = {}  # by generation and rank

    def look(self, statuses: Collection[RunStatus], *, is_over: bool = False) -> list[TrackedEvent]:
        """What has happened since the last look. A passage is told when all ranks have made it, or
        the run is over."""
        for status in statuses:
            for passage in status.passages:
                if passage.generation > self._told and status.rank is not None:
                    ranks = self._latest.setdefault(passage.generation, {})
                    ranks[status.rank] = passage
        events: list[TrackedEvent] = []
        for generation in sorted(self._latest):
            if not is_over and any(one.generation < generation for one in statuses):
                break
            self._told = generation
            of_ranks = [*self._latest.pop(generation).values()]
            events.append(event_of(of_ranks))
        return events


def event_of(passages: Sequence[Passage]) -> TrackedEvent:
    """passages: of the ranks that went from the same generation into the same one."""
    one = max(passages, key=lambda passage: len(passage.lost))
    left = one.left
    lost = tuple(rank for rank in one.lost if rank not in left)
    kind = LOST if lost else LEFT if left else CAME
    began_at = min(passage.left_at for passage in passages)
    ended_at = max(passage.entered_at for passage in passages)
    told = [
        f"{_ranks(ranks)} {verb}"
        for ranks, verb in ((lost, "lost"), (left, "left"), (one.came, "came"))
        if ranks
    ]
    text = (
        f"{', '.join(told) or 'the ranks met again'}; the run goes on with {one.num_workers} "
        f"worker{'s' * (one.num_workers > 1)} after {max(0.0, ended_at - began_at):.2f} s"
    )
    return TrackedEvent(
        kind,
        began_at,
        ended_at,
        max(passage.step for passage in passages),
        one.generation,
        one.num_workers,
        lost,
        left,
        one.came,
        text,
    )


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {list(ranks)}"


def begun(statuses: Mapping[int, RunStatus]) -> RunStatus | None:
    """A rank on which the function was called, if there is one."""
    return next((one for one in statuses.values() if one.origin), None)
