"""A worker that comes to a run in progress."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import chorusline as cl
from tests.harness.arrivals import FEW, at_full_size, ready, train_until_stopped


class OpensSlowly:
    """An argument that takes long to unpickle in a worker that comes later: as long as the other
    rank takes for five steps. striking: the first of these workers is killed while it does."""

    def __init__(self, folder: Path, striking: bool) -> None:
        self.folder, self.striking = folder, striking

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return opened, (self.folder, self.striking)


def opened(folder: Path, striking: bool) -> None:
    if not (folder / "came_later").exists():
        return
    if striking:
        try:
            os.close(os.open(folder / "struck", os.O_CREAT | os.O_EXCL))
            os.kill(os.getpid(), signal.SIGKILL)
        except FileExistsError:
            pass
    (folder / "opening").touch()
    ready(folder / "has_trained_on")


def train(ctx: cl.Context, folder: Path, slow: None) -> tuple[int, int, torch.Tensor]:
    return train_until_stopped(ctx, folder)


@pytest.mark.parametrize(
    "striking", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["", "killed"]
)
async def test_the_others_train_while_a_worker_that_comes_loads_the_program(
    cluster: None, tmp_path: Path, striking: bool
) -> None:
    def steps() -> int:
        return max(int((path.read_text().split() or "00")[-1]) for path in tmp_path.glob("[0-9]*"))

    async with cl.Session((1, 2), resources_per_worker=FEW) as session:
        slow = OpensSlowly(tmp_path, striking)
        run = asyncio.create_task(session.run(train, folder=tmp_path, slow=slow))
        first = await at_full_size(tmp_path, 2, run)
        (tmp_path / "came_later").touch()
        os.kill(min(first), signal.SIGKILL)
        await asyncio.to_thread(ready, tmp_path / "opening")
        before = steps()
        give_up_at = time.monotonic() + 30
        while steps() < before + 5 and time.monotonic() < give_up_at:
            await asyncio.sleep(0.02)
        assert steps() >= before + 5, "the rank that is left waits for the worker that comes"
        (tmp_path / "has_trained_on").touch()
        second = await at_full_size(tmp_path, 2, run)
        (tmp_path / "stop").touch()
        told = await run
    assert len(second - first) == 1 and len(second & first) == 1
    assert [size for size, _, _ in told] == [2, 2]
    assert torch.equal(told[0][2], told[1][2])
    assert (tmp_path / "struck").exists() is striking
