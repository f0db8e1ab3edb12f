"""What a script shows of an error: of Ctrl-C and of a cluster that is not there one line, and of a
run that has failed the user's frames, where Python would print forty of ours and of asyncio's."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from types import TracebackType

from chorusline.actors.errors import NoCluster
from chorusline.actors.messages.outcomes import RemoteTraceback
from chorusline.collectives.contract.call_site import users_traceback
from chorusline.collectives.contract.errors import ChoruslineError, chain_of


def show_in_one_line() -> None:
    """From now on a KeyboardInterrupt that nobody catches, and that came while a session was at
    work, ends this process with one line and status 130, as a shell reports SIGINT. The user's
    `except` and `finally` have run before. A note of the cancelled run takes the place of the line:
    that of a detached session continues. A NoCluster is one line as well, and status 1. Any other
    exception is for the hook that is there, without our frames if a run has raised it."""
    before = sys.excepthook
    if getattr(before, "__module__", "") == __name__:
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt) and _came_from_a_session(error):
            notes = [note for one in chain_of(error) for note in getattr(one, "__notes__", ())]
            line = f"Interrupted. {notes[0]}" if notes else "Interrupted: all ranks were stopped."
            print(line, file=sys.stderr)  # noqa: T201
            # Python's own end by SIGINT is lost where an exit handler, such as Ray's, evaluates
            # code: then the status would be 1.
            sys.exit(128 + signal.SIGINT)
        elif isinstance(error, NoCluster):
            print(error, file=sys.stderr)  # noqa: T201
        else:
            trace = users_frames(error, trace)
            before(kind, error.with_traceback(trace), trace)

    hook.__module__ = __name__
    sys.excepthook = hook


def users_frames(error: BaseException, trace: TracebackType | None) -> TracebackType | None:
    """The frames of the user's files in a traceback of an error with which a run, or the start of a
    session, has ended: its text says all, and the frames of a rank are in its cause. Of any other
    error, which may be a fault of ours, all frames."""
    if not isinstance(error, ChoruslineError) and not isinstance(error.__cause__, RemoteTraceback):
        return trace
    return users_traceback(trace)


def _came_from_a_session(error: BaseException) -> bool:
    # asyncio.run raises a KeyboardInterrupt of its own during the handling of a cancelled task.
    # By names of modules: files have another path where chorusline/ links to the three folders.
    ours = "chorusline.runtime."
    return any(name.startswith(ours) for one in chain_of(error) for name in _modules(one))


def _modules(error: BaseException) -> Iterator[str]:
    trace = error.__traceback__
    while trace is not None:
        yield str(trace.tb_frame.f_globals.get("__name__"))
        trace = trace.tb_next
