"""Arguments against the annotations of their function, so that a new parameter is checked without
a line of its own."""

from __future__ import annotations

import functools
import inspect
import reprlib
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import with_article
from .plain_numbers import real, whole

if TYPE_CHECKING:
    import torch

MOST_RANKS = 1 << 16
"""A rendezvous of n ranks names n keys, and a dealer of samples makes n hands: with a million of
them, that takes longer than a deadline of seconds."""

_WORDS: dict[Any, str] = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "a string",
    bytes: "bytes",
    None: "None",
    types.NoneType: "None",
    Callable: "a function",
    Mapping: "a dictionary",
    Sequence: "a list",
}


def check_kinds(function: Callable[..., Any], given: Mapping[str, object]) -> None:
    """Check arguments for the kinds that the annotations of `function` say.

    given: by name of the parameter; names that `function` does not have are left out, so it may be
        the locals() of a function that has just been called.

    Raises TypeError for an argument of another kind, and ValueError for a number that is not
    finite and for a text that is no path, name or URL; each names the parameter. It does not look
    into lists and dictionaries, and takes numpy's numbers for Python's.
    """
    for name, hint in _hints(inspect.unwrap(function)).items():
        if name not in given:
            continue
        value = given[name]
        if not _fits(value, hint):
            kinds = _WORDS.get(hint) or " or ".join(map(_words, _alternatives(hint)))
            raise TypeError(
                f"{name} must be {kinds}, got {type(value).__name__} {reprlib.repr(value)}"
            )
        # Some ints are more than any float.
        if (number := real(value)) is not None and not abs(number) <= sys.float_info.max:
            raise ValueError(f"{name} must be a finite number, got {reprlib.repr(number)}")
        if isinstance(value, str | Path) and not _fits(b"", hint):
            # A path may have bytes in it that are no characters, which Python has as surrogates.
            check_text(name, str(value), "surrogateescape")


def check_text(name: str, text: str, errors: str = "strict") -> None:
    """Raise ValueError, naming the parameter, for a text that no other process can be given: one
    with a null character or with half of a surrogate pair. errors: as of `str.encode`."""
    if "\0" in text:
        raise ValueError(f"{name} has a null character in it: {reprlib.repr(text)}")
    try:
        text.encode("utf-8", errors)
    except UnicodeEncodeError as error:
        half = text[error.start]
        raise ValueError(
            f"{name} has {half!a} in it, half of a surrogate pair: {ascii(text)[:60]}"
        ) from None


def check_range(name: str, number: float, least: float, most: float = 2**63 - 1) -> None:
    """Raise ValueError, naming the parameter, for a number that is not in [least, most]."""
    if number < least:
        raise ValueError(f"{name} must be at least {least}, got {number}")
    if number > most:
        raise ValueError(f"{name} must be at most {most}, got {number}")


def checked_place(rank: int, size: int, named: str = "size") -> tuple[int, int]:
    """Both, numpy's as Python's. Raises ValueError for a rank that is none of `size` ranks, and for
    a size that no group has. named: the parameter that has the size."""
    if size < 1:
        raise ValueError(f"{named} must be at least 1, got {size}")
    if size > MOST_RANKS:
        raise ValueError(f"{named} must be at most {MOST_RANKS}, got {size}")
    if not 0 <= rank < size:
        raise ValueError(f"rank must be in [0, {size}), got {rank}")
    return int(rank), int(size)


def checked_device(device: torch.device | str | int) -> torch.device:
    """Raises ValueError, with torch's reason, for a device that is none."""
    import torch  # Here: processes without tensors check their arguments, too.

    try:
        return torch.device(device)
    except (RuntimeError, ValueError) as error:
        reason = reprlib.repr(str(error).splitlines()[0])
        raise ValueError(
            f"torch does not know the device {reprlib.repr(device)}: {reason}"
        ) from None


@functools.cache
def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    """By name of the parameter, its annotation, unless that says nothing that can be checked."""
    hints = {}
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    for name, parameter in inspect.signature(function).parameters.items():
        hint = parameter.annotation
        if isinstance(hint, str):
            try:
                # Annotations are texts (`from __future__ import annotations`).
                hint = eval(hint, function.__globals__)
            except NameError:  # Its module is imported for type checkers alone.
                continue
        if hint is not inspect.Parameter.empty and parameter.kind not in variable:
            hints[name] = hint
    return hints


def _alternatives(hint: Any) -> tuple[Any, ...]:
    is_union = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
    return typing.get_args(hint) if is_union else (hint,)


def _fits(value: object, hint: Any) -> bool:
    alternatives = _alternatives(hint)
    if len(alternatives) > 1:
        return any(_fits(value, one) for one in alternatives)
    kind = typing.get_origin(hint) or hint
    if kind is None:
        return value is None
    # numpy's: numpy itself may not be installed here, so they are told by name.
    if kind is bool:
        return isinstance(value, bool) or type(value).__name__ in ("bool", "bool_")
    if kind is int:
        return whole(value) is not None
    if kind is float:
        return real(value) is not None
    if kind is Callable:
        return callable(value)
    if kind is Sequence:  # Arrays and tensors are sequences as well, and Python does not know it.
        is_text = isinstance(value, str | bytes | Mapping)
        return hasattr(value, "__len__") and hasattr(value, "__getitem__") and not is_text
    if kind is Iterable:
        return hasattr(value, "__iter__") and not isinstance(value, str | bytes)
    if kind is type and typing.get_args(hint):
        (base,) = typing.get_args(hint)
        return isinstance(value, type) and issubclass(value, base)
    # What Python cannot check at run time is taken as it is.
    if kind is Any or not isinstance(kind, type) or getattr(kind, "_is_protocol", False):
        return True
    return isinstance(value, kind)


def _words(hint: Any) -> str:
    kind = typing.get_origin(hint) or hint
    return _WORDS.get(kind) or with_article(kind)
