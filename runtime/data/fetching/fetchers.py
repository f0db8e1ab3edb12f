"""`Fetchers`: the loader processes of one call of the train function."""

from __future__ import annotations

from typing import Any

from .fetcher import Fetcher
from .options import FetchOptions
from .seeded_dataset import is_same

_MOST_FREE = 4


class Fetchers:
    """Hands out Fetchers, and ends all of their processes with the function.

    Those with persistent_workers are kept for the next iteration over the same dataset object.
    """

    def __init__(self) -> None:
        self._free: list[Fetcher] = []
        self._taken: list[Fetcher] = []

    def take(self, dataset: Any, options: FetchOptions) -> Fetcher:
        """A Fetcher for one iteration: one that is kept, or a new one."""
        of_dataset = [one for one in self._free if is_same(one.dataset, dataset)]
        fetcher = next((one for one in of_dataset if one.options == options), None)
        if fetcher is None:
            for one in of_dataset:  # Such as with another lambda as collate_fn in each epoch.
                self._end(one)
            fetcher = Fetcher(dataset, options)
        else:
            self._free.remove(fetcher)
        self._taken.append(fetcher)
        return fetcher

    def give_back(self, fetcher: Fetcher) -> None:
        """The iteration is over. Without persistent_workers the processes end."""
        if fetcher not in self._taken:
            return  # The function has ended, and its processes with it.
        self._taken.remove(fetcher)
        if not fetcher.options.persistent_workers:
            fetcher.close()
            return
        fetcher.rest()
        self._free.append(fetcher)
        if len(self._free) > _MOST_FREE:  # Of datasets that the function makes again each time.
            self._end(self._free[0])

    def _end(self, fetcher: Fetcher) -> None:
        self._free.remove(fetcher)
        fetcher.close()

    def close(self) -> None:
        """The function has ended: end all processes, even those of iterations that it has left
        by an error."""
        fetchers, self._free, self._taken = [*self._free, *self._taken], [], []
        for fetcher in fetchers:
            fetcher.close()
