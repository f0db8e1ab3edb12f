"""`chorusline run script.py …`: runs a script as `python` would."""

from __future__ import annotations

import runpy
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

INTERRUPTED = 130  # 128 + SIGINT, as a shell reports it.


def run_script(script: Path, args: Sequence[str]) -> int:
    # Both before the script runs: Ray hands sys.path and the script's folder on to its workers.
    sys.argv = [str(script), *args]
    sys.path.insert(0, str(script.resolve().parent))
    try:
        # As __main__, so that its functions are pickled by value, as of a script they should be.
        runpy.run_path(str(script), run_name="__main__")
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        traceback.print_exception(error.with_traceback(below(script, error.__traceback__)))
        return 1
    return 0


def below(script: Path, trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the script's own first frame on, without this file and runpy.

    Nothing where the script was not reached: a SyntaxError says where it is by itself.
    """
    step = trace
    while step is not None and step.tb_frame.f_code.co_filename != str(script):
        step = step.tb_next
    return step
