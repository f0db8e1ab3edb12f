"""Ranks that are killed, stopped, cancelled and aborted at random instants: who hangs, who errs.

    python -m benchmarks.faults.collectives [--json] [--seeds 200] [--first 0] [--transport both]

Each seed draws a number of ranks, a sequence of operations, a fault, its victim and its instant.
All ranks that live must end with the same typed error, which names the victim, within the deadline
and two seconds (Gloo: eight, since its ranks ask each other through the store); or with right
results, where the fault came too late to matter. Then the same processes form the next generation
and reduce once more. A rank that the system kept off its cores for half of a deadline is late in
fact, and may be named beside the victim; time without a core does not count as late. Both are
counted as starved.

Counted: hangs, late errors, wrong results and wrong errors, leaked descriptors, mappings and
threads of the ranks, leaked processes, leaked files in /dev/shm.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.alternation import finish, parser, table
from benchmarks.faults.operations import OPERATIONS, Step
from chorusline.collectives.contract.errors import (
    CollectiveError,
    CollectiveTimeout,
    GroupAborted,
    PeerLost,
    StoreTimeout,
    fresh_copy,
)
from chorusline.collectives.contract.work import Work
from chorusline.collectives.group import Group
from chorusline.collectives.stores.file_store import FileStore

FORKS = multiprocessing.get_context("forkserver")
PRELOADED = (
    "torch",
    "chorusline.collectives.transports.gloo",
    "chorusline.collectives.shared_memory.algorithms",
)

FAULTS = ("kill", "stop", "raise", "cancel", "abort", "none")
TIMEOUT_S = {"stop": 1.0}  # short where it is what ends the generation
LONG_S = 30.0
SLACK_S = {"shared-memory": 2.0, "gloo": 8.0}
HANG_S = 60.0  # after which a rank that has not ended never will


@dataclass(frozen=True)
class Plan:
    """at_step: of faults that the victim itself commits. delay_s: of the others, from the start,
    and from the step on. connected: whether the objects' channel is, before the fault."""

    seed: int
    transport: str
    size: int
    fault: str
    victim: int
    at_step: int
    delay_s: float
    steps: tuple[Step, ...]
    connected: bool = True

    @property
    def timeout_s(self) -> float:
        return TIMEOUT_S.get(self.fault, LONG_S)


@dataclass
class Report:
    """What a rank found. late_s: seconds from the issue of what failed to the error. starved_s:
    seconds of those, or of the deadline, for which it was ready to run and had no core."""

    rank: int
    done: int = 0
    error: CollectiveError | None = None
    late_s: float = 0.0
    starved_s: float = 0.0
    wrong: list[str] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)


def draw(seed: int, transport: str) -> Plan:
    rng = random.Random(seed)
    size = rng.choice((2, 3, 4))
    if transport == "both":
        transport = "gloo" if seed % 10 == 9 else "shared-memory"
    steps = []
    num_steps = rng.randint(5, 40)
    for _ in range(num_steps):
        steps.append(
            Step(
                rng.choice(tuple(OPERATIONS)),
                rng.choice((0, 1, 7, 1000, 70_001, 600_001)),
                rng.choice((torch.float32, torch.int64, torch.bfloat16)),
                rng.randrange(size),
                rng.choice(("wait", "wait", "await", "poll", "later")),
                tuple(rng.choice((0, 0, 0, 0.003 * rng.random())) for _ in range(size)),
            )
        )
    fault = rng.choice(FAULTS)
    return Plan(
        seed,
        transport,
        size,
        fault,
        rng.randrange(size),
        rng.randrange(num_steps),
        0.05 * rng.random() ** 2,
        tuple(steps),
        rng.random() < 0.5,
    )


# -- one rank --------------------------------------------------------------------------------------


def run_rank(plan: Plan, rank: int, path: str) -> Report:
    store = FileStore(path)
    # Modules and pools that stay are not leaks: have them first.
    with Group.create(store, rank, plan.size, name="warm-up", timeout_s=30) as group:
        group.all_reduce(torch.ones(3)).wait()
        asyncio.run(_awaited(group.barrier()))
    del group
    gc.collect()
    before = _held(plan)
    report = Report(rank)
    _first_generation(plan, rank, store, report)
    is_victim = rank == plan.victim
    gone = plan.fault in ("kill", "stop")
    if is_victim and gone:
        time.sleep(HANG_S)
    alive = [r for r in range(plan.size) if not (gone and r == plan.victim)]
    with Group.create(store, alive.index(rank), len(alive), generation=1, timeout_s=30) as group:
        tensor = torch.full((1001,), float(rank + 1))
        group.all_reduce(tensor).wait()
        if not torch.equal(tensor, torch.full_like(tensor, float(sum(r + 1 for r in alive)))):
            report.wrong.append("the all_reduce of the next generation")
        group.barrier().wait()
    del group
    # A thread that had no core for a while gives back what it holds when it gets one.
    give_up_at = time.monotonic() + (5 if plan.transport == "shared-memory" else 10)
    while True:
        gc.collect()
        report.leaks = sorted((_held(plan) - before).elements())
        if not report.leaks or time.monotonic() > give_up_at:
            return report
        time.sleep(0.02)


def _first_generation(plan: Plan, rank: int, store: FileStore, report: Report) -> None:
    group = Group.create(store, rank, plan.size, timeout_s=LONG_S)
    assert group.backend == plan.transport
    if plan.connected:
        group.all_gather_object(None, timeout_s=30).wait()
    store.set(f"ready/{rank}", "")
    store.wait([f"ready/{r}" for r in range(plan.size)], 30)
    group.timeout_s = plan.timeout_s
    in_flight: list[tuple[Work, Callable[[], bool], str]] = []
    thread: threading.Thread | None = None
    issued_at = time.monotonic()
    queued: list[tuple[float, float]] = []  # when, and seconds in the queue for a core by then
    try:
        for number, step in enumerate(plan.steps):
            queued.append((time.monotonic(), _queued_s()))
            time.sleep(step.pauses_s[rank])
            commits = rank == plan.victim and number == plan.at_step
            if commits and plan.fault == "raise":
                try:
                    raise ValueError(f"of seed {plan.seed}")
                except ValueError as error:
                    group.abort(error)
            if commits and plan.fault == "abort":
                thread = threading.Timer(plan.delay_s / 10, group.abort, ("on purpose",))
                thread.start()
            issued_at = time.monotonic()
            work, is_right = OPERATIONS[step.name](group, number, step)
            in_flight.append((work, is_right, f"{work.operation}"))
            if step.way == "later" and number < len(plan.steps) - 1 and not commits:
                continue
            if commits and plan.fault == "cancel":
                with contextlib.suppress(TimeoutError):
                    asyncio.run(_awaited(work, plan.delay_s / 10))
            else:
                _wait(work, step.way)
            for earlier, is_right, told in in_flight:
                earlier.wait()
                if not is_right():
                    report.wrong.append(f"the result of {told}")
            in_flight.clear()
            report.done = number + 1
    except CollectiveError as error:
        report.late_s = time.monotonic() - issued_at
        since = min(issued_at, time.monotonic() - plan.timeout_s * (plan.fault == "stop"))
        report.starved_s = _queued_s() - max((s for at, s in queued if at <= since), default=0.0)
        report.error = fresh_copy(error)  # Its traceback would keep the group alive.
    if thread is not None:
        thread.join()
    store.set(f"over/{rank}", "")
    gone = plan.fault in ("kill", "stop")
    if not gone:  # Nobody leaves before all have seen the end: leaving is a fault of its own.
        store.wait([f"over/{r}" for r in range(plan.size)], HANG_S)
    elif rank != plan.victim:
        others = [r for r in range(plan.size) if r != plan.victim]
        store.wait([f"over/{r}" for r in others], HANG_S)
    else:
        return  # Stopped or killed when all was done; the group must not close on the others.
    group.close()


def _queued_s() -> float:
    """Seconds for which this thread was ready to run and another one had the core."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


def _wait(work: Work, way: str) -> None:
    if way == "await":
        asyncio.run(_awaited(work))
    elif way == "poll":
        while not work.is_completed():
            time.sleep(0.0002)
    work.wait()


async def _awaited(work: Work, within_s: float | None = None) -> None:
    async with asyncio.timeout(within_s):
        await work


def _held(plan: Plan) -> Counter[str]:
    """Descriptors, mappings of shared memory and threads of this process, by what they are."""
    held: Counter[str] = Counter()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = str(entry.readlink())
        except OSError:
            continue
        held[f"descriptor of {target.split(':')[0] if ':[' in target else target}"] += 1
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "memfd:chorusline" in line:
            held["mapping of shared memory"] += 1
    for thread in threading.enumerate():
        if thread.name.startswith("chorusline"):
            held[f"thread {thread.name.rstrip('0123456789-')}"] += 1
    return held


def _main(plan: Plan, rank: int, path: str, pipe: Any) -> None:
    torch.set_num_threads(1)
    if plan.transport == "gloo":
        os.environ["CHORUSLINE_HOST_ID"] = f"host {rank % 2}"
    try:
        pipe.send(run_rank(plan, rank, path))
    except BaseException as error:
        report = Report(rank)
        report.wrong.append(f"{type(error).__name__}: {error}")
        pipe.send(report)


# -- one seed --------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """What went wrong with a seed, in words; empty lists are what we want."""

    plan: Plan
    struck: bool = False
    hangs: list[str] = field(default_factory=list)
    late: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    starved: list[str] = field(default_factory=list)
    slowest_s: float = 0.0


def run_seed(plan: Plan) -> Outcome:
    outcome = Outcome(plan)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        path = str(Path(folder) / "store")
        store = FileStore(path)
        stack.callback(store.close)
        pipes, processes = [], []
        for rank in range(plan.size):
            here, there = FORKS.Pipe(duplex=False)
            process = FORKS.Process(target=_main, args=(plan, rank, path, there), daemon=True)
            process.start()
            stack.callback(_end, process, here)  # Also when a person has seen enough.
            there.close()
            pipes.append(here)
            processes.append(process)
        if plan.fault in ("kill", "stop"):
            try:
                store.wait([f"ready/{rank}" for rank in range(plan.size)], HANG_S)
            except StoreTimeout as error:
                outcome.hangs.append(f"before the fault: {error}")  # The reports say more.
            time.sleep(plan.delay_s)
            number = signal.SIGKILL if plan.fault == "kill" else signal.SIGSTOP
            pid = processes[plan.victim].pid
            assert pid is not None
            os.kill(pid, number)
        reports = []
        give_up_at = time.monotonic() + HANG_S
        for rank, pipe in enumerate(pipes):
            if plan.fault in ("kill", "stop") and rank == plan.victim:
                continue
            try:
                if pipe.poll(max(0.0, give_up_at - time.monotonic())):
                    reports.append(pipe.recv())
                else:
                    outcome.hangs.append(f"rank {rank} did not end")
            except EOFError:
                outcome.wrong.append(f"the process of rank {rank} ended")
        for process in processes:
            process.join(0.1 if process is processes[plan.victim] else 10)
            if process.is_alive() and process is not processes[plan.victim]:
                outcome.leaks.append(f"process {process.pid}")
        pids = [process.pid for process in processes]
    outcome.leaks += sorted(_shared_files(pids))
    judge(outcome, reports)
    return outcome


def _end(process: Any, pipe: Any) -> None:
    process.kill()
    process.join()
    process.close()
    pipe.close()


def _shared_files(pids: list[int | None]) -> list[str]:
    """Files that ranks have left behind; others on this machine write there, too."""
    ours = ("chorusline", *(f"torch_{pid}_" for pid in pids))
    return [str(path) for path in Path("/dev/shm").iterdir() if path.name.startswith(ours)]


def judge(outcome: Outcome, reports: list[Report]) -> None:
    """Hold the reports against what the fault must lead to."""
    plan = outcome.plan
    expected = {
        "kill": PeerLost,
        "stop": CollectiveTimeout,
        "raise": GroupAborted,
        "cancel": GroupAborted,
        "abort": GroupAborted,
        "none": (),
    }[plan.fault]
    errors = {report.rank: report.error for report in reports if report.error is not None}
    outcome.struck = bool(errors)
    for report in reports:
        who = f"rank {report.rank}"
        outcome.wrong += [f"{who}: {text}" for text in report.wrong]
        outcome.leaks += [f"{who}: {text}" for text in report.leaks]
        if report.error is None:
            if report.done < len(plan.steps) and not report.wrong:
                outcome.wrong.append(f"{who} ended after {report.done} steps without an error")
            continue
        beside = [rank for rank in report.error.ranks if rank != plan.victim]
        starved = {
            other.rank: other.starved_s
            for other in reports
            if plan.fault == "stop" and other.starved_s >= plan.timeout_s / 2
        }
        if not isinstance(report.error, expected) or plan.victim not in report.error.ranks:
            outcome.wrong.append(f"{who} raised {report.error!r}")
        elif beside and set(beside) <= starved.keys():
            outcome.starved += [f"rank {rank}, for {starved[rank]:.1f} s" for rank in beside]
        elif beside:
            outcome.wrong.append(f"{who} raised {report.error!r}")
        limit_s = SLACK_S[plan.transport] + (plan.timeout_s if plan.fault == "stop" else 0)
        outcome.slowest_s = max(outcome.slowest_s, report.late_s)
        if report.late_s > limit_s:
            told = f"{who} knew after {report.late_s:.1f} s, {report.starved_s:.1f} without a core"
            is_starved = report.late_s - report.starved_s <= limit_s
            (outcome.starved if is_starved else outcome.late).append(told)
    # Objects have a group of their own, and each group tells the end as its ranks met it.
    has_objects = any("object" in step.name for step in plan.steps)
    told = {
        (type(error).__name__, tuple(error.ranks)) if has_objects else repr(error)
        for error in errors.values()
    }
    if len(told) > 1:
        outcome.wrong.append(f"the ranks disagree: {errors}")


def main() -> None:
    flags = parser(__doc__.splitlines()[0])
    flags.add_argument("--seeds", type=int, default=200)
    flags.add_argument("--first", type=int, default=0)
    flags.add_argument("--transport", default="both", choices=("both", "shared-memory", "gloo"))
    args = flags.parse_args()
    began_at = time.monotonic()
    outcomes = []
    for seed in range(args.first, args.first + args.seeds):
        outcome = run_seed(draw(seed, args.transport))
        outcomes.append(outcome)
        for kind in (*KINDS, "starved"):
            for text in getattr(outcome, kind):
                p = outcome.plan
                print(f"seed {seed} ({p.transport}, {p.size} ranks, {p.fault}): {kind}: {text}")
                sys.stdout.flush()
    rows = []
    for fault in FAULTS:
        of = [outcome for outcome in outcomes if outcome.plan.fault == fault]
        counts = [sum(len(getattr(o, kind)) for o in of) for kind in KINDS]
        slowest = max((o.slowest_s for o in of), default=0.0)
        struck = sum(o.struck for o in of)
        rows.append((fault, str(len(of)), str(struck), *map(str, counts), f"{slowest:.2f}"))
    totals = {kind: sum(len(getattr(o, kind)) for o in outcomes) for kind in KINDS}
    struck = sum(o.struck for o in outcomes)
    slowest = max((o.slowest_s for o in outcomes), default=0.0)
    rows.append(
        ("all", str(len(outcomes)), str(struck), *map(str, totals.values()), f"{slowest:.2f}")
    )
    table(
        f"faults at random instants, {time.monotonic() - began_at:.0f} s",
        ("fault", "seeds", "struck", *KINDS, "slowest error, s"),
        rows,
    )
    figures = {
        "seeds": len(outcomes),
        "struck": struck,
        **totals,
        "starved": sum(len(outcome.starved) for outcome in outcomes),
        "slowest_s": slowest,
        "operations": sum(len(o.plan.steps) for o in outcomes),
        "transports": Counter(o.plan.transport for o in outcomes),
    }
    finish(args, {}, figures)
    if any(totals.values()):
        sys.exit(1)


KINDS = ("hangs", "late", "wrong", "leaks")

if __name__ == "__main__":
    FORKS.set_forkserver_preload([*PRELOADED])  # One list for a process, whoever forks in it.
    main()
