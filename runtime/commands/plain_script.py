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
    with contextlib.ExitStack() as at_end:
        for restart in range(options.max_restarts + 1):
            # Nothing is registered by a script: it begins again in new processes.
            session = session_of(options, max_failures=0, progress=False)
            async with session:
                # A cluster that the first session has started stays for the others.
                if restart == 0 and connecting.connect(options.address):
                    at_end.callback(connecting.leave)
                try:
                    await session.run(run_plain_script, script=script, num_restarts=restart)
                    return 0
                except Exception as error:
                    if isinstance(error, WorkerLost):
                        error.remedy = (
                            "To start a script again on all ranks, write --max-restarts 3."
                        )
                    if restart == options.max_restarts:
                        raise
                    told = f"{type(error).__name__}: {error}".rstrip(".")
                    print(
                        f"chorusline: {told}. All ranks start the script again, in new processes: "
                        f"restart {restart + 1} of {options.max_restarts}",
                        file=sys.stderr,
                    )
    raise AssertionError("the last restart returns or raises")
