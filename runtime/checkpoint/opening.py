"""Before a run begins: check the storage, and choose the checkpoint to resume from."""

from __future__ import annotations

import contextlib
import logging
import socket
import warnings

from chorusline.collectives import Group
from chorusline.collectives.objects.blocking import all_gather_object, broadcast_object

from .format import catalog
from .format.errors import CheckpointCorrupted, CheckpointNotFound, CheckpointPlaceUnusable
from .format.reader import CheckpointReader
from .format.storage import Storage

logger = logging.getLogger(__name__)


def probe(storage: Storage, group: Group, run: str, *, goes_on: bool) -> bool:
    """Check that all ranks can write to the storage, and that rank 0 sees what they write.

    run: hex digits in the names of this run's probes.
    goes_on: this rank has trained in this run before. If any has, a storage that cannot be written
    to, as a disk that is full for a while, is a warning: there may be room at the next checkpoint.

    Returns whether the storage can be used. Raises CheckpointPlaceUnusable on all ranks.
    """
    mine = f"{catalog.PROBE}{run}-{group.rank}"
    trouble = ""
    try:
        storage.write(mine, mine.encode())
        if storage.read(mine) != mine.encode():
            trouble = "the bytes read back are not the bytes written"
    except FileNotFoundError as error:
        trouble = (
            f"what it wrote was deleted at once, as by another run that begins there; only one run "
            f"at a time may use a storage path: {error}"
        )
    except Exception as error:
        trouble = f"{type(error).__name__}: {error}"
    host = socket.gethostname()
    probes = all_gather_object(group, (trouble, host, goes_on))
    unseen: list[int] = []
    if group.rank == 0:
        there = [] if any(word for word, *_ in probes) else storage.children()
        unseen = [
            rank
            for rank, (word, *_) in enumerate(probes)
            if not word and there and f"{catalog.PROBE}{run}-{rank}" not in there
        ]
    unseen = broadcast_object(group, unseen)  # No rank deletes its probe before rank 0 has looked.
    with contextlib.suppress(OSError):
        storage.delete(mine)
    for rank, (word, host, _) in enumerate(probes):
        if not word:
            continue
        unusable = CheckpointPlaceUnusable(
            storage.path, f"rank {rank} on {host} cannot write there ({word})"
        )
        if not any(has_trained for *_, has_trained in probes):
            raise unusable
        if group.rank == 0:
            logger.warning("Training goes on, but %s", unusable)
        return False
    if unseen:
        hosts = sorted({probes[rank][1] for rank in unseen})
        raise CheckpointPlaceUnusable(
            storage.path,
            f"rank 0 on {probes[0][1]} does not see what ranks {unseen} on {', '.join(hosts)} "
            "write there, so the path names a different place for each",
        )
    return True


def choose(
    storage: Storage, group: Group, *, may_be_absent: bool, weights_only: bool
) -> tuple[CheckpointReader | None, list[str]]:
    """The newest whole checkpoint, the same on all ranks; each rank verifies a share of it. With
    it come the folders of those that were found corrupted. weights_only: of the reader.

    A corrupted checkpoint is skipped with a warning. Raises CheckpointCorrupted if all are
    corrupted; CheckpointNotFound if there is none, unless `may_be_absent`.
    """
    found_one: CheckpointReader | None = None
    found = catalog.candidates(storage) if group.rank == 0 else []
    folders: list[str] = broadcast_object(group, found)
    refused: CheckpointCorrupted | None = None
    corrupted: list[str] = []
    for folder in folders:
        trouble: CheckpointCorrupted | None = None
        reader = None
        try:
            reader = CheckpointReader(storage, folder, weights_only=weights_only)
            reader.verify(group.rank, group.size)
        except CheckpointCorrupted as error:
            trouble = error
        except FileNotFoundError:
            trouble = CheckpointCorrupted(storage.path_of(folder), "its manifest is gone")
        troubles = [word for word in all_gather_object(group, trouble) if word is not None]
        if not troubles:
            found_one = reader
            break
        refused = refused or troubles[0]
        corrupted.append(folder)
    if refused is not None:
        if found_one is None:
            raise refused
        if group.rank == 0:
            warnings.warn(
                f"{refused}. The checkpoint before it is used: {found_one.path}, of step "
                f"{found_one.manifest.step}",
                stacklevel=2,
            )
    if found_one is None and not may_be_absent:
        raise CheckpointNotFound(storage.path, catalog.why_none(storage))
    return found_one, corrupted


def warn_of_unlisted(storage: Storage, folder: str, used: CheckpointReader | None) -> None:
    """Say that a folder that lacks only the manifest is not used, and what is used in its place."""
    instead = (
        f"the run goes on from {used.path}, of step {used.manifest.step}"
        if used is not None
        else "the run starts afresh"
    )
    warnings.warn(
        f"{catalog.why_unlisted(storage, folder)}. So {instead}. The folder stays: put the file "
        "back to resume from it, or delete the folder",
        stacklevel=2,
    )
