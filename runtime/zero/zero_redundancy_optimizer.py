"""`ZeroRedundancyOptimizer`: every rank keeps and steps one shard of the optimizer's state.

The class is what users hold. Its engine takes the steps, and has the methods for recovery and
checkpoints.

A step has the phases below; the code repeats the numbers.

    (1) Reduce-scatter of each bucket, out of place, launched during backward.
    (2) Send each reduced shard to the ranks that keep its replicas, if there are any.
    (3) Ballot: one small all-reduce in float64. Each rank votes when its own reduction is
        complete, so a rank that sees the result knows that all ranks finished (1) and (2).
    (4) Apply the shard's gradient to the shard, and the replicas' gradients to the replicas.
    (5) All-gather the parameters, and synchronize the buffers.

(4) and (5) run bucket by bucket.

If the run survives a lost rank (recovery/recovery.py), a failure in any phase parks the
step. If some rank has seen the ballot, the step counts, and this rank finishes it in the next
generation. Otherwise the step begins again at (1), from the buckets that every rank has kept.
"""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any

import torch
from torch.optim import optimizer as torch_optimizer

from chorusline.actors.errors import ends_a_generation
from chorusline.actors.fault_plan import Faults, Instant
from chorusline.actors.messages.messages import OptimizerProgress
from chorusline.collectives.contract.argument_kinds import check_kinds, check_range
from chorusline.collectives.contract.call_site import users_level
from chorusline.collectives.contract.errors import (
    CollectiveError,
    CollectiveMismatch,
    listed,
    name_ranks,
)
from chorusline.collectives.contract.plain_numbers import whole
from chorusline.collectives.contract.torch_hints import TOO_MANY, says
from chorusline.collectives.group import Group
from chorusline.collectives.objects.blocking import all_gather_object, all_gather_row

from ..data_parallel.distributed_data_parallel import (
    DistributedDataParallel,
    ModelEngine,
    engine_of,
    engines_of,
    names_of,
    owner_of,
    reducers_of,
)
from ..data_parallel.gradients.gradient_bucket import GradientBucket
from ..data_parallel.gradients.reducer import Reducer
from ..data_parallel.model_steps import ModelSteps
from ..data_parallel.same_model import (
    broadcast_tensors,
    check_same_parameters,
    forward_passes_that_write,
    unlike_values,
)
from ..join.engine import GroupJoinable, Joinable, JoinEngine
from ..join.error_notes import flags_of_number
from ..join.join_hook import JoinHook
from ..process.agreement import Agreement, Note, Vote, digest_of
from ..process.between_runs import between_runs
from ..process.leftovers import LeftoverVote
from ..process.option_numbers import float_of, numbers_of, set_numbers, texts_of, told_apart
from ..process.running import RecoveryInterface, current_group, recovery_of
from ..process.step_boundary import boundary
from .ballot import (
    GROWTH,
    OF_THE_STEP,
    Ballot,
    Outcome,
    ShardedVote,
    check_same_options,
    check_same_texts,
    labels_of,
)
from .digests.digest_checks import Correction, DigestChecks
from .digests.digests import ordered_digest
from .loss_scale import agreed_scale, given_scale
from .shards.optimizer_state import check_fits
from .shards.parameter_bucket import Gather
from .shards.parameter_shard import ParameterShard
from .shards.shard_state import Inventory, ShardState
from .shards.shardable_optimizers import (
    check_arguments,
    check_dense,
    check_own_memory,
    check_shardable,
    complete_options,
    describe_parameters,
    verdict_on,
)
from .shards.state_dict_format import match_state, parameter_name, plain_state, with_names
from .state_changes import Changes, ShardedState, StateChanges

_OF_THE_MODEL = (
    "Give it the model, ZeroRedundancyOptimizer(model, ...), or parameters of the module that "
    "was wrapped: a copy of the module has other parameters."
)


_INSTEAD = {
    "_overlap_with_ddp": (
        ": torch's hook_with_zero_step steps torch's ZeroRedundancyOptimizer in the backward pass. "
        "Leave the hook out; optimizer.step() after the backward pass takes the whole step"
    ),
    "join_process_group": ": write join_group",
    "process_group": ": write group",
    "world_size": ": write group.size",
    "rank": ": write group.rank",
    "global_rank": ": write group.rank, or ctx.rank in a session",
    "optim": ": write shard_optimizer",
    "rank_local_state_dict": (
        ": write consolidate_state_dict(), on all ranks, and state_dict(), which is that of the "
        "plain optimizer"
    ),
}
"""By attribute of torch's ZeroRedundancyOptimizer, what to write here."""


class ZeroRedundancyOptimizer(torch.optim.Optimizer, GroupJoinable):
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
    check_every: every `check_every` steps, compare checksums of parameters, state and gradients
        across ranks to detect silent data corruption. A wrong value is restored from a rank that
        has the right one; `corrections` lists the repairs. Default: no check
        (docs/flipped-bits.md).
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

    @torch.inference_mode(False)  # Tensors that it makes are written later, outside of that mode.
    @torch.no_grad()
    @says(**{TOO_MANY: "pass the arguments after optimizer_class by name, such as group= and lr="})
    def __init__(
        self,
        params: DistributedDataParallel | Iterable[Any],
        optimizer_class: type[torch.optim.Optimizer],
        *,
        group: Group | None = None,
        max_norm: float | None = None,
        replicas: int = 1,
        check_every: int | None = None,
        parameters_as_bucket_view: bool = True,
        **defaults: Any,
    ) -> None:
        arguments = dict(locals())
        wrapper = params if isinstance(params, DistributedDataParallel) else None
        if isinstance(params, DistributedDataParallel):
            reducer = engine_of(params).reducer
            # A model whose steps an optimizer before this one has ended needs one of all that it
            # reduces: a parameter that was frozen since keeps its place.
            kept = set() if reducer.ends_steps else {id(p) for p in reducer.parameters}
            params = [p for p in params.parameters() if p.requires_grad or id(p) in kept]
        check_arguments(params, optimizer_class, group, defaults)
        check_kinds(ZeroRedundancyOptimizer.__init__, arguments)
        max_norm = _checked_norm(max_norm)
        if (number := whole(replicas)) is None or number < 1:
            raise ValueError(f"replicas must be a whole number of at least 1, got {replicas!r}")
        replicas = number
        if check_every is not None:
            check_range("check_every", check_every, 1)
        check_shardable(optimizer_class)
        super().__init__(params, {})
        check_dense(self.param_groups)
        self.defaults = complete_options(optimizer_class, self.param_groups, defaults)
        verdict = verdict_on(optimizer_class, self.param_groups, defaults)
        is_elementwise = verdict.elementwise
        given = [p for options in self.param_groups for p in options["params"]]
        model = owner_of(given)
        named = [(f"parameter {number}", p) for number, p in enumerate(given)]
        if model is None and not all(one.reducer.ends_steps for one in engines_of(given)):
            raise ValueError(
                "an earlier ZeroRedundancyOptimizer has taken over the steps of a model, and these "
                "parameters are some of those that it reduces, or others too. Give exactly those "
                "of the model, ZeroRedundancyOptimizer(model, ...), of which frozen ones are not "
                "stepped; or wrap the module again, DistributedDataParallel(model.module)"
            )
        if model:
            named = [*model.module.named_parameters(), *model.module.named_buffers()]
        check_own_memory(given, named)
        if model and group is not None and group is not model.group:
            raise ValueError(
                "group must be the model's own group, which reduces its gradients; leave it out"
            )
        # A module that has lost parameters since it was wrapped does not own the rest alone.
        owner = model or wrapper
        group = group or (owner.group if owner else current_group())
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
        if check_every is not None and model and group.size > 1:
            # Each rank would write other rows, which the digests cannot tell from corruption.
            for why in forward_passes_that_write(model.module):
                raise ValueError(f"check_every does not work with this model: {why}")
        self.num_steps = 0
        """Number of applied steps, equal on all ranks."""
        self._max_norm = max_norm
        self.grad_norm: float | None = None
        """2-norm of the mean gradient of the last step, before clipping; None without max_norm."""

        self.uses_scaler = False
        """Whether losses are scaled; set by chorusline.GradScaler, on all ranks."""
        self._scaler: weakref.ref[Any] | None = None
        """The chorusline.GradScaler that scales the losses; None: none does."""
        self.found_overflow = False
        """Whether the last step was left out because a scaled gradient was not finite."""
        self.check_every = check_every
        """One of so many steps is checked by digests (digest_checks.py); None: no step is."""
        self.corrections: list[Correction] = []
        """What had silently become wrong on some rank, and was made right, by check_every."""
        descriptions = describe_parameters(self.param_groups, 0, self.defaults, verdict)
        settings = {
            "replicas": replicas,
            "check_every (0: no check)": check_every or 0,
        }
        check_same_parameters("ZeroRedundancyOptimizer", descriptions, group, settings=settings)
        shard = ParameterShard(optimizer_class, defaults, group, verdict=verdict, replicas=replicas)
        self._engine = OptimizerEngine(self, shard, model)
        self._engine.begin()

    @property
    def max_norm(self) -> float | None:
        """The norm to which the mean gradient is clipped; None: no clipping. It may be set."""
        return self._max_norm

    @max_norm.setter
    def max_norm(self, norm: float | None) -> None:
        self._max_norm = _checked_norm(norm)

    @property
    def group(self) -> Group:  # type: ignore[override]
        """The group over which the state is sharded. It changes when the run's ranks change."""
        return self._engine.group

    @torch.inference_mode(False)
    @torch.no_grad()
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, as in torch.optim; collective, between two steps.

        Shards of the other groups stay unchanged; the new group is cut separately. With a model,
        the parameters must belong to the module. Parameters that were frozen when the module was
        wrapped, or were registered later, are reduced from now on and start from rank 0's values.

        When a train function runs again from the top, the optimizer has the group already, as it
        was by then, and to add it once more changes nothing.

        Raises the errors of torch.optim.Optimizer; ValueError for parameters that are not in the
        model; CollectiveMismatch, on all ranks, if the groups differ. Then nothing is added.
        """
        # The constructor of torch.optim.Optimizer adds the groups one by one.
        is_made = hasattr(self, "_engine")
        if is_made and self._engine.has_again(param_group):
            return
        super().add_param_group(param_group)
        if not is_made:
            return
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
            self._engine.reducer.held.was_cleared(to_none=set_to_none)

    @torch.inference_mode(False)
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
            # A rank without data shadows this step by itself, and would take it twice.
            if self._join.calls_functions:
                raise RuntimeError(
                    "a function in step_along calls step() of a ZeroRedundancyOptimizer on rank "
                    f"{self.group.rank}, which has run out of data and takes the steps of the "
                    "listed optimizers by itself. Call optimizer.step() in the body alone, and "
                    "leave it out of the function"
                )
            self._join.notified(self)
        engine = self._engine
        engine.loss_scale = given_scale(self, self.uses_scaler)
        is_live, why_not = self._join.ledger.live if self._join else True, ""
        if engine.reducer is not None:
            reducer = engine.reducer
            # Not raised here: the rank says so in its vote, so that all ranks raise it.
            if not (reducer.has_launched or reducer.num_in_step or engine.has_agreed):
                why_not = reducer.why_no_step("ZeroRedundancyOptimizer") or (
                    "step() needs gradients that were reduced since the last step: run "
                    "loss.backward() on the DistributedDataParallel model, outside no_sync(), first"
                )
            reducer.is_live = is_live
        engine.take_step(is_live, why_not)
        return loss

    def _run_pre_hooks(self) -> bool:
        """What `step()` does on a rank with data before it votes. Returns whether there are any."""
        everybodys: dict[int, Any] = torch_optimizer._global_optimizer_pre_hooks
        hooks = [*everybodys.values(), *self._optimizer_step_pre_hooks.values()]
        for hook in hooks:
            hook(self, (self,), {})
        return bool(hooks)

    def _run_post_hooks(self) -> None:
        """What `step()` does on a rank with data after it has applied the step."""
        everybodys: dict[int, Any] = torch_optimizer._global_optimizer_post_hooks
        for hook in [*self._optimizer_step_post_hooks.values(), *everybodys.values()]:
            hook(self, (self,), {})

    @property
    def _scaler_of_losses(self) -> Any:
        """The GradScaler; None without one, and when it is gone."""
        return self._scaler() if self._scaler is not None else None

    def __getattr__(self, name: str) -> Any:
        """`train()` and `eval()` of optimizers that have them (schedule-free ones); collective."""
        # Not self._engine: before it is set, that would come here again.
        engine: OptimizerEngine | None = self.__dict__.get("_engine")
        kind = engine.shard.optimizer_class if engine is not None else None
        if engine is not None and name in ("train", "eval") and callable(getattr(kind, name, None)):
            return functools.partial(engine.switch, name)
        raise AttributeError(
            f"{type(self).__name__!r} object has no attribute {name!r}{_INSTEAD.get(name, '')}"
        )

    # -- state ---------------------------------------------------------------------------------

    def __reduce_ex__(self, protocol: object) -> Any:
        raise TypeError(
            "a ZeroRedundancyOptimizer has this rank's shard of the state, and belongs to its "
            "group: it cannot be copied or pickled, and no schedule of it can. Save its state: "
            "ctx.register and a checkpoint, or consolidate_state_dict() on all ranks and then "
            "state_dict() on one"
        )

    @property  # type: ignore[override]
    def state(self) -> ShardedState:
        """The state by parameter, to drop it: `state.clear()`, `state.pop(parameter)`, on all ranks
        (inside Join, joined ranks do it too). To read or write it raises RuntimeError."""
        return ShardedState(self._engine.shard, self._engine.drop_state)

    @state.setter
    def state(self, value: Any) -> None:
        if "_engine" in self.__dict__:  # Else the constructor of torch.optim.Optimizer sets it.
            self.state.replace(value)

    @property
    def shard_optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer of this rank's pieces, with about 1/N of the state. On a rank that owns no
        piece it is None, or has no parameters and counts the steps."""
        return self._engine.shard.optimizer

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Gather the whole state on rank `to`, on the CPU, for `state_dict()` there.

        Every rank calls it. Besides the result, a rank needs 4 MiB of additional memory.
        Raises ValueError if `to` is not a rank of the group.
        """
        if not 0 <= to < self.group.size:
            raise ValueError(f"to must be a rank in [0, {self.group.size}), got {to}")
        gathered = self._engine.shard.gather_state(to, self.param_groups)
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
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        if self._engine.consolidated is None:
            raise RuntimeError(
                "Optimizer state has not been consolidated on this rank. Please call "
                f"`consolidate_state_dict(to={self.group.rank})` on all ranks beforehand if you "
                "meant to save the global state."
            )
        # A hook may change what it gets, and the next call begins from what was consolidated.
        state_dict: dict[str, Any] = {
            "state": {key: {**state} for key, state in self._engine.consolidated["state"].items()},
            "param_groups": [{**options} for options in self._engine.consolidated["param_groups"]],
        }
        for after in self._optimizer_state_dict_post_hooks.values():
            state_dict = result if (result := after(self, state_dict)) is not None else state_dict
        if not by_name:
            return state_dict
        names, given = self._names(), [p for g in self.param_groups for p in g["params"]]
        return with_names(state_dict, [parameter_name(p, names) for p in given])

    @torch.inference_mode(False)
    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load this rank's part of a whole state, saved by this class or a plain torch optimizer.

        state_dict: the same on all ranks, with parameter numbers or names as keys, saved with any
        number of ranks. It is copied and stays unchanged.

        Raises ValueError, on all ranks and before anything is loaded, if groups, parameters or
        shapes differ; the text names the parameter.
        """
        state_dict = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = result if (result := before(self, state_dict)) is not None else state_dict
        saved, options = match_state(state_dict, self.param_groups, self._names())
        given = [p for group in self.param_groups for p in group["params"]]
        # All of them, whichever rank owns them, before anything changes.
        for parameter in given:
            name, state = saved[id(parameter)]
            check_fits(state, parameter.shape, name, self._engine.shard.verdict)
        # From here on a frozen parameter with state is as one that was frozen later.
        self._engine.take_up(p for p in given if saved[id(p)][1])
        self._engine.take_options(options)
        self._engine.shard.load_state(saved, self.param_groups)
        self._engine.state_changes.loaded()
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

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
        return _OptimizerHook(self)

    def _ends_step(self) -> bool:
        return True

    def _finishes_steps_of(self, reducer: object) -> bool:
        return self._engine.reducer is reducer

    def _check_joined_with(self, joinables: Sequence[Joinable]) -> None:
        if self._engine.model is None:
            return
        model = self._engine.model.wrapper
        if [j for j in joinables if j is self or j is model] != [model, self]:
            raise ValueError(
                "a ZeroRedundancyOptimizer finishes the steps of its model, so Join must list the "
                "model too, before the optimizer: Join([model, optimizer])"
            )


def _checked_norm(norm: object) -> float | None:
    """As a float. Raises TypeError for what is no number, ValueError for one to which nothing can
    be clipped: by a negative one the step would climb."""
    if norm is None:
        return None
    if (number := float_of(norm)) is None:
        raise TypeError(f"max_norm must be a number or None, got {norm!r}")
    if not number > 0:
        raise ValueError(f"max_norm must be positive, got {number}")
    return number


class _OptimizerHook(JoinHook):
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
            # Of `step()`, for torch's schedules, which warn if they are stepped before it.
            optimizer._opt_called = True  # type: ignore[attr-defined]
            optimizer._run_post_hooks()

    def post_hook(self, is_last_joiner: bool) -> None:
        join = self._optimizer._join
        assert join is not None
        if join.ledger.somebody_may_lag:
            self._optimizer._engine.leave_join(join)


def optimizer_engine_of(optimizer: ZeroRedundancyOptimizer) -> OptimizerEngine:
    """The engine, which recovery and checkpoints work on."""
    return optimizer._engine


@dataclass(slots=True)
class SummedStep:
    """A step of `ctx.steps` that all ranks have agreed on, and that `step()` has not taken.

    options: with which they have voted. divisor: of its summed gradient.
    is_applied: this rank has applied it already, as a rank was lost before `step()`.
    """

    outcome: Outcome
    options: list[float]
    divisor: float
    is_applied: bool = False


@dataclass(frozen=True, slots=True)
class Additions:
    """What a sharded optimizer has got since it was registered, by names of the parameters.

    groups: that were added.
    laid_out: of what shards were cut, call by call: each call makes buckets of its own.
    """

    groups: tuple[tuple[str, ...], ...] = ()
    laid_out: tuple[tuple[str, ...], ...] = ()


class OptimizerEngine:
    """The engine of one sharded optimizer on one rank: it takes the steps of the user's
    `ZeroRedundancyOptimizer`, and recovery and checkpoints work on it.

    model: the model whose gradients are reduced; None if `.grad` is used as it is.
    """

    def __init__(
        self, optimizer: ZeroRedundancyOptimizer, shard: ParameterShard, model: ModelEngine | None
    ) -> None:
        self.optimizer = optimizer
        self.shard = shard
        self.model = model
        self.reducer: Reducer | None = None
        """The model's reducer if gradients are reduce-scattered; None if they are all-reduced or
        used as they are."""
        self.loss_scale: torch.Tensor | None = None  # None: no GradScaler
        self.consolidated: dict[str, Any] | None = None
        """The whole state, on a rank to which it was gathered; None after the group changes."""
        self.last_live: tuple[int, ...] = ()
        """The ranks that took the last step."""
        self._waiting: list[torch.nn.Parameter] = []
        """Parameters in the groups that no shard holds, because they have been frozen so far, and
        no state of them was loaded."""
        self.additions = Additions()
        """Since the optimizer was registered, in a run that survives a loss."""
        self._late: list[str] = []
        """The parameters of added groups that the model has got since it was wrapped."""
        self._again: list[set[int]] = []
        """By id(), the parameters of groups that came with `take_additions`, and that the program
        has not added itself since."""
        self._why_not = ""
        """What keeps this rank from taking the step under way; empty if nothing does."""
        self._seen = OptimizerProgress(0)
        """The number and content of the last ballot that this rank has seen."""
        self._ballot_of_step = 0
        """The ballot of the current step, or of the last one."""
        self._tells_changes = True
        """Whether the next ballot says that the state was changed."""
        self._has_run_hooks = False
        """Whether this rank, without data, has run the hooks before the step under way."""
        self._keeps_up = True
        """Whether ranks without data still have to do what others have done before their vote."""
        self._has_warned_of_schedule = False
        self._tells_perturbed = True
        """Whether it says that parameters were changed between two passes: once is enough."""
        self.digests = DigestChecks(shard, optimizer.check_every, optimizer.corrections)
        self.state_changes = StateChanges(shard)
        self._summed: SummedStep | None = None
        """The step of `ctx.steps` that all ranks have agreed on and `step()` has not taken; None:
        there is none."""
        # None: the run ends with a loss, or is over.
        self._recovery: RecoveryInterface | None = None
        self.faults = Faults()
        of_group = between_runs().of_group(self.group)
        self._number = of_group.num_optimizers
        """Among the sharded optimizers that were made in its group."""
        of_group.num_optimizers += 1
        given = [p for options in optimizer.param_groups for p in options["params"]]
        if model is not None and shard.elementwise:
            self.reducer = model.reducer
            self._recovery = recovery_of(self.group)
            if self._recovery is not None:
                self.faults = self._recovery.faults
            self.reducer.reduce_by_shards()
            self._own(self.reducer.parameters, self.reducer.buckets)
        laid_out = {id(p) for p in shard.parameters}
        self._waiting = [p for p in dict.fromkeys(given) if id(p) not in laid_out]
        self._given = self._parameters_now()
        """The parameters that each group has been given, by id()."""
        self.take_up_trainable()

    def begin(self) -> None:
        """Called when the optimizer is fully constructed."""
        if self._recovery is not None:
            assert self.reducer is not None
            self.reducer.parks = True
            self._recovery.watch_optimizer(self)
        if self.model is not None:
            ender = self if self.reducer is not None else None
            self.model.leave_steps_to_optimizer(self.optimizer, ender)
        between_runs().wrap(self)

    def note_registered(self) -> None:
        """What came before comes again when the function begins again."""
        self.additions, self._late = Additions(), []

    @property
    def why_not_again(self) -> str:
        """Why the function cannot run again from the top; empty if it can."""
        if not self._late:
            return ""
        return (
            f"it has added parameters by add_param_group() ({listed(self._late, 3)}) that its "
            "model has got after DistributedDataParallel(module), and would begin again without "
            "them. Make their layers before that, frozen by requires_grad_(False), and unfreeze "
            "them when they are added"
        )

    @property
    def group(self) -> Group:
        return self.shard.group

    def add(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Cut shards of these parameters too, as soon as they are trainable."""
        self._given = self._parameters_now()
        self._waiting += parameters
        if self._recovery is not None and self.model is not None:
            model, names = self.model, {id(p): name for name, p in self._named().items()}
            self._late += [names[id(p)] for p in parameters if not model.was_wrapped_with(p)]
            added = tuple(names[id(p)] for p in parameters)
            self.additions = replace(self.additions, groups=(*self.additions.groups, added))
        self.take_up_trainable()

    def _named(self) -> dict[str, torch.nn.Parameter]:
        assert self.model is not None
        return dict(self.model.module.named_parameters())

    def has_again(self, group: Any) -> bool:
        """Whether the group came with `take_additions`; True once for each such group."""
        given = group.get("params") if self._again and isinstance(group, dict) else None
        if given is None or isinstance(given, set):  # Of which torch says what is wrong.
            return False
        # An iterator can be read once: from here on it is a list, as torch leaves it.
        given = group["params"] = [given] if isinstance(given, torch.Tensor) else list(given)
        parameters = {id(one[1] if isinstance(one, tuple) else one) for one in given}
        if parameters not in self._again:
            return False
        self._again.remove(parameters)
        return True

    def take_up_trainable(self) -> None:
        """Cut shards of waiting parameters that are now trainable, the same ones on all ranks. A
        parameter that is frozen later keeps shard and state, and is not stepped."""
        self.take_up(
            p
            for p in self._waiting
            # As in a plain optimizer, a gradient is enough, whatever wrote it.
            if p.requires_grad or (self.model is None and p.grad is not None)
        )

    def take_up(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Cut shards of those of `parameters` that wait for it, the same ones on all ranks."""
        taken = {id(p) for p in parameters}
        fresh = [p for p in self._waiting if id(p) in taken]
        # A group of frozen parameters has options, which the inner optimizer and the ballot need.
        if not fresh and self.shard.num_groups == len(self.optimizer.param_groups):
            return
        self._waiting = [p for p in self._waiting if id(p) not in taken]
        buckets = self.model.reduce_also(fresh) if self.model is not None else []
        self._own(fresh, buckets if self.reducer is not None else None)
        if fresh and self._recovery is not None:
            names = names_of(fresh)
            laid_out = tuple(names[id(p)] for p in fresh)
            self.additions = replace(self.additions, laid_out=(*self.additions.laid_out, laid_out))

    def take_additions(self, additions: Additions, options: Sequence[Mapping[str, Any]]) -> None:
        """Get what an earlier optimizer of the same function has got, as far as it is not there:
        shards and buckets of the two are matched by number. All ranks call it, except in a dry
        run. options: of all groups of that optimizer."""
        named = self._named()
        fresh = additions.groups[len(self.additions.groups) :]
        for names, of_group in zip(fresh, options[len(options) - len(fresh) :], strict=True):
            # The model was made otherwise, which the caller sees by the number of groups.
            if not all(name in named for name in names):
                continue
            parameters = [named[name] for name in names]
            group = {key: value for key, value in of_group.items() if key != "param_names"}
            called = of_group.get("param_names")
            group["params"] = [*zip(called, parameters, strict=True)] if called else parameters
            torch.optim.Optimizer.add_param_group(self.optimizer, group)
            self._again.append({id(p) for p in parameters})
            self._waiting += parameters
        self.additions = replace(self.additions, groups=additions.groups)
        self._given = self._parameters_now()
        self.take_up(())
        for names in additions.laid_out[len(self.additions.laid_out) :]:
            self.take_up(named[name] for name in names if name in named)

    def take_options(self, options: Iterable[Mapping[str, Any]]) -> None:
        """Continue with options that were saved, by group; on all ranks, between two steps."""
        for ours, theirs in zip(self.optimizer.param_groups, options, strict=True):
            ours.update({key: value for key, value in theirs.items() if key != "params"})
        self._make_ballot()  # Another number of them may be numbers: foreach=None is none.

    def _own(
        self, parameters: Sequence[torch.nn.Parameter], buckets: Sequence[GradientBucket] | None
    ) -> None:
        """Lay out shards of `parameters`. buckets: the reducer's, if it reduces them."""
        self.shard.add(parameters, self.optimizer.param_groups, buckets)
        self._make_ballot()

    def _make_ballot(self) -> None:
        num_options, counts = len(self._option_numbers()), self._recovery is not None
        digests = self.digests.laid_out()
        self._labels = self._option_labels()
        self._ballot = Ballot(self.group, num_options, counts_samples=counts, num_digests=digests)

    # -- the step --------------------------------------------------------------------------------

    def take_step(self, is_live: bool, why_not: str = "") -> None:
        """why_not: what keeps this rank from taking the step; empty if nothing does."""
        # Its phases (1) to (3) came with the last batch.
        if self._summed is not None:
            self._take_summed_step(self._summed)
            return
        if not why_not:
            self._take_up_waiting()
        self._why_not = why_not or self._why_not_now()
        # Inside a Join the others would wait in this step, or see it as ended by this rank: there
        # the ballot tells them why. Elsewhere no other rank need have come here.
        if self._why_not and self.optimizer._join is None:
            raise RuntimeError(self._why_not)
        self.shard.bring_home()
        if self.reducer is not None:
            self.reducer.send_late()
        # Its gradients are whole on each rank, and the reducer has ended the step already.
        elif self.model is not None:
            self.model.reducer.num_in_step = 0
        self._begin_ballot()
        while self._seen.ballots < self._ballot_of_step:
            try:
                self._try_step(is_live)
            except Exception as error:
                if self._recovery is None or not ends_a_generation(error):
                    raise
                if not self.step_counts and self.model and not self.model.has_valid_gradients:
                    raise  # The function has to run again from the top, and compute them again.
                # If some rank has seen this step's ballot, the step is taken in here (`catch_up`),
                # and the loop ends; if none has, the buckets are reduced again, and it continues.
                self._recovery.recover(error, self)
        self._has_stepped()

    def _take_up_waiting(self) -> None:
        if self._waiting:
            self.take_up_trainable()

    def _why_not_now(self) -> str:
        # The parameters, and the shards of the newer optimizer, lie in the model's buckets.
        if self.model is not None and not self.model.is_sharded_by(self.optimizer):
            return (
                "another ZeroRedundancyOptimizer was made over this model after this one, and took "
                "over its parameters. Make one optimizer for the model, with a parameter group for "
                "each set of options, and step the newest one"
            )
        why = self._why_regrouped()
        if why or self.reducer is None or self.model is None:
            return why
        if (why := self.model.why_unfrozen()) or not (why := self.reducer.why_changed()):
            return why
        # In a hook all gradients may have come already; those that come later are the change.
        return self.reducer.why_no_step("ZeroRedundancyOptimizer") or why

    def _parameters_now(self) -> list[list[int]]:
        return [[*map(id, options.get("params", ()))] for options in self.optimizer.param_groups]

    def _why_regrouped(self) -> str:
        """Says that the program has deleted options, or changed the lists of parameters itself, by
        whose numbers shards and options are found; empty if it has not."""
        for number, options in enumerate(self.optimizer.param_groups):
            if absent := sorted(self.optimizer.defaults.keys() - options.keys()):
                kind, first = self.shard.optimizer_class.__name__, absent[0]
                return (
                    f"parameter group {number} of the optimizer no longer has {', '.join(absent)}, "
                    f"and {kind} steps by all of its options. Set what is missing before step(), "
                    f"on all ranks, as in optimizer.param_groups[{number}][{first!r}] = "
                    f"{self.optimizer.defaults[first]!r}"
                )
        if (now := self._parameters_now()) == self._given:
            return ""
        before, after = [*map(len, self._given)], [*map(len, now)]
        what = (
            f"have {after} parameters, and were given {before}"
            if before != after
            else "have other parameters, or in another order, than they were given"
        )
        return (
            f"the parameter groups of the optimizer {what}. Its shards do not follow a change of "
            "these lists: add parameters by add_param_group(), on all ranks, leave some out by "
            "requires_grad_(False), or make a new optimizer"
        )

    def _begin_ballot(self) -> None:
        """A step begins, which ends with the next ballot."""
        self._ballot_of_step = self._seen.ballots + 1
        self._has_run_hooks = False

    def _has_stepped(self) -> None:
        between_runs().end_applying()
        if self._recovery is not None:
            self._recovery.has_stepped(self)

    @torch.no_grad()
    def switch(self, mode: str) -> None:
        """Call `train()` or `eval()` of the optimizers of all shards, on all ranks, and gather the
        parameters, which schedule-free optimizers then change."""
        if self.optimizer._join is not None:
            raise RuntimeError(
                f"optimizer.{mode}() changes the shards of all ranks, and ranks that have run out "
                "of data do not call it inside Join; call it before or after the Join"
            )
        self.shard.bring_home()
        # First all come here: where one of them is lost before that, no shard is switched. The
        # function may run again then, with shards of ranks that were left before this call.
        self.group.barrier().wait_on_host()
        self.shard.switch(mode, self.optimizer.param_groups)
        self.shard.gather()

    @property
    def can_wait(self) -> bool:
        """Whether a step can wait here for the ranks of the next generation."""
        return self._recovery is not None

    def wait_for_next_generation(self, error: BaseException) -> bool:
        """Return in the next generation, in the middle of a step. Returns whether the ranks have
        agreed on the step. Raises `error` if it does not end a generation, or the run ends with
        it."""
        if self._recovery is None or not ends_a_generation(error):
            raise error
        self._recovery.recover(error, self)
        return self.step_counts

    @property
    def step_counts(self) -> bool:
        """Whether the ranks have agreed on the current step. Then the loop's body must run the code
        after it, even if the parameters could not be gathered."""
        return self._seen.ballots >= self._ballot_of_step

    def _try_step(self, is_live: bool) -> None:
        self._keeps_up = True
        payload = self._vote_with_others(is_live)
        if self._ballot.says(Note.REFUSES, payload):
            # All ranks raise the same, and nobody waits in a step that is not taken.
            reasons = all_gather_object(self.group, self._why_not)
            why = next(filter(None, reasons))
            ranks = [rank for rank, one in enumerate(reasons) if one == why]
            raise RuntimeError(f"on {name_ranks(ranks)}: {why}")
        if self.reducer is not None and (votes := self._ballot.sends_again(payload)):
            # A rank ran more passes since the launch, or it now knows what its leftovers belong
            # to. All send again, with these, and vote again.
            self.reducer.send_again(votes)
            payload = self._vote_with_others(is_live)
        if self._takes_max_norm(payload, is_live):
            payload = self._vote_with_others(is_live)
        if self.reducer is None and self._takes_gradients(payload) and self._needs_norm:
            payload = self._vote_with_others(is_live)
        self.faults.reach(Instant.SEEN)
        # What parts the parameters of the ranks, after the first step or before, does so in each.
        if self.model is not None and (number := self.optimizer.num_steps) < 2:
            self.model.warn_of_drift(self._ballot.live(payload), f"in step {number + 1}")
        outcome = self._see(payload)
        # Once: what makes the gradients equal does it in every step, or in none.
        if self.model is None and not self.optimizer.num_steps:
            self._check_reduced(outcome.agreement)
        gathers = self._apply(outcome)  # (4), and (5) begins
        for gather in gathers:
            gather.wait()
        self._end_step(outcome.agreement.live, gathers)
        self.faults.reach(Instant.STEPPED)

    def _takes_max_norm(self, payload: tuple[float, ...], is_live: bool) -> bool:
        """Whether a rank without data has left its part of the norm out, as the others have begun
        to clip since it ran out of data. All ranks vote again then."""
        norms = self._ballot.max_norms(payload)
        given = {norm for norm, has_data in norms if has_data}
        # Ranks with data that disagree are refused when the ballot is read.
        if len(given) != 1 or given == {0.0} or all(norm for norm, _ in norms):
            return False
        # The body of the loop sets it, which a rank without data does not run.
        if not is_live:
            self.optimizer.max_norm = given.pop()
        return True

    def _takes_gradients(self, payload: tuple[float, ...]) -> bool:
        """Without a reducer each rank steps its shard with what `.grad` holds. What the body has
        done to it since the pass, such as clipping, a rank without data has not done, so it takes
        the gradients of a rank that has data. Returns whether there is such a rank."""
        agreement = self._ballot.read(payload).agreement
        self._check_gradients(agreement)
        live = agreement.live
        used = [*compress(self.shard.parameters, agreement.used)]
        reducers = reducers_of(used)
        # Where all ranks have data, each has done the same to its own gradients.
        if not live or len(live) == self.group.size or not reducers:
            return False
        for parameter in used:
            # A place to receive into: on the rank that sends there is one.
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
        survives_loss = self._recovery is not None
        were_sent = False
        if self.model is not None and self.reducer is not None:
            were_sent = self.model.sync_buffers(live, self.optimizer._join, on_host=survives_loss)
        # The buffers come after the gathers, on the same stream: they tell for these too.
        if survives_loss and not were_sent and gathers:
            gathers[-1].work.wait_on_host()
        self.shard.parameters_have_come = True

    def _vote_with_others(self, is_live: bool) -> tuple[float, ...]:
        """Hold a ballot; once more, if ranks have changed the state or parameters, or something was
        wrong."""
        self._tells_changes = True
        payload = self._hold_ballot(is_live)
        if self._ballot.says(Note.CHANGES_STATE, payload):
            # No rank takes the step by this ballot, and the next one says it no more.
            join = self.optimizer._join
            last_live = join.ledger.last_live if join is not None else ()
            changes = all_gather_object(self.group, self.state_changes.own)
            live = self._ballot.newest(payload) or last_live
            self.state_changes.take(changes, live, self.group)
            self._tells_changes = False
            payload = self._hold_ballot(is_live)
        if self._ballot.says(Note.PERTURBS, payload):
            self._compare_perturbed()
        if self._keep_up(payload):
            payload = self._hold_ballot(is_live)
        # Without check_every no digests were sent. Where no rank has data, nothing is applied, and
        # some of them have run more of the body than others.
        if self.digests.every is None or not self._ballot.live(payload):
            return payload
        rows = self._ballot.digests(payload)
        if self.digests.heal(rows):
            # Reduced gradients differ: what comes out the second time tells which are wrong.
            if self.reducer is not None and self._sums is None:
                self.reducer.send_again()
            payload = self._hold_ballot(is_live)
            self.digests.tell_gradients(rows, self._ballot.digests(payload))
        return payload

    def _keep_up(self, payload: tuple[float, ...]) -> bool:
        """A rank without data does what ranks with data have done before they voted: it runs the
        hooks of the step, and has the parameters that their body has written since the last step
        (clamping, pruning). Returns whether all ranks vote again.

        Raises CollectiveMismatch, on all ranks, where what it has run might have read others.
        """
        live, group = self._ballot.live(payload), self.group
        if not self._keeps_up or not 0 < len(live) < group.size:
            return False
        self._keeps_up = False
        join = self.optimizer._join
        newest = join.newest_rank(live) if join is not None else max(live)
        has_run = False
        if group.rank not in live:
            # Only now: in the step that all ranks shadow at the end no rank runs them.
            has_run = self._has_run_hooks or self.optimizer._run_pre_hooks()
            self._has_run_hooks = has_run
            self.shard.bring_home()
        # Ranks that have read parameters, in a hook or a function, cannot read them again.
        reads = has_run or (join is not None and join.runs_functions)
        rows = all_gather_row(group, [int(ordered_digest(self.shard)), has_run, reads])
        votes_again = self.digests.every is not None and any(ran for _, ran, _ in rows)
        late = [r for r, (one, *_) in enumerate(rows) if r not in live and one != rows[newest][0]]
        # What has changed by itself on a rank without data is healed, and nobody has written it.
        if not late or self.digests.are_as_written(self._ballot.digests(payload), live):
            return votes_again
        if any(rows[rank][2] for rank in late):
            raise self._written_by_the_body(late, newest)
        for bucket, written in self.shard.parameters_of(newest):
            if group.rank in late:
                bucket.take(written)
        return self.digests.every is not None

    def _written_by_the_body(self, late: Sequence[int], newest: int) -> CollectiveMismatch:
        """late: ranks without data, whose parameters are not those of rank `newest`."""
        known = names_of(self.shard.parameters)
        found = unlike_values([p.detach() for p in self.shard.parameters], self.group)
        # None: these sums are of other words than the one that shows a difference.
        name = known.get(id(self.shard.parameters[found[0]]), "") if found is not None else ""
        return CollectiveMismatch(
            "step()",
            self.group.generation,
            list(late),
            f"the loop's body has written {f'parameter {name}' if name else 'parameters'} since "
            f"the last step on rank {newest}, but not on "
            f"{name_ranks(late, '(which has', '(which have')} run out of data), and where "
            "functions of step_along, or hooks before the step, may have read the parameters as "
            "they were",
            "What the body writes after optimizer.step() belongs in step_along too, in a function "
            "that the body calls, listed in the order of the body; what it writes before the step "
            "belongs in a hook, optimizer.register_step_pre_hook(lambda *_: function()).",
        )

    def _compare_perturbed(self) -> None:
        """Warn on all ranks if the program has changed the parameters otherwise on each rank."""
        self._tells_perturbed = False
        digests = all_gather_object(
            self.group, self.reducer.held.perturbed if self.reducer else None
        )
        ranks = [rank for rank, digest in enumerate(digests) if digest is not None]
        if len({digests[rank] for rank in ranks}) > 1:
            warnings.warn(
                f"ranks {ranks} have changed the parameters between two backward passes of a step, "
                "each in its own way. With a ZeroRedundancyOptimizer, `.grad` is the gradient of "
                "this rank's own batch until step(), so what follows it, such as SAM's "
                "perturbation, differs from training in one process. Compute it from the mean, "
                "group.all_reduce(parameter.grad.clone(), ReduceOp.AVG) (in a session "
                "ctx.group), or use a plain optimizer, for which `.grad` is the mean",
                stacklevel=users_level(),
            )

    def leave_join(self, join: JoinEngine) -> None:
        """A Join ends, without data on some ranks: these take over what the body has done since the
        last step to the optimizer's state and options, and to the GradScaler (`update(scale)`)."""
        if self._recovery is not None and self._recovery.has_gone_on:
            return  # Another rank may have been in here when the ranks changed, and be through.
        try:
            scaler = self.optimizer._scaler_of_losses
            scale = scaler.state_dict() if scaler is not None else None
            own = self.state_changes.own, scale, self._known_numbers()
            compared = sorted(own[0].dropped), own[0].num_loads, *own[1:]
            digest = zlib.crc32(repr(compared).encode())
            if len({*map(tuple, all_gather_row(self.group, [digest]))}) == 1:
                return  # As most often.
            everybody = all_gather_object(self.group, own)
            live = join.ledger.last_live
            self.state_changes.take([changes for changes, *_ in everybody], live, self.group)
            state = everybody[join.newest_rank(live)][1]
            if scaler is not None and state and scaler.state_dict() != state:
                scaler.load_state_dict(state)
            if self._follows(live):
                self._follow_options([everybody[rank][2] for rank in sorted(live)])
        except Exception as error:
            if self._recovery is None or not ends_a_generation(error):
                raise  # Else the next step recovers.

    def drop_state(self, numbers: Iterable[int]) -> None:
        """Drop the state of these parameters, on all ranks before the next step."""
        self.state_changes.drop(numbers)
        self.consolidated = None

    def _hold_ballot(self, is_live: bool) -> tuple[float, ...]:
        reach = self.faults.reach
        reach(Instant.REDUCE)
        self._reduce()  # (1)
        reach(Instant.REDUCED)
        replicating = self.shard.start_replicating()  # (2)
        reach(Instant.REPLICATE)
        for work in replicating:
            work.order_stream()  # The ballot tells how it has ended.
        reach(Instant.VOTE)
        return self._ballot.hold(self._vote(is_live))  # (3)

    def _reduce(self) -> None:
        if (sums := self._sums) is not None:
            # The exact norm is read on the host.
            sums.reduce_shards(on_host=self._needs_norm)
        elif self.reducer is not None:
            self.reducer.wait()

    @property
    def _needs_norm(self) -> bool:
        return self.optimizer.max_norm is not None or self.optimizer.uses_scaler

    @property
    def _is_in_steps(self) -> bool:
        return self.model is not None and self.model.steps.is_under_way

    def _vote(self, is_live: bool) -> ShardedVote:
        needs_norm, in_steps = self._needs_norm, self._is_in_steps
        vote = Vote(
            leftovers=self.reducer.leftovers(is_live) if self.reducer else LeftoverVote(is_live),
            has_next=self.optimizer._has_next(),
            used=[parameter.grad is not None for parameter in self.shard.parameters],
            holds_cleared=self.reducer is not None and self.reducer.holds_cleared,
            kept=self.reducer.kept_to_the_end if self.reducer else (),
            weight=self.reducer.weight if self.reducer else None,
            cursors=self._recovery.cursors() if self._recovery else (),
            stop=boundary().status.stop_is_wanted,
            notes=[
                *(self.reducer.notes() if self.reducer else ()),
                *boundary().notes(),
                *([Note.REFUSES] if self._why_not else ()),
                *([Note.CHANGES_STATE] if self._tells_changes and self.state_changes.own else ()),
                *([Note.PERTURBS] if self._perturbs else ()),
            ],
            join=self.optimizer._vote_flags()
            or flags_of_number(self._number, self.group.generation),
            epoch=boundary().epoch,
            # A first vote compares draws: the constructor has just compared the texts.
            digest=-boundary().draws or self._digest_of_texts(),
        )
        return ShardedVote(
            self.optimizer.num_steps,
            vote,
            # In ctx.steps the norm has the same bits at any number of ranks: an exact sum.
            add_squared_norm=self.shard.add_squared_norm if needs_norm and not in_steps else None,
            exact_norm=self.shard.exact_norm() if needs_norm and in_steps else (),
            loss_scale=self.loss_scale if is_live and self.loss_scale is not None else 0.0,
            options=self._options_to_vote(),
            num_samples=boundary().num_samples,
            digests=self.digests.vote(self.optimizer.num_steps),
        )

    @property
    def _perturbs(self) -> bool:
        reducer = self.reducer
        return self._tells_perturbed and reducer is not None and reducer.held.perturbed is not None

    def _see(self, payload: tuple[float, ...]) -> Outcome:
        """Record the result of a ballot on this rank. From here on the step counts."""
        outcome = self._ballot.read(payload)
        live = outcome.agreement.live
        names = sorted(self.optimizer.defaults)
        groups, generation = self.optimizer.param_groups, self.group.generation
        check_same_options(outcome, groups, names, generation, in_steps=self._is_in_steps)
        check_same_texts(outcome.agreement, self.optimizer.param_groups, names, self.group)
        self._seen = OptimizerProgress(self._seen.ballots + 1, payload)
        self.last_live = live
        if live:
            self.state_changes.forget()
        try:
            self.optimizer._step_agreed(
                outcome.agreement, self._recovery, ends_step=True, counts=True
            )
        except RuntimeError:
            # All ranks raise it, and may continue with another Join: this step is over, untaken.
            if self.reducer is not None:
                self.reducer.end_step(outcome.agreement)
                self.reducer.drop()
            raise
        if self._follows(live):
            self._follow_options([outcome.options[rank] for rank in sorted(live)])
        if self.optimizer.uses_scaler:
            scale = agreed_scale(outcome.loss_scales, live, in_steps=self._is_in_steps)
            scaler = self.optimizer._scaler_of_losses
            if live and self.group.rank not in live and scaler is not None:
                scaler.follow(scale, outcome.options[max(live)][-len(GROWTH) :])
        self.optimizer.found_overflow = self.optimizer.uses_scaler and not math.isfinite(
            outcome.squared_norm
        )
        if self.reducer is not None:
            self.reducer.end_step(outcome.agreement)
        return outcome

    def _apply(self, outcome: Outcome, divisor: float | None = None) -> list[Gather]:
        """Step all shards that this rank keeps, even if another rank is lost meanwhile. Returns the
        all-gathers, each started as soon as its bucket is stepped.

        divisor: of the summed gradient; None: that of the agreement."""
        agreement = outcome.agreement
        if not agreement.live:
            return []  # All ranks have joined: there is no gradient.
        # Known only now: which ranks have taken part is in the agreement.
        divisor = self.divisor(agreement) if divisor is None else divisor
        uses_scaler, live = self.optimizer.uses_scaler, agreement.live
        scale = agreed_scale(outcome.loss_scales, live) if uses_scaler else 1.0
        if self.optimizer.max_norm is not None:
            self.optimizer.grad_norm = math.sqrt(outcome.squared_norm) / (divisor * scale)
        if self.optimizer.found_overflow or self.digests.leaves_out(outcome.digests):
            return []
        # In one factor, so that each gradient is read and written once.
        coefficient = self._clip_coefficient() / scale
        gathers: list[Gather] = []
        written: list[torch.Tensor] = []
        failure: CollectiveError | None = None
        for portion in self.shard.portions:
            self.faults.reach(Instant.APPLY)
            self.shard.apply(
                portion, self.optimizer.param_groups, agreement.used, divisor, coefficient
            )
            written += self.digests.read_written(self.optimizer.num_steps + 1, portion)
            self.faults.reach(Instant.APPLIED)
            try:
                if failure is None:
                    gathers += self.shard.start_gather(portion)
                    self.faults.reach(Instant.GATHER)
            except CollectiveError as error:
                failure = error  # The step counts, so the remaining shards are stepped first.
        # After all shards: a failure of a gather does not undo the step.
        self.optimizer.num_steps += 1
        # The shards' memory is written past autograd, which has to refuse the backward pass of a
        # forward pass from before the step, as after a step of torch's optimizers.
        stepped = [*compress(self.shard.parameters, agreement.used)]
        torch.autograd.graph.increment_version(stepped)
        self.digests.note(self.optimizer.num_steps, written)
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
        used = [*compress(self.shard.parameters, agreement.used)]
        # One rank warns: all know the same.
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
                f"between rank 0 and {name_ranks(unlike)}, and no DistributedDataParallel reduces "
                "it",
                f"{_OF_THE_MODEL} If your own code makes the gradients equal, it must do so before "
                "step().",
            )

    def divisor(self, agreement: Agreement) -> float:
        """The number by which the summed gradient is divided to get the mean."""
        # Without a reducer, the code that made the gradients equal has divided them.
        return 1.0 if self.reducer is None else self.optimizer._divisor(agreement)

    def _clip_coefficient(self) -> float:
        """The factor for the mean gradient that brings its norm to max_norm."""
        if self.optimizer.max_norm is None or self.optimizer.grad_norm is None:
            return 1.0
        # As in torch: never enlarge, never divide by zero, and let a NaN norm propagate.
        coefficient = self.optimizer.max_norm / (self.optimizer.grad_norm + 1e-6)
        return 1.0 if coefficient > 1 else coefficient

    def _option_numbers(self) -> list[float]:
        """The numeric options of the optimizer, without entries that schedulers add to groups, and
        the numbers of OF_THE_STEP; 0 for none."""
        numbers = numbers_of(self.optimizer.param_groups, sorted(self.optimizer.defaults))
        scaler = self.optimizer._scaler_of_losses
        growth = scaler.growth if scaler is not None else [0.0] * len(GROWTH)
        return [*numbers, float(self.optimizer.max_norm or 0.0), *growth]

    def _option_labels(self) -> list[str]:
        return labels_of(self.optimizer.param_groups, sorted(self.optimizer.defaults))

    def _digest_of_texts(self) -> int:
        """For a vote, of the options that are texts; 0 from a rank that steps with none."""
        if self._why_not or self._cannot_count:
            return 0
        names = sorted(self.optimizer.defaults)
        return digest_of(repr(texts_of(self.optimizer.param_groups, names)))

    @property
    def _cannot_count(self) -> bool:
        """Whether this rank owns no piece of an optimizer that counts in its groups, and only where
        it has parameters."""
        return self.shard.optimizer is None and bool(self.shard.verdict.counted)

    def _known_numbers(self) -> list[float]:
        """The `_option_numbers`, with NaN for what this rank cannot count. The others, such as
        the learning rate, are the program's on each rank."""
        numbers = self._option_numbers()
        if self._cannot_count:
            names = sorted(self.shard.verdict.counted & self.optimizer.defaults.keys())
            counted = labels_of(self.optimizer.param_groups, names)
            for place, label in enumerate(self._option_labels()):
                if label in counted:
                    numbers[place] = math.nan
        return numbers

    def _follows(self, live: Sequence[int]) -> bool:
        """Whether this rank takes over the options of live ranks: a joined rank runs no learning
        rate schedule, and steps its shard with theirs."""
        return bool(live) and (self.group.rank not in live or self._cannot_count)

    def _follow_options(self, by_rank: Sequence[Sequence[float]]) -> None:
        """by_rank: the `_known_numbers` of other ranks; the last one that knows a number gives
        it."""
        numbers = self._option_numbers()
        for theirs in by_rank:
            numbers = [
                own if math.isnan(given) else given
                for own, given in zip(numbers, theirs, strict=True)
            ]
        groups = self.optimizer.param_groups
        # As numbers: a rate in a tensor stays the same tensor.
        before = numbers_of(groups, ["lr"])
        set_numbers(groups, sorted(self.optimizer.defaults), numbers[: -len(OF_THE_STEP)])
        self.optimizer.max_norm = numbers[-len(OF_THE_STEP)] or None
        rates = zip(before, numbers_of(groups, ["lr"]), strict=True)
        changed = [(own, theirs) for own, theirs in rates if own != theirs]
        join = self.optimizer._join
        if not changed or join is None or join.may_step_schedules:
            return
        # Schedules leave their mark in the groups.
        if self.group.rank not in self.last_live and any("initial_lr" in one for one in groups):
            self._warn_of_schedule(*changed[0])

    def _warn_of_schedule(self, before: float, now: float) -> None:
        """before, now: a learning rate of this rank, which has taken over that of the others."""
        if self._has_warned_of_schedule:
            return
        self._has_warned_of_schedule = True
        theirs, own = told_apart([now, before])
        warnings.warn(
            f"the learning rate of the ranks with data has become {theirs}, and rank "
            f"{self.group.rank}, which has run out of data, had {own}: the loop's body has "
            "stepped a schedule of this optimizer that step_along does not list. This rank takes "
            "over the rate, but its schedule has counted fewer steps, and gives another rate in "
            "the next epoch. List it: Join(..., step_along=[schedule])",
            stacklevel=users_level(),
        )

    def _options_to_vote(self) -> list[float]:
        if self._why_not:  # It tells the others why, and steps with none.
            return [math.nan] * self._ballot.num_options
        numbers = self._option_numbers()
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
        if any(map(math.isnan, numbers)):
            pairs = zip(self._option_labels(), numbers, strict=False)
            labels = ", ".join(label for label, number in pairs if math.isnan(number))
            error = RuntimeError(
                f"{labels} of the optimizer is NaN on rank {self.group.rank}, and a step with it "
                "would carry NaN to the parameters of all ranks. Set a number before step()"
            )
            self.group.abort(error)  # As above; and in a vote NaN says that a rank knows no number.
            raise error
        return self._known_numbers()

    # -- the steps of ctx.steps (data/steps/; StepEnder of model_steps.py) ------------------------
    #
    # Such a step has two halves. Phases (1) to (3) come at the end of the loop over the step's
    # batches: a rank that is lost until then brings the others its micro-batches, in the same loop.
    # Phases (4) and (5) come in `step()`, after the loop. If a rank is lost between the halves, the
    # others apply the step where they are, and `step()` has nothing left to do.

    @property
    def _sums(self) -> ModelSteps | None:
        """The model's sums, if it takes such steps and this optimizer ends them."""
        if self.model is None or self.reducer is None or not self.model.steps.is_under_way:
            return None
        return self.model.steps

    @property
    def has_agreed(self) -> bool:
        """Whether there is such a step that `step()` has not taken."""
        return self._summed is not None

    def begin_summed_step(self) -> None:
        if self._summed is not None:
            raise RuntimeError(
                "the ranks have agreed on a step of ctx.steps whose gradient no optimizer.step() "
                "has used, and it would be lost. Call optimizer.step() once after the loop over "
                "the batches of each step"
            )
        self._take_up_waiting()
        why = self._why_regrouped()
        if why or (self.model is not None and (why := self.model.why_unfrozen())):
            raise RuntimeError(why)
        self._begin_ballot()

    @torch.no_grad()
    def end_summed_step(self) -> None:
        """Phases (1) to (3)."""
        sums = self._sums
        assert self.reducer is not None and sums is not None
        self.reducer.weight = None
        self.reducer.offer_nothing(sums.used)
        scaler = self.optimizer._scaler_of_losses
        self.loss_scale = scaler._current_scale() if scaler is not None else None
        self.shard.bring_home()
        payload = self._vote_with_others(True)
        self.faults.reach(Instant.SEEN)
        self._see_summed(payload)

    def _see_summed(self, payload: tuple[float, ...]) -> None:
        sums = self._sums
        assert self.model is not None and self.reducer is not None and sums is not None
        outcome = self._see(payload)
        self._summed = SummedStep(outcome, self._option_numbers(), sums.divisor)
        self.model.sync_buffers(outcome.agreement.live, None)
        self.reducer.offer_nothing(outcome.agreement.used)

    def _take_summed_step(self, agreed: SummedStep) -> None:
        """Phases (4) and (5)."""
        assert self.reducer is not None
        self.reducer.check_unchanged()
        self._check_uncleared(agreed.outcome.agreement.used)
        # The ranks have agreed on the step with those.
        if self._option_numbers() != agreed.options:
            raise RuntimeError(
                "options of the optimizer were changed between the last batch of a step of "
                "ctx.steps and optimizer.step(), when the ranks had agreed on the step. Set "
                "them, or step the schedule, after optimizer.step()"
            )
        self._summed = None
        try:
            if not agreed.is_applied:
                gathers = self._apply(agreed.outcome, agreed.divisor)
                for gather in gathers:
                    gather.wait()
                if self._recovery is not None and gathers:
                    # One operation tells for all before it, as they run in order.
                    gathers[-1].work.wait_on_host()
                self.shard.parameters_have_come = True
        except Exception as error:
            self.wait_for_next_generation(error)
        self.faults.reach(Instant.STEPPED)
        self._has_stepped()

    def _check_uncleared(self, used: Sequence[bool]) -> None:
        """Raise RuntimeError if the program has cleared the gradient of a parameter that the step
        will change. used: by parameter of the model."""
        assert self.reducer is not None
        gradients = self.reducer.gradients
        stepped = {id(p) for options in self.optimizer.param_groups for p in options["params"]}
        for name, parameter, is_used in zip(
            gradients.names, gradients.parameters, used, strict=True
        ):
            if is_used and parameter.grad is None and id(parameter) in stepped:
                raise RuntimeError(
                    f"the gradient of parameter {name} was cleared between the last batch of a "
                    "step of ctx.steps and optimizer.step(), when the ranks had agreed to step "
                    "the parameter. Call zero_grad() after optimizer.step(). To leave a parameter "
                    "out of a step, freeze it with requires_grad_(False) before the loop over the "
                    "step's batches, or use a plain optimizer"
                )

    # -- recovery (recovery/recovery.py) ---------------------------------------------------------

    @property
    def progress(self) -> OptimizerProgress:
        return self._seen

    @torch.no_grad()
    def catch_up(self, decided: OptimizerProgress) -> None:
        """Take the step whose ballot other ranks have seen, as far as this rank can alone."""
        # No rank can have seen a ballot that this one has not come to: an optimizer that was just
        # made again is not late, it has yet to get its state.
        is_behind = self._seen.ballots < decided.ballots == self._ballot_of_step
        if self._sums is not None:
            if is_behind:
                self._see_summed(decided.payload)
            if self._summed is not None and not self._summed.is_applied:
                self._summed.is_applied = True
                self._apply_alone(self._summed.outcome, self._summed.divisor)
        elif is_behind:
            self._apply_alone(self._see(decided.payload))

    def _apply_alone(self, outcome: Outcome, divisor: float | None = None) -> None:
        with contextlib.suppress(CollectiveError):  # The group of the gathers has ended.
            self._apply(outcome, divisor)

    def take_place(
        self, progress: OptimizerProgress, last_live: tuple[int, ...], changes: Changes
    ) -> None:
        """This rank comes to others between two steps, and is where they are."""
        self._seen, self.last_live = progress, last_live
        self._ballot_of_step = progress.ballots
        # The state that it gets has them, and the next ballot compares them.
        self.state_changes.own = changes

    def move_to(self, group: Group) -> None:
        """Continue in a group of the same ranks, at the beginning of a step; the shards stay."""
        self.shard.group = group
        self._ballot.move_to(group)

    def leave_run(self) -> None:
        """The run in which the optimizer was made is over, and with it the run's recovery."""
        # A later run has a recovery of its own, which does not know this optimizer.
        self._recovery = None

    @torch.no_grad()
    def take_over(
        self,
        held: ShardState,
        inventories: Sequence[Inventory],
        progress: OptimizerProgress,
    ) -> int:
        """Take over the state of an earlier optimizer with the same layout. Called on all ranks
        before the first step. Returns the bytes that this rank sent.

        held: this rank's part of the earlier state.
        inventories: of the earlier state, by rank.
        progress: of the earlier optimizer.
        """
        assert self.reducer is not None
        self.faults.reach(Instant.MOVE)
        self._seen = progress
        self._ballot_of_step = progress.ballots
        self.state_changes.forget()
        if self.model is not None:
            self.model.buffers.synced_step = progress.ballots
        sent_bytes = self.shard.complete(held, inventories, self.group)
        self.shard.recut(self.group, self.reducer.buckets, self.optimizer.param_groups, held)
        self.shard.gather()
        return sent_bytes

    @torch.no_grad()
    def change_group(self, group: Group, held: ShardState) -> None:
        """Continue as a rank of another group. held: the state that this rank will keep there."""
        assert self.reducer is not None
        self.reducer.change_group(group)
        self.shard.recut(
            group,
            self.reducer.buckets,
            self.optimizer.param_groups,
            held,
            # A rank without data does not run the body, and a worker that comes has run nothing.
            keeps_parameters=group.rank in self.last_live,
        )
        self._make_ballot()
        self.consolidated = None
