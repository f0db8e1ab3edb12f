"""Passes over a shard outside the loops over ctx.epochs: they are trained once, as those inside."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from chorusline.runtime.data.cursor import Cursor, Used, in_epoch, place_in_words
from chorusline.runtime.data.dataset_batches import Shard
from chorusline.runtime.data.dealer import Dealer

SIZE = 22
Samples = list[tuple[str, int]]


class Run:
    """All ranks of one run of a function, one after the other.

    used: the samples of each step, with the name of the loop."""

    def __init__(self, num_ranks: int, parts: list[dict[str, Any]] | None = None) -> None:
        self.num_ranks = num_ranks
        self.used: Samples = []
        self.cursors = [Cursor() for _ in range(num_ranks)]
        if parts is not None:
            for cursor in self.cursors:
                cursor.resume(parts)

    def pass_over(self, name: str, rank: int, epoch: int = 0, steps: bool = True) -> Iterator[None]:
        dealer = Dealer(rank, self.num_ranks)
        shard = Shard(
            list(range(SIZE)),
            2,
            rank=rank,
            world_size=self.num_ranks,
            epoch=epoch,
            dealer=dealer,
            cursor=self.cursors[rank],
            collate_fn=list,
        )
        for batch in shard:
            self.used += [(name, number) for number in batch]
            if steps:
                shard.agree()
                dealer.record([dealer.cursors()] * self.num_ranks)
            yield


class Killed(Exception):
    pass


def function(run: Run, rank: int, num_steps: int) -> None:
    """A warm-up, two loops and a pass between them; all over the same data."""
    left = num_steps
    for name in passes(run, rank):
        for _ in name:
            left -= 1
            if left == 0:
                raise Killed


def passes(run: Run, rank: int) -> Iterator[Iterator[None]]:
    yield run.pass_over("warm-up", rank)
    for epoch in run.cursors[rank].epochs(2):
        yield run.pass_over(f"first {epoch}", rank, epoch)
    yield run.pass_over("between", rank)
    for epoch in run.cursors[rank].epochs(1):
        yield run.pass_over(f"second {epoch}", rank, epoch)
        break
    yield run.pass_over("after", rank)


NAMES = ["warm-up", "first 0", "first 1", "between", "second 0", "after"]


@pytest.mark.parametrize("num_steps", [3, 9, 10, 16, 26, 30])
@pytest.mark.parametrize("ranks", [(2, 2), (2, 3), (3, 2), (1, 1)])
def test_each_pass_is_trained_once_wherever_the_run_stops(
    num_steps: int, ranks: tuple[int, int]
) -> None:
    before, after = ranks
    used: Samples = []
    parts = None
    for num_ranks, steps in [(before, num_steps), (after, 4), (after, 10**6)]:
        run = Run(num_ranks, parts)
        for rank in range(num_ranks):
            with contextlib.suppress(Killed):
                function(run, rank, steps)
        parts = [cursor.state() for cursor in run.cursors]
        used += run.used
        if len({(part["loop"], part["epoch"]) for part in parts}) > 1:
            pytest.skip("the ranks have different numbers of batches")
    assert sorted(used) == sorted((name, number) for name in NAMES for number in range(SIZE))


@pytest.mark.parametrize("num_steps", [3, 11, 14, 24, 36, 49, 58])
def test_a_function_that_runs_again_from_the_top_trains_each_pass_once(num_steps: int) -> None:
    run = Run(1)
    with pytest.raises(Killed):
        function(run, 0, num_steps)
    again = Run(1, [run.cursors[0].state(Used.COMMITTED, by_id=True)])
    function(again, 0, -1)
    used = run.used + again.used
    assert sorted(used) == sorted((name, number) for name in NAMES for number in range(SIZE))


@pytest.mark.parametrize("kind", ["left by a break", "without a step"])
def test_a_pass_that_was_left_or_has_trained_nothing_begins_again_in_a_later_epoch(
    kind: str,
) -> None:
    def first(run: Run) -> None:
        if kind == "left by a break":
            next(run.pass_over("warm-up", 0))
        else:
            list(run.pass_over("warm-up", 0, steps=False))  # As for the mean of the data.

    run = Run(1)
    first(run)
    epochs = run.cursors[0].epochs(2)
    assert next(epochs) == 0
    batches = run.pass_over("epoch 0", 0)
    next(batches), next(batches)
    again = Run(1, [run.cursors[0].state()])
    first(again)
    assert again.used == [one for one in run.used if one[0] == "warm-up"]
    assert next(epochs := again.cursors[0].epochs(2)) == 0
    assert len(list(again.pass_over("epoch 0", 0))) == 9, "and two of 11 were taken"


def test_an_epochs_end_and_a_named_loop_know_of_passes_outside() -> None:
    run = Run(1)
    list(run.pass_over("warm-up", 0))
    epochs = run.cursors[0].epochs(2)
    assert next(epochs) == 0
    list(run.pass_over("epoch 0", 0))
    told = run.cursors[0].state()
    again = Run(1)
    again.cursors[0].resume([told], epoch_is_over=True)
    assert not list(again.pass_over("warm-up", 0))
    assert next(again.cursors[0].epochs(2)) == 1
    assert place_in_words([told], epoch_is_over=False).startswith("in epoch 0 after its batches")
    assert len(in_epoch(told["iterations"])) == 1
    # The next run of a session resumes the loop alone.
    named = Run(1)
    assert len(list(named.pass_over("warm-up", 0))) == 11
    named.cursors[0].resume_next_loop(0, [in_epoch(told["iterations"])])
    epochs = named.cursors[0].epochs(2)
    assert next(epochs) == 0 and not list(named.pass_over("epoch 0", 0))
    last = Run(1, [named.cursors[0].state()])
    assert not list(last.pass_over("warm-up", 0))
