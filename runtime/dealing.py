"""Which rank gets which samples: each one once, nothing padded or dropped, whoever comes or goes.

`deal` and `redeal` are pure: every rank computes the hands of all, and comes to the same ones.
`Dealer` knows where its rank is in them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

Hands = list[list[int]]
"""Sample numbers, by rank, each in the order in which it takes them."""


def deal(
    num_samples: int,
    *,
    world_size: int,
    epoch: int = 0,
    seed: int = 0,
    shuffle: bool = True,
    keep_together: Sequence[Hashable] | None = None,
) -> list[list[int]]:
    """Sample numbers by rank, each number exactly once. A pure function, equal on all ranks.

    keep_together: (num_samples,) keys; samples of one key go to the same rank. Keys, or without
    them samples, are dealt round robin, so ranks may get different numbers.
    shuffle: the order depends on seed and epoch; otherwise it is the dataset's.
    """
    # torch's CPU generator looks at 32 bits of its seed only, so both numbers are mixed into them.
    mixed = hashlib.sha256(f"{seed}/{epoch}".encode()).digest()[:4]
    generator = torch.Generator().manual_seed(int.from_bytes(mixed, "little"))

    def order(count: int) -> list[int]:
        if not shuffle:
            return list(range(count))
        numbers: list[int] = torch.randperm(count, generator=generator).tolist()
        return numbers

    if keep_together is None:
        numbers = order(num_samples)
        return [numbers[rank::world_size] for rank in range(world_size)]
    if len(keep_together) != num_samples:
        raise ValueError(
            f"keep_together has {len(keep_together)} keys for {num_samples} samples; it needs one "
            "for each"
        )
    by_key: dict[Hashable, list[int]] = {}
    for number, key in enumerate(keep_together):
        by_key.setdefault(key, []).append(number)
    lots = list(by_key.values())
    dealt = order(len(lots))
    hands = [
        [number for lot in dealt[rank::world_size] for number in lots[lot]]
        for rank in range(world_size)
    ]
    return [[hand[i] for i in order(len(hand))] for hand in hands]


def redeal(
    hands: Sequence[Sequence[int]],
    taken: Sequence[int],
    former_ranks: Sequence[int],
    keep_together: Sequence[Hashable] | None = None,
    busy: Sequence[int] = (),
) -> Hands:
    """Deal what is left to other ranks; each new hand begins with what its rank has taken.

    hands: of the ranks of the generation that ended. taken: how many samples of its hand each of
    them has taken; of a rank that is lost, up to the last step that counts. former_ranks: by new
    rank its rank then, -1 for a newcomer. keep_together: as for `deal`; what is left of a key of
    which a rank has taken a part goes to that rank. busy: how many of the samples that a rank has
    taken belong to steps that do not count yet; by default none.

    What is left is dealt in the epoch's order, each lot to the rank that has least left to do. Who
    is a step ahead of the others has done a part of that already, and still takes equally many.
    """
    new_hands = [list(hands[old][: taken[old]]) if old >= 0 else [] for old in former_ranks]
    left = sorted(
        (place, old, number)
        for old, hand in enumerate(hands)
        for place, number in enumerate(hand)
        if place >= taken[old]
    )
    lots: dict[Hashable, list[int]] = {}
    begun: dict[Hashable, int] = {}
    for _, _, number in left:
        lots.setdefault(keep_together[number] if keep_together else number, []).append(number)
    if keep_together:
        begun = {keep_together[n]: rank for rank, hand in enumerate(new_hands) for n in hand}
    to_do = [busy[old] if busy and old >= 0 else 0 for old in former_ranks]
    for key, lot in lots.items():
        rank = begun.get(key, min(range(len(to_do)), key=lambda r: (to_do[r], r)))
        new_hands[rank] += lot
        to_do[rank] += len(lot)
    return new_hands


@dataclass(frozen=True, slots=True)
class Position:
    """Where a rank is in the samples.

    iteration: how many it has begun, over whatever shards. is_active: whether it is still in that
    one. dealt_for: number of ranks that its hands were dealt for first. taken: samples of it, those
    of a step that does not count yet included. committed: by rank of the generation that ended, how
    many belong to steps that count; None before the first such step.
    """

    iteration: int
    is_active: bool
    dealt_for: int
    taken: int
    committed: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Cut:
    """Where an iteration was dealt anew: the arguments of `redeal`. A rank that has not begun the
    iteration yet will deal it as the others did."""

    dealt_for: int
    taken: tuple[int | None, ...]  # None: all of its hand
    former_ranks: tuple[int, ...]
    committed: tuple[int, ...]

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
    positions: Sequence[Position], former_ranks: Sequence[int], size: int
) -> dict[int, Cut]:
    """By iteration that somebody is in, how it goes on. positions: by new rank. size: number of
    ranks in the generation that ended."""
    cuts = {}
    for iteration in sorted({one.iteration for one in positions if one.is_active}):
        # Who has left it has left it with everybody: there was nothing to take any more.
        is_over = any(
            one.iteration > iteration or (one.iteration == iteration and not one.is_active)
            for one in positions
        )
        inside = [one for one in positions if one.iteration == iteration and one.is_active]
        committed = next((one.committed for one in inside if one.committed is not None), None)
        committed = committed or (0,) * size
        taken: list[int | None] = list(committed)
        for one, old in zip(positions, former_ranks, strict=True):
            if old >= 0:
                taken[old] = one.taken if one.iteration == iteration else 0
        if is_over:
            taken = [None] * size
        cuts[iteration] = Cut(inside[0].dealt_for, tuple(taken), tuple(former_ranks), committed)
    return cuts


class Dealt(Protocol):
    """What a Dealer deals for: one iteration over a Shard."""

    hands: Hands
    taken: int
    ids_of_the_lost: list[int]
    committed: tuple[int, ...] | None
    """By rank, how many of its samples belonged to steps that count when the iteration ended."""

    def deal(self, num_ranks: int) -> Hands: ...

    def keys(self) -> Sequence[Hashable] | None: ...

    def num_batches(self, num_samples: int) -> int: ...

    def take_hand(self, hands: Hands, rank: int) -> None: ...


@dataclass(slots=True)
class _Iteration:
    """One that has begun and is not over. dealt_for, committed: as in Position."""

    number: int
    shard: Dealt
    dealt_for: int
    committed: tuple[int, ...] | None = None


class Dealer:
    """One rank's place in the samples of a run.

    Of iterations inside each other, as of an evaluation in the middle of an epoch, the innermost
    one counts; when it is over, the one around it does again.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self._num_begun = 0
        self._active: list[_Iteration] = []  # the innermost last
        self._early: dict[int, list[Cut]] = {}  # of iterations that this rank has yet to begin

    def begin(self, shard: Dealt) -> None:
        """Deal the hands of an iteration that begins, and of which others may know more."""
        self._num_begun += 1
        cuts = self._early.pop(self._num_begun, [])
        dealt_for = cuts[0].dealt_for if cuts else self.world_size
        self.end(shard)
        shard.committed = None
        self._active.append(_Iteration(self._num_begun, shard, dealt_for))
        hands = shard.deal(dealt_for)
        for cut in cuts:
            hands = _cut(hands, cut, shard.keys())
        shard.take_hand(hands, self.rank)

    def end(self, shard: Dealt) -> None:
        """It is over, or was left: perhaps by an error after which the function runs again from the
        top, and has to know what counts of it. So that stays with the shard."""
        shard.committed = self._committed(shard)
        self._active = [one for one in self._active if one.shard is not shard]

    def cursor(self) -> int:
        """For the vote: samples that this rank has taken of the iteration that it is in."""
        return self._active[-1].shard.taken if self._active else 0

    def record(self, cursors: tuple[int, ...]) -> None:
        """The cursors of all ranks, of a step that counts."""
        if self._active:
            self._active[-1].committed = cursors

    def committed_ids(self, shard: Dealt) -> list[int]:
        """Samples of the iteration over `shard` that belong to steps that count, of all ranks."""
        told = self._committed(shard)
        counted = zip(shard.hands, told, strict=True) if told is not None else ()
        return [*shard.ids_of_the_lost, *(n for hand, count in counted for n in hand[:count])]

    def _committed(self, shard: Dealt) -> tuple[int, ...] | None:
        return next((one.committed for one in self._active if one.shard is shard), shard.committed)

    def position(self) -> Position:
        if not self._active:
            return Position(self._num_begun, False, self.world_size, 0, None)
        mine = self._active[-1]
        return Position(mine.number, True, mine.dealt_for, mine.shard.taken, mine.committed)

    def redeal(
        self, rank: int, positions: Sequence[Position], former_ranks: Sequence[int]
    ) -> Left | None:
        """Go on as `rank` of the next generation. What the ranks have left of the iteration that
        this one is in; None if it is in none."""
        size = self.world_size
        self.rank, self.world_size = rank, len(former_ranks)
        mine = self._active[-1] if self._active else None
        left = None
        for number, cut in cuts_of(positions, former_ranks, size).items():
            if number > self._num_begun:
                self._early.setdefault(number, []).append(cut)
            elif mine is not None and number == mine.number:
                left = self._go_on(mine, cut)
        return left

    def _go_on(self, mine: _Iteration, cut: Cut) -> Left:
        shard, former_ranks = mine.shard, cut.former_ranks
        taken, busy = _taken(shard.hands, cut), cut.busy
        for old in sorted(set(range(len(taken))) - set(former_ranks)):
            shard.ids_of_the_lost += shard.hands[old][: taken[old]]
        shard.take_hand(_cut(shard.hands, cut, shard.keys()), self.rank)
        # The next one may be lost before a step tells how far all are.
        mine.committed = tuple(cut.committed[old] if old >= 0 else 0 for old in former_ranks)
        to_take = [
            len(hand) - (taken[old] if old >= 0 else 0)
            for hand, old in zip(shard.hands, former_ranks, strict=True)
        ]
        to_do = [
            count + (busy[old] if old >= 0 else 0)
            for count, old in zip(to_take, former_ranks, strict=True)
        ]
        return Left([*map(shard.num_batches, to_take)], [*map(shard.num_batches, to_do)])


def _taken(hands: Hands, cut: Cut) -> list[int]:
    return [
        len(hand) if count is None else count for hand, count in zip(hands, cut.taken, strict=True)
    ]


def _cut(hands: Hands, cut: Cut, keys: Sequence[Hashable] | None) -> Hands:
    return redeal(hands, _taken(hands, cut), cut.former_ranks, keys, cut.busy)
