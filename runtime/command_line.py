"""The `chorusline` program: `run script.py [args…]` runs a script as `python` would, `checkpoint`
looks at checkpoints."""

from __future__ import annotations

import argparse
import runpy
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

INTERRUPTED = 130  # 128 + SIGINT, as a shell reports it.


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0, 1 for a script that failed, 2 for wrong usage, 130 for an interrupt.

    A script that exits by itself keeps its own code.
    """
    parser = argparse.ArgumentParser(
        prog="chorusline", description="Data-parallel training on Ray that keeps going."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    run = commands.add_parser(
        "run",
        help="run a training script, as python would",
        description="Runs a script as python would. It joins the Ray cluster of RAY_ADDRESS, "
        "or starts one of its own on this machine.",
    )
    run.add_argument("script", type=Path, help="a Python file that makes a Session")
    run.add_argument(
        "args", nargs=argparse.REMAINDER, metavar="…", help="handed to the script as they are"
    )
    checkpoint = commands.add_parser(
        "checkpoint",
        help="look at checkpoints, and make plain files of them",
        description="A place is a folder or a URL with checkpoints in it, or one checkpoint.",
    )
    actions = checkpoint.add_subparsers(dest="action", required=True, metavar="action")
    listed = actions.add_parser("list", help="the checkpoints of a place, each read and checked")
    listed.add_argument("place")
    exported = actions.add_parser("export", help="the newest whole one as one file of torch.save")
    exported.add_argument("place")
    exported.add_argument("file", type=Path, help="to write; torch.load reads it without us")
    options = parser.parse_args(argv)

    if options.command == "checkpoint":
        return look_at_checkpoints(options)
    script: Path = options.script
    if not script.exists():
        run.error(f"argument script: there is no file {str(script)!r} in {Path.cwd()}")
    if not script.is_file():
        run.error(f"argument script: {str(script)!r} is no file; name a Python script")
    return run_script(script, options.args)


def look_at_checkpoints(options: argparse.Namespace) -> int:
    from .checkpoint.errors import CheckpointError
    from .checkpoint.export import described, export

    try:
        if options.action == "export":
            taken = export(options.place, options.file)
            print(f"{options.file}: step {taken.manifest.step} of {taken.path}")
            return 0
        lines = 0
        for lines, line in enumerate(described(options.place), 1):  # noqa: B007
            print(line)
    except (CheckpointError, OSError, ValueError, ImportError) as error:
        print(error, file=sys.stderr)
        return 1
    if lines == 0:
        print(f"there is no checkpoint in {options.place}", file=sys.stderr)
    return 0 if lines else 1


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


if __name__ == "__main__":
    sys.exit(main())
