"""The engine of a sharded optimizer: its steps, and the methods for recovery and checkpoints.

A step has the phases below; the code repeats the numbers.

    (1) Reduce-scatter of each bucket, out of place, launched during backward.
    (2) Send each reduced shard to the ranks that keep its replicas, if there are any.
    (3) Ballot: one small all-reduce in float64. Each rank votes when its own reduction is
        complete, so a rank that sees the result knows that all ranks finished (1) and (2).
    (4) Apply the shard's gradient to the shard, and the replicas' gradients to the replicas.
    (5) All-gather the parameters, and synchronize the buffers.

(4) and (5) run bucket by bucket. With `overlap_with_ddp` they run for most buckets during backward
(early_update.py).

If the run survives the loss of a rank (recovery/recovery.py), a failure in any phase parks the
step. If some rank has seen the ballot, the step counts, and this rank finishes it in the next
generation. Otherwise the step begins again at (1), from the buckets that every rank has kept.
"""

from __future__ import annotations

import contextlib
import math
import warnings
import zlib
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from chorusline.actors.errors import ends_a_generation
from chorusline.actors.fault_plan import Faults, Instant
from chorusline.actors.messages import Progress
from chorusline.collectives import CollectiveError, CollectiveMismatch, Group
from chorusline.collectives.contract.call_site import users_level
from chorusline.collectives.objects.blocking import all_gather_object, all_gather_row

from ..data_parallel.engine import ModelEngine, reducers_of
from ..data_parallel.gradients.gradient_bucket import GradientBucket
from ..data_parallel.gradients.reducer import Reducer
from ..data_parallel.same_model import broadcast_tensors, unlike_values
from ..join.join import GroupJoinable, Join
from ..process.agreement import Agreement, Note
from ..process.between_runs import between_runs
from ..process.leftovers import Standing
from ..process.running import Survival, recovery_of
from ..process.step_boundary import boundary
from .ballot import (
    GROWTH,
    OF_THE_STEP,
    Ballot,
    Outcome,
    Vote,
    check_same_options,
    labels_of,
    numbers_of,
    set_numbers,
)
from .digest_checks import Correction, DigestChecks
from .early_update import EarlyUpdate
from .loss_scale import agreed_scale
from .shards.parameter_bucket import Gather
from .shards.parameter_shard import ParameterShard
from .shards.shard_state import Inventory, ShardState
from .shards.shardable_optimizers import ELEMENTWISE
from .state_changes import StateChanges
from .summed_steps import SummedSteps

_OF_THE_MODEL = (
    "Give it the model, ZeroRedundancyOptimizer(model, ...), or parameters of the module that "
    "was wrapped: a copy of the module has other parameters."
)


class Face(torch.optim.Optimizer, GroupJoinable):
    """The attributes of the user's optimizer that the engine reads and writes.

    num_steps: number of applied steps, equal on all ranks.
    max_norm: the norm to which the mean gradient is clipped; None: no clipping.
    grad_norm: the norm in the last step, before clipping.
    uses_scaler: whether losses are scaled. _scale_of_losses: returns their scale, or None.
    _growth_of_scale: returns by what the scale grows and shrinks (ballot.GROWTH); zeros without
        one. _follow_scale: on a rank without data, takes scale and growth of the others.
    _scaler_state, _load_scaler_state: the whole state of the GradScaler; None without one.
    found_overflow: whether the last step was skipped because a scaled gradient was not finite.
    check_every: one of so many steps is checked by digests (digest_checks.py); None: no step is.
    corrections: of what had silently become wrong.
    """

    num_steps: int
    max_norm: float | None
    grad_norm: float | None
    uses_scaler: bool
    found_overflow: bool
    check_every: int | None
    corrections: list[Correction]

    def _run_pre_hooks(self) -> None:
        """What `step()` does on a rank with data before it applies the step."""
        for hook in [*self._optimizer_step_pre_hooks.values()]:
            hook(self, (self,), {})

    @abstractmethod
    def _scale_of_losses(self) -> torch.Tensor | None: ...

    @abstractmethod
    def _growth_of_scale(self) -> tuple[float, float, float]: ...

    @abstractmethod
    def _scaler_state(self) -> dict[str, Any] | None: ...

    @abstractmethod
    def _load_scaler_state(self, state: dict[str, Any] | None) -> None: ...

    @abstractmethod
    def _follow_scale(self, scale: float, growth: Sequence[float]) -> None: ...


class OptimizerEngine:
    """The engine of one sharded optimizer on one rank: it takes the steps of the user's
    `ZeroRedundancyOptimizer`, and recovery and checkpoints work on it.

    model: the model whose gradients are reduced; None if `.grad` is used as it is.
    """

    def __init__(self, face: Face, shard: ParameterShard, model: ModelEngine | None) -> None:
        self.face = face
        self.shard = shard
        self.model = model
        self.reducer: Reducer | None = None
        """The model's reducer if gradients are reduce-scattered; None if they are all-reduced or
        used as they are."""
        self.loss_scale: torch.Tensor | None = None
        self.consolidated: dict[str, Any] | None = None
        """The whole state, on a rank to which it was gathered; None after the group changes."""
        self.last_live: tuple[int, ...] = ()
        """The ranks that took the last step."""
        self._waiting: list[torch.nn.Parameter] = []
        """Parameters in the groups that no shard holds, because they have been frozen so far."""
        self._why_not = ""
        """What keeps this rank from taking the step under way; empty if nothing does."""
        self._early: EarlyUpdate | None = None
        self._seen = Progress(0)
        """The number and content of the last ballot that this rank has seen."""
        self._ballot_of_step = 0
        """The ballot of the current step, or of the last one."""
        self._tells_changes = True
        """Whether the next ballot says that the state was changed."""
        self._tells_perturbed = True
        """Whether it says that parameters were changed between two passes: once is enough."""
        self._digests = DigestChecks(self, face.check_every)
        self.state_changes = StateChanges(shard)
        self.summed = SummedSteps(self)
        """The steps of `ctx.steps`, which the optimizer ends for its model."""
        self._recovery: Survival | None = None
        self.faults = Faults()
        given = [p for options in face.param_groups for p in options["params"]]
        if model is not None and shard.elementwise:
            self.reducer = model.reducer
            self._recovery = recovery_of(self.group)
            if self._recovery is not None:
                self.faults = self._recovery.faults
            self.reducer.reduce_by_shards()
            self._own(self.reducer.parameters, self.reducer.buckets)
        laid_out = {id(p) for p in shard.parameters}
        self._waiting = [p for p in dict.fromkeys(given) if id(p) not in laid_out]
        self.take_up_trainable()

    def begin(self, early: EarlyUpdate | None) -> None:
        """Called when the optimizer is fully constructed. early: steps shards during backward."""
        self._early = early
        if self._recovery is not None:
            assert self.reducer is not None
            self.reducer.parks = True
            self._recovery.watch_optimizer(self)
        if self.model is not None:
            self.model.leave_steps_to_optimizer(self.summed if self.reducer is not None else None)
        between_runs().wrap(self)

    @property
    def group(self) -> Group:
        return self.shard.group

    def add(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Cut shards of these parameters too, as soon as they are trainable."""
        self._waiting += parameters
        self.take_up_trainable()

    def take_up_trainable(self) -> None:
        """Cut shards of waiting parameters that are now trainable, the same ones on all ranks. A
        parameter that is frozen later keeps shard and state, and is not stepped."""
        fresh = [
            p
            for p in self._waiting
            # As in a plain optimizer, a gradient is enough, whatever wrote it.
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
        """Lay out shards of `parameters`. buckets: the reducer's, if it reduces them."""
        self.shard.add(parameters, self.face.param_groups, buckets)
        self._make_ballot()

    def _make_ballot(self) -> None:
        num_options, counts = len(self.option_numbers()), self._recovery is not None
        digests = self._digests.laid_out()
        self._labels = self._option_labels()
        self._ballot = Ballot(self.group, num_options, counts_samples=counts, num_digests=digests)

    # -- the step --------------------------------------------------------------------------------

    def take_step(self, is_live: bool, why_not: str = "") -> None:
        """why_not: what keeps this rank from taking the step; empty if nothing does."""
        if self.summed.has_agreed:
            self.summed.take_step()
            return
        if not why_not:
            self.take_up_waiting()
        self._why_not = why_not or self._why_not_now()
        # Inside a Join the others would wait in this step, or see it as ended by this rank: there
        # the ballot tells them why. Elsewhere no other rank need have come here.
        if self._why_not and (self.face._join is None or self.has_early_update):
            raise RuntimeError(self._why_not)
        self.shard.bring_home()
        if self.reducer is not None:
            self.reducer.send_late()
        elif self.model is not None:
            self.model.reducer.num_in_step = 0
        self.begin_ballot()
        while self._seen.ballots < self._ballot_of_step:
            try:
                self._try_step(is_live)
            except Exception as error:
                if self._recovery is None or not ends_a_generation(error):
                    raise
                if not self.step_counts and self.model and not self.model.has_whole_gradients:
                    raise  # The function has to run again from the top, with gradients that are.
                # If some rank has seen this step's ballot, the step is taken in here (`catch_up`),
                # and the loop ends; if none has, the buckets are reduced again, and it continues.
                self._recovery.recover(error, self)
        self.has_stepped()

    def take_up_waiting(self) -> None:
        if self._waiting:
            self.take_up_trainable()

    def _why_not_now(self) -> str:
        if self.reducer is None or self.model is None:
            return ""
        return self.model.why_thawed() or self.reducer.why_changed()

    def begin_ballot(self) -> None:
        """A step begins, which ends with the next ballot."""
        self._ballot_of_step = self._seen.ballots + 1

    def has_stepped(self) -> None:
        between_runs().end_applying()
        if self._recovery is not None:
            self._recovery.has_stepped(self)

    @torch.no_grad()
    def switch(self, mode: str) -> None:
        """Call `train()` or `eval()` of the optimizers of all shards, on all ranks, and gather the
        parameters, which schedule-free optimizers then change."""
        if self.face._join is not None:
            raise RuntimeError(
                f"optimizer.{mode}() changes the shards of all ranks, and ranks that have run out "
                "of data do not call it inside Join; call it before or after the Join"
            )
        self.shard.bring_home()
        self.shard.switch(mode, self.face.param_groups)
        self.shard.gather()

    @property
    def has_early_update(self) -> bool:
        return self._early is not None

    @property
    def can_wait(self) -> bool:
        """Whether a step can wait here for the ranks of the next generation."""
        return self._recovery is not None

    def wait_for_next_generation(self, error: BaseException) -> None:
        """Return in the next generation, in the middle of a step. Raises `error` if it does not end
        a generation, or the run ends with it."""
        if self._recovery is None or not ends_a_generation(error):
            raise error
        self._recovery.recover(error, self)

    @property
    def step_counts(self) -> bool:
        """Whether the ranks have agreed on the current step. Then the loop's body must run the code
        after it, even if the parameters could not be gathered."""
        return self._seen.ballots >= self._ballot_of_step

    def _try_step(self, is_live: bool) -> None:
        payload = self.hold_ballot(is_live)
        if self._ballot.says(Note.REFUSES, payload):
            told = all_gather_object(self.group, self._why_not)
            why = next(filter(None, told))
            ranks = [rank for rank, one in enumerate(told) if one == why]
            raise RuntimeError(f"on ranks {ranks}: {why}")
        if self.reducer is not None and (standings := self._ballot.sends_again(payload)):
            # A rank ran more passes since the launch, or it now knows what its leftovers belong
            # to. All send again, with these, and vote again.
            self.reducer.send_again(standings)
            payload = self.hold_ballot(is_live)
        if self._takes_max_norm(payload, is_live):
            payload = self.hold_ballot(is_live)
        if self.reducer is None and self._takes_gradients(payload) and self._needs_norm:
            payload = self.hold_ballot(is_live)
        self.faults.reach(Instant.SEEN)
        outcome = self.see(payload, is_live)
        if self.model is None and not self.face.num_steps:
            self._check_reduced(outcome.agreement)
        gathers = self.apply(outcome)  # (4), and (5) begins
        for gather in gathers:
            gather.wait()
        self._end_step(outcome.agreement.live, gathers)
        self.faults.reach(Instant.STEPPED)

    def _takes_max_norm(self, payload: tuple[float, ...], is_live: bool) -> bool:
        """Whether a rank without data has left its part of the norm out, as the others have begun
        to clip since it ran out of data. All ranks vote again then."""
        norms = self._ballot.max_norms(payload)
        given = {norm for norm, has_data in norms if has_data}
        if len(given) != 1 or given == {0.0} or all(norm for norm, _ in norms):
            return False
        if not is_live:
            self.face.max_norm = given.pop()
        return True

    def _takes_gradients(self, payload: tuple[float, ...]) -> bool:
        """Without a reducer each rank steps its shard with what `.grad` holds. What the body has
        done to it since the pass, such as clipping, a rank without data has not done, so it takes
        the gradients of a rank that has data. Returns whether there is such a rank."""
        agreement = self._ballot.read(payload).agreement
        self._check_gradients(agreement)
        live = agreement.live
        pairs = zip(self.shard.parameters, agreement.used, strict=True)
        used = [parameter for parameter, is_used in pairs if is_used]
        reducers = reducers_of(used)
        if not live or len(live) == self.group.size or not reducers:
            return False
        for parameter in used:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        grads = [parameter.grad for parameter in used if parameter.grad is not None]
        broadcast_tensors(grads, min(live), self.group)
        for reducer in reducers:
            reducer.held.note_writes()
        return True

    def _end_step(self, live: tuple[int, ...], gathers: Sequence[Gather]) -> None:
        """Synchronize the buffers. In a run that continues when ranks are lost, return when it is
        known that parameters and buffers have come; the last operation tells for all.

        What the program does with them after the step, such as an average of parameters, cannot be
        taken back, and the gradients of the next step are kept.
        """
        goes_on = self._recovery is not None
        were_sent = False
        if self.model is not None and self.reducer is not None:
            were_sent = self.model.sync_buffers(live, self.face._join, on_host=goes_on)
        if goes_on and not were_sent and gathers:
            gathers[-1].work.wait_on_host()

    def apply_and_gather(self, outcome: Outcome, divisor: float) -> None:
        """(4) and (5) of a step of `ctx.steps`, whose buffers all ranks have."""
        gathers = self.apply(outcome, divisor)
        for gather in gathers:
            gather.wait()
        if self._recovery is not None and gathers:
            gathers[-1].work.wait_on_host()

    def hold_ballot(self, is_live: bool) -> tuple[float, ...]:
        self._tells_changes = True
        payload = self._hold_ballot(is_live)
        if self._ballot.says(Note.CHANGES_STATE, payload):
            # No rank takes the step by this ballot, and the next one says it no more.
            join = self.face._join
            last_live = join.ledger.last_live if join is not None else ()
            told = all_gather_object(self.group, self.state_changes.own)
            live = self._ballot.live(payload) or last_live
            self.state_changes.take(told, live, self.group)
            self._tells_changes = False
            payload = self._hold_ballot(is_live)
        if self._ballot.says(Note.PERTURBS, payload):
            self._compare_perturbed()
        return self._digests.confirm(payload, is_live)

    def _compare_perturbed(self) -> None:
        """Warn on all ranks if the program has changed the parameters otherwise on each rank."""
        self._tells_perturbed = False
        told = all_gather_object(self.group, self.reducer.held.perturbed if self.reducer else None)
        ranks = [rank for rank, digest in enumerate(told) if digest is not None]
        if len({told[rank] for rank in ranks}) > 1:
            warnings.warn(
                f"ranks {ranks} have changed the parameters between two backward passes of a step, "
                "each in its own way. With a ZeroRedundancyOptimizer, `.grad` is the gradient of "
                "this rank's own batch until step(), so what follows it, such as SAM's "
                "perturbation, differs from training in one process. Compute it from the mean, "
                "group.all_reduce(parameter.grad.clone(), ReduceOp.AVG) (in a session "
                "ctx.group), or use a plain optimizer, for which `.grad` is the mean",
                stacklevel=users_level(),
            )

    def leave_join(self, join: Join) -> None:
        """A Join ends in which a rank missed steps, and what its body has done to the optimizer's
        state, and to the GradScaler since the last step: `update(new_scale)`."""
        if self._recovery is not None and self._recovery.has_gone_on:
            return  # Another rank may have been in here when the ranks changed, and be through.
        try:
            own = self.state_changes.own, self.face._scaler_state()
            digest = zlib.crc32(repr((sorted(own[0].dropped), own[0].num_loads, own[1])).encode())
            if len({*map(tuple, all_gather_row(self.group, [digest]))}) == 1:
                return  # As most often.
            told = all_gather_object(self.group, own)
            live = join.ledger.last_live
            self.state_changes.take([changes for changes, _ in told], live, self.group)
            self.face._load_scaler_state(told[join.newest_rank(live)][1])
        except Exception as error:
            if self._recovery is None or not ends_a_generation(error):
                raise  # Else the next step recovers.

    def drop_state(self, numbers: Iterable[int]) -> None:
        """Drop the state of these parameters, on all ranks before the next step."""
        if self.face._join is not None and self.has_early_update:
            raise RuntimeError(
                "optimizer.state was cleared inside a Join, but with overlap_with_ddp ranks that "
                "have run out of data step in the backward pass, before they can hear of it. Clear "
                "it before or after the Join, or leave out overlap_with_ddp"
            )
        self.state_changes.drop(numbers)
        self.consolidated = None

    def _hold_ballot(self, is_live: bool) -> tuple[float, ...]:
        reach = self.faults.reach
        reach(Instant.REDUCE)
        if self._early is not None:
            self._early.step_launched()
        self._reduce()  # (1)
        reach(Instant.REDUCED)
        replicating = self.shard.start_replicating()  # (2)
        reach(Instant.REPLICATE)
        for work in replicating:
            work.order_stream()  # The ballot tells how it has ended.
        reach(Instant.VOTE)
        return self._ballot.hold(self._vote(is_live))  # (3)

    def _reduce(self) -> None:
        if (sums := self.summed.sums) is not None:
            # The exact norm is read on the host.
            sums.reduce_shards(on_host=self._needs_norm)
        elif self.reducer is not None:
            self.reducer.wait()

    @property
    def _needs_norm(self) -> bool:
        return self.face.max_norm is not None or self.face.uses_scaler

    def _vote(self, is_live: bool) -> Vote:
        needs_norm = self._needs_norm
        in_steps = self.model is not None and self.model.steps.is_under_way
        return Vote(
            step=self.face.num_steps,
            standing=self.reducer.standing(is_live) if self.reducer else Standing(is_live),
            has_next=self.face._has_next(),
            used=[parameter.grad is not None for parameter in self.shard.parameters],
            weight=self.reducer.weight if self.reducer else None,
            add_squared_norm=self.shard.add_squared_norm if needs_norm and not in_steps else None,
            exact_norm=self.shard.exact_norm() if needs_norm and in_steps else (),
            loss_scale=self.loss_scale if is_live and self.loss_scale is not None else 0.0,
            options=self._options_to_vote(),
            cursors=self._recovery.cursors() if self._recovery else (),
            num_samples=boundary().num_samples,
            stop=boundary().steps.stop_is_wanted,
            notes=[
                *(self.reducer.notes() if self.reducer else ()),
                *boundary().notes(),
                *([Note.REFUSES] if self._why_not else ()),
                # An optimizer that steps in the backward pass has stepped with them already.
                *(
                    [Note.CHANGES_STATE]
                    if self._tells_changes and self.state_changes.own and not self.has_early_update
                    else ()
                ),
                *([Note.PERTURBS] if self._perturbs else ()),
            ],
            join=self.face._told_of_join(),
            epoch=boundary().epoch,
            digest=-boundary().draws,
            digests=self._digests.vote(),
        )

    @property
    def _perturbs(self) -> bool:
        reducer = self.reducer
        return self._tells_perturbed and reducer is not None and reducer.held.perturbed is not None

    def see(self, payload: tuple[float, ...], is_live: bool) -> Outcome:
        """Record the result of a ballot on this rank. From here on the step counts."""
        outcome = self._ballot.read(payload)
        live = outcome.agreement.live
        names = sorted(self.face.defaults)
        check_same_options(outcome, self.face.param_groups, names, self.group.generation)
        self._seen = Progress(self._seen.ballots + 1, payload)
        self.last_live = live
        if live:
            self.state_changes.forget()
        self.face._step_agreed(outcome.agreement, self._recovery, ends_step=True, counts=True)
        if self.group.rank not in live or self._steps_nothing:
            # A joined rank runs no learning rate schedule: it steps its shard with the options of
            # a live rank. A rank that steps nothing does not count what the optimizer counts.
            given = [rank for rank in live if not math.isnan(sum(outcome.options[rank]))]
            if given:
                numbers = outcome.options[max(given)]
                set_numbers(self.face.param_groups, names, numbers[: -len(OF_THE_STEP)])
                self.face.max_norm = numbers[-len(OF_THE_STEP)] or None
        if self.face.uses_scaler:
            scale = agreed_scale(outcome.loss_scales, live)
            if live and self.group.rank not in live:
                self.face._follow_scale(scale, outcome.options[max(live)][-len(GROWTH) :])
        self.face.found_overflow = self.face.uses_scaler and not math.isfinite(outcome.squared_norm)
        if self.reducer is not None:
            self.reducer.end_step(outcome.agreement)
        if live and self.group.rank not in live:
            self.face._run_pre_hooks()
        return outcome

    def apply(self, outcome: Outcome, divisor: float | None = None) -> list[Gather]:
        """Step all shards that this rank keeps, even if another rank is lost meanwhile. Returns the
        all-gathers, each started as soon as its bucket is stepped.

        divisor: of the summed gradient; None: that of the agreement."""
        agreement = outcome.agreement
        gathers = self._early.end_step() if self._early is not None else []
        if not agreement.live:
            return []  # All ranks have joined: there is no gradient.
        divisor = self.divisor(agreement) if divisor is None else divisor
        uses_scaler, live = self.face.uses_scaler, agreement.live
        scale = agreed_scale(outcome.loss_scales, live) if uses_scaler else 1.0
        if self.face.max_norm is not None:
            self.face.grad_norm = math.sqrt(outcome.squared_norm) / (divisor * scale)
        if self.face.found_overflow or self._digests.leaves_out(outcome.digests):
            return []
        coefficient = self._clip_coefficient() / scale
        failure: CollectiveError | None = None
        for portion in self.shard.portions[len(gathers) :]:
            self.faults.reach(Instant.APPLY)
            self.shard.apply(portion, self.face.param_groups, agreement.used, divisor, coefficient)
            self.faults.reach(Instant.APPLIED)
            try:
                if failure is None:
                    gathers += self.shard.start_gather(portion)
                    self.faults.reach(Instant.GATHER)
            except CollectiveError as error:
                failure = error  # The step counts, so the remaining shards are stepped first.
        self.face.num_steps += 1
        self._digests.note()
        if failure is not None:
            raise failure
        return gathers

    def _check_gradients(self, agreement: Agreement) -> None:
        """Raise RuntimeError if a parameter has a gradient on other ranks and none here, and
        ValueError for a gradient that is not dense."""
        for parameter, is_used in zip(self.shard.parameters, agreement.used, strict=True):
            if parameter.grad is not None and parameter.grad.layout is not torch.strided:
                raise ValueError(
                    f"a parameter of shape {tuple(parameter.shape)} has a {parameter.grad.layout} "
                    "gradient, and only dense ones are sharded; write parameter.grad = "
                    "parameter.grad.to_dense() before step() (for nn.Embedding: sparse=False)"
                )
            may_lack = self.group.rank not in agreement.live and reducers_of([parameter])
            if is_used and parameter.grad is None and not may_lack:
                error = RuntimeError(
                    f"a parameter of shape {tuple(parameter.shape)} has a gradient on other ranks "
                    f"of {list(agreement.live)} and none on rank {self.group.rank}. Without "
                    "chorusline's DistributedDataParallel, your code must make the gradients equal "
                    "on all ranks; inside Join, list the joinable that does so before the optimizer"
                )
                self.group.abort(error)  # The others wait for this rank's parameters.
                raise error

    def _check_reduced(self, agreement: Agreement) -> None:
        """Raises CollectiveMismatch, on all ranks, if the gradients that nothing here reduces are
        not the same on all ranks; warns if there are none. In the first step only."""
        used = [
            p for p, is_used in zip(self.shard.parameters, agreement.used, strict=True) if is_used
        ]
        if agreement.live and not used and self.group.rank == agreement.live[0]:
            warnings.warn(
                "step() changes nothing: no parameter of this ZeroRedundancyOptimizer has a "
                f"gradient on any rank. {_OF_THE_MODEL}",
                stacklevel=users_level(),
            )
        grads = [p.grad for p in used if p.grad is not None]
        if found := unlike_values(grads, self.group) if grads else None:
            number, unlike = found
            raise CollectiveMismatch(
                "step()",
                self.group.generation,
                unlike,
                f"the gradient of a parameter of shape {tuple(used[number].shape)} differs "
                f"between rank 0 and ranks {unlike}, and no DistributedDataParallel reduces it",
                f"{_OF_THE_MODEL} If your own code makes the gradients equal, it must do so before "
                "step().",
            )

    def divisor(self, agreement: Agreement) -> float:
        """The number by which the summed gradient is divided to get the mean."""
        # Without a reducer, the code that made the gradients equal has divided them.
        return 1.0 if self.reducer is None else self.face._divisor(agreement)

    def _clip_coefficient(self) -> float:
        """The factor for the mean gradient that brings its norm to max_norm."""
        if self.face.max_norm is None or self.face.grad_norm is None:
            return 1.0
        # As in torch: never enlarge, never divide by zero, and let a NaN norm propagate.
        coefficient = self.face.max_norm / (self.face.grad_norm + 1e-6)
        return 1.0 if coefficient > 1 else coefficient

    def option_numbers(self) -> list[float]:
        """The numeric options of the optimizer, without entries that schedulers add to groups, and
        the numbers of OF_THE_STEP; 0 for none."""
        numbers = numbers_of(self.face.param_groups, sorted(self.face.defaults))
        return [*numbers, float(self.face.max_norm or 0.0), *self.face._growth_of_scale()]

    def _option_labels(self) -> list[str]:
        return labels_of(self.face.param_groups, sorted(self.face.defaults))

    @property
    def _steps_nothing(self) -> bool:
        """Whether this rank has no piece of an optimizer that may keep numbers in its groups."""
        return self.shard.optimizer is None and self.shard.optimizer_class not in ELEMENTWISE

    def _options_to_vote(self) -> list[float]:
        numbers = self.option_numbers()
        if len(numbers) != self._ballot.num_options:
            before, now = Counter(self._labels), Counter(self._option_labels())
            changed = [label for label in before | now if before[label] != now[label]]
            each = ", ".join(f"{one}: {now[one]} in place of {before[one]}" for one in changed)
            error = RuntimeError(
                f"options of the optimizer have become another number of numbers ({each}): a tuple "
                "of another length, None, or what cannot travel to other ranks, such as a text. "
                "Keep each option a number, or a tuple of as many as before"
            )
            self.group.abort(error)  # The others wait for this rank's vote.
            raise error
        if self._steps_nothing:
            numbers[: -len(OF_THE_STEP)] = [math.nan] * (len(numbers) - len(OF_THE_STEP))
        return numbers

    # -- recovery (recovery/recovery.py) ---------------------------------------------------------

    @property
    def progress(self) -> Progress:
        return self._seen

    @torch.no_grad()
    def catch_up(self, decided: Progress) -> None:
        """Take the step whose ballot other ranks have seen, as far as this rank can alone."""
        # No rank can have seen a ballot that this one has not come to: an optimizer that was just
        # made again is not late, it has yet to get its state.
        is_behind = self._seen.ballots < decided.ballots == self._ballot_of_step
        if self.summed.sums is not None:
            self.summed.catch_up(decided.payload if is_behind else None)
        elif is_behind:
            assert self.reducer is not None
            outcome = self.see(decided.payload, self.reducer.is_live)
            with contextlib.suppress(CollectiveError):  # The group of the gathers has ended.
                self.apply(outcome)

    def move_to(self, group: Group) -> None:
        """Continue in a group of the same ranks, at the beginning of a step; the shards stay."""
        self.shard.group = group
        self._ballot.move_to(group)

    def leave_run(self) -> None:
        """The run in which the optimizer was made is over, and with it the run's recovery."""
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
        """Take over the state of an earlier optimizer of the same parameters. Called on all ranks
        before the first step. Returns the bytes that this rank sent.

        held: this rank's part of the earlier state.
        inventories: of the earlier state, by rank.
        progress, num_steps, options: of the earlier optimizer.
        """
        assert self.reducer is not None
        self.faults.reach(Instant.MOVE)
        for ours, theirs in zip(self.face.param_groups, options, strict=True):
            ours.update(theirs)
        self.face.num_steps, self._seen = num_steps, progress
        self._ballot_of_step = progress.ballots
        self.state_changes.forget()
        if self.model is not None:
            self.model.buffers.synced_step = progress.ballots
        sent_bytes = self.shard.complete(held, inventories, self.group)
        self.shard.recut(self.group, self.reducer.buckets, self.face.param_groups, held)
        self.shard.gather()
        return sent_bytes

    @torch.no_grad()
    def change_group(self, group: Group, held: ShardState) -> None:
        """Continue as a rank of another group. held: the state that this rank will keep there."""
        assert self.reducer is not None
        self.reducer.change_group(group)
        self.shard.recut(group, self.reducer.buckets, self.face.param_groups, held)
        self._make_ballot()
        self.consolidated = None
