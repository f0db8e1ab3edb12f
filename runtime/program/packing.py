"""The user's function, in the session's process: checked, packed and weighed before it is sent."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader

from chorusline.actors.parcels.parcel import Parcel
from chorusline.actors.parcels.pickling import packed

from ..checkpoint.config import CheckpointConfig
from ..data.fetching.loader_settings import refuse_sharded
from .argument_owners import owner_of
from .program import Program

HEAVY_BYTES = 100_000_000
"""From this size on a session says what a program carries."""

_MOST_NAMED = 3


def packed_program(
    train: Callable[..., object],
    kwargs: Mapping[str, Any],
    checkpoint: CheckpointConfig | None = None,
    seed: int | None = None,
) -> Parcel:
    """The program as a parcel. Raises TypeError if `train` is not callable, its parameters do not
    fit `kwargs`, or a part cannot be pickled; ValueError for a DataLoader whose sampler has picked
    the samples of one rank."""
    if not callable(train):
        raise TypeError(
            f"train must be a function of a Context, got {type(train).__name__}; pass the function "
            "itself, and its arguments as keywords"
        )
    _check_parameters(train, kwargs)
    for _, value in _parts(train, kwargs):
        if isinstance(value, DataLoader):
            refuse_sharded(value)  # Every rank would take the part of the same one.
    try:
        return packed(Program(train, kwargs, checkpoint, seed))
    except Exception as error:
        raise TypeError(
            f"{_culprit(train, kwargs)} cannot be sent to the workers: {error}. Make it inside the "
            "function, on each rank, or pass what is needed to make it"
        ) from error


def check_not_own(train: Callable[..., object], seed: int | None) -> None:
    """Raises TypeError if `train` has a parameter `seed`, which `run` would keep for itself."""
    if seed is None or not callable(train):
        return
    with contextlib.suppress(ValueError):  # Some builtins have no signature.
        if "seed" in inspect.signature(train).parameters:
            raise TypeError(
                f"seed={seed} is an argument of run() itself, which seeds the generators as "
                f"ctx.seed() does, and {_name(train)} has a parameter of that name; give that "
                "another name, or use Session and session.run(train, seed=...)"
            )


def _check_parameters(train: Callable[..., object], kwargs: Mapping[str, Any]) -> None:
    try:
        signature = inspect.signature(train)
    except ValueError:
        return  # Some builtins have no signature.
    try:
        signature.bind(None, **kwargs)
    except TypeError as error:
        given = ", ".join(["ctx", *(f"{name}=..." for name in kwargs)])
        owner = owner_of(name for name in kwargs if name not in signature.parameters)
        raise TypeError(
            f"train is called as {_name(train)}({given}), but its parameters are {signature}: "
            f"{error}. "
            + (f"{owner}. " if owner else "")
            + "The first parameter is the Context; the others are passed by name: "
            "session.run(train, lr=0.1)"
        ) from None


def _culprit(train: Callable[..., object], kwargs: Mapping[str, Any]) -> str:
    """A description of the smallest part that cannot be pickled."""
    for part, value in _parts(train, kwargs):
        if not _pickles(value):
            if not part.startswith("the argument"):
                return f"{part} ({type(value).__name__}), used by {_name(train)},"
            return f"{part} ({type(value).__name__})"
    return f"train ({_name(train)})"


def _parts(train: Callable[..., object], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    """What is sent along with the function itself: a name for a sentence, and the value."""
    for name, value in kwargs.items():
        yield f"the argument {name}", value
    if inspect.isfunction(train):
        used = inspect.getclosurevars(train)
        for kind, variables in (("variable", used.nonlocals), ("global", used.globals)):
            for name, value in variables.items():
                yield f"the {kind} {name}", value


def heavy_parts(train: Callable[..., object], kwargs: Mapping[str, Any], nbytes: int) -> str:
    """A sentence about what makes the program so heavy, and what to write instead. nbytes: of the
    whole program."""
    weights = {part: packed(value).nbytes for part, value in _parts(train, kwargs)}
    heaviest = sorted(weights.items(), key=lambda item: -item[1])[:_MOST_NAMED]
    named = [f"{part} ({_mb(weight)})" for part, weight in heaviest if weight > nbytes / 10]
    what = ", ".join(named) or "what the functions that it calls refer to"
    return (
        f"{_name(train)} carries {_mb(nbytes)} to every node with each run: {what}. The ranks of a "
        "node share that memory, but each run sends it again. Read data inside the function, from "
        'files that the nodes see, with ctx.keep("data", read) once per worker'
    )


def _mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.0f} MB"


def _pickles(value: object) -> bool:
    try:
        packed(value)
    except Exception:
        return False
    return True


def _name(train: Callable[..., object]) -> str:
    return getattr(train, "__qualname__", type(train).__name__)
