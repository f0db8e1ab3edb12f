"""`Steps`: steps of a fixed global batch, whichever rank computes which part of them.

A step is a function of the seed, the epoch and its number: its samples are the next ones of the
epoch's order, cut into micro-batches. Each step deals its micro-batches to the ranks again
(micro_batch_dealing.py), and the ranks end it together:

    (1) Each rank computes its micro-batches, each with a random state of its own.
    (2) One small all-reduce tells all ranks which models have gradients, by what the sums are
        divided, and how fast each rank was.
    (3) The models sum the gradients, and the ranks agree on the step (process/micro_batches.py).
        With a single model, its sums travel while (2) is under way.

If a rank is lost before the step is agreed on, its micro-batches are dealt to the others, which
compute them in the same step: (1) to (3) again.

A position in the epoch is a number of steps, the same on all ranks. For the dealer and the cursor,
the samples of this iteration are its steps.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Protocol

import torch

from chorusline.collectives.contract.errors import CollectiveMismatch
from chorusline.collectives.diagnosis.debug import logger
from chorusline.collectives.group import Group
from chorusline.collectives.objects.blocking import all_gather_object
from chorusline.collectives.operations.host_reads import device_numbers

from ...process.between_runs import between_runs
from ...process.micro_batches import StepPlan, SummableModel, in_common
from ...process.random_state import mixed, seed_all
from ...process.step_boundary import boundary
from ..cursor import Cursor
from ..dealer import Counts, Cut, DataPosition, Dealer, Left, ShardIteration
from ..dealing import Remainder
from ..fetching.on_device import ToDevice
from ..stragglers import LONG_S, slowness
from .micro_batch_dealing import deal_again, deal_micro_batches, sizes_of_step
from .step_rows import MicroBatch, StepRows

_OVER = 1 << 62
"""The number of the coming step of an epoch that is over."""

_FORGETTING = 0.5
"""The part of a rank's pace that its last step makes; the rest is of the steps before."""


class Step:
    """One step: an iterable of this rank's micro-batches, perhaps none. The loop over it ends when
    the gradient of the whole step is available, and all ranks have agreed on it.

        for step in ctx.steps(dataset, global_batch_size=64, micro_batch_size=16):
            for batch in step:
                model(batch).square().mean().backward()
            optimizer.step()
            print(step.number, step.num_samples, step.num_micro_batches)

    number: of the step in its epoch. num_samples, num_micro_batches: over all ranks.
    """

    def __init__(self, steps: Steps, number: int, sizes: Sequence[int]) -> None:
        self.number = number
        self.num_samples = sum(sizes)
        self.num_micro_batches = len(sizes)
        self._sizes = sizes
        self._steps = steps
        self._has_begun = False
        self._has_ended = False

    def __iter__(self) -> Iterator[Any]:
        if self._has_begun:
            raise RuntimeError(
                "a step of ctx.steps is iterated once: its loop ends with the gradient of all "
                "ranks. Collect what you need from its batches in the first loop"
            )
        self._has_begun = True
        yield from self._steps._micro_batches(self.number, self._sizes)
        self._has_ended = True

    def _check_ended(self) -> None:
        if not self._has_ended:
            raise RuntimeError(
                f"step {self.number} of ctx.steps was left before its loop over the batches "
                "ended, so its gradient is not complete on any rank. Write `for batch in step:` "
                "without a break on every rank, even where it gets no batch"
            )


class AdmissionPoint(Protocol):
    """Where a worker is admitted between two steps. recovery/arrivals.py decides on it and moves
    the state; this package imports nothing of recovery."""

    def begin(self, steps: Steps) -> None:
        """A pass over the steps of an epoch begins. On a worker that comes, return when it has come
        to the others, after one of their steps."""

    def before_step(self, steps: Steps) -> None:
        """A step begins: decide whether this rank would admit a worker after it."""

    def at_boundary(self, steps: Steps) -> None:
        """Between two steps: admit the worker, if all ranks have agreed to."""


class Steps(ShardIteration):
    """The steps of one epoch, made by `ctx.steps`. It can be iterated more than once.

        steps = ctx.steps(dataset, global_batch_size=64, micro_batch_size=16)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=steps.num_steps)
        for step in steps:
            for batch in step:
                model(batch).square().mean().backward()
            optimizer.step()

    len(steps), num_steps: the number of steps of the whole epoch, at any number of ranks.
    num_steps_left: those that are left when the iteration begins: all, or after a resume the rest.
    """

    repeats_batch = False
    """The last step is the place of all before it."""

    def __init__(
        self,
        rows: StepRows,
        global_batch_size: int,
        micro_batch_size: int,
        *,
        key: str,
        group: Callable[[], Group],
        dealer: Dealer,
        epoch: int = 0,
        noise_seed: int = 0,
        deterministic: bool = True,
        device: torch.device | str | None = None,
        cursor: Cursor | None = None,
        at_boundary: Callable[[], None] | None = None,
        admission: AdmissionPoint | None = None,
    ) -> None:
        """rows: the samples of the epoch. key: identifies them when a run resumes.
        group: the ranks' group at this time.
        noise_seed: the random states of micro-batches depend on it, and on the epoch.
        admission: where a worker is admitted.
        The other parameters are those of `ctx.steps`, and of Shard (dataset_batches.py)."""
        _check_size("global_batch_size", global_batch_size)
        _check_size("micro_batch_size", micro_batch_size)
        if micro_batch_size > global_batch_size:
            raise ValueError(
                f"micro_batch_size is {micro_batch_size}, but a step has only "
                f"{global_batch_size} samples: a micro-batch is the part of a step that one rank "
                "computes at once"
            )
        self.counts, self.rest = Counts(), Remainder()
        self._rows = rows
        self.num_samples = rows.num_samples or 0
        self.global_batch_size = global_batch_size
        self.micro_batch_size = micro_batch_size
        self.epoch = epoch
        self._group = group
        self._dealer = dealer
        self._noise: tuple[object, ...] = noise_seed, epoch
        self._deterministic = deterministic
        self._to_device = None if device is None else ToDevice(device)
        self._cursor = cursor
        self._at_boundary = at_boundary
        self._admission = admission
        self._key = f"{key}/{global_batch_size}/steps/{epoch}"
        self._first = 0
        self.paces: list[float] = []
        """By rank, the seconds that it takes for a micro-batch; 0: not known."""
        self._sizes: tuple[int, list[int]] | None = None  # None: not counted yet
        self._together: list[SummableModel] | None = None
        """The models that all ranks have; None: not known yet."""
        self._dealt: dict[int, list[int]] = {}
        """By number of a step, its holders, where ranks were lost before it was agreed on."""

    def __len__(self) -> int:
        return self.num_steps

    @property
    def num_steps(self) -> int:
        """As described at the top of the class. Raises TypeError for a Stream."""
        if self._rows.num_samples is None:
            raise TypeError(
                "how many steps a Stream gives is not known before its end; choose a number of "
                "steps for the schedule yourself, or pass ctx.steps a dataset with a length"
            )
        return -(-self._rows.num_samples // self.global_batch_size)

    @property
    def num_steps_left(self) -> int:
        """As described at the top of the class."""
        rest = self._cursor.rest_of(self._key) if self._cursor is not None else Remainder()
        return max(0, self.num_steps - _first_step(rest))

    def __iter__(self) -> Iterator[Step]:
        bound = boundary()
        _check_place(bound.joins)
        # A model that the program has dropped would be waited for in each step.
        between_runs().forget_dropped_models(self._group())
        if self._cursor is not None:
            # Another pass over the steps of this epoch draws other numbers than the first one.
            passes = self._cursor.num_begun(f"/steps/{self.epoch}")
            self._noise = (*self._noise[:2], f"pass {passes}") if passes else self._noise[:2]
            self._cursor.begin(self._key, self)
        self._first = _first_step(self.rest)
        self._dealt, self._sizes, self._together = {}, None, None
        try:
            self._dealer.begin(self)
            self._dealer.check_room()
            self._dealer.ends_body(self)
            with bound.iterating(self):
                bound.begin_steps()
                self._begin_rows(self.counts.number)
                # A worker that comes waits here, until it is admitted; but not in a pass that was
                # over before the one in which the others are.
                if self._admission is not None and self.rest.given is not None:
                    self._admission.begin(self)
                while sizes := self._sizes_of(number := self._first + self.counts.num_taken):
                    bound.status.batches_taken = number + 1
                    if self._rows.num_samples is not None:
                        bound.status.batches_left = self.num_steps - number - 1
                    step = Step(self, number, sizes)
                    # Taken before it is given: a loss inside the step finds it under way.
                    self.counts.take(1)
                    if self._admission is not None:
                        # Before the step is given, as its vote says whether this rank can admit a
                        # worker.
                        self._admission.before_step(self)
                    yield step
                    # Before anything else counts the step: without its end no rank has its
                    # gradient.
                    step._check_ended()
                    if self._dealer.ends_body(self) and self._at_boundary is not None:
                        # It saves a checkpoint, or leaves the function: both before a stop, which
                        # would skip them.
                        self._at_boundary()
                    bound.stop_if_agreed()
                    if self._admission is not None:
                        self._admission.at_boundary(self)
            self.is_over = True
        finally:
            self._dealer.end(self)
            self._rows.end()
            for model in self._models():
                model.leave_steps()

    def _begin_rows(self, number: int) -> None:
        run, generation = self._dealer.call_key
        # The recorded name is the same when the function runs again from the top.
        self._rows.begin((run, generation, self.iteration or f"{generation}/{number}"))

    def _models(self) -> list[SummableModel]:
        return [engine.steps for engine in between_runs().models_of(self._group())]

    def _in_common(self, models: Sequence[SummableModel]) -> list[SummableModel]:
        """Those that all ranks have: asked in the first step, and again when ranks are lost."""
        if self._together is None:
            here = [model.signature for model in models]
            by_rank: list[list[str]] = all_gather_object(self._group(), here)
            self._together = [models[n] for n in in_common(by_rank, self._dealer.rank)]
        return self._together

    # -- one step ----------------------------------------------------------------------------------

    def _micro_batches(self, number: int, sizes: Sequence[int]) -> Iterator[Any]:
        # In the first step it is not known yet which models all ranks have.
        models = self._together or self._models()
        _check_models(models)
        shares = tuple(size / self.micro_batch_size for size in sizes)
        # A step that had begun when the ranks changed keeps what was computed of it.
        holders = self._dealt.pop(number, None) or deal_micro_batches(len(sizes), self.paces)
        plan = StepPlan(number, shares, holders, self._deterministic)
        for model in models:
            model.begin_step(plan)
        end = StepEnd(plan, sum(sizes), self.micro_batch_size)
        done: set[int] = set()
        while True:
            for mine in plan.held_by(self._dealer.rank):  # (1)
                # Dealt again after a loss, and kept: its sum is there.
                if mine in done:
                    continue
                began_at = time.monotonic()
                coming = self._coming(plan, mine, done)
                batch = self._rows.batch(self._micro_batch(number, sizes, mine), coming)
                if self._to_device is not None:
                    batch = self._to_device(batch)
                # After the batch: what it has drawn, here or elsewhere, is nobody's business.
                seed_all(mixed(*self._noise, number, mine))
                for model in models:
                    model.begin_micro_batch()
                boundary().status.samples += sizes[mine]
                yield batch
                end.note(mine, models, time.monotonic() - began_at)
                for model in models:
                    model.end_micro_batch(mine)
                done.add(mine)
            if self._ends(models, end):
                break
            # Ranks were lost: some of their micro-batches are this rank's now.
            plan.holders[:] = self._dealt[number]
        self._note_paces(end.paces)
        # What follows the loop draws the same on every rank, whichever micro-batches it had.
        seed_all(mixed(*self._noise, number, "end"))

    def _sizes_of(self, number: int) -> list[int]:
        """The sizes of the micro-batches of a step; empty after the last one."""
        # They are asked for several times in a step, and a stream has to call its reader for them.
        if self._sizes is None or self._sizes[0] != number:
            self._sizes = number, self._sizes_ahead(number) if number < _OVER else []
        return self._sizes[1]

    def _sizes_ahead(self, number: int) -> list[int]:
        """The same for a step that is not under way."""
        first, most = number * self.global_batch_size, self.global_batch_size
        return sizes_of_step(self._rows.num_from(first, most), self.micro_batch_size)

    def _note_paces(self, paces: list[float]) -> None:
        self.paces = paces
        stragglers, status = self._dealer.stragglers, boundary().status
        fresh = stragglers.note(paces, time.monotonic())
        status.slowness = slowness(paces, self._dealer.rank)
        status.is_straggler = self._dealer.rank in stragglers.now
        for rank in fresh:
            if self._dealer.rank == min(r for r in range(len(paces)) if r != rank):
                logger.warning(
                    "rank %d has taken %.1f times as long for a micro-batch as the others for "
                    "%.0f s. It now gets fewer of them, so the others do not wait, and the "
                    "result is the same; `chorusline status` shows its worker, whose machine may "
                    "be throttled or shared",
                    rank,
                    slowness(paces, rank),
                    LONG_S,
                )

    def _micro_batch(self, number: int, sizes: Sequence[int], mine: int) -> MicroBatch:
        """mine: its number in the step."""
        first = number * self.global_batch_size + mine * self.micro_batch_size
        return MicroBatch(first, sizes[mine], mixed(*self._noise, number, mine, "samples"))

    def _coming(self, plan: StepPlan, mine: int, done: Collection[int]) -> Iterator[MicroBatch]:
        """This rank's micro-batches after `mine`, if the next steps are dealt as this one is."""
        rank, number = self._dealer.rank, plan.number
        sizes = self._sizes_of(number)
        left = [one for one in plan.held_by(rank) if one > mine and one not in done]
        while sizes:
            yield from (self._micro_batch(number, sizes, one) for one in left)
            if self._rows.num_samples is None:
                return  # Of a stream, what lies ahead is not known.
            number += 1
            sizes = self._sizes_ahead(number)
            holders = plan.holders
            # The last step of an epoch may have fewer micro-batches, which are dealt in another
            # way.
            if len(sizes) != len(holders):
                holders = deal_micro_batches(len(sizes), self.paces) if sizes else []
            left = [one for one, holder in enumerate(holders) if holder == rank]

    def _ends(self, models: Sequence[SummableModel], end: StepEnd) -> bool:
        """(2) and (3). Returns whether the step is agreed on; if not, ranks were lost."""
        try:
            models = self._in_common(models)
            if len(models) == 1:  # Its sums are on their way while the ranks meet.
                models[0].launch()
            end.meet(self._group(), models, self.paces)
            _check_together([one for n, one in enumerate(models) if end.has_gradient[n]])
            for number, model in enumerate(models):
                if end.has_gradient[number]:
                    if end.has_buffers[number]:
                        model.send_buffers(end.plan.holders[-1])
                    model.end_step(end.divisors[number])
        except Exception as error:
            waiting = [model for model in models if model.can_wait]
            if not waiting:
                raise
            # Of several models, one that takes part knows whether the step is agreed on.
            first = min(waiting, key=lambda model: not model.is_under_way)
            return first.wait_for_next_generation(error)
        return True

    # -- for a worker that comes (AdmissionPoint) ------------------------------------------------

    @property
    def has_next(self) -> bool:
        """Whether another step comes after the present one."""
        # Of a stream, what lies ahead is not known.
        is_stream = self._rows.num_samples is None
        return is_stream or bool(self._sizes_ahead(self._first + self.counts.num_taken))

    def take_place(
        self, number: int, position: DataPosition, rest: Remainder, paces: Sequence[float]
    ) -> None:
        """Continue where the other ranks are, in the pass that this rank has begun as they have.

        number, rest, paces: of their pass. position: of one of them, in all passes."""
        self.rest, self._first, self.paces = rest, _first_step(rest), list(paces)
        self._dealer.take_position(self, number, position)
        self._begin_rows(number)

    # -- for the dealer, to which a step is a sample -----------------------------------------------

    @property
    def taken_ids(self) -> Sequence[int]:
        return range(self._first, self._first + self.counts.num_taken)

    def ids_by_counts(self, counts: Sequence[int]) -> list[int]:
        # All ranks take the same steps, and the last one tells of all before.
        last = self._first + max(counts, default=0) - 1
        return [last] if last >= 0 else []

    def begin_dealt(self, cuts: Sequence[Cut]) -> None:
        self.paces = [0.0] * self.counts.dealt_for
        for cut in cuts:
            self._cut(cut)

    def redeal(self, cut: Cut) -> Left:
        self._cut(cut)
        # Every rank takes every step, so none has more left than another.
        return Left([1] * len(cut.former_ranks), [1] * len(cut.former_ranks))

    def _cut(self, cut: Cut) -> None:
        """Deal again the first step that does not count; no rank can be ahead of it."""
        number = self._first + max(cut.committed, default=0)
        paces = [self.paces[old] if old >= 0 else 0.0 for old in cut.former_ranks]
        # Whether some rank had begun a step that does not count yet when the ranks changed.
        is_within_step = any(busy > 0 for busy in cut.busy)
        # A step that nobody had begun is dealt as usual when it comes.
        self._dealt = self._dealt if is_within_step else {}
        if is_within_step and (sizes := self._sizes_of(number)):
            before = self._dealt.get(number) or deal_micro_batches(len(sizes), self.paces)
            self._dealt = {number: deal_again(before, cut.former_ranks, paces)}
        self.paces, self._together = paces, None


class StepEnd:
    """The end of one step on this rank: what the ranks tell each other there, and what it says.

    plan: of the step. has_gradient, has_buffers, divisors: by model.
    paces: by rank, the seconds that it takes for a micro-batch.
    """

    def __init__(self, plan: StepPlan, num_samples: int, micro_batch_size: int) -> None:
        self.plan = plan
        self.has_gradient: list[bool] = []
        self.has_buffers: list[bool] = []
        self.divisors: list[float] = []
        self.paces: list[float] = []
        self._num_samples = num_samples
        self._micro_batch_size = micro_batch_size
        self._weights: dict[int, dict[int, float]] = {}  # by id() of a model, by micro-batch
        self._seconds: list[float] = []

    def note(self, number: int, models: Sequence[SummableModel], seconds: float) -> None:
        """This rank has computed a micro-batch."""
        self._seconds.append(seconds)
        for model in models:
            if model.weight is not None:
                self._weights.setdefault(id(model), {})[number] = model.weight

    def meet(self, group: Group, models: Sequence[SummableModel], paces: Sequence[float]) -> None:
        """(2) Raises CollectiveMismatch, on all ranks, if they are at different steps."""
        num = self.plan.num_micro_batches
        # With the square, ranks that differ show in the sums alone (_check_same).
        numbers = [float(self.plan.number), float(self.plan.number) ** 2]
        numbers += [float(self._num_samples), float(self._num_samples) ** 2]
        for model in models:
            weights = self._weights.get(id(model), {})
            numbers += [model.has_gradient, model.buffers_have_changed, len(weights)]
            numbers += [weights.get(number, 0.0) for number in range(num)]
        own = [0.0] * group.size
        own[group.rank] = self._pace(paces[group.rank])
        numbers += own
        vector = device_numbers(numbers, torch.float64, group.device)
        seen = group.all_reduce_and_read(vector).tolist()
        self._check_same(seen, group)
        self.has_gradient, self.has_buffers, self.divisors, at = [], [], [], 4
        for _ in models:
            has_gradient, has_buffers, num_weighed = seen[at : at + 3]
            weighed = seen[at + 3 : at + 3 + num]
            self.has_gradient.append(has_gradient > 0)
            self.has_buffers.append(has_buffers > 0)
            self.divisors.append(self._divisor(int(num_weighed), weighed))
            at += 3 + num
        if not any(self.has_gradient):
            raise RuntimeError(
                f"no model holds a gradient on any rank at the end of step {self.plan.number}: no "
                "backward pass has brought one, or it was cleared again. Call backward() on a loss "
                "of the DistributedDataParallel inside the loop over the step's batches, and "
                "zero_grad() after optimizer.step()"
            )
        self.paces = seen[at:]

    def _pace(self, before: float) -> float:
        if not self._seconds:
            return before
        pace = sum(self._seconds) / len(self._seconds)
        return before + _FORGETTING * (pace - before) if before else pace

    def _check_same(self, seen: Sequence[float], group: Group) -> None:
        size = group.size
        for at, what in ((0, "number of the step"), (2, "number of samples of the step")):
            total, squares = seen[at], seen[at + 1]
            if total * total != size * squares:
                own = (self.plan.number, self._num_samples)[at // 2]
                raise CollectiveMismatch(
                    "ctx.steps",
                    group.generation,
                    list(range(size)),
                    f"the {what} is {own} on rank {group.rank}, and differs on other ranks",
                    "Every rank must call ctx.steps with the same dataset and sizes, and take all "
                    "steps.",
                )

    def _divisor(self, num_weighed: int, weights: Sequence[float]) -> float:
        if not num_weighed:
            return self._num_samples / self._micro_batch_size
        if num_weighed < len(weights):
            raise RuntimeError(
                f"{num_weighed} of the {len(weights)} micro-batches of step {self.plan.number} "
                "weighted their loss; either all of them must call model.weigh(loss, weight), or "
                "none"
            )
        total = math.fsum(weights)  # Rounded once, so the order does not matter.
        if not total > 0:
            raise RuntimeError(
                f"the weights of the micro-batches of step {self.plan.number} add up to {total:g}; "
                "the sum must be above 0"
            )
        return total


def _first_step(rest: Remainder) -> int:
    """The first step that is left."""
    # The epoch was used up before the run resumed.
    if rest.given is None:
        return _OVER
    by_count = sum(max(counts, default=0) for counts in rest.runs)
    return max(by_count, max(rest.given, default=-1) + 1)


def _check_size(name: str, size: object) -> None:
    if not hasattr(size, "__index__"):
        raise TypeError(f"{name} must be a whole number of samples, got {size!r}")
    if size < 1:  # type: ignore[operator]
        raise ValueError(f"{name} must be at least 1, got {size}")


def _check_place(joins: Sequence[object]) -> None:
    if joins:
        raise RuntimeError(
            "ctx.steps needs no Join: every rank takes every step, even without a batch of its "
            "own. Remove the `with Join(...)` around the loop"
        )
    if not torch.is_grad_enabled():
        raise RuntimeError(
            "ctx.steps makes training steps, and gradients are off here (torch.no_grad). For an "
            "evaluation iterate ctx.shard, and combine the results with ctx.reduce"
        )


def _check_models(models: Sequence[SummableModel]) -> None:
    if not models:
        raise RuntimeError(
            "ctx.steps sums the gradients of a DistributedDataParallel of the run's group, and "
            "there is none. Wrap the model before the loop: "
            "model = cl.DistributedDataParallel(module)"
        )


def _check_together(models: Sequence[SummableModel]) -> None:
    """models: those with a gradient in the step."""
    if len(models) > 1 and any(model.can_wait for model in models):
        raise RuntimeError(
            f"the {len(models)} DistributedDataParallel models of this function would take the "
            "steps of ctx.steps together, but in a run that survives lost workers only one model "
            "with a ZeroRedundancyOptimizer can. Wrap one module that has both, drop the other "
            "model, or let the session end when a worker is lost (max_failures=0)"
        )
