"""The tables of docs/performance.md, "Compared": ours and the peers, from one run of one command.

    python -m benchmarks.speed.compared [--json] [--runs 3] [--only step,torch_backend]

Runs the benchmarks that the page quotes one after another, and all of them `--runs` times. A row
shows the medians of the runs and, in brackets, the ratio of every run, so that a reader sees how
far they lie apart; no run is left out. The last column is the file in benchmarks/ that prints it.
Then come the trials (trials/check.py), with `--runs` trainings of each system: counts of all of
them, medians of times and of goodput. Below the tables stand the commit, and the machine's load
before each benchmark. Two hours on two cores: recovery half an hour, the storm of the trials one.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from benchmarks.alternation import commit, finish, median_of, parser

COMMANDS = {
    "collectives": (
        "benchmarks.speed.collectives --no-ray --ranks 2 --operations all_reduce "
        "--sizes 4B,1MiB,16MiB"
    ),
    "step": "benchmarks.speed.step",
    "torch_backend": "benchmarks.speed.torch_backend --sizes 2M",
    "recovery": "benchmarks.speed.recovery",
}

TRIALS = {
    "storm": "benchmarks.trials.check --storm-every 15 --minutes 2",
    "trials": (
        "benchmarks.trials.check --seed 200 --faults 4 --samples 1800 "
        "--kinds kill,two,again,newcomer,stop,throttle,drain"
    ),
}

Figures: TypeAlias = dict[str, Any]
"""What a benchmark prints under "figures" with --json."""


@dataclass(frozen=True)
class Row:
    """seconds: ours and the peer's (NaN if it has failed), out of a benchmark's figures. unit: what
    they are shown in."""

    title: str
    benchmark: str
    unit: str
    seconds: Callable[[Figures], tuple[float, float]]


def all_reduce(size: str) -> Callable[[Figures], tuple[float, float]]:
    def seconds(figures: Figures) -> tuple[float, float]:
        return _pair(figures["medians_s"][f"all_reduce/2/{size}"], "ours", "gloo")

    return seconds


def of_ways(case: str, ours: str, peer: str) -> Callable[[Figures], tuple[float, float]]:
    def seconds(figures: Figures) -> tuple[float, float]:
        return _pair(figures[case]["medians_s"], ours, peer)

    return seconds


def _pair(medians: Figures, ours: str, peer: str) -> tuple[float, float]:
    return medians[ours], math.nan if medians[peer] is None else medians[peer]


def recovery(figures: Figures) -> tuple[float, float]:
    ours, peer = (
        median_of([trial["seconds"] for trial in figures[who]]) for who in ("ours", "Ray Train")
    )
    return ours, peer


ROWS = (
    Row("all_reduce 4 B, 2 ranks (Gloo)", "collectives", "µs", all_reduce("4B")),
    Row("all_reduce 1 MiB, 2 ranks (Gloo)", "collectives", "µs", all_reduce("1MiB")),
    Row("all_reduce 16 MiB, 2 ranks (Gloo)", "collectives", "ms", all_reduce("16MiB")),
    Row("step, 2 M parameters, DDP + AdamW", "step", "ms", of_ways("2M", "ddp", "torch ddp")),
    Row("step, 2 M parameters, DDP + ZeRO", "step", "ms", of_ways("2M", "zero", "torch zero")),
    Row("step, 25 M parameters, DDP + AdamW", "step", "ms", of_ways("25M", "ddp", "torch ddp")),
    Row("step, 25 M parameters, DDP + ZeRO", "step", "ms", of_ways("25M", "zero", "torch zero")),
    Row(
        "step in Join, 2 M parameters, DDP + ZeRO",
        "step",
        "ms",
        of_ways("2M", "zero in Join", "torch zero in Join"),
    ),
    Row(
        "stock FSDP2 on our groups, 2 M parameters (Gloo)",
        "torch_backend",
        "ms",
        of_ways("2M parameters", "fsdp2 chorusline", "fsdp2 gloo"),
    ),
    Row("SIGKILL of one of 4 workers to the next step (Ray Train)", "recovery", "s", recovery),
)
SYSTEMS = {
    "chorusline zero": "Chorusline",
    "torchft": "torchft",
    "ray-train torchft": "Ray Train + torchft",
    "ray-train checkpoints": "Ray Train",
    "torchrun checkpoints": "torchrun",
}
"""Of trials/systems.py, and what the table calls them."""


@dataclass(frozen=True)
class TrialsRow:
    """column: of the table that trials/check.py prints."""

    title: str
    benchmark: str
    column: str


TRIALS_ROWS = (
    TrialsRow("a rank killed every 15 s: trainings that are over ↑", "storm", "over"),
    TrialsRow("a rank killed every 15 s: trainings that hung ↓", "storm", "hangs"),
    TrialsRow("a rank killed every 15 s: goodput ↑", "storm", "goodput"),
    TrialsRow("a rank killed every 15 s: seconds to the second new step ↓", "storm", "next"),
    TrialsRow("a rank killed every 15 s: steps repeated ↓", "storm", "again"),
    TrialsRow("kills and a drain: trainings that are over ↑", "trials", "over"),
    TrialsRow("kills and a drain: trainings that hung ↓", "trials", "hangs"),
    TrialsRow("kills and a drain: samples lost ↓", "trials", "never"),
)
_PER_SECOND = {"s": 1.0, "ms": 1e3, "µs": 1e6}


def file_of(benchmark: str) -> str:
    return COMMANDS[benchmark].split()[0].replace(".", "/") + ".py"


def markdown(rows: list[tuple[Row, list[tuple[float, float]]]]) -> str:
    """The table. rows: each with ours and the peer's seconds, by run."""
    lines = ["| | Chorusline | peer | ratio (each run) | measured by |", "|---|---|---|---|---|"]
    for row, runs in rows:
        factor = _PER_SECOND[row.unit]
        ours, peer = (median_of(column) * factor for column in zip(*runs, strict=True))
        ratios = [ours_s / peer_s for ours_s, peer_s in runs]
        each = ", ".join(f"{ratio:.2g}" for ratio in ratios)
        line = (
            f"| {row.title}, {row.unit} | {ours:.3g} | {peer:.3g} | "
            f"{median_of(ratios):.2g} ({each}) | {file_of(row.benchmark)} |"
        )
        lines.append(re.sub(r"\bnan\b", "failed", line))
    return "\n".join(lines)


def markdown_of_trials(rows: Sequence[tuple[TrialsRow, Figures]]) -> str:
    """The table. rows: each with what its benchmark has printed, by system."""
    lines = [f"| | {' | '.join(SYSTEMS.values())} |", f"|---|{'---|' * len(SYSTEMS)}"]
    for row, figures in rows:
        cells = [_cell(figures.get(system, {}).get(row.column)) for system in SYSTEMS]
        lines.append(f"| {row.title} | {' | '.join(cells)} |")
    commands = {TRIALS[row.benchmark]: row.title.split(":")[0] for row, _ in rows}
    return "\n".join([*lines, "", *(f"{title}: `{one}`" for one, title in commands.items())])


def _cell(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def printed_by(command: str) -> dict[str, Any]:
    """The JSON object that a benchmark prints."""
    done = subprocess.run(
        [sys.executable, "-m", *command.split(), "--json"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


def main() -> None:
    flags = parser(__doc__.splitlines()[0])
    flags.add_argument("--runs", type=int, default=3)
    every = ",".join([*COMMANDS, *TRIALS])
    flags.add_argument("--only", default=every, help=f"of {every}")
    args = flags.parse_args()
    chosen = [name for name in COMMANDS if name in args.only.split(",")]
    of_trials = [name for name in TRIALS if name in args.only.split(",")]
    said: dict[str, list[Figures]] = {name: [] for name in chosen}
    loads: list[float] = []
    for run in range(args.runs):
        for name in chosen:
            _announce(f"run {run + 1}: {COMMANDS[name]}", loads)
            said[name].append(printed_by(COMMANDS[name])["figures"])
    trials: dict[str, Figures] = {}
    for name in of_trials:
        _announce(TRIALS[name], loads)
        trials[name] = printed_by(f"{TRIALS[name]} --trials {args.runs}")["figures"]
    rows = [
        (row, [row.seconds(figures) for figures in said[row.benchmark]])
        for row in ROWS
        if row.benchmark in chosen
    ]
    made = commit()
    if rows:
        print(markdown(rows))
    if trials:
        shown = [(row, trials[row.benchmark]) for row in TRIALS_ROWS if row.benchmark in trials]
        print(f"\n{markdown_of_trials(shown)}")
    print(
        f"\ncommit {made}; {args.runs} runs of "
        "`python -m benchmarks.speed.compared`; load before each benchmark "
        f"{', '.join(f'{load:.1f}' for load in loads)}"
    )
    ratios = {row.title: median_of([ours / peer for ours, peer in runs]) for row, runs in rows}
    by_run = {row.title: runs for row, runs in rows}
    finish(
        args, ratios, {"seconds_by_run": by_run, "trials": trials, "commit": made, "loads": loads}
    )


def _announce(what: str, loads: list[float]) -> None:
    loads.append(os.getloadavg()[0])
    print(f"{what}, load {loads[-1]:.1f}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
