"""Where one rank stands in a run that goes on, and what it then reports to the driver. Pure.

Events come in as calls, reports go out (`Frozen`): no Ray, no torch, no `await`, no clock. So a
race is a list of events in a test, as on the driver's side (actors/driver/membership.py).

    FRESH      to RUNNING (the function goes on in place, or a step counts), LEFT (the function was
               left), NEWCOMER (it was left before it had begun, and others have begun)
    RUNNING    to LEFT
    LEFT       to RESTARTED (the function runs again), SAVED (the run is given up)
    RESTARTED  to RUNNING (a step counts), LEFT
    NEWCOMER   to RUNNING (a step counts), SAVED
    each       to FRESH (no rank has anything any more)
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace

from actors.messages import NOWHERE, Frozen, Progress, Resumption


class Stage(enum.Enum):
    """What a rank goes on with when its generation ends."""

    FRESH = "fresh"
    """The function runs for the first time, or is about to, and no step of it counts. As long as
    none of its collectives has ended, no other rank has anything of this one."""

    RUNNING = "running"
    """What the function's objects hold is this rank's own, up to the last step that counts."""

    LEFT = "left"
    """The function has been left, and runs again when the ranks have met. What it had registered
    is kept (restart.py)."""

    RESTARTED = "restarted"
    """The function runs again, and no step of it counts yet. What was kept of the call before is
    what this rank goes on with: other ranks may not have met for this call."""

    NEWCOMER = "newcomer"
    """Other ranks have begun without this one, and no step counts here yet. This rank has nothing
    of its own to go on with, and nothing to lose."""

    SAVED = "saved"
    """The run is given up, and what the ranks kept is in a checkpoint."""


class Where(enum.Enum):
    """Where a function is when its rank freezes."""

    IN_STEP = "in a step"
    """It waits in the step of a sharded optimizer, and can go on there."""

    AT_END = "at its end"
    """It has returned, and waits until it has on all ranks."""

    OUTSIDE = "outside"
    """It was left by an error of its own collectives, and has to run again from the top."""

    NOT_BEGUN = "not begun"
    """It was left before any of its collectives had ended: it may begin as if it never had."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What the objects of a function say (live_objects.py), once their generation has ended.

    progress: of its sharded optimizers, in the order of their making.
    missing: what keeps the function from running again from the top; empty if nothing does.
    plain_steps: steps that its plain optimizers have taken.
    has_plain_steps: ranks have agreed on such a step, taken or not.
    spare: ranks that may go at once without loss of sharded state; None if nothing is sharded.
    copies: other ranks that have all that its plain optimizers step.
    follows_groups: the function is inside a Join that follows groups.
    keeps_checkpoints: the session has a place for checkpoints.
    """

    progress: tuple[Progress, ...] = ()
    missing: str = ""
    plain_steps: int = 0
    has_plain_steps: bool = False
    spare: int | None = None
    copies: int = 0
    follows_groups: bool = False
    keeps_checkpoints: bool = False

    @property
    def is_worth_saving(self) -> bool:
        """Before its first step a function may still have to register something; nothing is lost
        with that, either."""
        has_stepped = self.plain_steps > 0 or any(one.ballots > 0 for one in self.progress)
        return self.keeps_checkpoints and has_stepped


_NOTHING = Facts()


class RankState:
    """One rank's, for one run."""

    def __init__(self, generation: int) -> None:
        self.stage = Stage.FRESH
        self.entered = generation
        """The last generation that this rank has gone on in."""
        self._formed: list[tuple[int, ...]] = []
        """Of each generation that was formed since: by rank in it, the rank in the one before."""
        self._restart: Resumption | None = None
        self._kept = _NOTHING
        """Facts of the call that has taken the last step that counts, as it was left."""
        self._met = NOWHERE
        self._handed_over = NOWHERE
        self._saved = ""

    @property
    def has_kept(self) -> bool:
        """Whether this rank goes on with what was kept for it, here or on other ranks. If not, then
        with what the function's objects hold."""
        return self.stage not in (Stage.FRESH, Stage.RUNNING)

    @property
    def is_newcomer(self) -> bool:
        return self.stage is Stage.NEWCOMER

    # -- the report --------------------------------------------------------------------------------

    def report(self, frozen: Frozen, facts: Facts, where: Where) -> Frozen:
        """What this rank reports to the driver.

        frozen: the report as the lifeline begins it (leave_generation).
        facts: read after that.
        """
        return replace(
            frozen,
            progress=self._progress(facts),
            entered=NOWHERE if where is Where.NOT_BEGUN else self.entered,
            is_parked=_is_parked(facts, where),
            can_restart=not self._missing(facts, where),
            spare=self._spare(facts),
            handed_over=frozen.generation == self._handed_over,
            missing=self._missing(facts, where),
            plain_steps=(self._kept if self.has_kept else facts).plain_steps,
            can_save=self._can_save(facts),
            saved=self._saved,
        )

    def can_run_again(self, facts: Facts, where: Where) -> bool:
        """Whether the function, left now, would run again, as far as this rank knows."""
        return not self._missing(facts, where)

    def _progress(self, facts: Facts) -> tuple[Progress, ...]:
        if not self.has_kept:
            return facts.progress
        # Optimizers that the function has not made again yet are where they were.
        return (*facts.progress, *self._kept.progress[len(facts.progress) :])

    def _missing(self, facts: Facts, where: Where) -> str:
        # What is kept was registered. A function that has not begun needs nothing registered.
        return "" if self.has_kept or where is Where.NOT_BEGUN else facts.missing

    def _spare(self, facts: Facts) -> int:
        if facts.spare is not None:
            return facts.spare
        # A newcomer has no copy before a step counts.
        return 0 if self.is_newcomer else facts.copies

    def _can_save(self, facts: Facts) -> bool:
        match self.stage:
            case Stage.FRESH | Stage.RUNNING:
                return facts.is_worth_saving and not facts.missing
            case Stage.LEFT | Stage.RESTARTED:
                return self._kept.is_worth_saving
            case Stage.NEWCOMER | Stage.SAVED:  # It has nothing that would be left out.
                return True

    # -- in place ----------------------------------------------------------------------------------

    def formed(self, former_ranks: Sequence[int]) -> None:
        """A generation is formed to go on in place; it may not come about."""
        self._formed.append(tuple(former_ranks))

    @property
    def former_ranks(self) -> tuple[int, ...]:
        """By rank of the last generation that was formed, the rank in the one entered last."""
        ranks, *later = self._formed
        for one in later:
            ranks = tuple(ranks[former] for former in one)
        return ranks

    def handed_over(self, generation: int) -> None:
        """In this generation the ranks that leave have handed over to all that stay."""
        self._handed_over = generation

    def entered_in_place(self, generation: int) -> None:
        """The function goes on where it waits, in this generation."""
        self.entered = generation
        self._formed = []
        if self.stage is Stage.FRESH:
            self.stage = Stage.RUNNING

    def step_counts(self) -> None:
        """A step counts. Nothing of before the function ran again is asked for any more."""
        self.stage, self._kept = Stage.RUNNING, _NOTHING

    # -- from the top ------------------------------------------------------------------------------

    def has_to_leave(self, resumption: Resumption) -> None:
        """The function is left at its next boundary, or now, and runs again like this."""
        self._restart = resumption

    @property
    def is_leaving(self) -> bool:
        return self._restart is not None

    def take_restart(self) -> Resumption | None:
        """How the function, which has been left, runs again; None if that is not known yet."""
        restart, self._restart = self._restart, None
        return restart

    def met(self, generation: int) -> None:
        """The ranks of this generation have met, because functions run again in it."""
        self._met = generation

    def has_met(self, generation: int) -> bool:
        return self._met == generation

    def left(self, facts: Facts) -> None:
        """The function has been left, and has taken all steps that count."""
        if not self.has_kept:
            self._kept = facts
        if not self.is_newcomer:
            self.stage = Stage.LEFT

    def runs_again(self, generation: int) -> None:
        """The function is called once more, in this generation."""
        self.entered, self._formed = generation, []
        if not self.is_newcomer:
            self.stage = Stage.RESTARTED

    def begins_afresh(self, generation: int) -> None:
        """No rank has anything any more."""
        self.stage, self._kept = Stage.FRESH, _NOTHING
        self.entered, self._formed, self._restart = generation, [], None

    def is_new(self) -> None:
        """The function is to run for the first time here, and has run elsewhere."""
        self.stage, self._kept = Stage.NEWCOMER, _NOTHING

    def saved(self, path: str) -> None:
        """What the ranks kept is in this checkpoint."""
        self.stage, self._saved = Stage.SAVED, path


def _is_parked(facts: Facts, where: Where) -> bool:
    """Whether the function waits where it can go on in the next generation."""
    if facts.follows_groups:  # Those end with the generation, and have no place in a step.
        return False
    # A plain model has gradients of the lost rank's, and may have stepped with them.
    return where is Where.AT_END or (where is Where.IN_STEP and not facts.has_plain_steps)
