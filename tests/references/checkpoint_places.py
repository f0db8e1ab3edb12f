"""Checkpoints of one place: written, damaged, and resumed from."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import chorusline as cl
from tests.references.checkpoint_runs import Parts, in_run, run_train


def steps_in(place: Path) -> list[int]:
    return sorted(int(path.name.split("-")[1]) for path in place.iterdir())


def folder_of(place: Path, step: int) -> Path:
    (folder,) = place.glob(f"step-{step:08d}-*")
    return folder


def write_two(ranks_of, place: Path) -> None:
    ranks_of(2).run(run_train, cl.CheckpointConfig(place), {"until": 2, "save_at": 2})
    ranks_of(2).run(run_train, cl.CheckpointConfig(place), {"until": 4, "save_at": 4})


def resume_and_listen(group: cl.Group, config: cl.CheckpointConfig) -> tuple[int, list[str]]:
    """The step that a run goes on from, and what this rank was warned of; or the error's text."""

    def look(ctx: cl.Context) -> int:
        return Parts(ctx).ctx.step

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            return in_run(group, look, config), [str(warning.message) for warning in caught]
        except cl.CheckpointError as error:
            return -1, [f"{type(error).__name__}: {error}"]


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


DAMAGES = {
    "a bit of rank 1's data": lambda f: flip(f / "rank-1.distcp", 5000),
    "the end of rank 0's data": lambda f: os.truncate(f / "rank-0.distcp", 3000),
    "rank 1's data is gone": lambda f: (f / "rank-1.distcp").unlink(),
    "a bit of the manifest": lambda f: flip(f / "chorusline.json", 200),
    "the end of the manifest": lambda f: os.truncate(f / "chorusline.json", 1000),
    "a bit of torch's metadata": lambda f: flip(f / ".metadata", 100),
}
