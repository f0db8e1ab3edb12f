"""What a train function knows of itself: its rank, its group, and the small things ranks share."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, overload

import torch
from ray import cloudpickle

from actors.journal import Journal
from actors.messages import Assignment, Report
from collectives.errors import GroupAborted, fresh_copy
from collectives.group import Group
from collectives.objects import broadcast_object
from collectives.reduce_op import ReduceOp

from . import torch_distributed
from .batches import Batches
from .boundary import boundary
from .checkpoint.checkpoints import Checkpoints
from .checkpoint.saving import Saving
from .cursor import Cursor
from .dealer import Dealer
from .join import Joinable, active_join
from .kept import Place, kept
from .recovery import Recovery
from .registry import Registry, Stateful
from .sharding import MapStyleDataset, Shard
from .streaming import Stream, StreamShard

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

    def __init__(
        self,
        assignment: Assignment,
        group: Group,
        journal: Journal,
        recovery: Recovery | None,
        before: Context | None = None,
        *,
        run_id: str = "",
    ) -> None:
        """recovery: where the run goes on after a loss. before: of the function, when it ran last
        in this run. run_id: tells the run from all others."""
        self.device = group.device
        self.dealer = Dealer(
            assignment.rank, assignment.world_size, (run_id, assignment.generation)
        )
        self.recovery = recovery
        self._journal = journal
        self._runs_again = before is not None
        self._num_reports: int = before._num_reports if before is not None else 0
        self.registry = Registry()
        self.checkpoints: Checkpoints | None = None  # set by who runs the train function
        self._cursor = Cursor()
        self._boundaries = 0
        self._boundaries_of_step: int | None = None
        self.enter(assignment, group)
        if recovery is not None:
            recovery.attach(self)

    def enter(self, assignment: Assignment, group: Group) -> None:
        """Be a rank of another generation; what was made of the former group has ended with it."""
        self.rank = assignment.rank
        self.world_size = assignment.world_size
        self.local_rank = assignment.local_rank
        self.local_world_size = assignment.local_world_size
        self.node_rank = assignment.node_rank
        self.generation = assignment.generation
        self.group = group
        kept().follow(group)
        if (place := boundary().place) is not None:  # Inside a run, so after a loss.
            place.is_dealt_anew = True
        if self.checkpoints is not None:
            self.checkpoints.change_group(group)

    def finish(self) -> None:
        """The function has returned: wait for the other ranks, if they may still need this one."""
        if self.recovery is not None:
            self.recovery.finish()

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
        epochs = self._cursor.epochs(num_epochs)
        return epochs if resume is None else self._resumed(epochs, resume)

    def _resumed(self, epochs: Iterator[int], name: str) -> Iterator[int]:
        if self.resumed_from is not None:
            kept().places.pop(name, None)
        place = kept().places.setdefault(name, Place())
        by_rank = self._told([place.epoch, int(place.is_dealt_anew)])
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
        place.is_dealt_anew = self._runs_again
        try:
            for epoch in epochs:
                if epoch < place.epoch:
                    continue
                place.epoch = epoch
                yield epoch
                place.next_epoch()
                bound.pass_()
        finally:
            bound.place = outer

    # -- What stays for the next run -------------------------------------------------------------

    @property
    def kept(self) -> dict[str, Any]:
        """This rank's objects that stay from run to run, by name; the variables of `%%ranks`."""
        return kept().objects

    def keep(self, name: str, make: Callable[[], T]) -> T:
        """The object of this name, made by `make()` the first time, and the same one in later runs
        of the session, also when a run was interrupted or has failed.

        All ranks call it, in the same order. Models and optimizers of ours go on in the group of
        the run that they are used in.

        Raises RuntimeError, on all ranks, if some have lost the object (their worker was replaced),
        or if a run was aborted inside a step, so that it is applied on some ranks only.
        """
        stay = kept()
        ages = self._told([int(number) for number in stay.age_of(name)])
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
        kept().forget(names)

    def _told(self, numbers: list[int]) -> list[list[int]]:
        """What each rank tells the others, by rank."""
        mine = torch.tensor(numbers, dtype=torch.int64, device=self.device)
        everybody = mine.new_empty(self.world_size * len(numbers))
        self.group.all_gather(everybody, mine).wait()
        rows: list[list[int]] = everybody.view(self.world_size, -1).tolist()
        return rows

    # -- What survives -------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Steps that were applied, over all runs: of the registered ZeroRedundancyOptimizer, or
        else the batches of `ctx.shard`. Equal on all ranks between two steps."""
        counts = [
            entry.object.num_steps
            for entry in self.registry
            if isinstance(entry.object, Joinable) and hasattr(entry.object, "num_steps")
        ]
        return max(counts, default=self._boundaries)

    @property
    def resumed_from(self) -> str | None:
        """The path of the checkpoint that this run goes on from, None if it starts afresh."""
        reader = self.checkpoints.reader if self.checkpoints else None
        return reader.path if reader else None

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
        entry = self.registry.add(name, stateful, per_rank=per_rank)
        if self.recovery is not None:
            self.recovery.watch_registered(entry)
            if self.recovery.restore(entry, self.group):
                return stateful
        if self.checkpoints is not None:
            self.checkpoints.restore(entry, required=required)
        return stateful

    def has_checkpoint(self, group: Group) -> bool:
        """Whether there is one to go on from, among those of the session's CheckpointConfig; all
        ranks of `group` ask."""
        return self.checkpoints is not None and self.checkpoints.has_any(group)

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
        if self.checkpoints is None:
            raise RuntimeError("this Context was made outside a session, which keeps checkpoints")
        join = active_join()
        if join is not None and 0 < len(join.last_step_live) < self.world_size:
            joined = [r for r in range(self.world_size) if r not in join.last_step_live]
            raise RuntimeError(
                f"ctx.save() inside Join, and ranks {joined} have run out of data and are not in "
                "the loop's body any more; save behind the Join, or let "
                "CheckpointConfig(every_n_steps=...) do it, which reaches them too"
            )
        return self.checkpoints.save(path, self.step, range(self.world_size))

    def resume_data(self, told: Sequence[dict[str, Any]]) -> None:
        """Go on in the data where a checkpoint was; told: of its ranks, as `told_data` gave it."""
        self._boundaries = max(part["boundaries"] for part in told)
        self._cursor.resume([part["data"] for part in told])

    def told_data(self, *, committed: bool = False) -> dict[str, Any]:
        """Where this rank is in its data, as plain data for a checkpoint. committed: up to the last
        step that counts, not in the middle of one."""
        has_recovered = self.recovery is not None and self.recovery.num_recoveries > 0
        of_step = self._boundaries_of_step if committed else None
        return {
            "boundaries": self._boundaries if of_step is None else of_step,
            "data": self._cursor.told(by_id=committed or has_recovered, committed=committed),
        }

    def count_step(self) -> None:
        """A plain optimizer has stepped with the batch of the moment, which is over with that."""
        self._boundaries_of_step = self._boundaries + 1

    def _without_reader(self, error: Exception) -> Exception:
        """What to raise where the reader of a Stream is gone: what has all ranks run again from the
        top, if they can."""
        if self.recovery is None or not self.recovery.can_begin_again:
            return error
        ends = GroupAborted(self.group.generation, [], str(error))
        self.group.abort(ends)
        return fresh_copy(ends)

    def _at_boundary(self) -> None:
        """Between two batches, when the step of the one before is over; on a rank that has joined,
        behind each step that it shadowed."""
        self._boundaries += 1
        if self.recovery is not None:
            self.recovery.pass_boundary()
        if self.checkpoints is not None:
            self.checkpoints.save_if_due(self.step)

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
                dealer=self.dealer,
                epoch=epoch,
                drop_last=drop_last,
                collate_fn=collate_fn,
                cursor=self._cursor,
                at_boundary=self._at_boundary,
                survives=lambda: self.recovery is not None and self.recovery.counts_samples,
                without_reader=self._without_reader,
            )
        return Shard(
            dataset,
            batch_size,
            rank=self.rank,
            world_size=self.world_size,
            dealer=self.dealer,
            epoch=epoch,
            seed=seed,
            shuffle=shuffle,
            keep_together=keep_together,
            drop_last=drop_last,
            collate_fn=collate_fn,
            cursor=self._cursor,
            at_boundary=self._at_boundary,
        )

    def report(self, **values: float | int | str | torch.Tensor) -> None:
        """Tell the session some values of this step; they reach its `on_report`.

        values: numbers, strings, tensors of one element. A tensor on a GPU is waited for. Reports
        are numbered, one step per call.
        """
        plain = {name: _plain(name, value) for name, value in values.items()}
        taken = boundary().steps.taken
        self._journal.append(Report(self.rank, self._num_reports, time.time(), plain, taken))
        self._num_reports += 1

    def say(self, values: dict[str, float | int | str]) -> None:
        """What travels with the reports, in their order, and is not counted as one of them."""
        self._journal.append(Report(self.rank, self._num_reports, time.time(), values))

    def barrier(self) -> None:
        """Return on no rank before all ranks have called it."""
        self.group.barrier().wait()

    def broadcast(self, value: T, root: int = 0) -> T:
        """The value of rank `root`, on every rank; anything that pickles.

        The other ranks' `value` is ignored. On the root the very object comes back.
        """
        received: T = broadcast_object(self.group, value, root, cloudpickle.dumps)
        return received

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
