"""The `chorusline` program: its commands and their flags.

run script.py …              run a script, as `python` would
run --workers 2 script.py …  run a script on ranks, as `torchrun` would
run script.py:function …     run a function of the script on ranks
run --detach …               begin one of the last two, and return at once
status, doctor, bench        show what runs, what is wrong here, how fast collectives are
attach, stop                 show a detached session, and end it
checkpoint                   list and export checkpoints
compare                      the first step after which two runs differ
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from chorusline.actors.ray_calls.versions import our_version

from . import arguments, function_flags
from .script import exit_code, run_script, unwind_on_sigterm

FAILED = 1


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0, 1 for a failure, 2 for wrong usage, 130 for an interrupt, 143 for SIGTERM.

    If a script exits by itself, its exit code is returned.
    """
    parser = arguments.Parser(
        prog="chorusline", description="Data-parallel training on Ray that keeps going."
    )
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    run = commands.add_parser(
        "run",
        help="run a training script, or a function of it on ranks",
        usage=function_flags.USAGE,
        description=function_flags.DESCRIPTION,
        epilog=function_flags.explained(),
        formatter_class=argparse.RawDescriptionHelpFormatter,  # The epilog is laid out already.
    )
    run.add_argument(
        "script",
        help="a Python file that makes a Session, or file:function of one that does not",
    )
    run.add_argument(
        "args", nargs=argparse.REMAINDER, metavar="…", help="flags, --, arguments of the function"
    )
    status = commands.add_parser(
        "status",
        help="show running sessions, from another terminal",
        description="Shows a table of the sessions of a cluster; on a terminal it is updated until "
        "Ctrl-C.",
    )
    of_cluster = "address of the Ray cluster (default: RAY_ADDRESS, else the local cluster)"
    status.add_argument("session", nargs="?", help="name of one session (default: all)")
    status.add_argument("--address", default=None, help=of_cluster)
    status.add_argument("--once", action="store_true", help="print the table once")
    attach = commands.add_parser(
        "attach",
        help="show a detached session, from another terminal",
        description=(
            "Shows the run that is in progress, or the last one, with its progress and its "
            "output, until it has ended. Ctrl-C stops the command; the run continues."
        ),
    )
    stop = commands.add_parser(
        "stop",
        help="end a detached session",
        description="Aborts the run in progress, ends the workers, and frees their resources.",
    )
    for one in (attach, stop):
        one.add_argument(
            "session",
            type=arguments.detached_name,
            help="name of a detached session; others, session-…, end with their program",
        )
        one.add_argument("--address", default=None, help=of_cluster)
    commands.add_parser(
        "doctor",
        help="list what this machine has, what is wrong with it, and the remedy",
        description="Exit code 1 if something prevents running here.",
    )
    bench = commands.add_parser(
        "bench",
        help="measure collectives between ranks of this machine",
        description="Prints a table for each operation, with the columns of nccl-tests.",
    )
    bench.add_argument("--ranks", type=int, default=2, help="processes (default: 2)")
    bench.add_argument("--op", default="all_reduce", help="one, several with commas, or all")
    bench.add_argument("--sizes", default="4,64K,1M,16M", help="bytes, as in 4,64K,1M,16M")
    bench.add_argument(
        "--backend", choices=["shared-memory", "gloo", "nccl"], default="shared-memory"
    )
    bench.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    checkpoint = commands.add_parser(
        "checkpoint",
        help="list checkpoints, and export them as plain files",
    )
    place = "a folder or URL with checkpoints, or one checkpoint"
    actions = checkpoint.add_subparsers(dest="action", required=True, metavar="action")
    listed = actions.add_parser("list", help="read, check and list the checkpoints of a place")
    listed.add_argument("place", help=place)
    exported = actions.add_parser("export", help="write the newest complete one to one file")
    exported.add_argument("place", help=place)
    exported.add_argument("file", type=Path, help="to write")
    exported.add_argument(
        "--format",
        choices=["torch", "safetensors"],
        default=None,
        help="all states, for torch.load; or the weights of modules as safetensors (default: by "
        "the name of the file)",
    )
    compare = commands.add_parser(
        "compare",
        help="find the first step after which two runs differ, and in which parameters",
        description="Reads two files that ctx.write_digests has written. Exit code 1 if the runs "
        "differ in a step that both have.",
    )
    compare.add_argument("one", type=Path, help="a file of digests")
    compare.add_argument("other", type=Path, help="that of another run")
    given = list(sys.argv[1:] if argv is None else argv)
    # A flag of the ranks, which comes before the script.
    has_flag = any(word.startswith("-") and word not in ("-h", "--help") for word in given[1:2])
    if given[:1] == ["run"] and has_flag:
        return _run_on_ranks(function_flags.made_for_script(run.prog), given[1:])
    # argparse drops a `--` that comes first in a REMAINDER, so split there before it parses.
    is_run, is_function = given[:1] == ["run"], arguments.names_function(given[1:2])
    if is_run and not is_function:
        end, theirs = 2, given[2:]  # All that follows the script is its own.
    else:
        end = given.index("--") if is_run and "--" in given else len(given)
        theirs = given[end + 1 :]
    options = parser.parse_args(given[:end])
    # A script is ended by SIGTERM as `python` would be; a session in it changes that.
    if not is_run or is_function:
        unwind_on_sigterm()

    match options.command:
        case "run":
            return _run(run, options, theirs)
        case "status":
            from .status import show_status

            return show_status(options.session, options.address, options.once)
        case "attach":
            from .detached import show_attached

            return show_attached(options.session, options.address)
        case "stop":
            from .detached import stop_session

            return stop_session(options.session, options.address)
        case "doctor":
            from .doctor import show_doctor

            return show_doctor()
        case "bench":
            from .bench import show_bench

            try:
                return show_bench(options)
            except arguments.WrongUsage as error:
                bench.error(str(error))
        case "compare":
            from .compare import show_comparison

            try:
                return show_comparison(options.one, options.other)
            except arguments.WrongUsage as error:
                compare.error(str(error))
    return look_at_checkpoints(options)


def _run(run: argparse.ArgumentParser, options: argparse.Namespace, theirs: list[str]) -> int:
    script, function = arguments.script_and_function(options.script)
    if not script.exists():
        run.error(f"argument script: there is no file {str(script)!r} in {Path.cwd()}")
    if not script.is_file():
        run.error(f"argument script: {str(script)!r} is not a file; name a Python script")
    if function is None:
        return exit_code(script, lambda: run_script(script, theirs))
    flags = function_flags.made(run.prog)
    given, unknown = flags.parse_known_args(options.args)
    if unknown:
        flags.error(
            f"unrecognized arguments: {' '.join(unknown)}; write the function's own after --"
        )
    if needless := function_flags.without_checkpoint(given):
        flags.error(f"{needless} configures checkpoints; write --checkpoint DIR as well")
    if wrong := function_flags.why_not_detached(given):
        flags.error(wrong)
    from .function import run_function

    try:
        return exit_code(script, lambda: run_function(script, function, given, theirs))
    except arguments.WrongUsage as error:
        flags.error(str(error))


def _run_on_ranks(flags: argparse.ArgumentParser, given: list[str]) -> int:
    options = flags.parse_args(given)
    # argparse drops a `--` right after the script, which is the script's.
    if given[: len(given) - len(options.args)][-1:] == ["--"]:
        options.args.insert(0, "--")
    if wrong := function_flags.why_not_detached(options):
        flags.error(wrong)
    if options.spares and not options.max_restarts:
        flags.error("--spares has workers wait for a restart; write --max-restarts 3 as well")
    script, function = arguments.script_and_function(options.script)
    if function is not None:
        flags.error(
            f"{options.script!r} names a function, and its flags come after it: chorusline run "
            f"{options.script} --workers 2"
        )
    if not script.is_file():
        flags.error(f"argument script: there is no file {str(script)!r} in {Path.cwd()}")
    unwind_on_sigterm()
    from .plain_script import run_on_ranks

    try:
        return exit_code(script, lambda: run_on_ranks(script, options))
    except arguments.WrongUsage as error:
        flags.error(str(error))


def _version() -> str:
    if ours := our_version():
        return f"chorusline {ours}"
    return "chorusline, which is not installed here: run it in the environment it is in"


def look_at_checkpoints(options: argparse.Namespace) -> int:
    from chorusline.collectives.contract.errors import plain

    from ..checkpoint.export import described, export
    from ..checkpoint.format.errors import CheckpointError

    try:
        if options.action == "export":
            taken = export(options.place, options.file, options.format)
            print(f"{options.file}: step {taken.manifest.step} of {taken.path}")
            return 0
        lines = 0
        for lines, line in enumerate(described(options.place), 1):  # noqa: B007
            print(plain(line))  # The names in a checkpoint are texts of others.
    except (CheckpointError, OSError, ValueError, ImportError) as error:
        print(plain(str(error)), file=sys.stderr)
        return FAILED
    if lines == 0:
        print(f"there is no checkpoint in {options.place}", file=sys.stderr)
    return 0 if lines else FAILED


if __name__ == "__main__":
    sys.exit(main())
