"""`Batches`: one rank's batches of one pass, and what goes on between two of them.

Where the samples come from is told by `Shard` (data/dataset_batches.py), over datasets with a
length, and by `StreamShard` (streaming.py).
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
    """Iterate it as often as you like; each time is a pass of its own.

    Inside `Join` the iteration of a rank that is out of batches goes on, without giving any, until
    the other ranks are out of theirs. When a rank is lost, what it had left goes to the others,
    also to those that are out of batches and wait.

    taken: how many samples the iteration has given to this rank. ids_of_the_lost: samples that
    ranks which are gone have used in steps that count.
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
        """key: tells one pass over data from another, when a run goes on. cursor: notes what this
        rank was given. at_boundary: called between two batches."""
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        self.batch_size = batch_size
        self.taken = 0
        self.ids_of_the_lost: list[int] = []
        self._dealer = dealer
        self._counted: Counted | None = None  # of an iteration that is over
        self._epoch = epoch
        self._key = key
        self._collate = collate_fn or default_collate
        self._cursor = cursor
        self._at_boundary = at_boundary
        self._rest = self._coming()

    @property
    def committed_ids(self) -> list[int]:
        """The samples of the iteration, of all ranks, that belong to steps that count."""
        counted = self._dealer.counted(self) or self._counted
        return [*self.ids_of_the_lost, *(self.ids_of(counted) if counted is not None else ())]

    @property
    @abstractmethod
    def taken_ids(self) -> list[int]:
        """The samples that the iteration has given to this rank so far."""

    @property
    def num_committed(self) -> int:
        """How many those are, also where their numbers are not known here."""
        counted = self._dealer.counted(self) or self._counted
        return len(self.ids_of_the_lost) + (sum(counted.counts) if counted is not None else 0)

    def __iter__(self) -> Iterator[Any]:
        self._check()
        self._rest = self._coming()
        passage: Passage | None = None
        if self._cursor is not None and torch.is_grad_enabled():
            passage = self._cursor.begin(self._key, self)
        self._pass_name = passage.name if passage is not None else None
        join, bound = active_join(), boundary()
        self.taken = 0
        self.ids_of_the_lost = []
        self._counted = None
        try:
            self._dealer.begin(self)
            key = self._place_key() if bound.place else 0
            with bound.iterating(key, self._epoch, self._num_samples) as iteration:
                self._skip(iteration.done)
                bound.steps.batches_left = self._num_left()
                if join:
                    if (counts := self._batches_by_rank()) is not None:
                        join.begin_epoch(counts)
                    join.at_boundary = self._at_boundary
                if join and not self._has_more():
                    join.shadow(until=self._has_more)
                number = 0
                while self._has_more():
                    batch = self._collate(self._take())
                    bound.steps.batches_left = self._num_left()
                    iteration.up_to = self.taken
                    if join:
                        join.begin_batch(number, is_last=not self._has_more())
                    yield batch
                    number += 1
                    bound.steps.batches_left = self._num_left()
                    if passage is not None and self._at_boundary is not None:
                        self._at_boundary()
                    bound.stop_if_agreed()
                    if join and not self._has_more():
                        join.ledger.batch = number
                        join.shadow(until=self._has_more)
            if passage is not None:
                passage.end()
            self._end()
        except GeneratorExit:  # The loop was left early: nobody knows who goes on.
            if join:
                join.ledger.batch = None
            raise
        finally:
            self._dealer.end(self)

    def _coming(self) -> Rest:
        """What is left of the coming pass, which is all unless the run goes on in it."""
        if self._cursor is None or not torch.is_grad_enabled():
            return Rest()
        return self._cursor.rest_of(self._key)

    @property
    def _num_samples(self) -> int:
        """Of the dataset; 0: nobody knows."""
        return 0

    def _check(self) -> None:
        """Raises what is wrong with the data, before a pass begins."""

    @abstractmethod
    def _place_key(self) -> Hashable:
        """Tells it from the other shards of an epoch that was stopped and is resumed."""

    @abstractmethod
    def _skip(self, done: int) -> None:
        """Begin behind so many samples of the hand."""

    @abstractmethod
    def _batches_by_rank(self) -> Sequence[int] | None:
        """Of the whole pass; None: nobody knows."""

    @abstractmethod
    def _num_left(self) -> int | None:
        """Batches; None: nobody knows."""

    @abstractmethod
    def _has_more(self) -> bool:
        """Whether there is another batch for this rank, as things stand."""

    @abstractmethod
    def _take(self) -> list[Any]:
        """The samples of the next batch; they count as taken."""

    def _end(self) -> None:
        """The pass is over on this rank."""

    # -- for the dealer --------------------------------------------------------------------------

    @abstractmethod
    def begin_dealt(self, dealer: Dealer, number: int, cuts: Sequence[Cut]) -> None: ...

    @abstractmethod
    def go_on(self, cut: Cut) -> Left: ...

    @abstractmethod
    def ids_of(self, counted: Counted) -> list[int]: ...

    def note_end(self, counted: Counted | None) -> None:
        self._counted = counted
