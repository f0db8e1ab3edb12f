"""Iterations side by side: every rank is in the same ones, whatever is left for it of each."""

from __future__ import annotations

import random
from typing import Any

import pytest

from chorusline.runtime.data.cursor import Cursor
from chorusline.runtime.data.dataset_batches import Shard
from chorusline.runtime.data.dealer import WITHIN, Dealer
from chorusline.runtime.process.step_boundary import boundary

EPOCHS = 2
DRAWS = 60


class Rank:
    """One rank in one process with the others; `run` is one run of the session."""

    def __init__(self, rank: int, num_ranks: int, sizes: list[int]) -> None:
        self.rank, self.num_ranks, self.sizes = rank, num_ranks, sizes
        self.used: list[list[list[int]]] = [[[] for _ in sizes] for _ in range(EPOCHS)]
        self.num_begun: list[list[int]] = []
        """The numbers of the iterations that have begun before each epoch's first batch."""

    def run(self, parts: list[dict[str, Any]] | None, num_steps: int) -> Cursor:
        """Take steps over shards side by side; the cursor at the end. parts: of the run before."""
        dealer, cursor = Dealer(self.rank, self.num_ranks), Cursor()
        if parts is not None:
            cursor.resume(parts)
        self.num_begun = []
        for epoch in cursor.epochs(EPOCHS):
            beside = zip(*(self.shard(n, epoch, dealer, cursor) for n in self.sizes), strict=False)
            self.num_begun.append(dealer.inside())
            for batches in beside if num_steps else ():
                for used, batch in zip(self.used[epoch], batches, strict=True):
                    used += batch
                num_steps -= 1
                if not num_steps:
                    break
            if not num_steps:
                break
        return cursor

    def shard(self, size: int, epoch: int, dealer: Dealer, cursor: Cursor) -> Shard:
        return Shard(
            list(range(size)),
            2,
            rank=self.rank,
            world_size=self.num_ranks,
            epoch=epoch,
            dealer=dealer,
            cursor=cursor,
            collate_fn=list,
        )


@pytest.mark.parametrize("seed", range(DRAWS))
def test_all_ranks_begin_the_same_iterations_after_every_stop(seed: int) -> None:
    draw = random.Random(seed)
    num_ranks, sizes = (
        draw.choice([2, 3]),
        [draw.randint(1, 30) for _ in range(draw.choice([2, 3]))],
    )
    ranks = [Rank(rank, num_ranks, sizes) for rank in range(num_ranks)]
    parts = None
    for num_steps in [draw.randint(0, 8) for _ in range(3)] + [10**6]:
        cursors = [rank.run(parts, num_steps) for rank in ranks]
        parts = [cursor.state() for cursor in cursors]
        least = min(len(rank.num_begun) for rank in ranks)  # They may stop in different epochs.
        begun = [rank.num_begun[:least] for rank in ranks]
        assert all(one == begun[0] for one in begun), "a number means one iteration on all ranks"
        assert all(len(of_epoch) == len(sizes) for of_epoch in begun[0])
        if len({part["epoch"] for part in parts}) > 1:
            return
    for epoch in range(EPOCHS):
        for place, size in enumerate(sizes):
            used = [number for rank in ranks for number in rank.used[epoch][place]]
            assert len(set(used)) == len(used) <= size, "no sample twice"
        shortest = min(sizes)
        if sizes[0] == shortest:  # A zip drops batches only of what it asks before the shortest.
            used = [number for rank in ranks for number in rank.used[epoch][0]]
            assert sorted(used) == list(range(shortest))
    assert not boundary().iterations


def test_a_rank_without_a_batch_numbers_the_next_loop_as_the_others_do() -> None:
    def numbers(rank: int, num_evaluations: int) -> list[int]:
        dealer = Dealer(rank, 2)

        def shard(size: int) -> Shard:
            return Shard(
                list(range(size)), 1, rank=rank, world_size=2, dealer=dealer, collate_fn=list
            )

        begun = []
        for _ in range(2):
            outer = shard(1)  # Rank 1 has no sample of it, so it runs no body.
            for _ in outer:
                for _ in range(num_evaluations):
                    inner = shard(4)
                    list(inner)
                    begun.append(inner.counts.number)
            begun.append(outer.counts.number)
        return begun

    assert numbers(1, 0) == [WITHIN, 2 * WITHIN]
    assert numbers(0, 2) == [WITHIN + 1, WITHIN + 2, WITHIN, *(2 * WITHIN + n for n in (1, 2, 0))]


def test_a_shard_that_begins_anew_ends_the_iteration_before() -> None:
    dealer = Dealer(0, 1)
    shard = Shard([0, 1, 2, 3], 1, rank=0, world_size=1, dealer=dealer, collate_fn=list)
    batches = iter(shard)
    next(batches)
    batches = iter(shard)
    assert dealer.inside() == [shard.counts.number]
    assert sorted(number for batch in batches for number in batch) == [0, 1, 2, 3]
    assert dealer.inside() == [] and not boundary().iterations
