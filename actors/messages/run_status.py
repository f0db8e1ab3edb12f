"""Where a rank stands in its run, between its training thread and its control loop."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

MOST_CHANGES = 16
"""That a status remembers: whoever follows a run looks several times a second."""


NOT_WHOLE = "its replica is not whole, and it waits for another worker"
"""Why a rank is not in the next generation though it lives (driver/replicas.py)."""


@dataclass(frozen=True, slots=True)
class Gone:
    """A rank of a generation that is not in the next one. why: it died, was to leave, or waits."""

    rank: int
    pid: int
    why: str


@dataclass(frozen=True, slots=True)
class GenerationChange:
    """How a rank got from one generation, in which its function ran, into the next such one.

    generation: the new one.
    left_at, entered_at: seconds since the epoch, by the clock of that machine.
    num_workers: ranks of the new generation.
    lost: ranks of the old generation that are not in the new one.
    left: those of `lost` that live: they had handed over their state before they left, or wait.
    came: ranks of the new generation that were not in the old one.
    runs_again: the function runs again from the top.
    step: optimizer steps by then, with those of `steps_before`.
    gone: of `lost`, which processes they were, as far as the driver knows it.
    pids: of `came`, which processes they are.
    repeated: steps that had been taken, and are taken again.
    dealt_again: batches of lost ranks that others have now, of the iteration in progress.
    """

    generation: int
    left_at: float
    entered_at: float
    num_workers: int
    lost: tuple[int, ...] = ()
    left: tuple[int, ...] = ()
    came: tuple[int, ...] = ()
    runs_again: bool = False
    step: int = 0
    gone: tuple[Gone, ...] = ()
    pids: tuple[int, ...] = ()
    repeated: int = 0
    dealt_again: int = 0


@dataclass(slots=True)
class RunStatus:
    """The training thread writes all fields but `stop_is_wanted`, and the control loop reads them.
    Each field is one word, so nothing is locked.

    rank: in this run; None before it has begun. pid: of its process.
    stop_is_wanted: set by the control loop; this rank's next vote passes it on to all ranks.
    taken: optimizer steps in this run, on all ranks together.
    num_epochs: of the loop over `ctx.epochs`; None outside.
    epoch, batches_taken, batches_left: of the shard that is iterated; None outside. An evaluation
        between two epochs does not count.
    batches_before: steps of this epoch before the iteration, where the function runs again in it.
    batches_shadowed: steps of the iteration for which this rank had no data.
    samples: that this rank has taken for training.
    has_joined: this rank has run out of data, and shadows the steps of others.
    waited_s: seconds for which steps waited for their gradients with nothing else to do.
    slowness: in `ctx.steps`, how many times as long as the median of the others this rank takes for
        a micro-batch; 0 if it is not known.
    is_straggler: it has been far behind the others for long.
    device_memory_bytes: of tensors on the GPU, when the training thread last looked.
    generation: in which the function runs; -1 before its call.
    origin: the id of the run; of the first one, in a chain of runs that resume from checkpoints.
    resumed_from: the checkpoint that the run, or the function's last call in it, has resumed from.
    resumed_step: the step of that checkpoint.
    steps_before: to add to `taken` for the steps of the whole chain.
    generation_changes: from generation to generation, the last ones.
    num_lost: ranks that died in all of them.
    is_saving: the rank writes down what it holds, since the run is about to end: it has the time.
    models: at debug level INFO, by number of the model, its StepStatistics.
    """

    rank: int | None = None
    stop_is_wanted: bool = False
    taken: int = 0
    num_epochs: int | None = None
    epoch: int | None = None
    samples: int = 0
    batches_taken: int = 0
    batches_left: int | None = None
    batches_before: int = 0
    batches_shadowed: int = 0
    has_joined: bool = False
    waited_s: float = 0.0
    slowness: float = 0.0
    is_straggler: bool = False
    device_memory_bytes: int = 0
    generation: int = -1
    origin: str = ""
    resumed_from: str = ""
    resumed_step: int = 0
    steps_before: int = 0
    generation_changes: tuple[GenerationChange, ...] = ()
    num_lost: int = 0
    is_saving: bool = False
    models: dict[int, Any] = field(default_factory=dict)
    pid: int = field(default_factory=os.getpid)

    @property
    def step(self) -> int:
        """Optimizer steps of the whole chain, as in Report.global_step."""
        return self.steps_before + self.taken

    @property
    def place_in_epoch(self) -> int:
        """Steps of the epoch so far, the one under way included."""
        return self.batches_before + self.batches_taken + self.batches_shadowed
