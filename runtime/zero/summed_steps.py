"""A sharded optimizer in the steps of `ctx.steps` (data/steps.py).

There a step has two halves. Phases (1) to (3) (zero_redundancy_optimizer.py) come at the end of the
loop over the step's batches: a rank that is lost until then brings the others its micro-batches, in
the same loop. Phases (4) and (5) come in `step()`, after the loop. If a rank is lost between the
halves, the others apply the step where they are, and `step()` has nothing left to do.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from chorusline.actors.fault_plan import Faults, Instant
from chorusline.actors.messages import OptimizerProgress
from chorusline.collectives import CollectiveError

from ..data_parallel.engine import ModelEngine
from ..data_parallel.gradients.reducer import Reducer
from ..data_parallel.model_steps import ModelSteps
from .ballot import Outcome
from .shards.parameter_shard import ParameterShard
from .state_changes import StateChanges


class Stepping(Protocol):
    """The optimizer's engine, as far as it is used here."""

    model: ModelEngine | None
    reducer: Reducer | None
    shard: ParameterShard
    faults: Faults
    loss_scale: torch.Tensor | None
    state_changes: StateChanges
    face: Any
    last_live: tuple[int, ...]
    _seen: OptimizerProgress
    _ballot_of_step: int

    @property
    def has_early_update(self) -> bool: ...

    @property
    def can_wait(self) -> bool: ...

    @property
    def step_counts(self) -> bool: ...

    def take_up_waiting(self) -> None: ...

    def begin_ballot(self) -> None: ...

    def hold_ballot(self, is_live: bool) -> tuple[float, ...]: ...

    def see(self, payload: tuple[float, ...]) -> Outcome: ...

    def apply(self, outcome: Outcome, divisor: float | None = None) -> object: ...

    def apply_and_gather(self, outcome: Outcome, divisor: float) -> None: ...

    def has_stepped(self) -> None: ...

    def option_numbers(self) -> list[float]: ...

    def wait_for_next_generation(self, error: BaseException) -> None: ...


@dataclass(slots=True)
class SummedStep:
    """A step that all ranks have agreed on, and that `step()` has not taken.

    options: with which they have voted. divisor: of its summed gradient.
    is_applied: this rank has applied it already, as a rank was lost before `step()`.
    """

    outcome: Outcome
    options: list[float]
    divisor: float
    is_applied: bool = False


class SummedSteps:
    """The steps of `ctx.steps` of one optimizer on one rank (StepEnder of model_steps.py)."""

    def __init__(self, engine: Stepping) -> None:
        self._engine = engine
        self._agreed: SummedStep | None = None

    @property
    def sums(self) -> ModelSteps | None:
        """The model's sums, if it takes such steps and this optimizer ends them."""
        model, reducer = self._engine.model, self._engine.reducer
        is_ended_here = model is not None and reducer is not None and model.steps.is_under_way
        return model.steps if model is not None and is_ended_here else None

    @property
    def has_agreed(self) -> bool:
        """Whether there is a step that `step()` has not taken."""
        return self._agreed is not None

    def why_not_summed(self) -> str:
        if self._engine.has_early_update:
            return (
                "its optimizer has overlap_with_ddp, which steps parameters in the first backward "
                "pass; leave overlap_with_ddp out"
            )
        return ""

    @property
    def can_wait(self) -> bool:
        return self._engine.can_wait

    def begin_summed_step(self) -> None:
        if self._agreed is not None:
            raise RuntimeError(
                "the ranks have agreed on a step of ctx.steps whose gradient no optimizer.step() "
                "has used, and it would be lost. Call optimizer.step() once after the loop over "
                "the batches of each step"
            )
        self._engine.take_up_waiting()
        if self._engine.model is not None and (why := self._engine.model.why_thawed()):
            raise RuntimeError(why)
        self._engine.begin_ballot()

    @torch.no_grad()
    def end_summed_step(self) -> None:
        """Phases (1) to (3)."""
        engine, sums = self._engine, self.sums
        assert engine.reducer is not None and sums is not None
        engine.reducer.weight = None
        engine.reducer.offer_nothing(sums.used)
        engine.loss_scale = engine.face._scale_of_losses()
        engine.shard.bring_home()
        payload = engine.hold_ballot(True)
        engine.faults.reach(Instant.SEEN)
        self._see(payload)

    def _see(self, payload: tuple[float, ...]) -> None:
        engine, sums = self._engine, self.sums
        assert engine.model is not None and engine.reducer is not None and sums is not None
        outcome = engine.see(payload)
        self._agreed = SummedStep(outcome, engine.option_numbers(), sums.divisor)
        engine.model.sync_buffers(outcome.agreement.live, None)
        engine.reducer.offer_nothing(outcome.agreement.used)

    def take_step(self) -> None:
        """Phases (4) and (5)."""
        engine, agreed = self._engine, self._agreed
        assert engine.reducer is not None and agreed is not None
        engine.reducer.check_unchanged()
        if engine.option_numbers() != agreed.options:
            raise RuntimeError(
                "options of the optimizer were changed between the last batch of a step of "
                "ctx.steps and optimizer.step(), when the ranks had agreed on the step. Set "
                "them, or step the schedule, after optimizer.step()"
            )
        self._agreed = None
        try:
            if not agreed.is_applied:
                engine.apply_and_gather(agreed.outcome, agreed.divisor)
        except Exception as error:
            engine.wait_for_next_generation(error)
        engine.faults.reach(Instant.STEPPED)
        engine.has_stepped()

    def take_place(self, progress: OptimizerProgress, last_live: tuple[int, ...]) -> None:
        """This rank comes to others between two steps, and is where they are."""
        engine = self._engine
        engine._seen, engine.last_live = progress, last_live
        engine._ballot_of_step = progress.ballots
        engine.state_changes.forget()

    @torch.no_grad()
    def catch_up(self, payload: tuple[float, ...] | None) -> None:
        """The generation has ended: apply the step that counts, as far as this rank can alone.

        payload: of the ballot, if only other ranks have seen it."""
        if payload is not None:
            self._see(payload)
        if self._agreed is not None and not self._agreed.is_applied:
            self._agreed.is_applied = True
            with contextlib.suppress(CollectiveError):  # The group of the gathers has ended.
                self._engine.apply(self._agreed.outcome, self._agreed.divisor)

    def wait_for_next_generation(self, error: BaseException) -> bool:
        """Return in the next generation. Returns whether the ranks have agreed on the step."""
        self._engine.wait_for_next_generation(error)
        return self._engine.step_counts
