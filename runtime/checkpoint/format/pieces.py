"""The pieces of a checkpoint: ranges of tensors and small objects, each under its path.

This file knows neither models nor optimizers. So the files of the format (manifest, data files,
reader) can be read, and used, without the objects whose state is saved.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

Path = tuple[str | int, ...]
"""The keys of the dictionaries that lead to a tensor or an object. The path names it in the
checkpoint, as in torch.distributed.checkpoint."""


@dataclass(frozen=True, slots=True)
class TensorRange:
    """Elements [start, stop) of the flattened tensor at `path`, which has `shape`.

    parts: flattened tensors that hold these elements, one after the other.
    """

    path: Path
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    stop: int
    parts: tuple[torch.Tensor, ...]


@dataclass(slots=True)
class Contents:
    """ranges: of tensors. leaves: objects by path, as bytes that torch.load reads.

    places: of paths, the number of the tensor or object among all of its state, including those
        that other ranks write. A state that is loaded has its keys in this order.
    """

    ranges: list[TensorRange] = field(default_factory=list)
    leaves: dict[Path, bytes] = field(default_factory=dict)
    places: dict[Path, int] = field(default_factory=dict)
