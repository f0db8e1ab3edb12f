"""One training of a system under test: start it, watch it, strike it, and say what came of it."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from .enclosure import Enclosure
from .faults import Fault, draw, is_alive, strike
from .logged import Line, Spent, seconds_to_new, spent, steps_in, taken_again
from .systems import System
from .workload import PLANTED, Ending, Workload, judged

MARK = "TRIAL_OF_TRAINING"
"""An environment variable, by which the processes of a trial are found when it is over."""

_LEFT_S = 10.0


@dataclass(frozen=True)
class Size:
    """The size of each training of a table.

    patience_s: a training that takes no step for this long counts as hung.
    keep: a folder for the output of the trainings, and for the logs of their ranks.
    """

    workers: int = 3
    samples: int = 1200
    patience_s: float = 90.0
    keep: str | None = None


@dataclass
class Trial:
    """The result of one training.

    seconds: from the first step to the last.
    next_s: the seconds from each fault to the second new step, of those that have one.
    has_raised: the training ended with the exception that was planted.
    is_cut: it was stopped when its time was over, as in a storm.
    said: the last line of its output, if it ended with an error.
    """

    seed: int
    ending: Ending | None = None
    is_hung: bool = False
    has_raised: bool = False
    is_cut: bool = False
    exit_code: int | None = None
    said: str = ""
    struck: list[str] = field(default_factory=list)
    again: int = 0
    seconds: float = 0.0
    struck_at: list[float] = field(default_factory=list)
    next_s: list[float] = field(default_factory=list)
    spent: Spent | None = None
    left: list[str] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        return self.ending is not None and not self.is_hung

    def violations(self) -> list[str]:
        """In words; a step that is taken again is none, where it was taken back as a whole."""
        end = self.ending
        found = [f"left behind: {', '.join(self.left)}"] if self.left else []
        if self.has_raised:
            return found
        if end is None:
            how = f"ended with status {self.exit_code}, without a result: {self.said}"
            return [*found, "hung" if self.is_hung else how]
        if end.again or (end.never and not self.is_cut):
            found.append(f"{end.never} samples never counted, {end.again} more than once")
        if end.num_steps is None:
            found.append("the optimizer's state was lost")
        if end.differ and not self.is_cut:  # Ranks are cut off a step apart.
            found.append("the ranks ended with different parameters")
        return found


def last_words(output: str) -> str:
    """The last line of an output that is an error, or else its last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()] or [""]
    errors = [line for line in lines if re.match(r"(\[.*\] ?)?[\w.]*[A-Z]\w+: ", line)]
    return (errors or lines)[-1][:300]


class Run:
    """One training under way. A Target of faults."""

    def __init__(self, system: System, workload: Workload, patience_s: float) -> None:
        self.workload = workload
        self.num_workers = workload.num_workers
        self._system = system
        self._patience_s = patience_s
        self._mark = uuid.uuid4().hex
        self._enclosure = Enclosure(workload.disk)
        self._files: dict[Path, int] = {}
        self.lines: list[Line] = []
        self.struck: list[Line] = []
        self.output = Path(workload.folder) / "output"
        self._log = self.output.open("wb")
        self.process = subprocess.Popen(
            self._enclosure.command(system.command(workload)),
            env={**os.environ, MARK: self._mark, "OMP_NUM_THREADS": "1"},
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def look(self) -> list[Line]:
        """All lines so far, by time."""
        came = False
        for path in Path(self.workload.folder).glob("log-*"):
            seen = self._files.get(path, 0)
            if path.stat().st_size == seen:
                continue
            with path.open("rb") as file:
                file.seek(seen)
                text = file.read()
            whole = text[: text.rfind(b"\n") + 1]
            self._files[path] = seen + len(whole)
            self.lines += [tuple(json.loads(line)) for line in whole.splitlines()]
            came = True
        if came:
            self.lines.sort()
        return self.lines

    def newest(self) -> int:
        return max((line[4] for line in self.look() if line[1] == "step"), default=0)

    # -- As a Target -----------------------------------------------------------------------------

    def ranks(self) -> set[int]:
        return {pid for pid in {pid for _, pid, _ in steps_in(self.look())} if is_alive(pid)}

    def processes(self) -> set[int]:
        return {pid for pid in {line[3] for line in self.look()} if is_alive(pid)}

    def coordinators(self) -> set[int]:
        return {
            pid
            for pid, command in _marked(self._mark)
            if self._system.is_coordinator(command, pid == self.process.pid)
        }

    def full_disk(self) -> contextlib.AbstractContextManager[None]:
        return self._enclosure.full_disk(_marked(self._mark)[0][0])

    def plant(self, pid: int) -> None:
        (Path(self.workload.folder) / f"raise-{pid}").touch()

    # -- From outside ----------------------------------------------------------------------------

    def wait_for(self, number: int) -> bool:
        """Wait until step `number` is taken; False if the training ends or hangs before."""
        seen, since = len(self.look()), time.monotonic()
        while self.newest() < number:
            if self.process.poll() is not None or time.monotonic() - since > self._patience_s:
                return False
            time.sleep(0.02)
            if (now := len(self.look())) != seen:
                seen, since = now, time.monotonic()
        return True

    def strike(self, fault: Fault, trial: Trial) -> None:
        pids, at = strike(fault, self)
        if pids:
            trial.struck.append(fault.kind)
            trial.struck_at.append(at)
            self.struck.append((at, "struck", -1, min(pids), 0))

    def end(self, trial: Trial) -> None:
        """Wait for the end, and note what is there to note."""
        self.wait_for(1 << 60)
        with contextlib.suppress(subprocess.TimeoutExpired):
            trial.exit_code = self.process.wait(5.0 if self._is_silent() else self._patience_s)
        trial.is_hung = trial.exit_code is None
        self._judge(trial)
        if not trial.is_hung:
            gives_up_at = time.monotonic() + _LEFT_S
            while _marked(self._mark) and time.monotonic() < gives_up_at:
                time.sleep(0.1)
            trial.left += [command[:60] for _, command in _marked(self._mark)]
            trial.left += self._enclosure.left()
        if trial.exit_code:
            text = self.output.read_text(errors="replace")
            trial.said = last_words(text)
            trial.has_raised = "exception" in trial.struck and PLANTED in text
        steps = [at for at, word, *_ in self.look() if word == "step"]
        trial.seconds = steps[-1] - steps[0] if steps else 0.0

    def cut(self, trial: Trial) -> None:
        """Its time is over: note how far it has come, and end it."""
        (Path(self.workload.folder) / "stop").touch()
        gives_up_at = time.monotonic() + self._patience_s
        while not (places := self._places()) and time.monotonic() < gives_up_at:
            time.sleep(0.05)
        trial.is_cut, trial.is_hung = True, not places
        self._judge(trial)
        steps = [at for at, word, *_ in self.look() if word == "step"]
        if places and steps:
            trial.seconds = places[0].stat().st_mtime - steps[0]

    def close(self) -> None:
        """End what is left of it."""
        # Those that are found first may start others meanwhile.
        while marked := _marked(self._mark):
            for pid, _ in marked:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        self.process.wait()
        self._log.close()
        self._enclosure.close()

    def _is_silent(self) -> bool:
        """Whether nothing has come for as long as patience lasts."""
        lines = self.look()
        return bool(lines) and time.time() - lines[-1][0] > self._patience_s

    def _places(self) -> list[Path]:
        return sorted(Path(self.workload.folder).glob("parameters-*.pt"))

    def _judge(self, trial: Trial) -> None:
        if (places := self._places()) and not trial.is_hung:
            trial.ending = judged([torch.load(place) for place in places], self.workload)
        trial.again = taken_again(self.look())
        waits = [seconds_to_new(self.lines, at) for at in trial.struck_at]
        trial.next_s = [one for one in waits if one is not None]
        trial.spent = spent(self.lines, self.num_workers)


def _marked(mark: str) -> list[tuple[int, str]]:
    """The living processes of a trial: pids and command lines."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{MARK}={mark}".encode() in (path / "environ").read_bytes():
                command = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                found.append((int(path.name), command))
    return [(pid, command) for pid, command in found if is_alive(pid)]


@contextlib.contextmanager
def running(system: System, seed: int, size: Size) -> Iterator[Run]:
    with tempfile.TemporaryDirectory() as folder:
        workload = Workload(folder, size.workers, size.samples)
        run = Run(system, workload, size.patience_s)
        try:
            yield run
        finally:
            run.close()
            if size.keep is not None:
                place = Path(size.keep) / f"{system.name}-{seed}-{time.time():.0f}.txt"
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(run.output, place)
                logged = "".join(
                    json.dumps(line) + "\n" for line in sorted([*run.look(), *run.struck])
                )
                place.with_suffix(".jsonl").write_text(logged)


def play(system: System, seed: int, faults: Sequence[Fault], size: Size) -> Trial:
    """One training to its end, and these faults on its way."""
    trial = Trial(seed)
    with running(system, seed, size) as run:
        for fault in faults:
            number = int(fault.at * run.workload.num_steps)
            if not run.wait_for(max(1, number, run.newest() + 2)):
                break
            run.strike(fault, trial)
        run.end(trial)
    return trial


def storm(
    system: System,
    seed: int,
    every_s: float,
    seconds: float,
    size: Size,
    cut_s: float | None = None,
) -> Trial:
    """A training that has enough samples for so many seconds, cut off when these have passed since
    its first step, or cut_s have; and a kill of one rank every so many (kills_at)."""
    trial, plain = Trial(seed), Workload("")
    steps = seconds / plain.batch_s
    endless = replace(size, samples=int(steps) * size.workers * plain.batch)
    with running(system, seed, endless) as run:
        run.wait_for(1)
        begun = time.monotonic()
        instants = kills_at(every_s, seconds)
        for after_s, kill in zip(instants, draw(seed, len(instants), ["kill"]), strict=True):
            _sleep_until(begun + after_s, run)
            if run.process.poll() is not None:
                break
            run.strike(kill, trial)
        _sleep_until(begun + (cut_s or seconds), run)
        if run.process.poll() is None:
            run.cut(trial)
        else:
            run.end(trial)
    return trial


def kills_at(every_s: float, seconds: float) -> list[float]:
    """Seconds from the first step to each kill of a storm. every_s 0: none.

    In the middle of each interval, so that what the last one costs is seen as well."""
    if not every_s:
        return []
    return [(number + 0.5) * every_s for number in range(math.ceil(seconds / every_s - 0.5))]


def _sleep_until(at: float, run: Run) -> None:
    while time.monotonic() < at and run.process.poll() is None:
        time.sleep(0.05)
