"""What a rank says of its place in an epoch: evaluations leave it, and a restart continues it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import chorusline as cl
from chorusline.actors.messages.run_status import RunStatus
from chorusline.runtime.data.cursor import Cursor, Used
from chorusline.runtime.data.dataset_batches import Shard
from chorusline.runtime.data.dealer import Dealer
from chorusline.runtime.process.step_boundary import entered
from chorusline.runtime.session.showing.progress_model import Places


@pytest.fixture(autouse=True)
def _in_a_run() -> Iterator[None]:
    with entered(RunStatus()):
        yield


def shard(num_samples: int, cursor: Cursor) -> Shard:
    return Shard(
        range(num_samples), 2, rank=0, world_size=1, cursor=cursor, collate_fn=list, shuffle=False
    )


def place(steps: RunStatus) -> tuple[int, int | None]:
    places = Places.of({0: steps})
    return places.done, places.total


def test_an_evaluation_does_not_move_the_place_and_a_function_that_runs_again_goes_on_there() -> (
    None
):
    steps, cursor = RunStatus(rank=0), Cursor()
    with entered(steps):
        next(cursor.epochs(1))
        shard_in_progress = shard(10, cursor)
        batches = iter(shard_in_progress)
        next(batches), next(batches)
        shard_in_progress.agree()
        next(batches)  # It is in a step that does not count.
        assert place(steps) == (3, 5)
        with torch.no_grad():
            assert len(list(shard(4, cursor))) == 2
        assert place(steps) == (3, 5), "not 2 of 2"
        told = cursor.state(Used.AGREED, by_id=True)
        batches.close()
        again = Cursor()
        again.resume([told])
        next(again.epochs(1))
        batches = iter(shard(10, again))
        next(batches)
        assert place(steps) == (3, 5), "not 1 of 3, nor 4 of 6"


def test_without_training_an_evaluation_is_the_place() -> None:
    steps, cursor = RunStatus(rank=0), Cursor()
    with entered(steps), torch.no_grad():
        batches = iter(shard(10, cursor))
        next(batches)
        assert place(steps) == (1, 5)


@pytest.mark.parametrize("num_used", [0, 2, 4])
def test_a_restart_after_a_loop_gives_again_what_no_step_has_used(num_used: int) -> None:
    """As where the loop accumulates gradients, and the step that comes after it was not taken."""
    dealer, cursor, ids = Dealer(0, 1), Cursor(), list(range(8))

    def begin(cursor: Cursor, dealer: Dealer) -> Shard:
        return Shard(
            ids,
            2,
            rank=0,
            world_size=1,
            cursor=cursor,
            dealer=dealer,
            collate_fn=list,
            shuffle=False,
        )

    def left(cursor: Cursor) -> list[int]:
        again = Cursor()
        again.resume([cursor.state(Used.COMMITTED, by_id=True)])
        next(again.epochs(1))
        return [number for batch in begin(again, Dealer(0, 1)) for number in batch]

    next(cursor.epochs(2))
    vote: tuple[list[list[int]], list[int]] = [[0]], []
    for number, _ in enumerate(begin(cursor, dealer), 1):
        vote = [dealer.cursors()], dealer.inside()
        if number == num_used:
            dealer.record(*vote, is_settled=False)
    assert left(cursor) == ids[2 * num_used :]
    assert bool(dealer.unused()) == (num_used < 4)
    # An evaluation, which is in no step, leaves it at that.
    with torch.no_grad():
        assert len(list(begin(cursor, dealer))) == 4
    assert left(cursor) == ids[2 * num_used :]
    # The step after the loop: agreed on at its last batch, or when it was over.
    dealer.record(*(vote if num_used == 2 else ([[]], [])), is_settled=False)
    assert left(cursor) == [] and not dealer.unused()


@pytest.mark.parametrize("kind", ["evaluates", "accumulates", "lists"])
def test_a_loop_awaits_a_step_unless_it_evaluates(alone: cl.Group, kind: str) -> None:
    """An evaluation need not be under no_grad, and may take gradients of inputs."""
    model = cl.DistributedDataParallel(torch.nn.Linear(1, 1), group=alone)
    dealer, cursor, ones = Dealer(0, 1), Cursor(), torch.ones(1, 1, requires_grad=True)

    def begin(num_samples: int) -> Shard:
        return Shard(range(num_samples), 2, rank=0, world_size=1, cursor=cursor, dealer=dealer)

    next(cursor.epochs(1))
    for _ in begin(300):
        model(ones).sum().backward()
        for _ in begin(4):
            if kind == "accumulates":
                with model.no_sync():
                    model(ones).sum().backward()
            elif kind == "evaluates":
                model.eval()
                torch.autograd.grad(model(ones).sum(), ones)
        model.train()
        assert len(dealer.unused()) == (kind != "evaluates")
        dealer.record([dealer.cursors()])
        assert dealer._awaiting == []
    # Where no step is recorded, as in a run that does not recover.
    for _ in cursor.epochs(150):
        for _ in begin(2):
            model(ones).sum().backward()
        assert len(dealer._awaiting) == 1


def test_what_was_accumulated_over_the_end_of_an_epoch_is_not_waited_for() -> None:
    dealer, cursor = Dealer(0, 1), Cursor()
    epochs = cursor.epochs(2)
    assert next(epochs) == 0
    shard = Shard(range(4), 2, rank=0, world_size=1, cursor=cursor, dealer=dealer, collate_fn=list)
    assert len(list(shard)) == 2 and dealer.unused()
    assert next(epochs) == 1 and not dealer.unused()
