"""Rows of an iterable dataset, made by loader processes beside the reader of a Stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, IterableDataset, default_convert
from torch.utils.data._utils import worker

from ...process.random_state import seed_all
from ...process.torch_loaders import end_loaders_with_this_process
from .fetcher import loader_seed
from .loader_process import AtStart, by_value, end_processes, why_unpicklable
from .loader_settings import context_of, refuse_sharded
from .options import FORK


class LoaderRows:
    """What a Stream reads if it is made of a DataLoader over an IterableDataset.

    The loader processes are children of the reader. Each of them makes a batch of rows at a time,
    and the reader sends them one by one, so ranks may take batches of another size. Which rows
    come, and in which order, depends only on the dataset, num_workers, batch_size and the epoch:
    when the reader has died, the next one reads the same.

    batch_size, collate_fn: of the loader, for the ranks; None: it does not say.

    Raises TypeError for a loader over a dataset with numbered samples.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        kind, dataset = type(loader).__name__, loader.dataset
        if not isinstance(dataset, IterableDataset):
            refuse_sharded(loader)
            raise TypeError(
                f"the dataset of this {kind} has numbered samples, which need no Stream: pass the "
                "loader to the run, and write ctx.shard(loader, epoch=epoch) there"
            )
        self.dataset: Any = dataset
        self.batch_size = loader.batch_size
        self.collate_fn = loader.collate_fn if loader.batch_size is not None else None
        self._as_rows = _AsRows(loader.collate_fn if loader.batch_size is None else None)
        self._num_workers = loader.num_workers
        self._prefetch_factor = loader.prefetch_factor
        self._worker_init_fn = loader.worker_init_fn
        self._context = context_of(loader) or FORK
        self._epoch = 0
        # A forked process has the dataset; any other one gets it pickled.
        if self._num_workers and self._context != FORK:
            why = why_unpicklable(dataset)
            if why is not None:
                raise TypeError(
                    f"the dataset ({type(dataset).__name__}) cannot be sent to loader processes "
                    f"that start by {self._context!r}: {why}. Open what cannot be pickled in "
                    "__iter__"
                )

    @property
    def has_epochs(self) -> bool:
        """Whether the dataset wants to know the epoch."""
        return hasattr(self.dataset, "set_epoch")

    def set_epoch(self, epoch: int) -> None:
        """Called before each iteration."""
        self._epoch = epoch
        if self.has_epochs:
            self.dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        # Without processes the dataset draws from this one's generators, which are the reader's.
        if not self._num_workers:
            seed_all(loader_seed("rows", self._epoch))
        batches = iter(self._loader())
        try:
            for rows in batches:
                for row in rows:
                    # Out of the shared memory, of which each tensor holds a file descriptor.
                    yield tree_map(_own, row) if self._num_workers else row
        finally:
            end_processes(batches)

    def _loader(self) -> DataLoader[Any]:
        generator = torch.Generator()
        # By the epoch, so that a reader that is started again draws the same.
        generator.manual_seed(loader_seed("rows", self._epoch))
        size = self.batch_size or 1
        if not self._num_workers:
            return DataLoader(
                self.dataset, batch_size=size, collate_fn=self._as_rows, generator=generator
            )
        is_fork = self._context == FORK
        dataset: Any = _Parts(self.dataset)
        end_loaders_with_this_process()
        at_start: Any = AtStart(is_fork, _Asked(self._worker_init_fn))
        collate: Any = self._as_rows
        if not is_fork:
            dataset, at_start, collate = map(by_value, (dataset, at_start, collate))
        return DataLoader(
            dataset,
            batch_size=size,
            num_workers=self._num_workers,
            collate_fn=collate,
            worker_init_fn=at_start,
            multiprocessing_context=self._context,
            generator=generator,
            prefetch_factor=self._prefetch_factor,
        )


class _AsRows:
    """collate_fn of the loader: what a loader process sends. of_each: the user's, for one row."""

    def __init__(self, of_each: Callable[[Any], Any] | None) -> None:
        self.of_each = of_each

    def __call__(self, rows: list[Any]) -> list[Any]:
        if self.of_each is None or self.of_each is default_convert:  # The ranks convert as well.
            return rows
        return [self.of_each(row) for row in rows]


def _own(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) and leaf.is_shared() else leaf


class _Parts(IterableDataset[Any]):
    """The dataset, in a loader process: it has to ask which part of the rows is its own."""

    def __init__(self, dataset: IterableDataset[Any]) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        # The variable itself: get_worker_info() would count as a question of the dataset.
        info: Any = worker._worker_info
        for row in self.dataset:
            if isinstance(info, _Info) and info.num_workers > 1 and not info.is_asked:
                raise ValueError(
                    f"{type(self.dataset).__name__} would give all of its rows in each of "
                    f"{info.num_workers} loader processes, so every row would come "
                    f"{info.num_workers} times: in __iter__, ask "
                    "torch.utils.data.get_worker_info() for id and num_workers, and give that "
                    "part of the rows. Or write num_workers=1"
                )
            yield row


class _Info:
    """What get_worker_info() returns in a loader process. It notes that it was asked."""

    def __init__(self, info: Any, dataset: Any) -> None:
        self._info = info
        self.dataset = dataset  # The user's own, which worker_init_fn may change.
        self.num_workers: int = info.num_workers
        self.is_asked = False

    @property
    def id(self) -> int:
        self.is_asked = True
        number: int = self._info.id
        return number

    def __getattr__(self, name: str) -> Any:
        return getattr(self._info, name)


class _Asked:
    """worker_init_fn: has get_worker_info() note that it was asked. then: the user's."""

    def __init__(self, then: Callable[[int], object] | None) -> None:
        self.then = then

    def __call__(self, number: int) -> None:
        info: Any = worker._worker_info
        worker._worker_info = _Info(info, info.dataset.dataset)  # type: ignore[assignment] # of _Parts
        if self.then is not None:
            self.then(number)
