"""What one rank knows of the steps inside one Join. This file runs no collective."""

from __future__ import annotations

from collections.abc import Sequence

from ..process.agreement import Agreement
from ..process.leftovers import newest_ranks
from .error_notes import HAS_OUTER
from .pass_pattern import PassPattern


class JoinLedger:
    """Which ranks take steps inside one Join, and how many steps each rank has taken.

    live: this rank has data for the current step.
    has_next: this rank may take another step; without data it does if a loss has given it samples.
    last_live: the ranks with data in the last step that any rank took; at the end, those that have
        run the most passes after it, if any have run one.
    ran_after_last_step: whether any has.
    steps_taken: by rank, the number of steps.
    """

    def __init__(self, num_ranks: int, divide_by_initial_world_size: bool) -> None:
        self.num_ranks = num_ranks
        self.divide_by_initial_world_size = divide_by_initial_world_size
        self.live = True
        self.has_next = True
        self.last_live: tuple[int, ...] = tuple(range(num_ranks))
        self.ran_after_last_step = False
        self.steps_taken = [0] * num_ranks
        self.pattern = PassPattern()
        self._is_last_batch = False
        self.began_earlier = False
        # Before the first agreement any rank may have data.
        self._may_continue = tuple(range(num_ranks))
        self.somebody_has_outer = False
        """Whether a rank has more batches of a loop in whose body it iterates another shard."""
        self._batches_per_rank: Sequence[int] = ()
        self.batch: int | None = None
        """The number of this rank's batch, or of its next one; None if unknown."""

    def change_ranks(self, former_ranks: Sequence[int]) -> None:
        """Renumber the ranks. former_ranks: by new rank, its former rank; -1 for a newcomer."""
        new = {old: rank for rank, old in enumerate(former_ranks) if old >= 0}
        self.num_ranks = len(former_ranks)
        self.last_live = tuple(new[rank] for rank in self.last_live if rank in new)
        self._may_continue = tuple(new[rank] for rank in self._may_continue if rank in new)
        self.steps_taken = [self.steps_taken[old] if old >= 0 else 0 for old in former_ranks]

    def begin_epoch(self, batches_per_rank: Sequence[int] | None) -> None:
        """An iteration begins. batches_per_rank: how many batches each rank has; None: unknown."""
        self.set_batches(batches_per_rank)
        is_known = batches_per_rank is not None
        self._may_continue = self.ranks_with_batch(0) if is_known else tuple(range(self.num_ranks))
        self.batch = 0

    def set_batches(self, batches_per_rank: Sequence[int] | None) -> None:
        self._batches_per_rank = batches_per_rank or ()

    @property
    def known_batch(self) -> int | None:
        """`batch`, if the ranks know each other's numbers of batches; else None."""
        return self.batch if self._batches_per_rank else None

    def join(self) -> None:
        """This rank has run out of data."""
        self.live = self.has_next = self._is_last_batch = False

    def begin_batch(self, number: int, *, is_last: bool) -> None:
        """This rank gets its batch `number` of an iteration over a shard."""
        self.batch = number
        self.pattern.begin_batch()
        self.has_next = not is_last
        self._is_last_batch = is_last

    @property
    def may_continue(self) -> bool:
        """Whether this rank may take another step: with another batch, or with this one."""
        return self.has_next or (self._is_last_batch and self.pattern.may_repeat)

    @property
    def is_over(self) -> bool:
        """Whether the ranks have agreed in this batch, the last one, that no step follows."""
        return self._is_last_batch and self.pattern.of_batch > 0 and not self._may_continue

    def ranks_with_batch(self, number: int) -> tuple[int, ...]:
        return tuple(rank for rank, n in enumerate(self._batches_per_rank) if n > number)

    def resume(self, last_live: tuple[int, ...]) -> None:
        """Steps of this epoch were taken in an earlier Join. last_live: the ranks that took the
        last of them."""
        self.began_earlier = True
        self.last_live = last_live

    def record(self, agreement: Agreement, *, is_step: bool = True) -> None:
        """All ranks have agreed. is_step: False for a second agreement on the same step."""
        self._may_continue = agreement.may_continue
        self.somebody_has_outer = any(one & HAS_OUTER for one in agreement.joins)
        if agreement.live:
            self.last_live = agreement.live
            for rank in agreement.live if is_step else ():
                self.steps_taken[rank] += 1
            # Outside an iteration, and without data, no step belongs to a batch of this rank.
            if is_step and self.batch is not None and (self.has_next or self._is_last_batch):
                self.pattern.of_batch += 1
        elif ran := newest_ranks(agreement.leftovers):
            self.last_live, self.ran_after_last_step = ran, True

    @property
    def somebody_missed_a_step(self) -> bool:
        return self.began_earlier or min(self.steps_taken) < max(self.steps_taken)

    @property
    def somebody_may_lag(self) -> bool:
        """Whether some rank may lack what the loop's body has done last on others, which have taken
        a step more, or run passes after the last one."""
        return self.somebody_missed_a_step or self.ran_after_last_step

    def may_have_written_alone(self, *, is_sharded: bool) -> bool:
        """Whether a rank may have run the body more often than others with no step that followed:
        what it has written to parameters then has come to no other rank. is_sharded: each step
        leaves the same bits on all ranks, whatever their devices."""
        if self.somebody_missed_a_step:
            return False
        # With sharded steps all ranks copy from those that have run passes after the last one.
        if self.ran_after_last_step and (is_sharded or any(self.steps_taken)):
            return False
        by_rank = self._batches_per_rank
        is_even = min(by_rank) == max(by_rank) if by_rank else not is_sharded
        return not is_even or not any(self.steps_taken)

    def skew(self) -> float:
        """The share of the longest rank's steps that the shortest rank did not take, in [0, 1]."""
        longest = max(self.steps_taken)
        return 1 - min(self.steps_taken) / longest if longest else 0.0

    def somebody_may_continue(self) -> bool:
        return bool(self._may_continue)

    def divisor(self, agreement: Agreement) -> float:
        """The number that divides the summed gradients of a step; 0: apply nothing."""
        if not agreement.live:
            return 0
        if agreement.weight:
            return agreement.weight
        return self.num_ranks if self.divide_by_initial_world_size else agreement.num_contributing
