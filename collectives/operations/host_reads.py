"""Numbers that the host writes and reads, and that travel as any tensor does.

On a GPU the host must not wait for each copy. It writes into pinned memory, from which the copy
goes up in the order of the stream. What comes back goes down to pinned memory on the communicator's
stream, as the last part of the operation. So one wait is enough, for the operation and for the
copy, and it is `Work.wait_on_host`: after any other wait an operation that was stopped would be
read as if it had succeeded. `Reading.tolist` is the one place where such numbers are read.

Host memory is allocated each time. torch gives it out again when no copy uses it any more, so a
copy that an abort has held up comes to no memory of a later operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..contract.work import Work
from .arguments import Finisher
from .operations import Operations


def host_numbers(
    numbers: Sequence[float], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """`numbers` on the host; `copy_` and `to` with non_blocking=True then bring them to `device`
    without a wait."""
    pinned = device.type != "cpu"
    return torch.tensor(numbers, dtype=dtype, device="cpu", pin_memory=pinned)


def device_numbers(
    numbers: Sequence[float], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """`numbers` on `device`, without a wait of the host."""
    there = host_numbers(numbers, dtype, device)
    return there if device.type == "cpu" else there.to(device, non_blocking=True)


class Reading:
    """An operation in flight whose result the host will read.

    work: of the operation; after `work.wait()` the device may use the tensor that it writes.
    """

    def __init__(self, work: Work, on_host: torch.Tensor) -> None:
        self.work = work
        self._on_host = on_host

    def tolist(self) -> list[Any]:
        """Wait on the host, and read. Raises what `work.wait()` raises."""
        self.work.wait_on_host()
        return self._on_host.tolist()


class HostReads(Operations):
    """Operations whose result the host reads, as a step does with its agreement. `part` is what it
    reads: a contiguous part of the tensor, or the whole."""

    def all_reduce_and_read(
        self, tensor: torch.Tensor, part: torch.Tensor | None = None
    ) -> Reading:
        """`all_reduce` of a contiguous tensor; the sums of `part` are read."""
        finishers: list[Finisher] = []
        on_host = self._brought_down(tensor if part is None else part, finishers)
        return Reading(self._all_reduce(tensor, finishers=finishers), on_host)

    def broadcast_and_read(self, tensor: torch.Tensor, root: int) -> Reading:
        """`broadcast` of a contiguous tensor, which is read."""
        finishers: list[Finisher] = []
        on_host = self._brought_down(tensor, finishers)
        return Reading(self._broadcast(tensor, root, finishers=finishers), on_host)

    def _brought_down(self, part: torch.Tensor, finishers: list[Finisher]) -> torch.Tensor:
        """Where the host will find `part`. Adds the copy to `finishers`, if there is one."""
        if part.device.type == "cpu":
            return part
        on_host = torch.empty(part.shape, dtype=part.dtype, device="cpu", pin_memory=True)
        finishers.append(Finisher(part, lambda: on_host.copy_(part, non_blocking=True)))
        return on_host
