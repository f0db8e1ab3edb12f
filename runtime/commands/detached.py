"""`chorusline run --detach`, of a function or of a script, and from then on, from any terminal:
`chorusline attach NAME`, `chorusline stop NAME`."""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from chorusline.actors.errors import NoCluster
from chorusline.actors.messages.outcomes import RemoteTraceback
from chorusline.actors.ray_calls.detached_actors import OF_PROGRAM

from ..session import connecting
from ..session.detached.status import check_name
from ..session.session import Session, attach
from ..session.showing.progress import Progress
from ..session.showing.rank_output import label
from .arguments import WrongUsage
from .script import INTERRUPTED, print_error

AFTER_RUN_S = 60.0
"""Seconds that a session stays after the one run that it was begun for, if nobody is attached."""

OF_DETACHED_RUN: Mapping[str, Any] = {
    "detached": True,
    "idle_timeout_s": AFTER_RUN_S,
    "log_to_driver": False,
}
"""Arguments of its Session."""

_LONGEST_RESULT = 200  # characters of a result that are printed


def name_for(script: Path, given: str | None) -> str:
    """The name of the session for a run of a script: the given one, or one that nobody has.

    Raises WrongUsage for a name that no session can have."""
    stem = re.sub(r"[^A-Za-z0-9._-]", "-", script.stem).strip("._-")[:50] or "run"
    if f"{stem}-".startswith(OF_PROGRAM):
        stem = f"run-{stem}"  # Sessions that are not detached have names that begin so.
    name = given if given is not None else f"{stem}-{uuid.uuid4().hex[:4]}"
    try:
        check_name(name, True)
    except ValueError as error:
        raise WrongUsage(f"--name: {error}") from None
    return name


def session_of(options: argparse.Namespace, **more: Any) -> Session:
    """The session that the flags of a run ask for. more: arguments that one kind of run has.

    Raises WrongUsage for what no session takes."""
    try:
        return Session(
            options.workers,
            use_gpu=options.gpu,
            timeout_s=options.timeout,
            startup_timeout_s=options.startup_timeout,
            address=options.address,
            env_vars=dict(options.env),
            **more,
        )
    except (TypeError, ValueError) as error:
        raise WrongUsage(str(error)) from None


async def begin(
    session: Session, function: Callable[..., Any], arguments: Mapping[str, Any]
) -> int:
    """Start a detached session, begin one run there, print the session's name, and let go of it.

    The session ends by itself after the run; what the run returned can be had for a day."""
    async with session:
        try:
            await session.submit(function, **arguments)
        except BaseException:
            await session.stop()  # Nobody would know of it.
            raise
        print(session.name)
    return 0


def show_attached(name: str, address: str | None) -> int:
    """Show the run that is in progress, or the last one, to its end.

    Exit code: 0; 1 if the run has failed, if there is none, or no such session; 130 after an
    interrupt, which ends the showing, and not the run."""

    async def show() -> None:
        async with attach(name, address=address, progress=Progress()) as session:
            print_results(await session.results())

    return _exit_code(address, show)


def stop_session(name: str, address: str | None) -> int:
    """Exit code: 0; 1 if there is no such session."""

    async def stop() -> None:
        await attach(name, address=address).stop()  # Not attached: its host may hang.
        print(f"the session {name!r} has ended, and its resources are free")

    return _exit_code(address, stop)


def _exit_code(address: str | None, act: Callable[[], Coroutine[Any, Any, None]]) -> int:
    """What `act` comes to on the cluster: 0, or 1 or INTERRUPTED after an error, which is
    printed."""
    try:
        with connecting.connected(address):
            asyncio.run(act())
        return 0
    except KeyboardInterrupt:
        return INTERRUPTED
    except NoCluster as error:
        print(error, file=sys.stderr)
        return 1
    except Exception as error:
        # How the run has ended, with what is known beside it. Anything else is of this program.
        if isinstance(error.__cause__, RemoteTraceback) or hasattr(error, "__notes__"):
            print_error(error, None)
        else:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1


def print_results(results: Sequence[object]) -> None:
    """Print what the ranks returned, with their labels; nothing for None."""
    for rank, result in enumerate(results):
        if result is not None:
            text = repr(result)
            cut = text if len(text) <= _LONGEST_RESULT else f"{text[:_LONGEST_RESULT]}…"
            for line in f"returned {cut}".splitlines():
                print(f"{label(rank)} {line}")
