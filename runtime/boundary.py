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
from collections.abc import Callable, Iterator, Sequence

from actors.errors import Interrupted
from actors.steps import Steps
from collectives import Group

from .agreement import Agreement
from .kept import Place, kept


class Boundary:
    """The steps of one run on one rank."""

    def __init__(self, steps: Steps) -> None:
        self.steps = steps
        self.place: Place | None = None
        """Of the loop over epochs that is to be resumed, inside such a loop."""
        self.before_stop: list[Callable[[], None]] = []
        """Called before Interrupted is raised: joins let go of the ranks that follow this one."""
        self._stop_is_agreed = False
        self._num_iterating = 0
        self._batch: tuple[object, int] | None = None  # of which shard; samples up to its end

    def step_agreed(self, agreement: Agreement, group: Group, *, ends_step: bool) -> None:
        """All ranks have agreed on a step. ends_step: it is counted, and applied next."""
        self._stop_is_agreed = self._stop_is_agreed or agreement.stop
        if not (ends_step and agreement.live):
            return
        kept().begin_applying(group)
        self.steps.taken += 1
        if self.place is not None and self._batch is not None:
            shard, up_to = self._batch
            self.place.samples_done[shard] = up_to
            self.place.last_live = agreement.live

    def pass_(self) -> None:
        """Between two steps: raise Interrupted if all have agreed to stop here."""
        if self._stop_is_agreed:
            for let_go in reversed(self.before_stop):
                let_go()
            raise Interrupted(self.steps.taken)

    def begin_forward(self) -> None:
        """As `pass_`, where no iteration over a shard knows better where a step begins."""
        if not self._num_iterating:
            self.pass_()

    @contextlib.contextmanager
    def iterating(self, sample_ids: Sequence[int], batch_size: int, epoch: int) -> Iterator[int]:
        """Around one iteration over a shard: how many of its samples were trained on already, in
        an earlier run of a loop that is resumed."""
        steps, place = self.steps, self.place
        before = self._batch, steps.batches_left, steps.epoch
        shard = (hash(tuple(sample_ids)), batch_size) if place else None
        done = place.samples_done.get(shard, 0) if place else 0
        self._num_iterating += 1
        self._batch = shard, done
        steps.epoch = epoch
        try:
            yield done
        finally:
            self._num_iterating -= 1
            self._batch = before[0]
            if self._num_iterating:
                steps.batches_left, steps.epoch = before[1:]
            steps.has_joined = False

    def begin_batch(self, up_to: int) -> None:
        """The next batch of the iteration; its steps take the samples `up_to` there."""
        assert self._batch is not None
        self._batch = self._batch[0], up_to


_current = Boundary(Steps())  # Plain processes have no run: there nobody asks for a stop.


def boundary() -> Boundary:
    """Of the run in progress in this process."""
    return _current


@contextlib.contextmanager
def entered(steps: Steps) -> Iterator[None]:
    """The steps of a run, for the length of a with-block."""
    global _current
    before, _current = _current, Boundary(steps)
    try:
        yield
    finally:
        _current = before
