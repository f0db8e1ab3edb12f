"""How the samples of a lost rank are dealt to the others: dealers of all ranks, in one process."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from chorusline.runtime.data.dataset_batches import Shard
from chorusline.runtime.data.dealer import Dealer, Left
from chorusline.runtime.data.dealing import redeal

NUM_SAMPLES = 24


class Ranks:
    """Dealers and shards by first rank; `alive` are those that are left, by rank."""

    def __init__(self, size: int, keys: Any = None) -> None:
        self.keys = keys
        self.dealers = [Dealer(rank, size) for rank in range(size)]
        self.shards = [self.shard(rank, size) for rank in range(size)]
        self.batches: list[Any] = [iter(shard) for shard in self.shards]
        self.used: list[list[int]] = [[] for _ in range(size)]
        self.alive = list(range(size))

    def shard(self, rank: int, size: int) -> Shard:
        return Shard(
            list(range(NUM_SAMPLES)),
            2,
            rank=rank,
            world_size=size,
            dealer=self.dealers[rank],
            collate_fn=list,
            shuffle=False,
            keep_together=self.keys,
        )

    def take(self, *ranks: int) -> None:
        for rank in ranks:
            self.used[rank] += next(self.batches[rank])

    def count(self) -> None:
        """The step that all have taken a batch for counts."""
        cursors = tuple(self.dealers[rank].cursors() for rank in self.alive)
        for rank in self.alive:
            self.dealers[rank].record(cursors)

    def lose(self, dead: int) -> Left | None:
        former = tuple(old for old, rank in enumerate(self.alive) if rank != dead)
        self.alive.remove(dead)
        positions = [self.dealers[rank].position() for rank in self.alive]
        left = [
            self.dealers[rank].redeal(new, positions, former) for new, rank in enumerate(self.alive)
        ]
        assert all(one == left[0] for one in left)
        return left[0]

    def finish(self) -> list[int]:
        """All samples that were used in steps that count, by whom ever."""
        for batches in reversed(self.batches):  # They are one in another, in this one process.
            batches.close()
        hands = [self.shards[rank].sample_ids for rank in self.alive]
        for rank, hand in zip(self.alive, hands, strict=True):
            assert hand[: len(self.used[rank])] == self.used[rank]
        lost = self.shards[self.alive[0]].ids_of_the_lost
        return sorted([*lost, *(number for hand in hands for number in hand)])


def test_a_second_loss_before_the_next_step_repeats_nothing() -> None:
    ranks = Ranks(4)
    ranks.take(0, 1, 2, 3)
    ranks.count()
    ranks.take(0, 1, 2, 3)
    ranks.lose(0)
    ranks.lose(1)
    assert [ranks.shards[rank].num_used for rank in (2, 3)] == [8, 8]
    while len(ranks.shards[2].taken_ids) < len(ranks.shards[2].sample_ids):
        ranks.take(2, 3)
        ranks.count()
    assert [ranks.shards[rank].num_used for rank in (2, 3)] == [NUM_SAMPLES, NUM_SAMPLES]
    assert ranks.finish() == list(range(NUM_SAMPLES))
    assert ranks.shards[2].ids_of_the_lost == [0, 4, 1, 5], "of the one step that counts"


def test_who_is_a_step_ahead_still_takes_as_many_as_the_others() -> None:
    ranks = Ranks(3)
    ranks.take(0, 1, 2)
    ranks.count()
    ranks.take(0)  # It is in the second step; rank 2 has not begun it.
    left = ranks.lose(1)
    assert left is not None and left.to_do == [5, 5] and left.to_take == [4, 5]
    assert left.dealt_again == 3, "of the four that rank 1 had, one is in a step that counts"
    assert ranks.finish() == list(range(NUM_SAMPLES))


def test_the_step_that_another_has_begun_is_still_to_do() -> None:
    ranks = Ranks(2)
    for _ in range(6):
        ranks.take(0, 1)
        ranks.count()
    assert ranks.lose(1) == Left([0], [0])
    ranks.finish()
    ahead = Ranks(3)
    for step in range(4):
        ahead.take(0, 1, 2) if step < 3 else ahead.take(0, 1)
        if step < 3:
            ahead.count()
    # Of four samples that are left rank 2, which is not in the last step, gets three.
    assert ahead.lose(1) == Left([1, 2], [2, 2])
    ahead.finish()


def test_an_evaluation_in_the_middle_does_not_end_the_iteration_around_it() -> None:
    ranks = Ranks(3)
    ranks.take(0, 1, 2)
    ranks.count()
    for rank in range(3):
        assert sum(map(len, ranks.shard(rank, 3))) == 8
    ranks.take(0, 1, 2)
    ranks.count()
    ranks.take(0, 1, 2)
    left = ranks.lose(2)
    assert left is not None and sum(left.to_do) > 2
    assert ranks.finish() == list(range(NUM_SAMPLES))
    assert ranks.shards[0].ids_of_the_lost == [2, 5, 8, 11]


class Column:
    """As a filtered and sorted Series of pandas: it has values by label, and gives the values."""

    def __init__(self, values: list[str]) -> None:
        self.values_by_label = dict(zip(range(2 * len(values), 0, -2), values, strict=True))

    def __getitem__(self, label: int) -> str:
        return self.values_by_label[label]

    def __iter__(self) -> Iterator[str]:
        return iter(self.values_by_label.values())

    def __len__(self) -> int:
        return len(self.values_by_label)

    def __bool__(self) -> bool:
        raise ValueError("The truth value of a Series is ambiguous")


def test_keys_in_a_column_with_labels_of_its_own_are_those_of_the_rows_in_their_order() -> None:
    names = [f"user {number * 7 % 5}" for number in range(NUM_SAMPLES)]
    used = []
    for keys in (names, Column(names)):
        ranks = Ranks(3, keys)
        ranks.take(0, 1, 2)
        ranks.count()
        ranks.take(0, 1, 2)
        ranks.lose(2)
        assert ranks.finish() == list(range(NUM_SAMPLES))
        used.append(ranks.used)
    assert used[0] == used[1]


@pytest.mark.parametrize(("busy", "hands"), [((), [[0, 2], [1, 3]]), ((2, 0), [[], [0, 1]])])
def test_busy_ranks_get_less(busy: tuple[int, ...], hands: list[list[int]]) -> None:
    lost = [0, 1, 2, 3] if not busy else [0, 1]
    dealt = redeal([[], [], lost], [0, 0, 0], (0, 1), busy=(*busy, 0) if busy else ())
    assert [hand.tolist() for hand in dealt] == hands


def one_by_one(
    hands: list[list[int]], taken: list[int], former: list[int], busy: list[int]
) -> list[list[int]]:
    """What `redeal` does, a sample at a time."""
    places = sorted(
        (place, rank) for rank, hand in enumerate(hands) for place in range(taken[rank], len(hand))
    )
    new = [hands[old][: taken[old]] if old >= 0 else [] for old in former]
    to_do = [busy[old] if old >= 0 else 0 for old in former]
    for place, old in places:
        rank = to_do.index(min(to_do))
        new[rank].append(hands[old][place])
        to_do[rank] += 1
    return new


@pytest.mark.parametrize("seed", range(40))
def test_what_is_dealt_by_slices_is_what_is_dealt_one_by_one(seed: int) -> None:
    draw = random.Random(seed)
    numbers = iter(range(10_000))
    hands = [[next(numbers) for _ in range(draw.randrange(30))] for _ in range(draw.randint(1, 5))]
    for _ in range(4):  # One loss or arrival after the other.
        taken = [draw.randint(0, len(hand)) for hand in hands]
        busy = [draw.randint(0, min(4, count)) for count in taken]
        former = [rank for rank in range(len(hands)) if draw.random() < 0.7] or [0]
        former += [-1] * draw.randrange(3)
        again = [hand.tolist() for hand in redeal(hands, taken, former, busy=busy)]
        assert again == one_by_one(hands, taken, former, busy)
        hands = again


def test_shards_side_by_side_are_both_dealt_again() -> None:
    ranks = Ranks(3)
    beside = [ranks.shard(rank, 3) for rank in range(3)]
    others = [iter(shard) for shard in beside]
    for _ in range(2):
        ranks.take(0, 1, 2)
        for batches in others:
            next(batches)
        ranks.count()
    ranks.take(0, 1, 2)  # A step that does not count, and before the second of its batches.
    ranks.lose(1)
    counted = [1, 4, 7, 10]
    assert ranks.shards[0].ids_of_the_lost == beside[0].ids_of_the_lost == counted
    hands = [number for rank in (0, 2) for number in beside[rank].sample_ids]
    assert sorted([*counted, *hands]) == list(range(NUM_SAMPLES))
    assert ranks.finish() == list(range(NUM_SAMPLES))


def test_more_iterations_than_a_step_can_tell_of_are_refused_with_the_mend() -> None:
    dealer = Dealer(0, 1)
    begun = []
    with pytest.raises(RuntimeError, match="4 iterations over shards are in progress"):
        for _ in range(5):
            begun.append(iter(Shard([1, 2], 1, rank=0, world_size=1, dealer=dealer)))
            next(begun[-1])
    for batches in begun[:-1]:
        batches.close()
