"""`Batches`: the iteration over one rank's batches, and what happens between two of them.

`Shard` (dataset_batches.py) takes the samples from a dataset with a length, `StreamShard`
(streaming.py) from a stream.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import default_collate

from ..join.join import active_join
from ..process.step_boundary import boundary
from .cursor import Cursor, Passage, Rest
from .dealer import Counted, Cut, Dealer, Left


class Batches(ABC):
    """One rank's batches of an epoch. It can be iterated more than once.

    Inside `Join` the iteration of a rank that is out of batches goes on, without giving any, until
    the other ranks are out of theirs. When a rank is lost, its remaining samples go to the other
    ranks, also to those that are out of batches and wait.

    taken: the number of samples that the iteration has given to this rank.
    ids_of_the_lost: the samples that lost ranks have used in steps that count.
    """

    is_told_by_id = False

    def __init__(
        self,
        batch_size: int,
        *,
        key: str,
        dealer: Dealer,
        epoch: int,
        collate_fn: Callable[[list[Any]], Any] | None,
        cursor: Cursor | None,
        at_boundary: Callable[[], None] | None,
    ) -> None:
        """key: identifies the iteration when a run resumes.
        dealer: knows how samples are dealt again when ranks are lost.
        cursor: records which samples this rank was given; None: they are not recorded.
        at_boundary: called between two batches.

        Raises ValueError for a batch_size below 1."""
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        self.batch_size = batch_size
        self.taken = 0
        self.ids_of_the_lost: list[int] = []
        self._dealer = dealer
        self._counted: Counted | None = None  # set when the iteration is over
        self._epoch = epoch
        self._key = key
        self._collate = collate_fn or default_collate
        self._cursor = cursor
        self._at_boundary = at_boundary
        self._rest = self._coming()

    @property
    def committed_ids(self) -> list[int]:
        """The samples of the iteration that all ranks have used in steps that count."""
        counted = self._dealer.counted(self) or self._counted
        return [*self.ids_of_the_lost, *(self.ids_of(counted) if counted is not None else ())]

    @property
    @abstractmethod
    def taken_ids(self) -> list[int]:
        """The samples that the iteration has given to this rank so far."""

    @property
    def num_committed(self) -> int:
        """The number of `committed_ids`, also where this rank does not know all of them."""
        counted = self._dealer.counted(self) or self._counted
        return len(self.ids_of_the_lost) + (sum(counted.counts) if counted is not None else 0)

    def __iter__(self) -> Iterator[Any]:
        self._check()
        self._rest = self._coming()
        passage: Passage | None = None
        # Without gradients it is an evaluation, which a resumed run takes again as a whole.
        if self._cursor is not None and torch.is_grad_enabled():
            passage = self._cursor.begin(self._key, self)
        self._passage_name = passage.name if passage is not None else None
        join, bound = active_join(), boundary()
        self.taken = 0
        self.ids_of_the_lost = []
        self._counted = None
        try:
            self._dealer.begin(self)
            # Only a loop of `ctx.epochs(resume=...)` has a place to go on from.
            key = self._place_key() if bound.place else 0
            with bound.iterating(key, self._epoch, self._num_samples) as iteration:
                self._skip(iteration.done)
                bound.steps.batches_left = self._num_left()
                if join:
                    # A stream does not know its batches; there each step agrees on the next one.
                    if (counts := self._batches_by_rank()) is not None:
                        join.begin_epoch(counts)
                    join.at_boundary = self._at_boundary
                if join and not self._has_more():
                    # This rank has no batch at all: it shadows from the first step.
                    join.shadow(until=self._has_more)
                number = 0
                while self._has_more():
                    batch = self._collate(self._take())
                    bound.steps.batches_left = self._num_left()
                    iteration.up_to = self.taken
                    if join:
                        # The vote of this step tells the other ranks whether this rank has a next.
                        join.begin_batch(number, is_last=not self._has_more())
                    yield batch
                    number += 1
                    # A rank may have been lost in the step, and this rank has some of its samples.
                    bound.steps.batches_left = self._num_left()
                    # An evaluation is no step: it must not save a checkpoint.
                    if passage is not None and self._at_boundary is not None:
                        self._at_boundary()
                    bound.stop_if_agreed()
                    if join and not self._has_more():
                        # Shadow in here: a loss may give this rank samples, and the loop goes on.
                        join.ledger.batch = number
                        join.shadow(until=self._has_more)
            if passage is not None:
                passage.end()
            self._end()
        except GeneratorExit:
            # The loop was left early. Its batch numbers no longer say which ranks have data.
            if join:
                join.ledger.batch = None
            raise
        finally:
            self._dealer.end(self)

    def _coming(self) -> Rest:
        """The rest of the coming iteration: everything, unless the run resumes inside it."""
        if self._cursor is None or not torch.is_grad_enabled():
            return Rest()
        return self._cursor.rest_of(self._key)

    @property
    def _num_samples(self) -> int:
        """The size of the dataset; 0 if unknown."""
        return 0

    def _check(self) -> None:
        """Raise if the data has changed; called before an iteration begins."""

    @abstractmethod
    def _place_key(self) -> Hashable:
        """Identifies this shard among those of an epoch that was stopped and is resumed."""

    @abstractmethod
    def _skip(self, done: int) -> None:
        """Begin behind the first `done` samples of this rank's hand."""

    @abstractmethod
    def _batches_by_rank(self) -> Sequence[int] | None:
        """The number of batches of the whole iteration, by rank; None if unknown."""

    @abstractmethod
    def _num_left(self) -> int | None:
        """The number of this rank's remaining batches; None if unknown."""

    @abstractmethod
    def _has_more(self) -> bool:
        """Whether this rank has another batch; a loss may give it more later."""

    @abstractmethod
    def _take(self) -> list[Any]:
        """The samples of the next batch; they count as taken."""

    def _end(self) -> None:
        """Called when the iteration is over on this rank."""

    # -- for the dealer --------------------------------------------------------------------------

    @abstractmethod
    def begin_dealt(self, dealer: Dealer, number: int, cuts: Sequence[Cut]) -> None: ...

    @abstractmethod
    def go_on(self, cut: Cut) -> Left: ...

    @abstractmethod
    def ids_of(self, counted: Counted) -> list[int]: ...

    def note_end(self, counted: Counted | None) -> None:
        self._counted = counted
