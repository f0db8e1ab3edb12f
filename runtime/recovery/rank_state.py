"""The state of one rank in a run that recovers, and its report to the driver. Pure.

Events come in as calls, reports (`Frozen`) go out: no Ray, no torch, no `await`, no clock. So a
race is a list of events in a test, as on the driver's side (actors/driver/membership.py).

    FRESH      to RUNNING (the function continues in place or a step counts), LEFT (the function was
               left), NEWCOMER (it was left before it had begun, and others have begun)
    RUNNING    to LEFT
    LEFT       to RESTARTED (the function runs again), SAVED (the run is given up)
    RESTARTED  to RUNNING (a step counts), LEFT
    NEWCOMER   to RUNNING (a step counts, or it has come in between two), SAVED
    each       to FRESH (no rank has any state any more)
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace

from chorusline.actors.messages.messages import (
    DROPPED,
    NOWHERE,
    Frozen,
    OptimizerProgress,
    Readiness,
    Resumption,
    Waiting,
)


class Stage(enum.Enum):
    """The state with which a rank continues when its generation ends."""

    FRESH = "fresh"
    """The function runs for the first time, or will, and no step of it counts. As long as none of
    its collectives has completed, no other rank has received anything from this rank."""

    RUNNING = "running"
    """The function's objects hold this rank's state, up to the last step that counts."""

    LEFT = "left"
    """The function has been left, and runs again when the ranks have met. The state of its
    registered objects is kept (restart.py)."""

    RESTARTED = "restarted"
    """The function runs again, and no step of it counts yet. The rank still continues with the
    state kept of the call before: other ranks may not have met for this call."""

    NEWCOMER = "newcomer"
    """Other ranks have begun without this rank, and no step counts here yet. This rank has no
    state, so none can be lost with it."""

    SAVED = "saved"
    """The run is given up, and the kept state is in a checkpoint."""


class Where(enum.Enum):
    """Where a function is when its rank freezes."""

    IN_STEP = "in a step"
    """The function waits in the step of a sharded optimizer, and can continue there."""

    AT_END = "at its end"
    """The function has returned here, and the rank waits until it has on all ranks."""

    OUTSIDE = "outside"
    """The function was left by an error of its own collectives, and must run from the top."""

    AT_BOUNDARY = "between two steps"
    """The function waits between two steps of `ctx.steps` for a worker that comes in, or is that
    worker, at its first step."""

    NOT_BEGUN = "not begun"
    """The function was left before any of its collectives had completed, or while it made its
    models and optimizers: it may begin afresh."""


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts of a function's objects (live_objects.py) after their generation has ended.

    progress: of the sharded optimizers, in the order in which they were made.
    missing: why the function cannot run again from the top; empty if it can.
    plain_steps: number of steps that the plain optimizers have taken.
    has_plain_steps: the ranks have agreed on such a step, taken or not.
    spare: ranks that may be lost at once without loss of sharded state; None: nothing is sharded.
    copies: number of other ranks that have a copy of all that the plain optimizers step.
    follows_groups: the function is inside a Join that follows groups.
    is_after_loop: it has left a loop over its data, and is in none.
    awaits_step: it has left a loop whose last samples are in no step that counts yet.
    keeps_checkpoints: the session has a place for checkpoints.
    """

    progress: tuple[OptimizerProgress, ...] = ()
    missing: str = ""
    plain_steps: int = 0
    has_plain_steps: bool = False
    spare: int | None = None
    copies: int = 0
    follows_groups: bool = False
    is_after_loop: bool = False
    awaits_step: bool = False
    keeps_checkpoints: bool = False

    @property
    def is_worth_saving(self) -> bool:
        """Whether a step was taken and the session keeps checkpoints. Before its first step a
        function may still have to register objects, and there is no progress to lose."""
        has_stepped = self.plain_steps > 0 or any(one.ballots > 0 for one in self.progress)
        return self.keeps_checkpoints and has_stepped


_NOTHING = Facts()


class RankState:
    """The state of one rank, for one run."""

    def __init__(self, generation: int) -> None:
        self.stage = Stage.FRESH
        self.entered = generation
        """The last generation that this rank has entered."""
        self.num_recoveries = 0
        """How often this rank has got into a next generation, in place or from the top."""
        self.bytes_moved = 0
        """Bytes that this rank has sent because ranges of sharded state changed their owner;
        without the parameters, which are gathered then."""
        self._formed: list[tuple[int, ...]] = []
        """For each generation formed since: by rank in it, the rank in the generation before."""
        self._restart: Resumption | None = None  # None: the function need not run again
        self._kept = _NOTHING
        """Facts of the call that took the last step that counts, at the time it was left."""
        self._met = NOWHERE
        self._handed_over = NOWHERE
        self._saved = ""

    @property
    def has_kept(self) -> bool:
        """Whether this rank continues with state that was kept, here or on other ranks. Otherwise
        it continues with the function's live objects."""
        return self.stage not in (Stage.FRESH, Stage.RUNNING)

    @property
    def is_newcomer(self) -> bool:
        return self.stage is Stage.NEWCOMER

    # -- the report --------------------------------------------------------------------------------

    def report(self, frozen: Frozen, facts: Facts, where: Where, *, admits: bool = False) -> Frozen:
        """This rank's report to the driver.

        frozen: the report as the lifeline begins it (leave_generation). Of a generation that this
            rank has not entered it lacks what the others would have sent, so nobody can be spared.
        facts: read after `frozen`.
        admits: as in Frozen.
        """
        return replace(
            frozen,
            progress=self._progress(facts),
            # Nobody has received anything of such a rank: to the driver it has begun nowhere.
            entered=NOWHERE if where is Where.NOT_BEGUN else self.entered,
            waiting=_waiting(facts, where),
            spare=self._spare(facts) if frozen.generation == self.entered else 0,
            handed_over=frozen.generation == self._handed_over,
            missing=self._missing(facts, where),
            plain_steps=(self._kept if self.has_kept else facts).plain_steps,
            can_save=self._can_save(facts),
            saved=self._saved,
            # An admitted worker gets registered state; what is missing could not be sent.
            admits=admits and not self._missing(facts, where),
        )

    def can_run_again(self, facts: Facts, where: Where) -> bool:
        """Whether the function would run again if it were left now, as far as this rank knows."""
        return not self._missing(facts, where)

    def readiness(
        self, facts: Facts, *, admits: bool = False, for_departure: bool = False
    ) -> Readiness:
        """What would become of the function if its generation were ended, which could continue.

        admits: as in Frozen.
        for_departure: so that ranks leave.
        """
        # What has no copy is handed over in a step only: a function that begins again lets nobody
        # leave, and would do so for each notice that comes after its last step.
        if not (for_departure and self._spare(facts) == 0):
            # The better answer first: to admit a worker costs no function a second beginning.
            if admits and not facts.missing:
                return Readiness.ADMITS
            # Kept state is of registered objects, so leaving the function once more loses none.
            if self.has_kept or not facts.missing:
                return Readiness.RUNS_AGAIN
        is_sharded = facts.spare is not None and not facts.has_plain_steps
        has_steps = is_sharded and not facts.follows_groups and not facts.is_after_loop
        # Such a function comes to a step of its own, and waits in it. After its loops it may meet
        # code that must not run twice before any step.
        if self.stage is Stage.RUNNING and has_steps:
            return Readiness.PARKS
        return Readiness.NOT_YET

    def _progress(self, facts: Facts) -> tuple[OptimizerProgress, ...]:
        match self.stage:
            case Stage.FRESH | Stage.RUNNING:
                return facts.progress
            case Stage.NEWCOMER:
                # What its optimizers know, they have from ranks that say it themselves; and before
                # they are registered they know nothing.
                return (DROPPED,) * len(facts.progress)
        # An optimizer that was made again is where the kept one is, also before it is registered.
        return (*self._kept.progress, *facts.progress[len(self._kept.progress) :])

    def _missing(self, facts: Facts, where: Where) -> str:
        # Kept state is of registered objects. A function that has not begun needs none.
        return "" if self.has_kept or where is Where.NOT_BEGUN else facts.missing

    def _spare(self, facts: Facts) -> int:
        # A newcomer has no copy before a step counts.
        if self.is_newcomer:
            return 0
        if facts.spare is None:
            return facts.copies
        # Until a step counts, the state is in the shards that are kept of the call before, and what
        # a lost rank had of them has a copy fewer than the optimizers of this call will have.
        return 0 if self.stage in (Stage.LEFT, Stage.RESTARTED) else facts.spare

    def _can_save(self, facts: Facts) -> bool:
        match self.stage:
            case Stage.FRESH | Stage.RUNNING:
                return facts.is_worth_saving and not facts.missing
            case Stage.LEFT | Stage.RESTARTED:
                return self._kept.is_worth_saving
            case Stage.NEWCOMER | Stage.SAVED:  # No state would be left out.
                return True

    # -- in place ----------------------------------------------------------------------------------

    def formed(self, former_ranks: Sequence[int]) -> None:
        """A generation is formed to continue in place; the ranks may fail before they enter it."""
        self._formed.append(tuple(former_ranks))

    @property
    def former_ranks(self) -> tuple[int, ...]:
        """By rank in the generation formed last, the rank in the generation entered last."""
        # Several generations may be formed before one is entered: the map goes through all of them.
        ranks, *later = self._formed
        for one in later:
            # Ranks that came in a generation that was never entered have no rank in the one before.
            ranks = tuple(ranks[former] if former >= 0 else -1 for former in one)
        return ranks

    def handed_over(self, generation: int) -> None:
        """In this generation the leaving ranks have handed over their shards."""
        self._handed_over = generation

    def entered_in_place(self, generation: int) -> None:
        """The function continues where it waits, in this generation."""
        self.entered = generation
        self._formed = []
        # A function that runs again keeps its stage: until a step counts, the state kept of the
        # call before is this rank's state.
        # It has met the others, who may have received something from it.
        if self.stage is Stage.FRESH:
            self.stage = Stage.RUNNING

    def waits_to_be_admitted(self, entered: int) -> None:
        """A worker after its dry run gets into a generation. entered: the last one that the other
        ranks have entered; this rank has nothing of it, and counts as in it."""
        self.entered, self._formed = entered, []

    def step_counts(self) -> None:
        """A step counts. State from before the function ran again is not needed any more."""
        self.stage, self._kept = Stage.RUNNING, _NOTHING

    # -- from the top ------------------------------------------------------------------------------

    def has_to_leave(self, resumption: Resumption) -> None:
        """The function is left now or at its next boundary, and runs again as `resumption` says."""
        self._restart = resumption

    @property
    def is_leaving(self) -> bool:
        return self._restart is not None

    def take_restart(self) -> Resumption | None:
        """How the function, which has been left, runs again; None if this is not known yet."""
        restart, self._restart = self._restart, None
        return restart

    def met(self, generation: int) -> None:
        """The ranks of this generation have met to run functions again."""
        self._met = generation

    def has_met(self, generation: int) -> bool:
        return self._met == generation

    def left(self, facts: Facts) -> None:
        """The function has been left, and has taken all steps that count."""
        # Left twice before a step counted: the facts are still those of the call that took the
        # last.
        if not self.has_kept:
            self._kept = facts
        # A newcomer that is left has still no state, and must not be taken for a rank that has one.
        if not self.is_newcomer:
            self.stage = Stage.LEFT

    def runs_again(self, generation: int) -> None:
        """The function is called once more, in this generation."""
        self.entered, self._formed = generation, []
        if not self.is_newcomer:
            self.stage = Stage.RESTARTED

    def begins_afresh(self, generation: int) -> None:
        """No rank has any state any more."""
        self.stage, self._kept = Stage.FRESH, _NOTHING
        # What was said to run again belongs to the state that is gone.
        self.entered, self._formed, self._restart = generation, [], None

    def is_new(self) -> None:
        """The function will run for the first time on this rank, and has run on others."""
        self.stage, self._kept = Stage.NEWCOMER, _NOTHING

    def saved(self, path: str) -> None:
        """The kept state of the ranks is in this checkpoint."""
        self.stage, self._saved = Stage.SAVED, path


def _waiting(facts: Facts, where: Where) -> Waiting:
    if facts.follows_groups:  # Such a Join ends with its group, and cannot continue in a step.
        return Waiting.NOWHERE
    if where is Where.AT_END:
        return Waiting.IN_STEP
    # A plain model has summed gradients of the lost rank, and may have been stepped with them.
    if facts.has_plain_steps:
        return Waiting.NOWHERE
    # A loop that is over gives nobody what a lost rank had of it. One that begins again does. Where
    # shards have no copy, a loss ends the run, and a leaving rank hands over in a step only.
    if where is Where.IN_STEP and facts.awaits_step and facts.spare and not facts.missing:
        return Waiting.NOWHERE
    at = {Where.IN_STEP: Waiting.IN_STEP, Where.AT_BOUNDARY: Waiting.AT_BOUNDARY}
    return at.get(where, Waiting.NOWHERE)
