"""Where a rank is in the samples of a run, and how iterations go on when ranks are lost.

Every vote on a step says how many samples its rank has taken of each iteration that it is in. So
when a rank is lost, the others know how many of its samples belong to steps that count; the rest is
dealt again. How, is for the iteration: over a dataset with a length every rank computes the hands
of all (dealing.py), the rows of a stream are with its reader (streaming.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ..process.agreement import MAX_ITERATIONS


@dataclass(frozen=True, slots=True)
class Inside:
    """Where a rank is in an iteration that it has begun and not ended.

    number: of those that the rank has begun, over whatever shards. dealt_for: number of ranks that
    its hands were dealt for first. taken: samples of it, those of a step that does not count yet
    included. committed: by rank of the generation that ended, how many belong to steps that count;
    None before the first such step.
    """

    number: int
    dealt_for: int
    taken: int
    committed: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class DataPosition:
    """Where a rank is in the samples. num_begun: iterations. inside: of those the ones that it is
    in, in the order of their beginning."""

    num_begun: int
    inside: tuple[Inside, ...] = ()

    def in_(self, number: int) -> Inside | None:
        return next((one for one in self.inside if one.number == number), None)


@dataclass(frozen=True, slots=True)
class Cut:
    """Where an iteration was dealt anew. A rank that has not begun the iteration yet will deal it
    as the others did.

    taken: by former rank, samples of its hand; None: all of it. former_ranks: by new rank its rank
    then. committed: of `taken`, those of steps that count. lost: holders (see `Dealer`) that are
    gone, with what they had committed; None: all.
    """

    dealt_for: int
    taken: tuple[int | None, ...]
    former_ranks: tuple[int, ...]
    committed: tuple[int, ...]
    lost: Mapping[int, int | None]

    @property
    def busy(self) -> list[int]:
        return [
            0 if count is None else count - counted
            for count, counted in zip(self.taken, self.committed, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class Left:
    """Batches of an iteration, by rank. to_take: that a rank has not taken. to_do: of steps that do
    not count yet, so those too that it has taken for one that is under way."""

    to_take: list[int]
    to_do: list[int]


def cuts_of(
    positions: Sequence[DataPosition], former_ranks: Sequence[int], holders: Sequence[int]
) -> dict[int, Cut]:
    """By iteration that somebody is in, how it goes on. positions: by new rank. holders: by rank of
    the generation that ended."""
    cuts = {}
    for number in sorted({inside.number for one in positions for inside in one.inside}):
        told = [one.in_(number) for one in positions]
        # Who has left it has left it with everybody: there was nothing to take any more.
        is_over = any(
            one.num_begun >= number and inside is None
            for one, inside in zip(positions, told, strict=True)
        )
        inside = [one for one in told if one is not None]
        committed = next((one.committed for one in inside if one.committed is not None), None)
        committed = committed or (0,) * len(holders)
        taken: list[int | None] = list(committed)
        for one, old in zip(told, former_ranks, strict=True):
            if old >= 0:
                taken[old] = one.taken if one is not None else 0
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


@dataclass(frozen=True, slots=True)
class Counted:
    """How many samples of an iteration belong to steps that count, by rank; and who the ranks are,
    as holders."""

    counts: tuple[int, ...]
    holders: tuple[int, ...]


class Dealt(Protocol):
    """What a Dealer deals for: one iteration over a shard."""

    @property
    def taken(self) -> int:
        """Samples that the iteration has given so far."""
        ...

    def begin_dealt(self, dealer: Dealer, number: int, cuts: Sequence[Cut]) -> None:
        """Get a hand. cuts: of this iteration, which others have begun before."""
        ...

    def go_on(self, cut: Cut) -> Left:
        """Ranks are lost: what all have left."""
        ...

    def ids_of(self, counted: Counted) -> list[int]:
        """The first samples of the hands of all ranks, so many of each."""
        ...

    def note_end(self, counted: Counted | None) -> None:
        """The iteration is over, or was left. A function that was left by an error has left its
        iterations before anybody asks which of their samples count."""
        ...


@dataclass(slots=True)
class _Iteration:
    """One that has begun and is not over. dealt_for, committed: as in Inside. settled: of
    `committed`, what counts whoever is lost now."""

    number: int
    shard: Dealt
    dealt_for: int
    committed: tuple[int, ...] | None = None
    settled: tuple[int, ...] | None = None


@dataclass(slots=True)
class Dealer:
    """One rank's place in the samples of a run, while its function runs once.

    Iterations may be in each other, as an evaluation in the middle of an epoch, and side by side,
    as in a zip. holders: by rank, the rank that it had when the function began; that one is never
    given to another. lost: holders that are gone. pass_: tells the function's iterations from those
    of other runs, and from when it runs again from the top; equal on all ranks.
    """

    rank: int
    world_size: int
    pass_: tuple[str, int] = ("", 0)
    holders: list[int] = field(init=False)
    num_holders: int = field(init=False)
    lost: set[int] = field(default_factory=set)
    _num_begun: int = 0
    _active: list[_Iteration] = field(default_factory=list)
    _early: dict[int, list[Cut]] = field(default_factory=dict)
    """Of iterations that this rank has yet to begin."""

    def __post_init__(self) -> None:
        self.holders = list(range(self.world_size))
        self.num_holders = self.world_size

    def begin(self, shard: Dealt) -> None:
        """Deal the hands of an iteration that begins, and of which others may know more."""
        self._num_begun += 1
        cuts = self._early.pop(self._num_begun, [])
        self.end(shard)
        if len(self._active) == MAX_ITERATIONS:
            raise RuntimeError(
                f"{MAX_ITERATIONS} iterations over shards have begun and are not over; a step can "
                "tell the other ranks no more. Leave one first: a loop that you broke off ends "
                "with close() of its iterator"
            )
        dealt_for = cuts[0].dealt_for if cuts else self.world_size
        self._active.append(_Iteration(self._num_begun, shard, dealt_for))
        shard.begin_dealt(self, self._num_begun, cuts)

    def end(self, shard: Dealt) -> None:
        counted = self.counted(shard)
        if any(one.shard is shard for one in self._active):
            shard.note_end(counted)
        self._active = [one for one in self._active if one.shard is not shard]

    def inside(self) -> list[int]:
        """The numbers of the iterations that this rank is in."""
        return [one.number for one in self._active]

    def cursors(self) -> list[int]:
        """For the vote: samples that this rank has taken, of each iteration that it is in."""
        return [one.shard.taken for one in self._active]

    def record(
        self,
        cursors: Sequence[Sequence[int]],
        numbers: Sequence[int] | None = None,
        *,
        is_settled: bool = True,
    ) -> None:
        """By rank, the cursors of a step that counts. numbers: of the iterations that they are
        of, if it was agreed on earlier. is_settled: it counts also if this rank is lost; if not,
        then the one before does."""
        told_of = list(self.inside() if numbers is None else numbers)
        for one in self._active:
            if one.number in told_of:
                place, before = told_of.index(one.number), one.committed
                one.committed = tuple(of_rank[place] for of_rank in cursors)
                one.settled = one.committed if is_settled else before

    def counted(self, shard: Dealt) -> Counted | None:
        """Of the iteration over `shard` that this rank is in; None before a step of it counts."""
        counts = next((one.committed for one in self._active if one.shard is shard), None)
        return Counted(counts, tuple(self.holders)) if counts is not None else None

    def num_settled(self, shard: Dealt) -> int:
        """Of this rank's samples of the iteration: how many belong to steps that count, whoever is
        lost now. No other rank will ask for them again."""
        counts = next((one.settled for one in self._active if one.shard is shard), None)
        return counts[self.rank] if counts is not None else 0

    def position(self) -> DataPosition:
        return DataPosition(
            self._num_begun,
            tuple(
                Inside(one.number, one.dealt_for, one.shard.taken, one.committed)
                for one in self._active
            ),
        )

    def redeal(
        self, rank: int, positions: Sequence[DataPosition], former_ranks: Sequence[int]
    ) -> Left | None:
        """Go on as `rank` of the next generation. What the ranks have left of the innermost
        iteration that this one is in; None if it is in none."""
        cuts = cuts_of(positions, former_ranks, self.holders)
        self.lost |= set(self.holders) - {self.holders[old] for old in former_ranks if old >= 0}
        self.holders = [self.holders[old] if old >= 0 else -1 for old in former_ranks]
        self.rank, self.world_size = rank, len(former_ranks)
        left = None
        for number, cut in cuts.items():
            if number > self._num_begun:
                self._early.setdefault(number, []).append(cut)
            for mine in self._active:
                if mine.number == number:
                    left = mine.shard.go_on(cut)
                    # The next one may be lost before a step tells how far all are.
                    mine.committed = mine.settled = tuple(
                        cut.committed[old] if old >= 0 else 0 for old in former_ranks
                    )
        return left
