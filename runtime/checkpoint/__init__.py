"""Checkpoints: asynchronous, sharded, atomic; read again at any number of ranks.

checkpoints.py  the checkpoints of a run: when they are made, who tells whom
saving.py       one on its way
contents.py sharded_state.py  what a rank has to write, and its copy on the host
pieces.py boxes.py  ranges of tensors and small objects; ranges as boxes
shard_file.py manifest.py  the format, torch.distributed.checkpoint's with checksums
reader.py restore.py  one that is whole, and how objects get their state from it
catalog.py storage.py  those of one place; folders, and what fsspec knows
export.py       one file in the plain format
config.py errors.py  what a user says, and what a user is told
"""

from .config import CheckpointConfig
from .format.errors import (
    CheckpointCorrupted,
    CheckpointError,
    CheckpointMismatch,
    CheckpointNotFound,
    CheckpointPlaceUnusable,
    CheckpointWriteFailed,
)
from .saving import Saving, SavingTimes

__all__ = [
    "CheckpointConfig",
    "CheckpointCorrupted",
    "CheckpointError",
    "CheckpointMismatch",
    "CheckpointNotFound",
    "CheckpointPlaceUnusable",
    "CheckpointWriteFailed",
    "Saving",
    "SavingTimes",
]
