"""`Join`: ranks may run out of data at different steps, and nothing hangs or goes wrong.

A rank that is out of data (it has *joined*) goes on taking part in the collectives of the steps
that others still take: it *shadows* them, with neutral elements, until nobody takes any. Which
steps those are is known without any collective of Join's own. Every step of ours carries an
agreement (agreement.py): who took it, and who may take another one.

- `ctx.shard` looks one batch ahead, so the agreement of a step says exactly who takes the next.
- Any other iterable cannot say so. Then the last step shadows blindly: all ranks take part, the
  agreement says that nobody was live, nothing is applied, and that is how everybody knows.
- Joinables of the user's own carry no agreement. Then a small all-reduce goes first in each step,
  started by `notify_join_context` of the first joinable, as in torch.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Protocol, Self

import torch

from actors.errors import Interrupted
from collectives import Group, Work

from .agreement import Agreement
from .boundary import boundary


class JoinHook:
    """What a joinable does on a rank that has joined. Both do nothing unless overridden."""

    def main_hook(self) -> None:
        """Shadow one step: the collectives that others run in it. Once per step some rank takes."""

    def post_hook(self, is_last_joiner: bool) -> None:
        """Once, when all ranks have joined. Several ranks may be last joiners."""


class JoinLedger:
    """What one rank knows of the steps inside one Join. No collectives in here.

    live: this rank has data for the step it is in. has_next: it may take another one.
    """

    def __init__(self, num_ranks: int, divide_by_initial_world_size: bool) -> None:
        self.num_ranks = num_ranks
        self.divide_by_initial_world_size = divide_by_initial_world_size
        self.live = True
        self.has_next = True
        self.last_live: tuple[int, ...] = tuple(range(num_ranks))
        self.steps_taken = [0] * num_ranks
        self._began_earlier = False
        # Nobody knows better before the first agreement.
        self._may_continue = tuple(range(num_ranks))

    def begin_epoch(self, batches_per_rank: Sequence[int]) -> None:
        """The iterator knows how many batches each rank starts with."""
        self._may_continue = tuple(rank for rank, n in enumerate(batches_per_rank) if n)

    def resume(self, last_live: tuple[int, ...]) -> None:
        """Steps of this epoch were taken in an earlier Join; the last one by these ranks."""
        self._began_earlier = True
        self.last_live = last_live or self.last_live

    def record(self, agreement: Agreement, *, is_step: bool = True) -> None:
        """is_step: a step ended with it; a second agreement on the same step is none."""
        self._may_continue = agreement.may_continue
        if agreement.live:
            self.last_live = agreement.live
            for rank in agreement.live if is_step else ():
                self.steps_taken[rank] += 1

    @property
    def somebody_missed_a_step(self) -> bool:
        return self._began_earlier or min(self.steps_taken) < max(self.steps_taken)

    def skew(self) -> float:
        """The share of the longest rank's steps that the shortest one did not take, in [0, 1]."""
        longest = max(self.steps_taken)
        return 1 - min(self.steps_taken) / longest if longest else 0.0

    def somebody_may_continue(self) -> bool:
        return bool(self._may_continue)

    @property
    def speaker(self) -> int | None:
        """A rank that is expected to take the coming step, the same one on all ranks."""
        return max(self._may_continue, default=None)

    def divisor(self, agreement: Agreement) -> float:
        """What the summed gradients of a step are divided by; 0: nothing is to be applied."""
        if not agreement.live:
            return 0
        if agreement.weight:
            return agreement.weight
        return self.num_ranks if self.divide_by_initial_world_size else len(agreement.live)


class Joinable(ABC):
    """Something whose collectives a joined rank can shadow: list it in `Join([...])`."""

    _join: Join | None = None

    @abstractmethod
    def join_hook(self, **kwargs: Any) -> JoinHook:
        """The hook for one Join. kwargs: those given to Join, the same for all joinables."""

    @property
    @abstractmethod
    def join_device(self) -> torch.device:
        """Where the joinable's tensors live."""

    @property
    @abstractmethod
    def join_group(self) -> Group:
        """The group of its collectives; one group for all joinables of a Join."""

    def _carries_agreement(self) -> bool:
        """Whether its steps end with an agreement, of its own or of a joinable beside it."""
        return False

    def _ends_step(self) -> bool:
        """Whether it hands that agreement to `Join.record` itself."""
        return False

    def _check_joined_with(self, joinables: Sequence[Joinable]) -> None:
        """Raise ValueError if it cannot be shadowed without another joinable."""


class _Stepping(Protocol):
    def step(self) -> object: ...


_active: list[Join] = []


def active_join() -> Join | None:
    """The innermost Join that this process is in, if it is enabled."""
    return _active[-1] if _active else None


class Join:
    """`with Join([model, optimizer]):` around a training loop over uneven inputs.

    joinables: in the order in which their hooks run. enable=False makes it do nothing.
    throw_on_early_termination: instead of shadowing, raise RuntimeError on every rank at the first
    step that some rank cannot take.
    step_along: what the body calls `.step()` on once per step besides the joinables: learning-rate
    schedules, and a plain optimizer of a model that is not sharded. A joined rank calls it in the
    steps that it shadows, in this order, so that their state stays equal on all ranks.
    skew_warning: warn on exit, with the numbers of all ranks, if the shortest rank missed more
    than this share of the longest one's steps. None: never.
    kwargs: handed to every joinable's `join_hook`; ours know `divide_by_initial_world_size`
    (True: the sum over live ranks is divided by the number of all ranks; False: of live ones;
    neither where losses are weighed, see `DistributedDataParallel.weigh`).

    When the body raises, the peers are released at once with this exception and its traceback;
    the group's generation ends with it. An exception leaves the joinables as they are, and every
    exit takes this Join off them.

    Raises ValueError for no joinables, for different groups, and for joinables that need another.
    Source: torch.distributed.algorithms.Join.
    """

    def __init__(
        self,
        joinables: Sequence[Joinable],
        enable: bool = True,
        throw_on_early_termination: bool = False,
        *,
        step_along: Sequence[_Stepping] = (),
        skew_warning: float | None = 0.5,
        **kwargs: Any,
    ) -> None:
        if len(joinables) == 0:
            raise ValueError("The join context manager requires at least one joinable")
        groups = [joinable.join_group for joinable in joinables]
        if any(group is not groups[0] for group in groups):
            raise ValueError(
                f"Using join context manager with multiple process groups: {groups}. "
                "List only joinables of one group"
            )
        for joinable in joinables:
            joinable._check_joined_with(joinables)
        self._joinables = list(joinables)
        self._hooks = [joinable.join_hook(**kwargs) for joinable in joinables]
        self._group = groups[0]
        self._device = joinables[0].join_device
        self._enable = enable
        self._throws = throw_on_early_termination
        self._step_along = list(step_along)
        self._skew_warning = skew_warning
        self._needs_header = not all(joinable._carries_agreement() for joinable in joinables)
        # With a header, that counts the steps; else the first that knows of each.
        self._counts_steps = next(
            (j for j in joinables if j._ends_step() and not self._needs_header), None
        )
        self.last_step_live: tuple[int, ...] = ()
        """Ranks that took the last step; empty for the one that all ranks shadow at the end."""
        self.ledger = JoinLedger(
            self._group.size, bool(kwargs.get("divide_by_initial_world_size", True))
        )

    def __enter__(self) -> Self:
        if self._enable:
            for joinable in self._joinables:
                joinable._join = self
            _active.append(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._enable:
            return
        try:
            if isinstance(error, Interrupted):
                return  # All ranks are here: the generation goes on.
            if error is not None:
                self._group.abort(error)
                return
            self.shadow()
            is_last_joiner = self._group.rank in self.ledger.last_live
            for hook in self._hooks:
                hook.post_hook(is_last_joiner)
            self._warn_of_skew()
        finally:
            _active.remove(self)
            for joinable in self._joinables:
                joinable._join = None

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.__exit__(kind, error, trace)

    def shadow(self) -> None:
        """Take part in the steps that other ranks still take, until nobody takes any."""
        ledger, bound = self.ledger, boundary()
        ledger.live = False
        ledger.has_next = False
        bound.pass_()
        while self._header() if self._needs_header else ledger.somebody_may_continue():
            bound.steps.has_joined = True
            for hook in self._hooks:
                hook.main_hook()
            if self.last_step_live:
                for follower in self._step_along:
                    follower.step()
            bound.pass_()
        bound.steps.has_joined = False
        ledger.live = True
        ledger.has_next = True

    def begin_epoch(self, batches_per_rank: Sequence[int]) -> None:
        """An iteration over a shard begins, which knows how many batches every rank has.

        One that was stopped inside its epoch knows only how many are left to this rank: then, and
        only then, one all-gather tells.
        """
        place = boundary().place
        if place is None or not place.is_resumed:
            self.ledger.begin_epoch(batches_per_rank)
            return
        left = torch.tensor([boundary().steps.batches_left or 0], device=self._device)
        everybody = left.new_empty(self._group.size)
        self._group.all_gather(everybody, left).wait()
        self.ledger.begin_epoch(everybody.tolist())
        self.ledger.resume(place.last_live)

    def record(self, joinable: Joinable, agreement: Agreement) -> None:
        """A step of a joinable ended with this agreement."""
        self.last_step_live = agreement.live
        self.ledger.record(agreement, is_step=joinable is self._counts_steps)
        self._raise_if_exhausted(agreement.live)

    @staticmethod
    def notify_join_context(joinable: Joinable) -> Work | None:
        """To be called by a joinable of your own before its collectives of a step.

        Only the first joinable of a Join that needs it sends anything: a vector of one int32 per
        rank. Returns the finished work in that case.
        """
        join = joinable._join
        if join is None or not join._needs_header or joinable is not join._joinables[0]:
            return None
        return join._exchange_header()[1]

    def _header(self) -> bool:
        """Whether anybody takes the coming step."""
        live, _ = self._exchange_header()
        return bool(live)

    def _exchange_header(self) -> tuple[tuple[int, ...], Work]:
        header = torch.zeros(self._group.size, dtype=torch.int32, device=self._device)
        if self.ledger.live:
            header[self._group.rank] = 1
        work = self._group.all_reduce(header)
        work.wait()
        live = tuple(rank for rank, flag in enumerate(header.tolist()) if flag)
        self.last_step_live = live
        self.ledger.record(Agreement(live, live, ()))
        self._raise_if_exhausted(live)
        return live, work

    def _raise_if_exhausted(self, live: tuple[int, ...]) -> None:
        if self._throws and 0 < len(live) < self._group.size:
            exhausted = [rank for rank in range(self._group.size) if rank not in live]
            raise RuntimeError(
                f"Detected at least one rank that exhausted inputs: ranks {exhausted}. Every rank "
                "raises this at the same step, because throw_on_early_termination is set"
            )

    def _warn_of_skew(self) -> None:
        ledger = self.ledger
        if self._skew_warning is None or ledger.skew() <= self._skew_warning:
            return
        by_rank = ", ".join(f"rank {rank}: {n}" for rank, n in enumerate(ledger.steps_taken))
        warnings.warn(
            f"uneven inputs: a rank had no data for {ledger.skew():.0%} of the steps inside Join "
            f"({by_rank}). Training is exact, but that rank only waited; deal the data out more "
            "evenly, or raise skew_warning",
            stacklevel=4,
        )
