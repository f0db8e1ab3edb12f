"""Objects that were registered as equal on all ranks are compared by their counts.

Only plain numbers and tensors of one element are compared (updates of an average, epochs of a
schedule, steps of an optimizer, rates): they show a rank that was left behind, and cost next to
nothing. Of parameters that the ranks may train apart (model averaging, post-local SGD) all bits are
compared: a checkpoint takes a part of them from each rank.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch

from ..data_parallel.same_model import without_lazy_bits
from ..process.option_numbers import told_apart

_MOST = 10_000
"""The most numbers that are compared of one object."""

_LOOKED_AT = 100_000
_LONGEST_PATH = 1000
"""A state may be large, deep, or contain itself, and a checkpoint that somebody has forged may hold
one that has 2**60 parts in some bytes: so many values are looked at, and none that is deeper."""

Numbers = dict[str, float]
"""By path in an object's state, as `optimizer.state.0.step`."""

CHECKSUM = "the checksum of "
"""Before the path of a parameter."""

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_EXACT = 1 << 52
"""A float has all whole numbers up to here."""


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


def checksums_of(name: str, parameters: Iterable[tuple[str, torch.Tensor]]) -> Numbers:
    """Of all bits of each parameter: a whole sum, which no order of adding changes."""
    sums: dict[torch.device, dict[str, torch.Tensor]] = {}
    for path, parameter in parameters:
        words = without_lazy_bits(parameter.detach()).reshape(-1)
        words = torch.view_as_real(words).reshape(-1) if words.is_complex() else words
        one = words.view(_WORDS[words.element_size()]).sum(dtype=torch.int64)
        sums.setdefault(one.device, {})[f"{CHECKSUM}{name}.{path}"] = one
    found: Numbers = {}
    for of_device in sums.values():
        values = torch.stack([*of_device.values()]).tolist()
        found.update((path, float(n % _EXACT)) for path, n in zip(of_device, values, strict=True))
    return found


def _walk(name: str, state: Any) -> Iterator[tuple[str, Any]]:
    """The numbers in a state with their paths, outer ones before inner ones."""
    waiting, room = deque([(name, state)]), _LOOKED_AT
    while waiting:
        path, value = waiting.popleft()
        below: Iterable[tuple[Any, Any]] = ()
        if isinstance(value, Mapping):
            below = value.items()
        elif isinstance(value, list | tuple):
            below = enumerate(value)
        elif isinstance(value, torch.Tensor):
            # Larger ones are weights, which differ by rounding, and cost time to read.
            is_number = value.numel() == 1 and value.layout == torch.strided
            if is_number and not value.is_complex() and not value.is_meta:
                yield path, value
        elif isinstance(value, int | float):
            yield path, value
        # A state may refer to itself, or be huge: neither its depth nor its size costs a save much.
        if len(path) < _LONGEST_PATH:
            known = len(waiting)
            waiting.extend((f"{path}.{key}", one) for key, one in islice(below, room))
            room -= len(waiting) - known


def why_unlike(by_rank: Sequence[Numbers]) -> tuple[str, tuple[int, ...]] | None:
    """The first difference in words, and the ranks that differ from the first one; None if there is
    no difference. by_rank: of a rank without data only what is current."""
    for path in {path: None for numbers in by_rank for path in numbers}:
        at = {rank: numbers[path] for rank, numbers in enumerate(by_rank) if path in numbers}
        value = next(iter(at.values()))
        # A number that is none is like itself here.
        unlike = tuple(rank for rank, other in at.items() if repr(other) != repr(value))
        if unlike:
            shown = zip(at, told_apart([*at.values()]), strict=True)
            each = ", ".join(f"{text} on rank {rank}" for rank, text in shown)
            return f"{path} is {each}", unlike
    return None
