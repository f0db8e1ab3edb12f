"""`ZeroRedundancyOptimizer`: every rank keeps and steps one shard of the optimizer's state.

engine.py describes the phases of a step; this file holds the public class.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from chorusline.collectives import CollectiveMismatch, Group
from chorusline.collectives.contract.argument_kinds import check_kinds, check_range
from chorusline.collectives.contract.plain_numbers import whole

from ..data_parallel.distributed_data_parallel import DistributedDataParallel
from ..data_parallel.engine import names_of, owner_of
from ..data_parallel.same_model import check_same_parameters
from ..join.join import Join, Joinable
from ..join.join_hook import JoinHook
from ..process.running import current_group, recovery_of
from .digest_checks import Correction
from .early_update import EarlyUpdate
from .engine import Face, OptimizerEngine
from .loss_scale import given_scale
from .shards.parameter_shard import ParameterShard
from .shards.shardable_optimizers import (
    ELEMENTWISE,
    check_arguments,
    check_dense,
    check_shardable,
    complete_options,
    describe_parameters,
    verdict_on,
)
from .shards.state_dict_format import match_state, parameter_name, plain_state, with_names
from .state_changes import ShardedState


class ZeroRedundancyOptimizer(Face):
    """A torch optimizer whose state is sharded over the ranks of a group.

        model = cl.DistributedDataParallel(net, group)
        optimizer = cl.ZeroRedundancyOptimizer(model, torch.optim.AdamW, lr=1e-3)
        model(torch.ones(2, 8)).mean().backward()
        optimizer.step()

    params: a chorusline DistributedDataParallel, or what a torch optimizer takes (tensors, or
        dictionaries of parameter groups). If these are all parameters of one
        DistributedDataParallel, gradients travel once: each rank receives the sum for its own
        shard, and `.grad` keeps the local gradient. Otherwise `.grad` must be the same on all
        ranks.
    optimizer_class: a torch.optim class, or one like it. The state of elementwise optimizers (SGD,
        Adam, AdamW, …) is cut anywhere. Others (Muon, Adafactor, …) get whole parameters,
        distributed by size, and the model's gradients are all-reduced for them. For a class outside
        of torch, a trial on small tensors decides. Its `train()` and `eval()` (schedule-free
        optimizers have them) are called on all ranks.
    group: default: the model's group, or else the session's.
    max_norm: the 2-norm to which the whole mean gradient is clipped. Use it instead of
        torch.nn.utils.clip_grad_norm_, which would see local gradients. `grad_norm` has the norm.
    replicas: number of ranks that keep each shard of the state, its owner included. With 2 or more,
        in a session that may lose workers (max_failures), losing a worker costs no state and no
        step; with fewer workers than replicas, all of them keep each shard. Each replica costs P/N
        elements sent per step, and the memory and arithmetic of a shard.
    overlap_with_ddp: the backward pass steps each bucket's shard as soon as the bucket is reduced;
        `step()` finishes the step. Change options before the backward pass. Excludes max_norm and
        GradScaler.
    check_every: every `check_every` steps, compare checksums of parameters, state and gradients
        across ranks to detect silent data corruption. A wrong value is restored from a rank that
        has the right one; `corrections` lists the repairs. Excludes overlap_with_ddp. Default: no
        check (docs/flipped-bits.md).
    parameters_as_bucket_view: no effect, accepted for scripts written for torch: parameters
        always lie in the memory of their buckets, each with a storage of its own.
    defaults: arguments of optimizer_class.

    Parameters in float16 and bfloat16 are stepped as float32 copies of the rank's shard.

    In each step a rank sends 2·P·(N-1)/N elements (P parameters, N ranks) and the ballot: for each
    rank a few float64 and one per numeric option of a group, and one float64 per parameter tensor.

    Raises ValueError, with the reason, for optimizers that cannot be sharded (LBFGS, SparseAdam,
    those with a statistic over all parameters), and for arguments that do not fit
    together; CollectiveMismatch, on all ranks, if parameters or options differ; and the errors of
    torch.optim.Optimizer for params.
    Source: Rajbhandari et al., ZeRO, arXiv:1910.02054, section 5.
    """

    _step_supports_amp_scaling = True  # A GradScaler passes its scale on and does not decide.

    def __init__(
        self,
        params: DistributedDataParallel | Iterable[Any],
        optimizer_class: type[torch.optim.Optimizer],
        *,
        group: Group | None = None,
        max_norm: float | None = None,
        replicas: int = 1,
        overlap_with_ddp: bool = False,
        check_every: int | None = None,
        parameters_as_bucket_view: bool = True,
        **defaults: Any,
    ) -> None:
        arguments = dict(locals())
        if isinstance(params, DistributedDataParallel):
            params = [p for p in params.parameters() if p.requires_grad]
        check_arguments(params, optimizer_class, group, defaults)
        check_kinds(ZeroRedundancyOptimizer.__init__, arguments)
        if max_norm is not None and not max_norm > 0:
            raise ValueError(f"max_norm must be positive, got {max_norm}")
        if (number := whole(replicas)) is None or number < 1:
            raise ValueError(f"replicas must be a whole number of at least 1, got {replicas!r}")
        replicas = number
        if check_every is not None:
            check_range("check_every", check_every, 1)
        if check_every is not None and overlap_with_ddp:
            raise ValueError(
                "check_every compares the state of the ranks before anything is applied, and "
                "overlap_with_ddp applies during backward; leave one of them out"
            )
        check_shardable(optimizer_class)
        super().__init__(params, {})
        check_dense(self.param_groups)
        self.defaults = complete_options(optimizer_class, self.param_groups, defaults)
        verdict = verdict_on(optimizer_class, self.param_groups, defaults)
        is_elementwise = verdict.elementwise
        given = [p for options in self.param_groups for p in options["params"]]
        model = owner_of(given)
        if model and group is not None and group is not model.group:
            raise ValueError(
                "group must be the model's own group, which reduces its gradients; leave it out"
            )
        group = group or (model.group if model else current_group())
        # A run that gains and loses workers may have fewer ranks than replicas for a while.
        if replicas > group.size and recovery_of(group) is None:
            raise ValueError(
                f"replicas={replicas} is more than the {group.size} ranks of the group; every "
                "replica needs a rank of its own"
            )
        if replicas > 1 and not (model and is_elementwise):
            kind = (
                "is elementwise; pass it the DistributedDataParallel"
                if is_elementwise
                else "is not elementwise; use replicas=1, or AdamW"
            )
            raise ValueError(
                f"replicas={replicas} needs a DistributedDataParallel model, whose gradients are "
                "reduced shard by shard, and an elementwise optimizer, whose shards can be cut for "
                f"other ranks. {optimizer_class.__name__} {kind}"
            )
        self.num_steps = 0
        """Number of applied steps, equal on all ranks."""
        self.max_norm = max_norm
        self.grad_norm: float | None = None
        """2-norm of the mean gradient of the last step, before clipping; None without max_norm."""

        self.overlap_with_ddp = overlap_with_ddp
        self.uses_scaler = False
        """Whether losses are scaled; set by chorusline.GradScaler, on all ranks."""
        self._scaler: weakref.ref[Any] | None = None
        """The chorusline.GradScaler that scales the losses."""
        self.found_overflow = False
        """Whether the last step was left out because a scaled gradient was not finite."""
        self.check_every = check_every
        self.corrections: list[Correction] = []
        """What had silently become wrong on some rank, and was made right, by check_every."""
        descriptions = describe_parameters(self.param_groups, 0, self.defaults, verdict)
        settings = {
            "replicas": replicas,
            "overlap_with_ddp": bool(overlap_with_ddp),
            "check_every (0: no check)": check_every or 0,
        }
        check_same_parameters("ZeroRedundancyOptimizer", descriptions, group, settings=settings)
        shard = ParameterShard(optimizer_class, defaults, group, verdict=verdict, replicas=replicas)
        self._engine = OptimizerEngine(self, shard, model)
        self._engine.begin(self._overlap(replicas) if overlap_with_ddp else None)

    @property
    def group(self) -> Group:  # type: ignore[override]
        """The group over which the state is sharded. It changes when the run's ranks change."""
        return self._engine.group

    def _overlap(self, replicas: int) -> EarlyUpdate:
        if self.max_norm is not None:
            raise ValueError(
                "overlap_with_ddp steps parameters before the norm of the whole gradient is known; "
                "leave out max_norm, or overlap_with_ddp"
            )
        reducer, shard = self._engine.reducer, self._engine.shard
        if reducer is None or shard.optimizer_class not in ELEMENTWISE:
            raise ValueError(
                "overlap_with_ddp needs all parameters that one chorusline DistributedDataParallel "
                "reduces, and one of torch's elementwise optimizers (SGD, Adam, AdamW, …)"
            )
        if replicas > 1:
            raise ValueError(
                "overlap_with_ddp steps a shard before its gradient has gone to the ranks that "
                "keep its replicas; leave out replicas, or overlap_with_ddp"
            )
        if recovery_of(self.group) is not None:
            raise ValueError(
                "overlap_with_ddp steps parameters before all ranks have agreed on the step, and "
                "such a step cannot be undone when a rank dies; leave overlap_with_ddp out, or "
                "let the session end when a worker is lost (max_failures=0)"
            )
        return EarlyUpdate(reducer, shard, self.param_groups, self._engine.divisor)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, as in torch.optim; collective, between two steps.

        Shards of the other groups stay unchanged; the new group is cut separately. With a model,
        the parameters must belong to the module. Parameters that were frozen when the module was
        wrapped, or were registered later, are reduced from now on and start from rank 0's values.

        Raises the errors of torch.optim.Optimizer; ValueError for parameters that are not in the
        model; CollectiveMismatch, on all ranks, if the groups differ. Then nothing is added.
        """
        super().add_param_group(param_group)
        if not hasattr(self, "_engine"):
            return  # The constructor of torch.optim.Optimizer adds the groups one by one.
        group = self.param_groups[-1]
        fresh = list(dict.fromkeys(group["params"]))
        try:
            shard, model = self._engine.shard, self._engine.model
            check_dense([group])
            complete_options(shard.optimizer_class, [group], shard.defaults)
            verdict = verdict_on(shard.optimizer_class, self.param_groups, shard.defaults)
            if shard.elementwise and not verdict.elementwise:
                raise ValueError(
                    f"{shard.optimizer_class.__name__} needs whole parameters, but the shards of "
                    "the other parameters are cut anywhere; pass the group when the optimizer is "
                    "made"
                )
            if model is not None:
                model.check_has(fresh)
            first_group = len(self.param_groups) - 1
            descriptions = describe_parameters([group], first_group, self.defaults, verdict)
            check_same_parameters("add_param_group()", descriptions, self.group)
        except BaseException as error:
            self.param_groups.pop()
            if isinstance(error, CollectiveMismatch):
                error.add_note(
                    "Every rank must call add_param_group() with the same group, between the same "
                    "two steps."
                )
            raise
        self._engine.add(fresh)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, as in torch; the other ranks learn of it with the next step.

        set_to_none: False sets them to zero.
        """
        super().zero_grad(set_to_none)
        if self._engine.reducer is not None:
            self._engine.reducer.held.was_cleared()

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None, **kwargs: Any
    ) -> float | None:
        """Take one step; every rank must call it (inside Join, joined ranks take it implicitly).

        Afterwards all ranks hold the same parameters, bit by bit. Returns the closure's loss.
        kwargs: not supported, since joined ranks, which step too, do not have them.

        Raises RuntimeError if no gradients were reduced since the last step.
        """
        if kwargs:
            raise TypeError(
                f"step() takes a closure only, got {', '.join(kwargs)}: ranks that have run out of "
                "data step too, and do not have these arguments. Set options in "
                "optimizer.param_groups"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._join is not None:
            self._join.check_may_begin(self)
        Join.notify_join_context(self)
        engine = self._engine
        engine.loss_scale = given_scale(self, self.uses_scaler)
        is_live, why_not = self._join.ledger.live if self._join else True, ""
        if engine.reducer is not None:
            reducer = engine.reducer
            if not (reducer.has_launched or reducer.num_in_step or engine.summed.has_agreed):
                why_not = (
                    "step() needs gradients that were reduced since the last step: run "
                    "loss.backward() on the DistributedDataParallel model, outside no_sync(), first"
                )
            reducer.is_live = is_live
        engine.take_step(is_live, why_not)
        return loss

    @property
    def _scaler_of_losses(self) -> Any:
        """The GradScaler; None without one, and when it is gone."""
        return self._scaler() if self._scaler is not None else None

    def _scale_of_losses(self) -> torch.Tensor | None:
        """The scale of the losses on this rank, (1,); None without a GradScaler."""
        scaler = self._scaler_of_losses
        return scaler._current_scale() if scaler is not None else None

    def _growth_of_scale(self) -> tuple[float, float, float]:
        scaler = self._scaler_of_losses
        return scaler.growth if scaler is not None else (0.0, 0.0, 0.0)

    def _scaler_state(self) -> dict[str, Any] | None:
        scaler = self._scaler_of_losses
        return None if scaler is None else scaler.state_dict()

    def _load_scaler_state(self, state: dict[str, Any] | None) -> None:
        scaler = self._scaler_of_losses
        if scaler is not None and state and scaler.state_dict() != state:
            scaler.load_state_dict(state)

    def _follow_scale(self, scale: float, growth: Sequence[float]) -> None:
        scaler = self._scaler_of_losses
        if scaler is not None:
            scaler.follow(scale, growth)

    def __getattr__(self, name: str) -> Any:
        """`train()` and `eval()` of optimizers that have them (schedule-free ones); collective."""
        engine: OptimizerEngine | None = self.__dict__.get("_engine")
        kind = engine.shard.optimizer_class if engine is not None else None
        if engine is not None and name in ("train", "eval") and callable(getattr(kind, name, None)):
            return functools.partial(engine.switch, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    # -- state ---------------------------------------------------------------------------------

    @property  # type: ignore[override]
    def state(self) -> ShardedState:
        """The state by parameter, to drop it: `state.clear()`, `state.pop(parameter)`, on all ranks
        (inside Join, joined ranks do it too). To read or write it raises RuntimeError."""
        return ShardedState(self._engine)

    @state.setter
    def state(self, value: Any) -> None:
        if "_engine" in self.__dict__:  # Else the constructor of torch.optim.Optimizer sets it.
            self.state.replace(value)

    @property
    def shard_optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer of this rank's pieces, with about 1/N of the state; None on a rank that
        owns no piece."""
        return self._engine.shard.optimizer

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Gather the whole state on rank `to`, on the CPU, for `state_dict()` there.

        Every rank calls it. Besides the result, a rank needs 4 MiB of additional memory.
        Raises ValueError if `to` is not a rank of the group.
        """
        if not 0 <= to < self.group.size:
            raise ValueError(f"to must be a rank in [0, {self.group.size}), got {to}")
        gathered = self._engine.shard.gather_state(to)
        self._engine.consolidated = None
        if self.group.rank == to:
            self._engine.consolidated = plain_state(gathered, self.param_groups)

    def state_dict(self, *, by_name: bool = False) -> dict[str, Any]:
        """The last consolidated state, in the format of the plain optimizer.

        by_name: use the format of torch.distributed.checkpoint's `get_optimizer_state_dict`, with
        parameter names as keys; the names come from the module, or from `named_parameters()`.

        Raises RuntimeError on a rank to which nothing was consolidated; ValueError if by_name is
        set and a parameter has no name.
        """
        if self._engine.consolidated is None:
            raise RuntimeError(
                "Optimizer state has not been consolidated on this rank. Please call "
                f"`consolidate_state_dict(to={self.group.rank})` on all ranks beforehand if you "
                "meant to save the global state."
            )
        if not by_name:
            return self._engine.consolidated
        names, given = self._names(), [p for g in self.param_groups for p in g["params"]]
        return with_names(self._engine.consolidated, [parameter_name(p, names) for p in given])

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load this rank's part of a whole state, saved by this class or a plain torch optimizer.

        state_dict: the same on all ranks, with parameter numbers or names as keys, saved with any
        number of ranks. It is copied and stays unchanged.

        Raises ValueError, on all ranks and before anything is loaded, if groups, parameters or
        shapes differ; the text names the parameter.
        """
        saved, options = match_state(state_dict, self.param_groups, self._names())
        self._engine.shard.check_fits(saved)
        for ours, theirs in zip(self.param_groups, options, strict=True):
            ours.update(theirs)
        self._engine.shard.load_state(saved, self.param_groups)
        self._engine.state_changes.loaded()

    def _names(self) -> dict[int, str]:
        """The known names of the parameters, by id() of the parameter; each has one of its own."""
        given = [p for options in self.param_groups for p in options["params"]]
        names = {
            id(parameter): name
            for options in self.param_groups
            for name, parameter in zip(
                options.get("param_names", ()), options["params"], strict=False
            )
        }
        names = names or names_of(given)
        # The parameters of two models in one optimizer have the same names, as in a CycleGAN.
        seen = Counter[str]()
        for key in [id(p) for p in given if id(p) in names]:
            seen[name := names[key]] += 1
            names[key] = name if seen[name] == 1 else f"{name} ({seen[name]})"
        return names

    # -- Join ----------------------------------------------------------------------------------

    def join_hook(self, **kwargs: Any) -> JoinHook:
        return _Hook(self)

    def _ends_step(self) -> bool:
        return True

    def _finishes_steps_of(self, reducer: object) -> bool:
        return self._engine.reducer is reducer

    def _check_joined_with(self, joinables: Sequence[Joinable]) -> None:
        if self._engine.model is None:
            return
        model = self._engine.model.face
        if [j for j in joinables if j is self or j is model] != [model, self]:
            raise ValueError(
                "a ZeroRedundancyOptimizer finishes the steps of its model, so Join must list the "
                "model too, before the optimizer: Join([model, optimizer])"
            )


class _Hook(JoinHook):
    """A joined rank keeps its shard: it takes every step, and adds neutral gradients."""

    def __init__(self, optimizer: ZeroRedundancyOptimizer) -> None:
        self._optimizer = optimizer

    @torch.no_grad()
    def main_hook(self) -> None:
        optimizer = self._optimizer
        assert optimizer._join is not None
        # The model's hook, which runs before, sends the gradients. Where hooks are announced, the
        # ranks with data may have begun this step while this rank was one of them.
        if optimizer._engine.reducer is not None:
            optimizer._engine.reducer.shadow()
        optimizer._engine.take_step(is_live=False)
        if optimizer._join.last_step_live:
            for hook in [*optimizer._optimizer_step_post_hooks.values()]:
                hook(optimizer, (optimizer,), {})

    def post_hook(self, is_last_joiner: bool) -> None:
        join = self._optimizer._join
        assert join is not None
        if join.ledger.somebody_missed_a_step:
            self._optimizer._engine.leave_join(join)


def optimizer_engine_of(optimizer: ZeroRedundancyOptimizer) -> OptimizerEngine:
    """The engine, which recovery and checkpoints work on."""
    return optimizer._engine
