"""Where a run is in its data: its loops of epochs, and the samples that each rank was given.

Each rank keeps its own part in a `Cursor`. As plain data the part goes

- into a checkpoint;
- to the function's next call, when the function runs again from the top after a death;
- to the session's next run, for a loop over `ctx.epochs(..., resume=name)` that was left.

`Used` says which samples each of them counts. `resume` makes a rank's new cursor from the parts of
all ranks, whose number may have been another one.
"""

from __future__ import annotations

import copy
import functools
import itertools
import operator
from array import array
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from chorusline.actors.errors import StreamLost

from ..process.step_boundary import boundary
from .dealer import Dealt
from .dealing import Hands, left_of
from .number_set import MOST, NumberSet, set_of

Run = tuple[int, tuple[int, ...]]
"""A world size, and by rank how many samples of its hand the rank was given in that run."""


@dataclass(frozen=True, slots=True)
class Remainder:
    """What is left of an iteration over data that earlier runs have begun, at any number of ranks.

    runs: the earlier runs, oldest first. given: further sample numbers that must not be given
    again; None: all of them. The default is an iteration that no run has begun.
    """

    runs: tuple[Run, ...] = ()
    given: NumberSet | None = field(default_factory=NumberSet)

    def dealt(
        self,
        whole: Callable[[int], Hands],
        world_size: int,
        keep_together: Sequence[Hashable] | None = None,
    ) -> Hands:
        """The hands of `world_size` ranks. whole: makes the hands of an iteration from its start,
        for a number of ranks."""
        # The iteration is over: there is nothing to deal, for any number of ranks.
        if self.given is None:
            return [array("q") for _ in range(world_size)]
        # Repeat what the earlier runs did, each with its own number of ranks.
        hands = whole(self.runs[0][0] if self.runs else world_size)
        sizes = [*(size for size, _ in self.runs[1:]), world_size]
        for (_, counts), size in zip(self.runs, sizes, strict=False):
            left = [hand[count:] for hand, count in zip(hands, counts, strict=True)]
            hands = _dealt_again(left, size, keep_together)
        # Ranks were lost meanwhile, so counts do not say which samples were used, and numbers do.
        if len(self.given):
            given = self.given
            hands = [array("q", (one for one in hand if one not in given)) for hand in hands]
        return hands


def _dealt_again(
    hands: Sequence[Sequence[int]], world_size: int, keep_together: Sequence[Hashable] | None
) -> Hands:
    """The samples of `hands`, distributed over `world_size` ranks."""
    if len(hands) == world_size:  # The ranks keep their hands.
        return [array("q", hand) for hand in hands]
    left = left_of(hands, [0] * len(hands))
    if keep_together is None:
        return [left[rank::world_size] for rank in range(world_size)]
    # Samples of one key stay in one hand.
    lots: dict[Hashable, list[int]] = {}
    for number in left:
        lots.setdefault(keep_together[number], []).append(number)
    dealt = list(lots.values())
    return [
        array("q", itertools.chain.from_iterable(dealt[rank::world_size]))
        for rank in range(world_size)
    ]


class Used(Enum):
    """Which samples count as used.

    GIVEN: all that this rank was given; for a checkpoint, which is made between two steps.
    AGREED: those that this rank was given before the last step that all ranks agreed on; for the
        session's next run, since this run may have been aborted in the middle of a step.
    COMMITTED: those of all ranks, by number, in steps that count; for a function that runs again
        from the top, since some ranks are lost.
    """

    GIVEN = auto()
    AGREED = auto()
    COMMITTED = auto()


@dataclass(slots=True)
class Iteration:
    """One iteration over a dataset.

    rest: what was left to give when the iteration began in this run.
    shard: the iteration; None before it begins.
    is_over: this rank has left the iteration, since there was nothing left to take.
    name: stays the same when the function runs again from the top; None before the first begin.
    """

    rest: Remainder = field(default_factory=Remainder)
    shard: Dealt | None = None
    is_over: bool = False
    name: str | None = None

    def state(self, used: Used, by_id: bool) -> dict[str, Any]:
        """As plain data. by_id: tell the sample numbers, since hands were dealt again when ranks
        were lost, and a count does not identify samples."""
        shard, is_over, given, num_ids = self.shard, self.is_over, 0, 0
        ids = self.rest.given or NumberSet()
        needs_ids = by_id or bool(len(ids))
        if shard is not None:
            taken = shard.counts.num_taken
            given = shard.counts.num_agreed if used is Used.AGREED else taken
            # The batches that no step has used are taken again, by a run that continues from here.
            is_over = is_over and given == taken
            needs_ids = needs_ids or shard.needs_ids
            # An iteration that is over on one rank is so on all, unless the run was aborted then.
            if needs_ids and (used is Used.AGREED or not is_over):
                if shard.needs_ids and used is not Used.GIVEN:
                    num_ids = len(ids) + shard.num_committed
                if used is Used.COMMITTED:
                    ids |= NumberSet(shard.committed_ids)
                else:
                    ids |= NumberSet(shard.taken_ids[:given]) | NumberSet(shard.ids_of_the_lost)
        return {
            "runs": self.rest.runs,
            "given": given,
            "ids": ids.text() if needs_ids else None,
            "is_over": is_over or self.rest.given is None,
            "num_ids": num_ids,
        }


class Cursor:
    """Where this rank is in its data.

    An iteration without gradients (evaluation under `torch.no_grad`) is not counted: a resumed run
    takes it again as a whole, so its result is that of all samples.
    """

    def __init__(self) -> None:
        self._loop = -1
        self._epoch: int | None = None  # None: no loop over ctx.epochs has given one
        self.epoch_under_way: int | None = None
        """The epoch of the loop whose body runs; None: no body runs."""
        self._iterations: dict[str, Iteration] = {}
        self._seen: dict[str, int] = {}
        self._resumed = (-1, 0)
        """The loop and the epoch with which this cursor began."""

    def epochs(self, num_epochs: int) -> Iterator[int]:
        """The numbers of the epochs of one loop that are not over yet."""
        self._loop += 1
        loop, first = self._resumed
        if self._loop < loop:  # The whole loop is over.
            return
        first = first if self._loop == loop else 0
        for epoch in range(first, num_epochs):
            self._enter(epoch)
            self.epoch_under_way = epoch
            boundary().epoch = epoch + 1
            try:
                yield epoch
            finally:  # Also when the function leaves the loop.
                self.epoch_under_way = None
                boundary().epoch = 0
        # Also where no epoch was left: a checkpoint after the loop resumes after it.
        self._enter(max(first, num_epochs))  # The last epoch is over.

    def _enter(self, epoch: int) -> None:
        self._epoch, self._seen = epoch, {}
        if (self._loop, epoch) != self._resumed:
            self._iterations = {}  # Only the resumed epoch has iterations that are partly done.

    @property
    def place(self) -> tuple[int, int]:
        """The number of the loop that was begun last, and its epoch; before the function is at
        the place where it resumes, that place."""
        return max((self._loop, self._epoch or 0), self._resumed)

    def rest_of(self, key: str) -> Remainder:
        """What is left of the coming iteration over the data that `key` identifies."""
        iteration = self._iterations.get(f"{key}#{self._seen.get(key, 0)}")
        return iteration.rest if iteration else Remainder()

    def begin(self, key: str, shard: Dealt | None = None) -> Iteration:
        """Begin an iteration. Each iteration of an epoch over the same data has its own record.

        Raises ValueError if the iteration had begun before the resume, over another number of
        samples.
        """
        number = self._seen.get(key, 0)
        self._check_length(key, number)
        self._seen[key] = number + 1
        # One that is resumed is there already, with its rest.
        iteration = self._iterations.setdefault(f"{key}#{number}", Iteration())
        iteration.shard = shard
        iteration.name = f"{self._loop}/{self._epoch}/{key}#{number}"
        return iteration

    def let_go(self, shard: Dealt) -> None:
        """`shard` begins to count again: what it has counted so far stays in its iterations."""
        for iteration in self._iterations.values():
            if iteration.shard is shard:
                # The object counts from 0 again; what this iteration has to tell is in the copy.
                iteration.shard = copy.copy(shard)

    def _check_length(self, key: str, number: int) -> None:
        if f"{key}#{number}" in self._iterations:
            return  # Another dataset of this epoch may have another length.
        length, _, rest = key.partition("/")
        for name, iteration in self._iterations.items():
            before = name.partition("/")[0]
            is_this = iteration.name is None and name == f"{before}/{rest}#{number}"
            if is_this and before != length and iteration.rest != Remainder():
                raise ValueError(
                    f"the dataset has {length} samples, and had {before} when this epoch started, "
                    "so it is not known which samples are left. Restore the dataset, and change "
                    "it only between two epochs; ctx.forget() on all ranks lets a loop of "
                    "ctx.epochs(resume=...) start over"
                )

    def state(self, used: Used = Used.GIVEN, *, by_id: bool = False) -> dict[str, Any]:
        """As plain data. by_id: the run has lost ranks."""
        loop, epoch = self.place
        return {
            "loop": loop,
            "epoch": epoch,
            "passages": {  # The key in checkpoints; the name of earlier versions.
                key: iteration.state(used, by_id) for key, iteration in self._iterations.items()
            },
        }

    def resume(self, parts: Sequence[dict[str, Any]], *, epoch_is_over: bool = False) -> None:
        """Resume. parts: what `state` gave on each rank, by rank. epoch_is_over: resume with the
        epoch after theirs."""
        loop, epoch = parts[0]["loop"], parts[0]["epoch"]
        # The body of the epoch has ended, so that what it was given does not matter any more.
        if epoch_is_over:
            self._resume_at(loop, epoch + 1, [])
        else:
            self._resume_at(loop, epoch, [part["passages"] for part in parts])

    def resume_next_loop(self, epoch: int, iterations: Sequence[dict[str, Any]]) -> None:
        """Resume the coming loop in this epoch. iterations: as in `state`, by rank."""
        self._resume_at(self._loop + 1, epoch, iterations)

    def _resume_at(self, loop: int, epoch: int, iterations: Sequence[dict[str, Any]]) -> None:
        self._resumed = loop, epoch
        self._iterations = {
            key: Iteration(_rest([of_rank.get(key) for of_rank in iterations], most_of(key)))
            for key in sorted({key for of_rank in iterations for key in of_rank})
        }


def check_parts(parts: Sequence[Any]) -> None:
    """Raise ValueError unless `Cursor.resume` takes `parts`, of a checkpoint that anybody may have
    written."""
    for part in parts:
        iterations = part["passages"] if isinstance(part, dict) and "passages" in part else None
        if (
            not isinstance(iterations, dict)
            # -1: saved before the first loop over epochs.
            or not is_count(part.get("loop"), least=-1)
            or not is_count(part.get("epoch"))
            or not all(isinstance(one, dict) for one in iterations.values())
        ):
            raise ValueError("the place of a rank in its data has another form")
        for key, iteration in iterations.items():
            _check_iteration(iteration, most_of(key))


def _check_iteration(iteration: dict[str, Any], most: int) -> None:
    # Line by line, since each line reads what the one before has found to be of its type.
    runs = iteration.get("runs")
    if (
        not isinstance(runs, list | tuple)
        or not all(isinstance(run, list | tuple) and len(run) == 2 for run in runs)
        or not all(isinstance(counts, list | tuple) for _, counts in runs)
        or not all(size == len(counts) and size > 0 for size, counts in runs)
        or not all(is_count(count) for _, counts in runs for count in counts)
        or not is_count(iteration.get("given"))
        or type(iteration.get("is_over")) is not bool
        or not is_count(iteration.get("num_ids", 0))
    ):
        raise ValueError("the samples that a rank was given are not listed as a run lists them")
    set_of(iteration.get("ids"), most)


def is_count(value: object, least: int = 0) -> bool:
    return type(value) is int and least <= value < 1 << 63


def told_place(parts: Sequence[dict[str, Any]], *, epoch_is_over: bool) -> str:
    """Where a function resumes, for people; empty without a loop over `ctx.epochs`. The arguments
    are those of `Cursor.resume`. Pure."""
    loop, epoch = parts[0]["loop"], parts[0]["epoch"]
    iterations = [iteration for part in parts for iteration in part["passages"].values()]
    if loop < 0:
        return ""
    if epoch_is_over or not iterations:
        return f"before epoch {epoch + epoch_is_over}"
    if all(iteration["is_over"] for iteration in iterations):
        return f"in epoch {epoch} after its batches, so the rest of its body runs now"
    return f"in epoch {epoch}"


def most_of(key: str) -> int:
    """No sample of the iteration with this key has a number as large as that: the key of a dataset
    begins with its length, and a stream has none."""
    length = key.partition("/")[0]
    return min(int(length), MOST) if length.isdecimal() and len(length) < 20 else MOST


def _rest(parts: Sequence[dict[str, Any] | None], most: int) -> Remainder:
    """What is left of an iteration. parts: by rank; None: the rank has not begun it. most: as in
    `most_of`."""
    begun = [part for part in parts if part is not None]
    runs = tuple((size, tuple(counts)) for size, counts in begun[0]["runs"])
    if all(part["is_over"] for part in begun):
        return Remainder(runs, None)
    if any(part["ids"] is not None for part in begun):  # Counts identify no samples.
        given = functools.reduce(operator.or_, (set_of(part["ids"], most) for part in begun))
        missing = max(part.get("num_ids", 0) for part in begun) - len(given)
        if missing > 0:
            raise StreamLost(
                "it died together with a rank",
                f"Of those, {missing} belong to steps that count, but it is no longer known "
                "which. Run the epoch again, or resume from a checkpoint",
            )
        return Remainder(runs, given)
    # Hands are dealt again from the seed, and a count says how far each rank was in its own.
    counts = tuple(0 if part is None else part["given"] for part in parts)
    return Remainder((*runs, (len(parts), counts)))
