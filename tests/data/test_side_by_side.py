"""Iterations side by side: every rank is in the same ones, whatever is left for it of each."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest

from chorusline.runtime.data.cursor import Cursor, Used
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


class Stopped(Rank):
    """A rank of a loop over `ctx.epochs(resume=...)` in a Join: all ranks agree on each step."""

    def begin(self, parts: list[dict[str, Any]] | None) -> None:
        self.dealer, self.cursor = Dealer(self.rank, self.num_ranks), Cursor()
        if parts is not None:
            self.cursor.resume(parts)
        self.epochs = self.cursor.epochs(EPOCHS)

    def begin_epoch(self, epoch: int) -> list[int]:
        """The numbers of its iterations."""
        self.epoch = epoch
        self.shards = [self.shard(size, epoch, self.dealer, self.cursor) for size in self.sizes]
        self.beside = [iter(shard) for shard in self.shards]
        return self.dealer.inside()

    def has_batch(self) -> bool:
        return all(shard.has_more() for shard in self.shards)

    def step(self) -> None:
        """One that all ranks agree on, with or without a batch of this rank."""
        if self.has_batch():
            for used, batches in zip(self.used[self.epoch], self.beside, strict=True):
                used += next(batches)
        for shard in self.shards:
            shard.agree()

    def stop(self, num_taken: int) -> dict[str, Any]:
        """Aborted in a step that does not count, when it has taken its batch of so many shards."""
        for batches in self.beside[: num_taken if self.has_batch() else 0]:
            next(batches)
        for batches in self.beside:
            batches.close()
        self.epochs.close()
        return self.cursor.state(Used.AGREED)

    def end_epoch(self) -> None:
        for _ in zip(*self.beside, strict=False):
            raise AssertionError("a zip ends with the shard that ends first")
        for batches in self.beside:
            batches.close()


@pytest.mark.parametrize("seed", range(DRAWS))
def test_steps_that_were_aborted_on_some_ranks_only_are_taken_again_by_all(seed: int) -> None:
    """Each rank has got as far into the aborted step as it pleases: before its batch, or with the
    batches of some of its shards."""
    draw = random.Random(seed)
    num_ranks, num_shards = draw.choice([2, 3]), draw.choice([2, 3])
    sizes = [draw.randint(1, 30) for _ in range(num_shards)]
    ranks = [Stopped(rank, num_ranks, sizes) for rank in range(num_ranks)]
    parts = None
    for num_steps in [draw.randint(1, 8) for _ in range(4)] + [10**6]:
        for rank in ranks:
            rank.begin(parts)
        parts = None
        while parts is None and None not in (epochs := [next(one.epochs, None) for one in ranks]):
            begun = [rank.begin_epoch(epoch) for rank, epoch in zip(ranks, epochs, strict=True)]
            assert all(one == begun[0] and len(one) == len(sizes) for one in begun)
            while parts is None and any(rank.has_batch() for rank in ranks):
                for rank in ranks:
                    rank.step()
                num_steps -= 1
                if num_steps <= 0 and any(rank.has_batch() for rank in ranks):
                    parts = [rank.stop(draw.randint(0, num_shards)) for rank in ranks]
            if parts is None:
                for rank in ranks:
                    rank.end_epoch()
        if parts is None:
            break
    for epoch in range(EPOCHS):
        for place, size in enumerate(sizes):
            used = [number for rank in ranks for number in rank.used[epoch][place]]
            assert len(set(used)) == len(used) <= size, "no sample twice"
            if size == min(sizes) == sizes[0] and place == 0:
                assert sorted(used) == list(range(size)), "and none is lost"
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


def cycled(shard: Shard) -> Iterator[list[int]]:
    while True:
        yield from shard


def watched(*sizes: int) -> tuple[list[Shard], list[tuple[int, ...]]]:
    """Shards of these sizes, in batches of one, and what each has given at the boundaries."""
    cursor, dealer, at_boundaries = Cursor(), Dealer(0, 1), []
    shards = [
        Shard(
            list(range(size)),
            1,
            rank=0,
            world_size=1,
            dealer=dealer,
            cursor=cursor,
            collate_fn=list,
            at_boundary=lambda: at_boundaries.append(tuple(one.num_given for one in shards)),
        )
        for size in sizes
    ]
    return shards, at_boundaries


@pytest.mark.parametrize("loop", ["zip", "zip of a map", "by hand", "generator", "two epochs"])
def test_only_the_end_of_the_body_is_a_boundary_of_iterations_side_by_side(loop: str) -> None:
    (first, second), at_boundaries = watched(6, 12 if loop == "two epochs" else 6)
    if loop == "zip":
        bodies: Any = zip(first, second, strict=True)
    elif loop == "zip of a map":
        bodies = zip(first, map(tuple, second), strict=True)  # The second one begins first.
    else:
        other = cycled(second) if loop == "generator" else iter(second)
        bodies = ((one, next(other)) for one in first)
    assert sum(1 for _ in bodies) == 6
    assert at_boundaries == [(n, n) for n in range(1, 7)]
    if loop == "two epochs":
        at_boundaries.clear()
        assert sum(1 for _ in first if next(other)) == 6
        assert at_boundaries == [(n, 6 + n) for n in range(1, 7)]


def test_what_is_left_of_the_longer_one_has_boundaries_of_its_own() -> None:
    shards, at_boundaries = watched(2, 4)
    assert sum(1 for _ in itertools.zip_longest(*shards)) == 4
    assert at_boundaries == [(1, 1), (2, 2), (2, 3), (2, 4)]


def test_a_loop_in_the_body_of_another_one_has_boundaries_as_well() -> None:
    cursor, dealer, at_boundaries = Cursor(), Dealer(0, 1), []

    def shard(name: str, size: int) -> Shard:
        return Shard(
            list(range(size)),
            1,
            rank=0,
            world_size=1,
            dealer=dealer,
            cursor=cursor,
            collate_fn=list,
            at_boundary=lambda: at_boundaries.append(name),
        )

    for _ in shard("outer", 2):
        beside = zip(shard("inner", 2), shard("beside", 2), strict=True)
        assert sum(1 for _ in beside) == 2
    assert at_boundaries == ["inner", "inner", "outer"] * 2
