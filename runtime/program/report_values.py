"""What `ctx.report` takes, as plain values that every listener can read."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy
import torch

from chorusline.actors.messages.messages import ReportValue
from chorusline.collectives.contract.errors import with_article

MOST_NUMBERS = 1024
"""In one value of a report. Reports travel in the order in which they come, so a large one would
hold up all others."""

_TAKES = (
    "a report takes numbers, strings, small tensors and arrays, and lists and dictionaries of these"
)


def plain_values(values: Mapping[str, Any] | None, named: Mapping[str, Any]) -> dict[str, Any]:
    """The values of one report. Raises TypeError or ValueError that names the value."""
    if values is not None and not isinstance(values, Mapping):
        raise TypeError(
            f"ctx.report takes a dictionary, or values by name, got {type(values).__name__}; write "
            "ctx.report(loss=loss)"
        )
    both: dict[Any, Any] = dict(values or {})
    if twice := sorted(both.keys() & named.keys()):
        raise ValueError(f"ctx.report got {', '.join(map(repr, twice))} twice; give it once")
    plain: dict[str, Any] = {}
    for name, value in {**both, **named}.items():
        if not isinstance(name, str):
            raise TypeError(f"the names in a report must be strings, got {name!r}")
        try:
            # Most values are floats, which are plain already.
            plain[str.__str__(name)] = value if type(value) is float else _plain(name, value, name)
        except RecursionError:
            raise ValueError(
                f"report({name}=...) got a value that contains itself, or hundreds of others one "
                f"inside another; {_TAKES}"
            ) from None
    return plain


def _plain(name: str, value: Any, place: str) -> ReportValue:
    """name: of the value in the report. place: of this part of it."""
    # Of a subclass, such as an IntEnum, a reader in another process may not have the class.
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, int):
        if abs(value) > sys.float_info.max:
            # Whoever shows or sums it makes a float of it, in the worker and in the session.
            raise ValueError(
                f"report({place}=...) got a whole number of {value.bit_length()} bits, which no "
                "float can hold; report it as a string"
            )
        return value if type(value) is bool else int.__int__(value)
    if isinstance(value, numpy.longdouble):  # Its item() is itself.
        return float(value)
    if isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_meta:
        _check_number(name, value.numel(), f"a tensor of shape {tuple(value.shape)}")
        value = value.detach()
        return _plain(name, value.item() if value.numel() == 1 else value.tolist(), place)
    if isinstance(value, numpy.ndarray | numpy.generic):
        _check_number(name, value.size, f"an array of shape {value.shape}")
        if numpy.ma.is_masked(value):
            raise ValueError(
                f"report({place}=...) got an array with masked elements, which have no values; "
                "report its compressed() or filled(...)"
            )
        return _plain(name, value.item() if value.size == 1 else value.tolist(), place)
    if isinstance(value, Mapping):
        _check_number(name, len(value), f"a dictionary of {len(value)} values")
        for key in value:
            if not isinstance(key, str):
                raise TypeError(
                    f"report({place}=...) got the key {key!r}; the keys of a dictionary in a "
                    "report are strings"
                )
        parts = {
            str.__str__(key): _plain(name, one, f"{place}[{key!r}]") for key, one in value.items()
        }
        _check_number(name, _count(parts), f"{_count(parts)} values")
        return parts
    if isinstance(value, list | tuple):
        _check_number(name, len(value), f"{with_article(type(value))} of {len(value)} values")
        items = [_plain(name, one, f"{place}[{i}]") for i, one in enumerate(value)]
        _check_number(name, _count(items), f"{_count(items)} values")
        return items
    kind = f"a value of type {type(value).__name__}"
    if isinstance(value, torch.Tensor):  # It is sparse, or has no values.
        kind = f"a tensor of layout {value.layout} on {value.device}"
    raise TypeError(f"report({place}=...) got {kind}; {_TAKES}")


def _count(value: ReportValue) -> int:
    if isinstance(value, dict):
        return sum(map(_count, value.values()))
    return sum(map(_count, value)) if isinstance(value, list) else 1


def _check_number(name: str, count: int, what: str) -> None:
    if count > MOST_NUMBERS:
        raise ValueError(
            f"report({name}=...) got {what}; a report takes at most {MOST_NUMBERS:,} numbers "
            "in one value. Report a summary, its mean() for example, or return the whole from the "
            "function"
        )
