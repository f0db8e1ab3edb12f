"""Post-local SGD: reduces gradients over all ranks first, then in subgroups, and averages models.

The communication hook reduces gradients over all ranks for the first steps, and within a subgroup
from then on. The optimizer takes its step, then lets an averager (model_averaging.py) average the
parameters. Users give both the same number of first steps.

With a ZeroRedundancyOptimizer the subgroup is the ranks that share its shards: the optimizer keeps
their parameters equal, and the averager averages over different subgroups.

Source: Lin et al., Don't Use Large Mini-Batches, Use Local SGD, arXiv:1808.07217.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import torch

from chorusline.collectives.contract.argument_kinds import check_kinds, check_range
from chorusline.collectives.contract.errors import name_ranks
from chorusline.collectives.contract.operation import ReduceOp
from chorusline.collectives.group import Group
from chorusline.collectives.objects.blocking import all_gather_object
from chorusline.collectives.transports.host import host_identity

from ..data_parallel.gradients.comm_hooks import GradBucket
from ..process.running import current_group
from ..zero.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from .model_averaging import ModelAverager


class PostLocalSGDState:
    """The state of `post_localSGD_hook`, as in torch, with Chorusline's groups.

        state = cl.PostLocalSGDState(group, None, start_localSGD_iter=100)
        model = cl.DistributedDataParallel(net, group)
        model.register_comm_hook(state, cl.post_localSGD_hook)

    process_group: all ranks; default: the session's group.
    subgroup: the ranks that reduce gradients together after the first steps; default: the ranks of
        one host, whose group the constructor makes (a collective over process_group).
    start_localSGD_iter: the number of first steps, in which all ranks reduce gradients together.
    post_local_gradient_allreduce: False: after the first steps each rank uses its own gradients.
    iter: the number of steps so far, up to start_localSGD_iter.
    """

    def __init__(
        self,
        process_group: Group | None,
        subgroup: Group | None,
        start_localSGD_iter: int,
        post_local_gradient_allreduce: bool = True,
    ) -> None:
        check_kinds(PostLocalSGDState.__init__, locals())
        check_range("start_localSGD_iter", start_localSGD_iter, 0)
        self.process_group = process_group if process_group is not None else current_group()
        self.start_localSGD_iter = start_localSGD_iter
        self.post_local_gradient_allreduce = post_local_gradient_allreduce
        self.subgroup = subgroup
        # Without a reduction in it nobody needs the group, whose making is a collective.
        if subgroup is None and post_local_gradient_allreduce:
            hosts = all_gather_object(self.process_group, host_identity())
            self.subgroup = self.process_group.split(hosts.index(host_identity()))
        self.iter = 0


def post_localSGD_hook(state: PostLocalSGDState, bucket: GradBucket) -> torch.futures.Future[Any]:
    """The mean over all ranks for start_localSGD_iter steps, then over the subgroup.

        state = cl.PostLocalSGDState(group, None, start_localSGD_iter=1)
        model = cl.DistributedDataParallel(net, group)
        model.register_comm_hook(state, cl.post_localSGD_hook)
        for step in range(2):
            model(torch.ones(2, 8)).mean().backward()

    For `DistributedDataParallel.register_comm_hook(state, post_localSGD_hook)`.
    """
    check_kinds(post_localSGD_hook, locals())
    gradients = bucket.buffer()
    if state.iter < state.start_localSGD_iter:
        # Once a step: the hook is called for each bucket.
        if bucket.is_last():
            state.iter += 1
        return state.process_group.all_reduce(gradients, ReduceOp.AVG).get_future()
    if not state.post_local_gradient_allreduce:
        done: torch.futures.Future[Any] = torch.futures.Future()
        done.set_result(gradients)
        return done
    assert state.subgroup is not None
    return state.subgroup.all_reduce(gradients, ReduceOp.AVG).get_future()


class PostLocalSGDOptimizer(torch.optim.Optimizer):
    """An optimizer that averages the parameters of ranks after some of its steps.

        averager = cl.PeriodicModelAverager(period=4, warmup_steps=100, process_group=group)
        optimizer = cl.PostLocalSGDOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), averager)
        net(torch.ones(2, 8)).mean().backward()
        optimizer.step()

    optim: a torch optimizer over this rank's parameters, or a ZeroRedundancyOptimizer over a
        subgroup.
    averager: decides after which steps, and over which ranks, parameters are averaged.

    The state dictionary is that of `optim` with the averager's `step`, as in torch. The state of
    `optim` (momentum and so on) is not averaged.

    Raises ValueError, on all ranks of its group, for a ZeroRedundancyOptimizer whose ranks would
    not have equal parameters after an average, or for which it would change nothing.
    """

    _step_supports_amp_scaling = True  # So a GradScaler calls `step`, which raises.

    # torch's constructor is not called: parameter groups and hooks are those of `optim`.
    def __init__(self, optim: torch.optim.Optimizer, averager: ModelAverager) -> None:
        check_kinds(PostLocalSGDOptimizer.__init__, locals())
        self.optim = optim
        self.averager = averager
        self.defaults = optim.defaults
        # A plain optimizer has whole parameters on each rank, and any average is right for it.
        if isinstance(optim, ZeroRedundancyOptimizer):
            _check_shards(optim, averager)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optim.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optim.state

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """One step of `optim`, then the averager's, which averages if it is due.

        Raises RuntimeError inside Join, and under a GradScaler.
        """
        # torch's scaler sets these on an optimizer that handles them itself.
        if hasattr(self, "grad_scale") or hasattr(self, "found_inf"):
            raise RuntimeError(
                "a GradScaler skips the steps in which gradients overflow. While each rank has "
                "gradients of its own, the ranks would skip different steps and miss each other's "
                "averages; train in bfloat16, which needs no scaler"
            )
        loss = self.optim.step(closure)
        self.averager.average_parameters(self.param_groups)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optim.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optim.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        return {**self.optim.state_dict(), "step": self.averager.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state. Without a `step` the averager counts from 0, with a warning as in torch."""
        state = dict(state_dict)
        step = state.pop("step", None)
        self.optim.load_state_dict(state)
        self.averager.step = step or 0
        if step is None:
            warnings.warn(
                "the loaded state has no step counter of an averager, so the averager's steps, and "
                "its warm-up, are counted from 0",
                stacklevel=2,
            )

    def __repr__(self) -> str:
        return f"PostLocalSGDOptimizer({self.optim!r})"


def _check_shards(optim: ZeroRedundancyOptimizer, averager: ModelAverager) -> None:
    """Raise unless an average leaves all ranks that share shards with equal parameters: each of
    their averages must have the same part of each subgroup."""
    subgroup = min(optim.group.ranks)
    mine: list[dict[int, Fraction]] = []
    for group in averager.groups:
        counts = Counter(all_gather_object(group, subgroup))
        mine.append({number: Fraction(n, group.size) for number, n in counts.items()})
    everybody = all_gather_object(optim.group, mine)
    if any(theirs != mine for theirs in everybody):
        raise ValueError(
            f"a ZeroRedundancyOptimizer keeps the parameters of {name_ranks(optim.group.ranks)} "
            "equal, but the averager would mix different parameters into them; average over groups "
            "that have equally many ranks of each subgroup"
        )
    if all(len(shares) == 1 for shares in mine):
        raise ValueError(
            f"a ZeroRedundancyOptimizer keeps the parameters of {name_ranks(optim.group.ranks)} "
            "equal, so an average over them changes nothing. Give the model and the optimizer a "
            "subgroup (group=…, of the ranks of one host, say), and the averager all ranks"
        )
