"""`CheckpointConfig`: where checkpoints are kept, how often one is saved, and how many stay."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from chorusline.collectives.contract.argument_kinds import check_kinds
from chorusline.collectives.contract.deadlines import Seconds, checked_seconds
from chorusline.collectives.contract.plain_numbers import whole

from .format.storage import is_url

AUTO, NEVER = "auto", "never"


@dataclass(frozen=True)
class CheckpointConfig:
    """Where and when a session saves checkpoints; storage_path and num_to_keep are as in Ray Train.

        checkpoint = cl.CheckpointConfig("checkpoints", every_n_steps=100, num_to_keep=2)

    storage_path: a folder that all ranks see (made absolute), or an fsspec URL (s3://bucket/run).
    num_to_keep: the number of newest complete checkpoints to keep; None keeps all. Older ones are
        deleted once a newer one is complete. Damaged ones do not count.
    every_n_steps: steps between saves at batches of `ctx.shard`; None: save only at `ctx.save()`.
    resume: "auto" resumes from the newest complete checkpoint of storage_path, if there is one;
        "never" starts at step 0 and leaves old checkpoints, as far as num_to_keep does; else the
        path of a checkpoint, or of a folder of checkpoints, to resume from.
    timeout_s: seconds for all ranks to write one checkpoint; after that the checkpoint is given up.
        A rank that does not call ctx.save() at all is found earlier, by the session's timeout_s.
        A run that begins gives its ranks the same time to look for a checkpoint.
    weights_only: as in torch.load: a resume loads tensors and plain values, and raises
        CheckpointUntrusted for other objects, whose loading runs code that the checkpoint names.
        False: load every object. Only for checkpoints whose writer you trust.
    Raises TypeError and ValueError for a field of another type or range.
    """

    storage_path: str | Path
    num_to_keep: int | None = None
    every_n_steps: int | None = None
    resume: str | Path = AUTO
    timeout_s: Seconds = 1800.0
    weights_only: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.storage_path, str | Path) or not str(self.storage_path):
            raise TypeError(
                f"storage_path must be a path or a URL, got {type(self.storage_path).__name__} "
                f"{self.storage_path!r}"
            )
        if not isinstance(self.resume, str | Path) or not str(self.resume):
            raise TypeError(
                f'resume must be "{AUTO}", "{NEVER}" or the path of a checkpoint, got '
                f"{self.resume!r}"
            )
        # Each worker has its own working directory, so a relative path would differ.
        object.__setattr__(self, "storage_path", _absolute(self.storage_path))
        if self.resume not in (AUTO, NEVER):
            object.__setattr__(self, "resume", _absolute(self.resume))
        for name in ("num_to_keep", "every_n_steps"):
            if (given := getattr(self, name)) is None:
                continue
            if (count := whole(given)) is None or count < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, got {given!r}")
            object.__setattr__(self, name, count)
        object.__setattr__(self, "timeout_s", checked_seconds(self.timeout_s))
        check_kinds(CheckpointConfig.__init__, vars(self))

    @property
    def deadline_s(self) -> float:
        """timeout_s in seconds."""
        return checked_seconds(self.timeout_s)


def _absolute(path: str | Path) -> str:
    return str(path) if is_url(path) else str(Path(path).expanduser().absolute())
