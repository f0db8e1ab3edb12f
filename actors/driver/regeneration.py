"""From one generation to the next: which ranks are frozen, and what holds for all then. Pure.

A step ends in three moves: every rank casts its vote in the **ballot**, sees the result, and
applies it. The ballot's result depends on every vote, so a rank that has *seen* it knows that all
ranks have finished everything before it. After a failure the survivors may differ by one ballot:
some have seen the last one, some have not. Then

1. every survivor **freezes**: in one move it ends the old generation for itself and reports how
   many ballots it has seen, and what the last one said (`Frozen`);
2. a rank that does not report is killed (*fenced*), so that it can neither see nor apply anything
   later;
3. when all ranks that live are frozen, and not before, it is decided (`what_counts`): a ballot
   that any rank has seen counts for all. No rank has seen a later one or will see it: all are
   frozen or dead;
4. the survivors form the next generation, and each does what it lacks.

The number of the generation numbers the rounds. A report of an earlier generation is too late: its
sender has been told of a newer one, and freezes again if that fails as well.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ..messages.messages import DROPPED, Frozen, OptimizerProgress


class Regeneration:
    """One round, from the end of a generation to the next one: what has become of each rank."""

    def __init__(self, generation: int, ranks: Collection[int]) -> None:
        self.generation = generation
        self.frozen: dict[int, Frozen] = {}
        self.lost: set[int] = set()
        self.is_patience_over = False
        """The time to freeze was over before any rank had."""
        self._ranks = frozenset(ranks)

    def froze(self, frozen: Frozen) -> bool:
        """Take a report. Returns whether it counts: of this round, of a rank that is not lost."""
        # Its sender's death, or the next generation, may have overtaken the report.
        if not self._is_of_this_round(frozen) or frozen.rank in self.lost:
            return False
        self.frozen[frozen.rank] = frozen
        return True

    def died(self, rank: int) -> None:
        """The process of a rank is certainly gone. What it reported before does not count."""
        self.lost.add(rank)
        self.frozen.pop(rank, None)

    @property
    def unfrozen(self) -> list[int]:
        """Ranks of which neither a report nor the death is known, ascending."""
        return sorted(self._ranks - self.lost - self.frozen.keys())

    @property
    def is_complete(self) -> bool:
        """Whether the round can be decided: no rank is left that might still see something."""
        # Asked after each report, of thousands perhaps: so it is counted, not listed.
        return len(self.frozen) + len(self.lost) == len(self._ranks)

    def _is_of_this_round(self, frozen: Frozen) -> bool:
        return frozen.generation == self.generation


def what_counts(frozen: Mapping[int, Frozen]) -> tuple[OptimizerProgress, ...]:
    """What holds for all ranks, by optimizer: the most ballots that any rank has seen, and the
    payload of the last one.

    frozen: by rank, of all ranks that live. They list their optimizers in the order in which they
    were made, which is the same on all ranks.

    Raises ValueError if the ranks have different numbers of optimizers, or are further apart than
    one ballot: then they have not run the same program.
    """
    parked = {rank: report for rank, report in frozen.items() if report.is_parked}
    counts = {rank: len(report.progress) for rank, report in parked.items()}
    # Optimizers are compared by number; with other numbers it would be one with another.
    if len(set(counts.values())) > 1:
        raise ValueError(
            f"the ranks have different numbers of optimizers, by rank: {counts}; every rank makes "
            "the same ones in the same order"
        )
    decided = []
    for number in range(max(len(report.progress) for report in frozen.values())):
        # A rank that has left its function may not have made all its optimizers.
        by_rank = {
            rank: report.progress[number]
            for rank, report in frozen.items()
            if number < len(report.progress) and report.progress[number] != DROPPED
        }
        if not by_rank:
            decided.append(DROPPED)
            continue
        last = max(by_rank.values(), key=lambda progress: progress.ballots)
        behind = {rank: p.ballots for rank, p in by_rank.items() if p.ballots < last.ballots - 1}
        if behind:
            raise ValueError(
                f"optimizer {number} has taken {last.ballots} steps on some ranks and fewer than "
                f"{last.ballots - 1} on others, by rank: {behind}; no rank can finish a step "
                "before all have voted on it, so they ran different programs"
            )
        decided.append(last)
    return tuple(decided)
