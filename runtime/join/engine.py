"""What a Join takes, the `Joinable`, and the engine of a `Join` (join.py) on one rank."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from chorusline.actors.errors import Interrupted
from chorusline.collectives.contract.errors import name_ranks
from chorusline.collectives.contract.work import Work
from chorusline.collectives.group import Group
from chorusline.collectives.operations.host_reads import device_numbers

from ..process.agreement import Agreement, Note
from ..process.running import RecoveryInterface
from ..process.step_boundary import boundary
from .conductor import Conductor
from .error_notes import (
    DIVIDES_BY_ALL,
    FIRST_PLACE,
    HAS_OUTER,
    IN_JOIN,
    LAST_PLACE,
    THROWS,
    explain,
    warn_of_skew,
)
from .join_hook import JoinHook
from .ledger import JoinLedger
from .pass_pattern import PassPattern
from .step_along import steps_any

_KNOWN = (torch.optim.Optimizer, LRScheduler, AveragedModel)
"""Objects in `step_along` that need no comparison of parameters in a step: an average is compared
at the end, and the others read no parameters beside a step."""


_WHY_CLOSED = (
    "the generator that contains a Join was closed before its end, as by break or by an error in "
    "the loop over it. Write the Join around that loop: a rank that leaves it then shadows the "
    "steps that the others still take"
)


class _Batches(Protocol):
    """What a Join asks an iteration over a shard (data/batches.py)."""

    num_given: int

    def has_more(self) -> bool: ...


class Joinable(ABC):
    """An object whose collectives a joined rank can shadow: list it in `Join([...])`.

    Example:

        class Counter(cl.Joinable):
            join_group, join_device = group, group.device
            def join_hook(self, **kwargs):
                return cl.JoinHook()
            def step(self):
                cl.Join.notify_join_context(self)  # And then its collectives.
    """

    _join: JoinEngine | None = None  # None: in no Join
    _pattern: PassPattern | None = None
    """How often its agreements come, as far as its Joins have seen; None before the first Join."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        if "join_process_group" in vars(cls) and "join_group" not in vars(cls):
            raise TypeError(
                f"{cls.__name__} has join_process_group, as torch's Joinables do; call it "
                "join_group here, and return a chorusline Group"
            )
        super().__init_subclass__(**kwargs)

    @abstractmethod
    def join_hook(self, **kwargs: Any) -> JoinHook:
        """The hook for one Join. kwargs: those given to Join; every joinable gets the same."""

    @property
    @abstractmethod
    def join_device(self) -> torch.device:
        """The device of the joinable's tensors."""

    @property
    @abstractmethod
    def join_group(self) -> Group:
        """The group of the joinable's collectives; all joinables of a Join have the same ranks."""

    def _carries_agreement(self) -> bool:
        """Whether a step ends with an agreement, of this joinable or of another one in the Join."""
        return False

    def _ends_step(self) -> bool:
        """Whether this joinable hands the step's agreement to `JoinEngine.record`."""
        return False

    def _finishes_steps_of(self, reducer: object) -> bool:
        """Whether it ends the steps whose gradients `reducer` sends."""
        return False

    def _begins_passes(self) -> bool:
        """Whether this joinable calls `notify_join_context` before each of its passes, and before
        all collectives of a batch that begins with it."""
        return False

    def _is_training(self) -> bool:
        """Whether the pass that this joinable begins trains; an evaluation begins no batch."""
        return bool(getattr(self, "training", True))

    def _announces_hook(self) -> bool:
        """Whether this joinable announces its main hook; if not, the hook runs right after that of
        the joinable before it."""
        return True

    def _groups_to_follow(self) -> Sequence[Group]:
        """The joinable's groups whose collectives differ from step to step."""
        return ()

    def _channel(self) -> Group | None:
        """The group on which a joinable announces all parts of its steps; None: it does not."""
        return None

    def _attach(self) -> None:
        """A Join begins."""

    def _detach(self) -> None:
        """A Join ends, or `_attach` has failed."""

    def _shadowed(self) -> None:
        """All ranks have run out of data, and this one has shadowed what it announces."""

    def _shadow(self, *details: int) -> None:
        """Do the part of a step that was announced with these numbers."""
        raise NotImplementedError

    def _check_joined_with(self, joinables: Sequence[Joinable]) -> None:
        """Raise ValueError if this joinable cannot be shadowed without another one."""


def _refuse_torchs_join(joinable: object, config: object) -> None:
    """torch's Join has been given `joinable`, and sets its `config` in it."""
    raise TypeError(
        f"torch's Join cannot shadow the collectives of a chorusline {type(joinable).__name__}: "
        "write chorusline.Join, which takes the same list"
    )


class GroupJoinable(Joinable):
    """A joinable whose collectives run on one group, and whose steps carry an agreement."""

    group: Group

    _join_config = property(fset=_refuse_torchs_join)
    """torch's Join sets it in each of its joinables, before anything else that ours lack."""

    @property
    def join_device(self) -> torch.device:
        return self.group.device

    @property
    def join_group(self) -> Group:
        return self.group

    def _carries_agreement(self) -> bool:
        return True

    def _has_next(self) -> bool:
        """Whether this rank may take another step."""
        return self._join.ledger.may_continue if self._join is not None else True

    def _vote_flags(self) -> int:
        return self._join.vote_flags_of(self) if self._join is not None else 0

    def _divisor(self, agreement: Agreement) -> float:
        """The number by which the summed gradient is divided to get the mean."""
        if self._join is not None:
            return self._join.ledger.divisor(agreement)
        return agreement.weight or self.group.size

    def _step_agreed(
        self,
        agreement: Agreement,
        recovery: RecoveryInterface | None,
        *,
        ends_step: bool,
        counts: bool,
    ) -> None:
        """All ranks have agreed on a step of this joinable. All that note steps learn it here.

        recovery: takes the joinable to the next generation.
        ends_step: the step is counted, and applied next; False where the optimizer of the model
            asks all ranks once more.
        counts: the samples of the step count now; those of a plain optimizer, which each rank
            steps by itself, count when it has stepped.
        """
        if self._join is not None:
            # First: it may raise an error on all ranks, and then none of them applies the step.
            self._join.record(self, agreement)
        if recovery is not None and (counts or (ends_step and agreement.live)):
            recovery.step_agreed(agreement.cursors, counts=counts)
        boundary().step_agreed(agreement, self.group, ends_step=ends_step)


class JoinEngine:
    """A Join on one rank, as joinables, iterations over shards and recovery see it."""

    def __init__(
        self,
        joinables: Sequence[Joinable],
        groups: Sequence[Group],
        hook_arguments: Mapping[str, Any],
        *,
        step_along: Sequence[object],
        followers: Sequence[Callable[[], object]],
        throws: bool,
        skew_warning: float | None,
    ) -> None:
        """followers: what a joined rank calls for `step_along`. The others as in `Join`."""
        self._followers = followers
        self._joinables = list(joinables)
        self._groups = [joinable.join_group for joinable in joinables]
        self._group = self._groups[0]
        followed = [*groups, *(g for j in joinables for g in j._groups_to_follow())]
        _check_groups(self._groups, followed)
        self._followed = list(dict.fromkeys(followed))
        self._hooks = [joinable.join_hook(**hook_arguments) for joinable in joinables]
        self._device = joinables[0].join_device
        self._throws = throws
        self._exhausted: RuntimeError | None = None
        """What every rank raises at the same step for throw_on_early_termination, so that no peer
        waits; None before."""
        self._step_along = list(step_along)
        self.averages = [each for each in step_along if isinstance(each, AveragedModel)]
        self.runs_functions = any(not isinstance(each, _KNOWN) for each in step_along)
        """Whether a joined rank calls functions that may read or write parameters."""
        self.may_step_schedules = self.runs_functions or any(
            isinstance(each, LRScheduler) for each in step_along
        )
        self.calls_functions = False
        """Whether this rank, without data, is in what `step_along` lists."""
        self._skew_warning = skew_warning
        carries = [joinable._carries_agreement() for joinable in joinables]
        channel = joinables[0]._channel()
        follows = bool(followed) or channel is not None
        self._needs_header = not follows and not all(carries)
        # Several joinables may end the same step: one of them says when, to those that step along.
        self._ends_steps = next((j for j in joinables if j._ends_step()), None)
        # It counts the steps as well, where no header does.
        self._counts_steps = None if self._needs_header else self._ends_steps
        self._announcing = {n for n, one in enumerate(joinables) if one._announces_hook()}
        enders = {n for n in self._announcing if joinables[n]._ends_step()}
        self._steps_after = self._waits_for = enders or self._announcing
        """The joinables whose parts of a step have to come before a rank without data steps
        along, and those that have not come yet."""
        self._models = [j for j in joinables if j._begins_passes()]
        self._pacemaker: Joinable | None = None  # the model that ran first; None: none has
        self._turn = 0  # the number of the joinable that stepped last, plus one
        self.last_step_live: tuple[int, ...] = ()
        """The ranks that took the last step; none for the step that all ranks shadow at the end."""
        self.at_boundary: Callable[[], None] | None = None
        """Called after each step that this rank shadows, as `ctx.shard` does between batches; None
        before the first iteration over a shard."""
        self.together: list[Sequence[_Batches]] = []
        """The iterations over shards inside this Join, the innermost last: several of them where
        their batches come together, as in a zip."""
        self._given_last: Sequence[_Batches] = ()
        """The iterations of `together` that have given their last batch."""
        self._num_around = -1
        """How many iterations of `together` are around the one that is under way, or that has run
        out; -1: all but the last."""
        self.ledger = JoinLedger(
            self._group.size, bool(hook_arguments.get("divide_by_initial_world_size", True))
        )
        if self._ends_steps is not None:
            if self._ends_steps._pattern is None:
                self._ends_steps._pattern = PassPattern()
            self.ledger.pattern = self._ends_steps._pattern
        self._conductor = (
            Conductor(self._followed, self.ledger, self._begun, channel) if follows else None
        )
        self._follows_evaluation = bool(groups)

    def vote_flags_of(self, joinable: Joinable) -> int:
        """What a vote on a step of `joinable` says of the Join: the bits of IN_JOIN,
        DIVIDES_BY_ALL, THROWS and HAS_OUTER, and above them the joinable's place in the list."""
        divides = DIVIDES_BY_ALL * self.ledger.divide_by_initial_world_size
        place = min(self._joinables.index(joinable), LAST_PLACE)
        flags = IN_JOIN + divides + THROWS * self._throws + HAS_OUTER * self._has_outer
        return flags + FIRST_PLACE * place

    @property
    def _has_outer(self) -> bool:
        """Whether this rank has more of a loop around the iteration that is under way, or has run
        out: more batches, or one from which it has taken no step of the iteration yet."""
        around = self.together[: self._num_around]
        return any(
            beside is self._given_last or (beside and all(one.has_more() for one in beside))
            for beside in around
        )

    def _comes_next(self) -> bool:
        """Whether some rank may take another step before this rank has data again: one of the
        iteration that is under way; if this rank is through with all loops, any step."""
        ledger = self.ledger
        return ledger.somebody_may_continue() or (ledger.somebody_has_outer and not self._has_outer)

    def is_of_ranks(self, group: Group) -> bool:
        """Whether this Join is of the ranks of `group`, and of this one among them."""
        return self._group.rank == group.rank and self._group.ranks == group.ranks

    @property
    def live_ranks(self) -> tuple[int, ...]:
        """As in `Join`."""
        return self._conductor.live if self._conductor else self.last_step_live

    def enter(self) -> None:
        """Raises RuntimeError inside a Join of the same joinables."""
        if any(joinable._join is not None for joinable in self._joinables):
            raise RuntimeError(
                "this Join is inside another one that lists the same joinables, and a step belongs "
                "to one Join. Write one Join around the loop over batches of each epoch, or one "
                "around the loop over epochs"
            )
        for joinable in self._joinables:
            joinable._join = self
        self._turn, self._pacemaker = 0, None
        if self._conductor:
            self._conductor.attach()
        try:
            for joinable in self._joinables:
                joinable._attach()
        except BaseException:
            self._end()
            raise
        self._boundary = boundary()
        self._boundary.joins.append(self)
        self.ledger.pattern.begin()

    def leave(self, error: BaseException | None) -> None:
        """error: with which the body has ended."""
        try:
            if isinstance(error, Interrupted):
                return  # All ranks raise it at the same step, so no peer waits.
            if error is not None and error is self._exhausted:
                return  # As all ranks do.
            if error is not None:  # Peers may wait in a collective of this step.
                self._explain(error)
                # Whether `break` has closed it, or an error, is not known here.
                if isinstance(error, GeneratorExit):
                    error = RuntimeError(_WHY_CLOSED)
                self._release_peers(error)
                return
            try:
                self.shadow()
                is_last_joiner = self._group.rank in self.ledger.last_live
                for hook in self._hooks:
                    hook.post_hook(is_last_joiner)
            except BaseException as mine:
                self._explain(mine)
                if mine is not self._exhausted:
                    self._release_peers(mine)
                raise
        finally:
            self._boundary.joins.remove(self)
            self._end()

    def _end(self) -> None:
        if self._conductor:
            self._conductor.detach()
        for joinable in self._joinables:
            joinable._detach()
            joinable._join = None

    def _explain(self, error: BaseException) -> None:
        # Two of them, whatever they are, may come in another order than that of the list.
        has_several = sum(joinable._ends_step() for joinable in self._joinables) > 1
        explain(error, self.absent_ranks, follows=self.is_following, has_several=has_several)

    def release_followers(self) -> None:
        """All ranks stop between these two steps: release the ranks that follow this one."""
        if self._conductor:
            self._conductor.stop()

    def _release_peers(self, error: BaseException) -> None:
        for group in dict.fromkeys([*self._groups, *self._followed]):
            group.abort(error)

    def shadow(
        self,
        until: Callable[[], bool] = lambda: False,
        beside: Sequence[_Batches] = (),
    ) -> None:
        """Shadow the steps that other ranks still take, until no rank takes any, or `until` is
        true: the samples of a lost rank may go to ranks that shadow.

        beside: of `together`, the iterations that have run out; default: all have. Where loops are
            around them that this rank is in, it shadows steps in their bodies only."""
        places = [place for place, one in enumerate(self.together) if one is beside]
        self._num_around = places[0] if places else 0
        try:
            self._shadow(until)
        finally:
            self._num_around = -1
            # After an error too: a program that catches it, or runs again, has data.
            boundary().status.has_joined = False

    def _shadow(self, until: Callable[[], bool]) -> None:
        ledger, bound = self.ledger, boundary()
        ledger.join()
        bound.stop_if_agreed()
        if self._conductor:
            # The collectives differ from step to step: do what the conductor announces. After that
            # no rank has data, and the loop below shadows at most the blind step at the end.
            self._conductor.follow(ledger.known_batch, self._run_announced_hooks)
            for joinable in self._joinables:
                joinable._shadowed()
            bound.stop_if_agreed()
        # A header asks all ranks before each step; agreements of the last step say it in advance.
        while self._exchange_header()[0] if self._needs_header else self._comes_next():
            bound.status.has_joined = True
            for hook in self._hooks:
                hook.main_hook()
            self._follow_step()
            bound.stop_if_agreed()
            if until():  # This rank has data again, and leaves with it.
                break
        ledger.batch = None
        ledger.live = True
        ledger.has_next = True

    def _run_announced_hooks(self, number: int, *details: int) -> None:
        """Joinable `number` has begun its part of a step: run its hook, and the hooks of the next
        joinables, up to one that announces its own. details: see `Joinable._shadow`."""
        boundary().status.has_joined = True
        if self._joinables[number]._channel() is not None:
            self._joinables[number]._shadow(*details)
            return
        self._hooks[number].main_hook()
        for behind in range(number + 1, len(self._hooks)):
            if behind in self._announcing:
                break
            self._hooks[behind].main_hook()
        self._waits_for = self._waits_for - {number}  # The body may come to them in any order.
        if not self._waits_for:
            self._waits_for = self._steps_after
            self._follow_step()

    def _follow_step(self) -> None:
        # In the blind step at the end no rank had data: nothing is due.
        # Where the pattern expects no step, the ranks with data run another pass for it first.
        is_due = self._ends_steps is None or self.ledger.pattern.expects_step
        if self.last_step_live and is_due:
            self.step_along()

    def step_along(self) -> None:
        """Do what the body does once in a step, on a rank without data."""
        self._step_followers()
        if self.at_boundary is not None:
            self.at_boundary()

    def _step_followers(self) -> None:
        status = boundary().status
        before, status.has_joined = status.has_joined, True
        self.calls_functions = True
        try:
            for follow in self._followers:
                follow()
        except AssertionError as error:
            # torch's GradScaler makes its scale in its first scale(): never, without a batch.
            if "_scale is None" not in str(error):
                raise
            raise RuntimeError(
                "step_along steps by a GradScaler, which has no scale on rank "
                f"{self._group.rank}: this rank has had no batch so far, and a GradScaler gets "
                "its scale in its first scale(loss). Call scaler.scale(torch.zeros((), "
                "device=...)) on all ranks before the Join, or use a ZeroRedundancyOptimizer "
                "and chorusline.GradScaler"
            ) from error
        finally:
            self.calls_functions = False
            status.has_joined = before

    @property
    def has_followers(self) -> bool:
        return bool(self._followers)

    def steps_along(self, model: torch.nn.Module) -> bool:
        """Whether a joined rank steps an optimizer of this model."""
        return steps_any(self._step_along, model)

    def settles(self, joinable: Joinable) -> bool:
        """Whether `joinable` learns at the end of the Join, for all that steps along, whether a
        step has followed its last pass."""
        return bool(self._followers) and joinable is self._ends_steps

    def settle(self, has_stepped: bool) -> None:
        """The last pass of this Join is over on all ranks. has_stepped: whether the optimizer of a
        rank with data has stepped after it."""
        expected = self.ledger.pattern.expects_step
        # Ranks without data have stepped what they step along, which cannot be taken back.
        if expected and not has_stepped:
            ranks = range(self._group.size)
            joined = [rank for rank in ranks if rank not in self.ledger.last_live]
            raise RuntimeError(self._why_not_skipped(self.absent_ranks or joined))
        # This rank shadowed the pass and did not know that a step would follow.
        # (`last_step_live` is empty after the blind step at the end.)
        if has_stepped and not expected and self._group.rank not in self.ledger.last_live:
            self._step_followers()

    def _why_not_skipped(self, absent: Sequence[int]) -> str:
        """absent: the ranks that have run out of data, and stepped what is in step_along; empty
        where all have data again by now."""
        call = "calls" if len(absent) == 1 else "call"
        who = name_ranks(absent, "has", "have") if absent else "some ranks have"
        # What several sharded optimizers need is a group, too, unless each has one step in a batch.
        remedy = (
            "use a ZeroRedundancyOptimizer for each model in place of step_along, and give Join a "
            "group to follow, groups=[ctx.group.new_group(range(ctx.world_size))]; then each step "
            "is announced, as often as the body takes it"
            if len(self._models) > 1
            else "use a ZeroRedundancyOptimizer, which does not need this"
        )
        return (
            "the ranks with data ran a different number of backward passes for this step than for "
            f"the step before, or left out optimizer.step(), but {who} run out of data, and {call} "
            "step() of what is in step_along after as many passes as before. Run the same number "
            f"of passes in every step, run all but the last in model.no_sync(), or {remedy}"
        )

    @property
    def absent_ranks(self) -> list[int]:
        """The ranks that are known to have run out of data."""
        live = self.live_ranks
        return [rank for rank in range(self._group.size) if live and rank not in live]

    def check_may_begin(self, joinable: Joinable) -> None:
        """`joinable` begins a step, or a backward pass, on a rank with data. Raises RuntimeError if
        the other ranks have left the Join: they assume that this one takes no more; and inside
        another Join, whose end does not shadow it."""
        ledger, inner = self.ledger, boundary().joins[-1]
        # Ranks in threads of one process share the list: another rank's Join is not around this.
        if inner is not self and inner.is_of_ranks(self._group):
            raise RuntimeError(
                f"a {type(joinable).__name__} that an outer Join lists takes a step inside another "
                "Join. A rank that is out of data would shadow the steps of the inner Join alone, "
                "while the others wait for it in this one. List the joinables of both in one Join, "
                "Join([first, second])"
            )
        if joinable is self._counts_steps and ledger.is_over:
            raise RuntimeError(
                "the last batch of this epoch has more steps, or synchronised backward passes, "
                f"than any batch before ({ledger.pattern.of_batch} so far), and the other ranks do "
                "not wait for another one. Give all batches the same number of them (passes that "
                "only accumulate belong in model.no_sync()), or give the Join a group to follow, "
                "groups=[…]; then each one is announced"
            )

    def expects_pass_of(self, model: Joinable) -> bool:
        """Whether a rank that has run out of data would now send gradients of this model next: it
        shadows the joinables in the order of the list, and leaves when no step follows. A pass of
        another model may reach this one out of turn, as a generator's reaches its critic."""
        if self.is_following:
            return True
        if not self._comes_next():
            return False
        group = model.join_group
        same = [j for j in self._models if j.join_group is group]
        later = [j for j in same if self._joinables.index(j) >= self._turn]
        # After the last one of the list the round begins again.
        return model is (later or same)[0]

    @property
    def takes_forward_for_step(self) -> bool:
        """Whether each `notify_join_context` of the first joinable begins a shadowed step."""
        return self._needs_header

    @property
    def is_following(self) -> bool:
        """Whether joined ranks follow collectives that are announced to them."""
        return self._conductor is not None

    @property
    def has_several_models(self) -> bool:
        return len(self._models) > 1

    def change_group(self, group: Group) -> None:
        """Continue in another group; a Join that follows groups cannot."""
        assert not self.is_following
        self._group, self._groups = group, [group] * len(self._groups)

    def begin_epoch(self, batches_per_rank: Sequence[int] | None) -> None:
        """An iteration over a shard begins. batches_per_rank: how many batches each rank has; None
        if unknown."""
        self.ledger.begin_epoch(batches_per_rank)
        if boundary().resumed_live:  # An earlier run has taken steps of this epoch.
            self.ledger.resume(boundary().resumed_live)

    @property
    def is_between_batches(self) -> bool:
        """Whether the body of a loop over a shard runs in this Join."""
        return any(one.num_given for beside in self.together for one in beside)

    def begin_batch(self, number: int, beside: Sequence[_Batches], *, is_last: bool) -> None:
        """Iterations over shards give this rank their batch `number`."""
        self._given_last = beside
        self.ledger.begin_batch(number, is_last=is_last)
        # Where the ranks do not know each other's numbers of batches, the forward begins the batch.
        if self._conductor and self.ledger.known_batch is not None:
            self._conductor.begin_batch(number)

    def begin_hook(self, joinable: Joinable) -> None:
        """`joinable` begins its part of the step: ranks that follow must run its main hook."""
        if self._conductor:
            self._conductor.begin_hook(self._joinables.index(joinable))

    def newest_rank(self, live: tuple[int, ...]) -> int:
        """The rank whose state all ranks take after a step of `live`. Where Join follows groups, it
        had data for the last batch: other ranks may only have reduced earlier gradients."""
        return max(self._conductor.last_live if self._conductor else live)

    def _begun(self, live: tuple[int, ...]) -> None:
        """A batch begins, for which these ranks have data."""
        self._waits_for = self._steps_after
        if self._counts_steps is None:  # No joinable will record an agreement on a step.
            self.last_step_live = live
            self.ledger.record(Agreement(live, live, ()))
            self._tell_skew()
        self._raise_if_exhausted(live)

    def record(self, joinable: Joinable, agreement: Agreement) -> None:
        """A step of `joinable` has ended with this agreement."""
        self._turn = (self._joinables.index(joinable) + 1) % len(self._joinables)
        if joinable is self._ends_steps and agreement.live:
            was_expected = self.ledger.pattern.note(agreement.says(Note.UNSTEPPED) == 0)
            # Ranks without data have stepped along, or not, as the pattern let expect.
            if not was_expected and self._step_along and self.absent_ranks:
                raise RuntimeError(self._why_not_skipped(self.absent_ranks))
        self.last_step_live = agreement.live
        self.ledger.record(agreement, is_step=joinable is self._counts_steps)
        self._tell_skew()
        self._raise_if_exhausted(agreement.live)

    def notified(self, joinable: Joinable) -> Work | None:
        """As `Join.notify_join_context`."""
        if not joinable._begins_passes():
            self.check_may_begin(joinable)
        conductor = self._conductor
        if conductor is None:
            # One header is enough for a step: that of the first joinable.
            if not self._needs_header or joinable is not self._joinables[0]:
                return None
            return self._exchange_header()[1]
        # SyncBatchNorm shares no statistics in evaluation; the user's groups may be used there too.
        counts = self._follows_evaluation or joinable._is_training()
        # With a known batch number, the iteration over the shard has begun the batch.
        if self.ledger.known_batch is None and counts and self._may_begin_batch(joinable):
            conductor.begin_batch()
        if joinable._announces_hook() and not joinable._begins_passes():
            self.begin_hook(joinable)
        return None

    def _may_begin_batch(self, joinable: Joinable) -> bool:
        """Whether the body may have begun again with this joinable. In a loop over a list nothing
        else says that a rank has another batch, and a body may use its models in any order, or in
        some batches only: each forward pass asks all ranks. A pass without gradients may be run by
        one rank alone, so of these only the passes of the model that ran first do."""
        if not self._models:
            return joinable is self._joinables[0]
        if not joinable._begins_passes():
            return False
        self._pacemaker = self._pacemaker or joinable
        return joinable is self._pacemaker or torch.is_grad_enabled()

    def _exchange_header(self) -> tuple[tuple[int, ...], Work]:
        """The ranks that take the coming step."""
        mine = [0] * self._group.size
        mine[self._group.rank] = int(self.ledger.live)
        header = device_numbers(mine, torch.int32, self._device)
        reading = self._group.all_reduce_and_read(header)
        live = tuple(rank for rank, flag in enumerate(reading.tolist()) if flag)
        self._begun(live)
        return live, reading.work

    def _tell_skew(self) -> None:
        """Warn once, on the lowest rank that has taken the step with which the limit is passed."""
        limit = self._skew_warning
        if limit is None or self._throws or self.ledger.skew() <= limit:
            return
        # On all ranks, which count the same steps, so that one of them warns, and once.
        self._skew_warning = None
        if self._group.rank == min(self.ledger.last_live):
            warn_of_skew(self.ledger.skew(), self.ledger.steps_taken)

    def _raise_if_exhausted(self, live: tuple[int, ...]) -> None:
        if self._throws and 0 < len(live) < self._group.size:
            absent = [rank for rank in range(self._group.size) if rank not in live]
            self._exhausted = RuntimeError(
                f"Detected at least one rank that exhausted inputs: {name_ranks(absent)}. Every "
                "rank raises this at the same step, because throw_on_early_termination is set"
            )
            raise self._exhausted


def _check_groups(groups: Sequence[Group], followed: Sequence[Group]) -> None:
    """Raises ValueError for groups that cannot be in one Join. groups: of the joinables."""
    first = groups[0]
    for group in (*groups, *followed):
        if group.ranks != first.ranks or group.rank != first.rank:
            raise ValueError(
                "Using join context manager with multiple process groups of different ranks: "
                f"{group} has {list(group.ranks)}, {first} has {list(first.ranks)}. A rank joins "
                "in all of them or in none; use one Join for each set of ranks"
            )
    for group in followed:
        if group in groups:
            raise ValueError(
                f"{group} is the group of a joinable, which issues collectives of its own on "
                "it. Pass another group of these ranks: group.new_group(range(group.size))"
            )
