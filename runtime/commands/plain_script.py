"""`chorusline run --workers 2 train.py …`: a script on every rank, as torchrun starts it."""

from __future__ import annotations

import argparse
import asyncio
import sys
import uuid
from pathlib import Path

from chorusline.actors.errors import WorkerLost

from ..program.plain_script import PlainScript, run_plain_script
from ..session import connecting
from .detached import OF_DETACHED_RUN, begin, name_for, session_of
from .script import on_ranks


def run_on_ranks(path: Path, options: argparse.Namespace) -> int:
    """0 after the run, or 130 where it was interrupted.

    Raises WrongUsage for a --name that no session can have, and what the run raises."""
    name = name_for(path, options.name) if options.detach else ""
    sys.path.insert(0, str(path.resolve().parent))
    script = PlainScript.read(path, tuple(options.args), uuid.uuid4().hex)
    if options.detach:
        session = session_of(options, name=name, max_failures=0, **OF_DETACHED_RUN)
        return asyncio.run(begin(session, run_plain_script, {"script": script}))
    return on_ranks(lambda: asyncio.run(_run(script, options)))


async def _run(script: PlainScript, options: argparse.Namespace) -> int:
    of_script = {"max_failures": 0, "spares": options.spares, "progress": False}
    session = await session_of(options, **of_script).start()
    # A cluster that the first session has started stays for the others.
    connection = connecting.connect(options.address)
    try:
        for restarts in range(options.max_restarts + 1):
            try:
                await session.run(run_plain_script, script=script, num_restarts=restarts)
                break
            except WorkerLost as error:
                # The workers that are left run the script again, and the session replaces this one.
                again = "To start a script again on all ranks, write --max-restarts 3."
                error.remedy = "" if options.max_restarts else again
                _begin_again(error, restarts + 1, options.max_restarts)
            except Exception as error:
                _begin_again(error, restarts + 1, options.max_restarts, ", in new processes")
                # What the script has left in its processes may be why it has failed.
                await session.close()
                session = await session_of(options, **of_script).start()
    finally:
        await session.close()
        connection.leave()
    return 0


def _begin_again(error: Exception, restart: int, most: int, where: str = "") -> None:
    """Say that all ranks start the script again. Raises the error after the last restart."""
    if restart > most:
        raise error
    outcome = f"{type(error).__name__}: {error}".rstrip(".")
    again = f"All ranks start the script again{where}: restart {restart} of {most}"
    print(f"chorusline: {outcome}. {again}", file=sys.stderr)
