"""`DistributedDataParallel`: the same model on every rank, with the mean gradient of all.

A user holds, calls and joins a `DistributedDataParallel`, which has torch's public names and a few
more. All other operations on a model (reduce more parameters, continue in another group, end a step
once more) are methods of its `ModelEngine`, which recovery, sharded optimizers and checkpoints use.
"""

from __future__ import annotations

import contextlib
import copy
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import torch
from torch._compile import _disable_dynamo
from torch.nn.parallel.distributed import _MixedPrecision
from torch.utils.weak import WeakIdKeyDictionary

from chorusline.actors.errors import ends_a_generation
from chorusline.collectives.contract.argument_kinds import check_kinds
from chorusline.collectives.contract.call_site import users_level
from chorusline.collectives.contract.errors import CollectiveMismatch, listed, name_ranks
from chorusline.collectives.contract.torch_hints import TOO_MANY, says
from chorusline.collectives.diagnosis.debug import DebugLevel, get_debug_level
from chorusline.collectives.group import Group
from chorusline.collectives.objects.blocking import all_gather_object, all_gather_row

from ..join.engine import GroupJoinable, Joinable, JoinEngine
from ..join.error_notes import flags_of_number
from ..join.join import Join
from ..join.join_hook import JoinHook
from ..join.pass_pattern import PassPattern
from ..process.agreement import Agreement, Note
from ..process.between_runs import between_runs
from ..process.option_numbers import numbers_of, set_numbers, weight_of
from ..process.running import current_group, recovery_of
from ..process.sharded_tensors import is_dtensor
from ..process.step_boundary import boundary
from .buffers import Buffers
from .gradients.comm_hooks import CommHook
from .gradients.earlier_passes import Pass
from .gradients.gradient_bucket import GradientBucket
from .gradients.held_gradients import ClearPattern
from .gradients.local_steps import keeps_state
from .gradients.reducer import Reducer
from .gradients.reductions import why_not_sharded
from .gradients.step_statistics import StepClock, StepStatistics, tell_beginning, tell_choice
from .mixed_precision import cast_buffers, dtype_options, reducing_in, run_in
from .model_steps import ModelSteps, StepEnder
from .outputs import tensors_of
from .same_model import (
    broadcast_tensors,
    check_devices,
    check_have_values,
    check_layouts,
    check_same_model,
    check_wrapping,
    ignored_in,
    unlike_values,
    warn_of_forward_passes_that_write,
)
from .sync_batch_norm import SyncBatchNorm
from .unreduced_steps import UnreducedSteps

_INSTEAD = {
    "process_group": "write group",
    "join_process_group": "write join_group",
    "device": "write group.device",
    "device_ids": "write group.device: a rank owns one device",
    "output_device": "write group.device: a rank owns one device",
    "device_type": "write group.device.type",
    "find_unused_parameters": "unused parameters need no flag",
    "static_graph": "write DistributedDataParallel(module, static_graph=True)",
    "_set_static_graph": "write DistributedDataParallel(module, static_graph=True)",
    "bucket_bytes_cap": "write DistributedDataParallel(module, bucket_cap_mb=25), in MiB",
    "_get_ddp_logging_data": "write statistics()",
    "logger": "write statistics()",
    "reducer": "write statistics() for its buckets and times",
    "_register_builtin_comm_hook": "write register_comm_hook(None, hook), with a hook of "
    "torch.distributed.algorithms.ddp_comm_hooks.default_hooks",
    "_register_fused_optim": "leave it out: a step inside the backward pass gained nothing",
}
"""By attribute of torch's DistributedDataParallel, what to write here."""


def engine_of(model: DistributedDataParallel) -> ModelEngine:
    """The engine of a model, for recovery, sharded optimizers and checkpoints."""
    return model._engine


class DistributedDataParallel(torch.nn.Module, GroupJoinable):
    """A module whose gradients are the mean over all ranks, as in torch.nn.parallel.

        model = cl.DistributedDataParallel(net, group)  # In a train function, without a group.
        model(torch.ones(2, 8)).mean().backward()

    module: the same on all ranks; it starts from rank 0's parameters and buffers.
    group: the ranks that reduce gradients; default: the session's group.
    bucket_cap_mb: the size of a bucket of gradients, in MiB.
    broadcast_buffers: after each synchronised step all ranks copy the buffers of one rank: rank 0,
        or, inside Join, the highest rank that took the step.
    static_graph: a parameter may get several gradients in one backward pass, the same number in
        every pass, as with reentrant checkpoints that share it.
    find_unused_parameters: no effect. A parameter without a gradient on this rank counts as zero
        if another rank has a gradient for it; else it keeps none.
    gradient_as_bucket_view: no effect; `.grad` is always a view of a bucket.
    device_ids, output_device: no effect, at most one device; the module stays where it is. Its
        trainable parameters are on the group's device, and the others and its buffers on any.
    skip_all_reduce_unused_params: no effect.
    mixed_precision: torch's `_MixedPrecision`. A forward pass computes in `param_dtype`, on copies
        of the parameters and inputs; `buffer_dtype` converts the buffers for good; `reduce_dtype`
        sends the gradients in it, as a communication hook does, and None in the parameters' own.

    Raises ValueError for a module without trainable parameters, and for trainable ones that are not
    all on the group's device; CollectiveMismatch, on all ranks, if the models differ, naming the
    first parameter that differs.
    """

    @torch.inference_mode(False)  # Tensors that it makes are written later, outside of that mode.
    @torch.no_grad()
    @says(
        process_group="write group=, with a chorusline Group",
        dim="batches are split before forward() is called; leave it out",
        check_reduction="leave it out",
        init_sync="all ranks start from rank 0's parameters; leave it out",
        device_mesh="write group=, with a chorusline Group",
        delay_all_reduce_named_params="leave it out: buckets follow the order in which gradients "
        "come, and static_graph=True waits for a parameter's several gradients",
        param_to_hook_all_reduce="leave it out, with delay_all_reduce_named_params",
        bucket_cap_mb_list="write bucket_cap_mb=, the size of all buckets",
        batched_grad_copy="leave it out: gradients move into their buckets as they come",
        forward_sync_buffers="write broadcast_buffers=, for after the step: the next forward pass "
        "then begins with equal buffers",
        **{TOO_MANY: "pass the arguments after the group by name"},
    )
    def __init__(
        self,
        module: torch.nn.Module,
        group: Group | None = None,
        *,
        bucket_cap_mb: float = 25.0,
        broadcast_buffers: bool = True,
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = True,
        static_graph: bool = False,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        skip_all_reduce_unused_params: bool = False,
        mixed_precision: _MixedPrecision | None = None,
    ) -> None:
        super().__init__()
        check_wrapping(module, group)
        check_kinds(DistributedDataParallel.__init__, locals())
        if device_ids is not None and len(device_ids) > 1:
            raise ValueError(
                f"device_ids has {len(device_ids)} devices, but a rank owns one: start a "
                "worker for each device (num_workers), and leave device_ids out"
            )
        precision = dtype_options(mixed_precision)
        # Frozen ones get no gradient; `reduce_unfrozen` adds those that are unfrozen later.
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        if not named:
            raise ValueError(
                "DistributedDataParallel is not needed when a module doesn't have any parameter "
                "that requires a gradient."
            )
        if any(map(torch.nn.parameter.is_lazy, [*module.parameters(), *module.buffers()])):
            raise RuntimeError(
                "Modules with uninitialized parameters can't be used with "
                "`DistributedDataParallel`. Run a dummy forward pass to correctly initialize the "
                "modules"
            )
        if bucket_cap_mb <= 0:
            raise ValueError(f"bucket_cap_mb must be positive, got {bucket_cap_mb}")
        ignored = ignored_in(module)
        self.module = module
        group = group if group is not None else current_group()
        check_devices(named, group)
        parameters, buffers = list(module.named_parameters()), list(module.named_buffers())
        for kind, tensors in (("parameter", parameters), ("buffer", buffers)):
            check_have_values(kind, tensors, group)
            check_layouts(kind, tensors)
        warn_of_forward_passes_that_write(module, group)
        if mixed_precision is not None and mixed_precision.buffer_dtype is not None:
            cast_buffers(module, mixed_precision.buffer_dtype)
        bucket_bytes = int(min(bucket_cap_mb, 1 << 40) * (1 << 20))
        settings = {
            "bucket_cap_mb (in bytes)": bucket_bytes,
            "broadcast_buffers": bool(broadcast_buffers),
            "static_graph": bool(static_graph),
            **precision,
        }
        # A loss from here on finds a function that has begun to make its objects, and may begin
        # afresh.
        if (recovery := recovery_of(group)) is not None:
            recovery.makes_model()
        check_same_model("DistributedDataParallel", parameters, group, buffers, settings, ignored)
        # Running statistics that do not travel are not kept for recovery either.
        self._norms_check = recovery is not None and not broadcast_buffers
        self._sync_norms = _sync_norms(module, group, self._norms_check)
        self._norms_group = group
        self._hooked = WeakIdKeyDictionary()
        """Outputs that outlive a pass, such as a parameter, have had the hook since the first."""
        state = [*module.parameters(), *module.buffers()]
        # After the comparison: a model that differs gets an error, and not another one's values.
        broadcast_tensors([tensor.detach() for tensor in state], 0, group)
        self._reducer = reducer = Reducer(
            named,
            group,
            bucket_bytes,
            has_repeats=static_graph,
            on_backward_begin=self._on_backward_begin,
            on_backward_end=self._on_backward_end,
            on_agreement=self._on_agreement,
            has_next=self._has_next,
            join=self._vote_flags,
            is_uneven=lambda: self._join is not None,
            when_sent=self._when_sent,
            together=self._together,
            steps_along=lambda: self._join is not None and self._join.steps_along(self),
            cursors=recovery.cursors if recovery is not None else None,
        )
        if get_debug_level() >= DebugLevel.INFO:
            reducer.clock = StepClock(group.rank, reducer.gradients.names)
            tell_beginning(module, group, named, **settings)
            tell_choice(reducer.buckets, group.rank, reducer.gradients.names)
        self._engine = ModelEngine(self, module, reducer, broadcast_buffers=broadcast_buffers)
        self.mixed_precision = mixed_precision
        if mixed_precision is not None and mixed_precision.reduce_dtype is not None:
            reducer.reduce_by(reducing_in(mixed_precision.reduce_dtype, lambda: reducer.group))

    @property
    def group(self) -> Group:  # type: ignore[override]
        """The group that reduces gradients; it changes when the run continues with other ranks."""
        return self._engine.group

    @property
    def broadcast_buffers(self) -> bool:
        """Whether all ranks copy the buffers of one rank after a step, as it was passed."""
        return self._engine.buffers.travel

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            instead = _INSTEAD.get(name, "")
            if (
                not instead
                and not name.startswith("_")
                and hasattr(self._modules.get("module"), name)
            ):
                instead = f"write model.module.{name}"
            if not instead:
                raise
            raise AttributeError(f"{error}: {instead}", name=name, obj=self) from None

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        began_at = self._before_forward()
        if self.mixed_precision is None or self.mixed_precision.param_dtype is None:
            output = self.module(*inputs, **kwargs)
        else:
            output = run_in(self.mixed_precision.param_dtype, self.module, inputs, kwargs)
        self._after_forward(output, began_at)
        return output

    @_disable_dynamo
    def _before_forward(self) -> float:
        """Returns the time at which the module begins."""
        boundary().begin_forward(trains=self.module.training)
        self._reducer.forget_failed_pass()
        # Ranks without data hear that a step begins, and shadow it.
        if self._join is not None:
            self._join.notified(self)
        # Not a validation between two steps: the body may write buffers after it.
        begins_step = torch.is_grad_enabled() or self.module.training
        self._engine.buffers.begin_forward(begins_step=begins_step)
        # In a step of ctx.steps a rank may have no forward pass, so there it is done as it begins.
        if torch.is_grad_enabled():
            self._engine.steps.begin_forward()
        if torch.is_grad_enabled() and self._engine.steps.plan is None:
            self._engine.reduce_unfrozen()
            self._engine.reduce_grown()
        self._bind_norms()
        boundary().draws_begin()
        return time.monotonic()

    @_disable_dynamo
    def _after_forward(self, output: Any, began_at: float) -> None:
        boundary().draws_end()
        if self._reducer.clock is not None:
            self._reducer.clock.forward_ran(began_at)
        self._begin_backward_at(output)

    def _begin_backward_at(self, output: Any) -> None:
        """A backward pass that reaches a tensor of `output` is one of this model."""
        for leaf in tensors_of(output):
            # A tensor without a gradient is never reached by a backward pass.
            if leaf.requires_grad:
                if leaf.is_leaf and leaf in self._hooked:  # A parameter, returned once more.
                    continue
                leaf.register_hook(lambda _: self._reducer.output_has_gradient())
                if leaf.is_leaf:
                    self._hooked[leaf] = True

    def __reduce_ex__(self, protocol: object) -> Any:
        raise TypeError(
            "a DistributedDataParallel belongs to its group and cannot be copied or pickled; copy "
            "model.module (copy.deepcopy(model.module), AveragedModel(model.module)), or save "
            "model.state_dict()"
        )

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """What `double()`, `to(...)` and their like do. Raises TypeError, and changes nothing, for
        another dtype or device: gradients travel in buckets of the dtype and device at wrapping."""
        for dtype, device in {(p.dtype, p.device) for p in self._reducer.parameters}:
            after = fn(torch.empty(0, dtype=dtype, device=device))
            if (after.dtype, after.device) != (dtype, device):
                raise TypeError(
                    f"the parameters of a DistributedDataParallel cannot become {after.dtype} on "
                    f"{after.device}; they are {dtype} on {device}, and their gradients travel in "
                    "buckets that were made when the module was wrapped. Convert the module before "
                    "that, as in DistributedDataParallel(module.double())"
                )
        converted: Self = super()._apply(fn, recurse)
        return converted

    def _bind_norms(self) -> None:
        """Bind the layers to a new generation's group; a collective, if there is one."""
        # Asked in each pass, as a pass may be the first of a generation.
        if self._norms_group is not self.group:
            self._norms_group = self.group
            for norm in self._sync_norms:
                norm.bind(self.group, checks_at_once=self._norms_check)

    def register_comm_hook(
        self, state: object, hook: Callable[[Any, Any], torch.futures.Future[Any]]
    ) -> None:
        """Let `hook(state, bucket)` reduce the gradients: a hook from torch, or your own.

        hook: takes a `GradBucket`, and returns a future of its gradients, reduced and divided
        (comm_hooks.py). All ranks register the same hook, once, between two steps. Inside Join a
        rank without data calls the hook with zeros.

        Raises TypeError for a hook that is not callable; RuntimeError for a second hook, and inside
        Join; CollectiveMismatch, on all ranks, if their hooks differ; ValueError under a
        ZeroRedundancyOptimizer that shards the gradients.
        """
        if not callable(hook):
            raise TypeError("Communication hook must be callable.")
        registered = CommHook(state, hook)
        if self._reducer.hook is not None:
            raise RuntimeError(
                f"register_comm_hook can only be called once: {self._reducer.hook.name} is "
                "registered already"
            )
        # A rank without data runs no body, and would not register it.
        if self._join is not None:
            raise RuntimeError("register_comm_hook cannot be called inside Join; call it before")
        # A rank would keep one part of what the hook has reduced as a whole.
        if self._reducer.is_sharded:
            raise ValueError(why_not_sharded(registered.name))
        registered.check_same(self.group)
        self._reducer.reduce_by(registered)

    def statistics(self) -> StepStatistics:
        """The average times of the last hundred steps on this rank, in seconds.

        With a communication hook, the communication time ends when its last future has been
        waited for.
        Raises RuntimeError if the model was made below debug level INFO: its steps are not timed.
        """
        if self._reducer.clock is None:
            raise RuntimeError(
                "steps are timed at debug level INFO and above; set CHORUSLINE_DEBUG=INFO, or call "
                "set_debug_level(DebugLevel.INFO) before the model is wrapped"
            )
        return self._reducer.clock.average(self._reducer.buckets)

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self._reducer.held.was_cleared(to_none=set_to_none)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context manager in which backward passes only accumulate gradients on this rank; the next
        backward pass outside reduces the sum.

        Raises RuntimeError inside a Join with your own joinables, unless Join gets groups=[…].
        """
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether a backward pass reduces gradients; `no_sync` sets it to False, and so may a
        program, which then sets it to True for the last pass of a step."""
        return self._reducer.is_syncing

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, requires: bool) -> None:
        if not requires and self._join is not None and self._join.takes_forward_for_step:
            raise RuntimeError(
                "no_sync() does not work in a Join with your own joinables, because a rank "
                "without data counts each forward pass as a step. Give Join a group to follow, "
                "groups=[…]; then each joinable's part of a step is announced"
            )
        self._reducer.is_syncing = bool(requires)

    @_disable_dynamo
    def weigh(self, loss: torch.Tensor, weight: float | torch.Tensor) -> torch.Tensor:
        """`loss * weight`; the sum over all ranks is then divided by the sum of all weights.

        loss: a mean over a number of samples or tokens that may differ between ranks.
        weight: that number; then the gradient is the mean over all samples of all ranks.
        Every rank that takes the step calls it, for every loss on which it runs backward. The
        weight counts once, in the first backward pass that comes from the result to parameters: a
        loss on which backward never runs adds no weight.

        Raises TypeError for a weight that is no number; ValueError for one that is negative or not
        finite; RuntimeError with a communication hook.
        """
        number = weight_of(
            weight, "weigh() takes a number of samples or tokens, such as len(batch)"
        )
        if self._reducer.hook is not None:
            raise RuntimeError(
                "weigh() does not work with a communication hook: the hook divides the gradients "
                "itself, by the number of ranks, before the weights of all ranks are known. Use "
                "only one of the two"
            )
        weighted = loss * (weight if isinstance(weight, torch.Tensor) else number)
        if weighted.requires_grad:
            reducer, waiting = self._reducer, [number]
            weighted.register_hook(lambda _: reducer.held.weigh(waiting))
        return weighted

    # -- Join ----------------------------------------------------------------------------------

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
        **options: Any,
    ) -> Join:
        """A `Join` of this model alone, as in torch; options: the others of `Join`, such as
        step_along=[optimizer]."""
        return Join(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
            **options,
        )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        hook = self._reducer.hook
        if hook is not None and not kwargs.get("divide_by_initial_world_size", True):
            raise ValueError(
                "divide_by_initial_world_size=False does not work with the communication hook "
                f"{hook.name}: it divides by the number of all ranks, before it is known which "
                "ranks have data. Leave divide_by_initial_world_size=True"
            )
        if hook is not None and hook.trains_apart:
            raise ValueError(
                f"Join does not work with the communication hook {hook.name}: after its first "
                "steps each rank has parameters of its own, and those of the last rank with data "
                "would replace all others. Give all ranks the same number of batches, without "
                "Join"
            )
        return _ModelHook(self)

    def _ends_step(self) -> bool:
        return not self._reducer.is_sharded

    def _attach(self) -> None:
        # Layers that were added since the last pass: here every rank is, also one without data. A
        # sharded optimizer reduces them in `add_param_group`.
        if not self._reducer.is_sharded:
            self._engine.reduce_grown(begins_join=True)

    def _begins_passes(self) -> bool:
        return True

    def _is_training(self) -> bool:
        # The flags of the layers decide whether they share statistics, and `model.eval()` followed
        # by `net.train()` leaves the wrapper's own flag as it was. The module's flag counts as
        # well: a step of a model whose layers are all frozen needs a batch too.
        return self.module.training or any(norm.training for norm in self._sync_norms)

    def _groups_to_follow(self) -> Sequence[Group]:
        self._bind_norms()
        groups = [norm.group for norm in self._sync_norms if norm.group]
        return [group for group in dict.fromkeys(groups) if group.size > 1]

    def _on_backward_begin(self) -> None:
        if self._join is None:
            return
        self._join.check_may_begin(self)
        reducer = self._reducer
        if not reducer.is_sharded and not reducer.ends_steps and reducer.num_in_step:
            self._check_second_pass(self._join)

    def _check_second_pass(self, join: JoinEngine) -> None:
        """Raises RuntimeError for a second pass before `step()` of an optimizer that shards whole
        parameters: a rank without data would hold the ballot by then."""
        absent = [rank for rank in range(self.group.size) if rank not in join.last_step_live]
        if join.last_step_live and absent:
            raise RuntimeError(
                "a second backward pass before optimizer.step(), but "
                f"{name_ranks(absent, 'has', 'have')} run out of data, and a rank without data "
                "takes part in only one pass per step of an optimizer that is sharded by whole "
                "parameters. Run all passes of a step except the last in model.no_sync()"
            )

    def _when_sent(self) -> Pass:
        """When the pass that has begun sends its gradients."""
        join = self._join
        if join is not None and self._reducer.is_sharded and not join.expects_pass_of(self):
            return Pass.KEEPING
        # A launch that blocks until all ranks launch must not come early: other ranks may wait for
        # this rank's statistics in the backward pass, or for their announcement in a Join.
        has_others = bool(self._sync_norms) or (join is not None and join.is_following)
        # One pass may reduce several models. Where a rank leaves out a parameter, its bucket is
        # complete later than on other ranks: so buckets of one model must not come between those of
        # another, nor the models of a pass in the order of their first gradients. In the pass of a
        # checkpointed segment autograd does not say which models the pass around it comes to.
        order = self._together()
        place = order.index(self._reducer)
        is_one_of_several = (
            (join is not None and join.has_several_models)
            or (place > 0 and self._reducer.is_nested)
            or any(one.may_send() for one in order[:place])
            or any(one.is_sending for one in order[place + 1 :])
        )
        is_late = is_one_of_several or (has_others and self.group.waits_on_issue)
        return Pass.SENDING_AT_END if is_late else Pass.SENDING

    def _together(self) -> Sequence[Reducer]:
        # A rank without data shadows the models of a Join in the order in which the body has them.
        if self._join is not None and self._join.has_several_models:
            return [self._reducer]
        # The last one was mostly made to follow the others, so that its gradients come first.
        return [engine.reducer for engine in reversed(between_runs().models_of(self.group))]

    def _vote_flags(self) -> int:
        return super()._vote_flags() or flags_of_number(self._reducer.number, self.group.generation)

    def _on_backward_end(self) -> None:
        if self._join:
            self._join.begin_hook(self)

    def _check_joined_with(self, joinables: Sequence[Joinable]) -> None:
        if self._reducer.is_sharded and not any(
            other._finishes_steps_of(self._reducer) for other in joinables
        ):
            raise ValueError(
                "a ZeroRedundancyOptimizer finishes the steps of this model, so Join must list "
                "the optimizer too: Join([model, optimizer]). For a plain optimizer in its place "
                "wrap the module again, DistributedDataParallel(model.module)"
            )

    def _on_agreement(self, agreement: Agreement) -> float:
        """Called when all gradients of a step are reduced; returns their divisor."""
        self._engine.sync_buffers(agreement.live, self._join)
        if agreement.says(Note.COMPARES) == len(agreement.live) > 1:
            self._engine.warn_of_drift(agreement.live, f"in step {self._reducer.num_agreed}")
        self._engine.compare_samples(agreement)
        # After that: a step whose buffers are not synchronised is not agreed on here.
        self._step_agreed(
            agreement, self._engine.recovery, ends_step=self._reducer.ends_steps, counts=False
        )
        return self._divisor(agreement)


def _unlike_parameter(
    module: torch.nn.Module, group: Group, ranks: Sequence[int] = ()
) -> tuple[str, list[int]] | None:
    """The first parameter that is not the same on these ranks, and those where it is not the first
    one's; None if all are. ranks: default: all."""
    named = dict(module.named_parameters())
    found = unlike_values([p.detach() for p in named.values()], group, ranks)
    return None if found is None else ([*named][found[0]], found[1])


class _ModelHook(JoinHook):
    def __init__(self, model: DistributedDataParallel) -> None:
        self._model = model

    @torch.no_grad()
    def main_hook(self) -> None:
        """Shadow the gradients. A sharded step ends in the optimizer's hook, which runs next."""
        model = self._model
        assert model._join is not None
        model._engine.reduce_unfrozen()
        model._engine.reduce_grown()
        model._reducer.shadow()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Copy the state of a last joiner to the ranks that joined earlier, and did not step."""
        model = self._model
        assert model._join is not None
        ledger = model._join.ledger
        last = model._join.last_step_live
        if model._reducer.is_sharded and last and model.group.rank not in last:
            model._reducer.leave_shadows()
        state: list[torch.Tensor] = []
        if ledger.somebody_missed_a_step and model._join.settles(model):
            self._settle(model._join)
        if ledger.somebody_missed_a_step:
            self._check_same_values(model._join)
        elif ledger.may_have_written_alone(is_sharded=model._reducer.is_sharded):
            self._check_written_alike()
        elif model._reducer.ends_steps and not self._ranks_have_changed:
            with self._until_ranks_change():
                model._engine.warn_of_drift(range(model.group.size), "at the end of a Join")
        if not model._reducer.is_sharded:
            # A rank that steps along takes the steps of the others, or is told that it does not.
            misses = not model._join.steps_along(model)
            num_missed = max(ledger.steps_taken) - ledger.steps_taken[model.group.rank]
            num_missed *= misses
            steps, lacks_state = model._reducer.local_steps, False
            if ledger.somebody_missed_a_step:
                follows = num_missed > 0 and not steps.has_stepped_along
                lacks_state = self._follow_settings(model._join, follows=follows)
            optimizers = [] if lacks_state else model._engine.optimizers()
            somebody_missed = misses and ledger.somebody_missed_a_step
            steps.leave_join(num_missed, optimizers, somebody_missed=somebody_missed)
            if somebody_missed:
                model._reducer.missed_until = model._reducer.num_agreed
        if ledger.somebody_may_lag:
            self._follow_frozen(model._join)
        if model._reducer.is_sharded:
            if ledger.somebody_may_lag:
                self._take_written(model._join)
        elif ledger.somebody_missed_a_step:
            model._reducer.take_means_of(model._join.newest_rank(ledger.last_live))
            state += model.module.parameters()
        # A step brings the buffers of its newest rank, but none follows the last passes.
        if ledger.somebody_may_lag or not model.broadcast_buffers:
            state += model.module.buffers()
        if state:
            root = model._join.newest_rank(ledger.last_live)
            broadcast_tensors([tensor.detach() for tensor in state], root, model.group)
            if model._engine.recovery is not None:
                model._engine.recovery.has_taken_over()

    def _check_same_values(self, join: JoinEngine) -> None:
        """Raises CollectiveMismatch, on all ranks, if they have stepped to other parameters."""
        model, reducer = self._model, self._model._reducer
        # Else joined ranks take no steps, and copy the parameters of a rank that does.
        is_listed = reducer.is_sharded or join.steps_along(model)
        if not (is_listed or join.has_followers) or join.ledger.began_earlier:
            return
        if self._ranks_have_changed:
            return
        found, steps_along = None, True
        with self._until_ranks_change():
            if not is_listed:  # A function in step_along may step an optimizer.
                taken = join.ledger.steps_taken
                has_stepped = reducer.local_steps.has_stepped_along
                everybody = all_gather_row(model.group, [int(has_stepped)])
                missed = [one for (one,), n in zip(everybody, taken, strict=True) if n < max(taken)]
                steps_along = all(missed)
            if steps_along and not reducer.is_sharded:
                reducer.local_steps.compare(model.group)
            # Parameters that no function steps are copied; what was averaged of them is not.
            found = self._unlike_values(join) if steps_along else self._unlike_average(join)
        if found is None:
            return
        name, rank, unlike = found
        joined = [r for r in range(model.group.size) if r not in join.ledger.last_live]
        raise CollectiveMismatch(
            "Join",
            model.group.generation,
            unlike,
            f"{name} differs between rank {rank} and {name_ranks(unlike)}"
            + (f"; {name_ranks(joined)} had no data for the last step" if joined else ""),
            "What changes parameters, gradients, or an optimizer's state must do the same on all "
            "ranks. Ranks that have run out of data do not run the loop's body (clipping, clamping "
            "weights, optimizer.state.clear()), but only what step_along lists: put it in a "
            "function, together with the optimizer.step() before or after it, call that in the "
            "body, and list it in place of both, Join(..., step_along=[function]). For gradients "
            "that a GradScaler has scaled, use a ZeroRedundancyOptimizer.",
        )

    def _check_written_alike(self) -> None:
        """Raises CollectiveMismatch, on all ranks, if the body has written parameters, and no step
        has brought them to the ranks that had less data."""
        if self._ranks_have_changed:
            return
        model, found = self._model, None
        with self._until_ranks_change():
            found = _unlike_parameter(model.module, model.group)
        if found is not None:
            name, unlike = found
            raise CollectiveMismatch(
                "Join",
                model.group.generation,
                unlike,
                f"parameter {name} differs between rank 0 and {name_ranks(unlike)} at the end, and "
                "the ranks have agreed on no step in the last batches",
                "What the loop's body writes to parameters reaches ranks that have run out of data "
                "with the next step of a rank that has some. Without a step, write them before or "
                "after the Join, on all ranks alike (load_state_dict(), clamping weights). What "
                "torch.autograd.grad returns is a rank's own gradient, by which an optimizer steps "
                "each rank differently: call backward() on an output of the model.",
            )

    def _take_written(self, join: JoinEngine) -> None:
        """A rank without data has taken all sharded steps. It lacks what the body of the others has
        written to parameters since the last one, and to frozen ones at any time."""
        if self._ranks_have_changed:
            return
        model, ledger = self._model, join.ledger
        with self._until_ranks_change():
            if ledger.ran_after_last_step:
                model._engine.warn_of_drift(ledger.last_live, "at the end of a Join")
            broadcast_tensors(
                [parameter.detach() for parameter in model.module.parameters()],
                join.newest_rank(ledger.last_live),
                model.group,
                on_host=model._engine.recovery is not None,
            )

    @property
    def _ranks_have_changed(self) -> bool:
        """Whether another rank may have been at the end of the Join when the ranks changed, and be
        through."""
        recovery = self._model._engine.recovery
        return recovery is not None and recovery.has_gone_on

    @contextlib.contextmanager
    def _until_ranks_change(self) -> Iterator[None]:
        """What compares or copies only, and is left where a rank is lost: the next step, or the end
        of the function, recovers."""
        try:
            yield
        except Exception as error:
            if self._model._engine.recovery is None or not ends_a_generation(error):
                raise

    def _unlike_values(self, join: JoinEngine) -> tuple[str, int, list[int]] | None:
        """The first parameter, of the model or of an average, that differs between a rank and other
        ranks which must have the same; None if there is none."""
        reducer, group = self._model._reducer, self._model.group
        everybody = list(range(group.size))
        # Joined ranks take over what the body has written since the last sharded step; only a
        # function that they call for the body may have read, or written, something else.
        takes_over = reducer.is_sharded and not join.runs_functions
        ranks = sorted(join.ledger.last_live) if takes_over else everybody
        found = unlike_values([p.detach() for p in reducer.parameters], group, ranks)
        if found is not None:
            return f"parameter {reducer.gradients.names[found[0]]}", ranks[0], found[1]
        return self._unlike_average(join)

    def _unlike_average(self, join: JoinEngine) -> tuple[str, int, list[int]] | None:
        """As `_unlike_values`, of the averages in step_along alone."""
        group = self._model.group
        for average in join.averages:
            if unlike := _unlike_parameter(average.module, group):
                return f"parameter {unlike[0]} of the average in step_along", 0, unlike[1]
        return None

    def _follow_frozen(self, join: JoinEngine) -> None:
        """A rank without the last batch freezes and unfreezes what the body of the others has."""
        if self._ranks_have_changed:
            return
        group, live = self._model.group, join.ledger.last_live
        parameters = self._model._reducer.parameters
        with self._until_ranks_change():
            flags = all_gather_row(group, [int(one.requires_grad) for one in parameters])
            if group.rank not in live:
                newest = flags[join.newest_rank(live)]
                for parameter, is_trained in zip(parameters, newest, strict=True):
                    parameter.requires_grad_(bool(is_trained))

    def _follow_settings(self, join: JoinEngine, *, follows: bool) -> bool:
        """All ranks have the GradScaler of a rank that took the last step from now on: the
        gradients of one step are a sum, so all losses have to be scaled alike. follows: this rank
        missed steps, and takes over the options that the body of the others has set since.

        Returns whether its optimizers keep no state, and those of that rank have made some."""
        group, scaler = self._model.group, self._model._reducer.local_steps.scaler
        state = None if scaler is None else scaler.state_dict()
        numbers = {id(p): number for number, p in enumerate(self._model.parameters())}
        own: dict[Any, tuple[torch.optim.Optimizer, list[float]]] = {}
        has_state = False
        for one in self._model._engine.optimizers():
            groups = [[numbers.get(id(p), -1) for p in each["params"]] for each in one.param_groups]
            key = type(one).__name__, repr(groups)
            own[key] = one, numbers_of(one.param_groups, sorted(one.defaults))
            has_state = has_state or keeps_state(one)
        numbers_by_key = {key: options for key, (_, options) in own.items()}
        everybody = all_gather_object(group, (state, numbers_by_key, has_state))
        newest_state, newest, keeps = everybody[join.newest_rank(join.ledger.last_live)]
        for key, (one, options) in own.items() if follows else ():
            given = newest.get(key, options)
            # Another number of numbers is named by the vote of the next pass.
            if len(given) == len(options):
                set_numbers(one.param_groups, sorted(one.defaults), given)
        lacks_state = keeps and not has_state
        # The ranks with data step without a GradScaler.
        if newest_state is None:
            return lacks_state
        unknown = [rank for rank, (state, *_) in enumerate(everybody) if state is None]
        if unknown:
            raise CollectiveMismatch(
                "Join",
                group.generation,
                unknown,
                "the optimizer of this model steps by a GradScaler, and "
                f"{name_ranks(unknown)} had no batch to use theirs, so their scale would be "
                "another one from now on",
                "Give every rank a batch, or use a ZeroRedundancyOptimizer and "
                "chorusline.GradScaler, whose steps ranks without data take too.",
            )
        assert scaler is not None
        if state != newest_state:
            scaler.load_state_dict(newest_state)
        return lacks_state

    def _settle(self, join: JoinEngine) -> None:
        """Learn from a rank that took the last step whether a step followed its last pass."""
        group, steps = self._model.group, self._model._reducer.local_steps
        stepped = bool(steps) or steps.were_skipped or not steps.have_been_seen
        has_stepped = torch.tensor([stepped], dtype=torch.int32, device=group.device)
        newest = join.newest_rank(join.ledger.last_live)
        group.broadcast(has_stepped, newest).wait_on_host()  # It is read below.
        join.settle(bool(has_stepped))


def _sync_norms(module: torch.nn.Module, group: Group, checks_at_once: bool) -> list[SyncBatchNorm]:
    """The SyncBatchNorm layers of the module, each bound to its group."""
    found = []
    for name, layer in module.named_modules():
        if isinstance(layer, torch.nn.SyncBatchNorm) and not torch.distributed.is_initialized():
            raise ValueError(
                f"{name or 'the module'} is torch's SyncBatchNorm. Without torch.distributed it "
                "would use the statistics of this rank alone; convert the module with "
                "chorusline.SyncBatchNorm.convert_sync_batchnorm(module)"
            )
        if isinstance(layer, SyncBatchNorm):
            layer.bind(group, checks_at_once=checks_at_once)
            found.append(layer)
    return found


def owner_of(parameters: Sequence[torch.Tensor]) -> ModelEngine | None:
    """The engine whose module has all these parameters and which reduces no others, or None."""
    engines = between_runs().engines
    references = [reference for p in parameters if (reference := engines.get(p))]
    owner: ModelEngine | None = references[0]() if references else None
    if owner is None:
        return None
    given = {id(p) for p in parameters}
    reduced = {id(p) for p in owner.reducer.parameters}
    # Beside what is reduced, parameters of the module may be given that are frozen so far.
    return owner if reduced <= given <= {id(p) for p in owner.module.parameters()} else None


def reducers_of(parameters: Sequence[torch.Tensor]) -> list[Reducer]:
    """What reduces the gradients of these parameters, of whichever models; nothing if one of them
    is in no model."""
    known = between_runs().engines
    engines = [reference() if (reference := known.get(p)) else None for p in parameters]
    reducers = [engine.reducer for engine in engines if engine is not None]
    return list(dict.fromkeys(reducers)) if len(reducers) == len(parameters) else []


def names_of(parameters: Sequence[torch.Tensor]) -> dict[int, str]:
    """By id(), the names of all parameters of the models that reduce any of `parameters`."""
    return {
        id(parameter): name
        for engine in engines_of(parameters)
        for name, parameter in engine.module.named_parameters()
    }


def engines_of(parameters: Sequence[torch.Tensor]) -> list[ModelEngine]:
    """Of all models that reduce any of `parameters`."""
    known = between_runs().engines
    engines = {id(r): r() for p in parameters if (r := known.get(p))}
    return [engine for engine in engines.values() if engine is not None]


@_disable_dynamo
def _has_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Called after each step of an optimizer in this process: the models whose parameters it has
    note that, if their ranks step by themselves."""
    groups = optimizer.param_groups
    known = between_runs().stepped_by.get(optimizer)
    num_parameters = sum([len(options["params"]) for options in groups])
    # A group may have been added since; to compare all parameters would cost time in each step.
    if known is None or known[0] != num_parameters:
        models, beside = _models_of(optimizer), _beside_models(optimizer)
        known = between_runs().stepped_by[optimizer] = num_parameters, models, beside
    _, models, beside = known
    for reference, numbers in models:
        engine = reference()
        # Its own sharded optimizer is the usual case, and the ballot says all of its steps.
        if engine is None or engine.is_sharded_by(optimizer):
            continue
        # Without a gradient a step changes nothing, and no rank need take it.
        if any(p.grad is not None for number in numbers for p in groups[number]["params"]):
            # Named by the first model alone.
            engine.has_stepped(optimizer, numbers, beside if reference is models[0][0] else {})


def _models_of(
    optimizer: torch.optim.Optimizer,
) -> list[tuple[weakref.ref[ModelEngine], list[int]]]:
    """The engines whose models have parameters of the optimizer, and the groups that hold them."""
    engines = between_runs().engines
    found: dict[int, tuple[weakref.ref[ModelEngine], list[int]]] = {}
    for number, options in enumerate(optimizer.param_groups):
        references = {id(r): r for p in options["params"] if (r := engines.get(p))}
        for key, reference in references.items():
            found.setdefault(key, (reference, []))[1].append(number)
    return [*found.values()]


def _beside_models(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """By name, the parameters of the optimizer whose gradients no model reduces."""
    engines = between_runs().engines
    return {
        f"parameter {place} of group {number} of {type(optimizer).__name__}, of shape "
        f"{tuple(p.shape)}": p
        for number, options in enumerate(optimizer.param_groups)
        for place, p in enumerate(options["params"])
        if p not in engines and not is_dtensor(p)
    }


class ModelEngine:
    """The engine of one model on one rank.

    wrapper: the model as the user holds, registers and joins it.
    module: the module that the model wraps.
    reducer: reduces the gradients of the module.
    broadcast_buffers: whether all ranks copy the buffers of one rank after each step.
    """

    def __init__(
        self,
        wrapper: Joinable,
        module: torch.nn.Module,
        reducer: Reducer,
        *,
        broadcast_buffers: bool,
    ) -> None:
        self.wrapper = wrapper
        self.module = module
        self.reducer = reducer
        self.recovery = recovery_of(reducer.group)
        """Takes the model to the next generation; None without recovery, and after the run."""
        is_kept = self.recovery is not None
        self.has_warned_of_drift = False
        self.buffers = Buffers(module, travel=broadcast_buffers, is_kept=is_kept)
        self.steps = ModelSteps(module, reducer, self._begin_step, buffers_travel=broadcast_buffers)
        """The model in the steps of `ctx.steps`."""
        self._frozen = [p for p in module.parameters() if not p.requires_grad]
        # By id(): this engine and its reducer keep all of them.
        self._wrapped = {id(p) for p in module.parameters()}
        self._sharded_by: weakref.ref[object] | None = None  # None: by no optimizer
        # Wrapped again, as for each epoch, or as a part of a larger one, a module is reduced by its
        # newest model alone.
        parts = {id(part) for part in module.modules()}
        for engine in engines_of(reducer.parameters):
            if id(engine.module) in parts:
                engine.release()
        self._own(reducer.parameters)
        between_runs().watch(_has_stepped)
        self._num_registrations = -1
        of_group = between_runs().of_group(reducer.group)
        of_group.num_models += 1
        reducer.number = of_group.num_models - 1
        self._unreduced = UnreducedSteps(reducer.gradients, of_group.num_models)
        between_runs().wrap(self)
        between_runs().models.append(weakref.ref(self))
        if self.recovery is not None:
            self.recovery.watch_model(self)

    @property
    def group(self) -> Group:
        return self.reducer.group

    def _own(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        for parameter in parameters:
            between_runs().engines[parameter] = weakref.ref(self)
        between_runs().stepped_by.clear()

    @property
    def patterns(self) -> tuple[PassPattern | None, ClearPattern]:
        """What the steps of the model usually are: how many passes they have, as its Joins have
        seen it (None before one), and when the program clears the gradients."""
        return copy.copy(self.wrapper._pattern), self.reducer.held.clear_pattern

    @patterns.setter
    def patterns(self, patterns: tuple[PassPattern | None, ClearPattern]) -> None:
        self.wrapper._pattern = copy.copy(patterns[0])
        self.reducer.held.clear_pattern = patterns[1]

    # -- parameters ------------------------------------------------------------------------------

    def check_has(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Raises ValueError for a parameter that the module does not have."""
        own = {id(p) for p in self.module.parameters()}
        for parameter in parameters:
            if id(parameter) not in own:
                raise ValueError(
                    f"a parameter of shape {tuple(parameter.shape)} does not belong to the "
                    "module, so its gradient would not be reduced. Register it in the module, or "
                    "give it an optimizer of its own"
                )

    def was_wrapped_with(self, parameter: torch.nn.Parameter) -> bool:
        """Whether the module had the parameter when it was wrapped."""
        return id(parameter) in self._wrapped

    def reduce_also(self, parameters: Sequence[torch.nn.Parameter]) -> list[GradientBucket]:
        """Reduce the gradients of these parameters too; all ranks call it with the same ones.

        parameters: of the module. Those that the reducer does not have yet start from rank 0's
        values, and their buckets are returned.

        Raises ValueError for a parameter that the module does not have; CollectiveMismatch, on all
        ranks, if the parameters of the ranks differ.
        """
        self.check_has(parameters)
        names = {id(p): name for name, p in self.module.named_parameters()}
        known = {id(p) for p in self.reducer.parameters}
        fresh = [p for p in parameters if id(p) not in known]
        if not fresh:
            return []
        named = [(names[id(p)], p) for p in fresh]
        check_devices(named, self.group)
        # Before the broadcast, so that the error names the parameter that differs.
        check_same_model("DistributedDataParallel", named, self.group)
        broadcast_tensors([p.detach() for p in fresh], 0, self.group)
        self._own(fresh)
        taken = {id(p) for p in fresh}
        self._frozen = [p for p in self._frozen if id(p) not in taken]
        return self.reducer.add_parameters(named)

    def reduce_unfrozen(self) -> None:
        """Reduce parameters too that were frozen when the model was wrapped, and no longer are."""
        # An optimizer that shards the gradients adds them itself, since it lays out its shards.
        if self._frozen and not self.reducer.is_sharded:
            self.reduce_also([p for p in self._frozen if p.requires_grad])

    def why_unfrozen(self) -> str:
        """The error about parameters that are trainable now, and that the sharded optimizer does
        not have; empty if there are none."""
        unfrozen = {id(p) for p in self._frozen if p.requires_grad}
        if not unfrozen:
            return ""
        names = [name for name, p in self.module.named_parameters() if id(p) in unfrozen]
        return (
            "parameters that were frozen when the module was wrapped are trainable now "
            f"({listed(names, 3)}), but the model's "
            "ZeroRedundancyOptimizer does not have them. Call optimizer.add_param_group("
            "{'params': [...]}) on all ranks when you unfreeze them, or make the optimizer with "
            "all parameters, ZeroRedundancyOptimizer(model.parameters(), ...): those that are "
            "frozen are stepped when they are unfrozen"
        )

    def reduce_grown(self, *, begins_join: bool = False) -> None:
        """Reduce the parameters too that the module has got since it was wrapped. Collective, if
        there are any: every rank grows its module before the same forward pass.

        begins_join: no rank has run out of data yet, so all have made the new parameters.

        Raises RuntimeError inside a Join where step_along lists no function that may make them,
        and if a sharded optimizer has not got them.
        """
        num_registrations = between_runs().num_registrations
        # Nothing in this process was registered: the usual case, in each forward pass.
        if num_registrations == self._num_registrations:
            return
        self._num_registrations = num_registrations
        known = {id(p) for p in (*self.reducer.parameters, *self._frozen)}
        fresh = {name: p for name, p in self.module.named_parameters() if id(p) not in known}
        self._frozen += [p for p in fresh.values() if not p.requires_grad]
        grown = {name: p for name, p in fresh.items() if p.requires_grad}
        if not grown:
            return
        self._num_registrations = -1  # Until they are reduced, each forward pass refuses them.
        names = listed(list(grown), 3)
        living = {id(p) for p in self.module.parameters()}
        if any(id(p) not in living for p in self.reducer.parameters):
            raise RuntimeError(
                f"parameters of the module ({names}) were replaced since it was wrapped, as "
                "load_state_dict(assign=True) does, but the optimizer and the reduction still "
                "use the former ones. Load with assign=False, which copies into them, or assign "
                "before DistributedDataParallel(module)"
            )
        if self.reducer.is_sharded:
            raise RuntimeError(
                f"the module has new parameters since it was wrapped ({names}) that its "
                "ZeroRedundancyOptimizer does not step, so the ranks would drift apart. Call "
                "optimizer.add_param_group({'params': [...]}) on all ranks before the next "
                "forward pass"
            )
        join = self.wrapper._join
        if join is not None and not begins_join and not join.runs_functions:
            raise RuntimeError(
                f"the module has new parameters ({names}) inside a Join, but a rank that has run "
                "out of data does not run the code that makes them. Make them in a function that "
                "the body calls and step_along lists, or outside of the Join, on all ranks"
            )
        self.reduce_also(list(grown.values()))
        self._num_registrations = num_registrations

    # -- steps -----------------------------------------------------------------------------------

    def has_stepped(
        self,
        optimizer: torch.optim.Optimizer,
        groups: Sequence[int],
        beside: Mapping[str, torch.Tensor],
    ) -> None:
        """A plain optimizer has stepped, with `groups` of its parameters in this model, and those
        in `beside` in none.

        Raises RuntimeError if a sharded optimizer has the parameters, and where their gradients
        are not yet those of the step: in a backward pass, or in the loop over a step's batches."""
        if not self.reducer.ends_steps:
            self._check_wraps_sharded(optimizer)
            return
        if why := self.reducer.why_no_step(type(optimizer).__name__):
            raise RuntimeError(why)
        self.reducer.has_stepped(optimizer, groups)
        # In a step of ctx.steps `.grad` is the mean, without a pass that sends it.
        if self.steps.plan is None:
            apart = self.reducer.trains_apart
            own = {n: p for n, p in beside.items() if p.grad is not None and not apart}
            self._unreduced.note(optimizer, self.reducer, own)

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The plain optimizers with parameters of this model that have stepped on this rank."""
        stepped = between_runs().stepped_by.items()
        return [one for one, (_, models, _) in stepped if any(ref() is self for ref, _ in models)]

    def leave_steps_to_optimizer(self, optimizer: object, ender: StepEnder | None) -> None:
        """A sharded optimizer ends the steps from now on; a step counts after its ballot. ender:
        its engine, if that takes the sums of the gradients in shards."""
        self._sharded_by = weakref.ref(optimizer)
        self.reducer.ends_steps = False
        self.steps.ender = ender
        self.buffers.count_when_agreed = True

    def _check_wraps_sharded(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises RuntimeError for an optimizer that steps by `.grad`, which is this rank's own."""
        sharded = self._sharded_by() if self._sharded_by is not None else None
        # An optimizer that wraps the sharded one (Lookahead) has let that take the step.
        if sharded is not None and any(one is sharded for one in vars(optimizer).values()):
            return
        name = type(optimizer).__name__
        raise RuntimeError(
            f"{name}.step() has stepped parameters whose model a ZeroRedundancyOptimizer has taken "
            "over: since then `.grad` is the gradient of this rank's own batch, so the parameters "
            f"of the ranks drift apart. Step the ZeroRedundancyOptimizer alone, or use {name} with "
            "a model that was wrapped, DistributedDataParallel(module), for it alone"
        )

    def is_sharded_by(self, optimizer: object) -> bool:
        """Whether no other sharded optimizer has been made over the model since this one."""
        return self._sharded_by is not None and self._sharded_by() is optimizer

    def _begin_step(self) -> None:
        """A step of `ctx.steps` begins. On each rank, even if it gets no micro-batch of it."""
        self.buffers.begin_forward()
        self.reduce_unfrozen()
        self.reduce_grown()

    def sync_buffers(
        self, live: tuple[int, ...], join: JoinEngine | None, *, on_host: bool = False
    ) -> bool:
        """Copy the buffers of rank 0, or inside a Join of a rank that had the newest batch.

        on_host: also on a GPU, return when it is known that the buffers have come.
        Returns whether any were sent.
        """
        if self.steps.is_under_way:  # All ranks have those of the last micro-batch already.
            self.steps.buffers.commit()
            return self.buffers.sync(None, self.group)
        root = None
        if live:
            root = join.newest_rank(live) if join else 0
        return self.buffers.sync(root, self.group, on_host=on_host)

    @torch.no_grad()
    def warn_of_drift(self, ranks: Sequence[int], when: str) -> None:
        """Warn if parameters differ between these ranks, each of which has taken all steps with its
        own copy; collective, where these are several."""
        found = _unlike_parameter(self.module, self.group, ranks) if len(ranks) > 1 else None
        if found is not None:
            self._tell_drift(found[0], ranks[0], found[1], when)

    def compare_samples(self, agreement: Agreement) -> None:
        """The same for what the votes tell of one parameter after the step before; on all ranks."""
        samples = {rank: sample for rank, sample in enumerate(agreement.samples) if sample}
        if len({*samples.values()}) < 2:
            return
        steps, number = self.reducer.local_steps, self.reducer.num_agreed - bool(agreement.live)
        first = min(samples)
        unlike = [rank for rank, sample in samples.items() if sample != samples[first]]
        self._tell_drift(steps.sampled(number)[0], first, unlike, f"after step {number}")

    def _tell_drift(self, name: str, rank: int, unlike: Sequence[int], when: str) -> None:
        """The same on all ranks, of which `rank` warns, once: they stay so."""
        self.reducer.local_steps.takes_samples = False
        reducer, averaged = self.reducer, between_runs().averaged
        # Between two averages they are meant to differ.
        trains_apart = reducer.trains_apart or any(p in averaged for p in reducer.parameters)
        if self.has_warned_of_drift or trains_apart:
            return
        self.has_warned_of_drift = True
        causes = (
            ", although these ranks have taken the same steps: what the program writes to "
            "parameters or gradients is not the same on all ranks, such as weights that one rank "
            "has loaded, a max_norm of its own by which a rank clips, or a hook that steps by this "
            "rank's own gradient"
        )
        if self.reducer.missed_until is not None:
            causes = (
                ": what the program writes to parameters or gradients is not the same on all "
                "ranks. In an earlier Join some ranks had no data for steps of the others. They "
                "got the parameters at its end, but not what the loop's body keeps and writes "
                "beside optimizer.step(), such as slow weights, a moving average or a count of "
                "steps. Keep that in the optimizer (a class derived from torch.optim.Optimizer) "
                "and list it, Join([model], step_along=[optimizer]), or in buffers of the model, "
                "or put it in a function together with the step, call that in the body, and list "
                "the function"
            )
        if self.group.rank == rank:
            warnings.warn(
                f"parameter {name} differs between rank {rank} and {name_ranks(unlike)} {when}"
                f"{causes}. (Only the last bits may also differ by the type of the CPU or GPU.)",
                stacklevel=users_level(),
            )

    @property
    def has_valid_gradients(self) -> bool:
        """Whether this rank's gradients may be used: whether every operation that they may depend
        on has succeeded (statistics of layers, and collectives of the program itself).

        Asked when a generation has ended. On a GPU a backward pass runs to its end even if one of
        these operations was stopped and left arbitrary values.
        """
        norms = [layer for layer in self.module.modules() if isinstance(layer, SyncBatchNorm)]
        groups = [self.group, *(norm.group for norm in norms if norm.group is not None)]
        return not any(group.has_misled for group in groups)

    # -- from one generation, and one run, to the next -------------------------------------------

    def change_group(self, group: Group) -> None:
        """Continue as a rank of another group, also inside a sharded step."""
        if self.group is not group:  # Else its sharded optimizer has changed it.
            self.reducer.change_group(group)

    def move_to(self, group: Group) -> None:
        """Continue in a group of the same ranks, at the beginning of a step."""
        self.reducer.move_to(group)

    def leave_run(self) -> None:
        """Called when the run that made the model is over, and so is its recovery."""
        self.recovery = None
        self.buffers.drop_kept()
        self.reducer.parks = False
        self.reducer.tell_no_samples()
        self.reducer.loosen()

    def release(self) -> None:
        """Stop reducing gradients, so that another model can wrap the same module."""
        self.reducer.release()
        between_runs().drop_model(self)
        engines = between_runs().engines
        for parameter in self.reducer.parameters:
            # Another model may wrap the same module already.
            if parameter in engines and engines[parameter]() is self:
                del engines[parameter]
        between_runs().stepped_by.clear()

    def let_go(self) -> None:
        """Called when the train function was left in the middle of a step: it begins again, perhaps
        with the same module, which must hold no gradients."""
        self.release()
        self.reducer.gradients.drop()
