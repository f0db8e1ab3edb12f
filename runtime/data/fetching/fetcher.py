"""`Fetcher`: batches of given samples, made ahead by other processes while steps run.

torch's DataLoader does the work. Our part is which samples it fetches, and that the order can be
cut off: samples that were fetched and not used are fetched again by whichever rank gets them.
"""

from __future__ import annotations

import hashlib
import warnings
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch.utils.data import DataLoader

from ...process.torch_loaders import end_loaders_with_this_process
from .collating import collated
from .loader_process import AtStart, by_value, end_processes, why_unpicklable
from .options import FORK, FetchOptions

Indices = Sequence[Any]
"""Numbers of samples, or whatever else the dataset takes between brackets."""


class Fetching(Iterator[Any]):
    """The batches of some lists of indices, in the order of the lists. Made by `Fetcher.fetch`."""

    def __init__(self, source: Iterator[Indices]) -> None:
        self._source = source
        self._peeked: deque[Indices] = deque()
        self._sent: deque[Indices] = deque()
        """The lists that the loader has, of which it has given no batch yet."""
        self._batches: Iterator[Any] = iter(())
        self._is_cut = False

    def begin(self, batches: Iterator[Any]) -> None:
        """batches: of the loader, which has asked for `lists` meanwhile."""
        self._batches = batches

    def lists(self) -> Iterator[list[Any]]:
        """For the loader, which asks for lists ahead of the batches that it gives."""
        while not self._is_cut and self._peek() is not None:
            indices = self._peeked.popleft()
            self._sent.append(indices)
            yield list(indices)

    def _peek(self) -> Indices | None:
        # Looked at before it is given, so that a caller may compare it with what it wants now.
        if not self._peeked and (indices := next(self._source, None)) is not None:
            self._peeked.append(indices)
        return self._peeked[0] if self._peeked else None

    @property
    def next_indices(self) -> Indices | None:
        """The list of which `next` gives the batch; None if there is none, or after a cut."""
        # A batch that is still on its way belongs to nobody any more.
        if self._is_cut:
            return None
        return self._sent[0] if self._sent else self._peek()

    def __next__(self) -> Any:
        try:
            batch = next(self._batches)
        except StopIteration:
            raise
        except Exception:  # Of a sample, or of collate_fn: the loader continues with the next list.
            if self._sent:
                self._sent.popleft()
            raise
        except BaseException:  # The caller was interrupted: which batch comes next is not known.
            self.close()
            raise
        self._sent.popleft()
        return batch

    def close(self) -> None:
        """Cut it off. What was fetched and not given is dropped. The loader processes stay."""
        self._is_cut = True
        self._batches = iter(())
        self._sent.clear()
        self._peeked.clear()


class Fetcher:
    """Makes batches of a dataset with numbered samples, by the loader processes of this rank.

        fetcher = Fetcher(dataset, FetchOptions(num_workers=2))
        fetching = fetcher.fetch([[3, 1], [0, 2]], seed=0)
        first = next(fetching)              # of samples 3 and 1; the other batch is being made
        fetching = fetcher.fetch([[5, 4]])  # cuts the former one off: samples 0 and 2 are dropped
        fetcher.close()                     # ends the loader processes

    - The lists may come from a generator. It is asked for up to num_workers * prefetch_factor
      lists more than batches were taken. Without loader processes it is asked for one list at a
      time, and the calling thread makes the batch of it.
    - `fetching.next_indices` says of which list the next batch is. `batch` compares it with what
      is wanted now, and calls `fetch` again if they differ: the caller's plan has changed.
    - The loader processes start with the first `fetch` and stay until `close`. A cut waits, at the
      next `fetch`, for the batches that are being made.
    - A dataset with `__getitems__` is asked for a list of samples at once, as by a DataLoader.

    seed: seeds the loader processes when they start, as torch does: process n has `seed_n = base +
        n`, for Python's, numpy's and torch's generators, where base is drawn from a generator with
        this seed. The generators of the calling process stay as they are.

    Raises TypeError if loader processes that are no forks cannot be sent the dataset; RuntimeError
    if one of them ends. An error in a sample is raised by `next`, with the text of its traceback.
    """

    def __init__(self, dataset: Any, options: FetchOptions) -> None:
        self.dataset = dataset
        self.options = options
        self._loader: DataLoader[Any] | None = None  # None: before the first batch, and when closed
        self._fetching: Fetching | None = None  # None: as `_loader`
        self._generator = torch.Generator()

    def fetch(self, index_lists: Iterable[Indices], *, seed: int = 0) -> Fetching:
        """Begin with these lists; a fetching that is under way is cut off."""
        self.rest()
        fetching = self._fetching = Fetching(iter(index_lists))
        # With the first batch: a dataset that is never iterated needs no processes.
        if self._loader is None:
            self._loader = self._made()
        self._generator.manual_seed(seed)
        fetching.begin(_Guarded(self, self._begun(self._loader)))
        return fetching

    def batch(self, wanted: Indices, coming: Iterable[Indices], *, seed: int = 0) -> Any:
        """The batch of `wanted`. coming: what is wanted after it, as far as can be foreseen. The
        fetching under way continues if it has `wanted` next."""
        fetching = self._fetching
        # None is under way; or samples were dealt again, and what was fetched belongs to others
        # now; or the last batch has failed.
        if fetching is None or fetching.next_indices != wanted:
            fetching = self.fetch(chain([wanted], coming), seed=seed)
        return next(fetching)

    def __iter__(self) -> Iterator[list[Any]]:
        """The lists of the fetching under way: this object is the loader's batch_sampler."""
        assert self._fetching is not None
        return self._fetching.lists()

    def rest(self) -> None:
        """Cut off what is under way. The loader processes stay for the next `fetch`."""
        if self._fetching is not None:
            self._fetching.close()
            self._fetching = None

    def close(self) -> None:
        """End the loader processes, if there are any. `fetch` starts them again."""
        self.rest()
        loader, self._loader = self._loader, None
        end_processes(getattr(loader, "_iterator", None))

    def _made(self) -> DataLoader[Any]:
        options, dataset = self.options, self.dataset
        collate: Any = options.collate_fn or collated
        # By the same class, so that both ways make the same batches.
        if options.num_workers == 0:
            return DataLoader(
                dataset,
                batch_sampler=self,
                collate_fn=collate,
                pin_memory=options.pin_memory,
                generator=self._generator,
            )
        is_fork = options.context == FORK
        end_loaders_with_this_process()
        at_start: Any = AtStart(is_fork, options.worker_init_fn)
        # Started as another program: what the functions mean there has to travel.
        if not is_fork:
            dataset, at_start, collate = map(by_value, (dataset, at_start, collate))
        return DataLoader(
            dataset,
            batch_sampler=self,
            num_workers=options.num_workers,
            collate_fn=collate,
            pin_memory=options.pin_memory,
            worker_init_fn=at_start,
            multiprocessing_context=options.context,
            generator=self._generator,
            prefetch_factor=options.prefetch_factor,
            persistent_workers=True,  # Until `close`: after a cut the same processes continue.
        )

    def _begun(self, loader: DataLoader[Any]) -> Iterator[Any]:
        if self.options.context == FORK:
            return iter(loader)
        try:
            with warnings.catch_warnings():
                # torch's warning on what cannot be pickled: the error below says more.
                warnings.filterwarnings("ignore", "Got pickle error")
                return iter(loader)
        except Exception as error:
            self.close()
            raise _unpicklable(self.dataset, self.options) or error from error


class _Guarded(Iterator[Any]):
    """The loader's batches. A lost loader process ends the others, and is reported in our words."""

    def __init__(self, fetcher: Fetcher, batches: Iterator[Any]) -> None:
        self._fetcher = weakref.ref(fetcher)
        self._batches = batches

    def __next__(self) -> Any:
        try:
            return next(self._batches)
        except RuntimeError as error:
            # torch raises a plain RuntimeError, and only its text says that a process has ended.
            if "DataLoader worker" not in str(error) or "exited unexpectedly" not in str(error):
                raise
            # A DataLoader that has lost a process makes no batch any more: the next `fetch` starts
            # others.
            if (fetcher := self._fetcher()) is not None:
                fetcher.close()
            raise RuntimeError(
                f"a loader process of this rank has ended while it made a batch ({error}). If "
                "memory ran out, try fewer num_workers or a smaller prefetch_factor. A crash in "
                "native code shows its place with num_workers=0, which makes batches in the "
                "training thread"
            ) from error


def _unpicklable(dataset: Any, options: FetchOptions) -> TypeError | None:
    """The error for a part that loader processes cannot be sent; None if all can be pickled."""
    parts = {
        f"the dataset ({type(dataset).__name__})": dataset,
        "collate_fn": options.collate_fn,
        "worker_init_fn": options.worker_init_fn,
    }
    for name, part in parts.items():
        why = why_unpicklable(part)
        if why is not None:
            return TypeError(
                f"{name} cannot be sent to loader processes that start by {options.context!r}: "
                f"{why}. Leave multiprocessing_context out: loader processes are then forks, "
                "which have the dataset without a pickle. Or open what cannot be pickled (a file, "
                "a connection) in worker_init_fn, or at the first sample"
            )
    return None


def loader_seed(*parts: object) -> int:
    """A seed for `Fetcher.fetch`, another one for each combination of `parts`."""
    text = "/".join(map(str, parts))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little")
