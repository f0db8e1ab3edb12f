"""Which objects a checkpoint may hold, if loading them is to run no code that the file names.

An object is stored as torch.save stores it, in a pickle. `torch.load(weights_only=True)` makes
tensors and plain values of it: numbers, strings, dtypes, and containers of them. Arrays and
scalars of numpy are plain values here, too, because the states of generators, schedules and metrics
often contain them.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy
import torch

try:
    from numpy._core import multiarray  # from numpy 2 on
except ImportError:
    from numpy.core import multiarray  # type: ignore[no-redef]


def _of_numpy() -> dict[str, Any]:
    """What pickles of numpy arrays and scalars name. Both versions' names of a function are here,
    since the numpy that reads may not be the numpy that wrote."""
    found: dict[str, Any] = {"numpy.ndarray": numpy.ndarray, "numpy.dtype": numpy.dtype}
    for module in ("numpy._core.multiarray", "numpy.core.multiarray"):
        for function in ("_reconstruct", "scalar"):
            found[f"{module}.{function}"] = getattr(multiarray, function)
    for name, kind in vars(numpy.dtypes).items():
        if name.endswith("DType") and name != "ObjectDType":
            found[f"numpy.dtypes.{name}"] = kind
    return found


_OF_NUMPY = tuple((kind, name) for name, kind in _of_numpy().items())
"""Each with its name: so it is another entry of torch's list than what the user has allowed, and
does not take that along when `safe_globals` ends."""


def load_plain(data: bytes) -> Any:
    """The object in `data`. Raises pickle.UnpicklingError if it is more than plain values."""
    with torch.serialization.safe_globals(list(_OF_NUMPY)):
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def beyond_plain(data: bytes) -> list[str]:
    """The classes and functions in `data` that `load_plain` refuses, by their full names."""
    try:
        named = torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(data))
    except (pickle.UnpicklingError, ValueError):
        return []
    return sorted(set(named) - {name for _, name in _OF_NUMPY})
