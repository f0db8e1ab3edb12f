"""The errors of checkpoints, below the root of Chorusline's errors.

    ChoruslineError
    └── CheckpointError
        ├── CheckpointPlaceUnusable  the storage cannot keep checkpoints; raised before training
        ├── CheckpointWriteFailed    a checkpoint could not be written; earlier ones are whole
        ├── CheckpointNotFound       the requested place has no checkpoint
        ├── CheckpointCorrupted      a checkpoint is torn or changed; no byte of it is used
        ├── CheckpointMismatch       a whole checkpoint of another model, optimizer or object
        └── CheckpointUntrusted      loading it would run code; only with weights_only=False

Fields are positional and the text is made in `__str__`, as in
`chorusline.collectives.contract.errors`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from chorusline.collectives.contract.errors import ChoruslineError, plain


@dataclass(eq=False, repr=False)
class CheckpointError(ChoruslineError):
    """Base class of the errors of checkpoints.

        try:
            cl.run(train, checkpoint=cl.CheckpointConfig("checkpoints"))
        except cl.CheckpointError as error:
            print(error.path, error.detail)

    path: the checkpoint, its folder or one of its files. detail: what is wrong with it, in one line
    or several.
    """

    path: str
    detail: str

    def __post_init__(self) -> None:
        # It may have names that somebody else has written into the checkpoint.
        self.detail = "\n".join(map(plain, self.detail.split("\n")))
        super().__post_init__()

    def __str__(self) -> str:
        return f"checkpoint {self.path}: {self.detail}"


class CheckpointPlaceUnusable(CheckpointError):
    """The place cannot keep checkpoints. Raised before the train function is called.

    Example:

        try:
            cl.run(train, checkpoint=cl.CheckpointConfig("/mnt/shared/checkpoints"))
        except cl.CheckpointPlaceUnusable as error:
            print(error.path, error.detail)
    """

    def __str__(self) -> str:
        return (
            f"checkpoints cannot be kept in {self.path}: {self.detail}. Give "
            "CheckpointConfig(storage_path=...) a folder that all ranks can see and write to"
        )


@dataclass(eq=False, repr=False)
class CheckpointWriteFailed(CheckpointError):
    """A checkpoint could not be written.

        try:
            ctx.save().wait()
        except cl.CheckpointWriteFailed as error:
            print(error.ranks, error.detail, error.remedy)

    ranks: the ranks that caused it. remedy: what to do.

    is_by_loss: ranks were lost while it was written. Then the error ends a generation, not the run.
    """

    ranks: Sequence[int]
    remedy: str = "make room or repair the storage"
    is_by_loss: bool = False

    def __str__(self) -> str:
        if self.is_by_loss:
            return (
                f"checkpoint {self.path} was not completed, because ranks were lost while it was "
                f"written: {self.detail}. Earlier checkpoints are complete and stay"
            )
        return (
            f"checkpoint {self.path} was not written, on rank {', '.join(map(str, self.ranks))}: "
            f"{self.detail}. Earlier checkpoints are complete and stay; {self.remedy}, and run "
            "again to resume from the newest checkpoint"
        )


class CheckpointNotFound(CheckpointError):
    """The given place has no complete checkpoint.

    Example:

        checkpoint = cl.CheckpointConfig("checkpoints", resume="checkpoints/of-last-night")
        try:
            cl.run(train, checkpoint=checkpoint)
        except cl.CheckpointNotFound as error:
            print(error.path)
    """


class CheckpointCorrupted(CheckpointError):
    """A file does not contain what was written to it. path: the file.

    Example:

        checkpoint = cl.CheckpointConfig("checkpoints", resume="checkpoints/of-last-night")
        try:
            cl.run(train, checkpoint=checkpoint)
        except cl.CheckpointCorrupted as error:
            print(error.path, error.detail)
    """

    def __str__(self) -> str:
        return f"{self.path} is torn or corrupted: {self.detail}; nothing of it was used"


class CheckpointMismatch(CheckpointError):
    """The checkpoint holds other objects than those that are registered now.

    Example:

        try:
            model = ctx.register("model", cl.DistributedDataParallel(net))
        except cl.CheckpointMismatch as error:
            print(error.detail)  # The first parameters that differ.
            raise
    """

    def __str__(self) -> str:
        return f"checkpoint {self.path} does not fit: {self.detail}"


class CheckpointUntrusted(CheckpointError):
    """An object in the checkpoint is more than tensors and plain values, so loading it would run
    code that the checkpoint names. detail: the object, and its classes and functions.

        try:
            model = ctx.register("model", cl.DistributedDataParallel(net))
        except cl.CheckpointUntrusted as error:
            print(error.detail)
            raise
    """

    def __str__(self) -> str:
        return (
            f"checkpoint {self.path}: {self.detail}, and loading it would run code that the "
            "checkpoint names. If you trust its writer, pass "
            "CheckpointConfig(weights_only=False), or allow these names with "
            "torch.serialization.add_safe_globals at the beginning of the train function"
        )
