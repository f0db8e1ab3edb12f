"""Whether objects that were registered as equal on all ranks are: their counts are compared.

Only plain numbers and tensors of one element are compared (updates of an average, epochs of a
schedule, steps of an optimizer, rates): they show a rank that was left behind, and cost next to
nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch

_MOST = 10_000
"""The most numbers that are compared of one object."""

Numbers = dict[str, float]
"""By path in an object's state, as `optimizer.state.0.step`."""


def numbers_in(name: str, state: Any) -> Numbers:
    found: Numbers = {}
    waiting: dict[torch.device, dict[str, torch.Tensor]] = {}
    for path, value in islice(_walk(name, state), _MOST):
        if isinstance(value, torch.Tensor):
            one = value.detach().reshape(()).to(torch.float64)
            waiting.setdefault(one.device, {})[path] = one
        else:
            with contextlib.suppress(OverflowError):  # No count is as large.
                found[path] = float(value)
    # At once, since a host waits for a GPU here. A step may be counted beside it, on the CPU.
    for of_device in waiting.values():
        found.update(zip(of_device, torch.stack([*of_device.values()]).tolist(), strict=True))
    return found


def _walk(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, below in value.items():
            yield from _walk(f"{path}.{key}", below)
    elif isinstance(value, list | tuple):
        for number, below in enumerate(value):
            yield from _walk(f"{path}.{number}", below)
    elif isinstance(value, torch.Tensor):
        is_number = value.numel() == 1 and value.layout == torch.strided
        if is_number and not value.is_complex() and not value.is_meta:
            yield path, value
    elif isinstance(value, int | float):
        yield path, value


def why_unlike(by_rank: Sequence[Numbers | None]) -> tuple[str, tuple[int, ...]] | None:
    """The first difference in words, and the ranks that differ from the first one; None if there is
    no difference. by_rank: None for a rank whose state is not current."""
    known = {rank: numbers for rank, numbers in enumerate(by_rank) if numbers is not None}
    first = next(iter(known.values()), {})
    for path, value in first.items():
        at = {rank: numbers[path] for rank, numbers in known.items() if path in numbers}
        # A number that is none is like itself here.
        unlike = tuple(rank for rank, other in at.items() if repr(other) != repr(value))
        if unlike:
            each = ", ".join(f"{other:g} on rank {rank}" for rank, other in at.items())
            return f"{path} is {each}", unlike
    return None
