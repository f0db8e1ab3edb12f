"""Storage that cannot be written to when a run is already under way."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
import torch

import chorusline as cl
from chorusline.collectives.contract.errors import GroupAborted
from chorusline.runtime.checkpoint.checkpoints import Checkpoints
from chorusline.runtime.process.registry import Registry
from tests.harness.arrivals import FEW, at_full_size, has_ended, train_until_stopped


def _begin(group: cl.Group, place: Path, who_has_trained: tuple[int, ...]) -> str:
    checkpoints = Checkpoints(group, Registry(), cl.CheckpointConfig(place, resume="never"))
    checkpoints.has_trained = group.rank in who_has_trained
    try:
        checkpoints.begin()
    except cl.CheckpointPlaceUnusable as error:
        return str(error)
    return ""


@pytest.mark.parametrize("who_has_trained", [(), (0,), (1,), (0, 1)])
def test_a_place_that_cannot_be_written_to_ends_no_run_in_which_a_rank_has_trained(
    ranks_of, tmp_path, who_has_trained
):
    (tmp_path / "file").write_text("")
    said = ranks_of(2).run(_begin, tmp_path / "file" / "below", who_has_trained)
    assert said[0] == said[1]
    assert ("rank 0 on" in said[0]) is (not who_has_trained)


async def test_a_worker_comes_while_the_storage_cannot_be_written_to(
    cluster: None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    place, away = tmp_path / "place", tmp_path / "away"
    config = cl.CheckpointConfig(place)
    async with cl.Session((1, 2), resources_per_worker=FEW, checkpoint=config) as session:
        run = asyncio.create_task(session.run(train_until_stopped, folder=tmp_path))
        first = await at_full_size(tmp_path, 2, run)
        place.rename(away)
        place.write_text("no folder")
        os.kill(min(first), signal.SIGKILL)
        await has_ended(min(first))
        second = await at_full_size(tmp_path, 2, run)
        place.unlink()
        away.rename(place)
        (tmp_path / "stop").touch()
        told = await run
    assert len(second - first) == 1 and [size for size, _, _ in told] == [2, 2]
    said = capfd.readouterr().err
    assert f"Training continues, but checkpoints cannot be kept in {place}: rank 0 on " in said


def test_a_save_that_could_not_begin_is_due_again_when_the_function_runs_again(
    alone: cl.Group, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one before it is still being written when the generation ends."""
    registry = Registry()
    registry.add("model", torch.nn.Linear(2, 1))
    config = cl.CheckpointConfig(str(tmp_path), every_n_steps=3)
    ended = GroupAborted(alone.generation, [], "a worker has come in")

    def is_aborted() -> None:
        raise ended

    first = Checkpoints(alone, registry, config)
    with pytest.raises(GroupAborted), first:
        first.save_if_due(3)
        monkeypatch.setattr(first, "_finish_last", is_aborted)
        first.save_if_due(6)
    with Checkpoints(alone, registry, config) as again:
        again.last_step = first.last_step
        again.save_if_due(6)
    saved = {int(path.name.split("-")[1]) for path in tmp_path.iterdir() if path.is_dir()}
    assert saved == {3, 6}
