"""What travels to the workers: an object as a pickle and, beside it, its large buffers.

Ray keeps the parcel in its object store, once on each node, and gives every worker of the node the
same memory. The pickle holds each storage once, however many tensors are views of it.

A worker gets the large buffers as memory of its own that costs nothing until it is written to:
private mappings, copied page by page on the first write. So a rank may write to its arguments, as
torch programs do, and no other rank sees it. pickling.py packs.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .private_mapping import privately_mapped

if TYPE_CHECKING:
    import numpy


@dataclass(frozen=True, slots=True)
class Parcel:
    """An object on its way.

    content: the pickle; as an array if it is large, which Ray does not copy.
    buffers: (n,) uint8 each, in the order in which the pickle refers to them.
    """

    content: bytes | numpy.ndarray
    buffers: tuple[numpy.ndarray, ...] = ()

    @property
    def nbytes(self) -> int:
        return len(self.content) + sum(buffer.nbytes for buffer in self.buffers)

    def opened(self) -> Any:
        """The object. May take long, and runs code of the user's modules."""
        content = self.content if isinstance(self.content, bytes) else self.content.data
        return pickle.loads(content, buffers=privately_mapped(self.buffers))
