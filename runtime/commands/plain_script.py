"""`chorusline run --workers 2 train.py …`: a script on every rank, as torchrun starts it."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
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
    restarts = 0
    with contextlib.ExitStack() as at_end:
        while True:
            session = session_of(options, max_failures=0, spares=options.spares, progress=False)
            async with session:
                # A cluster that the first session has started stays for the others.
                if restarts == 0 and connecting.connect(options.address):
                    at_end.callback(connecting.leave)
                # The workers that are left run the script again, and the session replaces a lost
                # one. Where the script itself has failed on a rank, all workers are new ones: what
                # it has left in its process may be the reason.
                is_lost = True
                while is_lost:
                    try:
                        await session.run(run_plain_script, script=script, num_restarts=restarts)
                        return 0
                    except Exception as error:
                        is_lost = isinstance(error, WorkerLost)
                        if isinstance(error, WorkerLost):
                            error.remedy = (
                                "To start a script again on all ranks, write --max-restarts 3."
                            )
                        if restarts == options.max_restarts:
                            raise
                        restarts += 1
                        told = f"{type(error).__name__}: {error}".rstrip(".")
                        where = "" if is_lost else ", in new processes"
                        print(
                            f"chorusline: {told}. All ranks start the script again{where}: "
                            f"restart {restarts} of {options.max_restarts}",
                            file=sys.stderr,
                        )
