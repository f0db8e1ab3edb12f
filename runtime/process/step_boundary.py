"""Where a run may stop: between two steps, and on every rank between the same two.

A rank that was asked to stop says so in its vote; the agreement of that step (agreement.py) tells
all ranks. They still finish the step and the rest of the loop's body, and raise Interrupted where
the next step would begin:

- when the next batch is asked of `ctx.shard`; a rank that shadows, after the step that it shadows,
  or where a Join follows groups, when the others have come to the end of the loop's body;
- without `ctx.shard`, at the next forward pass of a DistributedDataParallel;
- between two epochs of `ctx.epochs`.

So nothing is in flight, and the group, the models and the optimizers are as after any other step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass

from actors.errors import Interrupted
from actors.run_status import RunStatus
from collectives import Group

from .agreement import Agreement
from .between_runs import Place, between_runs


@dataclass(slots=True, eq=False)
class Iteration:
    """One over a shard, in progress. key: of the shard, in the place of a loop that is resumed.
    done: how many of its samples were trained on in an earlier run of that loop. up_to: samples up
    to the end of the batch that it gave last."""

    key: Hashable
    epoch: int
    num_samples: int
    done: int
    up_to: int


class Boundary:
    """The steps of one run on one rank."""

    def __init__(self, steps: RunStatus) -> None:
        self.steps = steps
        self.place: Place | None = None
        """Of the loop over epochs that is to be resumed, inside such a loop."""
        self.before_stop: list[Callable[[], None]] = []
        """Called before Interrupted is raised: joins let go of the ranks that follow this one."""
        self._stop_is_agreed = False
        self._iterations: list[Iteration] = []
        """Begun and not over, in the order of their beginning. They may be one in another, or side
        by side as in a zip, which ends the first one first."""

    def step_agreed(self, agreement: Agreement, group: Group, *, ends_step: bool) -> None:
        """All ranks have agreed on a step. ends_step: it is counted, and applied next."""
        self._stop_is_agreed = self._stop_is_agreed or agreement.stop
        if not (ends_step and agreement.live):
            return
        between_runs().begin_applying(group)
        self.steps.taken += 1
        if self.place is not None and self._iterations:
            for one in self._iterations:
                self.place.samples_done[one.key] = one.up_to
            self.place.last_live = agreement.live

    def stop_if_agreed(self) -> None:
        """Between two steps: raise Interrupted if all have agreed to stop here."""
        if self._stop_is_agreed:
            for let_go in reversed(self.before_stop):
                let_go()
            raise Interrupted(self.steps.taken)

    def begin_forward(self) -> None:
        """As `pass_`, where no iteration over a shard knows better where a step begins."""
        if not self._iterations:
            self.stop_if_agreed()

    @property
    def num_samples(self) -> int:
        """Of the dataset that the innermost iteration is over; 0 where there is none, or nobody
        knows."""
        return self._iterations[-1].num_samples if self._iterations else 0

    @contextlib.contextmanager
    def iterating(self, key: Hashable, epoch: int, num_samples: int) -> Iterator[Iteration]:
        """Around one iteration over a shard. key: tells it from the other shards of an epoch.
        num_samples: of its dataset, 0 if nobody knows."""
        done = self.place.samples_done.get(key, 0) if self.place else 0
        iteration = Iteration(key, epoch, num_samples, done, done)
        before = self.steps.batches_left, self.steps.epoch
        self._iterations.append(iteration)
        self.steps.epoch = epoch
        try:
            yield iteration
        finally:
            self._iterations.remove(iteration)
            if self._iterations:
                self.steps.batches_left, self.steps.epoch = before
            self.steps.has_joined = False


_current = Boundary(RunStatus())  # Plain processes have no run: there nobody asks for a stop.


def boundary() -> Boundary:
    """Of the run in progress in this process."""
    return _current


@contextlib.contextmanager
def entered(steps: RunStatus) -> Iterator[None]:
    """The steps of a run, for the length of a with-block."""
    global _current
    before, _current = _current, Boundary(steps)
    try:
        yield
    finally:
        _current = before
