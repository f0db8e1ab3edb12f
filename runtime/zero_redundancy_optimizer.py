"""`ZeroRedundancyOptimizer`: every rank keeps and steps one shard of the optimizer's state.

A step has the phases below; the numbers stand again where they happen.

    (1) Reduce-scatter of each bucket, out of place, launched during backward.
    (3) Ballot: one small all-reduce in float64. Each rank votes when its own reduction is
        complete; who sees the result knows that all ranks finished (1).
    (4) Apply the shard's gradient to the shard.
    (5) All-gather the parameters, and take over the buffers.

(2), sending each reduced shard to the rank that keeps its replica, comes with replicas.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from collectives import Group
from collectives.buckets import BucketPlan, plan_buckets
from collectives.shards import whole_parameter_spans

from .agreement import Agreement
from .ballot import Ballot, Outcome, Vote, numbers_of, set_numbers
from .boundary import boundary
from .context import current_group
from .distributed_data_parallel import DistributedDataParallel, owner_of
from .join import Join, Joinable, JoinHook
from .kept import kept
from .optimizer_state import PieceState, gather_state, slice_state
from .parameter_shard import ParameterShard
from .reducer import Reducer

_ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.ASGD,
    torch.optim.Rprop,
)
"""Optimizers whose update of an element depends on that element alone, so any cut is exact.
Subclasses are taken to keep that; all others get whole parameters."""

_REFUSED = {
    torch.optim.LBFGS: (
        "its line search evaluates the closure with all parameters at once, and its directions "
        "are inner products over all of them"
    ),
    torch.optim.SparseAdam: "only dense gradients are reduced; use Adam and dense embeddings",
}

_BUCKET_BYTES = 25 << 20


class ZeroRedundancyOptimizer(torch.optim.Optimizer, Joinable):
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

    Parameters in float16 and bfloat16 are stepped as float32 copies of the rank's shard.

    Per step and rank it sends 2·P·(N-1)/N elements (P parameters, N ranks), and the ballot: two
    float64 per rank, one per parameter tensor, and one per numeric option of a group.

    Raises torch's errors for what is no list of parameters; ValueError for LBFGS and SparseAdam,
    with the reason.
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
        **defaults: Any,
    ) -> None:
        if max_norm is not None and not max_norm > 0:
            raise ValueError(f"max_norm must be positive, got {max_norm}")
        for refused, reason in _REFUSED.items():
            if issubclass(optimizer_class, refused):
                raise ValueError(f"{optimizer_class.__name__} cannot be sharded: {reason}")
        is_elementwise = issubclass(optimizer_class, _ELEMENTWISE)
        if isinstance(params, DistributedDataParallel):
            params = [p for p in params.parameters() if p.requires_grad]
        super().__init__(params, {})
        self._complete_options(optimizer_class, defaults)
        given = [p for options in self.param_groups for p in options["params"]]
        self._model = owner_of(given)
        if self._model and group is not None and group is not self._model.group:
            raise ValueError("group must be that of the model whose gradients are reduced")
        self.group = group or (self._model.group if self._model else current_group())
        self.num_steps = 0
        """Steps that were applied, equal on all ranks."""
        self.max_norm = max_norm
        self.grad_norm: float | None = None
        """2-norm of the mean gradient of the last step, before clipping; None without max_norm."""

        self.uses_scaler = False
        """Whether losses are scaled; set by chorusline.GradScaler, on all ranks."""
        self.found_overflow = False
        """Whether the last step was left out because a scaled gradient was not finite."""
        self._loss_scale: float | None = None

        self.reducer: Reducer | None = None
        """Of the model whose gradients travel once; None where `.grad` is taken as it is."""
        self._parameters: list[torch.nn.Parameter] = given
        reduced: list[torch.Tensor] = []
        if self._model and is_elementwise:
            self.reducer = self._model.reducer
            self.reducer.reduce_by_shards()
            self._parameters = self.reducer.parameters
            plans = [bucket.plan for bucket in self.reducer.buckets]
            reduced = [bucket.shard for bucket in self.reducer.buckets]
        else:
            plans = self._plan(is_elementwise)
        self._shard = ParameterShard(
            plans, self._parameters, self.group, reduced, elementwise=is_elementwise
        )
        self._shard.make_optimizer(optimizer_class, self.param_groups, defaults)
        self._consolidated: dict[str, Any] | None = None
        self._ballot = Ballot(self.group, len(self._parameters), len(self._option_numbers()))
        if self._model:
            self._model.reducer.ends_steps = False
        kept().wrap(self)

    def _plan(self, is_elementwise: bool) -> list[BucketPlan]:
        """Buckets for parameters that no reducer has laid out, one per dtype and device."""
        parameters = self._parameters
        if is_elementwise:
            return plan_buckets(
                [p.numel() for p in parameters],
                [(p.dtype, p.device) for p in parameters],
                [p.element_size() for p in parameters],
                bucket_bytes=_BUCKET_BYTES,
                first_bucket_bytes=_BUCKET_BYTES,
            )
        by_kind: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for number, parameter in enumerate(parameters):
            by_kind.setdefault((parameter.dtype, parameter.device), []).append(number)
        plans = []
        for numbers in by_kind.values():
            numels = [parameters[number].numel() for number in numbers]
            spans, content = whole_parameter_spans(numels, self.group.size)
            plans.append(BucketPlan(tuple((numbers[i], at, n) for i, at, n in spans), content))
        return plans

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only torch's own constructor may: shards are cut once. Raises ValueError afterwards."""
        if hasattr(self, "_shard"):
            raise ValueError(
                "parameters cannot be added to a ZeroRedundancyOptimizer whose shards are cut. "
                "Make a new one of all parameters: consolidate_state_dict, add the new group to "
                "the state's param_groups, and load it there"
            )
        super().add_param_group(param_group)

    def _complete_options(
        self, optimizer_class: type[torch.optim.Optimizer], defaults: dict[str, Any]
    ) -> None:
        """Give the groups the optimizer's own defaults, so that schedulers find what they look
        for. An optimizer over empty tensors knows them, and makes no state."""
        probe = optimizer_class(
            [
                {
                    **options,
                    "params": [
                        torch.nn.Parameter(p.new_empty((0,) * max(1, p.dim())))
                        for p in options["params"]
                    ],
                }
                for options in self.param_groups
            ],
            **defaults,
        )
        self.defaults = probe.defaults
        for options, complete in zip(self.param_groups, probe.param_groups, strict=True):
            for name, value in complete.items():
                options.setdefault(name, value)

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
        self._loss_scale = self._given_scale()
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
        if self.reducer is not None:
            self.reducer.wait()  # (1)
        outcome = self._hold_ballot(is_live)  # (3)
        boundary().step_agreed(outcome.agreement, self.group, ends_step=True)
        divisor = self._divisor(outcome.agreement)
        if outcome.agreement.live and not self.found_overflow:
            self._shard.apply(  # (4)
                self.param_groups,
                outcome.agreement.used,
                divisor,
                self._coefficient(outcome, divisor),
            )
            self._shard.gather()  # (5)
            if self._model is not None and self.reducer is not None:
                self._model.sync_buffers(outcome.agreement.live)
            self.num_steps += 1
        if self.reducer is not None:
            self.reducer.end_step()
        kept().end_applying()

    def move_to(self, group: Group) -> None:
        """Go on in a group of the same ranks, at the beginning of a step; the shards stay."""
        self.group = self._shard.group = group
        self._ballot.move_to(group)

    def _hold_ballot(self, is_live: bool) -> Outcome:
        """Vote, and take over what the others' votes mean for this rank."""
        join = self._join
        speaker = join.ledger.speaker if join else None
        needs_norm = self.max_norm is not None or self.uses_scaler
        outcome = self._ballot.hold(
            Vote(
                step=self.num_steps,
                live=is_live,
                has_next=join.ledger.has_next if join else True,
                used=[parameter.grad is not None for parameter in self._parameters],
                weight=self.reducer.weight if self.reducer else None,
                squared_norm=self._shard.squared_norm() if needs_norm else 0.0,
                loss_scale=(self._loss_scale or 0.0) if is_live else 0.0,
                options=self._option_numbers() if self.group.rank == speaker else None,
                stop=boundary().steps.stop_is_wanted,
            )
        )
        live = outcome.agreement.live
        if join:
            join.record(self, outcome.agreement)
        if 0 < len(live) < self.group.size:
            self._follow_options(speaker, outcome)
        if self.uses_scaler and is_live:
            self._check_scale(outcome.loss_scale)
        self.found_overflow = self.uses_scaler and not math.isfinite(outcome.squared_norm)
        return outcome

    def _divisor(self, agreement: Agreement) -> float:
        """What the summed gradient is divided by to be the mean."""
        if self.reducer is None:
            return 1.0  # Whoever made the gradients equal has divided them.
        if self._join:
            return self._join.ledger.divisor(agreement)
        return agreement.weight or self.group.size

    def _coefficient(self, outcome: Outcome, divisor: float) -> float:
        """What the mean gradient is multiplied with: it is unscaled, then clipped."""
        scale = outcome.loss_scale if self.uses_scaler else 1.0
        if self.max_norm is None:
            return 1.0 / scale
        self.grad_norm = math.sqrt(outcome.squared_norm) / (divisor * scale)
        # As torch: never enlarge, and no division by zero.
        return min(1.0, self.max_norm / (self.grad_norm + 1e-6)) / scale

    def _follow_options(self, speaker: int | None, outcome: Outcome) -> None:
        """A rank that has joined runs no schedule of the loop's body: it steps its shard with the
        options (learning rate and so on) of a rank that does, which the ballot has brought.

        Where nobody could look ahead the speaker itself may have run out of data in this very
        step; then, and only then, a broadcast brings them.
        """
        live, numbers = outcome.agreement.live, outcome.options
        if speaker not in live:
            ours = torch.tensor(self._option_numbers(), dtype=torch.float64)
            ours = ours.to(self.group.device)
            self.group.broadcast(ours, max(live)).wait()
            numbers = ours.tolist()
        if self.group.rank not in live:
            set_numbers(self.param_groups, sorted(self.defaults), numbers)

    def _option_numbers(self) -> list[float]:
        """The optimizer's own options; a schedule's notes in the groups are none."""
        return numbers_of(self.param_groups, sorted(self.defaults))

    def _given_scale(self) -> float | None:
        """What a GradScaler has left for this step (torch sets these attributes, and takes them
        off again), None without one."""
        if not hasattr(self, "found_inf"):
            return None
        scale: torch.Tensor | None = getattr(self, "grad_scale", None)
        if not self.uses_scaler or scale is None:
            raise RuntimeError(
                "a GradScaler decides and unscales by local gradients, which are not what this "
                "optimizer steps with. Use chorusline.GradScaler(optimizer), leave unscale_ out, "
                "and clip with max_norm"
            )
        return scale.item()

    def _check_scale(self, scale: float) -> None:
        mine = self._loss_scale
        if mine is None or not math.isclose(mine, scale, rel_tol=1e-9):
            raise RuntimeError(
                f"the loss scales of the ranks differ: {mine} here, {scale:g} on average; every "
                "rank must call scaler.step(optimizer) and scaler.update() in each step, and a "
                "Join of this optimizer lists the scaler: Join([model, optimizer, scaler])"
            )

    # -- state ---------------------------------------------------------------------------------

    @property
    def shard_optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer of this rank's pieces; None where a rank owns none. Its state is about
        1/N of the whole."""
        return self._shard.optimizer

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Gather the whole state on rank `to`, on the CPU, for `state_dict()` there.

        Every rank calls it. The others hold a chunk of 4 MiB per rank at most.
        """
        if not 0 <= to < self.group.size:
            raise ValueError(f"to must be a rank in [0, {self.group.size}), got {to}")
        optimizer = self._shard.optimizer
        gathered = gather_state(
            [
                PieceState(
                    mine.piece,
                    mine.bucket,
                    mine.tensor.shape,
                    optimizer.state.get(mine.tensor, {}),
                )
                for mine in self._shard.pieces
                if optimizer is not None
            ],
            [bucket.plan.spans for bucket in self._shard.buckets],
            [bucket.plan.content for bucket in self._shard.buckets],
            [parameter.shape for parameter in self._parameters],
            self.group,
            to,
        )
        self._consolidated = None
        if self.group.rank == to:
            number_of = {id(parameter): n for n, parameter in enumerate(self._parameters)}
            state, groups, index = {}, [], 0
            for options in self.param_groups:
                numbers = []
                for parameter in options["params"]:
                    of_parameter = gathered.get(number_of[id(parameter)])
                    if of_parameter:
                        state[index] = of_parameter
                    numbers.append(index)
                    index += 1
                groups.append({**options, "params": numbers})
            self._consolidated = {"state": state, "param_groups": groups}

    def state_dict(self) -> dict[str, Any]:
        """The last consolidated state, in the format of the plain optimizer.

        Raises RuntimeError on a rank to which nothing was consolidated.
        """
        if self._consolidated is None:
            raise RuntimeError(
                "Optimizer state has not been consolidated on this rank. Please call "
                f"`consolidate_state_dict(to={self.group.rank})` on all ranks beforehand if you "
                "meant to save the global state."
            )
        return self._consolidated

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take this rank's part of a whole state: of ours, or of a plain torch optimizer.

        state_dict: the same on all ranks, by parameter number; it is not changed, and nothing of
        it is kept. Saved with any number of ranks.

        Raises ValueError where groups, parameters or shapes differ, naming the parameter.
        """
        saved = state_dict["param_groups"]
        if len(saved) != len(self.param_groups):
            raise ValueError("loaded state dict has a different number of parameter groups")
        if [len(g["params"]) for g in saved] != [len(g["params"]) for g in self.param_groups]:
            raise ValueError(
                "loaded state dict contains a parameter group that doesn't match the size of "
                "optimizer's group"
            )
        saved_number = {
            id(parameter): number
            for ours, theirs in zip(self.param_groups, saved, strict=True)
            for parameter, number in zip(ours["params"], theirs["params"], strict=True)
        }
        for ours, theirs in zip(self.param_groups, saved, strict=True):
            ours.update({k: copy.deepcopy(v) for k, v in theirs.items() if k != "params"})
        optimizer = self._shard.optimizer
        if optimizer is None:
            return
        index_of = {
            id(tensor): index
            for index, tensor in enumerate(p for g in optimizer.param_groups for p in g["params"])
        }
        sliced = {}
        for mine in self._shard.pieces:
            parameter = self._parameters[mine.piece.parameter]
            whole = state_dict["state"].get(saved_number[id(parameter)])
            if whole:
                sliced[index_of[id(mine.tensor)]] = slice_state(
                    whole,
                    mine.piece,
                    mine.tensor.shape,
                    parameter.shape,
                    str(saved_number[id(parameter)]),
                )
        groups = optimizer.state_dict()["param_groups"]
        for group, ours in zip(groups, self.param_groups, strict=True):
            group.update({k: v for k, v in ours.items() if k != "params"})
        optimizer.load_state_dict({"state": sliced, "param_groups": groups})

    # -- Join ----------------------------------------------------------------------------------

    def join_hook(self, **kwargs: Any) -> JoinHook:
        return _Hook(self)

    @property
    def join_device(self) -> torch.device:
        return self.group.device

    @property
    def join_group(self) -> Group:
        return self.group

    def _carries_agreement(self) -> bool:
        return True

    def _ends_step(self) -> bool:
        return True

    def _check_joined_with(self, joinables: Sequence[Joinable]) -> None:
        if self._model is not None and self._model not in joinables:
            raise ValueError(
                "this ZeroRedundancyOptimizer finishes the steps of its model, so the model has to "
                "be joined with it: Join([model, optimizer])"
            )


class _Hook(JoinHook):
    """A joined rank keeps its shard: it takes every step, with neutral gradients of its own."""

    def __init__(self, optimizer: ZeroRedundancyOptimizer) -> None:
        self._optimizer = optimizer

    @torch.no_grad()
    def main_hook(self) -> None:
        optimizer = self._optimizer
        if optimizer.reducer is None:
            assert optimizer._join is not None
            optimizer._take_step(optimizer._join.ledger.live)
            return
        optimizer.reducer.shadow()
        optimizer._take_step(optimizer.reducer.is_live)
