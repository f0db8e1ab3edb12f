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
