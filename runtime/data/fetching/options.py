"""How batches are made ahead of the steps: the arguments of a DataLoader that a shard takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from chorusline.collectives.contract.argument_kinds import check_kinds, check_range

FORK = "fork"
CONTEXTS = (FORK, "forkserver", "spawn")

_MOST_WORKERS = 4096  # of one rank: a slip of the keyboard, before it has taken all processes


@dataclass(frozen=True, slots=True)
class FetchOptions:
    """Names and meanings are those of `torch.utils.data.DataLoader`.

    num_workers: the loader processes of this rank. 0: the training thread makes a batch when the
        loop asks for it.
    prefetch_factor: how many batches each loader process prefetches; None: 2.
    pin_memory: batches are copied to page-locked memory, from which a GPU copies them while it
        computes.
    collate_fn: makes a batch of a list of samples; None: torch's default_collate.
    persistent_workers: the loader processes stay for later iterations over the same dataset object
        with the same options, until the train function ends.
    worker_init_fn: called in each loader process with its number, before the first sample; None:
        nothing is.
    multiprocessing_context: how loader processes start. None: "fork", so they have the dataset
        without a copy of it. "forkserver" and "spawn" send it to each of them as a pickle.

    Raises TypeError or ValueError for values that torch would reject.
    """

    num_workers: int = 0
    prefetch_factor: int | None = None
    pin_memory: bool = False
    collate_fn: Callable[[list[Any]], Any] | None = None
    persistent_workers: bool = False
    worker_init_fn: Callable[[int], object] | None = None
    multiprocessing_context: str | None = None

    def __post_init__(self) -> None:
        check_kinds(
            FetchOptions.__init__, {one.name: getattr(self, one.name) for one in fields(self)}
        )
        check_range("num_workers", self.num_workers, 0, _MOST_WORKERS)
        if self.prefetch_factor is not None and self.prefetch_factor < 1:
            raise ValueError(f"prefetch_factor must be at least 1, got {self.prefetch_factor}")
        if self.multiprocessing_context not in (None, *CONTEXTS):
            names = ", ".join(map(repr, CONTEXTS))
            raise ValueError(
                f"multiprocessing_context must be one of {names}, got "
                f"{self.multiprocessing_context!r}"
            )
        if self.num_workers == 0:
            without = [
                name
                for name in ("prefetch_factor", "persistent_workers", "multiprocessing_context")
                if getattr(self, name)
            ]
            if without:
                raise ValueError(
                    f"{without[0]} needs num_workers of at least 1: without loader processes the "
                    "training thread makes each batch when the loop asks for it"
                )

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> FetchOptions:
        """From those of the arguments of a call that have these names."""
        return cls(**{one.name: arguments[one.name] for one in fields(cls)})

    @property
    def context(self) -> str:
        """The way in which loader processes start."""
        return self.multiprocessing_context or FORK
