"""Copies of batches to the rank's device, on a stream of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map

from chorusline.collectives.contract.argument_kinds import checked_device


class ToDevice:
    """Copies the tensors of a batch, and its parts that have a method `to`, to `device`.

    On a GPU the copy of a tensor runs on a stream of its own: beside the kernels of the last step
    that are still in the GPU's queue, if the batch is in page-locked memory (`pin_memory`). The
    current stream waits for it; the host does not.
    """

    def __init__(self, device: torch.device | str) -> None:
        """Raises ValueError for a device that is none, or that this process does not have."""
        self.device = checked_device(device)
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise ValueError(
                f"batches cannot be copied to {str(self.device)!r}: torch sees no GPU in this "
                "process. Pass device=ctx.device, which is that of the rank's model"
            )
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    def __call__(self, batch: Any) -> Any:
        # A batch of one's own class is one part, even if torch could look into it.
        return tree_map(self._copied, batch, is_leaf=_can_be_copied)

    def _copied(self, part: Any) -> Any:
        if not _can_be_copied(part):
            return part
        # Of what is no tensor, nobody could tell the stream below that the step still reads it.
        if self._stream is None or not isinstance(part, torch.Tensor):
            return part.to(self.device, non_blocking=True)
        with torch.cuda.stream(self._stream):
            copied = part.to(self.device, non_blocking=True)
        current = torch.cuda.current_stream(self.device)
        current.wait_stream(self._stream)
        copied.record_stream(current)  # Its memory is not given away before the step is over.
        return copied


def _can_be_copied(part: Any) -> bool:
    return callable(getattr(part, "to", None))
