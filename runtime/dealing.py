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
) -> Hands:
    """Deal what is left to other ranks; each new hand begins with what its rank has taken.

    hands: of the ranks of the generation that ended. taken: how many samples of its hand each of
    them has taken; of a rank that is lost, up to the last step that counts. former_ranks: by new
    rank its rank then, -1 for a newcomer. keep_together: as for `deal`; what is left of a key of
    which a rank has taken a part goes to that rank.

    What is left is dealt in the epoch's order, each lot to the rank that has least left to do.
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
    to_do = [0] * len(former_ranks)
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
        taken: list[int | None] = list(committed or [0] * size)
        for one, old in zip(positions, former_ranks, strict=True):
            if old >= 0:
                taken[old] = one.taken if one.iteration == iteration else 0
        if is_over:
            taken = [None] * size
        cuts[iteration] = Cut(inside[0].dealt_for, tuple(taken), tuple(former_ranks))
    return cuts


class Dealt(Protocol):
    """What a Dealer deals for: one iteration over a Shard."""

    hands: Hands
    taken: int
    ids_of_the_lost: list[int]

    def deal(self, num_ranks: int) -> Hands: ...

    def keys(self) -> Sequence[Hashable] | None: ...

    def num_batches(self, num_samples: int) -> int: ...

    def take_hand(self, hands: Hands, rank: int) -> None: ...


class Dealer:
    """One rank's place in the samples of a run."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self._iteration = 0
        self._active: Dealt | None = None
        self._dealt_for = world_size
        self._committed: tuple[int, ...] | None = None  # of the iteration that is active
        self._early: dict[int, list[Cut]] = {}  # of iterations that this rank has yet to begin

    def begin(self, shard: Dealt) -> None:
        """Deal the hands of an iteration that begins, and of which others may know more."""
        self._iteration += 1
        self._active = shard
        self._committed = None
        cuts = self._early.pop(self._iteration, [])
        self._dealt_for = cuts[0].dealt_for if cuts else self.world_size
        hands = shard.deal(self._dealt_for)
        for cut in cuts:
            hands = _cut(hands, cut, shard.keys())
        shard.take_hand(hands, self.rank)

    def end(self, shard: Dealt) -> None:
        if self._active is shard:
            self._active = None

    def cursor(self) -> int:
        """For the vote: samples that this rank has taken of the iteration that it is in."""
        return self._active.taken if self._active is not None else 0

    def record(self, cursors: tuple[int, ...]) -> None:
        """The cursors of all ranks, of a step that counts."""
        self._committed = cursors

    def committed_ids(self, shard: Dealt) -> list[int]:
        """Samples of the iteration over `shard` that belong to steps that count, of all ranks."""
        if self._active is not shard or self._committed is None:
            return list(shard.ids_of_the_lost)
        counted = zip(shard.hands, self._committed, strict=True)
        return [*shard.ids_of_the_lost, *(n for hand, count in counted for n in hand[:count])]

    def position(self) -> Position:
        is_active = self._active is not None
        taken = self.cursor()
        return Position(self._iteration, is_active, self._dealt_for, taken, self._committed)

    def redeal(
        self, rank: int, positions: Sequence[Position], former_ranks: Sequence[int]
    ) -> list[int] | None:
        """Go on as `rank` of the next generation. Batches that the ranks have left of the iteration
        that this one is in, by rank; None if it is in none."""
        size = self.world_size
        self.rank, self.world_size = rank, len(former_ranks)
        if self._committed is not None:  # Hands begin with what their rank has taken.
            before = self._committed
            self._committed = tuple(before[old] if old >= 0 else 0 for old in former_ranks)
        left = None
        for iteration, cut in cuts_of(positions, former_ranks, size).items():
            shard = self._active
            if iteration > self._iteration:
                self._early.setdefault(iteration, []).append(cut)
            elif iteration == self._iteration and shard is not None:
                taken = _taken(shard.hands, cut)
                for old in sorted(set(range(size)) - set(former_ranks)):
                    shard.ids_of_the_lost += shard.hands[old][: taken[old]]
                shard.take_hand(_cut(shard.hands, cut, shard.keys()), rank)
                left = [
                    shard.num_batches(len(hand) - (taken[old] if old >= 0 else 0))
                    for hand, old in zip(shard.hands, former_ranks, strict=True)
                ]
        return left


def _taken(hands: Hands, cut: Cut) -> list[int]:
    return [
        len(hand) if count is None else count for hand, count in zip(hands, cut.taken, strict=True)
    ]


def _cut(hands: Hands, cut: Cut, keys: Sequence[Hashable] | None) -> Hands:
    return redeal(hands, _taken(hands, cut), cut.former_ranks, keys)
