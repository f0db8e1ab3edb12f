"""What was saved comes back, at any number of ranks, and others can read it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoint_runs import run_train, same

import chorusline as cl


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3), (3, 2), (3, 4), (4, 2)])
def test_a_run_goes_on_at_another_number_of_ranks_from_exactly_what_was_saved(
    ranks_of, tmp_path, before, after
):
    config = cl.CheckpointConfig(tmp_path)
    ((end, saved), *_) = ranks_of(before).run(run_train, config, dict(until=5, save_at=3))
    assert saved["step"] == 3
    ((resumed, _), *_) = ranks_of(after).run(run_train, config, dict(until=3))
    assert same(resumed, saved)
