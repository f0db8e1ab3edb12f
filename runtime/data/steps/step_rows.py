"""Where the samples of a step of `ctx.steps` come from: a dataset with a length, or a Stream.

From either, any rank can read any sample of a step by its position, as often as it asks. So nothing
has to be put back when a rank is lost: another rank reads the same samples.

A batch depends on its micro-batch alone: the random numbers that the dataset and collate_fn draw
come from the micro-batch's own seed, in the training thread and in a loader process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from ...process.random_state import seed_all
from ..dataset_batches import MapStyleDataset
from ..dealing import dealt_hands
from ..fetching.fetcher import Fetcher
from ..fetching.fetchers import Fetchers
from ..fetching.options import FetchOptions
from ..fetching.seeded_dataset import CollateOnly, SeededDataset, SeededIds
from ..row_reader import WindowKey
from ..streaming import RESTART_S, SLICE_S, ReaderGone, Stream, answer, maker_of_batches


class MicroBatch(NamedTuple):
    """`num` samples from place `first` on, and the seed of what they draw."""

    first: int
    num: int
    seed: int


class StepRows(Protocol):
    """The samples of one epoch, in their order.

    num_samples: of all; None for a stream.
    """

    num_samples: int | None

    def begin(self, key: WindowKey) -> None:
        """An iteration begins. key: names it, the same on all ranks."""

    def end(self) -> None:
        """The iteration is over, or was left."""

    def num_from(self, first: int, count: int) -> int:
        """How many there are from place `first` on, at most `count`."""

    def batch(self, mine: MicroBatch, coming: Iterable[MicroBatch]) -> Any:
        """The batch of `mine`. coming: what this rank will ask for next, as far as can be
        foreseen."""


class DatasetRows:
    """The samples of a dataset, in the order of the epoch.

    options: how batches are made. fetchers: where loader processes come from.
    """

    def __init__(
        self,
        dataset: MapStyleDataset,
        *,
        epoch: int,
        seed: int,
        shuffle: bool,
        options: FetchOptions | None = None,
        fetchers: Fetchers | None = None,
    ) -> None:
        options = options or FetchOptions()
        self.num_samples: int | None = len(dataset)  # never None, as in StepRows
        self._num = len(dataset)
        self._given = dataset
        self._dataset = SeededDataset(dataset)
        self._options = replace(options, collate_fn=CollateOnly(options.collate_fn))
        self._fetchers = fetchers or Fetchers()
        self._fetcher: Fetcher | None = None  # None: nothing is fetched
        [self._order] = dealt_hands(
            len(dataset), world_size=1, epoch=epoch, seed=seed, shuffle=shuffle
        )

    def begin(self, key: WindowKey) -> None:
        """Raises ValueError if the dataset has changed."""
        if len(self._given) != self._num:
            raise ValueError(
                f"the dataset had {self._num} samples when ctx.steps was called, and has "
                f"{len(self._given)} now. Change a dataset between two epochs only, and call "
                "ctx.steps again then, on all ranks"
            )

    def end(self) -> None:
        fetcher, self._fetcher = self._fetcher, None
        if fetcher is not None:
            self._fetchers.give_back(fetcher)

    def num_from(self, first: int, count: int) -> int:
        return max(0, min(count, self._num - first))

    def batch(self, mine: MicroBatch, coming: Iterable[MicroBatch]) -> Any:
        if self._fetcher is None:
            self._fetcher = self._fetchers.take(self._dataset, self._options)
        return self._fetcher.batch([self._ids(mine)], ([self._ids(one)] for one in coming))

    def _ids(self, micro_batch: MicroBatch) -> SeededIds:
        first, num, seed = micro_batch
        return seed, tuple(self._order[first : first + num])


class StreamRows:
    """The rows of a Stream, in the order in which its reader reads them.

    The reader keeps the rows of the step under way and of the one before. If it dies, the next one
    reads the source from its beginning.
    """

    num_samples: int | None = None  # as in StepRows

    def __init__(
        self,
        stream: Stream,
        epoch: int,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        *,
        pin_memory: bool = False,
    ) -> None:
        self._reader = stream.reader
        self._epoch = epoch
        self._collate = maker_of_batches(stream, collate_fn, pins=pin_memory)
        self._key: WindowKey = ("", 0, "")

    def begin(self, key: WindowKey) -> None:
        self._key = key

    def end(self) -> None:
        """The reader needs no word: the next iteration begins another reading."""

    def num_from(self, first: int, count: int) -> int:
        """Every rank asks before it takes the rows of a step: what lies before is not needed."""
        number: int = self._ask("count_window", first, count)
        return number

    def batch(self, mine: MicroBatch, coming: Iterable[MicroBatch]) -> Any:
        rows: list[Any] = self._ask("window", mine.first, mine.num)
        seed_all(mine.seed)
        return self._collate(rows)

    def _ask(self, method: str, *place: int) -> Any:
        give_up_at = time.monotonic() + RESTART_S
        while True:
            try:
                return answer(getattr(self._reader, method).remote(self._key, self._epoch, *place))
            except ReaderGone:  # Ray starts another, which can answer the same question.
                if time.monotonic() > give_up_at:
                    raise
            time.sleep(SLICE_S)
