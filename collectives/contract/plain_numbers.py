"""Numbers that people give, which may be numpy's, as Python's own."""

from __future__ import annotations

import operator


def whole(number: object) -> int | None:
    """A whole number, numpy's too, as an int; None for anything else, True and False too."""
    if isinstance(number, bool) or type(number).__name__ in ("bool", "bool_"):
        return None
    try:
        return operator.index(number)  # type: ignore[arg-type]
    except TypeError:
        return None


def real(number: object) -> float | None:
    """A number, numpy's too, as a float or an int; None for anything else."""
    if isinstance(number, int | float) and not isinstance(number, bool):
        return number
    is_one = hasattr(number, "__float__") and hasattr(number, "dtype") and hasattr(number, "item")
    if not is_one or getattr(number, "shape", None) != ():
        return None
    plain = number.item()  # type: ignore[attr-defined]
    return real(plain) if isinstance(plain, int | float) else None  # A long double is neither.
