"""`Join`: ranks may run out of data at different steps, and training stays exact and does not hang.

A rank that is out of data has *joined*. It *shadows* the steps that other ranks still take: it
takes part in their collectives with neutral elements, until no rank takes a step. Ranks know which
steps these are without a collective of Join's own. Every step of Chorusline's own joinables carries
an agreement (agreement.py): which ranks took it, and which ranks may take another one.

- `ctx.shard` looks one batch ahead, so a step's agreement says exactly which ranks take the next.
- Any other iterable cannot look ahead. Then all ranks take part in one step too many. Its agreement
  says that no rank had data; nothing is applied, and all ranks know that the end has come.
- Joinables that users write carry no agreement. Then each step begins with a small all-reduce,
  which `notify_join_context` of the first joinable starts, as in torch.

Collectives that differ from step to step (SyncBatchNorm, the user's collectives) are followed by
the rules of conductor.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Self

import torch

from chorusline.collectives.contract.argument_kinds import check_kinds, check_range
from chorusline.collectives.contract.errors import with_article
from chorusline.collectives.contract.work import Work
from chorusline.collectives.group import Group

from ..process.sharded_tensors import is_fully_sharded
from .engine import GroupJoinable, Joinable, JoinEngine
from .step_along import followers_of


class Join:
    """`with Join([model, optimizer]):` around a training loop over uneven inputs.

        model = cl.DistributedDataParallel(net, group)
        optimizer = cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.1)
        with cl.Join([model, optimizer]):
            for batch in [torch.ones(2, 8)] * (group.rank + 1):
                model(batch).mean().backward()
                optimizer.step()
                optimizer.zero_grad()

    joinables: in the order in which their hooks run; of torch's modules only those that
        `fully_shard` has sharded.
    enable: False makes the Join do nothing.
    throw_on_early_termination: raise RuntimeError on every rank at the first step that some rank
        cannot take, instead of shadowing. A program may catch it around the Join, and continue.
    step_along: objects besides the joinables whose `.step()` the body calls once per step:
        learning-rate schedules, and a plain optimizer of a model that is not sharded; functions
        without arguments that it calls; an AveragedModel that it updates. A joined rank calls them
        in the steps that it shadows, in this order, so their state stays the same on all ranks.
    groups: groups of the same ranks whose collectives the body issues freely, in forward, in
        backward and between. A joined rank takes part in them with the neutral element (0, 1, the
        largest or smallest number; in an all_gather zeros, elsewhere nothing). The groups of a
        model's SyncBatchNorm are found automatically. A joinable's own group is not allowed:
        `group.new_group(range(group.size))` makes another one.
    skew_warning: warn once, with the numbers of all ranks, at the step from which the shortest rank
        has missed more than this share of the longest rank's steps. None: never.
    kwargs: passed to every joinable's `join_hook`. `divide_by_initial_world_size` says what divides
        the sum over live ranks: True: the number of all ranks; False: that of live ranks. It has no
        effect where losses are weighted (`DistributedDataParallel.weigh`).

    When the body or a hook raises, the peers are released at once with this exception and its
    traceback, and the group's generation ends. The joinables stay as they are, and do not belong to
    a Join after any exit.

    Raises ValueError without joinables, for different groups, and for a joinable that is listed
    without another one that it needs.
    Source: torch.distributed.algorithms.Join.
    """

    def __init__(
        self,
        joinables: Sequence[Joinable | torch.nn.Module],
        enable: bool = True,
        throw_on_early_termination: bool = False,
        *,
        step_along: Sequence[object] = (),
        groups: Sequence[Group] = (),
        skew_warning: float | None = 0.5,
        **kwargs: Any,
    ) -> None:
        if isinstance(joinables, Joinable) or not isinstance(joinables, Sequence):
            raise TypeError(
                "Join takes a list of joinables, as in Join([model]); got "
                f"{with_article(type(joinables))}"
            )
        if len(joinables) == 0:
            raise ValueError("The join context manager requires at least one joinable")
        listed: list[Joinable] = []
        for number, given in enumerate(joinables):
            joinable = _of_fully_shard(given)
            if not isinstance(joinable, Joinable):
                raise TypeError(_not_joinable(number, joinable))
            for first, one in enumerate(listed):
                if one is joinable:
                    raise ValueError(
                        f"Join lists one {type(joinable).__name__} at places {first} and {number}, "
                        "and a rank without data would shadow each step of it more than once. List "
                        "it once; if the body steps it more often than the others, give Join a "
                        "group to follow, groups=[ctx.group.new_group(range(ctx.world_size))]: "
                        "then each step is announced"
                    )
            listed.append(joinable)
        for number, each in enumerate(step_along if isinstance(step_along, Sequence) else ()):
            is_listed = any(each is joinable for joinable in listed)
            # One that a user writes and does not list may be stepped along.
            if is_listed or isinstance(each, GroupJoinable):
                raise ValueError(_why_not_along(number, each, is_listed=is_listed))
        followers = followers_of(step_along, listed)
        check_kinds(Join.__init__, locals())
        if skew_warning is not None:
            check_range("skew_warning", skew_warning, 0, 1)
        for joinable in listed:
            joinable._check_joined_with(listed)
            if joinable._channel() is not None and len(listed) > 1:
                raise ValueError(
                    "a model of fully_shard is the only joinable of its Join: make several models "
                    "parts of one module, and apply fully_shard to that"
                )
        self._enable = enable
        self._make_engine = partial(
            JoinEngine,
            listed,
            groups,
            kwargs,
            step_along=step_along,
            followers=followers,
            throws=bool(throw_on_early_termination),
            skew_warning=skew_warning,
        )
        # Made here, so that what is listed wrongly is told here; each later `with` makes its own.
        self._engine = self._make_engine()
        self._has_begun = False

    @property
    def live_ranks(self) -> tuple[int, ...]:
        """The ranks with data for the current batch, if Join follows groups; else the ranks that
        took the last step."""
        return self._engine.live_ranks

    def __enter__(self) -> Self:
        if self._enable:
            engine = self._make_engine() if self._has_begun else self._engine
            self._has_begun = True
            engine.enter()
            self._engine = engine  # Not before: entered twice, it has to leave the one it is in.
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._enable:
            self._engine.leave(error)

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.__exit__(kind, error, trace)

    @staticmethod
    def notify_join_context(joinable: Joinable) -> Work | None:
        """Call this in a joinable that you write, before its collectives of a step.

        The first joinable of a Join that needs it all-reduces a vector of one int32 per rank, and
        gets the finished work. All other calls communicate nothing, and return None.
        """
        check_kinds(Join.notify_join_context, locals())
        return joinable._join.notified(joinable) if joinable._join is not None else None


def _of_fully_shard(given: Any) -> Any:
    """The joinable of a model of fully_shard; anything else as it is."""
    if not is_fully_sharded(given):
        return given
    # Only now: torch.distributed.fsdp takes long to import.
    from .fully_sharded import FullyShardedModel

    return FullyShardedModel(given)


_OF_TORCH = ("DistributedDataParallel", "ZeroRedundancyOptimizer")
"""Classes of torch that a Join takes only from chorusline."""


def _not_joinable(number: int, given: object) -> str:
    """given: the object at this place of the list, which is no joinable."""
    kind = type(given).__name__
    if kind in _OF_TORCH:
        remedy = "is torch's class. Use the class of that name in chorusline"
    elif isinstance(given, torch.optim.Optimizer):
        remedy = (
            "is stepped by each rank alone. Write Join([model], step_along=[optimizer]) for an "
            "optimizer of a DistributedDataParallel's parameters, or make it a "
            "ZeroRedundancyOptimizer"
        )
    elif isinstance(given, torch.nn.Module):
        remedy = "is not wrapped. Write Join([DistributedDataParallel(module)])"
    elif hasattr(given, "step"):
        remedy = "has no collectives. Objects with a step() belong in step_along=[...]"
    else:
        remedy = "is not a Joinable: derive its class from chorusline.Joinable"
    return f"Join takes joinables, and number {number} of its list, {with_article(kind)}, {remedy}"


def _why_not_along(number: int, given: object, *, is_listed: bool) -> str:
    """given: the joinable at this place of step_along. is_listed: whether the Join lists it too."""
    kind = type(given).__name__
    remedy = (
        "leave it out of step_along"
        if is_listed
        else f"list {with_article(kind)} among the joinables in place of step_along, after what it "
        "belongs to: Join([model, optimizer, scaler])"
    )
    return (
        f"step_along[{number}] is {with_article(kind)}, a joinable, whose steps a rank without "
        f"data shadows by itself: {remedy}"
    )
