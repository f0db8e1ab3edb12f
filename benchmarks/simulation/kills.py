"""Real changes of the generation, to hold the simulation against.

A real driver actor and real worker actors, without a session around them, so that no newcomer is
started while the others continue: a start takes seconds of CPU time on the cores that are measured.
The ranks take steps that compute nothing; one after the other is killed with SIGKILL, until two are
left. Each kill is one change, of a generation that has one rank fewer than the one before.
"""

from __future__ import annotations

import os
import random
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
import torch
from ray import cloudpickle

from benchmarks.speed.recovery_training import Log
from chorusline.actors.driver.driver import driver_class
from chorusline.actors.errors import ends_a_generation
from chorusline.actors.messages.messages import OptimizerProgress, RunRequest, RunSucceeded
from chorusline.actors.parcels.parcel import Parcel
from chorusline.actors.ray_calls.calls import Actor
from chorusline.actors.ray_calls.versions import versions_here
from chorusline.actors.worker.worker import worker_class
from chorusline.collectives.objects.blocking import all_gather_object

cloudpickle.register_pickle_by_value(sys.modules[__name__])

STEP_S = 0.02
"""Of a step, in which a rank sleeps before it meets the others."""
PAUSE_S = 0.3
"""Between two kills."""
SETTLE_S = 1.0
"""In which a change of a few ranks is over, on a machine that has time for it."""
STEADY_S = 0.5
"""In which the ranks take steps before each kill, to learn what these cost."""
PATIENCE_S = 60.0
BALLOT = 32
"""Numbers in the ballot of a step."""


@dataclass(frozen=True)
class Change:
    """One change. Seconds from the kill: until the process has ended; until the first rank has
    frozen itself; until the last one knows how it continues; until the last one has met the others;
    and until it has taken a step with them.

    survivors: ranks of the next generation.
    cpu_s: of the survivors' processes, the driver's, and Ray's own, in a window from the kill on.
    steps: that a rank has taken in that window.
    per_step_s: CPU time of the process of a rank for each step, just before.
    cores: that the run could have had just before, beside other programs.
    thread_s: CPU time of the training thread of a rank, on average, by phase.
    """

    survivors: int
    exited_s: float
    detected_s: float
    decided_s: float
    met_s: float
    total_s: float
    cpu_s: dict[str, float]
    window_s: float
    steps: float
    per_step_s: float
    cores: float
    thread_s: dict[str, float]


class Keeping:
    """The program: steps until a file says stop. It continues in place after a loss."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __call__(self, assignment: Any, group: Any, reports: Any, lifeline: Any, *_: object) -> int:
        torch.set_num_threads(1)
        log = Log(self.folder, f"process-{os.getpid()}")
        log.note("pid", os.getpid())
        clock = time.thread_time
        stop = Path(self.folder).parent / "stop"
        steps, entered = 0, assignment.generation
        ballot = torch.zeros(BALLOT)
        while True:
            try:
                time.sleep(STEP_S)
                began_s = clock()
                ballot.zero_()
                ballot[0] = float(stop.exists())
                group.all_reduce(ballot).wait()
                steps += 1
                log.note(f"step-of-{group.size}", steps)
                log.note("us-step", round((clock() - began_s) * 1e6))
                if float(ballot[0]):
                    break
            except Exception as error:
                if not ends_a_generation(error):
                    raise
                group, steps, entered = self._next(lifeline, log, error, steps, entered)
        while (error := lifeline.finish()) is not None:
            group, steps, entered = self._next(lifeline, log, error, steps, entered)
        return steps

    def _next(
        self, lifeline: Any, log: Log, error: BaseException, steps: int, entered: int
    ) -> tuple[Any, int, int]:
        """The group of the next generation, in which the ranks have met."""
        while True:
            log.note("frozen", 0)
            began_s = time.thread_time()
            frozen = lifeline.leave_generation(error)
            progress = (OptimizerProgress(steps, (0.0,) * BALLOT),)
            resumption = lifeline.regenerate(
                replace(frozen, progress=progress, entered=entered, spare=1)
            )
            log.note("decided", resumption.assignment.generation)
            frozen_s = time.thread_time()
            log.note("us-freeze", round((frozen_s - began_s) * 1e6))
            steps = resumption.progress[0].ballots
            try:
                group = lifeline.connect()
                connected_s = time.thread_time()
                log.note("us-connect", round((connected_s - frozen_s) * 1e6))
                all_gather_object(group, (steps, entered))
                group.barrier().wait()
                log.note("us-meet", round((time.thread_time() - connected_s) * 1e6))
            except Exception as again:
                if not ends_a_generation(again):
                    raise
                error = again
                continue
            entered = resumption.assignment.generation
            log.note("met", entered)
            return group, steps, entered


class Processes:
    """The CPU time of processes, threads that have ended included. kinds: their pids, by kind."""

    def __init__(self, kinds: dict[str, list[int]]) -> None:
        self._kinds = kinds

    def used_s(self) -> dict[str, float]:
        return {kind: sum(map(cpu_s, pids)) for kind, pids in self._kinds.items()}


def cpu_s(pid: int) -> float:
    """Seconds of CPU time of a process, threads that have ended included; 0 if it is gone."""
    try:
        return time.clock_gettime((~pid << 3) | 2)  # As clock_getcpuclockid(3) makes the number.
    except OSError:
        return 0.0


def until_exit(pidfd: int) -> float:
    """Wait for the end of a process; the time (time.monotonic) at which it was seen."""
    try:
        select.select([pidfd], [], [])
        return time.monotonic()
    finally:
        os.close(pidfd)


def pid_of(actor: Actor) -> int:
    """Of the process of an actor, as it says itself."""
    return int(ray.get(actor.__ray_call__.remote(lambda _: os.getpid()), timeout=PATIENCE_S))


def processes_of_ray() -> list[int]:
    """The pids of Ray's own servers on this machine, of this user."""
    found = []
    for place in Path("/proc").iterdir():
        if place.name.isdecimal():
            try:
                name = (place / "comm").read_text().strip()
                if name in ("raylet", "gcs_server") and place.stat().st_uid == os.getuid():
                    found.append(int(place.name))
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
    return found


_SPINNER = """
import sys, time
for line in sys.stdin:
    end, began = time.monotonic() + float(line), time.process_time()
    while time.monotonic() < end:
        pass
    print(time.process_time() - began, flush=True)
"""


class Spinners:
    """Processes that compute as much as they get, twice as many as cores, to learn how much all
    processes of a run get together beside what else the machine does."""

    def __init__(self) -> None:
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-S", "-c", _SPINNER],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for _ in range(2 * (os.cpu_count() or 1))
        ]

    def __enter__(self) -> Spinners:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
            process.wait()

    def cores_left(self, watched: Processes, seconds: float = 0.25) -> float:
        """The cores that these processes and the watched ones have got together."""
        before, began_at = sum(watched.used_s().values()), time.monotonic()
        for process in self._processes:
            assert process.stdin is not None
            print(seconds, file=process.stdin, flush=True)
        spun_s = 0.0
        for process in self._processes:
            assert process.stdout is not None
            spun_s += float(process.stdout.readline())
        used_s = sum(watched.used_s().values()) - before
        return min((spun_s + used_s) / (time.monotonic() - began_at), float(os.cpu_count() or 1))


def idle_share(pids: list[int], seconds: float = 1.0) -> float:
    """The part of a core that an idle process of Ray takes, on average."""
    before, began_at = sum(map(cpu_s, pids)), time.monotonic()
    time.sleep(seconds)
    return (sum(map(cpu_s, pids)) - before) / (time.monotonic() - began_at) / len(pids)


def until(condition: Callable[[], Any]) -> Any:
    give_up_at = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        if time.monotonic() > give_up_at:
            raise TimeoutError(f"nothing happened in {PATIENCE_S:g} s")
        time.sleep(0.01)
    return found


def changes(most: int, seed: int, fewest: int = 2) -> Iterator[Change]:
    """Kill one rank after the other of `most` + 1, until `fewest` are left; yields each change."""
    draw = random.Random(seed)
    workers = {
        seat: worker_class().options(num_cpus=0.01).remote(seat, False) for seat in range(most + 1)
    }
    driver = driver_class().options(num_cpus=0).remote(0)
    try:
        yield from _of_run(workers, driver, draw, fewest)
    finally:
        for actor in (*workers.values(), driver):
            ray.kill(actor)


def _of_run(
    workers: dict[int, Actor], driver: Actor, draw: random.Random, fewest: int
) -> Iterator[Change]:
    unfit = ray.get(driver.adopt.remote(workers, 120.0, versions_here()), timeout=150)
    assert not unfit, unfit
    with tempfile.TemporaryDirectory() as folder:
        logs = Path(folder) / "logs"
        logs.mkdir()
        program = ray.put(Parcel(cloudpickle.dumps(Keeping(str(logs)))))
        request = RunRequest(0, 30.0, False, fewest=1, max_failures=None)
        run = driver.run.remote(request, [program])
        size = len(workers)
        until(lambda: _count(logs, f"step-of-{size}") >= 5 * size)
        driver_pid = pid_of(driver)
        with Spinners() as spinners:
            while size > fewest:
                time.sleep(PAUSE_S)
                yield _kill_one(logs, size, draw, driver_pid, spinners)
                size -= 1
        (Path(folder) / "stop").touch()
        outcome = ray.get(run, timeout=PATIENCE_S)
        assert isinstance(outcome, RunSucceeded), outcome


def _count(logs: Path, wanted: str, since: float = 0.0) -> int:
    return sum(word == wanted and at > since for _, at, word, _ in Log.read(str(logs)))


def _kill_one(
    logs: Path, size: int, draw: random.Random, driver_pid: int, spinners: Spinners
) -> Change:
    pids = {name: n for name, _, word, n in Log.read(str(logs)) if word == "pid"}
    living = sorted(pid for pid in pids.values() if Path(f"/proc/{pid}").exists())
    assert len(living) == size, (living, size)
    victim = draw.choice(living)
    end_of_victim = os.pidfd_open(victim)
    left = [pid for pid in living if pid != victim]
    watched = Processes({"ranks": left, "driver": [driver_pid], "Ray": processes_of_ray()})
    cores = spinners.cores_left(watched)
    steady_at, steady = time.monotonic(), watched.used_s()["ranks"]
    time.sleep(STEADY_S + draw.random() * 5 * STEP_S)
    steady_until, steady = time.monotonic(), watched.used_s()["ranks"] - steady
    before = watched.used_s()
    killed_at = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    exited_s = until_exit(end_of_victim) - killed_at
    time.sleep(SETTLE_S)  # Reading the logs takes CPU time that the ranks need.
    after = watched.used_s()
    window_s = time.monotonic() - killed_at
    until(lambda: _count(logs, f"step-of-{size - 1}", killed_at) >= size - 1)
    logged = list(Log.read(str(logs)))
    told = [one for one in logged if one[1] > killed_at]
    steady_steps = sum(
        word == "us-step" and steady_at < at < steady_until for _, at, word, _ in logged
    )

    def last(word: str, choose: Callable[..., float] = max) -> float:
        times: dict[str, float] = {}
        for name, at, said, _ in told:
            if said == word:
                times.setdefault(name, at)
        assert len(times) == size - 1, (word, times)
        return choose(times.values()) - killed_at

    def mean(phase: str) -> float:
        first: dict[str, int] = {}
        for name, _, said, microseconds in told:
            if said == f"us-{phase}" and (phase != "step" or name in met):
                first.setdefault(name, microseconds)
            elif said == "met":
                met.add(name)
        return statistics.fmean(first.values()) * 1e-6

    met: set[str] = set()
    steps = sum(word == "us-step" and at < killed_at + window_s for _, at, word, _ in told)
    return Change(
        survivors=size - 1,
        exited_s=exited_s,
        detected_s=last("frozen", min),
        decided_s=last("decided"),
        met_s=last("met"),
        total_s=last(f"step-of-{size - 1}"),
        cpu_s={kind: after[kind] - before[kind] for kind in after},
        window_s=window_s,
        steps=steps / (size - 1),
        # The victim takes as many steps as the others, but is not among those that are watched.
        per_step_s=steady / max(1.0, steady_steps * (size - 1) / size),
        cores=cores,
        thread_s={phase: mean(phase) for phase in ("freeze", "connect", "meet", "step")},
    )
