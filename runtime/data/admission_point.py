"""How a worker comes to the ranks between two steps of `ctx.steps`, as the steps see it.

What decides and what moves is recovery's (recovery/arrivals.py); data know no recovery.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from .cursor import Remainder
from .dealer import Cut, SamplesPlace


class StepsUnderWay(Protocol):
    """A pass over the steps of one epoch (Steps, steps.py)."""

    @property
    def passage(self) -> str:
        """Identifies it; equal on all ranks."""

    @property
    def has_next(self) -> bool:
        """Whether another step comes after the present one."""

    def place(self) -> StepsPlace:
        """Where the ranks are, between two steps."""

    def take_place(self, place: StepsPlace) -> None:
        """Continue where the other ranks are, in the pass that this rank has begun as they have."""


class AdmissionPoint(Protocol):
    """Where a worker is admitted."""

    def begin(self, steps: StepsUnderWay) -> None:
        """A pass over the steps of an epoch begins. On a worker that comes, return when it has come
        to the others, after one of their steps."""

    def before_step(self, steps: StepsUnderWay) -> None:
        """A step begins: decide whether this rank would admit a worker after it."""

    def at_boundary(self, steps: StepsUnderWay) -> None:
        """Between two steps: admit the worker, if all ranks have agreed to."""


@dataclass(frozen=True, slots=True)
class StepsPlace:
    """Where the ranks are in the steps of an epoch, for a worker that comes to them there.

    first, rest: what was left of the epoch when they began it. taken, agreed: since then.
    paces: by rank. place: in the samples of the function's call.
    """

    first: int
    rest: Remainder
    taken: int
    agreed: int
    paces: tuple[float, ...]
    place: SamplesPlace


def is_within_step(cut: Cut) -> bool:
    """Whether some rank had begun a step that does not count yet when the ranks changed."""
    return any(busy > 0 for busy in cut.busy)
