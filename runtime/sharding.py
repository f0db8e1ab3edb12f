"""`Shard`: one rank's batches of one epoch."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch.utils.data import default_collate

from .boundary import boundary
from .cursor import Cursor, Rest
from .dealing import Dealer, Hands, deal
from .join import active_join


class MapStyleDataset(Protocol):
    """What `Shard` takes: a length, and a sample for each number below it."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class Shard:
    """This rank's batches of one epoch. `ctx.shard` makes it; iterate it as often as you like.

    Inside `Join` the iteration of a rank that is out of batches goes on, without giving any,
    until the other ranks are out of theirs. Ranks know one another's number of batches, so no
    step is shadowed in vain. When a rank is lost, what it had left goes to the others, also to
    those that are out of batches and wait. In a loop over `ctx.epochs(..., resume=name)` that was
    stopped inside an epoch, it begins after the samples whose steps were taken.

    sample_ids: the numbers of this rank's samples, in order. taken: how many of them the iteration
    has given. ids_of_the_lost: samples that ranks which are gone have used in steps that count.
    len(): of this rank's batches.
    """

    def __init__(
        self,
        dataset: MapStyleDataset,
        batch_size: int,
        *,
        rank: int,
        world_size: int,
        epoch: int = 0,
        seed: int = 0,
        shuffle: bool = True,
        keep_together: Sequence[Hashable] | None = None,
        drop_last: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        dealer: Dealer | None = None,
        cursor: Cursor | None = None,
        at_boundary: Callable[[], None] | None = None,
    ) -> None:
        """dealer: knows where the rank is in all the samples of a run; without it nothing is dealt
        anew when ranks are lost. cursor: notes what this rank was given, for checkpoints.
        at_boundary: called between two batches."""
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise TypeError(
                f"shard needs a dataset with a length and numbered samples, got "
                f"{type(dataset).__name__}; list(dataset) makes one of an iterable"
            )
        if len(dataset) == 0:
            raise ValueError("the dataset is empty, so no rank would get a batch; check its source")
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        self.dataset = dataset
        self.batch_size = batch_size
        self.taken = 0
        self.ids_of_the_lost: list[int] = []
        self.committed: tuple[int, ...] | None = None
        self._dealer = dealer or Dealer(rank, world_size)
        self._num_samples = len(dataset)
        self._epoch, self._seed, self._shuffle = epoch, seed, shuffle
        self._keep_together = keep_together
        self._round_up = 0 if drop_last else batch_size - 1
        self._collate = collate_fn or default_collate
        self._cursor = cursor
        self._at_boundary = at_boundary
        # What tells one pass over data from another, when a run goes on from a checkpoint.
        self._key = f"{len(dataset)}/{batch_size}/{epoch}/{seed}/{shuffle}"
        self._rest = self._coming()
        self.take_hand(self.deal(world_size), rank)

    def _coming(self) -> Rest:
        """What is left of the coming pass, which is all unless the run goes on in it."""
        if self._cursor is None or not torch.is_grad_enabled():
            return Rest()
        return self._cursor.rest_of(self._key)

    def __len__(self) -> int:
        return self.num_batches(len(self.sample_ids))

    @property
    def batches_per_rank(self) -> list[int]:
        """Of the whole epoch, by rank."""
        return [self.num_batches(len(hand)) for hand in self.hands]

    @property
    def taken_ids(self) -> list[int]:
        """The samples that the iteration has given so far."""
        return self.sample_ids[: self.taken]

    @property
    def committed_ids(self) -> list[int]:
        """The samples of the iteration, of all ranks, that belong to steps that count."""
        return self._dealer.committed_ids(self)

    def __iter__(self) -> Iterator[Any]:
        self._rest = self._coming()
        passage = None
        if self._cursor is not None and torch.is_grad_enabled():
            passage = self._cursor.begin(self._key, self)
        join, bound = active_join(), boundary()
        self.taken = 0
        self.ids_of_the_lost = []
        self._dealer.begin(self)
        try:
            with bound.iterating(self.sample_ids, self.batch_size, self._epoch) as done:
                self.taken = done
                bound.steps.batches_left = self._num_left()
                if join:
                    join.begin_epoch(self.batches_per_rank)
                    join.at_boundary = self._at_boundary
                if join and not self._has_more():
                    join.shadow(until=self._has_more)
                number = 0
                while self._has_more():
                    ids = self.sample_ids[self.taken : self.taken + self.batch_size]
                    batch = self._collate([self.dataset[i] for i in ids])
                    bound.steps.batches_left = self._num_left()
                    self.taken += len(ids)
                    bound.begin_batch(self.taken)
                    if join:
                        join.begin_batch(number, is_last=not self._has_more())
                    yield batch
                    number += 1
                    bound.steps.batches_left = self._num_left()
                    if passage is not None and self._at_boundary is not None:
                        self._at_boundary()
                    bound.pass_()
                    if join and not self._has_more():
                        join.ledger.batch = number
                        join.shadow(until=self._has_more)
            if passage is not None:
                passage.end()
        except GeneratorExit:  # The loop was left early: nobody knows who goes on.
            if join:
                join.ledger.batch = None
            raise
        finally:
            self._dealer.end(self)

    def _num_left(self) -> int:
        return self.num_batches(len(self.sample_ids) - self.taken)

    def _has_more(self) -> bool:
        return self._num_left() > 0

    # -- for the dealer --------------------------------------------------------------------------

    def deal(self, num_ranks: int) -> Hands:
        def whole(size: int) -> Hands:
            return deal(
                self._num_samples,
                world_size=size,
                epoch=self._epoch,
                seed=self._seed,
                shuffle=self._shuffle,
                keep_together=self._keep_together,
            )

        return self._rest.dealt(whole, num_ranks, self._keep_together)

    def num_batches(self, num_samples: int) -> int:
        return (num_samples + self._round_up) // self.batch_size

    def keys(self) -> Sequence[Hashable] | None:
        return self._keep_together

    def take_hand(self, hands: Hands, rank: int) -> None:
        self.hands = hands
        self.sample_ids = hands[rank]
