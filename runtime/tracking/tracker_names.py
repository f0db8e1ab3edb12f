"""Trackers by their names: `Session(trackers=["tensorboard"])`."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .json_lines import JSONLinesTracker
from .mlflow import MLflowTracker
from .opentelemetry import OpenTelemetryTracker
from .tensorboard import TensorBoardTracker
from .tracker import Tracker
from .wandb import WandbTracker


@dataclass(frozen=True, slots=True)
class _Kind:
    """module: that has to be installed; empty if none. extra: that installs it. given: what may
    follow the colon."""

    make: Callable[..., Tracker]
    module: str
    extra: str
    given: str


_KINDS = {
    "jsonl": _Kind(JSONLinesTracker, "", "", "a file"),
    "tensorboard": _Kind(TensorBoardTracker, "tensorboard", "tensorboard", "a folder"),
    "mlflow": _Kind(MLflowTracker, "mlflow", "mlflow", "an experiment"),
    "wandb": _Kind(WandbTracker, "wandb", "wandb", "a project"),
    "opentelemetry": _Kind(OpenTelemetryTracker, "opentelemetry.trace", "otel", ""),
}
_CLASSES = {kind.make: kind for kind in _KINDS.values()}


def checked_trackers(
    trackers: str | Tracker | Sequence[str | Tracker],
) -> tuple[Tracker, ...]:
    """The trackers of a session. Raises TypeError or ValueError for what is none, and ImportError
    if the library of one is not installed."""
    made = tuple(_made(one) for one in _listed(trackers))
    twice = {id(one) for one in made}
    if len(twice) < len(made):
        raise ValueError("trackers has the same Tracker twice; give it once")
    return made


def _listed(trackers: object) -> Sequence[object]:
    if isinstance(trackers, str | Tracker):
        return [trackers]
    if not isinstance(trackers, Sequence):
        raise TypeError(
            f"trackers must be a list of names and Trackers, got {type(trackers).__name__}; write "
            'trackers=["tensorboard"]'
        )
    return trackers


def _made(one: object) -> Tracker:
    if isinstance(one, Tracker):  # Of a class of the user's own, nothing is known to be missing.
        kind = _CLASSES.get(type(one))
        if kind is not None:
            _check_installed(type(one).__name__, kind)
        return one
    if not isinstance(one, str):
        got = type(one).__name__
        if isinstance(one, type):
            got = f"the class {one.__name__}; make one: {one.__name__}()"
        raise TypeError(f"a tracker must be a name or a Tracker, got {got}")
    name, colon, given = one.partition(":")
    kind = _KINDS.get(name)
    if kind is None:
        raise ValueError(
            f"there is no tracker {name!r}; the names are {', '.join(_KINDS)}. For another service "
            "derive a class from chorusline.Tracker, and pass an object of it"
        )
    if colon and not (given and kind.given):  # `jsonl:`, or `opentelemetry:x`, which takes nothing
        may = f"{name}:{kind.given.split()[-1].upper()}" if kind.given else name
        raise ValueError(f"the tracker {one!r} is not complete; write {name!r} or {may!r}")
    _check_installed(repr(name), kind)
    return kind.make(given) if given else kind.make()


def _check_installed(name: str, kind: _Kind) -> None:
    if not kind.module:
        return
    package = kind.module.partition(".")[0]
    try:
        is_there = importlib.util.find_spec(kind.module) is not None
    except ModuleNotFoundError:
        is_there = False
    if not is_there:
        raise ImportError(
            f"the tracker {name} needs the library {package}, which is not installed in this "
            f"environment: pip install -e '.[{kind.extra}]' in a checkout of Chorusline. Only the "
            "process of the session needs it, not the workers"
        )
