"""`ctx.steps`: the part of the Context that gives steps of a fixed global batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from chorusline.collectives.contract.torch_words import says

from ..data.dataset_batches import MapStyleDataset, check_dataset
from ..data.fetching.options import FetchOptions
from ..data.step_rows import DatasetRows, StepRows, StreamRows
from ..data.steps import Steps
from ..data.streaming import Stream
from ..process.random_state import RankSeed, mixed
from .function_call import FunctionCall
from .habits import OF_A_LOADER
from .samples import refuse_loaders_of_stream


class ContextSteps:
    """See Context (context.py)."""

    _call: FunctionCall

    @says(**OF_A_LOADER)
    def steps(
        self,
        dataset: MapStyleDataset | Stream,
        global_batch_size: int,
        micro_batch_size: int,
        *,
        epoch: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        deterministic: bool = True,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        prefetch_factor: int | None = None,
        pin_memory: bool = False,
        persistent_workers: bool = False,
        worker_init_fn: Callable[[int], object] | None = None,
        multiprocessing_context: str | None = None,
        device: torch.device | str | None = None,
    ) -> Steps:
        """The steps of one epoch, each over `global_batch_size` samples at any number of ranks.
        Each step is an iterable of this rank's micro-batches, perhaps none:

            for step in ctx.steps(dataset, global_batch_size=64, micro_batch_size=8, epoch=epoch):
                for batch in step:
                    loss_of(model(batch)).backward()
                optim.step(); optim.zero_grad()

        A step's gradient is the mean over its samples; a loss is the mean over its micro-batch, or
        weighted (`model.weigh`). It is complete when the loop over the step ends. If a rank is lost
        before that, the others get its micro-batches in the same step. The last step of an epoch
        may be smaller. Every rank takes every step, so no Join is needed.

        Parameters, optimizer state, buffers and random states are those of a run with one rank, bit
        by bit, whichever rank computed what: sums over micro-batches have one order, and each
        micro-batch has a random state of its own. Buffers are those that the last micro-batch has
        left.

        dataset: an object with a length and numbered samples, the same on all ranks; or a Stream,
            whose rows come in their order (seed and shuffle have no effect on it).
        global_batch_size: samples per step, of all ranks together.
        micro_batch_size: samples per forward pass. Another size changes the bits of the result.
        epoch, seed, shuffle: as for `shard`. The seed, with that of the run, also decides the
            random states.
        deterministic: False adds up micro-batches in the order of arrival; then the bits depend on
            the ranks.
        num_workers: how many loader processes of this rank prefetch batches: those that it computes
            if the next steps are dealt like this one.
        collate_fn, prefetch_factor, pin_memory, persistent_workers, worker_init_fn,
            multiprocessing_context: as for torch's DataLoader, which makes the batches. The random
            numbers of collate_fn and of the dataset depend on the micro-batch alone, not on
            num_workers.
        device: where batches are copied to; None: they stay on the CPU.

        Raises ValueError for an empty dataset and for sizes that do not fit, TypeError for one
        without a length. The loop raises RuntimeError inside Join, under torch.no_grad, without a
        DistributedDataParallel, for a model with a communication hook, with SyncBatchNorm in
        training or with broadcast_buffers=False, and for an optimizer with overlap_with_ddp.
        """
        call = self._call
        if epoch is None:
            epoch = call.epoch_of(dataset, is_shuffled=shuffle)
        options = FetchOptions(
            num_workers=num_workers,
            prefetch_factor=prefetch_factor,
            pin_memory=pin_memory,
            collate_fn=collate_fn,
            persistent_workers=persistent_workers,
            worker_init_fn=worker_init_fn,
            multiprocessing_context=multiprocessing_context,
        )
        rows: StepRows
        if isinstance(dataset, Stream):
            refuse_loaders_of_stream(options)
            rows, key = StreamRows(dataset, epoch=epoch, collate_fn=collate_fn), "stream"
        else:
            check_dataset(dataset, "steps")
            rows = DatasetRows(
                dataset,
                epoch=epoch,
                seed=seed,
                shuffle=shuffle,
                options=options,
                fetchers=call.fetchers,
            )
            key = f"{len(dataset)}/{seed}/{shuffle}"
        of_run = [entry.object for entry in call.registry if isinstance(entry.object, RankSeed)]
        noise = of_run[0].seed if of_run else 0
        return Steps(
            rows,
            global_batch_size,
            micro_batch_size,
            key=key,
            group=lambda: call.group,
            dealer=call.dealer,
            epoch=epoch,
            noise_seed=mixed(noise, seed),
            deterministic=deterministic,
            device=device,
            cursor=call.cursor,
            at_boundary=call.at_boundary,
            door=call.recovery.arrivals if call.recovery is not None else None,
        )
