"""Which rank gets which samples: each one once, nothing padded or dropped, whoever comes or goes.

`deal` and `redeal` are pure: every rank computes the hands of all, and comes to the same ones.
dealer.py knows where a rank is in them.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
from collections.abc import Hashable, Sequence

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
    lots: dict[Hashable, list[int]] = {}
    for number in left_of(hands, taken):
        lots.setdefault(keep_together[number] if keep_together else number, []).append(number)
    begun: dict[Hashable, int] = {}
    if keep_together:
        begun = {keep_together[n]: rank for rank, hand in enumerate(new_hands) for n in hand}
    to_do = [busy[old] if busy and old >= 0 else 0 for old in former_ranks]
    # A heap, since all survivors wait for this. Counts in it may be those of before.
    least = [(count, rank) for rank, count in enumerate(to_do)]
    heapq.heapify(least)
    for key, lot in lots.items():
        while least[0][0] != to_do[least[0][1]]:
            rank = least[0][1]
            heapq.heapreplace(least, (to_do[rank], rank))
        rank = begun.get(key, least[0][1])
        new_hands[rank] += lot
        to_do[rank] += len(lot)
    return new_hands


def left_of(hands: Sequence[Sequence[int]], taken: Sequence[int]) -> list[int]:
    """What is left in all hands, in the epoch's order: by the place in the hand, then by rank."""
    places = (
        itertools.chain(itertools.repeat(None, count), hand[count:])
        for hand, count in zip(hands, taken, strict=True)
    )
    rounds = itertools.zip_longest(*places)
    return [number for round_ in rounds for number in round_ if number is not None]
