"""Seconds that a plain script loses with a killed rank, beside torchrun.

    python -m benchmarks.speed.restarts [--script last_step.py] [--rounds 3] [--json]

Starts a script of tests/commands/plain_scripts on three ranks in turns: by `chorusline run
--max-restarts` with and without a spare worker, on a Ray cluster that is up, and by torchrun. The
script saves every 20 steps, and takes 0.1 s for each more. Rank 2 is killed after step 37. Times
are those of rank 2, without which no step ends: to its next step, and to its first step that no
rank had taken before.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from benchmarks.alternation import (
    as_installed,
    attempt,
    cell,
    finish,
    finished,
    median_of,
    parser,
    table,
)
from benchmarks.speed.startup import cluster

_ROOT = Path(__file__).resolve().parents[2]
_SCRIPTS = _ROOT / "tests/commands/plain_scripts"
_RANKS, _VICTIM, _KILLED_AFTER, _STEPS, _PACE_S = 3, 2, 37, 300, 0.1
_PATIENCE_S = 120.0
_FAILED = (math.nan, math.nan, math.nan)

_VARIABLES = {
    "OMP_NUM_THREADS": "1",
    "ACCELERATE_USE_CPU": "true",
    # Else torchrun's ranks look for those of the run before (docs/trials.md).
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}

_RUN = ("-m", "chorusline.runtime.commands.command_line", "run")
_OURS = (*_RUN, "--workers", str(_RANKS), "--max-restarts", "5")
_TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", str(_RANKS), "--max-restarts", "5")
WAYS = {
    "a spare worker": (*_OURS, "--spares", "1"),
    "no spare worker": _OURS,
    "torchrun": (*_TORCHRUN, "--standalone", "--monitor-interval", "0.1"),
}


def taken(folder: Path, rank: int) -> list[tuple[int, float]]:
    """The steps that a rank has taken, and when."""
    path = folder / f"steps-{rank}"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(int(step), float(at)) for step, at in map(str.split, lines)]


def killed(way: str, script: str) -> tuple[float, float, float]:
    """Seconds to the next step and to the first new one, and the number of steps taken again."""
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as at_end:
        folder = Path(name)
        output = at_end.enter_context((folder / "output").open("w+"))
        process = subprocess.Popen(
            [sys.executable, *WAYS[way], str(_SCRIPTS / script), name, str(_STEPS), str(_PACE_S)],
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=_ROOT,
            env={**os.environ, **_VARIABLES, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        at_end.callback(_end, process)

        def since(begun: int, step: int) -> list[tuple[int, float]]:
            """Wait until the victim, which has taken `begun` steps, has taken this one."""
            give_up_at = time.monotonic() + _PATIENCE_S
            while not any(one >= step for one, _ in taken(folder, _VICTIM)[begun:]):
                if process.poll() is not None or time.monotonic() > give_up_at:
                    output.seek(0)
                    raise RuntimeError(f"no step {step}: {output.read().strip()[-500:]!r}")
                time.sleep(0.01)
            return taken(folder, _VICTIM)[begun:]

        since(0, _KILLED_AFTER)
        at = time.time()
        os.kill(int((folder / f"pid-{_VICTIM}").read_text()), signal.SIGKILL)
        begun = len(taken(folder, _VICTIM))
        first, first_at = since(begun, 1)[0]
        latest = max(
            step for rank in range(_RANKS) for step, when in taken(folder, rank) if when < first_at
        )
        new_at = next(when for step, when in since(begun, latest + 1) if step > latest)
        return first_at - at, new_at - at, max(0, latest - first + 1)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGINT)
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def main() -> None:
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ.pop("RAY_ADDRESS", None)
    flags = parser("Seconds that a plain script loses with a killed rank.")
    flags.add_argument("--script", default="last_step.py")
    flags.add_argument("--rounds", type=int, default=3)
    args = flags.parse_args()
    as_installed()
    found: dict[str, list[tuple[float, float, float]]] = {way: [] for way in WAYS}
    with cluster(_RANKS + 1):
        for _ in range(args.rounds):
            for way, of_way in found.items():
                run = partial(killed, way, args.script)
                of_way.append(attempt(way, run, _FAILED) if way == "torchrun" else run())
    rows, figures = [], {}
    for way, of_way in found.items():
        columns = [list(column) for column in zip(*of_way, strict=True)]
        figures[way] = dict(zip(("step_s", "new_step_s", "taken_again"), columns, strict=True))
        spreads = [cell(column, min, max) for column in columns[:2]]
        rows.append([way, *spreads, ", ".join(f"{again:g}" for again in finished(columns[2]))])
    table(
        f"{args.script}, {args.rounds} rounds: medians (least, most) from SIGKILL",
        ["", "s to a step", "s to a new step", "steps taken again"],
        rows,
    )
    peer = median_of(figures["torchrun"]["new_step_s"])
    ratios = {
        way: median_of(of_way["new_step_s"]) / peer
        for way, of_way in figures.items()
        if way != "torchrun"
    }
    finish(args, ratios, figures)


if __name__ == "__main__":
    main()
