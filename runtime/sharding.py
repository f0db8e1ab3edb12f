"""Deals the samples of a dataset out to the ranks: every sample once, nothing padded or dropped."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch.utils.data import default_collate

from .boundary import boundary
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
) -> list[list[int]]:
    """Sample numbers by rank, each number exactly once. A pure function, equal on all ranks.

    keep_together: (num_samples,) keys; samples of one key go to the same rank. Keys, or without
    them samples, are dealt round robin, so ranks may get different numbers.
    shuffle: the order depends on seed and epoch; otherwise it is the dataset's.
    """
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


class Shard:
    """This rank's batches of one epoch. `ctx.shard` makes it; iterate it as often as you like.

    Inside `Join` the iteration of a rank that is out of batches goes on, without giving any,
    until the other ranks are out of theirs. Ranks know one another's number of batches, so no
    step is shadowed in vain. In a loop over `ctx.epochs(..., resume=name)` that was stopped inside
    an epoch, it begins after the batches whose steps were taken.

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
    ) -> None:
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise TypeError(
                f"shard needs a dataset with a length and numbered samples, got "
                f"{type(dataset).__name__}; list(dataset) makes one of an iterable"
            )
        if len(dataset) == 0:
            raise ValueError("the dataset is empty, so no rank would get a batch; check its source")
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        hands = deal(
            len(dataset),
            world_size=world_size,
            epoch=epoch,
            seed=seed,
            shuffle=shuffle,
            keep_together=keep_together,
        )
        self.dataset = dataset
        self.epoch = epoch
        self.batch_size = batch_size
        self.sample_ids = hands[rank]
        round_up = 0 if drop_last else batch_size - 1
        self.batches_per_rank = [(len(hand) + round_up) // batch_size for hand in hands]
        self._num_batches = self.batches_per_rank[rank]
        self._collate = collate_fn or default_collate

    def __len__(self) -> int:
        return self._num_batches

    def __iter__(self) -> Iterator[Any]:
        join = active_join()
        with boundary().iterating(
            self.sample_ids, self.batch_size, self.epoch, self._num_batches
        ) as numbers:
            if join:
                join.begin_epoch(self.batches_per_rank)
            for number in numbers:
                start = number * self.batch_size
                ids = self.sample_ids[start : start + self.batch_size]
                batch = self._collate([self.dataset[i] for i in ids])
                if join:
                    join.ledger.has_next = number + 1 < self._num_batches
                yield batch
            if join:
                join.shadow()
