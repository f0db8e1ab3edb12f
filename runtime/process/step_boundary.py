"""Where a run may stop: between two steps, and on every rank between the same two.

A rank that was asked to stop says so in its vote, and the agreement of that step (agreement.py)
tells all ranks. They finish the step and the rest of the loop's body, and raise Interrupted where
the next step would begin:

- when the loop asks `ctx.shard` for the next batch. A rank that shadows raises after the shadowed
  step, or, if a Join follows groups, when the other ranks are at the end of the loop's body;
- without `ctx.shard`, at the next forward of a DistributedDataParallel;
- between two epochs of `ctx.epochs`.

So nothing is in flight, and the group, the models and the optimizers are as after any other step.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from chorusline.actors.errors import Interrupted
from chorusline.actors.messages.run_status import RunStatus
from chorusline.actors.worker.memory import device_memory_bytes
from chorusline.collectives.contract.call_site import users_level
from chorusline.collectives.group import Group

from .agreement import Agreement, Note
from .between_runs import between_runs
from .random_state import digest_of_generators

MEMORY_LOOK_S = 0.5
"""Seconds between two looks at the GPU's memory."""


class RunningIteration(Protocol):
    """An iteration over a shard, in progress.

    epoch: as given to `ctx.shard`.
    num_samples: the size of the dataset; 0 if unknown.
    evaluates: all forward passes of a DistributedDataParallel in it were of a module in eval(), and
        no backward pass has brought gradients, on this rank; None: there was no such pass.
    """

    epoch: int
    evaluates: bool | None

    @property
    def num_samples(self) -> int: ...

    def agree(self) -> None:
        """All ranks have agreed on a step with what the iteration has given so far."""


class Boundary:
    """The steps of one run on one rank."""

    def __init__(self, status: RunStatus) -> None:
        self.status = status
        self.joins: list[Any] = []
        """The enabled Joins (join/join.py) that this process is in, the innermost one last."""
        self.was_live: bool | None = None
        """Whether this rank had data for the last step of the epoch; None before the first one."""
        self.resumed_live: tuple[int, ...] = ()
        """The ranks that had data for the last step, in an epoch that an earlier run has begun and
        this run continues with; else empty."""
        self.at_first_step: Callable[[int], None] | None = None
        """Called once, with the number of steps so far, when the function's first batch is taken,
        or the first forward of a DistributedDataParallel begins; None afterwards."""
        self.at_first_batch: Callable[[], None] | None = None
        """Called once, when the function's first iteration that trains asks for a batch; None
        afterwards."""
        self.would_admit = False
        """Whether this rank would admit a worker after the step under way."""
        self.admits = False
        """Whether all ranks do so, at the coming boundary (recovery/arrivals.py)."""
        self.epoch = 0
        """The epoch of `ctx.epochs` that the function is in, counted from 1; 0: it is in none."""
        self.draws = 0
        """The state of the generators, as a digest, with which the first forward pass has drawn;
        0: it has drawn nothing, or no rank asks any more."""
        self.watches_draws = False
        """Whether this is the first step of a run. In its own process: ranks in threads share the
        generators."""
        self._before_draws = 0
        self._has_told_epochs = False
        self._stop_is_agreed = False
        self._looked_at = 0.0  # at the GPU's memory, in time.monotonic() seconds
        self._has_trained = False
        self.iterations: list[RunningIteration] = []
        """The iterations in progress, in the order of their beginning. They may be nested, or side
        by side as in a zip, which ends the first one first."""

    def step_agreed(self, agreement: Agreement, group: Group, *, ends_step: bool) -> None:
        """All ranks have agreed on a step. ends_step: the step is counted, and applied next."""
        # It stays: the step that carried the wish may be followed by others before a boundary.
        self._stop_is_agreed = self._stop_is_agreed or agreement.stop
        # One rank that cannot is enough: all would have to continue in place.
        self.admits = agreement.says(Note.ADMITS) == group.size
        # An agreement on a backward pass, or of ranks that are all out of data, is no step.
        if not (ends_step and agreement.live):
            return
        self._tell(agreement, group.rank)
        between_runs().begin_applying(group)
        self.status.taken += 1
        self.was_live = group.rank in agreement.live
        # It has no batch of its own in a step that the others take.
        if self.iterations and not self.was_live:
            self.status.batches_shadowed += 1
        self.resumed_live = self.resumed_live and agreement.live
        for one in self.iterations:
            one.agree()
        if group.device.type == "cuda":
            self._look_at_memory(group)

    def _tell(self, agreement: Agreement, rank: int) -> None:
        """Warn, on one rank and once, of what no step can show: each alone is right."""
        self.watches_draws, self.draws = False, 0
        live = agreement.live
        # One rank warns, of those that run the body.
        if rank != live[0] or not agreement.epochs:
            return
        # Digests of generators are below 0; those above are of optimizers, which others compare.
        draws = {r: agreement.digests[r] for r in live if agreement.digests[r] < 0}
        alike = [r for r, one in draws.items() if [*draws.values()].count(one) > 1]
        epochs = {r: agreement.epochs[r] - 1 for r in live if agreement.epochs[r]}
        if alike:
            warnings.warn(
                f"ranks {alike} draw the same random numbers, as after the same seed on each: "
                "dropout, and whatever else the model draws, is the same on all of them. Write "
                "ctx.seed(seed), with which models start with the same values, and each rank "
                "draws its own numbers from the first batch on; or torch.manual_seed(seed + "
                "ctx.rank) after the model is wrapped",
                stacklevel=users_level(),
            )
        if len(set(epochs.values())) > 1 and not self._has_told_epochs:
            self._has_told_epochs = True
            by_rank = ", ".join(f"rank {r}: {epoch}" for r, epoch in epochs.items())
            warnings.warn(
                f"this step has gradients of different epochs ({by_rank}): the ranks have "
                "different numbers of batches, and continue with the next epoch without the "
                "others. Write `with chorusline.Join([model, optimizer]):` around the loop over "
                "an epoch's batches",
                stacklevel=users_level(),
            )

    def draws_begin(self) -> None:
        """The forward pass of a model begins."""
        watches = self.watches_draws and not self.draws and torch.is_grad_enabled()
        self._before_draws = digest_of_generators() if watches else 0

    def draws_end(self) -> None:
        if self._before_draws and self._before_draws != digest_of_generators():
            self.draws = self._before_draws

    def change_ranks(self) -> None:
        """The ranks have other numbers now, and workers that were to come in wait again."""
        self.resumed_live = ()
        self.admits = self.would_admit = False

    def notes(self) -> list[Note]:
        """What this rank's vote says beside its gradients."""
        return [Note.ADMITS] if self.would_admit else []

    def _look_at_memory(self, group: Group) -> None:
        now = time.monotonic()
        if now - self._looked_at >= MEMORY_LOOK_S:
            self._looked_at = now
            self.status.device_memory_bytes = device_memory_bytes(group.device)

    def stop_if_agreed(self) -> None:
        """Called between two steps. Raises Interrupted if all ranks have agreed to stop here."""
        if self._stop_is_agreed:
            for join in reversed(self.joins):
                join.release_followers()
            raise Interrupted(self.status.taken)

    def begin_forward(self, *, trains: bool) -> None:
        """A model's forward begins: `stop_if_agreed`, unless an iteration over a shard calls it,
        since a batch may have several forwards. trains: the module is in train()."""
        for one in self.iterations:
            one.evaluates = not trains and one.evaluates is not False
        self.begin_steps()
        if not self.iterations:
            self.stop_if_agreed()

    def begin_steps(self) -> None:
        """A forward, or the first batch of an iteration, comes next."""
        if self.at_first_step is not None:
            at_first_step, self.at_first_step = self.at_first_step, None
            at_first_step(self.status.taken)
        if self.at_first_batch is not None and self.iterations and torch.is_grad_enabled():
            at_first_batch, self.at_first_batch = self.at_first_batch, None
            at_first_batch()

    def gradient_has_come(self) -> None:
        """A backward pass has brought a parameter of a DistributedDataParallel its gradient."""
        for one in self.iterations:
            one.evaluates = False

    @property
    def num_samples(self) -> list[int]:
        """The size of each iteration's dataset, 0 if unknown, in the order of their beginning."""
        return [one.num_samples for one in self.iterations]

    @property
    def is_after_loop(self) -> bool:
        """Whether the function has left a loop over its data, with gradients, and is in none."""
        return self._has_trained and not self.iterations

    @contextlib.contextmanager
    def iterating(self, iteration: RunningIteration) -> Iterator[None]:
        """The scope of one iteration over a shard."""
        status = self.status
        before = status.batches_taken, status.batches_left, status.epoch
        is_place = self.is_place
        self.iterations.append(iteration)
        iteration.evaluates = None
        self._has_trained = self._has_trained or torch.is_grad_enabled()
        if is_place:
            self.status.epoch = iteration.epoch
        try:
            yield
        finally:
            self.iterations.remove(iteration)
            if self.iterations and is_place:  # The outer iteration continues where it was.
                status.batches_taken, status.batches_left, status.epoch = before
            self.status.has_joined = False

    @property
    def is_place(self) -> bool:
        """Whether an iteration that begins now is the place of this rank in the run, for people: an
        evaluation is not, in a function that trains."""
        return torch.is_grad_enabled() or not self._has_trained


_current = Boundary(RunStatus())  # For processes without a run, in which no stop is ever agreed.


def boundary() -> Boundary:
    """The Boundary of the run in this process."""
    return _current


@contextlib.contextmanager
def entered(status: RunStatus) -> Iterator[None]:
    """Make a new Boundary over `status` the process's current one, inside a with-block."""
    global _current
    before, _current = _current, Boundary(status)
    _current.watches_draws = True
    try:
        yield
    finally:
        _current = before
