"""Faults from outside: processes of a local session are killed and stopped by their pids, at random
instants, while it trains (chaos_kinds.py). Drawn from a seed; the instants of a round are not the
same again, but its faults, its function and its number of workers are.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import ray

import chorusline as cl
from chorusline.actors.worker_group.retry import beside
from chorusline.collectives.contract.errors import name_ranks

from . import chaos_kinds
from .chaos_kinds import KINDS, Kind, Told

TIMEOUT_S = 15.0
ROUND_S = 120.0
"""A run that has not ended by then hangs."""

CLOSE_S = 20.0

_OF_RAYLET = b"RAY_RAYLET_PID="

KILLS = ("worker", "pair", "driver", "worker and driver", "newcomer")
FAULTS = (*KILLS, "stop", "terminate")
"""SIGKILL to a worker, to two at once, to the driver, to a worker and the driver, to a worker that
was not there when the run began; SIGSTOP to a worker, and SIGCONT after a while; SIGTERM to a
worker, which leaves the run."""

READER_FAULTS = ("reader", "reader and worker", "reader and worker and driver")
"""SIGKILL to the reader of a stream, and at once to others. In rounds with a stream they stand in
the place of some of the faults above."""

EXCUSES = (
    "no other rank was left to continue",
    "no process is left that knows how far the run was",
    "a part of the optimizer's state was kept on",
    "the result of this one is lost",
    "cannot be run again in the middle, because",
    "the reader of a Stream is gone",
)
"""What an error says that may end a round: docs/guarantees.md, What is not survived."""


@dataclass(frozen=True)
class Fault:
    """after_s: since the fault before, or since all ranks were there. for_s: of a stop."""

    kind: str
    after_s: float
    for_s: float = 0.0

    def __str__(self) -> str:
        return f"{self.kind} after {self.after_s:.2f} s"


@dataclass(frozen=True)
class Plan:
    """What a seed draws: a kind of program, and the faults that strike it from outside."""

    seed: int
    kind: Kind
    num_workers: int
    faults: tuple[Fault, ...]


def draw(seed: int, kind: str | None = None) -> Plan:
    """Seeds take the kinds in turns."""
    rng = random.Random(seed)
    one = chaos_kinds.kind_of(kind or KINDS[seed % len(KINDS)], rng)
    num_workers = rng.randint(2, chaos_kinds.MOST)
    faults = []
    for _ in range(rng.randint(1, 5)):
        (what,) = rng.choices(FAULTS, (6, 2, 3, 4, 3, 2, 2))
        # Most faults come one by one; some meet the recovery from the one before.
        after_s = rng.uniform(0.0, 0.4) if rng.random() < 0.3 else rng.uniform(0.4, 4.0)
        faults.append(Fault(what, after_s, rng.choice((0.5, 3.0, 20.0)) if what == "stop" else 0))
    if one.name == "stream":
        faults = [
            replace(fault, kind=rng.choices(READER_FAULTS, (2, 1, 1))[0])
            if rng.random() < 0.4
            else fault
            for fault in faults
        ]
    num_steps = chaos_kinds.EPOCHS * chaos_kinds.NUM_SAMPLES / (chaos_kinds.BATCH * num_workers)
    one = replace(one, step_s=max(6.0, sum(fault.after_s for fault in faults)) / num_steps)
    return Plan(seed, one, num_workers, tuple(faults))


@dataclass
class Round:
    """One run of a plan, and what was wrong with it."""

    plan: Plan
    struck: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    ended_with: str = ""
    seconds: float = 0.0


# -- processes -------------------------------------------------------------------------------------


def actors(*prefixes: str) -> set[int]:
    """Pids of processes of this program's cluster that run actors of classes, e.g. ray::Worker.
    They know their raylet, whose children they need not be: some are forks."""
    found = set()
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            if not (path / "cmdline").read_bytes().decode(errors="replace").startswith(prefixes):
                continue
            state = (path / "stat").read_text().rpartition(")")[2].split()[0]
            variables = (path / "environ").read_bytes().split(b"\0")
            (raylet,) = (int(v.partition(b"=")[2]) for v in variables if v.startswith(_OF_RAYLET))
            parent = Path(f"/proc/{raylet}/stat").read_text().rpartition(")")[2].split()[1]
            if int(parent) == os.getpid() and state != "Z":
                found.add(int(path.name))
    return found


def signal_to(pids: set[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


class Injector:
    """Commits the faults of one round, from a task of the process that owns the session."""

    def __init__(self, plan: Plan, has_begun: asyncio.Event) -> None:
        self._plan = plan
        self._has_begun = has_begun
        self._rng = random.Random(plan.seed + 1)
        self._stopped: set[int] = set()
        self.struck: list[str] = []
        self.killed: set[int] = set()

    @contextlib.asynccontextmanager
    async def at_work(self) -> AsyncIterator[None]:
        try:
            async with beside(self._strike_all(), "injector"):
                yield
        finally:
            signal_to(self._stopped, signal.SIGCONT)

    async def _strike_all(self) -> None:
        first = actors("ray::Worker")
        await self._has_begun.wait()
        began_at = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            for fault in self._plan.faults:
                await asyncio.sleep(fault.after_s)
                if pids := await self._strike(fault, first, tasks):
                    # The other two let a process tell what it has.
                    if fault.kind in KILLS:
                        self.killed |= pids
                    at_s = time.monotonic() - began_at
                    self.struck.append(f"{fault.kind} {sorted(pids)} at {at_s:.2f} s")

    async def _strike(self, fault: Fault, first: set[int], tasks: asyncio.TaskGroup) -> set[int]:
        pids = await self._newcomer(first) if fault.kind == "newcomer" else self._drawn(fault.kind)
        if fault.kind == "stop":
            signal_to(pids, signal.SIGSTOP)
            self._stopped |= pids
            tasks.create_task(self._let_go_on(pids, fault.for_s), name="continue")
        else:
            is_soft = fault.kind == "terminate"
            signal_to(pids, signal.SIGTERM if is_soft else signal.SIGKILL)
        return pids

    def _drawn(self, kind: str) -> set[int]:
        parts = set(kind.split(" and "))
        workers = sorted(actors("ray::Worker"))
        pids: set[int] = set()
        if parts & {"worker", "pair", "stop", "terminate"}:
            pids.update(self._rng.sample(workers, min(1 + ("pair" in parts), len(workers))))
        if "driver" in parts:
            pids |= actors("ray::Driver")
        if "reader" in parts:
            pids |= actors("ray::RowReader")
        return pids

    async def _newcomer(self, first: set[int]) -> set[int]:
        give_up_at = time.monotonic() + 6.0
        while not (pids := actors("ray::Worker") - first):
            if time.monotonic() > give_up_at:
                return set()
            await asyncio.sleep(0.05)
        await asyncio.sleep(self._rng.uniform(0.0, 2.5))
        return {min(pids)}

    async def _let_go_on(self, pids: set[int], after_s: float) -> None:
        await asyncio.sleep(after_s)
        signal_to(pids, signal.SIGCONT)


# -- rounds ----------------------------------------------------------------------------------------


async def play(plan: Plan, folder: Path) -> Round:
    """A session of its own, one run, and what is left of both. folder: for its checkpoints."""
    one = Round(plan)
    done: set[int] = set()
    has_begun = asyncio.Event()

    def hear(report: cl.Report) -> None:
        has_begun.set()
        if "done" in report.values:
            done.add(report.rank)

    began_at = time.monotonic()
    session = cl.Session(
        (1, plan.num_workers),
        timeout_s=TIMEOUT_S,
        on_report=hear,
        checkpoint=chaos_kinds.config_of(plan.kind, folder),
    )
    stream = chaos_kinds.stream_of(plan.kind)
    told: list[Told] = []
    try:
        await session.start()
        injector = Injector(plan, has_begun)
        try:
            async with injector.at_work(), asyncio.timeout(ROUND_S):
                told = await session.run(chaos_kinds.train, kind=plan.kind, stream=stream)
        finally:
            one.struck = injector.struck
    except cl.ChoruslineError as error:
        one.ended_with = f"{type(error).__name__}: {error}"
        if not any(excuse in one.ended_with for excuse in EXCUSES):
            one.wrong.append(
                "a run ended that could have continued, or did not say what was missing"
            )
    except TimeoutError:
        one.wrong.append(f"it hangs: it has not ended within {ROUND_S:g} s\n{await _seen(session)}")
    except Exception as error:
        one.wrong.append(f"no error of ours: {type(error).__name__}: {error}")
    else:
        one.wrong += chaos_kinds.complaints(plan.kind, told)
        # A rank that was killed after its function had returned takes its last reports along
        # (docs/tracking.md): its result is with the driver, and they wait for the session.
        whole = {result.rank for result in told if result.pid not in injector.killed}
        if missing := whole - done:
            one.wrong.append(f"the last reports of {name_ranks(sorted(missing))} did not arrive")
    closing_at = time.monotonic()
    await session.close()
    if stream is not None:
        stream.close()
    if (closed_s := time.monotonic() - closing_at) > CLOSE_S:
        one.wrong.append(f"close() took {closed_s:.0f} s")
    for _ in range(20):
        if not (left := actors("ray::Worker", "ray::Driver")):
            break
        await asyncio.sleep(0.1)
    else:
        one.wrong.append(f"processes {sorted(left)} are left")
        signal_to(left, signal.SIGKILL)
    one.seconds = time.monotonic() - began_at
    return one


async def _seen(session: cl.Session) -> str:
    with contextlib.suppress(Exception):
        return str(await session.snapshot())
    return "no snapshot"


async def play_all(
    played: list[Round], first_seed: int, rounds: int, kind: str | None, minutes: float
) -> None:
    ends_at = time.monotonic() + minutes * 60
    for seed in range(first_seed, first_seed + rounds):
        if time.monotonic() > ends_at:
            break
        before = _files()
        with tempfile.TemporaryDirectory(prefix="chaos-", ignore_cleanup_errors=True) as folder:
            one = await play(draw(seed, kind), Path(folder))
        one.wrong += [f"/dev/shm/{name} is left" for name in sorted(_files() - before)]
        played.append(one)
        plan = one.plan
        faults = "; ".join(one.struck) or "nothing struck"
        print(
            f"{seed}: {plan.kind.name}, {plan.num_workers} workers, {one.seconds:.1f} s: {faults}",
            flush=True,
        )
        if one.ended_with:
            print(f"   ended: {one.ended_with}", flush=True)
        for wrong in one.wrong:
            again = f"python -m benchmarks.faults.chaos --outside --seed {seed} --rounds 1"
            again += f" --kind {kind}" if kind else ""
            print(f"   WRONG ({again}): {wrong}", flush=True)


def _files() -> set[str]:
    """Of ours and of torch's."""
    return {p.name for p in Path("/dev/shm").iterdir() if p.name.startswith(("torch_", "chorus"))}


def run(
    played: list[Round], first_seed: int, rounds: int, kind: str | None, minutes: float
) -> None:
    """played: gets each round when it is over, so that a run that is interrupted has them."""
    ray.init("local", num_cpus=chaos_kinds.MOST, include_dashboard=False, log_to_driver=False)
    # In the place of Ray's handler, which ends the process.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        asyncio.run(play_all(played, first_seed, rounds, kind, minutes))
    finally:
        ray.shutdown()
