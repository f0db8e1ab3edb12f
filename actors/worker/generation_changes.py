"""How a rank went from one generation, in which its function ran, into the next such one. Pure.

A change may take several attempts: ranks are lost while the others meet, and those that leave hand
their state over in a generation of its own. In these the function runs nowhere, so they are steps
of the same change, and the ranks of the new generation are traced back through all of them.
"""

from __future__ import annotations

from ..messages.messages import Assignment, Resumption
from ..messages.run_status import NOT_WHOLE, GenerationChange, Gone


class GenerationChanges:
    """The changes of one rank in one run. num_ranks: of its first generation."""

    def __init__(self, num_ranks: int) -> None:
        self._has_entered = False  # Ever: before that a rank has no function to leave.
        self._begin(num_ranks)

    def _begin(self, num_ranks: int) -> None:
        self._left_at: float | None = None  # None: the function runs
        self._num_before = num_ranks  # ranks of the generation in which the function ran last
        self._origins = tuple(range(num_ranks))
        """By rank of the last attempt, the rank in that generation; -1 for a newcomer."""
        self._leaving: frozenset[int] = frozenset()
        """Ranks of that generation that were told to hand over their state."""
        self._gone: list[Gone] = []
        self._pids: dict[int, int] = {}
        """By rank of the last attempt, of the workers that have come since."""
        self._step_left = 0

    def left(self, at: float, step: int = 0) -> None:
        """The generation has ended for this rank. at: seconds since the epoch. step: as in
        GenerationChange."""
        if self._left_at is None:
            self._left_at, self._step_left = at, step

    def attempted(self, resumption: Resumption) -> None:
        """This rank was put into another generation, and meets the others there."""
        # A newcomer that is lost before the function continues was never a rank of it.
        for one in resumption.gone:
            if (origin := self._origins[one.rank]) >= 0:
                self._gone.append(Gone(origin, one.pid, one.why))
                if one.why == NOT_WHOLE:
                    self._leaving |= {origin}
        # Newcomers of this attempt are told in the order of their ranks; those of earlier attempts
        # are known already.
        fresh = iter(resumption.pids)
        pids = {
            rank: next(fresh, 0) if former < 0 else self._pids.get(former, 0)
            for rank, former in enumerate(resumption.former_ranks)
        }
        self._pids = {rank: pid for rank, pid in pids.items() if pid}
        self._origins = tuple(
            self._origins[former] if former >= 0 else -1 for former in resumption.former_ranks
        )
        self._leaving |= {self._origins[rank] for rank in resumption.leaving} - {-1}

    def entered(
        self,
        assignment: Assignment,
        at: float,
        step: int,
        *,
        runs_again: bool,
        dealt_again: int = 0,
    ) -> GenerationChange | None:
        """The function continues in this generation, or is about to be called there. Returns the
        change, unless this is the first generation of this rank. step, dealt_again: as in
        GenerationChange."""
        change = None
        if self._left_at is not None and self._has_entered:
            lost = tuple(sorted(set(range(self._num_before)) - set(self._origins)))
            came = tuple(rank for rank, before in enumerate(self._origins) if before < 0)
            change = GenerationChange(
                assignment.generation,
                self._left_at,
                at,
                assignment.world_size,
                lost,
                tuple(rank for rank in lost if rank in self._leaving),
                came,
                runs_again,
                step,
                tuple(self._gone),
                tuple(self._pids.get(rank, 0) for rank in came),
                max(0, self._step_left - step),
                dealt_again,
            )
        self._has_entered = True
        self._begin(assignment.world_size)
        return change
