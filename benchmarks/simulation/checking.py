"""The simulation beside real changes of the generation."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.simulation.constants import Constants
from benchmarks.simulation.kills import STEP_S, Change
from benchmarks.simulation.model import Cluster, Place, Predicted

SIZES = (2, 4, 8, 16)
SEEDS = 25


@dataclass(frozen=True)
class Compared:
    """Medians of the real changes near one number of survivors, and of the simulated ones: seconds
    from the kill. near: the sizes that were taken together."""

    survivors: int
    near: tuple[int, ...]
    num_changes: int
    real_s: dict[str, float]
    simulated_s: dict[str, float]

    @property
    def error(self) -> float:
        """Of the whole change, relative to the real one."""
        return self.simulated_s["total_s"] / self.real_s["total_s"] - 1


PHASES = ("detected_s", "decided_s", "met_s", "total_s")


def simulated(constants: Constants, change: Change) -> list[Predicted]:
    """As many simulations of what was beside one real change, each with its own instant."""
    place = Place(cores=change.cores, step_s=STEP_S)
    return [
        Cluster(constants, change.survivors + 1, place, seed).lose_one() for seed in range(SEEDS)
    ]


def compared(constants: Constants, real: Sequence[Change]) -> list[Compared]:
    """By number of survivors. A size is taken together with its neighbours, up to an eighth away,
    since a session gives one change of each size."""
    rows = []
    for size in SIZES:
        some = [one for one in real if abs(one.survivors - size) <= max(1, size // 8)]
        if not some:
            continue
        medians = [
            {
                phase: statistics.median(getattr(run, phase) for run in simulated(constants, one))
                for phase in PHASES
            }
            for one in some
        ]
        rows.append(
            Compared(
                size,
                tuple(sorted({one.survivors for one in some})),
                len(some),
                {p: statistics.median(getattr(one, p) for one in some) for p in PHASES},
                {p: statistics.median(one[p] for one in medians) for p in PHASES},
            )
        )
    return rows
