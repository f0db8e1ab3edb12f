"""The checkpoints of one place: which are there, which is the newest whole one, which may go."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .errors import CheckpointCorrupted, CheckpointNotFound
from .manifest import MANIFEST, read_manifest, within
from .reader import CheckpointReader
from .storage import Storage

_FOLDER = re.compile(r"step-(\d{8,})-([0-9a-f]{8})-(\d+)")
PROBE = ".probe-"


def folder_name(step: int, run: str, number: int) -> str:
    """Of a checkpoint. run: eight hex digits that every attempt to run draws anew, so that nobody
    writes into the remains of another; number: of the checkpoint in the run."""
    return f"step-{step:08d}-{run}-{number}"


@dataclass(frozen=True, slots=True)
class Listing:
    """Folders. whole: with a manifest, the last written first. broken: with one that cannot be
    read. torn: with none, so that they do not exist as checkpoints."""

    whole: list[str]
    broken: list[str]
    torn: list[str]


def listing(storage: Storage) -> Listing:
    """By the time of writing, not by steps: who started afresh in the same place, or went back,
    goes on from what was written since."""
    written: list[tuple[float, str]] = []
    broken, torn = [], []
    for name in storage.children():
        if not _FOLDER.fullmatch(name):
            continue
        if MANIFEST not in storage.children(name):
            torn.append(name)
            continue
        try:
            written.append((read_manifest(storage, name).time, name))
        except (CheckpointCorrupted, FileNotFoundError):
            broken.append(name)
    return Listing([name for _, name in sorted(written, reverse=True)], broken, torn)


def prune(storage: Storage, keep: int | None, newest: str) -> None:
    """Delete what is no longer needed now that `newest` is whole: the oldest beyond `keep`, and
    what is torn or broken. No checkpoint is being written meanwhile."""
    listed = listing(storage)
    others = [name for name in listed.whole if name != newest]
    too_many = [] if keep is None else others[keep - 1 :]
    for name in [*too_many, *listed.broken]:
        # The manifest first: what is half deleted must not look whole.
        storage.delete(within(name, MANIFEST))
        storage.delete(name)
    for name in listed.torn:
        storage.delete(name)


def sweep(storage: Storage) -> None:
    """Delete what runs that were killed have left: torn checkpoints and probes."""
    for name in listing(storage).torn:
        storage.delete(name)
    for name in storage.children():
        if name.startswith(PROBE):
            storage.delete(name)


def candidates(storage: Storage) -> list[str]:
    """Folders that may be resumed from, the newest first; [""] where the place is itself one."""
    if MANIFEST in storage.children():
        return [""]
    listed = listing(storage)
    # The broken ones first, so that whoever passes one over says so.
    return [*sorted(listed.broken, reverse=True), *listed.whole]


def newest_whole(storage: Storage) -> CheckpointReader:
    """For one process: the newest checkpoint that is whole, verified to the last byte.

    Raises CheckpointNotFound where there is none, CheckpointCorrupted where all are broken.
    """
    broken: CheckpointCorrupted | None = None
    for folder in candidates(storage):
        try:
            reader = CheckpointReader(storage, folder)
            reader.verify()
        except CheckpointCorrupted as error:
            broken = broken or error
        else:
            return reader
    if broken is not None:
        raise broken
    raise CheckpointNotFound(storage.path, "there is no whole checkpoint here")
