"""What `ctx.shard` makes of its arguments: a Shard or a StreamShard."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader

from ..data.batches import Batches
from ..data.dataset_batches import Shard
from ..data.fetching.loader_settings import of_loader
from ..data.fetching.options import FetchOptions
from ..data.streaming import Stream, StreamShard
from .function_call import FunctionCall


def batches_of(
    call: FunctionCall,
    dataset: Any,
    batch_size: int | None,
    *,
    epoch: int | None,
    seed: int,
    shuffle: bool,
    keep_together: Sequence[Hashable] | None,
    drop_last: bool,
    options: FetchOptions,
    device: torch.device | str | None,
) -> Batches:
    """The parameters are those of `Context.shard`. Raises what it raises."""
    # With a batch_size the DataLoader is refused as a dataset, with what to write (check_dataset).
    if isinstance(dataset, DataLoader) and batch_size is None:
        if not shuffle or drop_last or options != FetchOptions():
            raise TypeError(
                "a DataLoader has its own options; set it there, and write ctx.shard(loader, "
                "epoch=epoch). Or write ctx.shard(loader.dataset, batch_size, ...) with all "
                "arguments here"
            )
        loader = of_loader(dataset)
        dataset, batch_size, options = loader.dataset, loader.batch_size, loader.options
        shuffle, drop_last = loader.shuffle, loader.drop_last
    if batch_size is None and isinstance(dataset, Stream):
        batch_size, drop_last = dataset.batch_size, drop_last or dataset.drop_last
    if batch_size is None:
        raise TypeError(
            "ctx.shard() is missing batch_size, the number of samples per rank and step, which "
            "only a DataLoader has itself: write ctx.shard(dataset, batch_size, epoch=epoch)"
        )
    if epoch is None:
        epoch = call.epoch_of(dataset, is_shuffled=shuffle)
    if isinstance(dataset, Stream):
        _refuse_for_stream(keep_together, options)
        return StreamShard(
            dataset,
            batch_size,
            dealer=call.dealer,
            epoch=epoch,
            drop_last=drop_last,
            collate_fn=options.collate_fn,
            pin_memory=options.pin_memory,
            device=device,
            cursor=call.cursor,
            at_boundary=call.at_boundary,
            survives=lambda: call.counts_samples,
            without_reader=call.without_reader,
        )
    return Shard(
        dataset,
        batch_size,
        rank=call.rank,
        world_size=call.world_size,
        dealer=call.dealer,
        epoch=epoch,
        seed=seed,
        shuffle=shuffle,
        keep_together=keep_together,
        drop_last=drop_last,
        options=options,
        fetchers=call.fetchers,
        device=device,
        cursor=call.cursor,
        at_boundary=call.at_boundary,
    )


def _refuse_for_stream(keep_together: Sequence[Hashable] | None, options: FetchOptions) -> None:
    if keep_together is not None:
        raise ValueError(
            "keep_together needs a dataset with a length: rows of a Stream go to the rank that "
            "asks first. Make one row of the samples that belong together"
        )
    refuse_loaders_of_stream(options)


def refuse_loaders_of_stream(options: FetchOptions) -> None:
    """Raises ValueError for loader processes of this rank."""
    if options.num_workers or options.worker_init_fn is not None:
        raise ValueError(
            "the rows of a Stream are made by its reader, once for all ranks, so num_workers and "
            "worker_init_fn belong there: make the Stream of a loader, Stream(DataLoader(rows, "
            "batch_size, num_workers=2))"
        )
