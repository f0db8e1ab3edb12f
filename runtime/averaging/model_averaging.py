"""Model averaging: ranks train apart for some steps, then take the mean of their parameters.

Names and arguments are those of torch.distributed.algorithms.model_averaging, with Chorusline's
groups. Between two averages the parameters of the ranks differ. So two features that need equal
parameters are refused: Join (a rank without data would draw the mean towards old parameters), and a
ZeroRedundancyOptimizer over exactly the ranks that average (post_local_sgd.py).
"""

from __future__ import annotations

import itertools
import warnings
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from chorusline.collectives.contract.argument_kinds import check_kinds, check_range
from chorusline.collectives.contract.operation import ReduceOp
from chorusline.collectives.group import Group

from ..join.active import active_join
from ..process.between_runs import between_runs
from ..process.running import current_group


class ModelAverager(ABC):
    """Counts the steps of a training loop, and averages after some of them.

        averager: cl.ModelAverager = cl.PeriodicModelAverager(period=2, process_group=group)
        for step in range(4):
            averager.average_parameters(net.parameters())
        assert averager.step == 4

    process_group: the ranks that average; default: the session's group.
    step: the number of calls so far; a checkpoint needs it (`PostLocalSGDOptimizer.state_dict`
        contains it).
    """

    def __init__(self, process_group: Group | None = None) -> None:
        check_kinds(ModelAverager.__init__, locals())
        self.process_group = process_group if process_group is not None else current_group()
        self.step = 0

    @abstractmethod
    def average_parameters(
        self, params: Iterable[torch.nn.Parameter] | Iterable[dict[str, Any]]
    ) -> None:
        """Count a step, and average if it is due. Call it on all ranks after each optimizer step.

        params: the parameters of a model, or the parameter groups of an optimizer; the same on all
            ranks. Parameters without requires_grad stay as they are. (torch skips parameters whose
            gradient is None, and so averages nothing after `zero_grad()`.)

        Raises RuntimeError inside Join.
        """

    @property
    def groups(self) -> Sequence[Group]:
        """All groups in which this rank averages."""
        return [self.process_group]


class PeriodicModelAverager(ModelAverager):
    """Averages over all ranks of `process_group` every `period` steps.

        averager = cl.PeriodicModelAverager(period=4, warmup_steps=100, process_group=group)
        averager.average_parameters(net.parameters())  # After each step of the optimizer.

    period: steps are counted from 0 after the warm-up; a step that `period` divides averages.
    warmup_steps: the number of steps at the start without an average, since gradients are still
        averaged in them.
    process_group: as in ModelAverager.

    Raises ValueError, as torch does, for a period below 1 and for negative warmup_steps.
    Source: Lin et al., Don't Use Large Mini-Batches, Use Local SGD, arXiv:1808.07217.
    """

    def __init__(
        self, period: int, warmup_steps: int = 0, process_group: Group | None = None
    ) -> None:
        super().__init__(process_group)
        check_kinds(PeriodicModelAverager.__init__, locals())
        if period < 1:
            raise ValueError(f"period must be a positive number of steps, got {period}")
        check_range("warmup_steps", warmup_steps, 0)
        # Allowed, as in torch; but it is slower than what it is meant to save.
        if period == 1:
            _warn_of_every_step("period")
        self.period = period
        self.warmup_steps = warmup_steps

    def average_parameters(
        self, params: Iterable[torch.nn.Parameter] | Iterable[dict[str, Any]]
    ) -> None:
        params = _marked(params)
        if self.step >= self.warmup_steps and (self.step - self.warmup_steps) % self.period == 0:
            average(params, self.process_group)
        self.step += 1


class HierarchicalModelAverager(ModelAverager):
    """Averages often in small groups, and rarely in larger ones.

        sizes = {4: group.size // 2, 16: group.size}
        averager = cl.HierarchicalModelAverager(sizes, process_group=group)
        averager.average_parameters(net.parameters())  # After each step of the optimizer.

    period_group_size_dict: by period in steps, the number of ranks that average; both ascend.
        Groups are consecutive ranks (0 to size - 1 and so on), so each size divides that of
        `process_group`, and the last size equals it. A step that several periods divide averages
        once, in the largest group.
    warmup_steps: as in PeriodicModelAverager, but steps are counted from 0 including the warm-up.
    process_group: as in ModelAverager.

    The constructor makes the groups, so it is collective over process_group.

    Raises ValueError for sizes and periods that do not fit together.
    Source: hierarchical SGD, arXiv:2010.12998.
    """

    def __init__(
        self,
        period_group_size_dict: Mapping[int, int],
        warmup_steps: int = 0,
        process_group: Group | None = None,
    ) -> None:
        super().__init__(process_group)
        check_kinds(HierarchicalModelAverager.__init__, locals())
        whole = self.process_group
        _check_hierarchy(period_group_size_dict, whole.size)
        check_range("warmup_steps", warmup_steps, 0)
        if max(period_group_size_dict) == 1:
            _warn_of_every_step("the largest period in period_group_size_dict")
        self.warmup_steps = warmup_steps
        self.period_process_group_dict: dict[int, Group] = {}
        """By period, the group in which this rank averages."""
        for period, size in period_group_size_dict.items():
            # All ranks need no group of their own.
            group = whole if size == whole.size else whole.split(whole.rank // size)
            assert group is not None
            self.period_process_group_dict[period] = group

    @property
    def groups(self) -> Sequence[Group]:
        return list(self.period_process_group_dict.values())

    def average_parameters(
        self, params: Iterable[torch.nn.Parameter] | Iterable[dict[str, Any]]
    ) -> None:
        params = _marked(params)
        due = [period for period in self.period_process_group_dict if self.step % period == 0]
        # The largest period that is due has the largest group, whose mean covers the smaller ones.
        if self.step >= self.warmup_steps and due:
            average(params, self.period_process_group_dict[max(due)])
        self.step += 1


def _marked(
    params: Iterable[torch.nn.Parameter] | Iterable[dict[str, Any]],
) -> list[torch.nn.Parameter]:
    """The parameters, which may differ between ranks from now on: a checkpoint looks whether they
    do."""
    if active_join() is not None:
        raise RuntimeError(
            "model averaging does not work inside Join: between two averages each rank has "
            "parameters of its own, and a rank without data would pull the mean towards old "
            "ones. Give all ranks the same number of batches, without Join, or average gradients "
            "instead"
        )
    listed: list[torch.nn.Parameter] = []
    for entry in params:
        listed += entry["params"] if isinstance(entry, dict) else [entry]
    # In each step: a body may average more parameters later, such as those that it unfreezes.
    between_runs().averaged.update((parameter, True) for parameter in listed)
    return listed


@torch.no_grad()
def average(parameters: Iterable[torch.nn.Parameter], group: Group) -> None:
    """Replace parameters by their mean over the ranks of `group`: one all-reduce per dtype."""
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = defaultdict(list)
    for parameter in parameters:
        # The others are not trained, and so they are equal.
        if parameter.requires_grad:
            by_dtype[parameter.dtype].append(parameter)
    for same in by_dtype.values():
        flat = torch.cat([tensor.reshape(-1) for tensor in same]).to(group.device)
        group.all_reduce(flat, ReduceOp.AVG).wait()
        for tensor, part in zip(same, flat.split([t.numel() for t in same]), strict=True):
            tensor.copy_(part.view(tensor.shape))


def _check_hierarchy(sizes: Mapping[int, int], num_ranks: int) -> None:
    if not sizes:
        raise ValueError("period_group_size_dict must not be empty")
    if min(sizes) < 1:
        raise ValueError(f"periods must be positive numbers of steps, got {list(sizes)}")
    for lower, upper in itertools.pairwise(sizes.items()):
        if not (lower[0] < upper[0] and lower[1] < upper[1]):
            raise ValueError(
                "periods and group sizes must ascend together, since a larger group averages what "
                f"smaller ones have; got {dict(sizes)}"
            )
    # Else no averaging ever spans all ranks, and the models of the groups drift apart.
    last = list(sizes.values())[-1]
    if last != num_ranks:
        raise ValueError(
            f"the last group size must be that of process_group, {num_ranks} ranks, got {last}"
        )
    # Else some ranks would be left in a group that is smaller than the others.
    for size in sizes.values():
        if size < 1 or num_ranks % size:
            raise ValueError(f"{num_ranks} ranks cannot be cut into groups of {size}")


def _warn_of_every_step(what: str) -> None:
    warnings.warn(
        f"{what} is 1: parameters are averaged after every step, which costs as much as averaging "
        "gradients, as DistributedDataParallel does",
        stacklevel=3,
    )
