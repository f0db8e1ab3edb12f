"""Whether the newest checkpoint is that of an epoch's end, and the note that says so.

A save that is the last thing of an epoch's body cannot know that it is: only when the loop over
`ctx.epochs` continues is it known that nothing came after it. So then the ranks compare what they
would save now with what they have saved (`LastSave.holds`), byte by byte, and tell rank 0, which
writes the note (`EpochEnd`). A resume from such a checkpoint begins with the next epoch. If
anything differs (a schedule has stepped after the save), or if the run was killed before, the
epoch is entered again, so that the rest of its body runs.

There is no cheaper comparison that is exact: a version counter of a tensor does not see what
`tensor.data` writes. It costs what the save's own copy costs, once in an epoch with a save, and
only where no step was taken and no iteration begun since the save.
"""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from chorusline.collectives.contract.errors import ChoruslineError, StoreTimeout
from chorusline.collectives.stores.store import PrefixStore

from ..data_parallel.same_model import without_lazy_bits
from .format.epoch_end import write_note
from .format.pieces import Contents, Path, TensorRange
from .writing import Writing

_LOOK_S = 0.5
_YES, _NO = b"1", b"0"


@dataclass(frozen=True, slots=True)
class LastSave:
    """What this rank has put into the newest checkpoint.

    live: the ranks whose state was current.
    progress: this rank's position in its data.
    ranges: the copies on the host, which stay until the next save.
    writings: the checkpoints with this content; more than one if it was saved to several places.
    """

    step: int
    live: Sequence[int]
    progress: Any
    ranges: Sequence[TensorRange]
    leaves: dict[Path, bytes]
    writings: list[Writing]

    def holds(self, step: int, progress: Any, collect: Callable[[Sequence[int]], Contents]) -> bool:
        """Whether a save would write the same now, apart from iterations that have ended meanwhile.

        collect: finds what this rank would save, without a copy."""
        if step != self.step or _without_ends(progress) != _without_ends(self.progress):
            return False
        # Last, as it compares all bytes.
        now = collect(self.live)
        return now.leaves == self.leaves and (
            [_key(one) for one in now.ranges] == [_key(one) for one in self.ranges]
            and all(map(_same_bytes, now.ranges, self.ranges))
        )


def _without_ends(progress: Any) -> Any:
    """A position in the data without whether iterations are over: a save by `every_n_steps` comes
    between the last batch and the iteration's end."""
    if isinstance(progress, dict):
        return {key: _without_ends(below) for key, below in progress.items() if key != "is_over"}
    return progress


def _key(ranged: TensorRange) -> tuple[object, ...]:
    return ranged.path, ranged.shape, ranged.dtype, ranged.start, ranged.stop


def _same_bytes(now: TensorRange, saved: TensorRange) -> bool:
    (copy,) = saved.parts
    at = 0
    for part in now.parts:
        before = copy[at : at + part.numel()]
        at += part.numel()
        # As bytes: a NaN is the same NaN here.
        if not torch.equal(_bytes(part).to(before.device), _bytes(before)):
            return False
    return True


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return without_lazy_bits(tensor).contiguous().view(torch.uint8)


class EpochEnd(threading.Thread):
    """One rank's word on one checkpoint, and on rank 0 the note, if all ranks say yes.

    is_end: whether this rank's state is still the checkpoint's.
    """

    def __init__(self, writing: Writing, is_end: bool) -> None:
        # A daemon thread, so that a process that has to exit does not wait for a disk.
        super().__init__(name=f"epoch-end-{writing.saving.step}", daemon=True)
        self._writing = writing
        self._is_end = is_end
        self._give_up_at = float("inf")

    def finish(self) -> None:
        """Wait until the note is written, if all ranks say yes within the group's timeout_s."""
        self._give_up_at = time.monotonic() + self._writing.group.timeout_s
        self.join()

    def run(self) -> None:
        writing = self._writing
        group = writing.group
        # There is nothing that a note could stand beside.
        if not writing.saving.is_whole_at_the_end():
            return
        store = PrefixStore(f"checkpoint/{writing.key_prefix}/end", group._store)
        # A save after this one has taken it out, and now there are keys of it again.
        if group.rank == 0 and writing.key_prefix not in writing.ended_saves:
            writing.ended_saves.append(writing.key_prefix)
        # If the driver or a rank is lost, there is no note, and the epoch is entered again.
        with contextlib.suppress(ChoruslineError):
            if group.rank != 0:
                store.set(str(group.rank), _YES if self._is_end else _NO)
            elif self._is_end and all(self._says_yes(store, r) for r in range(1, group.size)):
                self._write()

    def _says_yes(self, store: PrefixStore, rank: int) -> bool:
        while self._writing.group.failure() is None and time.monotonic() < self._give_up_at:
            try:
                store.wait([str(rank)], _LOOK_S)
            except StoreTimeout:
                continue
            return store.get(str(rank)) == _YES
        return False

    def _write(self) -> None:
        try:
            write_note(self._writing.storage, self._writing.folder)
        except FileNotFoundError:
            pass  # The checkpoint was deleted meanwhile.
        except Exception as error:
            warnings.warn(
                f"{self._writing.saving.path} was saved at the end of an epoch, and that could "
                f"not be recorded ({type(error).__name__}: {error}): a resume from it runs the "
                "body of the epoch once more, without batches",
                stacklevel=2,
            )
