"""`Batches`: the iteration over one rank's batches, and what happens between two of them.

`Shard` (dataset_batches.py) takes the samples from a dataset with a length, `StreamShard`
(streaming.py) from a stream.
"""

from __future__ import annotations

import warnings
import weakref
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import torch

from ..join.active import active_join
from ..join.engine import JoinEngine
from ..process.between_runs import between_runs
from ..process.step_boundary import boundary
from .cursor import Cursor
from .dealer import Counts, Dealer, ShardIteration
from .dealing import Remainder
from .fetching.on_device import ToDevice


class _BatchIterator:
    """The batches that an iteration gives."""

    def __init__(self, batches: Generator[Any]) -> None:
        self._batches = batches
        self._failure = ""

    def __iter__(self) -> _BatchIterator:
        return self

    def __next__(self) -> Any:
        # After an error a generator looks as if it had ended; a loop that catches the error would
        # leave out the rest of the epoch without a word.
        if self._failure:
            raise RuntimeError(
                f"this iteration has ended with an error ({self._failure}), so it gives no further "
                "batches. Handle what a sample may raise in the dataset, or in collate_fn"
            )
        try:
            return next(self._batches)
        except StopIteration:
            raise
        except Exception as error:
            self._failure = f"{type(error).__name__}: {error}"
            raise

    def close(self) -> None:
        self._batches.close()


class Batches(ShardIteration):
    """One rank's batches of an epoch. It can be iterated more than once.

    Inside `Join` the iteration of a rank that is out of batches continues, without giving any,
    until the other ranks are out of theirs. When a rank is lost, its remaining samples go to the
    other ranks, even to those that are out of batches and wait.
    """

    num_samples = 0
    """The size of the dataset; 0 if unknown."""

    def __init__(
        self,
        batch_size: int,
        *,
        key: str,
        dealer: Dealer,
        epoch: int,
        cursor: Cursor | None,
        at_boundary: Callable[[], None] | None,
        device: torch.device | str | None = None,
    ) -> None:
        """key: identifies the iteration when a run resumes.
        dealer: knows how samples are dealt again when ranks are lost.
        cursor: records which samples this rank was given; None: they are not recorded.
        at_boundary: called between two batches.
        device: where batches are copied to; None: they stay where they are made.

        Raises ValueError for a batch_size below 1."""
        if not hasattr(batch_size, "__index__"):
            raise TypeError(
                f"batch_size must be a whole number of samples per rank and step, got "
                f"{batch_size!r}"
            )
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        self.batch_size = batch_size
        self.epoch = epoch
        self.ids_of_the_lost: Sequence[int] = []
        self.counts = Counts()
        self._dealer = dealer
        self._key = key
        self._cursor = cursor
        self._at_boundary = at_boundary
        self._to_device = None if device is None else ToDevice(device)
        self.rest = cursor.rest_of(key) if cursor and torch.is_grad_enabled() else Remainder()
        self._running: weakref.ref[_BatchIterator] | None = None  # None: not iterated yet
        self.num_given = 0
        """The number of batches that the iteration has given."""
        self._together: list[Batches] = []
        """The iterations of a Join whose batches come together, this one too; one list for all."""

    def __iter__(self) -> Iterator[Any]:
        """Begins the iteration at once, and not with its first batch. A zip begins all of its
        iterations before it asks for a batch, so they begin on all ranks, and in the same order,
        even where a rank has no batch of the first one and shadows in there."""
        if self._running is not None and (before := self._running()) is not None:
            before.close()  # Beginning a shard again ends its last iteration.
        batches = self._iterate()
        # Up to the first `yield`: from here on the dealer knows that this rank is in it.
        next(batches)
        given = _BatchIterator(batches)
        self._running = weakref.ref(given)
        return given

    def _iterate(self) -> Generator[Any]:
        """Gives None when the iteration has begun, and then the batches.

        1. The iteration begins: it is recorded, and the dealer knows that this rank is in it.
        2. The first batch is asked for: the Join of this loop learns of the iteration.
        3. A batch is taken and given.
        4. Between two batches: a checkpoint, a stop, and steps that this rank only shadows.
        5. The iteration is over, or the loop was left.
        """
        self._begin()  # (1)
        is_recorded = bool(self.iteration)
        bound = boundary()
        status, is_place = bound.status, bound.is_place
        if is_place:
            continues = status.epoch == self.epoch and self.rest != Remainder()
            status.batches_before = status.place_in_epoch if continues else 0
            status.batches_taken = status.batches_shadowed = 0
        join: JoinEngine | None = None
        try:
            self._dealer.begin(self)
            with bound.iterating(self):
                yield None
                # (2) Not before: an iterator may replace the one before until then.
                self._dealer.check_room()
                if is_recorded:
                    self._dealer.ends_body(self)
                bound.begin_steps()
                trains = torch.is_grad_enabled()
                if is_place:
                    status.batches_left = self._num_left()
                join = self._join_of_loop(trains)
                if join:
                    self._enter(join)
                # Without a model a loop over unequal batches waits for nobody.
                needs_join = join is None and trains and bool(between_runs().engines)
                # The first step waits for a rank that has no batch at all.
                if needs_join and 0 in (self._batches_by_rank() or ()):
                    self._warn_without_join()
                    needs_join = False
                number = 0
                while self.has_more():
                    taken_before = self.counts.num_taken  # (3)
                    batch = self._take()
                    self.num_given = number + 1
                    if self._to_device is not None:
                        batch = self._to_device(batch)
                    if is_place:
                        status.batches_taken, status.batches_left = number + 1, self._num_left()
                    if trains:
                        status.samples += self.counts.num_taken - taken_before
                    if join:
                        self._begin_batch(join, number)
                    yield batch
                    number += 1  # (4)
                    # After a step: batches may also be listed here, and trained with in a Join.
                    if needs_join and self.counts.num_agreed:
                        self._warn_without_join()
                        needs_join = False
                    if is_place:
                        # A rank may have been lost in the step, and this one has samples of it.
                        status.batches_left = self._num_left()
                    # An evaluation is no step: it must not save a checkpoint. Nor must a zip, while
                    # one of its iterations is a batch ahead of another.
                    ends_body = is_recorded and self._dealer.ends_body(self)
                    if ends_body and self._at_boundary is not None:
                        self._at_boundary()
                    bound.stop_if_agreed()
                    if join and not self.has_more():
                        # Shadow in here: a loss may give this rank samples, and the loop continues.
                        join.ledger.batch = number
                        join.shadow(self.has_more, self._together)
            # (5) Not in `finally`: a loop that was left by `break` or an error is resumed where it
            # was.
            self.is_over = True
            self._dealer.end(self)  # It says whether a step has yet to use the last samples.
            self._end()
        except GeneratorExit:
            # The loop was left early. Its batch numbers no longer say which ranks have data.
            if join:
                join.ledger.batch = None
            raise
        finally:
            if join:
                self._leave_together(join)
            agreed, taken = self.counts.num_agreed, self.counts.num_taken
            if is_place and 0 < agreed < taken:
                # The batches of a step that does not count will be taken again.
                status.batches_taken -= -(-(taken - agreed) // self.batch_size)
            self._dealer.end(self)
            self._left()

    def _begin(self) -> None:
        self._check()
        if self._cursor is not None:
            self._cursor.begin(self._key, self)
        # Not before: the cursor has kept those of the iteration before.
        self.num_given, self.ids_of_the_lost = 0, []

    def _join_of_loop(self, trains: bool) -> JoinEngine | None:
        join = active_join()
        if join is not None and not trains and join.is_between_batches:
            return None  # An evaluation in the body of a loop takes no step of the Join's.
        return join

    def _enter(self, join: JoinEngine) -> None:
        if not self._together:
            self._begin_together(join)
        # While this rank shadows, the Join is what comes to a boundary between two steps.
        join.at_boundary = self._at_boundary
        if not self.has_more():
            # This rank has no batch at all: it shadows from the first step.
            join.shadow(self.has_more, self._together)

    def _begin_together(self, join: JoinEngine) -> None:
        """The iterations that have begun and given no batch yet, as in a zip, are one of the
        Join's: it has as many batches as the one that ends first."""
        self._together += [
            one
            for one in boundary().iterations
            if isinstance(one, Batches) and not one.num_given and not one._together
        ]
        for one in self._together:
            one._together = self._together
        join.together.append(self._together)
        join.begin_epoch(self._least_batches())

    def _least_batches(self) -> list[int] | None:
        """By rank; None if unknown: a stream does not know its batches, and each step agrees on
        the next one."""
        least: list[int] | None = None
        for one in self._together:
            # One of them may end at any batch, so nothing is known of all together.
            if (of_one := one._batches_by_rank()) is None:
                return None
            least = [*map(min, of_one, least or of_one)]
        return least

    def _begin_batch(self, join: JoinEngine, number: int) -> None:
        """This iteration gives batch `number`."""
        beside = self._together
        if any(one.num_given < number for one in beside):  # They do not come together after all.
            for one in beside:
                if one.num_given < number:
                    one._together = []
            beside[:] = [one for one in beside if one.num_given >= number]
            join.ledger.set_batches(self._least_batches())
        # The last one that gives its part of the batch begins the step. Its vote tells the other
        # ranks whether this rank has a next one.
        if beside and all(one.num_given > number for one in beside):
            join.begin_batch(number, beside, is_last=not all(one.has_more() for one in beside))

    def _leave_together(self, join: JoinEngine) -> None:
        beside, self._together = self._together, []
        beside[:] = [one for one in beside if one is not self]
        join.together[:] = [one for one in join.together if one]

    def _warn_without_join(self) -> None:
        """The ranks' numbers of batches differ, and the loop trains: it needs a Join."""
        batches = self._batches_by_rank() or [0]
        if self._dealer.rank == 0 and min(batches) < max(batches):
            by_rank = ", ".join(f"rank {rank}: {n}" for rank, n in enumerate(batches))
            warnings.warn(
                f"the ranks have different numbers of batches ({by_rank}), and the loop over them "
                "is not inside a Join: where a rank has run out of data, the others wait for it "
                "until the deadline. Write `with chorusline.Join([model, optimizer]):` around the "
                "loop",
                stacklevel=4,  # the loop, which called `_BatchIterator.__next__`
            )

    def _check(self) -> None:
        """Raise if the data has changed; called before an iteration begins."""

    @abstractmethod
    def _batches_by_rank(self) -> Sequence[int] | None:
        """The number of batches of the whole iteration, by rank; None if unknown."""

    @abstractmethod
    def _num_left(self) -> int | None:
        """The number of this rank's remaining batches; None if unknown."""

    @abstractmethod
    def has_more(self) -> bool:
        """Whether this rank has another batch; a lost rank's may come to it later."""

    @abstractmethod
    def _take(self) -> Any:
        """The next batch; its samples count as taken."""

    def _end(self) -> None:
        """Called when the iteration is over on this rank."""

    def _left(self) -> None:
        """Called when this rank has left the iteration, even by an error, or to begin it again."""
