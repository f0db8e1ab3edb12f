"""Which rank gets which samples: each sample once, none padded or dropped, even when ranks change.

`deal` and `redeal` are pure: every rank computes the same hands of all ranks. dealer.py knows where
a rank is in them.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
from array import array
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch

from chorusline.collectives.contract.argument_kinds import (
    check_kinds,
    check_range,
    checked_place,
)

from ..process.random_state import mixed
from .number_set import NumberSet

Hands = list["array[int]"]
"""By rank, the sample numbers in the order in which the rank takes them. Each rank knows those of
all ranks, so they are arrays of 8 bytes a number; a list takes 36 more."""


_MOST_SAMPLES = 2**28
"""In lists, whose numbers take 44 bytes each; the arrays of `ctx.shard` take 8."""


def deal(
    num_samples: int,
    *,
    world_size: int,
    epoch: int = 0,
    seed: int = 0,
    shuffle: bool = True,
    keep_together: Sequence[Hashable] | None = None,
) -> list[list[int]]:
    """The sample numbers of each rank, by rank; each number exactly once.

        cl.deal(5, world_size=2, shuffle=False)  # [[0, 2, 4], [1, 3]]

    A pure function: the same result on all ranks.

    shuffle: the order depends on `seed` and `epoch`; otherwise it is that of the dataset.
    keep_together: (num_samples,) keys; samples of one key go to the same rank. Keys (without them,
        samples) are distributed round robin, so ranks may get different numbers of samples.

    Raises ValueError if keep_together has another length, and for more than 2**28 samples.
    """
    check_kinds(deal, locals())
    checked_place(0, world_size, "world_size")
    check_range("num_samples", num_samples, 0, _MOST_SAMPLES)
    dealt = dealt_hands(
        num_samples,
        world_size=world_size,
        epoch=epoch,
        seed=seed,
        shuffle=shuffle,
        keep_together=keys_of(keep_together),
    )
    return [hand.tolist() for hand in dealt]


def keys_of(given: Any) -> Sequence[Hashable] | None:
    """The keys of `keep_together`. Tensors, arrays and lists stand for the numbers in them: two of
    equal ones would be two keys. Raises TypeError for what cannot be a key."""
    if given is None:
        return None
    if isinstance(given, torch.Tensor | numpy.ndarray):
        given = given.tolist()
    # Samples have places, where a Series of pandas looks up labels.
    keys: Sequence[Hashable] = given if isinstance(given, list | tuple) else list(given)
    if any(issubclass(kind, _SEVERAL) for kind in {*map(type, keys)}):
        keys = [_plain_key(key) for key in keys]
    try:
        hash(tuple(keys))
    except TypeError as error:
        raise TypeError(f"a key of keep_together cannot be compared: {error}") from None
    return keys


def digest_of_keys(keys: Sequence[Hashable]) -> str:
    """Equal where the same samples are kept together, whatever the keys are called."""
    numbers: dict[Hashable, int] = {}
    groups = array("q", (numbers.setdefault(key, len(numbers)) for key in keys))
    return hashlib.blake2b(groups, digest_size=8).hexdigest()


_SEVERAL = (torch.Tensor, numpy.ndarray, list, tuple)


def _plain_key(key: Any) -> Any:
    if isinstance(key, torch.Tensor | numpy.ndarray):
        key = key.tolist()
    return tuple(map(_plain_key, key)) if isinstance(key, list | tuple) else key


def dealt_hands(
    num_samples: int,
    *,
    world_size: int,
    epoch: int,
    seed: int,
    shuffle: bool,
    keep_together: Sequence[Hashable] | None = None,
) -> Hands:
    """As `deal`, in arrays."""
    # The order depends on seed and epoch alone, so all ranks deal the same hands.
    generator = torch.Generator().manual_seed(mixed(seed, epoch))

    def order(count: int) -> array[int]:
        if not shuffle:
            return array("q", range(count))
        return array(
            "q", torch.randperm(count, generator=generator, device="cpu").numpy().tobytes()
        )

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
        array("q", (number for lot in dealt[rank::world_size] for number in lots[lot]))
        for rank in range(world_size)
    ]
    return [array("q", (hand[i] for i in order(len(hand)))) for hand in hands]


def redeal(
    hands: Sequence[Sequence[int]],
    taken: Sequence[int],
    former_ranks: Sequence[int],
    keep_together: Sequence[Hashable] | None = None,
    busy: Sequence[int] = (),
) -> Hands:
    """Deal what is left to the new ranks; each new hand begins with what its rank has taken.

    hands: by former rank, the rank in the generation that ended.
    taken: by former rank, how many samples of its hand it has taken; of a lost rank, only those up
        to the last step that counts.
    former_ranks: by new rank, its former rank; -1 for a newcomer.
    keep_together: as for `deal`; the rest of a key goes to the rank that has taken a part of it.
    busy: by former rank, how many taken samples belong to steps that do not count yet; default 0.

    The rest is dealt in the epoch's order, each lot to the rank that has least left to do. `busy`
    counts as left to do, so a rank that is one step ahead of the others takes as many as they do.
    """
    new_hands = [array("q", hands[old][: taken[old]] if old >= 0 else ()) for old in former_ranks]
    left = left_of(hands, taken)
    to_do = [busy[old] if busy and old >= 0 else 0 for old in former_ranks]
    if keep_together:
        _deal_lots(left, keep_together, new_hands, to_do)
    else:
        _deal_evenly(left, new_hands, to_do)
    return new_hands


def _deal_evenly(left: array[int], hands: Hands, to_do: list[int]) -> None:
    """Deal samples to the hands, each to the rank that has least left to do; of several to the
    first one. All survivors wait for this, so what is even is dealt by slices."""
    first = 0
    # Sample by sample only until all ranks have as much to do.
    while min(to_do) < max(to_do) and first < len(left):
        rank = to_do.index(min(to_do))
        hands[rank].append(left[first])
        to_do[rank] += 1
        first += 1
    for rank, hand in enumerate(hands):
        hand += left[first + rank :: len(hands)]


def _deal_lots(
    left: Sequence[int], keys: Sequence[Hashable], hands: Hands, to_do: list[int]
) -> None:
    """The same with samples of one key in one hand, that which has some of them already."""
    begun = {keys[number]: rank for rank, hand in enumerate(hands) for number in hand}
    lots: dict[Hashable, list[int]] = {}
    for number in left:
        lots.setdefault(keys[number], []).append(number)
    # Its counts may be out of date; see the inner loop.
    least = [(count, rank) for rank, count in enumerate(to_do)]
    heapq.heapify(least)
    for key, lot in lots.items():
        while least[0][0] != to_do[least[0][1]]:
            rank = least[0][1]
            heapq.heapreplace(least, (to_do[rank], rank))
        rank = begun.get(key, least[0][1])
        hands[rank].extend(lot)
        to_do[rank] += len(lot)


def left_of(hands: Sequence[Sequence[int]], taken: Sequence[int]) -> array[int]:
    """The rest of all hands, in the epoch's order: by the place in the hand, then by rank."""
    # Between two of these places it is the same hands that have samples, so these are interleaved
    # by slices.
    edges = sorted({*taken, *map(len, hands)})
    left = array("q")
    for start, stop in itertools.pairwise(edges):
        some = [
            hand[start:stop]
            for hand, count in zip(hands, taken, strict=True)
            if count <= start and stop <= len(hand)
        ]
        between = array("q", bytes(8 * len(some) * (stop - start)))
        for place, part in enumerate(some):
            between[place :: len(some)] = array("q", part)
        left += between
    return left


@dataclass(frozen=True, slots=True)
class Remainder:
    """What is left of an iteration over data that earlier runs have begun, at any number of ranks.

    runs: of each earlier run, the oldest first, by rank how many samples of its hand it was given.
    given: further sample numbers that must not be given again; None: all of them.
    The default is an iteration that no run has begun.
    """

    runs: tuple[tuple[int, ...], ...] = ()
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
        sizes = [*map(len, self.runs), world_size]
        hands = whole(sizes[0])
        for counts, size in zip(self.runs, sizes[1:], strict=True):
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
