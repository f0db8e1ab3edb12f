"""The engine of a sharded optimizer: its steps, and what recovery and checkpoints do with it.

A user holds, steps and joins a `ZeroRedundancyOptimizer`. What takes its step on all ranks is in
its engine, which the rest of the package is handed.

A step has the phases below; the numbers stand again where they happen.

    (1) Reduce-scatter of each bucket, out of place, launched during backward.
    (2) Each reduced shard goes to the ranks that keep its replicas, if there are any.
    (3) Ballot: one small all-reduce in float64. Each rank votes when its own reduction is
        complete, so a rank that sees the result knows that all ranks finished (1) and (2).
    (4) Apply the shard's gradient to the shard, and the replicas' to the replicas.
    (5) All-gather the parameters, and take over the buffers.

(4) and (5) go bucket by bucket; with `overlap_with_ddp` those of most buckets come during backward
(early_update.py).

Where the run goes on after a death (recovery/recovery.py), a failure in any of them parks the step.
If some rank has seen the ballot the step counts, and what this rank lacks is done in the next
generation. Otherwise the step begins again at (1), from the buckets that every rank has kept.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from actors.errors import ends_a_generation
from actors.messages import Progress
from collectives import CollectiveError, Group

from ..data_parallel.engine import ModelEngine
from ..data_parallel.gradient_bucket import GradientBucket
from ..data_parallel.reducer import Reducer
from ..join.join import GroupJoinable
from ..process.agreement import Agreement
from ..process.between_runs import between_runs
from ..process.running import recovery_of
from ..process.step_boundary import boundary
from .ballot import Ballot, Outcome, Vote, numbers_of, set_numbers
from .early_update import EarlyUpdate
from .loss_scale import check_scale
from .parameter_bucket import Gather
from .parameter_shard import ParameterShard
from .shard_state import Inventory, ShardState


class Face(torch.optim.Optimizer, GroupJoinable):
    """What the engine asks of the optimizer as the user holds it.

    num_steps: that were applied, equal on all ranks.
    max_norm: what the norm of the mean gradient is clipped to, if it is.
    grad_norm: of the last step, before clipping.
    uses_scaler: whether losses are scaled.
    found_overflow: whether the last step was left out, as a scaled gradient was not finite.
    """

    num_steps: int
    max_norm: float | None
    grad_norm: float | None
    uses_scaler: bool
    found_overflow: bool


class OptimizerEngine:
    """The engine of one sharded optimizer on one rank.

    model: whose gradients are reduced; None where `.grad` is taken as it is.
    """

    def __init__(self, face: Face, shard: ParameterShard, model: ModelEngine | None) -> None:
        self.face = face
        self.shard = shard
        self.model = model
        self.reducer: Reducer | None = None
        """Of the model whose gradients travel once; None where they are all-reduced, or taken as
        they are."""
        self.loss_scale: float | None = None
        self.consolidated: dict[str, Any] | None = None
        """The whole state, on a rank to which it was gathered; of this group's numbering."""
        self.last_live: tuple[int, ...] = ()
        """The ranks that took the last step."""
        self._group = shard.group
        self._waiting: list[torch.nn.Parameter] = []
        """In the groups, but frozen since they came: no shard has them."""
        self._early: EarlyUpdate | None = None
        self._seen = Progress(0)
        """The last ballot that this rank has seen, and what it said."""
        self._ballot_of_step = 0
        """The ballot of the step that is being taken, or was taken last."""
        given = [p for options in face.param_groups for p in options["params"]]
        if model is not None and shard.elementwise:
            self.reducer = model.reducer
            self.reducer.reduce_by_shards()
            self._own(self.reducer.parameters, self.reducer.buckets)
        laid_out = {id(p) for p in shard.parameters}
        self._waiting = [p for p in dict.fromkeys(given) if id(p) not in laid_out]
        self.take_up_trainable()
        self._recovery = recovery_of(self._group) if self.reducer is not None else None

    def begin(self, early: EarlyUpdate | None) -> None:
        """The optimizer is whole: steps may come. early: what steps shards during backward."""
        self._early = early
        if self._recovery is not None:
            assert self.reducer is not None
            self.reducer.parks = True
            self._recovery.watch_optimizer(self)
        if self.model is not None:
            self.model.leave_steps_to_optimizer()
        between_runs().wrap(self)

    @property
    def group(self) -> Group:
        return self._group

    def add(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Cut shards of these, too, as soon as they are trained."""
        self._waiting += parameters
        self.take_up_trainable()

    def take_up_trainable(self) -> None:
        """Cut shards of parameters in the groups that are not frozen (any more); alike on all
        ranks. A parameter that is frozen later keeps shard and state: without a gradient
        it is not stepped."""
        fresh = [
            p
            for p in self._waiting
            # Like a plain optimizer, take what has a gradient, wherever it is from.
            if p.requires_grad or (self.model is None and p.grad is not None)
        ]
        if not fresh and self.shard.num_groups == len(self.face.param_groups):
            return
        taken = {id(p) for p in fresh}
        self._waiting = [p for p in self._waiting if id(p) not in taken]
        buckets = self.model.reduce_also(fresh) if self.model is not None else []
        self._own(fresh, buckets if self.reducer is not None else None)

    def _own(
        self, parameters: Sequence[torch.nn.Parameter], buckets: Sequence[GradientBucket] | None
    ) -> None:
        """Lay out shards of `parameters`. buckets: of the reducer, if it has them."""
        self.shard.add(parameters, self.face.param_groups, buckets)
        num_options = len(self._option_numbers())
        self._ballot = Ballot(self.group, len(self.shard.parameters), num_options)

    # -- the step --------------------------------------------------------------------------------

    def take_step(self, is_live: bool) -> None:
        if self._waiting:
            self.take_up_trainable()
        self._ballot_of_step = self._seen.ballots + 1
        while self._seen.ballots < self._ballot_of_step:
            try:
                self._try_step(is_live)
            except Exception as error:
                if self._recovery is None or not ends_a_generation(error):
                    raise
                self._recovery.recover(error, self)
        between_runs().end_applying()
        if self._recovery is not None:
            self._recovery.has_stepped(self)

    @property
    def step_counts(self) -> bool:
        """Whether the step that this rank is in has been agreed on: then what the loop's body does
        behind it has to be done, also where its parameters could not be gathered any more."""
        return self._seen.ballots >= self._ballot_of_step

    def _try_step(self, is_live: bool) -> None:
        if self.reducer is not None:
            self.reducer.wait()  # (1)
        for work in self.shard.start_replicating():  # (2)
            work.wait()
        outcome = self._see(self._ballot.hold(self._vote(is_live)), is_live)  # (3)
        if self.reducer is None:
            self._check_gradients(outcome.agreement)
        for gather in self._apply(outcome):  # (4), and (5) begins
            gather.wait()
        if self.model is not None and self.reducer is not None:
            self.model.sync_buffers(outcome.agreement.live, self.face._join)

    def _vote(self, is_live: bool) -> Vote:
        join = self.face._join
        needs_norm = self.face.max_norm is not None or self.face.uses_scaler
        return Vote(
            step=self.face.num_steps,
            live=is_live,
            has_next=join.ledger.has_next if join else True,
            used=[parameter.grad is not None for parameter in self.shard.parameters],
            weight=self.reducer.weight if self.reducer else None,
            squared_norm=self.shard.squared_norm() if needs_norm else 0.0,
            loss_scale=(self.loss_scale or 0.0) if is_live else 0.0,
            options=self._option_numbers(),
            cursors=self._recovery.cursors() if self._recovery else (),
            num_samples=boundary().num_samples,
            stop=boundary().steps.stop_is_wanted,
        )

    def _see(self, payload: tuple[float, ...], is_live: bool) -> Outcome:
        """Take over what a ballot means for this rank. From here on the step counts."""
        self._seen = Progress(self._seen.ballots + 1, payload)
        outcome = self._ballot.read(payload)
        live = self.last_live = outcome.agreement.live
        if self._recovery is not None:
            self._recovery.record(outcome.cursors)
        if self.face._join:
            self.face._join.record(self.face, outcome.agreement)
        boundary().step_agreed(outcome.agreement, self._group, ends_step=True)
        if self.group.rank not in live and live:
            # A rank that has joined runs no schedule of the loop's body: it steps its shard with
            # the options (learning rate and so on) of a rank that does.
            set_numbers(
                self.face.param_groups, sorted(self.face.defaults), outcome.options[max(live)]
            )
        if self.face.uses_scaler and is_live:
            check_scale(self.loss_scale, outcome.loss_scale)
        self.face.found_overflow = self.face.uses_scaler and not math.isfinite(outcome.squared_norm)
        if self.reducer is not None:
            self.reducer.end_step()
        return outcome

    def _apply(self, outcome: Outcome) -> list[Gather]:
        """Step what this rank keeps, all of it, whatever happens to the others meanwhile; returns
        the all-gathers, each begun as soon as its bucket is stepped."""
        agreement = outcome.agreement
        gathers = self._early.end_step() if self._early is not None else []
        if not agreement.live:
            return []
        divisor = self.divisor(agreement)
        if self.face.max_norm is not None:
            scale = outcome.loss_scale if self.face.uses_scaler else 1.0
            self.face.grad_norm = math.sqrt(outcome.squared_norm) / (divisor * scale)
        if self.face.found_overflow:
            return []
        coefficient = self._coefficient(outcome)
        failure: CollectiveError | None = None
        for portion in self.shard.portions[len(gathers) :]:
            self.shard.apply(portion, self.face.param_groups, agreement.used, divisor, coefficient)
            try:
                if failure is None:
                    gathers += self.shard.start_gather(portion)
            except CollectiveError as error:
                failure = error
        self.face.num_steps += 1
        if failure is not None:
            raise failure
        return gathers

    def _check_gradients(self, agreement: Agreement) -> None:
        """Gradients that are taken as they are have to be there; on a joined rank, too."""
        for parameter, is_used in zip(self.shard.parameters, agreement.used, strict=True):
            if is_used and parameter.grad is None:
                error = RuntimeError(
                    f"a parameter of shape {tuple(parameter.shape)} has a gradient on other ranks "
                    f"of {list(agreement.live)} and none on rank {self.group.rank}. Without our "
                    "DistributedDataParallel, whoever makes the gradients equal does so on all "
                    "ranks; inside Join, it is listed before this optimizer"
                )
                self.group.abort(error)  # The others wait for our part of the parameters.
                raise error

    def divisor(self, agreement: Agreement) -> float:
        """What the summed gradient is divided by to be the mean."""
        if self.reducer is None:
            return 1.0  # Whoever made the gradients equal has divided them.
        if self.face._join:
            return self.face._join.ledger.divisor(agreement)
        return agreement.weight or self.group.size

    def _coefficient(self, outcome: Outcome) -> float:
        """What the mean gradient is multiplied with: it is unscaled, then clipped."""
        scale = outcome.loss_scale if self.face.uses_scaler else 1.0
        if self.face.max_norm is None or self.face.grad_norm is None:
            return 1.0 / scale
        # As torch: never enlarge, no division by zero, and a norm that is no number spoils all.
        clipped = self.face.max_norm / (self.face.grad_norm + 1e-6)
        return (1.0 if clipped > 1 else clipped) / scale

    def _option_numbers(self) -> list[float]:
        """The optimizer's own options; a schedule's notes in the groups are none."""
        return numbers_of(self.face.param_groups, sorted(self.face.defaults))

    # -- a run that goes on (recovery.py) --------------------------------------------------------

    @property
    def progress(self) -> Progress:
        return self._seen

    @torch.no_grad()
    def catch_up(self, decided: Progress) -> None:
        """Take the step that others have seen the ballot of, as far as this rank can alone."""
        if decided.ballots > self._seen.ballots:
            assert self.reducer is not None
            outcome = self._see(decided.payload, self.reducer.is_live)
            with contextlib.suppress(CollectiveError):  # The gathers: of a group that is no more.
                self._apply(outcome)

    def move_to(self, group: Group) -> None:
        """Go on in a group of the same ranks, at the beginning of a step; the shards stay."""
        self._group = self.shard.group = group
        self._ballot.move_to(group)

    def leave_run(self) -> None:
        """The run in which it was made is over: what took it into the next generation with it."""
        self._recovery = None
        if self._early is not None and self.reducer is not None and self.reducer.has_begun:
            between_runs().tear()

    @torch.no_grad()
    def take_over(
        self,
        held: ShardState,
        inventories: Sequence[Inventory],
        progress: Progress,
        num_steps: int,
        options: Sequence[Mapping[str, Any]],
    ) -> int:
        """Go on where an optimizer of the same parameters was, which the ranks still keep: called
        on all ranks before the first step. Returns the bytes that this rank sent.

        held: what this rank keeps of its state.
        inventories: what all ranks keep, by rank.
        progress, num_steps, options: of the other optimizer.
        """
        assert self.reducer is not None
        for ours, theirs in zip(self.face.param_groups, options, strict=True):
            ours.update(theirs)
        self.face.num_steps, self._seen = num_steps, progress
        self._ballot_of_step = progress.ballots
        if self.model is not None:
            self.model.buffers.synced_step = progress.ballots
        sent_bytes = self.shard.complete(held, inventories, self.group)
        self.shard.recut(self.group, self.reducer.buckets, self.face.param_groups, held)
        self.shard.gather()
        return sent_bytes

    @torch.no_grad()
    def change_group(self, group: Group, held: ShardState) -> None:
        """Go on as a rank of another group. held: the state of what this rank shall keep there."""
        assert self.reducer is not None
        self._group = group
        self.reducer.change_group(group)
        self.shard.recut(group, self.reducer.buckets, self.face.param_groups, held)
        num_options = len(self._option_numbers())
        self._ballot = Ballot(group, len(self.shard.parameters), num_options)
        self.consolidated = None
