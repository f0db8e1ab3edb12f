"""A script without a train function, run on every rank as torchrun would run it.

The script makes its own process group, or a library does it for the script: both get the group of
the run (runtime/process/torch_distributed.py). It runs in the worker's process, in the training
thread, as the module `__main__`. What it leaves in that process is not undone, so a session
runs one script once.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from ..process.torch_distributed import like_torchrun
from .context import Context, call_of
from .last_step import LastStep

LEADS_TO_USERS_CODE = True  # Tracebacks leave out the frames of this file (outcomes.py).


@dataclass(frozen=True, slots=True)
class PlainScript:
    """A script as it is sent to the workers.

    path: of its file where it was read; the nodes need not have it.
    source: its text.
    arguments: sys.argv of the script.
    folder: the current folder of the command; a worker goes there if its node has it.
    run_id: TORCHELASTIC_RUN_ID, the same in all restarts.
    """

    path: str
    source: bytes
    arguments: tuple[str, ...]
    folder: str
    run_id: str

    @classmethod
    def read(cls, path: Path, arguments: tuple[str, ...], run_id: str) -> PlainScript:
        whole = path.resolve()
        words = (str(path), *arguments)
        return cls(str(whole), whole.read_bytes(), words, str(Path.cwd()), run_id)


def run_plain_script(ctx: Context, script: PlainScript, num_restarts: int = 0) -> None:
    """Run the script on this rank: a train function.

    num_restarts: how often the ranks have begun the script before.

    If it ends because another rank is lost, the last step is written down first (last_step.py).

    Raises what the script raises; RuntimeError for an exit code other than 0.
    """
    code = compile(script.source, script.path, "exec")
    call = call_of(ctx)
    last_step = call.last_step = LastStep(ctx.group)
    with (
        like_torchrun(call, script.run_id, num_restarts),
        _as_main(script) as main,
        last_step.watched(),
    ):
        try:
            exec(code, main.__dict__)
        except SystemExit as left:
            if left.code not in (None, 0):
                raise RuntimeError(
                    f"{script.path} has called sys.exit({left.code!r}) on rank {ctx.rank}"
                ) from left
        except BaseException as error:
            last_step.write(error)
            raise


@contextlib.contextmanager
def _as_main(script: PlainScript) -> Iterator[ModuleType]:
    """The module `__main__` of the process, with the arguments and the folder of a script, inside a
    with-block."""
    main = ModuleType("__main__")
    main.__file__ = script.path
    if not Path(script.path).exists():  # Tracebacks quote the text.
        lines = script.source.decode(errors="replace").splitlines(keepends=True)
        linecache.cache[script.path] = len(script.source), None, lines, script.path
    before = sys.modules["__main__"], sys.argv, sys.path[:], Path.cwd()
    # Pickles of the script's classes name __main__.
    sys.modules["__main__"] = main
    sys.argv = [*script.arguments]
    sys.path.insert(0, str(Path(script.path).parent))
    with contextlib.suppress(OSError):
        os.chdir(script.folder)
    try:
        yield main
    finally:
        sys.modules["__main__"], sys.argv, sys.path[:], folder = before
        os.chdir(folder)
