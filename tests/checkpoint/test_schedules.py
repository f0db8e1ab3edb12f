"""What is registered ends as it was, though objects that are made later write into it: a schedule
sets the learning rate of its optimizer when it is made, and a model draws random numbers."""

from __future__ import annotations

from typing import Any

import pytest

import chorusline as cl
from tests.references.checkpoint_runs import in_run, same
from tests.references.scheduled import LENGTH, SCHEDULES, train_scheduled


def _resumed(group: cl.Group, place: str, sharded: bool) -> tuple[Any, Any]:
    """The training in one go, and in three runs that resume each other's checkpoints."""
    whole = in_run(group, train_scheduled, None, sharded=sharded)
    parts = None
    for until in (5, 6, LENGTH):
        config = cl.CheckpointConfig(f"{place}/{sharded}", every_n_steps=None)
        parts = in_run(group, _train_and_save, config, sharded=sharded, until=until)
    return whole, parts


def _train_and_save(ctx: cl.Context, sharded: bool, until: int) -> Any:
    end = train_scheduled(ctx, sharded, until)
    ctx.save().wait()
    return end


@pytest.mark.parametrize("sharded", [False, True], ids=["plain", "sharded"])
def test_every_schedule_goes_on_as_without_the_break(ranks_of, tmp_path, sharded):
    for whole, parts in ranks_of(2).run(_resumed, str(tmp_path), sharded):
        for name in SCHEDULES:  # By name, for the message.
            for part in ("options", "weights", "schedules"):
                assert same(parts[part][name], whole[part][name]), (name, part)
        assert same(parts, whole)
