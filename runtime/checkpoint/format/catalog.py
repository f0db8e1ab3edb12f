"""The checkpoints of one place: lists them, finds the newest whole one, deletes old ones."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection
from dataclasses import dataclass

from .errors import CheckpointCorrupted, CheckpointNotFound
from .manifest import MANIFEST, METADATA, read_manifest, within
from .reader import CheckpointReader
from .storage import Storage

_FOLDER = re.compile(r"step-(\d{8,})-([0-9a-f]{8}|[0-9a-f]{16})-(\d+)")
PROBE = ".probe-"


def folder_name(step: int, run: str, number: int) -> str:
    """The folder of a checkpoint.

    run: eight hex digits, new in every attempt to run, so that no attempt writes into the files of
        another; before them, eight that all attempts of a run have in common, if they are known.
    number: of the checkpoint in the attempt.
    """
    return f"step-{step:08d}-{run}-{number}"


def _is_of(run: str, folder: str) -> bool:
    """Whether a checkpoint is of a run. run: the eight hex digits that its attempts have in common;
    empty for any run."""
    found = _FOLDER.fullmatch(folder)
    return not run or (found is not None and len(found[2]) == 16 and found[2].startswith(run))


@dataclass(frozen=True, slots=True)
class Listing:
    """The folders of a place.

    written: with a manifest, the newest first.
    times: when each of `written` was written.
    damaged: those of `written` that lack a file, or have one that is too short or too long.
    broken: with a manifest that is damaged, or that no save has written.
    unread: those whose files or manifest could not be read now, for an error of the storage.
    unlisted: without a manifest, but with `.metadata`, which is written when all ranks' files are
        there (manifest.py): the save was killed right before its end, or the manifest was lost.
    """

    written: list[str]
    times: list[float]
    damaged: set[str]
    broken: list[str]
    unread: list[str]
    unlisted: list[str]


def listing(storage: Storage, only: str = "") -> Listing:
    """The folders of a place, ordered by the time of writing, not by step: a run that started again
    in the same place resumes from its own checkpoints, although their steps are lower. only: the
    one folder to look at; empty: all."""
    written: list[tuple[float, str]] = []
    broken: list[str] = []
    unread: list[str] = []
    unlisted: list[str] = []
    damaged: set[str] = set()
    for name in [only] if only else storage.children():
        if not _FOLDER.fullmatch(name):
            continue
        try:
            files = storage.sizes(name)
            if MANIFEST not in files:
                if METADATA in files:
                    unlisted.append(name)
                continue
            manifest = read_manifest(storage, name)
        except (CheckpointCorrupted, FileNotFoundError):
            broken.append(name)
            continue
        except OSError:  # The storage does not answer: nothing is known of this one.
            unread.append(name)
            continue
        written.append((manifest.time, name))
        # The manifest is whole, and a file of it is gone, or has another size.
        if METADATA not in files or not manifest.files.items() <= files.items():
            damaged.add(name)
    written.sort(reverse=True)
    names, times = [name for _, name in written], [time for time, _ in written]
    return Listing(names, times, damaged, broken, unread, unlisted)


def prune(storage: Storage, keep: int | None, newest: str, corrupted: Collection[str] = ()) -> bool:
    """Delete old checkpoints now that `newest` is written: of those that are older, all after the
    `keep` newest whole ones.
    Torn ones stay until the next run begins (`sweep`): ranks that have given `newest` up may be
    writing the next one. Returns whether `newest` is whole; if it is not, nothing is deleted.
    Raises OSError if it cannot be read now.

    A damaged checkpoint is not counted, and stays as long as whole ones before it do. Damage is
    seen by the sizes of files, which come with the list of a folder; to read all bytes would make
    each save as slow as a load. corrupted: folders whose bytes are known to be wrong.
    """
    # Each folder costs several calls of the storage: the others matter only if some are to go.
    listed = listing(storage, newest if keep is None else "")
    if newest in listed.unread:
        raise OSError(f"{storage.path_of(newest)} cannot be read")
    # Another run that began here may have deleted its data while the manifest was written.
    if newest not in listed.written or newest in listed.damaged:
        return False
    if keep is None:
        return True
    num_whole = 1
    for name in listed.written[listed.written.index(newest) + 1 :]:
        if num_whole >= keep:
            remove(storage, name)
        elif name not in listed.damaged and name not in corrupted:
            num_whole += 1
    for name in listed.broken if num_whole >= keep else ():  # Of an age that is not known.
        remove(storage, name)
    return True


def remove(storage: Storage, folder: str) -> None:
    """Delete a checkpoint. The files that say that it is whole go first: a checkpoint that is half
    deleted must not look whole. The manifest is the second: with `.metadata` alone it would look
    like one whose manifest was lost, which no run deletes."""
    for file in (METADATA, MANIFEST):
        storage.delete(within(folder, file))
    storage.delete(folder)


def sweep(storage: Storage) -> list[str]:
    """Delete the torn checkpoints and probes that killed runs have left. Returns the folders that
    stay although they are no checkpoints: those that lack only the manifest."""
    unlisted: list[str] = []
    for name in storage.children():
        if name.startswith(PROBE):
            storage.delete(name)
            continue
        if not _FOLDER.fullmatch(name):
            continue
        try:
            # The names of its files say enough, and a place may have hundreds of manifests.
            files = storage.children(name)
        except OSError:  # Nothing is known of this one: it is left to the next run.
            continue
        if MANIFEST in files:
            continue
        if METADATA in files:
            unlisted.append(name)
        else:
            storage.delete(name)
    return unlisted


def why_unlisted(storage: Storage, folder: str) -> str:
    """A sentence on a folder that lacks only the manifest."""
    return (
        f"{storage.path_of(folder)} is not used, because {MANIFEST} is missing in it; its other "
        "files look like those of a complete checkpoint. Either the run that wrote it was killed "
        f"right before the end of the save, or {MANIFEST} was lost later, as in a copy"
    )


def candidates(storage: Storage, run: str = "") -> list[str]:
    """Folders to resume from, the newest first, among them "" if the place is itself a checkpoint.

    run: only those of this run, by the eight hex digits of `folder_name`; empty: of any."""
    listed = listing(storage)
    # Broken ones come first, so that a caller tries them, and can warn of them.
    found = [*sorted(listed.broken + listed.unread, reverse=True), *listed.written]
    if run:
        return [name for name in found if _is_of(run, name)]
    if MANIFEST in storage.children():
        found.insert(_num_newer(storage, listed), "")
    return found


def _num_newer(storage: Storage, listed: Listing) -> int:
    """How many of the candidates come before the checkpoint that the place itself is."""
    if not listed.written:
        return 0
    try:
        written_at = read_manifest(storage, "").time
    except (CheckpointCorrupted, OSError):
        return 0
    newer = sum(time > written_at for time in listed.times)
    return len(listed.broken) + len(listed.unread) + newer


def newest_time(storage: Storage) -> float:
    """When the newest checkpoint of a place was written; 0 if there is none."""
    times = listing(storage).times
    if MANIFEST in storage.children():
        with contextlib.suppress(CheckpointCorrupted):
            times.append(read_manifest(storage, "").time)
    return max(times, default=0.0)


def newest_whole(storage: Storage) -> CheckpointReader:
    """The newest complete checkpoint, of which one process has verified every byte.

    Raises CheckpointNotFound if there is no checkpoint, CheckpointCorrupted if all are broken, and
    OSError if it cannot be read, or if the manifest of none can be.
    """
    broken: CheckpointCorrupted | OSError | None = None
    for folder in candidates(storage):
        try:
            reader = CheckpointReader(storage, folder)
        except (CheckpointCorrupted, OSError) as error:
            # The error of the newest one is told, as that is the one that was wanted.
            broken = broken or error
            continue
        try:
            reader.verify()
        except CheckpointCorrupted as error:
            broken = broken or error
        else:
            return reader
    if broken is not None:
        raise broken
    raise CheckpointNotFound(storage.path, why_none(storage))


def why_none(storage: Storage) -> str:
    """What is to be said of a place without a complete checkpoint."""
    if METADATA in storage.children():
        return (
            f"there is no complete checkpoint here: it has {METADATA}, as checkpoints of "
            f"torch.distributed.checkpoint do, and no {MANIFEST}"
        )
    reasons = [why_unlisted(storage, folder) for folder in listing(storage).unlisted]
    return ". ".join(["there is no complete checkpoint here", *reasons])
