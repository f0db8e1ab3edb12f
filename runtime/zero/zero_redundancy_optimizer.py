"""`ZeroRedundancyOptimizer`: every rank keeps and steps one shard of the optimizer's state.

A step has the phases below; the numbers stand again where they happen.

    (1) Reduce-scatter of each bucket, out of place, launched during backward.
    (2) Each reduced shard goes to the ranks that keep its replicas, if there are any.
    (3) Ballot: one small all-reduce in float64. Each rank votes when its own reduction is
        complete; who sees the result knows that all ranks finished (1) and (2).
    (4) Apply the shard's gradient to the shard, and the replicas' to the replicas.
    (5) All-gather the parameters, and take over the buffers.

(4) and (5) go bucket by bucket; with `overlap_with_ddp` those of most buckets come during backward
(early_update.py).

Where the run goes on after a death (recovery.py), a failure in any of them parks the step: if some
rank has seen the ballot the step counts, and what it lacks is done in the next generation;
otherwise it begins again at (1), from the buckets that every rank has kept.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from actors.errors import ends_a_generation
from actors.messages import Progress
from collectives import CollectiveError, CollectiveMismatch, Group

from ..data_parallel.distributed_data_parallel import DistributedDataParallel
from ..data_parallel.engine import ModelEngine, names_of, owner_of
from ..data_parallel.gradient_bucket import GradientBucket
from ..data_parallel.reducer import Reducer
from ..data_parallel.same_model import check_same_parameters
from ..join.join import GroupJoinable, Join, Joinable, JoinHook
from ..process.agreement import Agreement
from ..process.between_runs import between_runs
from ..process.running import current_group, recovery_of
from ..process.step_boundary import boundary
from .ballot import Ballot, Outcome, Vote, numbers_of, set_numbers
from .early_update import EarlyUpdate
from .loss_scale import check_scale, given_scale
from .parameter_bucket import Gather
from .parameter_shard import ParameterShard
from .shard_state import Inventory, ShardState
from .shardable_optimizers import (
    ELEMENTWISE,
    check_shardable,
    complete_options,
    describe_parameters,
)
from .state_dict_format import match_state, parameter_name, plain_state, with_names


class ZeroRedundancyOptimizer(torch.optim.Optimizer, GroupJoinable):
    """A torch optimizer whose state is sharded over the ranks of a group.

    params: a DistributedDataParallel of ours, or what a torch optimizer takes (tensors, or
    dictionaries of parameter groups). With all parameters of one DistributedDataParallel, its
    gradients travel once: each rank receives the sum for its own shard, and `.grad` keeps the
    rank's local gradient. With other parameters `.grad` is taken as it is and must be equal on
    all ranks.
    optimizer_class: of torch.optim, or like it. defaults: its arguments. State of elementwise
    optimizers (SGD, Adam, AdamW, …) is cut anywhere; others (Muon, Adafactor, your own) get whole
    parameters, dealt out by size, and the model's gradients are all-reduced for them.
    group: of the model, or the session's. max_norm: clip the 2-norm of the whole mean gradient to
    this, as torch.nn.utils.clip_grad_norm_ does (which, on local gradients, would be wrong here);
    the norm goes with the ballot, and `grad_norm` holds it after the step.
    replicas: ranks that keep each shard of the state, its owner among them. With 2 or more, and a
    session that may lose workers (max_failures), the loss of a worker costs no state and no step;
    while it has fewer workers than that, each shard is kept by all of them. Each replica costs P/N
    elements sent per step, and the state and the arithmetic of a shard.

    overlap_with_ddp: the backward pass steps each bucket's shard as soon as the bucket is reduced,
    from the first step on; `step()`, which follows it as ever, finishes. So options are to be
    changed before the backward pass, and there is no max_norm and no GradScaler.
    parameters_as_bucket_view: accepted from scripts written for torch, and without effect:
    parameters always are views of their buckets.

    Parameters in float16 and bfloat16 are stepped as float32 copies of the rank's shard.

    Per step and rank it sends 2·P·(N-1)/N elements (P parameters, N ranks), and the ballot: per
    rank three float64 and one per numeric option of a group, and one per parameter tensor.

    Raises torch's errors for what is no list of parameters; ValueError for LBFGS and SparseAdam,
    with the reason; CollectiveMismatch, on all ranks, if parameters or options differ.
    Source: Rajbhandari et al., ZeRO, arXiv:1910.02054, section 5.
    """

    _step_supports_amp_scaling = True  # A GradScaler hands us its scale instead of deciding.

    def __init__(
        self,
        params: DistributedDataParallel | Iterable[Any],
        optimizer_class: type[torch.optim.Optimizer],
        *,
        group: Group | None = None,
        max_norm: float | None = None,
        replicas: int = 1,
        overlap_with_ddp: bool = False,
        parameters_as_bucket_view: bool = True,
        **defaults: Any,
    ) -> None:
        if max_norm is not None and not max_norm > 0:
            raise ValueError(f"max_norm must be positive, got {max_norm}")
        if type(replicas) is not int or replicas < 1:
            raise ValueError(f"replicas must be a number of at least 1, got {replicas!r}")
        check_shardable(optimizer_class)
        is_elementwise = issubclass(optimizer_class, ELEMENTWISE)
        if isinstance(params, DistributedDataParallel):
            params = [p for p in params.parameters() if p.requires_grad]
        super().__init__(params, {})
        self.defaults = complete_options(optimizer_class, self.param_groups, defaults)
        given = [p for options in self.param_groups for p in options["params"]]
        self._model = owner_of(given)
        if self._model and group is not None and group is not self._model.group:
            raise ValueError("group must be that of the model whose gradients are reduced")
        self.group = group or (self._model.group if self._model else current_group())
        # Where a run gains and loses workers, there are as many copies as ranks until more come.
        if replicas > self.group.size and recovery_of(self.group) is None:
            raise ValueError(
                f"replicas={replicas} is more than the {self.group.size} ranks that could keep them"
            )
        if replicas > 1 and not (self._model and is_elementwise):
            raise ValueError(
                "replicas need the gradients of a DistributedDataParallel model, and an optimizer "
                f"that steps each element by itself, which {optimizer_class.__name__} "
                f"{'is' if is_elementwise else 'is not'}: only then does a shard arrive reduced, "
                "and can be cut anew for other ranks"
            )
        self.num_steps = 0
        """Steps that were applied, equal on all ranks."""
        self.max_norm = max_norm
        self.grad_norm: float | None = None
        """2-norm of the mean gradient of the last step, before clipping; None without max_norm."""

        self.overlap_with_ddp = overlap_with_ddp
        self.uses_scaler = False
        """Whether losses are scaled; set by chorusline.GradScaler, on all ranks."""
        self.found_overflow = False
        """Whether the last step was left out because a scaled gradient was not finite."""
        self._loss_scale: float | None = None

        self.reducer: Reducer | None = None
        """Of the model whose gradients travel once; None where `.grad` is taken as it is."""
        self._consolidated: dict[str, Any] | None = None
        told = describe_parameters(self.param_groups, 0, self.defaults)
        check_same_parameters("ZeroRedundancyOptimizer", told, self.group)
        self._shard = ParameterShard(
            optimizer_class,
            defaults,
            self.group,
            elementwise=is_elementwise,
            replicas=replicas,
        )
        self._waiting: list[torch.nn.Parameter] = []
        """In the groups, but frozen since they came: no shard has them."""
        if self._model and is_elementwise:
            self.reducer = self._model.reducer
            self.reducer.reduce_by_shards()
            self._own(self.reducer.parameters, self.reducer.buckets)
        laid_out = {id(p) for p in self._shard.parameters}
        self._waiting += [p for p in dict.fromkeys(given) if id(p) not in laid_out]
        self._take_up_trainable()
        self._early: EarlyUpdate | None = None
        if overlap_with_ddp:
            self._early = self._overlap(replicas)
        self._seen = Progress(0)
        """The last ballot that this rank has seen, and what it said."""
        self.last_live: tuple[int, ...] = ()
        """The ranks that took the last step."""
        self._ballot_of_step = 0
        """The ballot of the step that is being taken, or was taken last."""
        self._recovery = recovery_of(self.group) if self.reducer is not None else None
        if self._recovery is not None:
            assert self.reducer is not None
            self.reducer.parks = True
            self._recovery.watch_optimizer(self)
        if self._model:
            self._model.leave_steps_to_optimizer()
        between_runs().wrap(self)

    def _overlap(self, replicas: int) -> EarlyUpdate:
        if self.max_norm is not None:
            raise ValueError(
                "overlap_with_ddp steps parameters before the norm of the whole gradient is known; "
                "leave out max_norm, or overlap_with_ddp"
            )
        if self.reducer is None or self._shard.optimizer_class not in ELEMENTWISE:
            raise ValueError(
                "overlap_with_ddp steps the parameters of one of our DistributedDataParallel, all "
                "that it reduces, with one of torch's elementwise optimizers (SGD, Adam, AdamW, …)"
            )
        if replicas > 1:
            raise ValueError(
                "overlap_with_ddp steps a shard before its gradient has gone to the ranks that "
                "keep its replicas; leave out replicas, or overlap_with_ddp"
            )
        if recovery_of(self.group) is not None:
            raise ValueError(
                "overlap_with_ddp steps parameters before all ranks have agreed on the step, which "
                "cannot be undone when one of them dies; leave it out, or let the session end with "
                "the first loss (max_failures=0)"
            )
        return EarlyUpdate(self.reducer, self._shard, self.param_groups, self._divisor)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; every rank calls it, with the same group, between two steps.

        Shards of the other groups stay as they are; the new group's are cut and dealt out on their
        own. With a model, parameters have to be the module's; those that were frozen when it was
        wrapped, or registered since, are reduced from now on and start from rank 0's values.

        Raises torch's errors, ValueError for parameters that are not the model's, and
        CollectiveMismatch, on all ranks, if the groups differ; nothing is added then.
        """
        super().add_param_group(param_group)
        if not hasattr(self, "_shard"):
            return  # torch's constructor hands over its groups one by one.
        group = self.param_groups[-1]
        fresh = list(dict.fromkeys(group["params"]))
        try:
            complete_options(self._shard.optimizer_class, [group], self._shard.defaults)
            if self._model is not None:
                self._model.check_has(fresh)
            told = describe_parameters([group], len(self.param_groups) - 1, self.defaults)
            check_same_parameters("add_param_group()", told, self.group)
        except BaseException as error:
            self.param_groups.pop()
            if isinstance(error, CollectiveMismatch):
                error.add_note(
                    "Every rank calls add_param_group(), with the same group and between the same "
                    "two steps."
                )
            raise
        self._waiting += fresh
        self._take_up_trainable()

    def _take_up_trainable(self) -> None:
        """Cut shards of parameters in the groups that are not frozen (any more); alike on all
        ranks. Who is frozen later keeps shard and state: without a gradient it is not stepped."""
        fresh = [
            p
            for p in self._waiting
            # Like a plain optimizer, take what has a gradient, wherever it is from.
            if p.requires_grad or (self._model is None and p.grad is not None)
        ]
        if not fresh and self._shard.num_groups == len(self.param_groups):
            return
        taken = {id(p) for p in fresh}
        self._waiting = [p for p in self._waiting if id(p) not in taken]
        buckets = self._model.reduce_also(fresh) if self._model is not None else []
        self._own(fresh, buckets if self.reducer is not None else None)

    def _own(
        self, parameters: Sequence[torch.nn.Parameter], buckets: Sequence[GradientBucket] | None
    ) -> None:
        """Lay out shards of `parameters`. buckets: of the reducer, if it has them."""
        self._shard.add(parameters, self.param_groups, buckets)
        num_options = len(self._option_numbers())
        self._ballot = Ballot(self.group, len(self._shard.parameters), num_options)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step on all ranks; every rank must call it (inside Join, joined ranks do).

        After it all ranks hold the same parameters, bit by bit.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        Join.notify_join_context(self)
        self._loss_scale = given_scale(self, self.uses_scaler)
        is_live = self._join.ledger.live if self._join else True
        if self.reducer is not None:
            if not self.reducer.has_launched:
                raise RuntimeError(
                    "step() needs gradients that were reduced since the last step: run "
                    "loss.backward() on the DistributedDataParallel model, outside no_sync(), first"
                )
            is_live = self.reducer.is_live
        self._take_step(is_live)
        return loss

    def _take_step(self, is_live: bool) -> None:
        if self._waiting:
            self._take_up_trainable()
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
        for work in self._shard.start_replicating():  # (2)
            work.wait()
        outcome = self._see(self._ballot.hold(self._vote(is_live)), is_live)  # (3)
        if self.reducer is None:
            self._check_gradients(outcome.agreement)
        for gather in self._apply(outcome):  # (4), and (5) begins
            gather.wait()
        if self._model is not None and self.reducer is not None:
            self._model.sync_buffers(outcome.agreement.live, self._join)

    def _vote(self, is_live: bool) -> Vote:
        join = self._join
        needs_norm = self.max_norm is not None or self.uses_scaler
        return Vote(
            step=self.num_steps,
            live=is_live,
            has_next=join.ledger.has_next if join else True,
            used=[parameter.grad is not None for parameter in self._shard.parameters],
            weight=self.reducer.weight if self.reducer else None,
            squared_norm=self._shard.squared_norm() if needs_norm else 0.0,
            loss_scale=(self._loss_scale or 0.0) if is_live else 0.0,
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
        if self._join:
            self._join.record(self, outcome.agreement)
        boundary().step_agreed(outcome.agreement, self.group, ends_step=True)
        if self.group.rank not in live and live:
            # A rank that has joined runs no schedule of the loop's body: it steps its shard with
            # the options (learning rate and so on) of a rank that does.
            set_numbers(self.param_groups, sorted(self.defaults), outcome.options[max(live)])
        if self.uses_scaler and is_live:
            check_scale(self._loss_scale, outcome.loss_scale)
        self.found_overflow = self.uses_scaler and not math.isfinite(outcome.squared_norm)
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
        divisor = self._divisor(agreement)
        if self.max_norm is not None:
            scale = outcome.loss_scale if self.uses_scaler else 1.0
            self.grad_norm = math.sqrt(outcome.squared_norm) / (divisor * scale)
        if self.found_overflow:
            return []
        coefficient = self._coefficient(outcome)
        failure: CollectiveError | None = None
        for portion in self._shard.portions[len(gathers) :]:
            self._shard.apply(portion, self.param_groups, agreement.used, divisor, coefficient)
            try:
                if failure is None:
                    gathers += self._shard.start_gather(portion)
            except CollectiveError as error:
                failure = error
        self.num_steps += 1
        if failure is not None:
            raise failure
        return gathers

    def _check_gradients(self, agreement: Agreement) -> None:
        """Gradients that are taken as they are have to be there; on a joined rank, too."""
        for parameter, is_used in zip(self._shard.parameters, agreement.used, strict=True):
            if is_used and parameter.grad is None:
                error = RuntimeError(
                    f"a parameter of shape {tuple(parameter.shape)} has a gradient on other ranks "
                    f"of {list(agreement.live)} and none on rank {self.group.rank}. Without our "
                    "DistributedDataParallel, whoever makes the gradients equal does so on all "
                    "ranks; inside Join, it is listed before this optimizer"
                )
                self.group.abort(error)  # The others wait for our part of the parameters.
                raise error

    def _divisor(self, agreement: Agreement) -> float:
        """What the summed gradient is divided by to be the mean."""
        if self.reducer is None:
            return 1.0  # Whoever made the gradients equal has divided them.
        if self._join:
            return self._join.ledger.divisor(agreement)
        return agreement.weight or self.group.size

    def _coefficient(self, outcome: Outcome) -> float:
        """What the mean gradient is multiplied with: it is unscaled, then clipped."""
        scale = outcome.loss_scale if self.uses_scaler else 1.0
        if self.max_norm is None or self.grad_norm is None:
            return 1.0 / scale
        # As torch: never enlarge, no division by zero, and a norm that is no number spoils all.
        clipped = self.max_norm / (self.grad_norm + 1e-6)
        return (1.0 if clipped > 1 else clipped) / scale

    def _option_numbers(self) -> list[float]:
        """The optimizer's own options; a schedule's notes in the groups are none."""
        return numbers_of(self.param_groups, sorted(self.defaults))

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

    @property
    def shard(self) -> ParameterShard:
        return self._shard

    @property
    def model(self) -> ModelEngine | None:
        """Whose gradients travel once; None where there is none."""
        return self._model

    def move_to(self, group: Group) -> None:
        """Go on in a group of the same ranks, at the beginning of a step; the shards stay."""
        self.group = self._shard.group = group
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
        for ours, theirs in zip(self.param_groups, options, strict=True):
            ours.update(theirs)
        self.num_steps, self._seen = num_steps, progress
        self._ballot_of_step = progress.ballots
        if self._model is not None:
            self._model.buffers.synced_step = progress.ballots
        sent_bytes = self._shard.complete(held, inventories, self.group)
        self._shard.recut(self.group, self.reducer.buckets, self.param_groups, held)
        self._shard.gather()
        return sent_bytes

    @torch.no_grad()
    def change_group(self, group: Group, held: ShardState) -> None:
        """Go on as a rank of another group. held: the state of what this rank shall keep there."""
        assert self.reducer is not None
        self.group = group
        self.reducer.change_group(group)
        self._shard.recut(group, self.reducer.buckets, self.param_groups, held)
        num_options = len(self._option_numbers())
        self._ballot = Ballot(group, len(self._shard.parameters), num_options)
        self._consolidated = None

    # -- state ---------------------------------------------------------------------------------

    @property
    def shard_optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer of this rank's pieces; None where a rank owns none. Its state is about
        1/N of the whole."""
        return self._shard.optimizer

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Gather the whole state on rank `to`, on the CPU, for `state_dict()` there.

        Every rank calls it. Besides the result, ranks need 4 MiB more than they have.
        """
        if not 0 <= to < self.group.size:
            raise ValueError(f"to must be a rank in [0, {self.group.size}), got {to}")
        gathered = self._shard.gather_state(to)
        self._consolidated = None
        if self.group.rank == to:
            self._consolidated = plain_state(gathered, self.param_groups)

    def state_dict(self, *, by_name: bool = False) -> dict[str, Any]:
        """The last consolidated state, in the format of the plain optimizer.

        by_name: in that of torch.distributed.checkpoint's `get_optimizer_state_dict`, with names
        for numbers; the names are the module's, or those of `named_parameters()`.

        Raises RuntimeError on a rank to which nothing was consolidated.
        """
        if self._consolidated is None:
            raise RuntimeError(
                "Optimizer state has not been consolidated on this rank. Please call "
                f"`consolidate_state_dict(to={self.group.rank})` on all ranks beforehand if you "
                "meant to save the global state."
            )
        if not by_name:
            return self._consolidated
        names, given = self._names(), [p for g in self.param_groups for p in g["params"]]
        return with_names(self._consolidated, [parameter_name(p, names) for p in given])

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take this rank's part of a whole state: of ours, or of a plain torch optimizer.

        state_dict: the same on all ranks, by number or by name of the parameters; it is not
        changed, and nothing of it is kept. Saved with any number of ranks.

        Raises ValueError where groups, parameters or shapes differ, naming the parameter, on all
        ranks and before anything is taken over.
        """
        saved, options = match_state(state_dict, self.param_groups, self._names())
        self._shard.check_fits(saved)
        for ours, theirs in zip(self.param_groups, options, strict=True):
            ours.update(theirs)
        self._shard.load_state(saved, self.param_groups)

    def _names(self) -> dict[int, str]:
        """What is known of the parameters' names, by id()."""
        names = {
            id(parameter): name
            for options in self.param_groups
            for name, parameter in zip(
                options.get("param_names", ()), options["params"], strict=False
            )
        }
        return names or names_of([p for g in self.param_groups for p in g["params"]])

    # -- Join ----------------------------------------------------------------------------------

    def join_hook(self, **kwargs: Any) -> JoinHook:
        return _Hook(self)

    def _ends_step(self) -> bool:
        return True

    def _check_joined_with(self, joinables: Sequence[Joinable]) -> None:
        if self._model is None:
            return
        model = self._model.face
        if [j for j in joinables if j is self or j is model] != [model, self]:
            raise ValueError(
                "this ZeroRedundancyOptimizer finishes the steps of its model, so the model has to "
                "be joined with it, and before it: Join([model, optimizer])"
            )


class _Hook(JoinHook):
    """A joined rank keeps its shard: it takes every step, with neutral gradients of its own."""

    def __init__(self, optimizer: ZeroRedundancyOptimizer) -> None:
        self._optimizer = optimizer

    @torch.no_grad()
    def main_hook(self) -> None:
        optimizer = self._optimizer
        assert optimizer._join is not None
        # The model's hook, which ran before, has sent the gradients.
        optimizer._take_step(optimizer._join.ledger.live)
