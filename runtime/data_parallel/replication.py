"""Makes tensors equal on all ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

from collectives import Group
from collectives.contract.dtypes import DTYPES


@torch.no_grad()
def broadcast_tensors(tensors: Sequence[torch.Tensor], root: int, group: Group) -> None:
    """Copy rank `root`'s tensors into those of all ranks: one broadcast per dtype.

    tensors: any shapes and dtypes, same on all ranks, on the group's device.
    """
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = defaultdict(list)
    for tensor in tensors:
        by_dtype[tensor.dtype].append(tensor)
    for dtype, same in by_dtype.items():
        # Masks and small integers are few; they travel as int32, which every backend has.
        wire = dtype if dtype in DTYPES else torch.int32
        flat = torch.cat([tensor.reshape(-1).to(wire) for tensor in same])
        group.broadcast(flat, root).wait()
        if group.rank != root:
            for tensor, part in zip(same, flat.split([t.numel() for t in same]), strict=True):
                tensor.copy_(part.view(tensor.shape))
