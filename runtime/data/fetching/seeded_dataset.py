"""Batches that draw their random numbers from a seed of their own, whoever makes them, and when."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ...process.random_state import seed_all
from .collating import collated

SeededIds = tuple[int, tuple[int, ...]]
"""A seed, and the numbers of the samples of one batch."""


@dataclass(frozen=True, slots=True)
class SeededDataset:
    """A dataset whose samples are the batches of another one, before they are collated. A `Fetcher`
    fetches it one batch at a time: its lists of indices are `[(seed, numbers)]`."""

    dataset: Any

    def __getitem__(self, batch: SeededIds) -> Sequence[Any]:
        seed, numbers = batch
        seed_all(seed)
        if hasattr(self.dataset, "__getitems__"):  # As a DataLoader asks it.
            samples: Sequence[Any] = self.dataset.__getitems__(list(numbers))
            return samples
        return [self.dataset[number] for number in numbers]


@dataclass(frozen=True, slots=True)
class CollateOnly:
    """Collates the one batch that a fetch of a SeededDataset gives. collate_fn: as in FetchOptions,
    or None."""

    collate_fn: Callable[[list[Any]], Any] | None

    def __call__(self, batches: list[list[Any]]) -> Any:
        return (self.collate_fn or collated)(list(batches[0]))


def is_same(one: Any, other: Any) -> bool:
    """Whether loader processes of one dataset serve the other."""
    if isinstance(one, SeededDataset) and isinstance(other, SeededDataset):
        return one.dataset is other.dataset
    return one is other
