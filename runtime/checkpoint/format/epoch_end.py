"""The note that a checkpoint is that of an epoch's end: a small file beside its manifest.

It is written after the checkpoint, so it is no part of it: a checkpoint without the note, a reader
that does not know it and a copy that has left it out differ from the others only in that the body
of the epoch runs once more after a resume, without batches.
"""

from __future__ import annotations

import hashlib
import json

from .manifest import MANIFEST, within
from .storage import Storage

NOTE = "epoch-end.json"


def write_note(storage: Storage, folder: str) -> None:
    """Raises FileNotFoundError if the checkpoint is gone."""
    storage.write(within(folder, NOTE), _note(storage, folder))


def has_note(storage: Storage, folder: str) -> bool:
    """Whether there is a whole note, and it belongs to the manifest that is there."""
    try:
        return storage.read(within(folder, NOTE)) == _note(storage, folder)
    except OSError:
        return False


def _note(storage: Storage, folder: str) -> bytes:
    digest = hashlib.sha256(storage.read(within(folder, MANIFEST))).hexdigest()
    return json.dumps({"format": 1, "manifest_sha256": digest}).encode()
