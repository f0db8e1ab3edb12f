"""Who leaves a run on notice, and when: pure, asked by membership.py.

A notice names a node (it is drained) or a worker (its process was sent SIGTERM). Its ranks leave in
a round like that after a failure, and the others go on without them. What they keep must be kept by
others then. With replicas it is. Without, they *hand over* first:

1. The notice freezes all, as a loss does.
2. The next generation has the leavers in it, and is told who they are. All ranks meet in it, those
   that stay are sent what they will keep without the leavers, and it ends there: nobody goes on in
   it, as in one that did not come about.
3. They freeze again, and say that it was handed over. Only the others form the next generation.

A loss between 2 and 3 takes what was handed over along, perhaps, so nobody leaves in that round;
the leavers, who still have it, hand over again. Nor does anybody if the functions are to run again
from the top, which goes on from what ranks keep in their shards: the notice comes again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from ..messages import Frozen, WorkerInfo

MAX_ATTEMPTS = 3
"""Rounds that a notice may cost: ranks that were outside of a step cannot hand over."""


class Departures:
    """Of one run."""

    def __init__(self) -> None:
        self._notices: dict[str, str] = {}  # why, by node or worker
        self._attempts: dict[str, int] = {}
        self._handing: frozenset[str] = frozenset()  # workers, in the generation in progress

    def note(self, who: str, why: str) -> None:
        self._notices[who] = why

    def is_due(self, who: str, members: Sequence[WorkerInfo], fewest: int) -> bool:
        """Whether to begin a round for a notice, which comes again and again. It counts as one."""
        leaving = [one for one in members if self.why(one) is not None]
        is_here = any(who in (one.worker_id, one.node_id) for one in members)
        if self._handing or not is_here or len(members) - len(leaving) < fewest:
            return False
        self._attempts[who] = self._attempts.get(who, 0) + 1
        return self._attempts[who] <= MAX_ATTEMPTS

    def why(self, worker: WorkerInfo) -> str | None:
        """Why it leaves; None if it stays."""
        return self._notices.get(worker.node_id) or self._notices.get(worker.worker_id)

    def leavers(
        self,
        members: Sequence[WorkerInfo],
        frozen: Mapping[int, Frozen],
        lost: Collection[int],
        fewest: int,
        *,
        restarts: bool,
    ) -> tuple[list[int], list[int]]:
        """Ranks that leave now, and ranks that hand over now, to leave in the next round.

        members: by rank. frozen, lost: as in Regeneration, of a complete round. restarts: the
        functions are to run again from the top.
        """
        leaving = [rank for rank in sorted(frozen) if self.why(members[rank]) is not None]
        if not leaving or len(frozen) - len(leaving) < fewest:
            return [], []
        ids = frozenset(members[rank].worker_id for rank in leaving)
        # Who has seen the end of the barrier knows that all have what they need.
        is_handed = ids <= self._handing and any(word.handed_over for word in frozen.values())
        spare = min(word.spare for word in frozen.values())
        if len(lost) + len(leaving) <= spare:
            return leaving, []
        if restarts:
            return [], []
        if is_handed and not lost:
            return leaving, []
        return [], leaving

    def hand_over(self, worker_ids: Iterable[str]) -> None:
        """The next generation has formed, and these workers hand over in it."""
        self._handing = frozenset(worker_ids)
