"""`Context`: a train function's view of its rank, its group, its data and its checkpoints."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, overload

import torch
from torch.utils.data import DataLoader

from chorusline.collectives.contract.deadlines import Seconds
from chorusline.collectives.contract.errors import name_ranks
from chorusline.collectives.contract.torch_hints import TOO_FEW, TOO_MANY, says
from chorusline.collectives.group import Group
from chorusline.collectives.objects.blocking import all_gather_object, all_gather_row

from ..checkpoint.saving import Saving
from ..data.batches import Batches
from ..data.dataset_batches import MapStyleDataset, Shard, check_dataset
from ..data.fetching.options import FetchOptions
from ..data.steps.step_rows import DatasetRows, StepRows, StreamRows
from ..data.steps.steps import Steps
from ..data.streaming import Stream, StreamShard
from ..process import torch_distributed
from ..process.between_runs import LoopPlace, between_runs
from ..process.random_state import RankSeed, checked_seed, mixed
from ..process.registry import Stateful
from ..process.step_boundary import boundary
from .function_call import FunctionCall
from .hints import OF_A_LOADER, instead_of
from .reducing import checked_weight, has_value, reduced
from .report_values import plain_values
from .samples import batches_of, refuse_loaders_of_stream
from .step_digests import write_digests

S = TypeVar("S", bound=Stateful)
T = TypeVar("T")

_BEGIN_ANEW = (
    "Call ctx.forget() on all ranks (await session.run(lambda ctx: ctx.forget())) and start "
    "over, or resume from a checkpoint of your own"
)


class Context:
    """One rank's view of a run, handed to the train function as its first argument.

        def train(ctx):
            print(f"rank {ctx.rank} of {ctx.world_size} on {ctx.device}")
            return ctx.reduce(ctx.rank, "sum")
        results = cl.run(train, num_workers=2)  # [1, 1]

    When the run continues without a lost worker, rank, world_size, generation and group change
    during a step.

    All ranks call the methods that exchange data (`barrier`, `broadcast`, `reduce`) in the same
    order. These methods block the training thread, even in an `async def` function: no rank could
    continue without the others anyway.
    """

    def __init__(self, call: FunctionCall) -> None:
        self._call = call

    @property
    def rank(self) -> int:
        """This rank, from 0 to world_size - 1."""
        return self._call.rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self._call.world_size

    @property
    def local_rank(self) -> int:
        """This rank among the ranks of its node, from 0."""
        return self._call.local_rank

    @property
    def local_world_size(self) -> int:
        """The number of ranks on this rank's node."""
        return self._call.local_world_size

    @property
    def node_rank(self) -> int:
        """The number of this rank's node among the nodes of the run, from 0."""
        return self._call.node_rank

    @property
    def device(self) -> torch.device:
        """The device of this rank's tensors."""
        return self._call.device

    @property
    def group(self) -> Group:
        """The group of all ranks, for collectives."""
        return self._call.group

    @property
    def generation(self) -> int:
        """The number of the generation; it grows when the set of workers changes."""
        return self._call.generation

    def epochs(self, num_epochs: int, *, resume: str | None = None) -> Iterator[int]:
        """The numbers of the epochs, 0 to num_epochs - 1; after a resume, those that are not over
        yet.

        resume: a name for this loop. The ranks remember its place from one run of the session to
        the next, so a loop of this name that was stopped continues where it was: it leaves out
        epochs that are over, and in the interrupted one `shard` gives the samples whose steps were
        not taken. Keep the model and the optimizer with `keep`; otherwise they start over. If the
        run resumes from a checkpoint, the place in the checkpoint counts.

        Raises ValueError for a negative num_epochs; RuntimeError, on all ranks, if the ranks
        remember different epochs, or they are not the ranks that have begun the epoch.
        """
        if not hasattr(num_epochs, "__index__"):
            raise TypeError(
                f"num_epochs must be a number of epochs, got {num_epochs!r}; write "
                "ctx.epochs(3), which gives 0, 1, 2"
            )
        num_epochs = operator.index(num_epochs)  # A checkpoint takes no number of numpy's.
        if num_epochs < 0:
            raise ValueError(f"num_epochs must be at least 0, got {num_epochs}")
        boundary().status.num_epochs = num_epochs
        if resume is None:
            return self._call.epochs(num_epochs)
        return self._resumed(num_epochs, resume)

    def _resumed(self, num_epochs: int, name: str) -> Iterator[int]:
        call, bound, places = self._call, boundary(), between_runs().places
        call.keep_place()  # In a loop around this one.
        by_rank: list[LoopPlace] = all_gather_object(self.group, places.get(name, LoopPlace()))
        seats = [place.seat for place in by_rank]
        expected = [(rank, self.world_size) for rank in range(self.world_size)]
        if len({place.epoch for place in by_rank}) > 1 or (any(seats) and seats != expected):
            each = ", ".join(f"rank {rank}: {place}" for rank, place in enumerate(by_rank))
            raise RuntimeError(
                f"the ranks have different epochs of {name!r} ({each}): a worker was replaced, or "
                f"the last run stopped between them. {_BEGIN_ANEW}"
            )
        bound.resumed_live = tuple(rank for rank, one in enumerate(by_rank) if one.was_live)
        # After a resume from a checkpoint, or from memory, no rank has missed a step.
        bound.was_live = by_rank[self.rank].was_live if any(seats) else call.is_resumed or None
        if by_rank[self.rank] != LoopPlace():
            call.cursor.resume_next_loop(by_rank[0].epoch, [place.iterations for place in by_rank])

        def ended(epoch: int) -> None:
            call.named_loop = None
            places[name] = LoopPlace(epoch + 1)
            bound.resumed_live, bound.was_live = (), None
            bound.stop_if_agreed()

        try:
            for epoch in call.epochs(num_epochs, ended):
                call.named_loop = name
                yield epoch
        finally:
            if call.named_loop == name:  # The function has broken the loop off.
                call.keep_place()

    # -- What stays for the next run -------------------------------------------------------------

    @property
    def kept(self) -> dict[str, Any]:
        """The objects that `keep` stored on this rank, and the variables of `%%ranks` cells, by
        name."""
        return between_runs().objects

    def keep(self, name: str, make: Callable[[], T]) -> T:
        """The object of this name: made by `make()` the first time, and the same object in later
        runs of the session, even after a run that was interrupted or has failed.

        All ranks call it, in the same order. DistributedDataParallel and ZeroRedundancyOptimizer
        move to the group of each run that uses them.

        Raises RuntimeError, on all ranks, if some ranks have lost the object (their worker was
        replaced), or if a run was aborted inside a step that only some ranks have applied.
        """
        stay = between_runs()
        ages = all_gather_row(self.group, [int(number) for number in stay.age_of(name)])
        lost = [rank for rank, (is_here, _, _) in enumerate(ages) if not is_here]
        # No rank has it: the name is new. Some have it: they and the others cannot use one object.
        if len(lost) == self.world_size:
            stay.put(name, make())
        elif lost:
            raise RuntimeError(
                f"{name_ranks(lost, 'has', 'have')} no object {name!r}, but the other ranks do: a "
                f"worker was replaced, or failed while it made the object. {_BEGIN_ANEW}"
            )
        elif len({steps for _, steps, _ in ages}) > 1 or any(torn for _, _, torn in ages):
            raise RuntimeError(
                f"{name!r} cannot be used again: a run was aborted inside a step that only some "
                f"ranks have applied (steps by rank: {[steps for _, steps, _ in ages]}). "
                f"{_BEGIN_ANEW}"
            )
        value: T = stay.objects[name]
        return value

    def forget(self, *names: str) -> None:
        """Drop these kept objects; without names, drop all of them and the places of
        `epochs(resume=...)`."""
        between_runs().forget(names)

    # -- What survives -------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """The number of applied steps, over all runs: those of the registered
        ZeroRedundancyOptimizer, else the batches of `ctx.shard` (a zip's batches of several shards
        are one). The same on all ranks between two steps."""
        return self._call.step

    @property
    def resumed_from(self) -> str | None:
        """The path of the checkpoint that this run resumes from; None if it does not resume."""
        return self._call.resumed_from

    @says(**{TOO_FEW: "an object is registered under a name; write ctx.register('model', model)"})
    def register(
        self, name: str, stateful: S, *, per_rank: bool = False, required: bool = True
    ) -> S:
        """Make an object part of every checkpoint; if the run resumes from one, load the object's
        state now. Returns the object. All ranks register the same objects, in the same order,
        before the first step.

        name: a string without a slash.
        stateful: an object with state_dict and load_state_dict: the DistributedDataParallel, the
            ZeroRedundancyOptimizer (both are sharded), schedules, an average of the model, a
            scaler, RandomState.
        per_rank: True if each rank has a state of its own; else all ranks have the same state, and
            each writes a part of it.
        required: False for an object that older checkpoints do not have.

        Raises TypeError for an object without a state, ValueError for a name that is taken,
        CheckpointMismatch, naming the first parameters that differ, if the checkpoint is of
        another model, CheckpointUntrusted if the saved state is more than tensors and plain values.
        """
        self._call.register(name, stateful, per_rank=per_rank, required=required)
        return stateful

    def seed(self, seed: int) -> None:
        """Seed the random generators of Python, numpy and torch, on all ranks, before models are
        made.

        Until the first batch of `shard`, or the first forward of a DistributedDataParallel, all
        ranks draw the same numbers, those of `torch.manual_seed(seed)`: models start with the same
        values. From then on each rank draws its own, so that dropout and augmentation differ. The
        generators are part of every checkpoint, and continue where they were after a resume or when
        a worker is lost; do not register a RandomState as well.

        seed: at least 0. Raises ValueError for another number, and for a second call.
        """
        seed = checked_seed(seed)
        if any(entry.name == "ctx.seed" for entry in self._call.registry):
            raise ValueError(
                "the generators of this run are seeded already, by ctx.seed() or by "
                "Session(seed=...); seed them once"
            )
        of_rank = RankSeed(seed, self.rank)
        self._call.register("ctx.seed", of_rank, per_rank=True, required=False)
        boundary().at_first_step = of_rank.begin_steps

    def save(self, path: str | Path | None = None) -> Saving:
        """Save all registered objects in their present state; call it on all ranks after
        `optim.step()`.

        Returns when the state is copied; training may continue while it is written. `await` the
        result or call its `.wait()` until the checkpoint is complete. At most one save is in
        progress: the next call waits for it. A save that fails does not end training: if no caller
        has waited for it, the next one logs a warning. Only the failure of a run's last save raises
        at the end of the run.

        path: a folder or a URL for this one checkpoint; None: the session's CheckpointConfig names
            it, and decides how many checkpoints stay.

        Raises FileExistsError for a path that holds a checkpoint of any program; RuntimeError
        without a path, with nothing registered, and inside Join after a rank has joined, since that
        rank does not call it (`every_n_steps` saves on all ranks there).
        """
        return self._call.save(path)

    # -- Data ----------------------------------------------------------------------------------

    @overload
    def shard(
        self,
        dataset: Stream,
        batch_size: int | None = None,
        *,
        epoch: int | None = None,
        drop_last: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        device: torch.device | str | None = None,
    ) -> StreamShard: ...

    @overload
    def shard(
        self,
        dataset: MapStyleDataset | DataLoader[Any],
        batch_size: int | None = None,
        *,
        epoch: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        keep_together: Sequence[Hashable] | None = None,
        drop_last: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        prefetch_factor: int | None = None,
        pin_memory: bool = False,
        persistent_workers: bool = False,
        worker_init_fn: Callable[[int], object] | None = None,
        multiprocessing_context: str | None = None,
        device: torch.device | str | None = None,
    ) -> Shard: ...

    @says(**OF_A_LOADER)
    def shard(
        self,
        dataset: MapStyleDataset | DataLoader[Any] | Stream,
        batch_size: int | None = None,
        *,
        epoch: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        keep_together: Sequence[Hashable] | None = None,
        drop_last: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        prefetch_factor: int | None = None,
        pin_memory: bool = False,
        persistent_workers: bool = False,
        worker_init_fn: Callable[[int], object] | None = None,
        multiprocessing_context: str | None = None,
        device: torch.device | str | None = None,
    ) -> Batches:
        """This rank's batches of one epoch. Over all ranks, every sample comes exactly once. Ranks
        may get different numbers of batches: iterate inside `Join`.

        dataset: an object with a length and numbered samples, the same on all ranks; or a
            DataLoader over one, which says how batches are made, from batch_size to num_workers;
            or a Stream, whose rows go in their order to the rank that asks first (without an
            effect of seed and shuffle, and without keep_together and loader processes).
        batch_size: samples per rank and step.
        epoch, seed: they decide the order of the samples, unless shuffle is False. None: the epoch
            of the loop over `ctx.epochs` that is under way, or 0.
        keep_together: a key for each sample; samples of one key go to one rank.
        drop_last: drop a rank's last batch if it is smaller than batch_size.
        device: where batches are copied to; None: they stay on the CPU.
        num_workers: how many loader processes of this rank prefetch batches.
        collate_fn, prefetch_factor, pin_memory, persistent_workers, worker_init_fn,
            multiprocessing_context: as for torch's DataLoader, which makes the batches.

        After a resume the ranks get only the samples that no rank was given before the checkpoint.
        An iteration under torch.no_grad is repeated as a whole. A prefetched batch counts as given
        only when the loop takes it.

        Raises ValueError for an empty dataset and for a DataLoader whose sampler distributes or
        picks samples itself, TypeError for a dataset without a length.
        """
        return batches_of(
            self._call,
            dataset,
            batch_size,
            epoch=epoch,
            seed=seed,
            shuffle=shuffle,
            keep_together=keep_together,
            drop_last=drop_last,
            options=FetchOptions.of(locals()),
            device=device,
        )

    @says(**{TOO_MANY: "the values are passed by name; write ctx.report(loss=loss), or **values"})
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
        DistributedDataParallel, and for a model with a communication hook, with SyncBatchNorm in
        training or with broadcast_buffers=False.
        """
        call, options = self._call, FetchOptions.of(locals())
        if epoch is None:
            epoch = call.epoch_of(dataset, is_shuffled=shuffle)
        rows: StepRows
        if isinstance(dataset, Stream):
            refuse_loaders_of_stream(options)
            rows, key = StreamRows(dataset, epoch, collate_fn, pin_memory=pin_memory), "stream"
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
            admission=call.recovery.arrivals if call.recovery is not None else None,
        )

    def report(self, values: Mapping[str, Any] | None = None, /, **named: Any) -> None:
        """Send values of this step to the session's `on_report`. Each call is one Report:
        `report.step` numbers the calls, `report.global_step` is the optimizer's step.

        values, named: as in `ctx.report({"loss": loss})` or `ctx.report(loss=loss)`. Numbers,
            strings, tensors and arrays of at most 1,024 elements, and lists and dictionaries of
            these. One element becomes a number, more become lists. A tensor on a GPU makes the
            call wait for the GPU.

        Raises TypeError or ValueError, naming the value, for others.
        """
        self._call.report(plain_values(values, named))

    def write_digests(self, path: str | Path, module: torch.nn.Module) -> None:
        """Append to a file, on rank 0, a digest of each parameter and buffer as this step has left
        it: call it after `optimizer.step()`. `chorusline compare` finds the first step after which
        two runs differ, and in which parameters.

        path: a file on the host of rank 0, which after a lost worker may be another one.
        module: the DistributedDataParallel, or any module with whole parameters on each rank.

        Reads and hashes all of its memory, about half a gigabyte in a second. Raises ValueError for
        a module of fully_shard.
        """
        if self.rank == 0:
            write_digests(path, self.step, module)

    def barrier(self) -> None:
        """Wait until all ranks have called it."""
        self._call.check_all_take_part("ctx.barrier()")
        self.group.barrier().wait()

    def broadcast(self, value: T, root: int = 0) -> T:
        """The value of rank `root`, on every rank; any object that can be pickled.

        `value` is ignored on other ranks. The root gets the same object back; a worker that takes
        the place of a lost root gets what that one had sent. Tensors of the root's GPU come to
        `ctx.device`.
        """
        self._call.check_all_take_part("ctx.broadcast()")
        return self._call.broadcast(value, root)

    @overload
    def reduce(
        self,
        value: int,
        op: Literal["sum", "min", "max", "product"],
        *,
        weight: None = None,
        group: Group | None = None,
    ) -> int: ...

    @overload
    def reduce(
        self,
        value: float,
        op: str = "mean",
        *,
        weight: float | None = None,
        group: Group | None = None,
    ) -> float: ...

    @overload
    def reduce(
        self,
        value: T,
        op: str = "mean",
        *,
        weight: float | None = None,
        group: Group | None = None,
    ) -> T: ...

    def reduce(
        self,
        value: Any,
        op: str = "mean",
        *,
        weight: float | None = None,
        group: Group | None = None,
    ) -> Any:
        """The mean (or "sum", "min", "max", "product") of a value over all ranks, on every rank.
        "avg" is another word for "mean".

        A tensor gives a new tensor, a numpy array an array, and a number (including numpy's) a
        Python number; integers stay integers, except in a mean. A text and None are returned
        unchanged, so that a dictionary of metrics may have a name among its values.

        weight: the weight of this rank's value in the mean; every rank gives one. With a mean over
            samples as value and their number as weight, the result is the mean over all samples. A
            rank of weight 0 does not count, whatever its value is (even NaN).
        group: some of the ranks, as `self.group.new_group` has made it; then these alone call it.

        Raises ValueError for an unknown op, and, on all ranks, if the weights add up to 0;
        TypeError for any other value, such as a list or dictionary of numbers, a Decimal or a date;
        OverflowError for an int of more than 64 bits, and for such a product.
        """
        op = "mean" if op == "avg" else op
        number = checked_weight(op, weight)
        if not has_value(value):
            return value
        self._call.check_all_take_part("ctx.reduce()")
        return reduced(group or self.group, value, op, number)

    def init_torch_distributed(self, timeout_s: Seconds | None = None) -> None:
        """Initialise torch.distributed among the ranks of this run, with the backend "chorusline".

        Afterwards `torch.distributed.*` and what is built on it (torch's DDP, FSDP2, DTensor,
        torch.distributed.checkpoint) work unchanged. The ranks meet through the session's store.
        All ranks call it, before or between collectives of `group`. A second call does nothing;
        after a failure that ended the generation it initialises torch.distributed over the new
        `group`.

        It sets the environment variables that torchrun sets and libraries read: RANK, WORLD_SIZE,
        LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR (the address of rank 0's node) and MASTER_PORT (a
        port that is free there during this call, but not reserved). They get their former values
        back when the train function has ended.

        Its process groups end with the generation: a failure in one of them ends all of them and
        `group`. They are destroyed when the train function has returned, or before that by
        `torch.distributed.destroy_process_group()`.

        timeout_s: deadline of each operation in seconds; default: the session's.

        Raises RuntimeError if torch.distributed is initialised already, and not for this run.
        """
        torch_distributed.initialise(self._call, timeout_s)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"'Context' object has no attribute {name!r}{instead_of(name)}")

    def __repr__(self) -> str:
        return (
            f"Context(rank={self.rank}, world_size={self.world_size}, "
            f"generation={self.generation}, device={str(self.device)!r})"
        )


def call_of(context: Context) -> FunctionCall:
    """The FunctionCall of a Context."""
    return context._call
