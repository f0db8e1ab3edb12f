"""What a rank says of its place in an epoch: evaluations leave it, and a restart continues it."""

from __future__ import annotations

import torch

from chorusline.actors.messages.run_status import RunStatus
from chorusline.runtime.data.cursor import Cursor, Used
from chorusline.runtime.data.dataset_batches import Shard
from chorusline.runtime.process.step_boundary import entered
from chorusline.runtime.session.showing.progress_model import Places


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
