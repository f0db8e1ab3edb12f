"""What can go wrong with checkpoints, below the root of all our errors.

    ChoruslineError
    └── CheckpointError
        ├── CheckpointPlaceUnusable  the place cannot take checkpoints; found before training starts
        ├── CheckpointWriteFailed    one could not be written; those before it are whole
        ├── CheckpointNotFound       there is none where one was asked for
        ├── CheckpointCorrupted      one is there, and torn or changed: no byte of it is used
        └── CheckpointMismatch       one is whole, and of another model, optimizer or object

Fields are positional and the text is made in `__str__`, as in `collectives.contract.errors`.
"""

from __future__ import annotations

from collectives.contract.errors import ChoruslineError


class CheckpointError(ChoruslineError):
    """path: of the checkpoint, its folder or one file. detail: what is wrong with it."""

    def __init__(self, path: str, detail: str) -> None:
        super().__init__(path, detail)
        self.path = path
        self.detail = detail

    def __str__(self) -> str:
        return f"checkpoint {self.path}: {self.detail}"


class CheckpointPlaceUnusable(CheckpointError):
    """Checkpoints cannot be kept in this place. Raised before the train function is called."""

    def __str__(self) -> str:
        return (
            f"checkpoints cannot be kept in {self.path}: {self.detail}. Give "
            "CheckpointConfig(storage_path=...) a folder that all ranks can write to and all see"
        )


class CheckpointWriteFailed(CheckpointError):
    """A checkpoint was given up. ranks: those to blame."""

    def __init__(self, path: str, detail: str, ranks: tuple[int, ...]) -> None:
        ChoruslineError.__init__(self, path, detail, ranks)
        self.path = path
        self.detail = detail
        self.ranks = ranks

    def __str__(self) -> str:
        return (
            f"checkpoint {self.path} was not written, on rank "
            f"{', '.join(map(str, self.ranks))}: {self.detail}. Checkpoints written before it are "
            "whole and stay; make room or mend the place, and run again to go on from the newest"
        )


class CheckpointNotFound(CheckpointError):
    """No whole checkpoint is where one was asked for by name."""


class CheckpointCorrupted(CheckpointError):
    """What is there is not what was written. path: of the file."""

    def __str__(self) -> str:
        return f"{self.path} is torn or corrupted: {self.detail}; nothing of it was used"


class CheckpointMismatch(CheckpointError):
    """The checkpoint was saved of something else than what is registered now."""

    def __str__(self) -> str:
        return f"checkpoint {self.path} does not fit: {self.detail}"
