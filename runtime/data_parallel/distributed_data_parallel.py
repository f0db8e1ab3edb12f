"""`DistributedDataParallel`: one model on every rank, one gradient for all."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from collectives import Group
from collectives.diagnosis.debug import is_informing

from ..join.join import GroupJoinable, Join, Joinable, JoinHook
from ..process.agreement import Agreement
from ..process.between_runs import between_runs
from ..process.running import current_group, recovery_of
from ..process.step_boundary import boundary
from .buffers import Buffers
from .comm_hooks import CommHook
from .gradient_bucket import GradientBucket
from .reducer import Reducer, why_not_sharded
from .replication import broadcast_tensors
from .same_model import check_same_parameters
from .step_statistics import StepClock, StepStatistics, UnusedParameters, tell_choice
from .sync_batch_norm import SyncBatchNorm

_owners: WeakIdKeyDictionary = WeakIdKeyDictionary()  # parameter -> weak reference to its model


def owner_of(parameters: Sequence[torch.Tensor]) -> DistributedDataParallel | None:
    """The model that has all these parameters and reduces no others, if there is one."""
    references = [reference for p in parameters if (reference := _owners.get(p))]
    owner: DistributedDataParallel | None = references[0]() if references else None
    if owner is None:
        return None
    given = {id(p) for p in parameters}
    reduced = {id(p) for p in owner.reducer.parameters}
    return owner if reduced <= given <= {id(p) for p in owner.parameters()} else None


def names_of(parameters: Sequence[torch.Tensor]) -> dict[int, str]:
    """By id() what their modules call them, for those that are in one of ours."""
    models = {id(r): r() for p in parameters if (r := _owners.get(p))}
    return {
        id(parameter): name
        for model in models.values()
        if model is not None
        for name, parameter in model.module.named_parameters()
    }


class DistributedDataParallel(torch.nn.Module, GroupJoinable):
    """A module whose gradients are the mean over all ranks, as in torch.nn.parallel.

    module: the same on all ranks; it starts from rank 0's parameters and buffers.
    group: where gradients are reduced; the session's group by default.
    bucket_cap_mb: MiB of gradients that travel together.
    broadcast_buffers: after each step that is synchronised, all ranks take the buffers of one:
    rank 0, or inside Join the largest rank that took the step.

    static_graph: a parameter may get several gradients in one backward pass, the same number in
    each: reentrant checkpoints that share it.

    find_unused_parameters, gradient_as_bucket_view: accepted from scripts written for torch, and
    without effect. Parameters that took no part in a rank's forward pass need no flag (they count
    as zero where other ranks have a gradient, and keep none where nobody has), and `.grad` is
    always a view of a bucket.

    device_ids, output_device: accepted with one device, and without effect: the module is where it
    is. mixed_precision: refused, with what to use instead.

    Raises ValueError for a module without trainable parameters, for parameters on several
    devices, or on another one than the group's; CollectiveMismatch, on all ranks, if the models
    differ, naming the first parameter that does.
    """

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
        mixed_precision: object = None,
    ) -> None:
        super().__init__()
        if device_ids is not None and len(device_ids) > 1:
            raise ValueError(
                f"device_ids has {len(device_ids)} devices, a rank owns one: start a worker for "
                "each (num_workers), and leave device_ids out"
            )
        if mixed_precision is not None:
            raise ValueError(
                "mixed_precision casts parameters in the forward pass; use torch.autocast, or give "
                "the module parameters in bfloat16, of which ZeroRedundancyOptimizer keeps float32 "
                "masters"
            )
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        if not named:
            raise ValueError(
                "DistributedDataParallel is not needed when a module doesn't have any parameter "
                "that requires a gradient."
            )
        if any(map(torch.nn.parameter.is_lazy, module.parameters())):
            raise RuntimeError(
                "Modules with uninitialized parameters can't be used with "
                "`DistributedDataParallel`. Run a dummy forward pass to correctly initialize the "
                "modules"
            )
        if bucket_cap_mb <= 0:
            raise ValueError(f"bucket_cap_mb must be positive, got {bucket_cap_mb}")
        self.module = module
        self.group = group if group is not None else current_group()
        check_devices(named, self.group)
        _check_same(list(module.named_parameters()), self.group)
        self._sync_norms = _sync_norms(module, self.group)
        self._norms_group = self.group
        state = [*module.parameters(), *module.buffers()]
        broadcast_tensors([tensor.detach() for tensor in state], 0, self.group)
        self._recovery = recovery = recovery_of(self.group)
        self.reducer = Reducer(
            named,
            self.group,
            int(bucket_cap_mb * (1 << 20)),
            has_repeats=static_graph,
            on_backward_end=self._on_backward_end,
            on_agreement=self._on_agreement,
            has_next=self._has_next,
            cursors=recovery.cursors if recovery is not None else None,
        )
        if is_informing():
            reducer, names = self.reducer, self.reducer.gradients.names
            reducer.clock = StepClock()
            reducer.unused = UnusedParameters(self.group.rank, names)
            reducer.on_new_order = lambda: tell_choice(reducer.buckets, reducer.group.rank, names)
            reducer.on_new_order()
        for _, parameter in named:
            _owners[parameter] = weakref.ref(self)
        between_runs().wrap(self)
        self._frozen = [p for p in module.parameters() if not p.requires_grad]
        is_kept = self._recovery is not None
        self.synced_buffers = Buffers(module, travel=broadcast_buffers, is_kept=is_kept)
        if self._recovery is not None:
            self._recovery.watch_model(self)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        began_at = self._before_forward()
        output = self.module(*inputs, **kwargs)
        self._after_forward(output, began_at)
        return output

    @_disable_dynamo
    def _before_forward(self) -> float:
        """Returns the time at which the module begins."""
        boundary().begin_forward()
        Join.notify_join_context(self)
        self.synced_buffers.begin_forward()
        if self._frozen and torch.is_grad_enabled():
            self._reduce_unfrozen()
        self._bind_norms()
        # A launch that waits for all ranks holds up the statistics of the backward pass, for which
        # they may be waiting, and the announcement of them.
        has_others = bool(self._sync_norms) or (self._join is not None and self._join.is_following)
        launch_waits = self.group.waits_on_issue or self.reducer.on_launched is not None
        self.reducer.launches_early = not (has_others and launch_waits)
        return time.monotonic()

    @_disable_dynamo
    def _after_forward(self, output: Any, began_at: float) -> None:
        if self.reducer.clock is not None:
            self.reducer.clock.forward_ran(began_at)
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                leaf.register_hook(self._output_has_gradient)

    def __reduce_ex__(self, protocol: object) -> Any:
        raise TypeError(
            "a DistributedDataParallel belongs to its group and cannot be copied or pickled; copy "
            "model.module, or save model.state_dict()"
        )

    def _bind_norms(self) -> None:
        """Collective, if the model has gone on in another generation since the last time."""
        if self._norms_group is not self.group:
            self._norms_group = self.group
            for norm in self._sync_norms:
                norm.bind(self.group)

    def _output_has_gradient(self, gradient: torch.Tensor) -> None:
        self.reducer.output_has_gradient()

    def register_comm_hook(
        self, state: object, hook: Callable[[Any, Any], torch.futures.Future[Any]]
    ) -> None:
        """Let `hook(state, bucket)` reduce the gradients: torch's hooks, or your own.

        hook: given a `GradBucket`, returns a future of what its gradients become (comm_hooks.py);
        nothing is divided after it. Every rank registers the same, once, between two steps. A rank
        without data, inside Join, calls it with zeros.

        Raises TypeError for what cannot be called, RuntimeError for a second hook and inside Join,
        CollectiveMismatch, on all ranks, for different ones, and ValueError, with the reason, under
        a ZeroRedundancyOptimizer that shards the gradients.
        """
        if not callable(hook):
            raise TypeError("Communication hook must be callable.")
        registered = CommHook(state, hook)
        if self.reducer.hook is not None:
            raise RuntimeError(
                f"register_comm_hook can only be called once: {self.reducer.hook.name} is "
                "registered already"
            )
        if self._join is not None:
            raise RuntimeError("register_comm_hook inside Join: register the hook before it")
        if self.reducer.is_sharded:
            raise ValueError(why_not_sharded(registered.name))
        registered.check_same(self.group)
        self.reducer.reduce_by(registered)

    def statistics(self) -> StepStatistics:
        """Where the time of the last hundred steps went, on average, on this rank.

        Raises RuntimeError if the model was made below debug level INFO: then nothing is timed.
        Steps whose gradients a communication hook reduces are not counted.
        """
        if self.reducer.clock is None:
            raise RuntimeError(
                "steps are timed at debug level INFO and above; set CHORUSLINE_DEBUG=INFO, or call "
                "set_debug_level(DebugLevel.INFO) before the model is wrapped"
            )
        return self.reducer.clock.average(self.reducer.buckets)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside only accumulate; the next one outside sends the sum.

        Raises RuntimeError inside a Join whose joinables of your own need a header in each step.
        """
        if self._join is not None and self._join.takes_forward_for_step:
            raise RuntimeError(
                "no_sync() in a Join with joinables of your own: a rank without data takes each "
                "forward for a step. Give Join a group to follow, groups=[…]; then each joinable's "
                "part of a step is announced"
            )
        before = self.reducer.is_syncing
        self.reducer.is_syncing = False
        try:
            yield
        finally:
            self.reducer.is_syncing = before

    def weigh(self, loss: torch.Tensor, weight: float) -> torch.Tensor:
        """`loss * weight`; the sum over all ranks is then divided by the sum of all weights.

        For a loss that is a mean over what differs between ranks: with the number of samples or
        tokens as weight the gradient is the mean over all samples of all ranks. Every rank that
        takes the step calls it, for every loss that it runs backward on.

        Raises ValueError for a negative weight, RuntimeError with a communication hook.
        """
        if not weight >= 0:
            raise ValueError(f"weight must be at least 0, got {weight}")
        if self.reducer.hook is not None:
            raise RuntimeError(
                "weigh() with a communication hook: the hook divides the gradients itself, by the "
                "number of ranks, before the weights of all ranks are known. Leave out one of them"
            )
        self.reducer.weight = (self.reducer.weight or 0.0) + weight
        return loss * weight

    def move_to(self, group: Group) -> None:
        """Go on in a group of the same ranks, at the beginning of a step."""
        self.group = group
        self.reducer.move_to(group)

    def leave_run(self) -> None:
        """The run in which it was made is over: what took it into the next generation with it."""
        self._recovery = None
        self.synced_buffers.drop_kept()
        self.reducer.parks = False
        self.reducer.tell_no_samples()

    def release(self) -> None:
        """Reduce no gradients any more, so that another model can be made of the same module."""
        self.reducer.release()
        for parameter in self.reducer.parameters:
            if _owners.get(parameter) is not None and _owners[parameter]() is self:
                del _owners[parameter]

    def let_go(self) -> None:
        """The function that has made it was left in the middle of a step, and begins anew, perhaps
        with the same module."""
        self.release()
        self.reducer.gradients.drop()

    def reduce_also(self, parameters: Sequence[torch.nn.Parameter]) -> list[GradientBucket]:
        """Reduce the gradients of these too, from now on; every rank calls it alike.

        parameters: of the module, with gradients required; they start from rank 0's values, and
        those that are reduced already stay as they are. Returns the buckets of the others.

        Raises ValueError for a parameter that the module does not have; CollectiveMismatch, on all
        ranks, if theirs differ.
        """
        self.check_has(parameters)
        names = {id(p): name for name, p in self.module.named_parameters()}
        known = {id(p) for p in self.reducer.parameters}
        fresh = [p for p in parameters if id(p) not in known]
        if not fresh:
            return []
        named = [(names[id(p)], p) for p in fresh]
        check_devices(named, self.group)
        _check_same(named, self.group)
        broadcast_tensors([p.detach() for p in fresh], 0, self.group)
        for parameter in fresh:
            _owners[parameter] = weakref.ref(self)
        taken = {id(p) for p in fresh}
        self._frozen = [p for p in self._frozen if id(p) not in taken]
        return self.reducer.add_parameters(named)

    def check_has(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Raises ValueError for a parameter that is none of the module's."""
        own = {id(p) for p in self.module.parameters()}
        for parameter in parameters:
            if id(parameter) not in own:
                raise ValueError(
                    f"a parameter of shape {tuple(parameter.shape)} is none of the module's, so "
                    "nothing would reduce its gradient. Register it in the module, or give it an "
                    "optimizer of its own"
                )

    def _reduce_unfrozen(self) -> None:
        """Take up parameters that were frozen when the model was wrapped and are no more. With
        sharded gradients that is for the optimizer to do, which also lays out its shards."""
        if not self.reducer.is_sharded:
            self.reduce_also([p for p in self._frozen if p.requires_grad])

    def sync_buffers(self, live: tuple[int, ...]) -> None:
        """Take the buffers of one of the ranks that took this step."""
        root = None
        if live:
            root = self._join.newest_rank(live) if self._join else 0
        self.synced_buffers.sync(root, self.group)

    @property
    def broadcast_buffers(self) -> bool:
        return self.synced_buffers.travel

    def leave_steps_to_optimizer(self) -> None:
        """From now on a sharded optimizer ends the steps, which count once it has held a ballot."""
        self.reducer.ends_steps = False
        self.synced_buffers.count_when_agreed = True

    # -- Join ----------------------------------------------------------------------------------

    def join_hook(self, **kwargs: Any) -> JoinHook:
        hook = self.reducer.hook
        if hook is not None and not kwargs.get("divide_by_initial_world_size", True):
            raise ValueError(
                f"divide_by_initial_world_size=False: the communication hook {hook.name} divides "
                "by the number of all ranks before it is known which have data; leave it True"
            )
        if hook is not None and hook.trains_apart:
            raise ValueError(
                f"Join over a model with {hook.name}: after its first steps the ranks have "
                "parameters of their own, and those of the last rank with data would replace all "
                "others. Give all ranks the same number of batches, without Join"
            )
        return _Hook(self)

    def _ends_step(self) -> bool:
        return not self.reducer.is_sharded

    def _end_shadowed_step(self) -> None:
        """As `zero_grad` in the loop's body, which this rank has left: gradients that it handed in,
        or got of the others, would be added to those of the next epoch."""
        self.reducer.gradients.drop()

    def _begins_passes(self) -> bool:
        return True

    def _groups_to_follow(self) -> Sequence[Group]:
        self._bind_norms()
        groups = [norm.group for norm in self._sync_norms if norm.group]
        return [group for group in dict.fromkeys(groups) if group.size > 1]

    def _on_backward_end(self) -> None:
        if self._join:
            self._join.begin_hook(self)

    def _check_joined_with(self, joinables: Sequence[Joinable]) -> None:
        if self.reducer.is_sharded and not any(
            getattr(other, "reducer", None) is self.reducer
            for other in joinables
            if other is not self
        ):
            raise ValueError(
                "the ZeroRedundancyOptimizer of this model finishes its steps, so it has to be "
                "joined with it: Join([model, optimizer])"
            )

    def _has_next(self) -> bool:
        return self._join.ledger.has_next if self._join else True

    def _on_agreement(self, agreement: Agreement) -> float:
        """A step was reduced in full; what to divide it by."""
        if self._join:
            self._join.record(self, agreement)
        self.sync_buffers(agreement.live)
        if self._recovery is not None and agreement.live and self.reducer.ends_steps:
            self._recovery.agreed(agreement.cursors)
        if self._join:
            return self._join.ledger.divisor(agreement)
        return agreement.weight or self.group.size


class _Hook(JoinHook):
    def __init__(self, model: DistributedDataParallel) -> None:
        self._model = model

    @torch.no_grad()
    def main_hook(self) -> None:
        """The gradients; of a sharded step the optimizer's hook, behind this one, does the rest."""
        model = self._model
        assert model._join is not None
        model._reduce_unfrozen()
        model.reducer.shadow()
        # With gradients that were left over from no_sync, this rank does take the step.
        model._join.ledger.live = model.reducer.is_live

    def post_hook(self, is_last_joiner: bool) -> None:
        """Ranks that joined earlier did not step: they take the state of a last joiner."""
        model = self._model
        assert model._join is not None
        ledger = model._join.ledger
        state: list[torch.Tensor] = []
        # With sharded state every rank took every step, of its shard, and gathered the rest.
        if not model.reducer.is_sharded and ledger.somebody_missed_a_step:
            state += [*model.module.parameters(), *model.module.buffers()]
        elif not model.broadcast_buffers:
            state += model.module.buffers()
        if state:
            root = model._join.newest_rank(ledger.last_live)
            broadcast_tensors([tensor.detach() for tensor in state], root, model.group)
            if model._recovery is not None:
                model._recovery.has_taken_over()


def check_devices(named: list[tuple[str, torch.nn.Parameter]], group: Group) -> None:
    first_name, first = named[0]
    for name, parameter in named:
        if parameter.device != first.device:
            raise ValueError(
                f"parameters are on several devices: {first_name} on {first.device}, {name} on "
                f"{parameter.device}. A rank owns one device; move the module with "
                f".to({str(group.device)!r})"
            )
    if first.device != group.device:
        raise ValueError(
            f"the module is on {first.device}, but this rank's group reduces on {group.device}; "
            f"move the module with .to({str(group.device)!r}) (in a session: ctx.device)"
        )


def _sync_norms(module: torch.nn.Module, group: Group) -> list[SyncBatchNorm]:
    """The layers that take statistics over all ranks, each with its group."""
    found = []
    for name, layer in module.named_modules():
        if isinstance(layer, torch.nn.SyncBatchNorm) and not torch.distributed.is_initialized():
            raise ValueError(
                f"{name or 'the module'} is torch's SyncBatchNorm, which needs torch.distributed "
                "and would take this rank's statistics alone; convert the module with "
                "chorusline.SyncBatchNorm.convert_sync_batchnorm(module)"
            )
        if isinstance(layer, SyncBatchNorm):
            layer.bind(group)
            found.append(layer)
    return found


def _check_same(named: list[tuple[str, torch.nn.Parameter]], group: Group) -> None:
    check_same_parameters(
        "DistributedDataParallel",
        [f"{name} {tuple(p.shape)} {p.dtype} {p.requires_grad}" for name, p in named],
        group,
    )
