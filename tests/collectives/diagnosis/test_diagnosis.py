"""Debug levels, what is told at INFO, and ranges in torch's profiler."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from chorusline.collectives.contract.errors import CollectiveMismatch
from chorusline.collectives.diagnosis.debug import (
    DebugLevel,
    get_debug_level,
    inform,
    set_debug_level,
    set_debug_level_from_env,
)
from tests.harness.ranks import IN_PYTHON, SHARED_MEMORY, Rank, error_of, run_ranks, transports


@pytest.fixture
def level() -> Iterator[None]:
    before = get_debug_level()
    yield
    set_debug_level(before)


# -- levels ----------------------------------------------------------------------------------------


def test_the_level_comes_from_our_variable_then_from_torchs(
    level: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CHORUSLINE_DEBUG", raising=False)
    monkeypatch.delenv("TORCH_DISTRIBUTED_DEBUG", raising=False)
    set_debug_level_from_env()
    assert get_debug_level() is DebugLevel.OFF
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    set_debug_level_from_env()
    assert get_debug_level() is DebugLevel.DETAIL
    monkeypatch.setenv("CHORUSLINE_DEBUG", "info")
    assert get_debug_level() is DebugLevel.DETAIL
    set_debug_level_from_env()
    assert get_debug_level() is DebugLevel.INFO
    monkeypatch.delenv("CHORUSLINE_DEBUG")
    monkeypatch.delenv("TORCH_DISTRIBUTED_DEBUG")
    set_debug_level_from_env()
    assert get_debug_level() is DebugLevel.OFF


def test_a_level_that_does_not_exist_is_refused_with_the_choices(
    level: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHORUSLINE_DEBUG", "LOUD")
    with pytest.raises(ValueError, match="CHORUSLINE_DEBUG must be one of OFF, INFO, DETAIL, got"):
        set_debug_level_from_env()
    with pytest.raises(TypeError, match="level must be a DebugLevel"):
        set_debug_level("INFO")  # type: ignore[arg-type]


def test_what_is_told_at_info_is_seen_where_nobody_set_up_logging() -> None:
    program = "from chorusline.collectives.diagnosis.debug import inform; inform('%d buckets', 3)"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.stderr == "3 buckets\n"


def test_what_is_told_at_info_goes_to_the_users_logging(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "chorusline"):
        inform("%d buckets", 3)
    assert caplog.messages == ["3 buckets"]


# -- profiling -------------------------------------------------------------------------------------


def profile(rank: Rank) -> Any:
    with rank.group() as group:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as recorded:
            if rank.rank == 1:
                rank.store.wait(["said/issued/0"], 30)
                time.sleep(0.2)  # Rank 0 waits.
            work = group.all_reduce(torch.ones(500_000))
            rank.say("issued")
            torch.ones(3).add_(1)
            work.wait()
            other = 1 - rank.rank
            with group.coalesce() as both:
                group.send(torch.ones(3), other)
                group.recv(torch.ones(3), other)
            both.wait()
            group.all_gather_object("objects").wait()
            group.barrier().wait()
        group.barrier().wait()
    took_us = [e.time_range.elapsed_us() for e in recorded.events() if "all_reduce" in e.name]
    return {e.key: e.count for e in recorded.key_averages()}, took_us


@transports
def test_collectives_are_ranges_in_torchs_profiler(transport: str, tmp_path: Path) -> None:
    for rank, (found, took_us) in enumerate(run_ranks(profile, 2, tmp_path, transport)):
        if "aten::ones" not in found:
            pytest.skip("this build of torch profiles nothing in a process that was forked")
        ours = {key: count for key, count in found.items() if key.startswith("chorusline::")}
        if len(ours) < 5 and torch.__version__ < "2.13":
            pytest.skip("torch 2.11 drops ranges that end in a thread older than the recording")
        names = "all_reduce", "send", "recv", "all_gather_object", "barrier"
        assert ours == {f"chorusline::{name}": 1 for name in names}
        assert rank != 0 or took_us[0] > 100_000, "from the issue to the end"


def skip_a_number(rank: Rank) -> Any:
    group = rank.group()
    group._next_sequence += rank.rank == 1
    error = error_of(group.all_reduce(torch.ones(3 + rank.rank)).wait)
    group.close()
    return error


@pytest.mark.parametrize("transport", [SHARED_MEMORY, IN_PYTHON])
def test_a_rank_whose_first_operation_has_another_number_is_told(
    transport: str, tmp_path: Path
) -> None:
    for error in run_ranks(skip_a_number, 2, tmp_path, transport):
        assert isinstance(error, CollectiveMismatch)
        assert "rank 0 issued all_reduce #0 (3 float32)" in str(error)
        assert "rank 1 issued all_reduce #1 (4 float32)" in str(error)
