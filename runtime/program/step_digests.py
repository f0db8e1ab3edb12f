"""Digests of a module after each step, in a file of JSON lines: two runs are compared by them.

A line is `{"step": 12, "digests": {"0.weight": "9c56cc51b374c3ba", …}}`. A digest is of the values
in the order of their indices, so it does not depend on the memory format. A step that was taken
again has two lines: the later one counts, and those of later steps before it do not.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import torch

from ..data_parallel.same_model import without_lazy_bits
from ..process.sharded_tensors import has_shards

_DIGEST_BYTES = 8

Digests = dict[str, str]
"""By name of a parameter or buffer."""


def write_digests(path: str | Path, step: int, module: torch.nn.Module) -> None:
    """Append the line of this step. Raises ValueError for parameters that are sharded over ranks,
    OSError where the file cannot be written."""
    if has_shards(module):
        raise ValueError(
            "a module of fully_shard has only a part of each parameter on a rank; digests are of "
            "whole parameters"
        )
    named = [*module.named_parameters(), *module.named_buffers()]
    line = json.dumps({"step": step, "digests": {name: digest_of(one) for name, one in named}})
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(line + "\n")


@torch.no_grad()
def digest_of(tensor: torch.Tensor) -> str:
    """Of shape, dtype and values: 16 hexadecimal digits."""
    values = without_lazy_bits(tensor.detach()).cpu().contiguous()
    head = f"{values.dtype} {tuple(values.shape)}".encode()
    made = hashlib.blake2b(head, digest_size=_DIGEST_BYTES)
    made.update(values.view(-1).view(torch.uint8).numpy().data)
    return made.hexdigest()


def read_digests(path: str | Path) -> dict[int, Digests]:
    """By step. Raises ValueError for a file that was not written by `write_digests`."""
    found: dict[int, Digests] = {}
    for line in Path(path).read_text().splitlines():
        # A worker that was killed may have left a part of a line, after which another one wrote.
        with contextlib.suppress(ValueError, KeyError, TypeError):
            record = json.loads(line)
            step, digests = int(record["step"]), dict(record["digests"])
            # A run that has gone back, or begun again in the same file, takes later steps again.
            if step <= next(reversed(found), 0):
                found = {before: kept for before, kept in found.items() if before < step}
            found[step] = digests
    if not found:
        raise ValueError(f"{path} has no line that ctx.write_digests has written")
    return found


@dataclass(frozen=True, slots=True)
class Comparison:
    """Of two runs, over the steps that both have.

    same: the steps before the first difference. step: that of the first difference; None: none.
    names: the parameters and buffers that differ in it, or that one of the two does not have.
    """

    same: tuple[int, ...]
    step: int | None = None
    names: tuple[str, ...] = ()


def compare_digests(one: dict[int, Digests], other: dict[int, Digests]) -> Comparison:
    """Raises ValueError if the two have no step in common."""
    both = sorted(one.keys() & other.keys())
    if not both:
        raise ValueError("the two files have no step in common")
    for place, step in enumerate(both):
        mine, theirs = one[step], other[step]
        names = tuple(n for n in {**mine, **theirs} if mine.get(n) != theirs.get(n))
        if names:
            return Comparison(tuple(both[:place]), step, names)
    return Comparison(tuple(both))
