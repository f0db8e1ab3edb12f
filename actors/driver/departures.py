"""Which ranks leave a run on notice, and when. Pure; membership.py asks.

A notice names a node (it is drained) or a worker (its process was sent SIGTERM). Its ranks leave in
a round like the one after a failure, and the others continue without them. Other ranks must then
keep what the leavers keep. With replicas they do. Without replicas the leavers *hand over* first:

1. The notice freezes all ranks, as a loss does.
2. The next generation has the leavers in it, and all its ranks know which they are. They meet, the
   ranks that stay are sent what they will keep without the leavers, and the generation ends: no
   rank takes a step in it.
3. All ranks freeze again, and report that the state was handed over. Only the ranks that stay form
   the next generation.

A rank that is lost between 2 and 3 may take along what it was handed, so no rank leaves in that
round; the leavers, who still have their state, hand over again. Nor does a rank leave when the
functions run again from the top, since they continue from what the ranks keep in their shards; the
notice comes again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from ..messages.messages import Frozen, RunRequest, WorkerInfo

MAX_ATTEMPTS = 3
"""Rounds that a notice may cost: ranks that are outside a step cannot hand over."""


class Departures:
    """The notices of one run, and what has become of them."""

    def __init__(self) -> None:
        self._notices: dict[str, str] = {}  # why, by node or worker
        self._attempts: dict[str, int] = {}
        self._handing: frozenset[str] = frozenset()  # workers, in the generation in progress
        self._num_ready = 0

    def note(self, who: str, why: str, num_ready: int = 0) -> None:
        """num_ready: spare workers that could take the seats of those that leave."""
        self._notices[who] = why
        self._num_ready = num_ready

    def num_required(self, members: Sequence[WorkerInfo], request: RunRequest) -> int:
        """How many ranks have to stay: `fewest`, less those leaving ranks that spare workers
        replace at once. At least those of a replica. members: by rank."""
        num_leaving = sum(self.why(one) is not None for one in members)
        return max(request.replica_size, request.fewest - min(self._num_ready, num_leaving))

    def is_due(self, who: str, members: Sequence[WorkerInfo], fewest: int) -> bool:
        """Whether to begin a round for a notice, which comes again and again. If it is due, this
        counts as one attempt.

        who: id of the node or worker that the notice names.
        members: by rank.
        fewest: ranks with which the run continues (as `num_required` gives them).
        """
        leaving = [one for one in members if self.why(one) is not None]
        is_here = any(who in (one.worker_id, one.node_id) for one in members)
        # One hand-over at a time; and with too few others the leavers train until their node goes.
        if self._handing or not is_here or len(members) - len(leaving) < fewest:
            return False
        self._attempts[who] = self._attempts.get(who, 0) + 1
        return self._attempts[who] <= MAX_ATTEMPTS

    def why(self, worker: WorkerInfo) -> str | None:
        """Why a worker leaves; None if it stays."""
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

        members: by rank.
        frozen, lost: as in Regeneration, of a complete round.
        fewest: ranks with which the run continues (as `num_required` gives them).
        restarts: the functions run again from the top.
        """
        leaving = [rank for rank in sorted(frozen) if self.why(members[rank]) is not None]
        if not leaving or len(frozen) - len(leaving) < fewest:
            return [], []
        ids = frozenset(members[rank].worker_id for rank in leaving)
        # A rank that has seen the end of the barrier knows that all ranks have what they need.
        is_handed = ids <= self._handing and any(report.handed_over for report in frozen.values())
        spare = min(report.spare for report in frozen.values())
        if len(lost) + len(leaving) <= spare:
            return leaving, []  # Replicas have all that the leavers keep.
        # Ranks outside a step cannot hand over. The notice comes again.
        if restarts:
            return [], []
        # The rank that was lost may be the one that had got a leaver's shard.
        if is_handed and not lost:
            return leaving, []
        return [], leaving

    def hand_over(self, worker_ids: Iterable[str]) -> None:
        """The next generation forms, and these workers hand over in it."""
        self._handing = frozenset(worker_ids)
