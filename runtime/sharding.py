"""Deals the samples of a dataset out to the ranks: every sample once, nothing padded or dropped."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch.utils.data import default_collate

from .cursor import Cursor, Cut
from .join import active_join


class MapStyleDataset(Protocol):
    """What `Shard` takes: a length, and a sample for each number below it."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


def deal(
    num_samples: int,
    *,
    world_size: int,
    epoch: int = 0,
    seed: int = 0,
    shuffle: bool = True,
    keep_together: Sequence[Hashable] | None = None,
    cuts: Sequence[Cut] = (),
) -> list[list[int]]:
    """Sample numbers by rank, each number exactly once. A pure function, equal on all ranks.

    keep_together: (num_samples,) keys; samples of one key go to the same rank. Keys, or without
    them samples, are dealt round robin, so ranks may get different numbers.
    shuffle: the order depends on seed and epoch; otherwise it is the dataset's.
    cuts: of the epoch so far, oldest first: a number of ranks, and how many samples of its hand
    each had been given when that ended. Only what nobody was given is dealt out.
    """
    if cuts:
        (size, given), *_ = cuts
        hands = deal(
            num_samples,
            world_size=size,
            epoch=epoch,
            seed=seed,
            shuffle=shuffle,
            keep_together=keep_together,
        )
        for (_, given), next_size in zip(
            cuts, [*(size for size, _ in cuts[1:]), world_size], strict=True
        ):
            left = [hand[count:] for hand, count in zip(hands, given, strict=True)]
            hands = _dealt_again(left, next_size, keep_together)
        return hands
    # torch's CPU generator looks at 32 bits of its seed only, so both numbers are mixed into them.
    mixed = hashlib.sha256(f"{seed}/{epoch}".encode()).digest()[:4]
    generator = torch.Generator().manual_seed(int.from_bytes(mixed, "little"))

    def order(count: int) -> list[int]:
        if not shuffle:
            return list(range(count))
        numbers: list[int] = torch.randperm(count, generator=generator).tolist()
        return numbers

    if keep_together is None:
        numbers = order(num_samples)
        return [numbers[rank::world_size] for rank in range(world_size)]
    if len(keep_together) != num_samples:
        raise ValueError(
            f"keep_together has {len(keep_together)} keys for {num_samples} samples; it needs one "
            "for each"
        )
    by_key: dict[Hashable, list[int]] = {}
    for number, key in enumerate(keep_together):
        by_key.setdefault(key, []).append(number)
    lots = list(by_key.values())
    dealt = order(len(lots))
    hands = [
        [number for lot in dealt[rank::world_size] for number in lots[lot]]
        for rank in range(world_size)
    ]
    return [[hand[i] for i in order(len(hand))] for hand in hands]


def _dealt_again(
    hands: Sequence[Sequence[int]], world_size: int, keep_together: Sequence[Hashable] | None
) -> list[list[int]]:
    """What is left in the hands of some ranks, dealt out to others; the same number keep theirs."""
    if len(hands) == world_size:
        return [list(hand) for hand in hands]
    rounds = itertools.zip_longest(*hands)
    left = [number for round_ in rounds for number in round_ if number is not None]
    if keep_together is None:
        return [left[rank::world_size] for rank in range(world_size)]
    lots: dict[Hashable, list[int]] = {}
    for number in left:
        lots.setdefault(keep_together[number], []).append(number)
    dealt = list(lots.values())
    return [
        [number for lot in dealt[rank::world_size] for number in lot] for rank in range(world_size)
    ]


class Shard:
    """This rank's batches of one epoch. `ctx.shard` makes it; iterate it as often as you like.

    Inside `Join` the iteration of a rank that is out of batches goes on, without giving any,
    until the other ranks are out of theirs. Ranks know one another's number of batches, so no
    step is shadowed in vain.

    sample_ids: the numbers of this rank's samples, in order. batches_per_rank: of all ranks.
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
        cursor: Cursor | None = None,
        at_boundary: Callable[[], None] | None = None,
    ) -> None:
        """cursor: notes what this rank was given. at_boundary: called between two batches."""
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
        self._rank = rank
        self._world_size = world_size
        self._epoch = epoch
        self._seed = seed
        self._shuffle = shuffle
        self._keep_together = keep_together
        self._round_up = 0 if drop_last else batch_size - 1
        self._cursor = cursor
        self._at_boundary = at_boundary
        # What tells one pass over data from another, when a run goes on from a checkpoint.
        self._key = f"{len(dataset)}/{batch_size}/{epoch}/{seed}/{shuffle}"
        self._deal()
        self._is_spent = False  # What was left of a pass is given; the next one is whole.
        self._collate = collate_fn or default_collate

    def _deal(self) -> None:
        """What is left of the coming pass, which is all unless the run goes on in it."""
        counted = torch.is_grad_enabled()
        cuts = self._cursor.cuts_of(self._key) if self._cursor and counted else []
        self._is_rest = bool(cuts)
        hands = deal(
            len(self.dataset),
            world_size=self._world_size,
            epoch=self._epoch,
            seed=self._seed,
            shuffle=self._shuffle,
            keep_together=self._keep_together,
            cuts=cuts,
        )
        self.sample_ids = hands[self._rank]
        self.batches_per_rank = [(len(hand) + self._round_up) // self.batch_size for hand in hands]
        self._num_batches = self.batches_per_rank[self._rank]

    def __len__(self) -> int:
        return self._num_batches

    def __iter__(self) -> Iterator[Any]:
        if self._is_spent:
            self._deal()
        self._is_spent = self._is_rest
        join = active_join()
        if join:
            join.ledger.begin_epoch(self.batches_per_rank)
            join.at_boundary = self._at_boundary
        passage = None
        if self._cursor is not None and torch.is_grad_enabled():
            passage = self._cursor.begin(self._key)
        for number in range(self._num_batches):
            start = number * self.batch_size
            ids = self.sample_ids[start : start + self.batch_size]
            batch = self._collate([self.dataset[i] for i in ids])
            if join:
                join.ledger.has_next = number + 1 < self._num_batches
            if passage is not None:
                passage.given += len(ids)
            yield batch
            if passage is not None and self._at_boundary is not None:
                self._at_boundary()
        if join:
            join.shadow()
