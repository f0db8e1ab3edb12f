"""Before a run begins: check the storage, and choose the checkpoint to resume from."""

from __future__ import annotations

import contextlib
import logging
import socket
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from chorusline.collectives.contract.errors import name_ranks
from chorusline.collectives.group import Group
from chorusline.collectives.objects.blocking import all_gather_object, broadcast_object

from .format import catalog
from .format.errors import (
    CheckpointCorrupted,
    CheckpointError,
    CheckpointNotFound,
    CheckpointPlaceUnusable,
)
from .format.reader import CheckpointReader
from .format.storage import Storage

logger = logging.getLogger(__name__)

T = TypeVar("T")
_PAUSES_S = (0.5, 2.0)


def probe(storage: Storage, group: Group, run: str, *, has_trained: bool) -> bool:
    """Check that all ranks can write to the storage, and that rank 0 sees what they write.

    run: hex digits in the names of this run's probes.
    has_trained: this rank has trained in this run before. If any has, a storage that cannot be
    written to, as a disk that is full for a while, is a warning: the next checkpoint may have room.

    Returns whether the storage can be used. Raises CheckpointPlaceUnusable on all ranks.
    """
    mine = f"{catalog.PROBE}{run}-{group.rank}"
    trouble = ""
    try:
        storage.write(mine, mine.encode())
        # A place may take bytes, and give others back.
        if storage.read(mine) != mine.encode():
            trouble = "the bytes read back are not the bytes written"
    # A run that begins sweeps the probes of others away.
    except FileNotFoundError as error:
        trouble = (
            "its file was deleted at once, perhaps by another run that starts there; only one "
            f"run at a time may use a storage path: {error}"
        )
    except UnicodeEncodeError as error:
        trouble = (
            f"this rank's locale has no bytes for {error.object!a}; set PYTHONUTF8=1 for all "
            "ranks, or another locale than C (LANG=C.UTF-8)"
        )
    except Exception as error:
        trouble = f"{type(error).__name__}: {error}"
    host = socket.gethostname()
    probes = all_gather_object(group, (trouble, host, has_trained))
    unseen: list[int] = []
    if group.rank == 0 and not any(trouble for trouble, *_ in probes):
        with contextlib.suppress(Exception):  # What it wrote there could be read back.
            there = storage.children()
            unseen = [
                rank
                for rank in range(len(probes))
                if there and f"{catalog.PROBE}{run}-{rank}" not in there
            ]
    unseen = broadcast_object(group, unseen)  # No rank deletes its probe before rank 0 has looked.
    with contextlib.suppress(Exception):  # The next run deletes it.
        storage.delete(mine)
    # Now all ranks raise, or none: each has the replies of all.
    for rank, (trouble, host, _) in enumerate(probes):
        if not trouble:
            continue
        unusable = CheckpointPlaceUnusable(
            storage.path, f"rank {rank} on {host} cannot write there ({trouble})"
        )
        # At the beginning nothing is lost by an error; later it would cost the training so far.
        if not any(has_trained for *_, has_trained in probes):
            raise unusable
        if group.rank == 0:
            logger.warning("Training continues, but %s", unusable)
        return False
    if unseen:
        hosts = sorted({probes[rank][1] for rank in unseen})
        raise CheckpointPlaceUnusable(
            storage.path,
            f"rank 0 on {probes[0][1]} does not see what {name_ranks(unseen)} on "
            f"{', '.join(hosts)} write there, so the path names a different place for each",
        )
    return True


def candidates_on_all(
    storage: Storage, group: Group, run: str = "", *, timeout_s: float
) -> tuple[list[str], str]:
    """The folders to resume from, as rank 0 finds them; or why it cannot look there. run: as in
    `catalog.candidates`. timeout_s: seconds that rank 0 may take."""
    found: tuple[list[str], str] = [], ""
    if group.rank == 0:
        try:
            found = _patiently(lambda: catalog.candidates(storage, run)), ""
        except Exception as error:
            found = [], f"rank 0 cannot look there ({type(error).__name__}: {error})"
    # It may be slow where a place has many checkpoints; a collective that hangs is found earlier.
    folders, trouble = broadcast_object(group, found, timeout_s=timeout_s)
    return folders, trouble


def _patiently(call: Callable[[], T]) -> T:
    """What `call` returns. An error of the storage, or a lack of memory, is given a few seconds to
    go by."""
    for pause_s in _PAUSES_S:
        try:
            return call()
        # What is not there does not come by waiting.
        except FileNotFoundError:
            raise
        except (OSError, MemoryError) as error:
            logger.warning("%s: %s; retrying", type(error).__name__, error)
            time.sleep(pause_s)
    return call()


def swept(storage: Storage) -> list[str]:
    """As `catalog.sweep`. What cannot be deleted now is a warning: the next run tries again."""
    try:
        return catalog.sweep(storage)
    except Exception as error:
        warnings.warn(
            f"the files that unfinished runs left in {storage.path} could not be deleted: "
            f"{type(error).__name__}: {error}",
            stacklevel=2,
        )
        return []


def choose(
    storage: Storage,
    group: Group,
    *,
    may_be_absent: bool,
    weights_only: bool,
    check: Callable[[CheckpointReader], None],
    run: str = "",
    timeout_s: float,
) -> tuple[CheckpointReader | None, list[str]]:
    """The newest complete checkpoint, the same on all ranks; each rank verifies a share of it. With
    it come the folders of those that were found corrupted. weights_only: of the reader.

    check: raises CheckpointCorrupted for what cannot be a checkpoint of a run.
    run: as in `catalog.candidates`.
    timeout_s: seconds for all ranks to look for the checkpoint, and to verify it.

    A corrupted checkpoint is skipped with a warning, and so is one whose manifest cannot be read.
    Raises the error of the first of them if there is no other one; CheckpointNotFound if there is
    none, unless `may_be_absent`. Raises CheckpointPlaceUnusable if the storage does not answer: an
    older checkpoint is not used because the newest one could not be read for a while.
    """
    found_one: CheckpointReader | None = None
    folders, why = candidates_on_all(storage, group, run, timeout_s=timeout_s)
    if why:
        raise CheckpointPlaceUnusable(storage.path, why)
    refused: CheckpointError | None = None
    corrupted: list[str] = []
    for folder in folders:
        trouble: CheckpointError | None = None
        reader = None
        try:
            reader = _patiently(
                partial(CheckpointReader, storage, folder, weights_only=weights_only)
            )
            check(reader)
            _patiently(partial(reader.verify, group.rank, group.size))
        except CheckpointCorrupted as error:
            trouble = error
        except FileNotFoundError:
            trouble = CheckpointCorrupted(storage.path_of(folder), "its manifest is gone")
        except Exception as error:
            # Without a reader it is this manifest that cannot be used. With one, the storage does
            # not answer: an older checkpoint would take steps back for a failure that may pass.
            what = f"rank {group.rank} cannot read it ({type(error).__name__}: {error})"
            trouble = (
                CheckpointError(storage.path_of(folder), what)
                if reader is None
                else CheckpointPlaceUnusable(storage.path, f"{folder}: {what}")
            )
        # All ranks have the same list, so they all take this checkpoint, or all the next one.
        everybodys = all_gather_object(group, trouble, timeout_s)
        troubles = [one for one in everybodys if one is not None]
        if not troubles:
            found_one = reader
            break
        # First on all ranks: one that cannot read must not let the others take an older one.
        for one in troubles:
            if isinstance(one, CheckpointPlaceUnusable):
                raise one
        refused = refused or troubles[0]
        # Pruning then keeps whole ones in its place.
        if isinstance(troubles[0], CheckpointCorrupted):
            corrupted.append(folder)
    if refused is not None:
        if found_one is None:
            raise refused
        if group.rank == 0:
            warnings.warn(
                f"{refused}. The checkpoint {found_one.path}, of step {found_one.manifest.step}, "
                "is used instead",
                stacklevel=2,
            )
    # Who names a checkpoint does not want to begin afresh.
    if found_one is None and not may_be_absent:
        raise CheckpointNotFound(storage.path, catalog.why_none(storage))
    return found_one, corrupted


def warn_of_unlisted(storage: Storage, folder: str, used: CheckpointReader | None) -> None:
    """Say that a folder that lacks only the manifest is not used, and what is used in its place."""
    instead = (
        f"the run resumes from {used.path}, of step {used.manifest.step}"
        if used is not None
        else "the run starts afresh"
    )
    warnings.warn(
        f"{catalog.why_unlisted(storage, folder)}. So {instead}. The folder stays: put the file "
        "back to resume from it, or delete the folder",
        stacklevel=2,
    )
