"""From the statuses of ranks to what has happened to a run: for trackers, and for whoever looks at
it. Pure: no clock, no Ray."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from chorusline.actors.messages.run_status import GenerationChange, Gone, RunStatus
from chorusline.actors.ray_calls.calls import ENDED, KILLED

from .tracker import TrackedEvent

_LOOKS = 4  # for the reason of a death: more than a second of a running session

LOST, LEFT, CAME = "ranks lost", "ranks left", "workers came"


class RunEvents:
    """The changes of one run from generation to generation, each told once."""

    def __init__(self) -> None:
        self._newest = -1
        self._looks: dict[int, int] = {}
        """By generation, how often the reason of a death was not known yet."""
        self._latest: dict[int, dict[int, GenerationChange]] = {}  # by generation and rank

    def look(self, statuses: Collection[RunStatus], *, is_over: bool = False) -> list[TrackedEvent]:
        """What has happened since the last look. A change is told when all ranks have made it, or
        the run is over."""
        # A worker without a rank waits, and takes no part in any change.
        statuses = [status for status in statuses if status.rank is not None]
        for status in statuses:
            for change in status.generation_changes:
                if change.generation > self._newest:
                    assert status.rank is not None
                    ranks = self._latest.setdefault(change.generation, {})
                    ranks[status.rank] = change
        events: list[TrackedEvent] = []
        for generation in sorted(self._latest):
            # A rank that has yet to make this change may know more of it.
            if not is_over and any(one.generation < generation for one in statuses):
                break
            if not is_over and self._waits_for_reasons(generation):
                break
            self._newest = generation
            of_ranks = [*self._latest.pop(generation).values()]
            events.append(event_of(of_ranks))
        return events

    def _waits_for_reasons(self, generation: int) -> bool:
        """Ranks see a death before Ray says why. It may never do so: its driver may die."""
        changes = self._latest[generation].values()
        if all(who.why != ENDED for change in changes for who in change.gone):
            return False
        self._looks[generation] = self._looks.get(generation, 0) + 1
        return self._looks[generation] <= _LOOKS


def event_of(changes: Sequence[GenerationChange]) -> TrackedEvent:
    """changes: of the ranks that went from the same generation into the same one."""
    # Newcomers know of no loss, and ranks that met in fewer attempts may know of fewer.
    one = max(changes, key=lambda change: len(change.lost))
    left = one.left
    # A rank that left on notice is lost to the others, too, and is named once.
    lost = tuple(rank for rank in one.lost if rank not in left)
    kind = LOST if lost else LEFT if left else CAME
    began_at = min(change.left_at for change in changes)
    ended_at = max(change.entered_at for change in changes)
    return TrackedEvent(
        kind,
        began_at,
        ended_at,
        max(change.step for change in changes),
        one.generation,
        one.num_workers,
        lost,
        left,
        one.came,
        _in_words(changes),
        max(change.repeated for change in changes),
    )


def _in_words(changes: Sequence[GenerationChange]) -> str:
    """What a person reads about a change: who died or left, and what that cost; who came."""
    one = max(changes, key=lambda change: (len(change.lost), len(change.gone)))  # As above.
    seconds = max(0.0, max(p.entered_at for p in changes) - min(p.left_at for p in changes))
    workers = f"{one.num_workers} worker{'s' * (one.num_workers > 1)}"
    sentences = []
    if one.lost:
        gone = {who.rank: who for who in one.gone}
        departures = [_departure(rank, gone.get(rank), rank in one.left) for rank in one.lost]
        continues = "continue" + "s" * (one.num_workers == 1)
        repeated = max(change.repeated for change in changes)
        cost = (
            f"{repeated} step{'s' * (repeated > 1)} will be repeated"
            if repeated
            else "no step is lost"
        )
        if dealt := max(change.dealt_again for change in changes):
            cost += f", {dealt} batch{'es are' if dealt > 1 else ' is'} dealt again"
        waited = f"{seconds:.1f} s" if seconds >= 0.05 else "less than 0.1 s"
        sentences.append(f"{', '.join(departures)}. {workers} {continues} after {waited}; {cost}")
    if one.came:
        pids = dict(zip(one.came, one.pids, strict=False))
        ranks = ", ".join(_named(rank, pids.get(rank, 0)) for rank in one.came)
        new = "a new worker is" if len(one.came) == 1 else "new workers are"
        new = new.capitalize() if sentences else new
        sentences.append(f"{new} {ranks}; {workers}")
    step = max(change.step for change in changes)
    return f"step {step}: " + (". ".join(sentences) or f"the ranks met again; {workers}")


def _departure(rank: int, who: Gone | None, has_left: bool) -> str:
    name = _named(rank, who.pid if who is not None else 0)
    why = who.why if who is not None else ""
    if has_left:
        return f"{name} has left" + (f" ({why})" if why else "")
    if why.startswith(KILLED):
        return f"{name} was killed or crashed{why.removeprefix(KILLED)}"
    return f"{name} died" + (f" ({why})" if why else "")


def _named(rank: int, pid: int) -> str:
    return f"rank {rank} (pid {pid})" if pid else f"rank {rank}"


def begun(statuses: Mapping[int, RunStatus]) -> RunStatus | None:
    """A rank on which the function was called, if there is one."""
    return next((one for one in statuses.values() if one.origin), None)
