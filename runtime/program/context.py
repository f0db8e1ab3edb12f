"""What a train function knows of itself: its rank, its group, and the small things ranks share."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, overload

import torch

from collectives.contract.operation import ReduceOp
from collectives.group import Group
from collectives.objects.blocking import all_gather_row

from ..checkpoint.saving import Saving
from ..data.batches import Batches
from ..data.dataset_batches import MapStyleDataset, Shard
from ..data.streaming import Stream, StreamShard
from ..process import torch_distributed
from ..process.between_runs import Place, between_runs
from ..process.registry import Stateful
from ..process.step_boundary import boundary
from .function_call import FunctionCall

S = TypeVar("S", bound=Stateful)
T = TypeVar("T")

_BEGIN_ANEW = (
    "Call ctx.forget() on all ranks (await session.run(lambda ctx: ctx.forget())) and begin anew, "
    "or from a checkpoint of yours"
)

_OPS = {
    "mean": ReduceOp.AVG,
    "sum": ReduceOp.SUM,
    "min": ReduceOp.MIN,
    "max": ReduceOp.MAX,
    "product": ReduceOp.PRODUCT,
}


class Context:
    """One rank's view of a run, handed to the train function as its first argument.

    rank, world_size: this rank and their number. local_rank: among the ranks of this node.
    node_rank: of this node. device: of this rank's tensors. group: all ranks, for collectives.
    generation: number of the membership; another one after a failure. Where the run goes on
    without a lost worker, rank, world_size, generation and group change during a step.

    What exchanges data (`barrier`, `broadcast`, `reduce`) is called by all ranks in the same
    order, and blocks the training thread, also in an `async def` function: no rank could go on
    without the others anyway.
    """

    def __init__(self, call: FunctionCall) -> None:
        self._call = call

    @property
    def rank(self) -> int:
        """This rank, from 0 to world_size - 1."""
        return self._call.rank

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self._call.world_size

    @property
    def local_rank(self) -> int:
        """This rank among the ranks of its node, from 0."""
        return self._call.local_rank

    @property
    def local_world_size(self) -> int:
        """How many ranks this rank's node has."""
        return self._call.local_world_size

    @property
    def node_rank(self) -> int:
        """This rank's node among the nodes of the run, from 0."""
        return self._call.node_rank

    @property
    def device(self) -> torch.device:
        """The device of this rank's tensors."""
        return self._call.device

    @property
    def group(self) -> Group:
        """All ranks, for collectives."""
        return self._call.group

    @property
    def generation(self) -> int:
        """The number of the membership. It is another one after a failure."""
        return self._call.generation

    def epochs(self, num_epochs: int, *, resume: str | None = None) -> Iterator[int]:
        """The numbers of the epochs, 0 to num_epochs - 1; after a resume those not over yet.

        resume: a name for this loop. It is remembered on the ranks, from one run of the session to
        the next: a loop of this name that was stopped goes on where it was. Epochs that are over
        are left out, and in the one that was interrupted `shard` begins after the batches whose
        steps were taken. Keep the model and the optimizer with `keep`, or they begin anew. Where
        a run goes on from a checkpoint, that one's place counts, as its state does.

        Raises RuntimeError, on all ranks, if they remember different epochs.
        """
        if num_epochs < 0:
            raise ValueError(f"num_epochs must be at least 0, got {num_epochs}")
        epochs = self._call.cursor.epochs(num_epochs)
        return epochs if resume is None else self._resumed(epochs, resume)

    def _resumed(self, epochs: Iterator[int], name: str) -> Iterator[int]:
        if self.resumed_from is not None:
            between_runs().places.pop(name, None)
        place = between_runs().places.setdefault(name, Place())
        by_rank = all_gather_row(self.group, [place.epoch, int(place.is_dealt_anew)])
        if any(is_dealt_anew for _, is_dealt_anew in by_rank):
            raise RuntimeError(
                f"epoch {place.epoch} of {name!r} was stopped after a rank was lost in it, and its "
                f"samples dealt to the others: which ones are done is not known. {_BEGIN_ANEW}"
            )
        if len({epoch for epoch, _ in by_rank}) > 1:
            told = ", ".join(f"rank {rank}: {epoch}" for rank, (epoch, _) in enumerate(by_rank))
            raise RuntimeError(
                f"the ranks remember different epochs of {name!r} ({told}): a worker was replaced, "
                f"or the last run stopped between them. {_BEGIN_ANEW}"
            )
        bound = boundary()
        outer, bound.place = bound.place, place
        place.is_resumed = True
        # The cursor knows what is left, of this run only.
        place.is_dealt_anew = self._call.runs_again
        try:
            for epoch in epochs:
                if epoch < place.epoch:
                    continue
                place.epoch = epoch
                yield epoch
                place.next_epoch()
                bound.stop_if_agreed()
        finally:
            bound.place = outer

    # -- What stays for the next run -------------------------------------------------------------

    @property
    def kept(self) -> dict[str, Any]:
        """This rank's objects that stay from run to run, by name; the variables of `%%ranks`."""
        return between_runs().objects

    def keep(self, name: str, make: Callable[[], T]) -> T:
        """The object of this name, made by `make()` the first time, and the same one in later runs
        of the session, also when a run was interrupted or has failed.

        All ranks call it, in the same order. Models and optimizers of ours go on in the group of
        the run that they are used in.

        Raises RuntimeError, on all ranks, if some have lost the object (their worker was replaced),
        or if a run was aborted inside a step, so that it is applied on some ranks only.
        """
        stay = between_runs()
        ages = all_gather_row(self.group, [int(number) for number in stay.age_of(name)])
        lost = [rank for rank, (is_here, _, _) in enumerate(ages) if not is_here]
        if len(lost) == self.world_size:
            stay.put(name, make())
        elif lost:
            raise RuntimeError(
                f"ranks {lost} do not keep {name!r}, the others do: their workers were replaced, "
                f"or failed while they made it. {_BEGIN_ANEW}"
            )
        elif len({steps for _, steps, _ in ages}) > 1 or any(torn for _, _, torn in ages):
            raise RuntimeError(
                f"{name!r} cannot go on: a run was aborted inside a step, which is applied on some "
                f"ranks only (steps by rank: {[steps for _, steps, _ in ages]}). {_BEGIN_ANEW}"
            )
        value: T = stay.objects[name]
        return value

    def forget(self, *names: str) -> None:
        """Drop these kept objects; without names all, and the places of `epochs(resume=...)`."""
        between_runs().forget(names)

    # -- What survives -------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Steps that were applied, over all runs: of the registered ZeroRedundancyOptimizer, or
        else the batches of `ctx.shard`. Equal on all ranks between two steps."""
        return self._call.step

    @property
    def resumed_from(self) -> str | None:
        """The path of the checkpoint that this run goes on from, None if it starts afresh."""
        return self._call.resumed_from

    def register(
        self, name: str, stateful: S, *, per_rank: bool = False, required: bool = True
    ) -> S:
        """Make an object part of every checkpoint; if the run goes on from one, bring the object to
        its state now. Returns the object.

        stateful: anything with state_dict and load_state_dict: the DistributedDataParallel, the
        ZeroRedundancyOptimizer (both are sharded), schedules, an average of the model, a scaler,
        RandomState. All ranks register the same, in the same order, before the first step.
        per_rank: each rank has a state of its own; else all have the same, and each writes a part.
        required: False for an object that older checkpoints do not have.

        Raises TypeError for an object without a state, ValueError for a name that is taken;
        CheckpointMismatch, naming the first parameters that differ, if the checkpoint is of
        another model.
        """
        self._call.register(name, stateful, per_rank=per_rank, required=required)
        return stateful

    def save(self, path: str | Path | None = None) -> Saving:
        """Save everything registered, as it is now: call it on all ranks behind `optim.step()`.

        Returns when the state is copied; training may go on while it is written. `await` it or
        `.wait()` for it to be whole. A failure that nobody waited for is raised by the next call.
        At most one is on its way: the next call waits for it first.

        path: of one checkpoint, a folder or a URL; None puts it among those of the session's
        CheckpointConfig, which also decides how many of them stay.

        Raises CheckpointWriteFailed of the save before; RuntimeError without a place, with nothing
        registered, and inside Join when a rank has joined, for it would not take part: there
        `every_n_steps` saves on all ranks.
        """
        return self._call.save(path)

    # -- Data ----------------------------------------------------------------------------------

    @overload
    def shard(
        self,
        dataset: Stream,
        batch_size: int,
        *,
        epoch: int = 0,
        drop_last: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> StreamShard: ...

    @overload
    def shard(
        self,
        dataset: MapStyleDataset,
        batch_size: int,
        *,
        epoch: int = 0,
        seed: int = 0,
        shuffle: bool = True,
        keep_together: Sequence[Hashable] | None = None,
        drop_last: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> Shard: ...

    def shard(
        self,
        dataset: MapStyleDataset | Stream,
        batch_size: int,
        *,
        epoch: int = 0,
        seed: int = 0,
        shuffle: bool = True,
        keep_together: Sequence[Hashable] | None = None,
        drop_last: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> Batches:
        """This rank's batches of one epoch; over all ranks every sample exactly once.

        dataset: anything with a length and numbered samples, the same on all ranks; or a Stream,
        whose rows go to whoever asks first, in the order of the stream (seed and shuffle change
        nothing, and samples cannot be kept together). batch_size:
        samples per rank and step; the last batch of a rank may be smaller, unless drop_last.
        epoch, seed: another order for each, unless shuffle is off. After a resume only what no rank
        was given before the checkpoint is dealt out; passes under torch.no_grad are taken again,
        whole. keep_together: a key for each
        sample; those of one key go to one rank. Ranks may get different numbers of batches:
        iterate inside `Join`.

        Raises ValueError for an empty dataset, TypeError for one without a length.
        """
        if isinstance(dataset, Stream):
            if keep_together is not None:
                raise ValueError(
                    "keep_together needs a dataset with a length: rows of a Stream go to whoever "
                    "asks first. Make what belongs together one row of it"
                )
            return StreamShard(
                dataset,
                batch_size,
                dealer=self._call.dealer,
                epoch=epoch,
                drop_last=drop_last,
                collate_fn=collate_fn,
                cursor=self._call.cursor,
                at_boundary=self._call.at_boundary,
                survives=lambda: self._call.counts_samples,
                without_reader=self._call.without_reader,
            )
        return Shard(
            dataset,
            batch_size,
            rank=self.rank,
            world_size=self.world_size,
            dealer=self._call.dealer,
            epoch=epoch,
            seed=seed,
            shuffle=shuffle,
            keep_together=keep_together,
            drop_last=drop_last,
            collate_fn=collate_fn,
            cursor=self._call.cursor,
            at_boundary=self._call.at_boundary,
        )

    def report(self, **values: float | int | str | torch.Tensor) -> None:
        """Tell the session some values of this step; they reach its `on_report`.

        values: numbers, strings, tensors of one element. A tensor on a GPU is waited for. Reports
        are numbered, one step per call.
        """
        self._call.report({name: _plain(name, value) for name, value in values.items()})

    def barrier(self) -> None:
        """Return on no rank before all ranks have called it."""
        self.group.barrier().wait()

    def broadcast(self, value: T, root: int = 0) -> T:
        """The value of rank `root`, on every rank; anything that pickles.

        The other ranks' `value` is ignored. On the root the very object comes back.
        """
        return self._call.broadcast(value, root)

    def reduce(
        self, value: T, op: str = "mean", *, weight: float | None = None
    ) -> T | float | torch.Tensor:
        """The mean (or "sum", "min", "max", "product") of a value over all ranks, on every rank.

        A tensor gives a new tensor, a number a number; integers stay integers, except in their
        mean. Anything else comes back as it is, so that a dictionary's worth of metrics can be
        reduced without sorting it first.

        weight: of this rank's value in the mean; every rank gives one. With a mean over samples and
        their number it makes the mean over all samples, however many each rank has. A rank whose
        weight is 0 does not count, whatever its value is (0/0 as well).

        Raises ValueError, on all ranks, if the weights add up to 0.
        """
        if op not in _OPS:
            raise ValueError(f"op must be one of {', '.join(map(repr, _OPS))}, got {op!r}")
        if weight is not None and isinstance(value, torch.Tensor | int | float):
            return self._weighted_mean(value, op, weight)
        if isinstance(value, torch.Tensor):
            return self._reduced(value.detach(), op)
        if isinstance(value, int | float):
            dtype = torch.float64 if isinstance(value, float) else torch.int64
            return self._reduced(torch.tensor([value], dtype=dtype), op).item()
        return value

    def _weighted_mean(
        self, value: torch.Tensor | float, op: str, weight: float
    ) -> torch.Tensor | float:
        if op != "mean" or not 0 <= weight < math.inf:
            raise ValueError(
                f"weight must be a number of at least 0, for the mean; got {weight!r}, op={op!r}"
            )
        # Python's floats have 53 bits, and torch would take 24 of them.
        dtype = None if isinstance(value, torch.Tensor) else torch.float64
        given = torch.as_tensor(value, dtype=dtype).detach()
        # The weight travels behind the weighed values, in float64: counts stay exact.
        sums = torch.zeros(given.numel() + 1, dtype=torch.float64)
        sums[-1] = weight
        if weight:
            sums[:-1] = given.reshape(-1).to(torch.float64) * weight
        sums = self._reduced(sums, "sum")
        if not sums[-1] > 0:
            raise ValueError("the weights of all ranks add up to 0: no rank had anything to count")
        mean = (sums[:-1] / sums[-1]).view(given.shape)
        if not isinstance(value, torch.Tensor):
            return mean.item()
        return mean.to(given.device, given.dtype if given.is_floating_point() else torch.float64)

    def init_torch_distributed(self, timeout_s: float | None = None) -> None:
        """Initialise torch.distributed among the ranks of this run, over groups of ours.

        After it, `torch.distributed.*` and what is built on it (stock DDP, FSDP2, DTensor,
        torch.distributed.checkpoint) work as they are; the backend's name is "chorusline". They
        meet through the session's store. Collective: all ranks call it, before or between
        collectives of `group`. Harmless when it was done already; after a failure that ended the
        generation it initialises anew, over the new `group`.

        Its process groups share the fate of this generation: a failure in one of them ends all, and
        `group`. They are destroyed when the train function has returned, or before that by
        `torch.distributed.destroy_process_group()`.

        timeout_s: seconds that an operation may take; by default the session's.

        Raises RuntimeError if torch.distributed is initialised with something else.
        """
        torch_distributed.initialise(self.group, timeout_s)

    def _reduced(self, tensor: torch.Tensor, op: str) -> torch.Tensor:
        """A new tensor where `tensor` is."""
        if op == "mean" and not tensor.is_floating_point():
            tensor = tensor.to(torch.float64)
        elif tensor.dtype in (torch.bool, torch.uint8, torch.int8, torch.int16):
            tensor = tensor.to(torch.int64)
        total = tensor.to(self.device, copy=True).contiguous()
        self.group.all_reduce(total, _OPS[op]).wait()
        return total.to(tensor.device)

    def __repr__(self) -> str:
        return (
            f"Context(rank={self.rank}, world_size={self.world_size}, "
            f"generation={self.generation}, device={str(self.device)!r})"
        )


def call_of(context: Context) -> FunctionCall:
    """What the runtime asks of the function that was given this context."""
    return context._call


def _plain(name: str, value: Any) -> float | int | str:
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise ValueError(
                f"report({name}=...) got a tensor of shape {tuple(value.shape)}; report one "
                "number, its mean() for example"
            )
        value = value.item()
    elif hasattr(value, "item") and not isinstance(value, str | int | float):
        value = value.item()  # A scalar of numpy's.
    if not isinstance(value, str | int | float):
        raise TypeError(
            f"report({name}=...) takes a number, a string or a tensor of one element, got "
            f"{type(value).__name__}"
        )
    return value
