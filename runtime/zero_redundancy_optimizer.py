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

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from collectives import CollectiveMismatch, Group
from collectives.buckets import BucketPlan, plan_buckets
from collectives.shards import Piece, padded_numel, pieces_of, shard_numel

from .agreement import Agreement, read_agreement, vote_numel, write_vote
from .context import current_group
from .distributed_data_parallel import DistributedDataParallel, owner_of
from .join import Join, Joinable, JoinHook
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
"""Optimizers whose update of an element depends on that element alone, so any cut is exact."""

_BUCKET_BYTES = 25 << 20


class ParameterBucket:
    """Parameters that travel together, as views of one flat tensor.

    flat: (padded,) all parameters of the plan. own: (n,) this rank's part of it, the memory that
    the optimizer steps. own_gradient: (n,) its gradient, or None where gradients stay with the
    parameters.
    """

    def __init__(
        self,
        plan: BucketPlan,
        parameters: Sequence[torch.nn.Parameter],
        group: Group,
        own_gradient: torch.Tensor | None,
    ) -> None:
        first = parameters[plan.spans[0][0]]
        length = shard_numel(plan.content, group.size)
        self.plan = plan
        self.flat = torch.zeros(
            padded_numel(plan.content, group.size), dtype=first.dtype, device=first.device
        )
        self.own = self.flat[group.rank * length : (group.rank + 1) * length]
        self.own_gradient = own_gradient
        self.pieces = pieces_of(group.rank, group.size, plan.content, list(plan.spans))
        for number, offset, numel in plan.spans:
            parameter = parameters[number]
            view = self.flat[offset : offset + numel].view(parameter.shape)
            view.copy_(parameter.detach())
            parameter.data = view


class ZeroRedundancyOptimizer(torch.optim.Optimizer, Joinable):
    """A torch optimizer whose state is sharded over the ranks of a group.

    params: a DistributedDataParallel of ours, or what a torch optimizer takes (tensors, or
    dictionaries of parameter groups). With all parameters of one DistributedDataParallel, its
    gradients travel once: each rank receives the sum for its own shard, and `.grad` keeps the
    rank's local gradient. With other parameters `.grad` is taken as it is and must be equal on
    all ranks.
    optimizer_class: an elementwise optimizer of torch.optim. defaults: its arguments.
    group: of the model, or the session's.

    Per step and rank it sends 2·P·(N-1)/N elements (P parameters, N ranks), and the ballot: two
    float64 per rank and one per parameter tensor.

    Raises torch's errors for what is no list of parameters; ValueError for an optimizer that
    needs whole parameters.
    Source: Rajbhandari et al., ZeRO, arXiv:1910.02054, section 5.
    """

    def __init__(
        self,
        params: DistributedDataParallel | Iterable[Any],
        optimizer_class: type[torch.optim.Optimizer],
        *,
        group: Group | None = None,
        **defaults: Any,
    ) -> None:
        if not issubclass(optimizer_class, _ELEMENTWISE):
            known = ", ".join(kind.__name__ for kind in _ELEMENTWISE)
            raise ValueError(
                f"{optimizer_class.__name__} is not known to update each element on its own, so "
                f"its state cannot be cut into flat shards; use one of {known}"
            )
        if isinstance(params, DistributedDataParallel):
            params = [p for p in params.parameters() if p.requires_grad]
        super().__init__(params, {})
        self._complete_options(optimizer_class, defaults)
        given = [p for options in self.param_groups for p in options["params"]]
        owner = owner_of(given)
        self.reducer: Reducer | None = owner.reducer if owner else None
        self._model = owner
        if owner and group is not None and group is not owner.group:
            raise ValueError("group must be that of the model whose gradients are reduced")
        self.group = group or (owner.group if owner else current_group())
        self.num_steps = 0
        """Steps that were applied, equal on all ranks."""

        self._parameters: list[torch.nn.Parameter] = owner.reducer.parameters if owner else given
        if owner:
            owner.reducer.reduce_by_shards()
            self._buckets = [
                ParameterBucket(bucket.plan, self._parameters, self.group, bucket.shard)
                for bucket in owner.reducer.buckets
            ]
        else:
            plans = plan_buckets(
                [p.numel() for p in self._parameters],
                [(p.dtype, p.device) for p in self._parameters],
                [p.element_size() for p in self._parameters],
                bucket_bytes=_BUCKET_BYTES,
                first_bucket_bytes=_BUCKET_BYTES,
            )
            self._buckets = [
                ParameterBucket(plan, self._parameters, self.group, None) for plan in plans
            ]
        self._own: list[tuple[torch.nn.Parameter, Piece, ParameterBucket]] = []
        self.shard_optimizer = self._make_shard_optimizer(optimizer_class, defaults)
        """The optimizer that steps this rank's pieces; None where this rank owns none."""

        numel = 1 + vote_numel(self.group.size, len(self._parameters))
        self._ballot = torch.zeros(numel, dtype=torch.float64, device=self.group.device)

    def _complete_options(
        self, optimizer_class: type[torch.optim.Optimizer], defaults: dict[str, Any]
    ) -> None:
        """Give the groups the optimizer's own defaults, so that schedulers find what they look
        for. An optimizer over empty tensors knows them, and makes no state."""
        probe = optimizer_class(
            [
                {
                    **options,
                    "params": [torch.nn.Parameter(p.new_empty(0)) for p in options["params"]],
                }
                for options in self.param_groups
            ],
            **defaults,
        )
        self.defaults = probe.defaults
        for options, complete in zip(self.param_groups, probe.param_groups, strict=True):
            for name, value in complete.items():
                options.setdefault(name, value)

    def _make_shard_optimizer(
        self, optimizer_class: type[torch.optim.Optimizer], defaults: dict[str, Any]
    ) -> torch.optim.Optimizer | None:
        pieces: dict[int, list[torch.nn.Parameter]] = {}
        for bucket in self._buckets:
            for piece in bucket.pieces:
                end = piece.shard_start + piece.numel
                own = torch.nn.Parameter(bucket.own[piece.shard_start : end])
                self._own.append((own, piece, bucket))
                pieces.setdefault(piece.parameter, []).append(own)
        number_of = {id(parameter): n for n, parameter in enumerate(self._parameters)}
        groups = []
        for options in self.param_groups:
            owned = [
                own
                for parameter in options["params"]
                for own in pieces.get(number_of[id(parameter)], ())
            ]
            groups.append({**options, "params": owned})
        return optimizer_class(groups, **defaults) if self._own else None

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
        agreement = self._hold_ballot(is_live)  # (3)
        divisor = self.group.size
        if self._join:
            self._join.record(agreement)
            divisor = self._join.ledger.divisor(agreement)
        if agreement.live:
            self._apply(divisor, agreement)  # (4)
            for work in [self.group.all_gather(b.flat, b.own) for b in self._buckets]:  # (5)
                work.wait()
            if self._model is not None:
                self._model.sync_buffers(agreement.live)
            self.num_steps += 1
        if self.reducer is not None:
            self.reducer.end_step()

    def _hold_ballot(self, is_live: bool) -> Agreement:
        """ballot: (1 + vote_numel,) float64: the step's number, and the vote."""
        used = [parameter.grad is not None for parameter in self._parameters]
        has_next = self._join.ledger.has_next if self._join else True
        ballot = self._ballot
        write_vote(ballot[1:], self.group.rank, self.group.size, is_live, has_next, used)
        ballot[0] = self.num_steps
        self.group.all_reduce(ballot).wait()
        if ballot[0].item() != self.num_steps * self.group.size:
            raise CollectiveMismatch(
                f"ballot of step {self.num_steps}",
                self.group.generation,
                [self.group.rank],
                "the ranks are at different steps; every rank must call step() equally often",
            )
        return read_agreement(ballot[1:], self.group.size)

    def _apply(self, divisor: int, agreement: Agreement) -> None:
        """Step the pieces whose parameters have a gradient on some rank."""
        if self.shard_optimizer is None:
            return
        for bucket in self._buckets:
            if bucket.own_gradient is not None and divisor > 1:
                bucket.own_gradient.div_(divisor)
        for own, piece, bucket in self._own:
            own.grad = self._gradient_of(piece, bucket) if agreement.used[piece.parameter] else None
        for options, ours in zip(self.param_groups, self.shard_optimizer.param_groups, strict=True):
            # Schedulers and users change the groups that they see.
            ours.update({name: value for name, value in options.items() if name != "params"})
        self.shard_optimizer.step()

    def _gradient_of(self, piece: Piece, bucket: ParameterBucket) -> torch.Tensor | None:
        if bucket.own_gradient is not None:
            return bucket.own_gradient[piece.shard_start : piece.shard_start + piece.numel]
        whole = self._parameters[piece.parameter].grad
        if whole is None:
            return None
        return whole.reshape(-1)[piece.parameter_start : piece.parameter_start + piece.numel]

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
            optimizer._take_step(is_live=False)
            return
        optimizer.reducer.shadow()
        optimizer._take_step(optimizer.reducer.is_live)
