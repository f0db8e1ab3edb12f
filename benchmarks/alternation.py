"""Timing of two ways to do one thing, in turns, so that a noisy machine is unfair to neither."""

from __future__ import annotations

import argparse
import compileall
import json
import math
import multiprocessing
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

PEERS = re.compile(r"torch|gloo|ray|mpi", re.IGNORECASE)
"""What the name of a way has in it that is a peer's."""

_LONGEST_S = 3600.0

_ROOT = Path(__file__).resolve().parents[1]


def as_installed() -> None:
    """Compile what is measured, as pip does with a package that it installs. Where an environment
    keeps Python from that (PYTHONDONTWRITEBYTECODE), each process would compile all of it, 0.4 s,
    and none of what its peers import."""
    for package in ("actors", "collectives", "runtime", "chorusline", "benchmarks"):
        compileall.compile_dir(_ROOT / package, quiet=1)


def parser(description: str) -> argparse.ArgumentParser:
    """The flags that every benchmark has."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    return made


def commit() -> str:
    """Of this checkout, with "-dirty" where files differ from it."""
    command = ["git", "-C", str(_ROOT), "describe", "--always", "--dirty"]
    try:
        printed = subprocess.run(command, capture_output=True, text=True, timeout=10).stdout
    except (OSError, subprocess.TimeoutExpired):
        printed = ""
    return printed.strip() or "unknown"


def spawn(function: Callable[..., Any], num_ranks: int, *args: Any) -> list[Any]:
    """function(rank, num_ranks, store_path, *args) in one process per rank; results by rank."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, context.Pool(num_ranks) as pool:
        path = str(Path(folder) / "store")
        calls = [
            pool.apply_async(function, (rank, num_ranks, path, *args)) for rank in range(num_ranks)
        ]
        return [call.get(timeout=_LONGEST_S) for call in calls]


def attempt(peer: str, call: Callable[[], T], otherwise: T) -> T:
    """What `call` returns; `otherwise` if the peer fails, which is no reason to end a table: it is
    said here, and its cells say "failed"."""
    try:
        return call()
    except Exception as error:
        said = str(error).strip().partition("\n")[0]
        print(f"{peer} failed: {type(error).__name__}: {said}", file=sys.stderr, flush=True)
        return otherwise


def alternate(
    ways: dict[str, Callable[[], object]], *, rounds: int, calls: int, warm_up: int = 2
) -> dict[str, float]:
    """Median seconds of one call of each way; `rounds` turns of `calls` calls each. NaN for a peer
    that has failed."""
    found = timed(ways, rounds=rounds, calls=calls, warm_up=warm_up)
    return {name: quartiles(times)[1] for name, times in found.items()}


def timed(
    ways: dict[str, Callable[[], object]],
    *,
    rounds: int,
    calls: int,
    warm_up: int = 2,
    meet: Callable[[], object] = lambda: None,
) -> dict[str, list[float]]:
    """The seconds of every call of each way after the `warm_up` turns, none left out. A peer that
    raises is not called again, and has no times. meet: has the ranks begin each way's calls
    together."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    failed: set[str] = set()

    def calls_of(name: str) -> bool:
        for _ in range(calls):
            start = time.perf_counter()
            ways[name]()
            seconds[name].append(time.perf_counter() - start)
        return True

    for turn in range(warm_up + rounds):
        for name in ways:
            meet()  # Also with a way that has failed here: it may not have failed on every rank.
            if name in failed:
                continue
            if not PEERS.search(name):
                calls_of(name)
            elif not attempt(name, lambda name=name: calls_of(name), False):
                failed.add(name)
            if turn < warm_up or name in failed:
                seconds[name].clear()
    return seconds


def by_time(seconds: float) -> tuple[bool, float]:
    """The key by which the slowest rank is found: one where a peer has failed (NaN) is that."""
    return math.isnan(seconds), seconds


def quartiles(times: Sequence[float]) -> tuple[float, float, float]:
    """The first quartile, the median and the third quartile; NaN if there are no times."""
    if len(times) < 2:
        only = times[0] if times else math.nan
        return only, only, only
    first, median, third = statistics.quantiles(times, n=4, method="inclusive")
    return first, median, third


def finished(rounds: Sequence[float]) -> list[float]:
    """The rounds that have not failed (NaN), which no order of numbers has a place for."""
    return [one for one in rounds if not math.isnan(one)]


def median_of(rounds: Sequence[float]) -> float:
    """Of the rounds that have not failed; NaN if all have."""
    return statistics.median(finished(rounds) or [math.nan])


def cell(rounds: Sequence[float], *beside: Callable[[list[float]], float]) -> str:
    """The median of the rounds that have not failed, in brackets what else is asked of them, and
    how many have failed."""
    done = finished(rounds)
    failed = f"failed {len(rounds) - len(done)} of {len(rounds)}"
    if not done:
        return failed
    more = ", ".join(f"{one(done):.2f}" for one in beside)
    text = f"{statistics.median(done):.2f}" + (f" ({more})" if more else "")
    return text if len(done) == len(rounds) else f"{text}, {failed}"


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    rows = [[re.sub(r"\(nan, nan\)|\bnan\b", "failed", cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    print(f"\n{title}")
    for row in (header, *rows):
        cells = [
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells))


def finish(args: argparse.Namespace, ratios: dict[str, float], figures: dict[str, Any]) -> None:
    """ratios: case -> our time over the peer's (below 1 is faster). figures: all the rest."""
    if args.json:
        print(json.dumps(_without_nan({"ratios": ratios, "figures": figures})))


def _without_nan(figures: Any) -> Any:
    """JSON has no NaN: what a peer has failed to do is null."""
    if isinstance(figures, dict):
        return {name: _without_nan(one) for name, one in figures.items()}
    if isinstance(figures, list | tuple):
        return [_without_nan(one) for one in figures]
    return None if isinstance(figures, float) and math.isnan(figures) else figures
