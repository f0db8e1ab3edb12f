"""Join for a model of torch's `fully_shard` (FSDP2) on Chorusline's process groups.

FSDP2's collectives follow the modules' hooks, and a rank without data runs none. Its shard of the
parameters is needed all the same, in each all-gather, and its shard of the gradients has to be
stepped. So while some rank is out of data, the ranks with data announce (conductor.py) what comes:

- GATHER: a rank without data runs the parameter group's own all-gather, and frees the result.
- REDUCE: it runs the parameter group's own reduction with zeros, or with what it has accumulated
  without synchronisation and not handed in. So it gets its shard of the gradient.
- STEP, COLLECTIVE: an optimizer steps, or the body issues a collective of the model's process group
  (as `clip_grad_norm_`). It calls what is in `step_along`, in order, and what that does must be
  what the ranks with data announce meanwhile, one by one.

Shards have no copy with which they could be compared at the end. So STEP, COLLECTIVE and REDUCE
also tell how often each gradient was written since it was reduced, by the counters that autograd
keeps. A body that changes gradients beside `step_along` is found by that.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.optim.optimizer import register_optimizer_step_pre_hook

from chorusline.collectives.contract.errors import name_ranks
from chorusline.collectives.contract.operation import Kind
from chorusline.collectives.group import Group
from chorusline.collectives.torch_backend.process_group import ChoruslineProcessGroup

from ..process.option_numbers import entries, is_number, plain
from ..process.sharded_tensors import (
    groups_of,
    sharded_parameters,
    states_of,
    unsharded_parameters,
)
from .conductor import Conductor
from .engine import Joinable
from .join_hook import JoinHook

_CLEARED, _NOT_REDUCED = -1, -2
"""In place of the number of writes to a gradient: it is None; it is not part of the reduction."""

_REMEDY = (
    "List in Join(step_along=[...]), in their order, the optimizer and all that the body does "
    "beside it: a schedule, or a function without arguments that clips (clip_grad_norm_ or "
    "clip_grad_value_) or clears gradients, and call that function in the body. Collectives of the "
    "body that are no part of a step belong on a group of Join(groups=[...])"
)


class _Event(enum.IntEnum):
    """What is announced. The member's value travels, then the numbers named here."""

    GATHER = 0
    """The all-gather of a parameter group: its number."""
    REDUCE = 1
    """The reduction of a parameter group: its number, and whether its replicas take part
    (`set_requires_all_reduce`). Then the writes to its gradients."""
    STEP = 2
    """An optimizer steps: a digest of its options. Then the writes to all gradients."""
    COLLECTIVE = 3
    """One of the body: kind, numel, dtype. Then the writes to all gradients."""


class FullyShardedModel(Joinable):
    """The root of a model of `fully_shard`, in one Join.

    Raises ValueError for a model that a rank without data could not shadow.
    """

    def __init__(self, model: FSDPModule) -> None:
        self._model: Any = model
        self._states = states_of(self._model)
        self._groups = groups_of(self._states)
        self._process_groups = _checked_process_groups(self._model, self._groups)
        self._sharded = [parameter for _, parameter in sharded_parameters(self._model)]
        self._base: dict[int, int] = {}  # by parameter, the writes when it was reduced last
        self._sums: dict[int, str] = {}  # by parameter, of its gradient then, if ranks were out
        self._received: list[int] | None = None  # announced to step_along; None: it has done it
        self._is_own = False  # FSDP2 itself, or this file, issues what is issued now
        self._runs_followers = False
        self._undo = contextlib.ExitStack()

    def join_hook(self, **kwargs: Any) -> JoinHook:
        return JoinHook()

    @property
    def join_device(self) -> torch.device:
        return self.join_group.device

    @property
    def join_group(self) -> Group:
        group: Group = self._process_groups[0].group
        return group

    def _channel(self) -> Group:
        return self.join_group

    def _begins_passes(self) -> bool:
        return True

    def _is_training(self) -> bool:
        return True  # An evaluation gathers parameters, too.

    # -- while a Join lasts ----------------------------------------------------------------------

    def _attach(self) -> None:
        if "post_backward" in vars(self._groups[0]):
            raise RuntimeError(
                "this Join is inside another one that lists the same model; a step belongs to one "
                "Join"
            )
        root = self._states[0]
        root._lazy_init()  # A rank without any batch never runs the forward that would do it.
        if not root._is_root:
            raise ValueError(
                "Join takes the outermost module that fully_shard was applied to; this one is a "
                "part of it"
            )
        for group in self._groups:
            if group._use_post_forward_mesh:
                raise ValueError(
                    "Join cannot shadow reshard_after_forward=<int>, which gathers on a second "
                    "mesh; use True or False"
                )
        device = self._groups[0].device
        on_device = [one._device_groups.group(device) for one in self._process_groups]
        for group in dict.fromkeys([*(one.group for one in self._process_groups), *on_device]):
            group.announce_to(self._collective)
            self._undo.callback(group.announce_to, None)
        for state in self._states:
            self._replace(state, "_root_pre_forward", self._root_pre_forward(state))
        for number, group in enumerate(self._groups):
            self._replace(group, "unshard", self._unshard(number, group))
            self._replace(group, "post_backward", self._post_backward(number, group))
        self._undo.callback(register_optimizer_step_pre_hook(self._step).remove)
        for parameter in self._sharded:
            self._note(parameter)

    def _detach(self) -> None:
        self._undo.close()

    def _replace(self, owner: Any, name: str, method: Callable[..., Any]) -> None:
        setattr(owner, name, method)
        self._undo.callback(delattr, owner, name)

    @property
    def _conductor(self) -> Conductor:
        assert self._join is not None and self._join._conductor is not None
        return self._join._conductor

    @contextlib.contextmanager
    def _own(self) -> Iterator[None]:
        before, self._is_own = self._is_own, True
        try:
            yield
        finally:
            self._is_own = before

    # -- a rank with data, and what step_along does on one without -------------------------------

    def _root_pre_forward(self, state: Any) -> Callable[..., Any]:
        original = state._root_pre_forward

        def root_pre_forward(*args: Any) -> Any:
            if state._state_ctx.iter_forward_root is None:
                self._begin_batch()
            return original(*args)

        return root_pre_forward

    def _begin_batch(self) -> None:
        if self._runs_followers:
            raise RuntimeError(
                "a function in step_along runs the model, which a rank without data cannot do"
            )
        if self._join is not None:
            self._join.check_may_begin(self)
            self._join.notified(self)

    def _unshard(self, number: int, group: Any) -> Callable[..., None]:
        original = group.unshard
        states = type(group._training_state)

        def unshard(async_op: bool = False) -> None:
            skips = not group.unshard_in_backward and (group._training_state == states.PRE_BACKWARD)
            if group._all_gather_result is None and not group.is_unsharded and not skips:
                # The body gathers by itself.
                if group._training_state == states.IDLE and not self._is_own:
                    self._begin_batch()
                self._happens(_Event.GATHER, number)
            with self._own():
                original(async_op)

        return unshard

    def _post_backward(self, number: int, group: Any) -> Callable[..., None]:
        original = group.post_backward

        def post_backward(*unused: Any) -> None:
            # torch can reduce zeros for what a pass has not used.
            always = getattr(group, "reduce_scatter_unused_params", False)
            if group.reduce_grads and (always or any(map(_has_gradient, group.fsdp_params))):
                writes = [
                    self._writes(one.sharded_param) if _has_gradient(one) else _NOT_REDUCED
                    for one in group.fsdp_params
                ]
                is_whole = int(group.all_reduce_grads)
                self._happens(_Event.REDUCE, number, is_whole, writes=writes)
                self._reduce(group, original, contributes=True)
            else:
                original()

        return post_backward

    def _reduce(self, group: Any, reduction: Callable[[], None], *, contributes: bool) -> None:
        """Reduce the gradients of a parameter group. contributes: this rank has any."""
        assert self._join is not None
        factor, conductor = group.gradient_divide_factor, self._conductor
        by_live = not self._join.ledger.divide_by_initial_world_size
        with self._own():
            if by_live and factor is None and conductor.some_rank_is_out:
                live = conductor.count(contributes)
                if group.all_reduce_grads and group._partial_reduce_output is None:
                    group.gradient_divide_factor = float(live)
                else:
                    # A divisor of this pass alone would also be that of the sums which other passes
                    # leave within the replicas, so FSDP2 divides by the number of all ranks.
                    _scale(group, self.join_group.size / live)
            try:
                reduction()
            finally:
                group.gradient_divide_factor = factor
        for one in group.fsdp_params:
            self._note(one.sharded_param)
            # A function in step_along may change gradients, too: then sums say nothing.
            if conductor.some_rank_is_out and not self._join.runs_functions:
                self._sums[id(one.sharded_param)] = _sums(one.sharded_param.grad)

    def _step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """The hook before each step of any optimizer."""
        mine = {id(parameter) for parameter in self._sharded}
        steps = (id(one) in mine for group in optimizer.param_groups for one in group["params"])
        if not any(steps):
            return
        if self._some_rank_follows:
            if getattr(optimizer, "grad_scale", None) is not None:
                raise RuntimeError(
                    "a GradScaler hands its scale to a fused optimizer, and ranks "
                    f"{self._absent} that have run out of data do not know it. Train in "
                    "bfloat16, which needs no scaler, or give the optimizer fused=False"
                )
            self._check_unchanged()
        self._happens(_Event.STEP, _digest(optimizer), writes=self._all_writes())

    def _check_unchanged(self) -> None:
        """Raises RuntimeError if the body has changed what was reduced, and nothing in step_along
        can have done so. Operations over lists of DTensors are not counted as writes."""
        sums, self._sums = self._sums, {}
        for one in self._sharded:
            was = sums.get(id(one))
            if was is not None and one.grad is not None and was != _sums(one.grad):
                raise RuntimeError(self._why_changed())

    def _collective(self, kind: Kind, numel: int, dtype: int, detail: int) -> None:
        """Something is issued on the model's process group."""
        if self._some_rank_follows or (self._runs_followers and not self._is_own):
            self._happens(_Event.COLLECTIVE, kind, numel, dtype, writes=self._all_writes())

    @property
    def _some_rank_follows(self) -> bool:
        return not self._is_own and self._join is not None and self._conductor.is_announcing

    @property
    def _absent(self) -> list[int]:
        assert self._join is not None
        return self._join.absent_ranks

    def _happens(self, event: _Event, *numbers: int, writes: Sequence[int] = ()) -> None:
        """Announce it; on a rank without data, find it announced."""
        if self._is_own:
            return
        if self._runs_followers:
            received = self._received or self._receive()
            self._received = None
            mine = [event, *numbers]
            if received[: len(mine)] != mine:
                raise RuntimeError(self._why_not(event, received))
            self._match(self._sharded, self._last_writes)
        elif self._conductor.is_announcing:
            self._conductor.begin_hook(0, event, *numbers)
            if event != _Event.GATHER:
                self._conductor.tell(writes)

    def _why_not(self, event: _Event, received: Sequence[int]) -> str:
        theirs = _Event(received[0]).name if received[0] in list(_Event) else "no step"
        if event == received[0] == _Event.STEP:
            return (
                f"the options of an optimizer differ on this rank {self.join_group.rank}, which "
                f"has run out of data, from those of the ranks with data: what sets them there "
                f"(a schedule?) is not done here. {_REMEDY}"
            )
        return (
            f"step_along does {event.name} on this rank {self.join_group.rank}, which has run out "
            f"of data, where the ranks with data do {theirs}. {_REMEDY}"
        )

    # -- a rank without data ---------------------------------------------------------------------

    def _receive(self) -> list[int]:
        """The next announcement, for what step_along does."""
        with self._own():
            received = self._conductor.receive_hook()
            if received[0] in (_Event.STEP, _Event.COLLECTIVE):
                self._last_writes = self._conductor.receive(len(self._sharded))
        return received

    def _shadow(self, *details: int) -> None:
        """Do what was announced: a member of _Event, and its numbers."""
        event, *numbers = details
        if event == _Event.GATHER:
            group = self._groups[numbers[0]]
            with self._own():
                group.reshard()  # It may still be whole after an evaluation.
                group.unshard()
                group.wait_for_unshard()
                group.reshard()
        elif event == _Event.REDUCE:
            group = self._groups[numbers[0]]
            # Its last pass may have been one that accumulates; that of the ranks with data is not.
            group.reduce_grads, group.all_reduce_grads = True, bool(numbers[1])
            self._reduce_zeros(group, self._conductor.receive(len(group.fsdp_params)))
        else:
            self._last_writes = self._conductor.receive(len(self._sharded))
            self._step_along([event, *numbers])

    def _reduce_zeros(self, group: Any, writes: Sequence[int]) -> None:
        held = any(map(_has_gradient, group.fsdp_params))
        reduced = list(zip(group.fsdp_params, writes, strict=True))
        for one, number in reduced:
            if number != _NOT_REDUCED and not _has_gradient(one):
                one.unsharded_param.grad = torch.zeros_like(one.unsharded_param)
            elif number == _NOT_REDUCED and _has_gradient(one):
                raise RuntimeError(
                    f"rank {self.join_group.rank} has run out of data with accumulated gradients "
                    f"of {one._param_fqn}, for which the ranks with data have none. Use the same "
                    "parameters in every pass of a step"
                )
        kept = [(one.sharded_param, n) for one, n in reduced if n != _NOT_REDUCED]
        self._match([one for one, _ in kept], [n for _, n in kept])
        original = type(group).post_backward
        self._reduce(group, lambda: original(group), contributes=held)
        group._training_state = type(group._training_state).IDLE
        group.finalize_backward()

    def _step_along(self, received: list[int]) -> None:
        assert self._join is not None
        self._received, self._runs_followers = received, True
        for parameter, number in zip(self._sharded, self._last_writes, strict=True):
            if number == _CLEARED:
                parameter.grad = None
        try:
            self._join.step_along()
        finally:
            self._runs_followers = False
        if self._received is not None:
            does = (
                "step an optimizer of this model"
                if received[0] == _Event.STEP
                else f"issue {Kind(received[1]).name.lower()} on the model's process group"
            )
            raise RuntimeError(
                f"the ranks with data {does}, and step_along does not, so "
                f"{name_ranks(self._absent)} without data cannot. {_REMEDY}"
            )

    def _shadowed(self) -> None:
        """No rank has data any more: gradients, and what is gathered, become alike."""
        with self._own():
            # A loop that begins after this one gathers on all ranks, or on none.
            for group in self._groups:
                group.reshard()
            newest = min(self._conductor.last_live)
            writes = self._conductor.from_rank(newest, self._all_writes())
        self._match(self._sharded, writes)

    # -- the gradients ---------------------------------------------------------------------------

    def _note(self, parameter: Any) -> None:
        self._base[id(parameter)] = _counter(parameter.grad)

    def _writes(self, parameter: Any) -> int:
        if parameter.grad is None:
            return _CLEARED
        return _counter(parameter.grad) - self._base[id(parameter)]

    def _all_writes(self) -> list[int]:
        return [self._writes(parameter) for parameter in self._sharded]

    def _match(self, parameters: Sequence[Any], writes: Sequence[int]) -> None:
        """Clear the gradients that the ranks with data have cleared; raise where they have written
        to others."""
        for parameter, number in zip(parameters, writes, strict=True):
            if number == _CLEARED:
                parameter.grad = None
            elif number != self._writes(parameter):
                raise RuntimeError(self._why_changed())

    def _why_changed(self) -> str:
        return (
            "the ranks with data change gradients between the backward pass and optimizer.step(), "
            f"or clear them by zeros, and {name_ranks(self._absent)} without data cannot. {_REMEDY}"
        )


def _checked_process_groups(model: Any, groups: Sequence[Any]) -> list[Any]:
    """The process groups of a model's collectives; first the one that has all its ranks."""
    meshes = [group.mesh_info.mesh for group in groups]
    meshes += [one.sharded_param.device_mesh for g in groups for one in g.fsdp_params]
    # torch makes process groups of a mesh with the mesh, and a model has one for each dimension.
    of_model = dict.fromkeys(
        getattr(group.mesh_info, f"{name}_process_group", None)
        for group in groups
        for name in (("shard", "replicate") if meshes[0].ndim > 1 else ("shard",))
    )
    world = dist.group.WORLD
    is_whole = meshes[0].ndim == 1 or meshes[0].size() == dist.get_world_size()
    if len({mesh.ndim for mesh in meshes}) != 1 or len(of_model) != meshes[0].ndim or not is_whole:
        raise ValueError(
            "Join takes a model that fully_shard has sharded over one mesh of one dimension, or of "
            "two (replicas of shards, HSDP) with all ranks; tensor parallelism cannot be shadowed "
            "yet"
        )
    if beside := unsharded_parameters(model):
        raise ValueError(
            f"Join takes a model whose trained parameters are all sharded; {beside[0]} is not. "
            "Apply fully_shard to the root module, without ignored_params, before Join"
        )
    found: list[Any] = [*of_model] if meshes[0].ndim == 1 else [world, *of_model]
    for one in found:
        if not isinstance(one, ChoruslineProcessGroup):
            raise ValueError(
                "Join shadows a model of fully_shard on Chorusline's process groups only: "
                'ctx.init_torch_distributed(), or dist.init_process_group("chorusline"), before '
                f"the mesh is made; this one is on {dist.get_backend(one)}"
            )
    return found


def _has_gradient(one: Any) -> bool:
    """Whether a reduction takes a gradient of this parameter of FSDP2 with it."""
    if not hasattr(one, "_unsharded_param"):
        return False
    return one.unsharded_accumulated_grad is not None or one.unsharded_param.grad is not None


def _scale(group: Any, factor: float) -> None:
    """Multiply what the coming reduction of a parameter group takes, in the reduction's dtype."""
    for one in filter(_has_gradient, group.fsdp_params):
        one.accumulate_unsharded_grad_if_needed()
        one.to_accumulated_grad_if_needed()
        accumulated = one.unsharded_accumulated_grad
        (one.unsharded_param.grad if accumulated is None else accumulated).mul_(factor)


def _counter(gradient: Any) -> int:
    """Counts the writes to a DTensor: those to itself, and those to its shard."""
    return 0 if gradient is None else gradient._version + gradient._local_tensor._version


def _sums(gradient: Any) -> str:
    """Changes with the gradient's shard."""
    if gradient is None:
        return ""
    shard = gradient._local_tensor.detach().double()
    return repr((shard.sum().item(), shard.abs().sum().item()))


def _digest(optimizer: torch.optim.Optimizer) -> int:
    numbers = [
        (key, plain(value))
        for group in optimizer.param_groups
        for key, value in sorted(group.items())
        if key != "params" and all(map(is_number, entries(value)))
    ]
    return int.from_bytes(hashlib.sha256(repr(numbers).encode()).digest()[:8], signed=True)
