"""`chorusline run script.py:function --workers 2..8 -- --lr 0.1`: a session for one function."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import inspect
import sys
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from ray import cloudpickle

from chorusline.collectives.contract.errors import listed, with_article

from ..checkpoint.config import AUTO, NEVER, CheckpointConfig
from ..session.showing.progress import Progress
from ..tracking.tracker import Tracker
from ..tracking.tracker_names import checked_trackers
from .arguments import WrongUsage, did_you_mean, keywords
from .detached import OF_DETACHED_RUN, begin, name_for, print_results, session_of
from .script import on_ranks


def run_function(script: Path, name: str, options: argparse.Namespace, words: list[str]) -> int:
    """0 after the run, or 130 where it was interrupted.

    Raises WrongUsage if there is no such function, or if it does not take the arguments; and what
    the run raises.
    """
    # Ray gives its workers the folder of this program, if that is on the path.
    sys.argv = [str(script), *words]
    sys.path.insert(0, str(script.resolve().parent))
    function = _function(_module(script), name)
    try:
        arguments = keywords(words, function)
    except ValueError as error:
        raise WrongUsage(f"{script}:{name}: {error}") from None
    try:
        trackers = checked_trackers(options.tracker)
    except (ImportError, ValueError) as error:
        raise WrongUsage(f"--tracker: {error}") from None
    if options.detach:
        found, checkpoint = name_for(script, options.name), _checkpoints(options)
        session = session_of(options, checkpoint=checkpoint, name=found, **OF_DETACHED_RUN)
        return asyncio.run(begin(session, function, arguments))
    return on_ranks(lambda: asyncio.run(_run(function, arguments, options, trackers)))


def _module(script: Path) -> ModuleType:
    """The script as a module of its own name. Its functions are pickled by value, since workers
    cannot import it. Code under `if __name__ == "__main__"` does not run."""
    name = script.stem if script.stem not in sys.modules else f"script_{script.stem}"
    # With its loader: importlib finds one by the end of the file's name, which may not be .py.
    loader = SourceFileLoader(name, str(script.absolute()))
    spec = importlib.util.spec_from_file_location(name, script, loader=loader)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    cloudpickle.register_pickle_by_value(module)
    return module


def _function(module: ModuleType, name: str) -> Callable[..., Any]:
    found = getattr(module, name, None)
    if callable(found):
        return found  # type: ignore[no-any-return]
    theirs = [
        one
        for one, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__
    ]
    has = f"; it has {listed(theirs, 8)}" if theirs else "; it defines none"
    what = "no function" if found is None else f"{with_article(type(found))}, not a function,"
    has = did_you_mean(name, theirs) or has
    raise WrongUsage(f"{module.__file__} has {what} named {name!r}{has}")


def _checkpoints(options: argparse.Namespace) -> CheckpointConfig | None:
    if options.checkpoint is None:
        return None
    try:
        return CheckpointConfig(
            options.checkpoint,
            num_to_keep=options.keep,
            every_n_steps=options.save_every,
            resume=NEVER if options.fresh else options.resume or AUTO,
        )
    except (TypeError, ValueError) as error:
        raise WrongUsage(f"--checkpoint: {error}") from None


async def _run(
    function: Callable[..., Any],
    arguments: dict[str, Any],
    options: argparse.Namespace,
    trackers: tuple[Tracker, ...],
) -> int:
    progress = Progress()
    checkpoint = _checkpoints(options)
    session = session_of(options, checkpoint=checkpoint, progress=progress, trackers=trackers)
    with progress:
        async with session:
            results = await session.run(function, **arguments)
    print_results(results)
    return 0
