"""The options of an optimizer: copies, and the numbers among them, which travel with a vote; and
the weights of losses and values.

Numbers are Python's and numpy's, tensors and arrays of one element, and tuples and lists of these;
an array or a tensor of one dimension is a list of its elements.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch


def copied_options(groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A copy of each parameter group without its parameters."""
    return [
        {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
        for group in groups
    ]


def entries(value: Any) -> list[Any]:
    is_array = isinstance(value, torch.Tensor | np.ndarray) and value.ndim == 1
    return list(value) if is_array or isinstance(value, tuple | list) else [value]


def is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.is_complex() and not value.is_meta
    if isinstance(value, np.ndarray):
        return value.size == 1 and value.dtype.kind in "biuf"
    return isinstance(value, int | float | np.number | np.bool_) and not np.iscomplexobj(value)


def number_of(value: Any) -> float:
    """As a float: infinity for an int that no float holds."""
    try:
        return float(value.item() if isinstance(value, torch.Tensor | np.ndarray) else value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def float_of(given: object) -> float | None:
    """The number that a user gave, as a float. None for what is no number, as True."""
    return None if isinstance(given, bool | np.bool_) or not is_number(given) else number_of(given)


def told_apart(numbers: Sequence[float]) -> list[str]:
    """For people: short, unless two that differ would have the same text."""
    short = [f"{one:g}" for one in numbers]
    return short if len({*short}) == len({*numbers}) else [*map(repr, numbers)]


def weight_of(given: object, takes: str) -> float:
    """The weight of a rank's loss, or of its value in a mean. takes: what the text for something
    else says first.

    Raises TypeError for what is no number; ValueError for one that is negative or not finite."""
    if (weight := float_of(given)) is None:
        raise TypeError(f"{takes}, got {given!r}")
    if not 0 <= weight < math.inf:
        raise ValueError(f"weight must be a finite number of at least 0, got {weight}")
    return weight


def like(value: Any, number: float) -> Any:
    """`number` in place of `value`. A tensor stays the same one, since a compiled step reads it; a
    whole number (weight_decay=0), or a tensor that would round, becomes a float where another rank
    has set one."""
    if isinstance(value, torch.Tensor):
        is_exact = torch.tensor(number, dtype=value.dtype, device="cpu").item() == number
        return value.fill_(number) if is_exact or math.isnan(number) else number
    if number_of(value) == number:
        return value
    # A flag stays a flag.
    if isinstance(value, bool | np.bool_) and number in (0, 1):
        return bool(number)
    return int(number) if isinstance(value, int) and number.is_integer() else number


def plain(value: Any) -> Any:
    """An option as text compares it: equal numbers are equal whatever holds them."""
    if not any(map(is_number, entries(value))):
        return value
    numbers = [number_of(one) if is_number(one) else one for one in entries(value)]
    return numbers if isinstance(value, tuple | list) or len(numbers) > 1 else numbers[0]


def numbers_of(groups: Sequence[dict[str, Any]], names: Sequence[str]) -> list[float]:
    """The numbers among the options `names` of all parameter groups; tuples and lists entry by
    entry."""
    return [
        number_of(entry)
        for options in groups
        for name in names
        for entry in entries(options.get(name))
        if is_number(entry)
    ]


def texts_of(groups: Sequence[dict[str, Any]], names: Sequence[str]) -> list[str]:
    """What is a text or None among the same options, with their names. Other objects are left out:
    their texts may differ from process to process."""
    return [
        f"{name} {entry!r}"
        for options in groups
        for name in names
        for entry in entries(options.get(name))
        if entry is None or isinstance(entry, str | bytes)
    ]


def set_numbers(
    groups: Sequence[dict[str, Any]], names: Sequence[str], numbers: Sequence[float]
) -> None:
    """Write the numbers that `numbers_of` read on another rank; each option keeps its type."""
    values = iter(numbers)
    for options in groups:
        for name in names:
            value = options[name]
            own = entries(value)
            given = [like(entry, next(values)) if is_number(entry) else entry for entry in own]
            if all(new is old for new, old in zip(given, own, strict=True)):
                continue
            if type(value) in (tuple, list):
                options[name] = type(value)(given)
            else:  # An array of theirs, as one of float32, would round.
                options[name] = given[0] if len(given) == 1 else tuple(given)
