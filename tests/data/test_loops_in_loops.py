"""A loop over a shard in the body of another one: a run that resumes is in both of them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from chorusline.runtime.data.cursor import Cursor, Used, check_parts
from chorusline.runtime.data.dataset_batches import Shard
from chorusline.runtime.data.dealer import Dealer
from chorusline.runtime.process.step_boundary import boundary

OUTER, INNER = 6, 4


class Stopped(Exception):
    pass


class Run:
    """One rank's run: an epoch with a loop in a loop, and a pass before and after them over the
    inner data. used: the batches of the outer loop, and with each of them those of the inner one.

    saves: the states at each boundary, with the number of samples used before."""

    def __init__(self, parts: list[dict[str, Any]] | None = None, stop_after: int = -1) -> None:
        self.dealer, self.cursor = Dealer(0, 1), Cursor()
        if parts is not None:
            check_parts(parts)
            self.cursor.resume(parts)
        self.left = stop_after
        self.used: list[tuple[str, int]] = []
        self.outer: list[int] = []
        self.saves: list[tuple[dict[str, Any], int]] = []

    def shard(self, size: int, batch_size: int = 1) -> Shard:
        return Shard(
            list(range(size)),
            batch_size,
            rank=0,
            world_size=1,
            dealer=self.dealer,
            cursor=self.cursor,
            collate_fn=list,
            at_boundary=lambda: self.saves.append((self.cursor.state(), len(self.used))),
        )

    def step(self, name: str, batch: list[int], *shards: Shard) -> None:
        """A step that counts."""
        self.used += [(name, number) for number in batch]
        for one in shards:
            one.agree()
        self.dealer.record([self.dealer.cursors()])
        self.left -= 1
        if self.left == 0:
            raise Stopped

    def passes(self, outer: Shard) -> Iterator[None]:
        for (number,) in outer:
            self.outer.append(number)
            for which in ("a", "b"):
                inner = self.shard(INNER)
                for batch in inner:
                    self.step(f"{which} in {number}", batch, inner, outer)
            yield

    def function(self) -> None:
        for _ in self.cursor.epochs(1):
            for name in ("before", "after"):
                inner = self.shard(INNER)
                for batch in inner:
                    self.step(name, batch, inner)
                if name == "before":
                    for _ in self.passes(self.shard(OUTER)):
                        pass


EXPECTED = sorted(
    (name, number)
    for name in ("before", "after", *(f"{one} in {n}" for n in range(OUTER) for one in "ab"))
    for number in range(INNER)
)


def test_a_resume_from_any_boundary_takes_each_inner_batch_once() -> None:
    whole = Run()
    whole.function()
    assert sorted(whole.used) == EXPECTED
    assert len(whole.saves) == 2 * INNER + OUTER * (2 * INNER + 1)
    for state, num_used in whole.saves:
        resumed = Run([state])
        resumed.function()
        assert sorted(whole.used[:num_used] + resumed.used) == EXPECTED
        assert resumed.outer == whole.outer[len(whole.outer) - len(resumed.outer) :]


@pytest.mark.parametrize("used", [Used.COMMITTED, Used.AGREED])
@pytest.mark.parametrize("seed", range(20))
def test_a_function_that_was_left_at_any_step_goes_on_there_again_and_again(
    used: Used, seed: int
) -> None:
    draw = random.Random(seed)
    taken: list[tuple[str, int]] = []
    parts = None
    while True:
        run = Run(parts, draw.randint(1, 20))
        try:
            run.function()
        except Stopped:
            parts = [run.cursor.state(used, by_id=used is Used.COMMITTED)]
            taken += run.used
        else:
            break
    assert sorted(taken + run.used) == EXPECTED


def test_two_ranks_that_run_again_are_given_both_of_their_outer_batches() -> None:
    ranks = [Dealer(rank, 3) for rank in range(3)]
    cursors = [Cursor() for _ in ranks]

    def shard(rank: int, size: int, world_size: int) -> Shard:
        return Shard(
            list(range(size)),
            1,
            rank=rank,
            world_size=world_size,
            dealer=ranks[rank],
            cursor=cursors[rank],
            collate_fn=list,
            shuffle=False,
        )

    epochs = [cursor.epochs(1) for cursor in cursors]
    assert [*map(next, epochs)] == [0] * 3
    outer = [iter(shard(rank, 9, 3)) for rank in range(3)]
    for number in range(2):
        assert [*map(next, outer)]
        inner = [iter(shard(rank, 6, 3)) for rank in range(3)]
        for batches in inner:
            next(batches)
        cursors_of_step = [dealer.cursors() for dealer in ranks]
        for dealer in ranks:
            dealer.record(cursors_of_step)
        for one in boundary().iterations:
            one.agree()
        if number == 0:
            for batches in inner:
                assert len(list(batches)) == 1
    # Rank 2 is lost.
    parts = [cursor.state(Used.COMMITTED, by_id=True) for cursor in cursors[:2]]
    ranks[:] = [Dealer(rank, 2) for rank in range(2)]
    cursors[:] = [Cursor() for _ in range(2)]
    given: Counter[str] = Counter()
    for rank, cursor in enumerate(cursors):
        cursor.resume(parts)
        for _ in cursor.epochs(1):
            for x in shard(rank, 9, 2):
                given.update(f"outer {n}" for n in x)
                given.update(f"inner {n}" for z in shard(rank, 6, 2) for n in z)
    # Of the pass in which they were, 3, 4 and 5, which no step had; then all; and in the outer
    # batch that rank 0 has more, its 0, 2 and 4.
    assert [given[f"outer {n}"] for n in range(9)] == [0, 0, 0, 1, 1, 0, 1, 1, 1], "5 was lost"
    assert [given[f"inner {n}"] for n in range(6)] == [2, 1, 2, 2, 3, 2]


def test_a_generator_that_the_body_asks_goes_on_where_it_was() -> None:
    def cycled(shard: Shard) -> Iterator[list[int]]:
        while True:
            yield from shard

    def pairs(run: Run) -> list[tuple[int, int]]:
        found = []
        for _ in run.cursor.epochs(1):
            outer, other = run.shard(10), cycled(run.shard(4))
            for x in outer:
                y = next(other)
                run.step("pair", x)
                found.append((x[0], y[0]))
        return found

    whole = Run()
    found = pairs(whole)
    assert len(found) == 10
    for state, num_used in whole.saves:
        if num_used not in (5, 9):  # Where it began again, it led for a moment.
            assert pairs(Run([state])) == found[num_used:]


def test_a_batch_that_was_in_a_step_before_the_inner_loop_is_not_given_again() -> None:
    def function(run: Run) -> None:
        for _ in run.cursor.epochs(1):
            outer = run.shard(4)
            for x in outer:
                run.step("outer", x, outer)
                inner = run.shard(3)
                for z in inner:
                    run.step("inner", z, inner, outer)

    whole = Run()
    function(whole)
    for state, num_used in whole.saves:
        resumed = Run([state])
        function(resumed)
        used = whole.used[:num_used] + resumed.used
        assert sorted(n for name, n in used if name == "outer") == list(range(4))
        inner = [n for name, n in used if name == "inner"]
        num_begun = -(-num_used // 4)
        left_out = set(range(3)) - {n for _, n in whole.used[4 * num_begun - 3 : num_used]}
        expected = Counter(n for n in [0, 1, 2] * 4) - Counter(left_out)
        assert Counter(inner) == expected, "what was left of its inner loop is left out"
