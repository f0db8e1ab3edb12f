"""The flags of `chorusline run script.py:function`, and of `chorusline run --workers 2 script.py`,
without torch: `--help` answers at once."""

from __future__ import annotations

import argparse

from . import arguments

USAGE = """chorusline run script.py …
       chorusline run --workers N [flags] script.py …
       chorusline run script.py:function [flags] [-- --name value …]"""

DESCRIPTION = """\
Runs a script as python would, with all that follows as its arguments; or, with flags before it, on
every rank of a session, as torchrun would; or calls function(ctx, name=value, …) on every rank. It
joins the Ray cluster of RAY_ADDRESS, or starts a cluster on this machine."""

_WORKERS = "workers"
_TORCHS_TIMEOUT_S = 1800.0  # torch.distributed's own default for Gloo.
_OF_CHECKPOINTS = ("--fresh", "--resume", "--save-every", "--keep")


def made(prog: str) -> argparse.ArgumentParser:
    """The parser of what stands between the function and `--`."""
    flags = arguments.Parser(prog=prog or "chorusline run", usage=USAGE, formatter_class=_OneColumn)
    _add_workers(flags, timeout_s=60.0)
    _add_trackers(flags)
    _add_checkpoints(flags)
    _add_detached(flags)
    return flags


def made_for_script(prog: str) -> argparse.ArgumentParser:
    """The parser of what stands between `run` and the end, if a flag comes first."""
    flags = arguments.Parser(prog=prog or "chorusline run", usage=USAGE, formatter_class=_OneColumn)
    _add_workers(flags, timeout_s=_TORCHS_TIMEOUT_S)
    _add_restarts(flags)
    _add_detached(flags)
    flags.add_argument("script", help="a Python file that torchrun could start")
    flags.add_argument(
        "args", nargs=argparse.REMAINDER, metavar="…", help="arguments of the script"
    )
    return flags


def _add_workers(flags: argparse.ArgumentParser, *, timeout_s: float) -> None:
    workers = flags.add_argument_group(_WORKERS)
    workers.add_argument(
        "--workers",
        type=arguments.workers,
        default=1,
        metavar="N|A..B",
        help=(
            "how many ranks: 4; or 2..8 for as many as fit, at least 2, and the run continues "
            "when workers are lost (default: 1)"
        ),
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
        type=arguments.seconds,
        default=timeout_s,
        metavar="S",
        help="seconds that a collective waits for all ranks (default: 60; for a script on every "
        f"rank {_TORCHS_TIMEOUT_S:.0f}, as in torch, if it gives no timeout itself)",
    )
    workers.add_argument(
        "--startup-timeout",
        type=arguments.seconds,
        default=60.0,
        metavar="S",
        help=(
            "seconds to wait for room in the cluster and for the workers to start; raise it "
            "where nodes have to start first (default: 60)"
        ),
    )


def _add_restarts(flags: argparse.ArgumentParser) -> None:
    restarts = flags.add_argument_group("a script on every rank")
    restarts.add_argument(
        "--max-restarts",
        type=arguments.count_or_zero,
        default=0,
        metavar="N",
        help=(
            "if a rank fails or is lost, start the script again on all ranks, up to N times; after "
            "a failure in new processes (default: 0)"
        ),
    )
    restarts.add_argument(
        "--spares",
        type=arguments.count_or_zero,
        default=0,
        metavar="N",
        help="with --max-restarts: workers that have started and wait, each with the resources of "
        "a rank; one takes the place of a lost rank at once (default: 0)",
    )


def _add_trackers(flags: argparse.ArgumentParser) -> None:
    recorded = flags.add_argument_group("records of the run of a function")
    recorded.add_argument(
        "--tracker",
        action="append",
        default=[],
        metavar="NAME[:X]",
        help="record it in: tensorboard[:FOLDER], mlflow[:EXPERIMENT], "
        "wandb[:PROJECT], jsonl[:FILE], opentelemetry; may be repeated",
    )


def _add_checkpoints(flags: argparse.ArgumentParser) -> None:
    kept = flags.add_argument_group("checkpoints of what the function registers")
    kept.add_argument(
        "--checkpoint",
        default=None,
        metavar="DIR",
        help=(
            "a folder that all ranks see, or a URL: save there, and resume from the newest "
            "checkpoint in it, if there is one"
        ),
    )
    begins = kept.add_mutually_exclusive_group()
    begins.add_argument(
        "--fresh",
        action="store_true",
        help="start at step 0, whatever is in DIR; old checkpoints stay",
    )
    begins.add_argument(
        "--resume",
        default=None,
        metavar="PATH",
        help=(
            "resume from this checkpoint, or from the newest one in this folder; an error if "
            "there is none"
        ),
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


def _add_detached(flags: argparse.ArgumentParser) -> None:
    detached = flags.add_argument_group("a run that outlives this program")
    detached.add_argument(
        "-d",
        "--detach",
        action="store_true",
        help=(
            "start the run on a cluster that stays, print the name of its session, and return; "
            "`chorusline attach NAME` shows it, `chorusline stop NAME` ends it"
        ),
    )
    detached.add_argument(
        "--name",
        default=None,
        help="of the session, with --detach (default: the script's, and four more characters)",
    )


def explained() -> str:
    """All flags with what they do."""
    flags = argparse.ArgumentParser(formatter_class=_OneColumn, add_help=False, usage="")
    _add_workers(flags, timeout_s=60.0)
    _add_restarts(flags)
    _add_trackers(flags)
    _add_checkpoints(flags)
    _add_detached(flags)
    _, heading, text = flags.format_help().partition(f"{_WORKERS}:\n")
    return heading + text


def without_checkpoint(given: argparse.Namespace) -> str | None:
    """The first flag that needs --checkpoint, if that is missing."""
    if given.checkpoint is not None:
        return None
    values = (given.fresh, given.resume, given.save_every, given.keep)
    return next((f for f, v in zip(_OF_CHECKPOINTS, values, strict=True) if v), None)


def why_not_detached(given: argparse.Namespace) -> str | None:
    """What does not go together with --detach, or its lack; None if all does."""
    if given.name is not None and not given.detach:
        return "--name is the name of a session that outlives this program; write --detach"
    if given.detach and getattr(given, "tracker", ()):
        return (
            "--tracker records in the program that waits for the run, and --detach ends it; leave "
            "one of them out"
        )
    if given.detach and getattr(given, "max_restarts", 0):
        return (
            "--max-restarts starts the script again from the program that waits for it, and "
            "--detach ends that; leave one of them out"
        )
    return None


class _OneColumn(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=26)
