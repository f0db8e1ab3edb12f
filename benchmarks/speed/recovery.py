"""Seconds from a SIGKILL to the next step, beside Ray Train's restart from a checkpoint.

    python -m benchmarks.speed.recovery [--json] [--trials 20] [--full-trials 5] [--peer-trials 20]
        [--seed 0] [--also 2,8] [--arrivals 4,16] [--arrival-trials 4]

Four workers train the same model on the same samples. In each trial one of them, drawn by the seed,
is killed at an instant that the seed draws, too; before the next trial there are four again.

Ours: the time until a survivor has taken a step in the generation without the victim, even with
other numbers of workers (--also). And, for a function that can run again, the time until a step is
taken by four ranks again: without and with a spare worker (`Session(spares=1)`), in steps of a
rank's own batch, where all functions run again, and of a fixed global batch (`ctx.steps`), where
the others continue where they are. The three that are left take steps meanwhile. What the arrival
of the fourth costs them is the longest time between two steps, from their first one of three to the
first one of four; where it came before the three had taken a step, there is no such time. Ray Train
(v2, torch's DistributedDataParallel over Gloo, a checkpoint every --every steps): the time until
any step has been taken again, which is one that it had taken before; and until it is where it was.
Steps are lost where they have to be taken again, and their samples are seen twice.

With --arrivals, `ctx.steps` with a spare worker is timed in both ways in which it can come, between
two steps and with all functions from the top: the longest time between two steps of the ranks that
stay, and the time until all train again.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")
# How often Ray Train looks for lost workers: every 2 s by default, which is a part of a recovery.
os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.1")
os.environ.setdefault("RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", "0")

import ray
import torch
from ray import cloudpickle

import chorusline as cl
from benchmarks.alternation import as_installed, attempt, finish, parser, table
from benchmarks.faults.chaos_outside import actors
from benchmarks.speed.recovery_peer import peer
from benchmarks.speed.recovery_training import (
    BATCH,
    NUM_WORKERS,
    PATIENCE_S,
    STEP_S,
    WIDTH,
    Log,
    batch_of,
    make_model,
)
from chorusline.runtime.process.step_boundary import boundary
from chorusline.runtime.program.context import call_of

cloudpickle.register_pickle_by_value(sys.modules[__name__])


# -- ours ------------------------------------------------------------------------------------------


def train(ctx: cl.Context, folder: str) -> int:
    """Steps until a file says stop, and on all ranks equally many."""
    torch.set_num_threads(1)
    log, seat = Log(folder, f"seat-{ctx.rank}"), ctx.rank
    model = cl.DistributedDataParallel(make_model())
    optim = cl.ZeroRedundancyOptimizer(model, torch.optim.AdamW, lr=1e-4, replicas=2)
    time_phases(ctx, log)
    log.note("pid", os.getpid())
    with cl.Join([model, optim]):
        step = 0
        while not (Path(folder).parent / "stop").exists():
            time.sleep(STEP_S)
            model(batch_of(seat, step)).square().mean().backward()
            optim.step()
            optim.zero_grad()
            step += 1
            log.note(f"step-of-{ctx.world_size}", optim.num_steps)
    return optim.num_steps


def time_phases(ctx: cl.Context, log: Log) -> None:
    """Note when this rank begins and ends the phases of runtime/recovery/recovery.py."""
    recovery = call_of(ctx).recovery
    assert recovery is not None
    for owner, name in (
        (recovery, "recover"),
        (recovery._lifeline, "regenerate"),
        (recovery._lifeline, "connect"),
    ):
        setattr(owner, name, _timed(getattr(owner, name), name, log))


def _timed(call: Callable[..., Any], name: str, log: Log) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        log.note(f"begins-{name}", 0)
        result = call(*args, **kwargs)
        log.note(f"ends-{name}", 0)
        return result

    return timed


async def until(condition: Callable[[], Any], task: asyncio.Task[Any]) -> Any:
    """What `condition` says when it is true; raises what the run raises."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        if task.done():
            task.result()
            raise RuntimeError("the run ended before it was to")
        if time.monotonic() > deadline:
            raise TimeoutError(f"nothing happened in {PATIENCE_S:g} s")
        await asyncio.sleep(0.02)
    return found


async def our_trial(
    session: cl.Session, draw: random.Random, folder: Path, size: int
) -> dict[str, float]:
    logs = folder / "logs"
    logs.mkdir(parents=True)
    run = asyncio.create_task(session.run(train, folder=str(logs)))

    def steps(word: str) -> list[tuple[float, int, str]]:
        return [(at, n, name) for name, at, said, n in Log.read(str(logs)) if said == word]

    await until(lambda: len(steps(f"step-of-{size}")) >= 5 * size, run)
    pids = {name: n for name, _, word, n in Log.read(str(logs)) if word == "pid"}
    victim = draw.choice(sorted(pids))
    await asyncio.sleep(draw.random() * 0.5)
    killed_at = time.monotonic()
    os.kill(pids[victim], signal.SIGKILL)
    await until(lambda: steps(f"step-of-{size - 1}"), run)
    (folder / "stop").touch()
    num_steps = await run
    entries = list(Log.read(str(logs)))
    at, first, name = min(steps(f"step-of-{size - 1}"))

    def when(word: str) -> float:
        return next((t for n, t, said, _ in entries if n == name and said == word), killed_at)

    # A step is lost where a survivor has one fewer than it was told to have.
    last_before = max(n for t, n, _ in steps(f"step-of-{size}"))
    moments = [killed_at, *map(when, ("begins-recover", "begins-regenerate", "ends-regenerate"))]
    moments += [when("begins-connect"), when("ends-connect"), when("ends-recover"), at]
    names = ("detection", "", "decision", "", "rendezvous", "reshard", "step")
    phases = {
        phase: later - earlier
        for phase, earlier, later in zip(names, moments, moments[1:], strict=False)
        if phase
    }
    return {
        "seconds": at - killed_at,
        "steps_lost": max(0, last_before + 1 - first),
        "ranks_apart": len(set(num_steps)) - 1,
        **phases,
    }


async def ours(trials: int, seed: int, size: int = NUM_WORKERS) -> list[dict[str, float]]:
    draw, results = random.Random(seed), []
    with tempfile.TemporaryDirectory() as folder:
        async with cl.Session((1, size), resources_per_worker={"CPU": 0.1}) as session:
            for trial in range(trials):
                await session.run(lambda ctx: None)  # There are as many as at first again.
                results.append(await our_trial(session, draw, Path(folder) / str(trial), size))
                print(f"ours of {size}, {trial}: {results[-1]['seconds']:.3f} s", flush=True)
    return results


def train_again(ctx: cl.Context, folder: str) -> int:
    """As `train`, with what has to survive registered: newcomers take part."""
    torch.set_num_threads(1)
    log = Log(folder, f"process-{os.getpid()}")
    model = cl.DistributedDataParallel(make_model())
    optim = cl.ZeroRedundancyOptimizer(model, torch.optim.AdamW, lr=1e-4, replicas=2)
    ctx.register("model", model)
    ctx.register("optim", optim)
    log.note("pid", os.getpid())
    for _ in ctx.epochs(1):
        with cl.Join([model, optim]):
            while not (Path(folder).parent / "stop").exists():
                time.sleep(STEP_S)
                model(batch_of(ctx.rank, optim.num_steps)).square().mean().backward()
                optim.step()
                optim.zero_grad()
                log.note(f"step-of-{ctx.world_size}", optim.num_steps)
    return optim.num_steps


class Points:
    """Samples that are computed when they are asked for."""

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, number: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(number)
        return torch.randn(WIDTH, generator=generator)


def train_in_steps(
    ctx: cl.Context,
    folder: str,
    step_s: float = STEP_S,
    size: int = NUM_WORKERS,
    constructors_s: float = 0.0,
    falls_back: bool = False,
) -> int:
    """As `train_again`, with steps of a fixed global batch: newcomers make a dry run, and the
    others continue where they are.

    step_s: of computing in each step.
    size: the number of workers.
    constructors_s: the time that the function's beginning takes, as one that loads weights does.
    falls_back: whether it is as if the function could have no dry run.
    """
    torch.set_num_threads(1)
    log = Log(folder, f"process-{os.getpid()}")
    if falls_back:
        recovery = call_of(ctx).recovery
        assert recovery is not None
        recovery.arrivals._kept.spoil("the benchmark times the other way")
    time.sleep(constructors_s)
    model = cl.DistributedDataParallel(make_model())
    optim = cl.ZeroRedundancyOptimizer(model, torch.optim.AdamW, lr=1e-4, replicas=2)
    ctx.register("model", model)
    ctx.register("optim", optim)
    log.note("pid", os.getpid())
    for epoch in ctx.epochs(1):
        # Three micro-batches for each of all ranks, and up to four where one is missing.
        for step in ctx.steps(Points(), 3 * size * 4, 4, epoch=epoch):
            for batch in step:
                time.sleep(step_s / 3)
                model(batch).square().mean().backward()
            optim.step()
            optim.zero_grad()
            log.note(f"step-of-{ctx.world_size}", optim.num_steps)
            if (Path(folder).parent / "stop").exists():
                boundary().status.stop_is_wanted = True  # All ranks stop after the next step.
    return optim.num_steps


def arrival_gap(
    entries: list[tuple[str, float, str, int]], since: float, size: int
) -> dict[str, float]:
    """The longest time from one step to the next, over the ranks that stay, from their first step
    with one missing to their first one of all: in seconds, and in steps (the median of these
    times). Empty if no rank has taken a step of the first kind, and then one of the other.

    entries: name of the process, seconds, word, number. since: the seconds of the kill.
    """
    fewer, full = f"step-of-{size - 1}", f"step-of-{size}"
    times, has_come = [], False
    by_name: dict[str, list[tuple[float, str]]] = {}
    for name, at, word, _ in entries:
        if word in (fewer, full) and at > since:
            by_name.setdefault(name, []).append((at, word))
    for told in by_name.values():
        for (at, word), (then, after) in itertools.pairwise(sorted(told)):
            if word == fewer:
                times.append(then - at)
                has_come = has_come or after == full
    if not has_come:
        return {}
    return {"arrival_s": max(times), "arrival_steps": max(times) / statistics.median(times)}


def longest_pause(
    entries: list[tuple[str, float, str, int]], killed_at: float, again_at: float
) -> float:
    """The longest time between two steps of a rank that stays, from its last one before the kill to
    its first one of all: in seconds.

    entries: as in `arrival_gap`. again_at: the seconds of the first step of all.
    """
    by_name: dict[str, list[float]] = {}
    for name, at, word, _ in entries:
        if word.startswith("step-of-"):
            by_name.setdefault(name, []).append(at)
    return max(
        later - at
        for told in by_name.values()
        for at, later in itertools.pairwise(sorted(told))
        if at < again_at and later > killed_at
    )


async def ours_at_full_size(
    trials: int, seed: int, spares: int, function: Callable[..., int], size: int = NUM_WORKERS
) -> list[dict[str, float]]:
    """The time until a step is taken by all ranks again."""
    draw, results = random.Random(seed), []
    with tempfile.TemporaryDirectory() as folder:
        logs, stop = Path(folder) / "logs", Path(folder) / "stop"
        logs.mkdir()

        def full_steps(since: float) -> list[tuple[float, int]]:
            told = Log.read(str(logs))
            word = f"step-of-{size}"
            return [(at, n) for _, at, said, n in told if said == word and at > since]

        def living() -> list[int]:
            pids = {n for _, _, word, n in Log.read(str(logs)) if word == "pid"}
            return sorted(pids & actors("ray::Worker"))  # The pid of one that is gone comes again.

        async with cl.Session(
            (1, size), spares=spares, resources_per_worker={"CPU": 0.1}
        ) as session:
            run = asyncio.create_task(session.run(function, folder=str(logs)))
            for trial in range(trials):
                since = time.monotonic()
                await until(lambda at=since: len(full_steps(at)) >= 5 * size, run)
                await until(lambda: session.num_spares == spares, run)
                await asyncio.sleep(draw.random() * 0.5)
                before = max(n for _, n in full_steps(0.0))
                killed_at = time.monotonic()
                os.kill(draw.choice(living()), signal.SIGKILL)
                # Steps that were under way at that instant are over by then.
                later = killed_at + 2 * STEP_S
                again = min(await until(lambda at=later: full_steps(at), run))
                lost = max(0, before + 1 - again[1])
                # Of all ranks: a rank's line comes when its step has ended.
                await until(lambda at=again[0]: len(full_steps(at)) >= size, run)
                entries = list(Log.read(str(logs)))
                gap = arrival_gap(entries, killed_at, size)
                gap["pause_s"] = longest_pause(entries, killed_at, again[0])
                results.append({"seconds": again[0] - killed_at, "steps_lost": lost, **gap})
                print(f"ours, spares={spares}, {trial}: {results[-1]}", flush=True)
            stop.touch()
            await run
    return results


LONG_STEP_S = 0.3
"""Most trainings take longer steps than STEP_S; what an arrival costs the others stays the same."""

FULL_SIZE: dict[str, tuple[int, Callable[..., int]]] = {
    "ours, until there are four": (0, train_again),
    "ours, with a spare": (1, train_again),
    "ctx.steps, until there are four": (0, train_in_steps),
    "ctx.steps, with a spare": (1, train_in_steps),
    f"ctx.steps of {LONG_STEP_S} s, with a spare": (1, partial(train_in_steps, step_s=LONG_STEP_S)),
}
"""Ways to get to four ranks again: spare workers, and the function."""

CONSTRUCTORS_S = (0.0, 3.0)


def both_ways(trials: int, seed: int, size: int) -> dict[str, list[dict[str, float]]]:
    """Both ways of a spare worker into a run with `ctx.steps`, with functions that begin at once,
    and with those that take seconds to begin."""
    found = {}
    for constructors_s in CONSTRUCTORS_S:
        for falls_back in (False, True):
            function = partial(
                train_in_steps,
                step_s=LONG_STEP_S,
                size=size,
                constructors_s=constructors_s,
                falls_back=falls_back,
            )
            way = "all from the top" if falls_back else "between two steps"
            found[f"{size} workers, {constructors_s:g} s to begin, {way}"] = asyncio.run(
                ours_at_full_size(trials, seed, 1, function, size)
            )
    return found


def summary(results: list[dict[str, float]], name: str) -> dict[str, float]:
    values = [one[name] for one in results]
    return {"median": statistics.median(values), "worst": max(values), "total": sum(values)}


def main() -> None:
    flags = parser(__doc__.splitlines()[0])
    flags.add_argument("--trials", type=int, default=20)
    flags.add_argument(
        "--full-trials", type=int, default=5, help="kills until there are four again"
    )
    flags.add_argument("--peer-trials", type=int, default=20, help="0: without Ray Train")
    flags.add_argument("--every", type=int, default=10, help="steps between its checkpoints")
    flags.add_argument("--seed", type=int, default=0)
    flags.add_argument(
        "--arrivals", default="", help="numbers of workers, 4,16: both ways in for a spare worker"
    )
    flags.add_argument("--arrival-trials", type=int, default=4)
    flags.add_argument("--also", default="", help="other numbers of workers: 2,8")
    args = flags.parse_args()
    as_installed()
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    try:
        our_results = asyncio.run(ours(args.trials, args.seed)) if args.trials else []
        others = {
            f"ours, {size} workers": asyncio.run(ours(args.trials, args.seed, size))
            for size in map(int, filter(None, args.also.split(",")))
        }
        full = [
            asyncio.run(ours_at_full_size(args.full_trials, args.seed, spares, function))
            for spares, function in FULL_SIZE.values()
            if args.full_trials
        ]
        ways: dict[str, list[dict[str, float]]] = {}
        for size in map(int, filter(None, args.arrivals.split(","))):
            ways |= both_ways(args.arrival_trials, args.seed, size)
        peer_results: list[dict[str, float]] = []
        if args.peer_trials:
            given = (args.peer_trials, args.seed, args.every)
            attempt("Ray Train", lambda: peer(*given, peer_results), None)
    finally:
        with contextlib.suppress(Exception):
            ray.shutdown()
    samples = NUM_WORKERS * BATCH
    rows, ratios = [], {}
    figures = {"ours": our_results, "Ray Train": peer_results}
    figures |= dict(zip(FULL_SIZE, full, strict=False)) | others
    for name, results in figures.items():
        failed = args.peer_trials - len(results) if name == "Ray Train" else 0
        note = f"failed {failed} of {args.peer_trials}" if failed else ""
        if not results:
            if note:
                rows.append((name, note, "", "", "", ""))
            continue
        seconds, lost = summary(results, "seconds"), summary(results, "steps_lost")
        rows.append(
            (
                name,
                ", ".join(filter(None, (str(len(results)), note))),
                f"{seconds['median']:.3f}",
                f"{seconds['worst']:.3f}",
                f"{lost['total']:.0f}",
                f"{lost['total'] * samples:.0f}",
            )
        )
    header = ("", "trials", "median s", "worst s", "steps taken again", "samples seen twice")
    table(f"from SIGKILL to the next step, {NUM_WORKERS} workers", header, rows)
    arrivals = {name: [r for r in figures[name] if "arrival_s" in r] for name in list(figures)[2:]}
    table(
        "an arrival: the longest time between two steps of the others",
        ("", "arrivals", "median s", "worst s", "median steps", "worst steps"),
        [
            (
                name,
                str(len(some)),
                *(f"{summary(some, 'arrival_s')[k]:.3f}" for k in ("median", "worst")),
                *(f"{summary(some, 'arrival_steps')[k]:.1f}" for k in ("median", "worst")),
            )
            for name, some in arrivals.items()
            if some
        ],
    )
    table(
        "with a spare worker: the longest pause of the others until all train again",
        ("", "kills", "median s", "worst s", "all again after, s"),
        [
            (
                name,
                str(len(results)),
                *(f"{summary(results, 'pause_s')[k]:.3f}" for k in ("median", "worst")),
                f"{summary(results, 'seconds')['median']:.3f}",
            )
            for name, results in ways.items()
        ],
    )
    phases = ("detection", "decision", "rendezvous", "reshard", "step")
    table(
        "where our time goes, ms",
        ("phase", "median", "worst"),
        [
            (phase, *(f"{summary(our_results, phase)[k] * 1e3:.1f}" for k in ("median", "worst")))
            for phase in (phases if our_results else ())
        ],
    )
    for name, some in arrivals.items():
        if some and name.startswith("ctx.steps"):
            ratios[f"arrival/{name}"] = summary(some, "arrival_steps")["worst"]
    if peer_results and our_results:
        ours_s, theirs_s = (
            summary(one, "seconds")["median"] for one in (our_results, peer_results)
        )
        ratios["recovery"] = ours_s / theirs_s
        if full:
            ratios["full_size"] = summary(full[1], "seconds")["median"] / theirs_s
        back = summary(peer_results, "back")
        print(f"Ray Train is where it was after {back['median']:.3f} s (median)")
        print(f"ours / Ray Train: {ratios['recovery']:.4f}")
    finish(args, ratios, figures | ways)


if __name__ == "__main__":
    main()
