"""The checkpoints of one place: lists them, finds the newest whole one, deletes old ones."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .errors import CheckpointCorrupted, CheckpointNotFound
from .manifest import MANIFEST, METADATA, read_manifest, within
from .reader import CheckpointReader
from .storage import Storage

_FOLDER = re.compile(r"step-(\d{8,})-([0-9a-f]{8})-(\d+)")
PROBE = ".probe-"


def folder_name(step: int, run: str, number: int) -> str:
    """The folder of a checkpoint. run: eight hex digits, new in every attempt to run, so that no
    attempt writes into the files of another. number: of the checkpoint in the run."""
    return f"step-{step:08d}-{run}-{number}"


@dataclass(frozen=True, slots=True)
class Listing:
    """The folders of a place.

    whole: with a manifest, the newest first.
    broken: with an unreadable manifest.
    unlisted: without a manifest, but with `.metadata`, which is written when all ranks' files are
        there (manifest.py): the save was killed right before its end, or the manifest was lost.
    torn: with neither. No rank 0 has seen all files of such a save.
    """

    whole: list[str]
    broken: list[str]
    unlisted: list[str]
    torn: list[str]


def listing(storage: Storage) -> Listing:
    """The folders of a place, ordered by the time of writing, not by step: a run that started anew
    in the same place resumes from its own checkpoints, although their steps are lower."""
    written: list[tuple[float, str]] = []
    broken, unlisted, torn = [], [], []
    for name in storage.children():
        if not _FOLDER.fullmatch(name):
            continue
        files = storage.sizes(name)
        if MANIFEST not in files:
            (unlisted if METADATA in files else torn).append(name)
            continue
        try:
            written.append((read_manifest(storage, name).time, name))
        except (CheckpointCorrupted, FileNotFoundError):
            broken.append(name)
    return Listing([name for _, name in sorted(written, reverse=True)], broken, unlisted, torn)


def prune(storage: Storage, keep: int | None, newest: str) -> None:
    """Delete old checkpoints now that `newest` is whole: the oldest beyond `keep`, and all torn or
    broken ones. No checkpoint is written at the same time."""
    listed = listing(storage)
    others = [name for name in listed.whole if name != newest]
    too_many = [] if keep is None else others[keep - 1 :]
    for name in [*too_many, *listed.broken]:
        remove(storage, name)
    for name in listed.torn:
        storage.delete(name)


def remove(storage: Storage, folder: str) -> None:
    """Delete a checkpoint. The files that say that it is whole go first, in the reverse order of
    writing: a checkpoint that is half deleted must not look whole."""
    for file in (MANIFEST, METADATA):
        storage.delete(within(folder, file))
    storage.delete(folder)


def sweep(storage: Storage) -> list[str]:
    """Delete the torn checkpoints and probes that killed runs have left. Returns the folders that
    stay although they are no checkpoints: those that lack only the manifest."""
    listed = listing(storage)
    for name in listed.torn:
        storage.delete(name)
    for name in storage.children():
        if name.startswith(PROBE):
            storage.delete(name)
    return listed.unlisted


def why_unlisted(storage: Storage, folder: str) -> str:
    """A sentence on a folder that lacks only the manifest."""
    return (
        f"{storage.path_of(folder)} is not used, because {MANIFEST} is missing in it; its other "
        "files look like those of a whole checkpoint. Either the run that wrote it was killed "
        f"right before the end of the save, or {MANIFEST} was lost later, as in a copy"
    )


def candidates(storage: Storage) -> list[str]:
    """Folders to resume from, the newest first; [""] if the place is itself a checkpoint."""
    if MANIFEST in storage.children():
        return [""]
    listed = listing(storage)
    # Broken ones come first, so that a caller tries them, and can warn of them.
    return [*sorted(listed.broken, reverse=True), *listed.whole]


def newest_whole(storage: Storage) -> CheckpointReader:
    """The newest whole checkpoint, of which one process has verified every byte.

    Raises CheckpointNotFound if there is no checkpoint, CheckpointCorrupted if all are broken.
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
    raise CheckpointNotFound(storage.path, why_none(storage))


def why_none(storage: Storage) -> str:
    """What is to be said of a place without a whole checkpoint."""
    if METADATA in storage.children():
        return (
            f"there is no whole checkpoint here: it has {METADATA}, as checkpoints of "
            f"torch.distributed.checkpoint do, and no {MANIFEST}"
        )
    told = [why_unlisted(storage, folder) for folder in listing(storage).unlisted]
    return ". ".join(["there is no whole checkpoint here", *told])
