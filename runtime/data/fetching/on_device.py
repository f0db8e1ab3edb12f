"""Copies of batches to the rank's device, on a stream of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map


class ToDevice:
    """Copies the tensors of a batch, and its parts that have a `to`, to `device`.

    On a GPU the copy runs on a stream of its own: beside the kernels of the last step that are
    still in the GPU's queue, if the batch is in page-locked memory (`pin_memory`). The current
    stream waits for it; the host does not.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    def __call__(self, batch: Any) -> Any:
        if self._stream is None:
            return self._copied(batch)
        with torch.cuda.stream(self._stream):
            copied = self._copied(batch)
        current = torch.cuda.current_stream(self.device)
        current.wait_stream(self._stream)
        for leaf in tree_leaves(copied):
            if isinstance(leaf, torch.Tensor):
                leaf.record_stream(current)  # Its memory is not given away before the step is over.
        return copied

    def _copied(self, batch: Any) -> Any:
        return tree_map(
            lambda leaf: leaf.to(self.device, non_blocking=True) if hasattr(leaf, "to") else leaf,
            batch,
        )
