"""Exports a checkpoint to one file in the plain format, and lists the checkpoints of a place."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from .contents import PER_RANK, ZERO
from .format.catalog import candidates, listing, newest_whole, why_unlisted
from .format.errors import CheckpointCorrupted, CheckpointUntrusted
from .format.reader import CheckpointReader
from .format.storage import Folder, open_storage
from .restore import plain_optimizer_state, read_tree


def export(source: str | Path, target: str | Path) -> CheckpointReader:
    """Write a checkpoint to one file with torch.save; returns the reader of the checkpoint.

    source: a checkpoint, or a place, whose newest whole checkpoint is taken.
    target: the file. It holds, by registered name, the state that a plain module or optimizer
        loads, or a list by rank where each rank has a state of its own.
    Needs memory for the whole checkpoint. No code that the checkpoint names is run: a state that
    needs it is left out, with a warning.

    Raises CheckpointNotFound, CheckpointCorrupted; CheckpointUntrusted if no state could be read.
    """
    reader = newest_whole(open_storage(source))
    path = Path(target).absolute()
    with Folder(path.parent).create(path.name) as file:
        torch.save(plain_states(reader), file)
    return reader


def plain_states(reader: CheckpointReader) -> dict[str, Any]:
    """All states in a checkpoint, by registered name; see `export`."""
    states: dict[str, Any] = {}
    refused: list[CheckpointUntrusted] = []
    for name, kind in reader.manifest.kinds.items():
        try:
            states[name] = _plain_state(name, kind, reader)
        except CheckpointUntrusted as error:
            refused.append(error)
    if refused and not states:
        raise refused[0]
    for untrusted in refused:
        warnings.warn(
            "left out of the export, which runs no code that a checkpoint names: "
            f"{untrusted.detail}",
            stacklevel=2,
        )
    return states


def _plain_state(name: str, kind: str, reader: CheckpointReader) -> Any:
    if kind == ZERO:
        return plain_optimizer_state(name, reader)
    if kind == PER_RANK:
        return [read_tree(reader, name, rank) for rank in range(reader.manifest.world_size)]
    return read_tree(reader, name)


def described(source: str | Path) -> Iterator[str]:
    """A line for each checkpoint of a place, the newest first; each is read and verified. At the
    end, a line for each folder that lacks only the manifest."""
    storage = open_storage(source)
    for folder in candidates(storage):
        try:
            reader = CheckpointReader(storage, folder)
            reader.verify()
        except CheckpointCorrupted as error:
            yield f"{folder or storage.path}: {error}"
            continue
        manifest = reader.manifest
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.time))
        size = sum(manifest.files.values()) / 1e6
        yield (
            f"{folder or storage.path}: whole, step {manifest.step}, {manifest.world_size} ranks, "
            f"{size:.1f} MB, {when}; {', '.join(manifest.kinds)}"
        )
    for folder in listing(storage).unlisted:
        yield f"{folder}: {why_unlisted(storage, folder)}"
