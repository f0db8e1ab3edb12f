"""Strikes trainers with the same seeded faults, and counts what was lost.

    python benchmarks/trials/check.py [--seed 0] [--trials 2] [--faults 3] [--systems chorusline]
        [--kinds kill,two,...] [--storm-every 15] [--workers 3] [--samples 1200] [--json]

Each system (systems.py) trains the same model, whose parameters are their own ledger (workload.py),
as a program of its own; the faults (faults.py) come from outside, by pid, when the training has
come to a step that the seed has drawn. In the table, over all trials of a system:

    over          trials that ended by themselves
    again         steps that were taken again, as the ranks have logged them: where some rank logs a
                  step that lies at least two behind the newest one
    never, twice  samples that counted in no step, or in more than one
    state         trials whose optimizer state was lost: no number of steps leads to the clock
    differ        trials whose ranks ended with different parameters
    hangs         trials that took no step for --patience seconds
    left          processes and files in /dev/shm that stayed
    next, worst   seconds from a fault to the second new step: median, worst
    goodput       seconds of the same training without faults over those with them

Each violation prints the command that repeats it. With --storm-every a rank is killed each so many
seconds instead, for as long as the training takes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch

from benchmarks.alternation import finish, parser, table
from benchmarks.trials.faults import KINDS, Fault, draw, is_alive, strike
from benchmarks.trials.systems import SYSTEMS, System
from benchmarks.trials.workload import Ending, Workload, judged

MARK = "TRIAL_OF_TRAINING"
"""An environment variable, by which the processes of a trial are found when it is over."""

_LEFT_S = 10.0
Line = tuple[float, str, int, int, int]
"""When, the word, rank, pid, and the number of the step."""


@dataclass
class Trial:
    """What came of one training. seconds: from the first step to the last. next_s: by fault."""

    seed: int
    ending: Ending | None = None
    is_hung: bool = False
    exit_code: int | None = None
    num_struck: int = 0
    again: int = 0
    seconds: float = 0.0
    next_s: list[float] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        return self.ending is not None and not self.is_hung

    def violations(self) -> list[str]:
        """In words; a step that is taken again is none, where it was taken back as a whole."""
        end = self.ending
        told = [f"left behind: {one}" for one in self.left]
        if end is None:
            return [*told, "hung" if self.is_hung else f"ended with status {self.exit_code}"]
        if end.never or end.again:
            told.append(f"{end.never} samples never counted, {end.again} more than once")
        if end.num_steps is None:
            told.append("the optimizer's state was lost")
        if end.differ:
            told.append("the ranks ended with different parameters")
        return told


def taken_again(lines: Sequence[Line]) -> int:
    """The number of steps that some rank has logged when the newest one was two or more ahead."""
    newest, again = 0, set()
    for _, word, _, _, number in lines:
        if word == "step":
            if number <= newest - 2:
                again.add(number)
            newest = max(newest, number)
    return len(again)


class Run:
    """One training under way."""

    def __init__(self, system: System, workload: Workload, patience_s: float) -> None:
        self.workload = workload
        self._system = system
        self._patience_s = patience_s
        self._mark = uuid.uuid4().hex
        self._shm = _in_shm()
        self._files: dict[Path, int] = {}
        self.lines: list[Line] = []
        self._log = (Path(workload.folder) / "output").open("wb")
        self.process = subprocess.Popen(
            system.command(workload),
            env={**os.environ, MARK: self._mark, "OMP_NUM_THREADS": "1"},
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def look(self) -> list[Line]:
        """All lines so far, by time."""
        for path in Path(self.workload.folder).glob("log-*"):
            text = path.read_bytes()[self._files.get(path, 0) :]
            whole = text[: text.rfind(b"\n") + 1]
            self._files[path] = self._files.get(path, 0) + len(whole)
            self.lines += [tuple(json.loads(line)) for line in whole.splitlines()]
        self.lines.sort()
        return self.lines

    def newest(self) -> int:
        return max((line[4] for line in self.look() if line[1] == "step"), default=0)

    def ranks(self) -> set[int]:
        return {pid for _, _, _, pid, _ in self.look() if is_alive(pid)}

    def coordinators(self) -> set[int]:
        return {
            pid
            for pid, command in _marked(self._mark)
            if self._system.is_coordinator(command, pid == self.process.pid)
        }

    def wait_for(self, number: int) -> bool:
        """Wait until step `number` is taken; False if the training ends or hangs before."""
        newest, since = self.newest(), time.monotonic()
        while newest < number:
            if self.process.poll() is not None or time.monotonic() - since > self._patience_s:
                return False
            time.sleep(0.02)
            if (now := self.newest()) != newest:
                newest, since = now, time.monotonic()
        return True

    def end(self, trial: Trial) -> None:
        """Wait for the end, and note what is there to note."""
        self.wait_for(1 << 60)
        with contextlib.suppress(subprocess.TimeoutExpired):
            trial.exit_code = self.process.wait(self._patience_s)
        trial.is_hung = trial.exit_code is None
        places = sorted(Path(self.workload.folder).glob("parameters-*.pt"))
        if places and not trial.is_hung:
            trial.ending = judged([torch.load(place) for place in places], self.workload)
        if not trial.is_hung:
            gives_up_at = time.monotonic() + _LEFT_S
            while _marked(self._mark) and time.monotonic() < gives_up_at:
                time.sleep(0.1)
            trial.left += [command[:60] for _, command in _marked(self._mark)]
            trial.left += sorted(_in_shm() - self._shm)
        self.kill()
        steps = [at for at, word, *_ in self.look() if word == "step"]
        trial.seconds = steps[-1] - steps[0] if steps else 0.0
        trial.again = taken_again(self.lines)

    def kill(self) -> None:
        """End what is left of it."""
        for pid, _ in _marked(self._mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self._log.close()

    def strike(self, fault: Fault, trial: Trial) -> bool:
        """Returns whether the training went on."""
        newest, at = self.newest(), time.time()
        trial.num_struck += bool(strike(fault, self.ranks, self.coordinators))
        if not self.wait_for(newest + 2):
            return False
        reached = next(t for t, word, *_, n in self.lines if word == "step" and n >= newest + 2)
        trial.next_s.append(reached - at)
        return True


def _marked(mark: str) -> list[tuple[int, str]]:
    """The living processes of a trial: pids and command lines."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{MARK}={mark}".encode() in (path / "environ").read_bytes():
                command = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                found.append((int(path.name), command))
    return [(pid, command) for pid, command in found if is_alive(pid)]


def _in_shm() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


@contextlib.contextmanager
def running(system: System, args: Any) -> Iterator[Run]:
    with tempfile.TemporaryDirectory() as folder:
        workload = Workload(folder, args.workers, args.samples)
        run = Run(system, workload, args.patience)
        try:
            yield run
        finally:
            run.kill()


def play(system: System, seed: int, faults: Sequence[Fault], args: Any) -> Trial:
    trial = Trial(seed)
    with running(system, args) as run:
        for fault in faults:
            number = int(fault.at * run.workload.num_steps)
            if not run.wait_for(max(1, number)) or not run.strike(fault, trial):
                break
        run.end(trial)
    return trial


def storm(system: System, seed: int, every_s: float, args: Any) -> Trial:
    """A kill of one rank every so many seconds, as long as the training goes on."""
    trial = Trial(seed)
    with running(system, args) as run:
        run.wait_for(1)
        last = int(0.95 * run.workload.num_steps)
        for kill in draw(seed, 10_000, ["kill"]):
            ends_at = time.monotonic() + every_s
            while time.monotonic() < ends_at and run.process.poll() is None:
                time.sleep(0.05)
            if run.newest() >= last or not run.strike(kill, trial):
                break
        run.end(trial)
    return trial


def main() -> None:
    arguments = parser("Strikes trainers with the same seeded faults, and counts what was lost.")
    arguments.add_argument("--seed", type=int, default=0, help="of the first trial")
    arguments.add_argument("--trials", type=int, default=2, help="of each system")
    arguments.add_argument("--faults", type=int, default=3, help="in each trial")
    arguments.add_argument("--kinds", default=",".join(KINDS), help="of faults")
    arguments.add_argument("--systems", default="", help="whose names begin so, by commas")
    arguments.add_argument("--storm-every", type=float, default=0.0, help="seconds between kills")
    arguments.add_argument("--workers", type=int, default=3)
    arguments.add_argument("--samples", type=int, default=1200)
    arguments.add_argument("--patience", type=float, default=90.0, help="seconds without a step")
    args = arguments.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # By way of `finally`.
    chosen = [
        one for name, one in SYSTEMS.items() if name.startswith(tuple(args.systems.split(",")))
    ]
    rows, figures, violations = [], {}, []
    for system in chosen:
        quiet = play(system, args.seed, (), args)
        trials = []
        for seed in range(args.seed, args.seed + args.trials):
            if args.storm_every:
                trials.append(storm(system, seed, args.storm_every, args))
            else:
                faults = draw(seed, args.faults, args.kinds.split(","))
                trials.append(play(system, seed, faults, args))
            for what in trials[-1].violations():
                violations.append(f"{system.name}: {what}; {_repeat(system, seed, args)}")
        told = summed(trials, quiet)
        rows.append([system.name, *(_cell(value) for value in told.values())])
        figures[system.name] = {
            **told,
            "trials": [dataclasses.asdict(trial) for trial in (quiet, *trials)],
        }
        violations += [f"{system.name}, without faults: {one}" for one in quiet.violations()]
    table("trials", ["system", *told], rows)
    for violation in violations:
        print(violation)
    finish(args, {}, figures)


def summed(trials: Sequence[Trial], quiet: Trial) -> dict[str, Any]:
    """One row of the table. quiet: the same training without a fault."""
    endings = [trial.ending for trial in trials if trial.ending is not None]
    seconds = [s for trial in trials for s in trial.next_s]
    over = [trial.seconds for trial in trials if trial.is_over and trial.seconds]
    return {
        "faults": sum(trial.num_struck for trial in trials),
        "over": f"{sum(trial.is_over for trial in trials)}/{len(trials)}",
        "again": sum(trial.again for trial in trials),
        "never": sum(one.never for one in endings),
        "twice": sum(one.again for one in endings),
        "state": sum(one.num_steps is None for one in endings),
        "differ": sum(one.differ for one in endings),
        "hangs": sum(trial.is_hung for trial in trials),
        "left": sum(len(trial.left) for trial in trials),
        "next": statistics.median(seconds) if seconds else None,
        "worst": max(seconds, default=None),
        "goodput": statistics.median(quiet.seconds / s for s in over) if over else None,
    }


def _cell(value: Any) -> str:
    return "-" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)


def _repeat(system: System, seed: int, args: Any) -> str:
    rest = f"--storm-every {args.storm_every:g}" if args.storm_every else f"--faults {args.faults}"
    return (
        f"python benchmarks/trials/check.py --systems '{system.name}' --seed {seed} --trials 1 "
        f"{rest} --kinds {args.kinds} --workers {args.workers} --samples {args.samples}"
    )


if __name__ == "__main__":
    main()
