"""Where a rank is in the samples of a run, and how iterations continue when ranks are lost.

A rank's vote on a step says how many samples it has taken of each of its iterations. So when a rank
is lost, the other ranks know how many of its samples belong to steps that count, and the rest is
dealt again. Over a dataset with a length every rank computes the hands of all ranks (dealing.py);
for a stream the reader deals the rows (streaming.py).
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..process.agreement import MAX_ITERATIONS
from .dealing import Remainder
from .stragglers import Stragglers

WITHIN = 1 << 32
"""An iteration's number counts in steps of this one; an iteration that begins inside another one,
between two of its batches, gets one of the numbers between. So ranks that have run out of data, and
do not run the loop's body, number the next loop as the others do."""


@dataclass(slots=True)
class Counts:
    """Where a rank is in an iteration. Its methods alone write it, one for each event.

    number: of the iteration; equal on all ranks that have begun it (see WITHIN).
    dealt_for: the number of ranks for which its hands were dealt first.
    holders: the holder of each rank (see Dealer).
    num_taken: the samples that this rank was given, including those of a step that does not count
        yet.
    num_ended: those of batches after which the loop's body has ended.
    num_agreed: those that it was given before the last step that all ranks agreed on.
    committed: by rank, the samples of steps that count; None before the first such step.
    settled: the part of `committed` that counts whichever rank is lost now; None as `committed`.
    awaits_step: the iteration is over here, and no step that counts has used its last samples yet,
        as where a loop accumulates gradients and the step comes after it.
    """

    number: int = 0
    dealt_for: int = 0
    holders: Sequence[int] = ()
    num_taken: int = 0
    num_ended: int = 0
    num_agreed: int = 0
    committed: tuple[int, ...] | None = None
    settled: tuple[int, ...] | None = None
    awaits_step: bool = False

    def take(self, num_samples: int) -> None:
        """This rank is given samples."""
        self.num_taken += num_samples

    def end_body(self) -> None:
        """The body of the last batch has ended."""
        self.num_ended = self.num_taken

    def agree(self) -> None:
        """All ranks have agreed on a step."""
        self.num_agreed = self.num_taken

    def record(self, committed: tuple[int, ...], *, is_settled: bool) -> None:
        """A step counts. is_settled: even if this rank is lost; if not, the one before does."""
        self.settled = committed if is_settled else self.committed
        self.committed = committed

    def renumber(self, committed: tuple[int, ...], holders: Sequence[int]) -> None:
        """The ranks have other numbers now, and have learnt of the same steps."""
        self.committed = self.settled = committed
        self.holders = holders

    def end(self, rank: int) -> None:
        """The iteration is over on this rank, or a step has been recorded since."""
        self.awaits_step = self.num_taken > (self.committed[rank] if self.committed else 0)

    def await_no_step(self) -> None:
        """A later step has used all samples, or they are not dealt again any more."""
        self.awaits_step = False


@dataclass(frozen=True, slots=True)
class DataPosition:
    """Where a rank is in the samples, for the others, whose number may change now. It holds counts
    only, which each rank sends to all: the numbers of the samples follow from them.

    call_key, lost: as in Dealer; for a worker that comes. The holders are in the counts.
    last_begun: the number of the iteration that it has begun last.
    inside: by their numbers, the iterations that are not over.
    """

    call_key: tuple[str, int]
    lost: frozenset[int]
    last_begun: int
    inside: Mapping[int, Counts]


@dataclass(frozen=True, slots=True)
class Cut:
    """The point at which an iteration was dealt again. A rank that begins the iteration later uses
    it to deal as the others did, when nobody has the positions any more that it was made of.

    dealt_for: as in Counts.
    taken: by former rank, how many samples of its hand it has taken; None: all of them.
    former_ranks: by new rank, its former rank; -1 for a newcomer.
    committed: by former rank, how many of `taken` belong to steps that count.
    lost: by lost holder (see `Dealer`), how many of its samples belong to steps that count; None:
        all of them.
    """

    dealt_for: int
    taken: tuple[int | None, ...]
    former_ranks: tuple[int, ...]
    committed: tuple[int, ...]
    lost: Mapping[int, int | None]

    @property
    def busy(self) -> list[int]:
        """By former rank, how many taken samples belong to a step that does not count yet."""
        return [
            0 if count is None else count - counted
            for count, counted in zip(self.taken, self.committed, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class Left:
    """Batches of an iteration, by rank. to_take: those that the rank has not taken. to_do: those of
    steps that do not count yet, so also a batch that was taken for a step under way. dealt_again:
    those of the lost ranks, which others have now; 0 if unknown."""

    to_take: list[int]
    to_do: list[int]
    dealt_again: int = field(default=0, compare=False)


def least_of(left: Sequence[Left]) -> Left:
    """What is left of iterations whose batches come together: that of the first one to end."""
    return Left(
        [min(of_rank) for of_rank in zip(*(one.to_take for one in left), strict=True)],
        [min(of_rank) for of_rank in zip(*(one.to_do for one in left), strict=True)],
        max(one.dealt_again for one in left),
    )


def cuts_of(
    positions: Sequence[DataPosition], former_ranks: Sequence[int], holders: Sequence[int]
) -> dict[int, Cut]:
    """The cut of each iteration that some rank is in. positions: by new rank. holders: by rank of
    the generation that ended."""
    cuts = {}
    for number in sorted({number for one in positions for number in one.inside}):
        by_rank = [one.inside.get(number) for one in positions]
        # All ranks leave an iteration together, when there is nothing left to take.
        is_over = any(
            one.last_begun >= number and inside is None
            for one, inside in zip(positions, by_rank, strict=True)
        )
        # Ranks that have not begun the iteration yet know nothing of it.
        inside = [one for one in by_rank if one is not None]
        committed = next((one.committed for one in inside if one.committed is not None), None)
        committed = committed or (0,) * len(holders)
        # A survivor keeps all that it has taken; a lost rank's samples count up to its last step.
        taken: list[int | None] = list(committed)
        for one, old in zip(by_rank, former_ranks, strict=True):
            if old >= 0:
                taken[old] = one.num_taken if one is not None else 0
        # Every sample is used then, whoever took it.
        if is_over:
            taken = [None] * len(holders)
        gone = sorted(set(range(len(holders))) - set(former_ranks))
        cuts[number] = Cut(
            inside[0].dealt_for,
            tuple(taken),
            tuple(former_ranks),
            committed,
            {holders[old]: None if is_over else committed[old] for old in gone},
        )
    return cuts


class ShardIteration(ABC):
    """One iteration over a shard, as its Dealer and a Cursor see it.

    counts: the Dealer makes new ones when the iteration begins. They stay when it is left: an error
        leaves it before recovery asks.
    rest, iteration: what is left to give when it begins; what identifies the iteration, even when
        the function runs again from the top, or "" if it is not recorded. The Cursor says so.
    is_over: this rank has left the iteration, since there was nothing left to take.
    ids_of_the_lost: the samples that lost ranks have used in steps that count.
    needs_ids: whether samples are recorded by number; a count says nothing of a stream, whose hands
        cannot be computed again.
    beside: one list for the iterations of a zip, which the Dealer writes: the numbers of those that
        are over. Then so is the loop's body, though a variable may hold the others.
    leads: a loop's body has ended when this iteration is asked for its next batch; of those of a
        zip, when the first one is asked. The Dealer says so. None: nobody knows yet.
    around: the iterations in whose body it has begun: their `iteration`, how many samples they had
        given, and how many of those before the last step. The Dealer says so.
    is_in_progress: it has begun, and this rank has not left it.
    evaluates: as in RunningIteration.
    repeats_batch: a batch in whose body a run has stopped, inside another loop, is given again.
    """

    counts: Counts
    rest: Remainder
    iteration = ""
    is_over = False
    ids_of_the_lost: Sequence[int] = ()
    needs_ids = False
    beside: list[int]
    leads: bool | None = None
    around: tuple[tuple[str, int, int], ...] = ()
    is_in_progress = False
    evaluates: bool | None = None  # None: as in RunningIteration
    repeats_batch = True

    def agree(self) -> None:
        """As in Counts."""
        self.counts.agree()

    @property
    @abstractmethod
    def taken_ids(self) -> Sequence[int]:
        """The samples that the iteration has given to this rank so far."""

    @property
    def committed_ids(self) -> Sequence[int]:
        """The samples of the iteration that all ranks have used in steps that count."""
        return [*self.ids_of_the_lost, *self.ids_by_counts(self.counts.committed or ())]

    @property
    def num_committed(self) -> int:
        """The number of `committed_ids`, even where this rank does not know all of them."""
        return len(self.ids_of_the_lost) + sum(self.counts.committed or ())

    @abstractmethod
    def begin_dealt(self, cuts: Sequence[Cut]) -> None:
        """Take this rank's hand. cuts: those of this iteration, if other ranks began it before."""

    @abstractmethod
    def redeal(self, cut: Cut) -> Left:
        """Deal again after a rank is lost; return what all ranks have left."""

    @abstractmethod
    def ids_by_counts(self, counts: Sequence[int]) -> Sequence[int]:
        """The numbers of the first samples of each hand. counts: by rank, how many; or empty."""


@dataclass(slots=True)
class Dealer:
    """One rank's place in the samples of a run, while its function runs once.

    Iterations may be nested (an evaluation inside an epoch) or side by side (in a zip, which begins
    all of them before the first batch of any).

    rank, world_size: those of the current generation.
    call_key: identifies this call of the function among all runs and repeats; equal on all ranks.
    holders: by rank, its holder: the rank's number when the function began, or a further one for a
        worker that has come since. It is never given to another rank.
    lost: the holders that are gone.
    stragglers: the ranks that are far behind, over all steps of `ctx.steps` of this generation.
    """

    rank: int
    world_size: int
    call_key: tuple[str, int] = ("", 0)
    holders: Sequence[int] = field(init=False)
    lost: set[int] = field(default_factory=set)
    stragglers: Stragglers = field(default_factory=Stragglers)
    _last_begun: int = 0
    _active: list[ShardIteration] = field(default_factory=list)
    _awaiting: list[Counts] = field(default_factory=list)
    """Of iterations that are over, and await a step. The object may have begun again since."""
    _early: dict[int, list[Cut]] = field(default_factory=dict)
    """The cuts of iterations that this rank has yet to begin, by the iteration's number."""

    def __post_init__(self) -> None:
        self.holders = range(self.world_size)

    @property
    def num_holders(self) -> int:
        """Of this call so far, those that are gone included."""
        return len(self.holders) + len(self.lost)

    def begin(self, shard: ShardIteration) -> None:
        """Begin an iteration over `shard`."""
        self.end(shard)  # Beginning a shard again ends its last iteration.
        leading = [one.beside for one in self._active if one.leads]
        shard.around = tuple(
            (one.iteration, one.counts.num_taken, one.counts.num_agreed)
            for one in self._active
            # All of a zip; and none that a variable holds, whose loop is over.
            if one.counts.num_taken and not one.beside and any(one.beside is b for b in leading)
        )
        # Iterations that have begun, and given nothing yet, belong to one zip.
        without_batch = [one.beside for one in self._active if not one.counts.num_taken]
        shard.beside = without_batch[-1] if without_batch else []
        shard.leads, shard.is_in_progress = None, True
        # In the body of a loop.
        if any(one.counts.num_taken and not one.beside for one in self._active):
            self._last_begun += 1
        else:
            self._last_begun = (self._last_begun // WITHIN + 1) * WITHIN
            # What other ranks had begun inside an earlier loop does not begin here any more.
            self._early = {n: cuts for n, cuts in self._early.items() if n >= self._last_begun}
        # Other ranks were in this iteration when a rank was lost, and dealt it again.
        cuts = self._early.pop(self._last_begun, [])
        dealt_for = cuts[0].dealt_for if cuts else self.world_size
        # The number is equal on all ranks, as they begin the same iterations in one order.
        shard.counts = Counts(self._last_begun, dealt_for, self.holders)
        self._active.append(shard)
        shard.begin_dealt(cuts)

    def check_room(self) -> None:
        """Raises RuntimeError if too many iterations are in progress. Called before the first
        batch of each: `batches = iter(shard)` begins one while `batches` holds the one before."""
        if len(self._active) > MAX_ITERATIONS:
            raise RuntimeError(
                f"{MAX_ITERATIONS} iterations over shards are in progress, and no more are "
                "possible at a time. End one first: after a `break`, call close() of its iterator"
            )

    def ends_body(self, shard: ShardIteration) -> bool:
        """Whether a loop's body has ended now that `shard` is asked for a batch: called for each
        one, the first too. Where an iteration is asked in the body of another loop, as by the zip
        that has taken a batch of another one just now, its ranks are in the middle of a step."""
        others = [one for one in self._active if one is not shard]
        if not shard.counts.num_taken:
            shard.leads = not any(one.leads for one in others if one.beside is shard.beside)
        elif any(one.leads for one in others) and not shard.leads:
            shard.leads = False
        else:
            # The loop in whose body it was asked is over, and its last body has ended with it.
            shard.leads = None if shard.leads is False else True
        # An iteration that has begun in this body, and is not over with it, is held by a variable
        # or a generator, which the body asks.
        place = next(at for at, one in enumerate(self._active) if one is shard)
        for at, one in enumerate(self._active):
            if one is shard or (shard.leads and one.beside is shard.beside):
                one.counts.end_body()
            elif shard.leads and at > place:
                one.leads = False
        return bool(shard.leads)

    def end(self, shard: ShardIteration) -> None:
        if any(one is shard for one in self._active):
            shard.beside.append(shard.counts.number)
            # An evaluation need not be under no_grad, and no step uses it. Batches may be listed,
            # or their losses summed, for a backward pass after the loop.
            if shard.is_over and shard.iteration and not shard.evaluates:
                shard.counts.end(self.rank)
                known = [*self._awaiting, shard.counts]
                # The samples of an epoch that is over await none any more (Cursor).
                self._awaiting = [counts for counts in known if counts.awaits_step]
        shard.is_in_progress = False
        self._active = [one for one in self._active if one is not shard]

    def inside(self) -> list[int]:
        """The numbers of the iterations in progress on this rank."""
        return [one.counts.number for one in self._active]

    def unused(self) -> list[int]:
        """The numbers of the iterations that are over on this rank, and await a step."""
        return [counts.number for counts in self._awaiting if counts.awaits_step]

    def cursors(self) -> list[int]:
        """For the vote: how many samples this rank has taken of each iteration in progress."""
        return [one.counts.num_taken for one in self._active]

    def record(
        self,
        cursors: Sequence[Sequence[int]],
        numbers: Sequence[int] | None = None,
        *,
        is_settled: bool = True,
    ) -> None:
        """Record a step that counts. cursors: those of the step, by rank. numbers: the iterations
        that they belong to, where the step was agreed on earlier; default: those in progress.
        is_settled: the step counts even if this rank is lost; if not, only the one before does."""
        recorded = list(self.inside() if numbers is None else numbers)
        for counts in [*(one.counts for one in self._active), *self._awaiting]:
            # One that has begun since the vote was cast has no sample in that step.
            if counts.number in recorded:
                place = recorded.index(counts.number)
                committed = tuple(of_rank[place] for of_rank in cursors)
                counts.record(committed, is_settled=is_settled)
        for counts in self._awaiting:
            if counts.number in recorded:
                counts.end(self.rank)
            else:  # The vote was cast after its end, so the step has all that it gave.
                counts.await_no_step()
        self._awaiting = [counts for counts in self._awaiting if counts.awaits_step]

    def num_settled(self, shard: ShardIteration) -> int:
        """How many of this rank's samples belong to steps that count whichever rank is lost now.
        These samples are never dealt again."""
        settled = shard.counts.settled
        return settled[self.rank] if settled is not None else 0

    def position(self) -> DataPosition:
        inside = {one.counts.number: replace(one.counts) for one in self._active}
        return DataPosition(self.call_key, frozenset(self.lost), self._last_begun, inside)

    def take_position(self, shard: ShardIteration, number: int, position: DataPosition) -> None:
        """This rank has come to the others: `shard` is the iteration `number` in which they are.
        `redeal` follows, as on all ranks. position: of one of the others."""
        shard.counts = replace(position.inside[number])
        self.call_key, self.lost = position.call_key, set(position.lost)
        self.holders = shard.counts.holders
        # The body may have begun further iterations, and ended them.
        self._last_begun = position.last_begun
        self._early.clear()

    def redeal(
        self,
        rank: int,
        positions: Sequence[DataPosition],
        former_ranks: Sequence[int],
        beside: Collection[object] = (),
    ) -> Left | None:
        """Continue as `rank` of the next generation. Returns what the ranks have left of the
        iterations `beside`, whose batches come together; default: of the innermost one in progress
        here. None if there is none."""
        cuts = cuts_of(positions, former_ranks, self.holders)
        fresh = itertools.count(self.num_holders)
        self.lost |= set(self.holders) - {self.holders[old] for old in former_ranks if old >= 0}
        self.holders = [self.holders[old] if old >= 0 else next(fresh) for old in former_ranks]
        self.rank, self.world_size = rank, len(former_ranks)
        # Ranks have other numbers now, and may have other work.
        self.stragglers = Stragglers()
        # Their loops are over, so what a lost rank had of them can be given to nobody in place.
        for counts in self._awaiting:
            counts.await_no_step()
        self._awaiting = []
        left: list[Left] = []
        for number, cut in cuts.items():
            if number > self._last_begun:  # Only other ranks are in it: keep the cut until `begin`.
                self._early.setdefault(number, []).append(cut)
            for mine in self._active:
                if mine.counts.number == number:
                    # Another rank may be lost before the next step records new counts; and a stream
                    # asks its reader while it deals again, by the ranks' new numbers.
                    committed = tuple(cut.committed[old] if old >= 0 else 0 for old in former_ranks)
                    mine.counts.renumber(committed, self.holders)
                    its = mine.redeal(cut)
                    left = [*left, its] if mine in beside else left if beside else [its]
        return least_of(left) if left else None
