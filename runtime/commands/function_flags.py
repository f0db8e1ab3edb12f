"""The flags of `chorusline run script.py:function`, without torch: `--help` answers at once."""

from __future__ import annotations

import argparse

from . import arguments

USAGE = """chorusline run script.py …
       chorusline run script.py:function [flags] [-- --name value …]"""

DESCRIPTION = """\
Runs a script as python would, with all that follows as its arguments; or calls
function(ctx, name=value, …) on every rank of a session. It joins the Ray cluster of
RAY_ADDRESS, or starts a cluster on this machine."""

_WORKERS = "workers of script.py:function"
_OF_CHECKPOINTS = ("--fresh", "--resume", "--save-every", "--keep")


def made(prog: str) -> argparse.ArgumentParser:
    """The parser of what stands between the function and `--`."""
    flags = argparse.ArgumentParser(
        prog=prog or "chorusline run", usage=USAGE, formatter_class=_OneColumn
    )
    workers = flags.add_argument_group(_WORKERS)
    workers.add_argument(
        "--workers",
        type=arguments.workers,
        default=1,
        metavar="N|A..B",
        help="how many ranks: 4; or 2..8 for as many as fit, at least 2, and to go on when "
        "workers are lost (default: 1)",
    )
    workers.add_argument("--gpu", action="store_true", help="one GPU for each worker")
    workers.add_argument(
        "--address",
        default=None,
        help="of a running Ray cluster (default: RAY_ADDRESS, or a cluster that starts here and "
        "ends with the run)",
    )
    workers.add_argument(
        "--env",
        type=arguments.variable,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an environment variable of the workers; may be repeated",
    )
    workers.add_argument(
        "--timeout",
        type=float,
        default=60.0,
        metavar="S",
        help="seconds that a collective waits for all ranks (default: 60)",
    )
    workers.add_argument(
        "--startup-timeout",
        type=float,
        default=60.0,
        metavar="S",
        help="seconds for room in the cluster and for the workers' start; more where nodes have "
        "to start first (default: 60)",
    )
    kept = flags.add_argument_group("checkpoints of what the function registers")
    kept.add_argument(
        "--checkpoint",
        default=None,
        metavar="DIR",
        help="a folder that all ranks see, or a URL: save there, and go on from the newest "
        "checkpoint in it, if there is one",
    )
    begins = kept.add_mutually_exclusive_group()
    begins.add_argument(
        "--fresh",
        action="store_true",
        help="begin at step 0, whatever is in DIR; old checkpoints stay",
    )
    begins.add_argument(
        "--resume",
        default=None,
        metavar="PATH",
        help="go on from this checkpoint, or from the newest one in this folder; an error if "
        "there is none",
    )
    kept.add_argument(
        "--save-every",
        type=arguments.count,
        default=None,
        metavar="N",
        help="save after every N steps (default: only where the function calls ctx.save())",
    )
    kept.add_argument(
        "--keep",
        type=arguments.count,
        default=None,
        metavar="N",
        help="keep the N newest checkpoints (default: all)",
    )
    return flags


def explained() -> str:
    """All flags with what they do."""
    _, heading, text = made("").format_help().partition(_WORKERS)
    return heading + text


def without_checkpoint(given: argparse.Namespace) -> str | None:
    """The first flag that needs --checkpoint, if that is missing."""
    if given.checkpoint is not None:
        return None
    values = (given.fresh, given.resume, given.save_every, given.keep)
    return next((f for f, v in zip(_OF_CHECKPOINTS, values, strict=True) if v), None)


class _OneColumn(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=26)
