"""What a torch DataLoader says of its batches, for a shard that makes them in its place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from .options import FetchOptions


@dataclass(frozen=True, slots=True)
class LoaderSettings:
    """batch_size, drop_last, shuffle: as `ctx.shard` takes them. options: the rest."""

    dataset: Any
    batch_size: int
    drop_last: bool
    shuffle: bool
    options: FetchOptions


def is_sharded(loader: DataLoader[Any]) -> bool:
    """Whether a sampler has picked the samples of one rank, as a DistributedSampler does."""
    samplers = loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)
    return any(hasattr(sampler, "num_replicas") for sampler in samplers)


def refuse_sharded(loader: DataLoader[Any]) -> None:
    """Raises ValueError for a loader whose sampler has picked the samples of one rank."""
    if is_sharded(loader):
        name = type(loader.sampler).__name__
        if not hasattr(loader.sampler, "num_replicas"):
            name = type(loader.batch_sampler).__name__
        raise ValueError(
            f"this {type(loader).__name__} has a {name}, which gives it one rank's part of the "
            "samples. ctx.shard would distribute that part again, so some samples would be seen "
            "more than once and others never. Leave the sampler out; write shuffle=True if it "
            "has shuffled: ctx.shard distributes the samples over the ranks"
        )


def of_loader(loader: DataLoader[Any]) -> LoaderSettings:
    """What `ctx.shard(loader)` needs to know. Raises TypeError or ValueError for a loader whose
    batches the samples' numbers alone do not make."""
    kind = type(loader).__name__
    refuse_sharded(loader)
    if isinstance(loader.dataset, IterableDataset):
        raise TypeError(
            f"this {kind} has an IterableDataset, whose samples have no numbers. Make a "
            "Stream(loader) in the program that has the session, pass it to the run, and write "
            "ctx.shard(stream, epoch=epoch) there"
        )
    if loader.batch_size is None or not isinstance(loader.batch_sampler, BatchSampler):
        raise TypeError(
            f"this {kind} has a batch_sampler of its own, or none, and ctx.shard makes the batches "
            "itself: write batch_size in the loader; to keep samples together that belong "
            "together, ctx.shard(loader.dataset, batch_size, keep_together=keys)"
        )
    return LoaderSettings(
        loader.dataset,
        loader.batch_size,
        loader.drop_last,
        _shuffles(loader),
        FetchOptions(
            num_workers=loader.num_workers,
            prefetch_factor=loader.prefetch_factor if loader.num_workers else None,
            pin_memory=loader.pin_memory,
            collate_fn=loader.collate_fn,
            persistent_workers=loader.persistent_workers,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=context_of(loader),
        ),
    )


def _shuffles(loader: DataLoader[Any]) -> bool:
    sampler: Any = loader.sampler
    # By name: torchdata has a class of its own that is none of torch's.
    kind, num_samples = type(sampler).__name__, len(loader.dataset)  # type: ignore[arg-type]
    if kind == "SequentialSampler" and len(sampler) == num_samples:
        return False
    is_random = kind == "RandomSampler" and not sampler.replacement
    if is_random and sampler.num_samples == num_samples:
        return True
    raise ValueError(
        f"this {type(loader).__name__} has a {type(sampler).__name__} that does not give every "
        "sample exactly once, but ctx.shard does. Leave the sampler out (shuffle=True shuffles); "
        "to train on some samples only, or on some several times, make the dataset a "
        "torch.utils.data.Subset of these numbers"
    )


def context_of(loader: DataLoader[Any]) -> str | None:
    """The start method of its processes; None: the default."""
    context: Any = loader.multiprocessing_context
    if context is None or not loader.num_workers:
        return None
    method: str = context.get_start_method()
    return method
