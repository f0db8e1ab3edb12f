"""A simulation of large clusters: how long a change of the generation takes, and the goodput.

    python -m benchmarks.simulation.run [--workers 1000,10000,100000] [--json]
        [--measure] [--check] [--sessions 2] [--seed 0] [--plot docs/images/simulation.png]

--measure measures the constants on this machine, in two minutes, and writes them to constants.json
beside this file; without it they are read from there. --check kills the ranks of real runs, one
after the other from 17 down to 2, and compares each change with the simulation of it: in it all
processes share this machine's cores, with those of others that ran just then. The simulated ranks
meet through the driver's store, as those of different hosts do; the real ones, of one host, without
it since 61ef7406, so that the two are not the same protocol.

docs/simulation.md explains the model and has the figures.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", "0")

import ray

from benchmarks.alternation import commit, finish, parser, table
from benchmarks.simulation.checking import Compared, compared
from benchmarks.simulation.constants import HERE, Constants
from benchmarks.simulation.kills import Change, changes
from benchmarks.simulation.measure import measured
from benchmarks.simulation.outlook import Outlook, outlook
from benchmarks.simulation.picture import draw
from benchmarks.simulation.published import known

_MOST = 16
_MOST_TO_MEASURE = 8
"""Ranks in the runs that are compared; and in the one whose CPU times are constants."""


@contextlib.contextmanager
def _ray() -> Iterator[None]:
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()


def _circumstances() -> dict[str, Any]:
    return {
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
    }


def measure(seed: int) -> Constants:
    with _ray():
        found = measured(_MOST_TO_MEASURE, seed)
    said = {"measured": _circumstances(), "constants": asdict(found)}
    HERE.write_text(json.dumps(said, indent=1) + "\n")
    return found


def check(constants: Constants, sessions: int, seed: int) -> tuple[list[Compared], list[Change]]:
    real: list[Change] = []
    with _ray():
        for session in range(sessions):
            for one in changes(_MOST, seed + session):
                real.append(one)
                print(
                    f"{one.survivors} are left: {1e3 * one.total_s:.0f} ms, load "
                    f"{os.getloadavg()[0]:.1f}",
                    flush=True,
                )
    return compared(constants, real), real


def show_check(rows: list[Compared]) -> None:
    table(
        "from SIGKILL to a step of all others, ms: real ranks of one host, and simulated ones that "
        "meet through the store",
        (
            *("ranks left", "changes", "seen", "sim.", "decided", "sim."),
            *("met", "sim.", "step", "sim.", "error"),
        ),
        [
            (
                f"{row.survivors}",
                f"{row.num_changes}",
                *(
                    f"{1e3 * side[phase]:.0f}"
                    for phase in row.real_s
                    for side in (row.real_s, row.simulated_s)
                ),
                f"{100 * row.error:+.0f} %",
            )
            for row in rows
        ],
    )


def show_outlook(outlooks: list[Outlook]) -> None:
    table(
        "a change of the generation, simulated, each worker with a core of its own",
        (
            "workers",
            "all know",
            "calls",
            "tree",
            "fan-out",
            "slowest answer",
            "state MiB",
        ),
        [
            (
                f"{one.workers}",
                f"{one.decided_s:.2f} s",
                *(f"{one.change_s[way]:.2f} s" for way in ("calls", "tree")),
                f"{one.fan_out}",
                f"{one.slowest_s:.1f} s",
                f"{one.memory_bytes / (1 << 20):.1f}",
            )
            for one in outlooks
        ],
    )
    for cluster in outlooks[0].goodput if outlooks else ():
        ways = list(outlooks[0].goodput[cluster])
        table(
            f"goodput at the failure rate of {cluster}",
            ("workers", *ways),
            [
                (f"{one.workers}", *(f"{one.goodput[cluster][way]:.4f}" for way in ways))
                for one in outlooks
            ],
        )
    table(
        "goodput that others have published, and the model's with their parameters",
        ("", "published", "model"),
        [(one.what, one.said, f"{one.model:.3f}") for one in known()],
    )


def main() -> None:
    flags = parser(__doc__.splitlines()[0])
    flags.add_argument("--workers", default="1000,10000,100000")
    flags.add_argument("--measure", action="store_true", help="the constants, on this machine")
    flags.add_argument("--check", action="store_true", help="against real runs")
    flags.add_argument("--sessions", type=int, default=2, help="runs of 17 ranks for --check")
    flags.add_argument("--seed", type=int, default=0)
    flags.add_argument("--plot", type=Path, default=None, help="a PNG to write")
    args = flags.parse_args()
    constants = measure(args.seed) if args.measure else Constants.here()
    rows, real = check(constants, args.sessions, args.seed) if args.check else ([], [])
    if rows:
        show_check(rows)
    outlooks = [outlook(constants, int(count)) for count in args.workers.split(",") if count]
    if outlooks:
        show_outlook(outlooks)
    if args.plot is not None:
        draw(rows, outlooks, args.plot)
    figures = {
        "circumstances": _circumstances(),
        "constants": asdict(constants),
        "real": [asdict(one) for one in real],
        "compared": [asdict(row) | {"error": row.error} for row in rows],
        "outlook": [asdict(one) for one in outlooks],
        "published": [asdict(one) for one in known()],
    }
    finish(args, {f"check/{row.survivors}": 1 + row.error for row in rows}, figures)


if __name__ == "__main__":
    main()
