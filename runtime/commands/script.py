"""`chorusline run script.py …`: runs a script as `python` would."""

from __future__ import annotations

import runpy
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from .arguments import WrongUsage

INTERRUPTED = 130  # 128 + SIGINT, as a shell reports it.
TERMINATED = 128 + signal.SIGTERM


def unwind_on_sigterm() -> None:
    """From now on SIGTERM unwinds this process, which removes its files and ends its processes;
    unless its program has a handler."""
    is_main = threading.current_thread() is threading.main_thread()  # Others set no handlers.
    if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))


def exit_code(script: Path, act: Callable[[], int]) -> int:
    """What `act` returns, which runs the script; 1 or INTERRUPTED after an error, which is printed.

    Raises WrongUsage, for the parser of the command line."""
    try:
        return act()
    except KeyboardInterrupt:  # Outside of a run on ranks: `on_ranks` has a sentence of its own.
        print("Interrupted.", file=sys.stderr)
        return INTERRUPTED
    except WrongUsage:
        raise
    except Exception as error:
        print_error(error, _below(script, error.__traceback__))
        return 1


def run_script(script: Path, args: Sequence[str]) -> int:
    # Set both before the script runs: Ray gives sys.path and the script's folder to its workers.
    sys.argv = [str(script), *args]
    sys.path.insert(0, str(script.resolve().parent))
    # As __main__: its functions are pickled by value, since workers cannot import the script.
    runpy.run_path(str(script), run_name="__main__")
    return 0


def on_ranks(act: Callable[[], int]) -> int:
    """What `act` returns, a run on ranks; after Ctrl-C or SIGTERM a line says that they stopped."""
    try:
        return act()
    except KeyboardInterrupt:
        print("Interrupted: all ranks were stopped.", file=sys.stderr)
        return INTERRUPTED
    except SystemExit as error:
        if error.code == TERMINATED:
            print("Terminated: all ranks were stopped.", file=sys.stderr)
        raise


def print_error(error: BaseException, trace: TracebackType | None) -> None:
    """Print the error and its causes; a NoCluster in one line.

    trace: the frames of the user's code; None: there are none."""
    # Not above: `--help` answers without Ray.
    from chorusline.actors.errors import NoCluster

    from ..session.interrupts import users_frames

    if isinstance(error, NoCluster):
        print(error, file=sys.stderr)
        return
    traceback.print_exception(error.with_traceback(users_frames(error, trace)))


def _below(script: Path, trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the script's first frame on, without the frames of this file and runpy.

    None if the script did not begin: a SyntaxError names its own line.
    """
    step = trace
    while step is not None and step.tb_frame.f_code.co_filename != str(script):
        step = step.tb_next
    return step
