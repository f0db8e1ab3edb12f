"""Seconds from the start of a program to its first training step, beside torchrun and Ray Train.

    python -m benchmarks.speed.startup [--rounds 5] [--workers 2] [--json]

Each program trains the model of benchmarks/trials with two workers, and is started in turns: on a
machine where nothing runs (Ray starts with the program), and on a Ray cluster that is up already,
which has run each program once before. The step counts when every rank has taken it. Below that:
seconds of `import chorusline` beside `import torch, ray`, in a new process each.
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
from collections.abc import Iterator
from pathlib import Path

from benchmarks.alternation import as_installed, attempt, cell, finish, median_of, parser, table
from benchmarks.trials.systems import SYSTEMS, WITHOUT_SPARES, System
from benchmarks.trials.trial import Run
from benchmarks.trials.workload import Workload

_ROOT = Path(__file__).resolve().parents[2]

ALONE = (WITHOUT_SPARES, SYSTEMS["torchrun checkpoints"], SYSTEMS["ray-train checkpoints"])
ON_CLUSTER = (WITHOUT_SPARES, SYSTEMS["ray-train checkpoints"])
IMPORTS = ("import chorusline", "import torch, ray")
_PATIENCE_S = 120.0


def first_step(system: System, num_workers: int) -> float:
    """Seconds until every rank has taken a step."""
    with tempfile.TemporaryDirectory() as folder:
        workload = Workload(folder, num_workers, 4 * num_workers * 2, batch_s=0.0)
        began_at = time.time()
        run = Run(system, workload, _PATIENCE_S)
        with contextlib.closing(run):
            if run.process.wait(_PATIENCE_S):
                raise RuntimeError(f"{system.name}: {run.output.read_text()[-2000:]}")
            firsts: dict[int, float] = {}
            for at, word, _, pid, _ in run.look():
                if word == "step":
                    firsts.setdefault(pid, at)
        if len(firsts) != num_workers:
            raise RuntimeError(f"{system.name}: {len(firsts)} of {num_workers} ranks took a step")
        return max(firsts.values()) - began_at


@contextlib.contextmanager
def cluster(num_cpus: int) -> Iterator[None]:
    """A Ray cluster of its own process, which programs find by RAY_ADDRESS."""
    program = (
        "import ray, signal, sys\n"
        f"ray.init('local', num_cpus={num_cpus}, include_dashboard=False)\n"
        "print(ray.get_runtime_context().gcs_address, flush=True)\n"
        "sys.stdin.read()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None and process.stdin is not None
    os.environ["RAY_ADDRESS"] = process.stdout.readline().strip()
    try:
        yield
    finally:
        del os.environ["RAY_ADDRESS"]
        process.stdin.close()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)


def imported(statement: str) -> float:
    began_at = time.monotonic()
    subprocess.run([sys.executable, "-c", statement], check=True, cwd=_ROOT)
    return time.monotonic() - began_at


def main() -> None:
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ.pop("RAY_ADDRESS", None)
    arguments = parser("Seconds from the start of a program to its first training step.")
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--workers", type=int, default=2)
    args = arguments.parse_args()
    as_installed()
    seconds: dict[str, dict[str, list[float]]] = {"alone": {}, "cluster": {}, "import": {}}

    def first(system: System) -> float:
        if system is WITHOUT_SPARES:
            return first_step(system, args.workers)
        return attempt(system.name, lambda: first_step(system, args.workers), math.nan)

    def note(case: str, name: str, value: float) -> None:
        seconds[case].setdefault(name, []).append(value)

    for _ in range(args.rounds):
        for system in ALONE:
            note("alone", system.name, first(system))
        for name in IMPORTS:
            note("import", name, imported(name))
    with cluster(args.workers + 2):
        for system in ON_CLUSTER:
            first(system)
        for _ in range(args.rounds):
            for system in ON_CLUSTER:
                note("cluster", system.name, first(system))

    rows, ratios, figures = [], {}, {}
    for case, by_name in seconds.items():
        our_name = next(iter(by_name))
        ours = median_of(by_name[our_name])
        for name, values in by_name.items():
            middle = median_of(values)
            figures[f"{case}/{name}"] = {"median_s": middle, "all_s": values}
            if name != our_name:
                ratios[f"{case}/{name}"] = ours / middle
            rows.append([case, name, cell(values, min, max), f"{ours / middle:.2f}"])
    table(
        f"{args.workers} workers, {args.rounds} rounds: seconds to the first step of all ranks",
        ["where", "program", "median (least, most)", "ours / it"],
        rows,
    )
    finish(args, ratios, figures)


if __name__ == "__main__":
    main()
