"""Checkpoints: asynchronous, sharded, atomic; read again at any number of ranks.

config.py       the user's settings
checkpoints.py  the checkpoints of a run: when they are saved, and how the ranks agree
writing.py      a checkpoint in the thread that writes it
saving.py       a checkpoint in flight, as the caller has it
opening.py      checks of the storage, and the choice of a checkpoint to resume from
contents.py sharded_state.py  the part that a rank writes, and its copy on the host
restore.py      loads the state of registered objects from a checkpoint
export.py       one file in the plain format
format/         the files: torch.distributed.checkpoint's format with checksums, and the errors
"""
