"""The checker of trials sees what is lost, and strikes the same faults by the same seed."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import json
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.speed import compared
from benchmarks.trials import check, enclosure, faults
from benchmarks.trials.check import goodput, summed
from benchmarks.trials.enclosure import Enclosure
from benchmarks.trials.faults import KINDS, Fault, draw, is_alive, strike
from benchmarks.trials.logged import Line, seconds_to_new, spent, taken_again
from benchmarks.trials.picture import kept_in, picture
from benchmarks.trials.systems import SYSTEMS, System
from benchmarks.trials.trial import Size, Trial, kills_at, last_words, play, storm
from benchmarks.trials.workload import PLANTED, Ledger, Workload, judged

ROOT = Path(__file__).parents[3]


def trained(steps: list[list[int]], workload: Workload, forgets_at: int = -1) -> Ledger:
    """One process that takes steps over these samples, and loses its momentum before one."""
    ledger = Ledger(workload.num_samples)
    optim = torch.optim.SGD(ledger.groups())
    for number, samples in enumerate(steps):
        if number == forgets_at:
            optim = torch.optim.SGD(ledger.groups())
        ledger(torch.tensor(samples)).backward()
        optim.step()
        optim.zero_grad()
    return ledger


def state(ledger: Ledger) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in ledger.named_parameters()}


def test_the_parameters_say_what_counted(tmp_path: Path) -> None:
    workload = Workload(str(tmp_path), num_workers=1, num_samples=7, batch=3)
    whole = [[0, 1, 2], [3, 4, 5], [6]]
    right = state(trained(whole, workload))
    end = judged([right, right], workload)
    assert (end.never, end.again, end.num_steps, end.differ) == (0, 0, 3, False)
    end = judged([state(trained([[0, 1, 2], [2, 3, 4]], workload))], workload)
    assert (end.never, end.again, end.num_steps) == (2, 1, 2)
    assert judged([state(trained(whole, workload, forgets_at=1))], workload).num_steps is None
    other = {**right, "clock": right["clock"] + 1e-15}
    assert judged([right, other], workload).differ


def test_momentum_that_is_lost_late_is_seen_too(tmp_path: Path) -> None:
    steps = [[n % 5] for n in range(300)]
    workload = Workload(str(tmp_path), num_workers=1, num_samples=300, batch=1)
    assert judged([state(trained(steps, workload))], workload).num_steps == 300
    assert judged([state(trained(steps, workload, forgets_at=280))], workload).num_steps is None


def test_steps_of_several_workers_are_told_from_repeats(tmp_path: Path) -> None:
    workload = Workload(str(tmp_path), num_workers=3, num_samples=6, batch=2)
    ledger = Ledger(6)
    optim = torch.optim.SGD(ledger.groups())
    for samples, num_ranks in (([0, 1], 3), ([2, 3], 2), ([4, 5], 1)):
        (ledger(torch.tensor(samples)) / num_ranks).backward()
        ledger.clock.grad = torch.ones(1, dtype=torch.float64)
        optim.step()
        optim.zero_grad()
    end = judged([state(ledger)], workload)
    assert (end.never, end.again, end.num_steps) == (0, 0, 3)


def test_steps_that_are_taken_again_are_counted_once_each() -> None:
    def step(at: float, number: int) -> tuple[float, str, int, int, int]:
        return at, "step", 0, 1, number

    ahead = [step(float(n), n) for n in range(1, 6)]
    assert taken_again(ahead) == 0
    assert taken_again([*ahead, step(5.1, 4)]) == 0, "another rank is one step behind"
    back = [step(6.0 + n, n) for n in (3, 4, 5, 6)]
    assert taken_again([*ahead, *back]) == 1, "the one of two that certainly is"
    assert taken_again([*ahead, *back, *[step(20.0 + n, n) for n in (2, 3, 4)]]) == 3


def steps_of(number: int, at: float, *pids: int) -> list[Line]:
    return [(at + pid / 1000, "step", pid, pid, number) for pid in pids]


def test_a_log_says_how_long_a_training_stood_still_or_had_fewer_ranks() -> None:
    lines = [line for n in range(1, 11) for line in steps_of(n, float(n), 1, 2, 3)]
    whole = spent(lines, 3)
    assert whole.step == 1.0 and (whole.still, whole.fewer) == (0.0, 0.0)
    lines += [line for n in range(11, 15) for line in steps_of(n, n + 9.0, 1, 2)]
    lines += [line for n in range(15, 20) for line in steps_of(n, n + 9.0, 1, 2, 4)]
    struck = spent(lines, 3)
    assert struck.step == 1.0
    assert struck.still == pytest.approx(9.0, abs=0.01), "10 s until step 11, which takes 1"
    assert struck.fewer == pytest.approx(4.0), "steps 11 to 14"


def test_a_log_with_steps_taken_again_has_the_time_of_these() -> None:
    lines = [line for n in range(1, 11) for line in steps_of(n, float(n), 1, 2)]
    lines += [line for n in range(6, 16) for line in steps_of(n, n + 9.0, 3, 4)]
    told = spent(lines, 2)
    assert told.step == 1.0 and told.fewer == 0.0
    assert told.still == pytest.approx(4.0, abs=0.01), "5 s until step 6 is there again"


def test_a_log_without_steps_says_nothing_of_time() -> None:
    assert spent([], 3) == spent(steps_of(1, 1.0, 1, 2), 3)
    alone = spent([*steps_of(1, 1.0, 1), *steps_of(2, 2.0, 1)], 3)
    assert alone.step is None and alone.fewer == 1.0


def test_a_seed_draws_the_same_faults_again() -> None:
    for seed in range(50):
        drawn = draw(seed, 5, list(KINDS))
        assert drawn == draw(seed, 5, list(KINDS))
        assert [one.at for one in drawn] == sorted(one.at for one in drawn)
        assert all(0.05 <= one.at < 0.9 for one in drawn)
    kinds = {one.kind for seed in range(50) for one in draw(seed, 5, list(KINDS))}
    assert kinds == set(KINDS)


def test_only_the_last_fault_of_a_trial_is_an_exception() -> None:
    kinds = [[one.kind for one in draw(seed, 4, list(KINDS))] for seed in range(100)]
    assert any(one[-1] == "exception" for one in kinds)
    assert not any("exception" in one[:-1] for one in kinds)


def test_a_wait_ends_at_a_step_that_nobody_had_taken() -> None:
    lines = [(float(n), "step", 0, 1, n) for n in range(1, 6)]
    lines += [(10.0 + n, "step", 0, 2, n) for n in range(3, 9)]
    assert seconds_to_new(lines, 5.5) == 11.5, "step 7, at 17.0"
    assert seconds_to_new(lines, 17.5) is None


def test_goodput_is_told_in_samples_that_counted(tmp_path: Path) -> None:
    workload = Workload(str(tmp_path), num_workers=1, num_samples=4, batch=2)
    quiet = Trial(0, judged([state(trained([[0, 1], [2, 3]], workload))], workload), seconds=2.0)
    struck = Trial(0, judged([state(trained([[0, 1]], workload))], workload), seconds=4.0)
    assert goodput(struck, quiet) == 0.25


def test_without_a_pace_there_is_no_goodput(tmp_path: Path) -> None:
    workload = Workload(str(tmp_path), num_workers=1, num_samples=4, batch=2)
    struck = Trial(0, judged([state(trained([[0, 1]], workload))], workload), seconds=4.0)
    assert summed([struck], None)["goodput"] is None
    assert summed([struck], struck)["goodput"] == 1.0
    assert list(summed([], None)) == list(summed([struck], struck))


@pytest.fixture
def ended(tmp_path: Path) -> Trial:
    """A training of one process that came to its end."""
    workload = Workload(str(tmp_path), num_workers=1, num_samples=4, batch=2)
    end = judged([state(trained([[0, 1], [2, 3]], workload))], workload)
    return Trial(0, end, seconds=2.0)


@pytest.mark.fast
def test_a_training_that_is_cut_off_says_nothing_of_its_end(ended: Trial) -> None:
    """Its samples are never all used, its ranks are steps apart, its processes are ended."""
    only_known_at_the_end = ("never", "differ", "left")
    cut = dataclasses.replace(ended, is_cut=True)
    hung = Trial(0, is_hung=True)
    for trials in [cut], [cut, cut], [cut, hung]:
        assert {summed(trials, None)[name] for name in only_known_at_the_end} == {None}, trials
    left = dataclasses.replace(ended, left=["a process"])
    assert [summed([cut, left], None)[name] for name in only_known_at_the_end] == [0, 0, 1]


@pytest.mark.fast
def test_what_was_lost_is_a_violation_in_words(ended: Trial) -> None:
    assert ended.violations() == [] and ended.ending is not None
    for what, said in (
        ({"again": 2}, "0 samples never counted, 2 more than once"),
        ({"never": 3}, "3 samples never counted, 0 more than once"),
        ({"num_steps": None}, "the optimizer's state was lost"),
        ({"differ": True}, "the ranks ended with different parameters"),
    ):
        other = dataclasses.replace(ended, ending=dataclasses.replace(ended.ending, **what))
        assert other.violations() == [said]
    assert dataclasses.replace(ended, left=["a process"]).violations() == ["left behind: a process"]
    assert Trial(0, is_hung=True).violations() == ["hung"]


@pytest.mark.fast
def test_each_system_is_struck_by_the_faults_of_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    struck: list[tuple[str, int, tuple[Fault, ...]]] = []

    def played(system: System, seed: int, faults: Sequence[Fault], size: Size) -> Trial:
        struck.append((system.name, seed, tuple(faults)))
        return Trial(seed)

    monkeypatch.setattr(check, "play", played)
    args = SimpleNamespace(storm_every=0.0, faults=3)
    systems = [System(name, lambda _: [], lambda *_: True) for name in ("ours", "theirs")]
    for system in systems:
        for seed in (3, 4):
            check.tried(system, seed, args, list(KINDS), Size())
    assert struck == [
        (system.name, seed, tuple(draw(seed, 3, list(KINDS))))
        for system in systems
        for seed in (3, 4)
    ]
    assert struck[0][2] != struck[1][2]


@pytest.mark.fast
def test_after_each_kill_of_a_storm_time_is_left_to_recover_in() -> None:
    assert kills_at(15, 120) == [7.5 + 15 * n for n in range(8)]
    assert kills_at(0.5, 2.0) == [0.25, 0.75, 1.25, 1.75]
    assert kills_at(15, 44) == [7.5, 22.5, 37.5]
    assert kills_at(15, 52.5) == [7.5, 22.5, 37.5], "not one as the storm ends"
    assert kills_at(0, 120) == []


@pytest.mark.fast
def test_a_fault_from_which_no_training_recovered_is_counted(ended: Trial) -> None:
    struck = dataclasses.replace(ended, struck_at=[1.0, 2.0, 3.0], next_s=[0.5])
    assert (summed([struck, ended], None)["open"], summed([ended], None)["open"]) == (2, 0)


@pytest.mark.fast
def test_a_training_without_an_ending_has_no_goodput_and_not_the_others_one(ended: Trial) -> None:
    hung, failed = Trial(0, is_hung=True), Trial(0, exit_code=1, said="Error")
    raised = Trial(0, exit_code=1, has_raised=True)
    for trials, expected in (
        ([ended, hung, failed], 0.0),
        ([ended, ended, hung], 1.0),
        ([ended, hung], 0.5),
        ([hung], 0.0),
        ([ended, raised, raised], 1.0),  # They ended as the fault asks for.
        ([raised], None),
    ):
        assert summed(trials, ended)["goodput"] == expected, trials


def test_the_table_of_the_performance_page_has_the_rows_that_compared_prints() -> None:
    section = (ROOT / "docs/performance.md").read_text().split("## Compared")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    rows = {
        cells[1]: cells for cells in ([one.strip() for one in line.split("|")] for line in lines)
    }
    by = {f"{row.title}, {row.unit}": compared.file_of(row.benchmark) for row in compared.ROWS}
    del rows[""]
    assert set(by) <= set(rows), "rows with a small gain are left out"
    for title, cells in rows.items():
        printed_by = cells[-2]
        if title in by:
            assert printed_by == by[title]
        else:
            assert printed_by.startswith("tests/")
        assert (ROOT / printed_by).exists(), title


@pytest.mark.fast
def test_a_peer_that_failed_in_a_run_costs_no_row_of_the_compared_ones() -> None:
    recovery, step = (
        next(row for row in compared.ROWS if row.benchmark == name) for name in ("recovery", "step")
    )
    failed = recovery.seconds({"ours": [{"seconds": 0.5}], "Ray Train": []})
    done = recovery.seconds({"ours": [{"seconds": 0.5}], "Ray Train": [{"seconds": 5.0}]})
    steps = step.seconds({"2M": {"medians_s": {"ddp": 0.02, "torch ddp": None}}})
    shown = compared.markdown([(recovery, [failed, done]), (step, [steps])]).splitlines()
    assert f"| {recovery.title}, s | 0.5 | 5 | 0.1 (failed, 0.1) |" in shown[2]
    assert f"| {step.title}, ms | 20 | failed | failed (failed) |" in shown[3]


@pytest.mark.fast
def test_torch_as_a_peer_keeps_gradients_and_parameters_in_its_buckets() -> None:
    """Its default copies both in each step: it is not what torch can do."""
    made = {
        "TorchDDP": "gradient_as_bucket_view",
        "torch.nn.parallel.DistributedDataParallel": "gradient_as_bucket_view",
        "TorchZero": "parameters_as_bucket_view",
    }
    calls = [
        (str(path.relative_to(ROOT)), node.lineno, made[name], {key.arg for key in node.keywords})
        for path in (ROOT / "benchmarks").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and (name := ast.unparse(node.func)) in made
    ]
    assert len(calls) >= 6
    assert [call[:3] for call in calls if call[2] not in call[3]] == []


def test_the_table_of_trials_names_each_system_and_what_prints_it() -> None:
    assert set(compared.SYSTEMS) <= set(SYSTEMS)
    known = summed([], None)
    assert all(row.column in known for row in compared.TRIALS_ROWS)
    columns = {(row.benchmark, row.column) for row in compared.TRIALS_ROWS}
    assert columns >= {(one, what) for one in compared.TRIALS for what in ("over", "hangs")}
    figures = {"chorusline zero": {"goodput": 0.5, "next": None, "again": 3}, "notes": []}
    shown = compared.markdown_of_trials([(row, figures) for row in compared.TRIALS_ROWS])
    assert "| a rank killed every 15 s: goodput ↑ | 0.50 | - | - | - | - |" in shown
    assert "| a rank killed every 15 s: steps repeated ↓ | 3 | - | - | - | - |" in shown
    assert all(command in shown for command in compared.TRIALS.values())


def test_of_an_output_the_last_error_is_quoted() -> None:
    text = "Traceback:\n  File x\nchorusline.StateLost: ranges 0:5 are gone\nraised by rank 2\n\n"
    assert last_words(text) == "chorusline.StateLost: ranges 0:5 are gone"
    assert last_words("one\ntwo\n\n") == "two"


class Sleepers:
    """Processes that do nothing, in the place of a training."""

    def __init__(self, number: int) -> None:
        self.num_workers = number
        self.sleeping = [subprocess.Popen(["sleep", "60"]) for _ in range(number)]
        self.starting: set[int] = set()
        self.planted: list[int] = []

    def ranks(self) -> set[int]:
        return {one.pid for one in self.sleeping if is_alive(one.pid)} - self.starting

    def processes(self) -> set[int]:
        return self.ranks() | self.starting

    def coordinators(self) -> set[int]:
        return {self.sleeping[0].pid}

    @contextlib.contextmanager
    def full_disk(self) -> Iterator[None]:
        yield

    def plant(self, pid: int) -> None:
        self.planted.append(pid)


@pytest.fixture
def sleepers() -> Iterator[Sleepers]:
    made = Sleepers(3)
    yield made
    for process in made.sleeping:
        process.kill()
        process.wait()


def fault(kind: str) -> Fault:
    return Fault(kind, 0.5, 0.4, 0.9, 0.0)


def struck(kind: str, sleepers: Sleepers) -> list[int]:
    before = time.time()
    pids, at = strike(fault(kind), sleepers)
    assert before <= at <= time.time()
    return pids


def test_faults_strike_whom_they_name(sleepers: Sleepers) -> None:
    all_of_them = sleepers.ranks()
    assert struck("exception", sleepers) == sleepers.planted
    assert len(struck("stop", sleepers)) == 1
    assert sleepers.ranks() == all_of_them
    drained = struck("drain", sleepers)
    assert sleepers.ranks() == all_of_them - set(drained)
    ends = {one.pid: one.wait() for one in sleepers.sleeping if one.pid in drained}
    assert list(ends.values()) == [-signal.SIGTERM]


def wait_for(number: int, sleepers: Sleepers) -> None:
    gives_up_at = time.monotonic() + 10
    while len(sleepers.ranks()) != number:
        assert time.monotonic() < gives_up_at
        time.sleep(0.01)


def test_two_are_struck_where_somebody_is_left(sleepers: Sleepers) -> None:
    assert len(struck("kill", sleepers)) == 1
    wait_for(2, sleepers)
    assert len(struck("two", sleepers)) == 1
    wait_for(1, sleepers)


def test_the_last_of_several_is_not_struck(
    sleepers: Sleepers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faults, "_NEWCOMER_S", 0.2)
    struck("two", sleepers)
    wait_for(1, sleepers)
    assert struck("kill", sleepers) == []
    assert len(sleepers.ranks()) == 1


def test_a_process_that_only_starts_is_no_rank_that_could_go_on(
    sleepers: Sleepers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faults, "_NEWCOMER_S", 0.2)
    sleepers.starting = {one.pid for one in sleepers.sleeping[1:]}
    assert struck("kill", sleepers) == []
    sleepers.starting.pop()
    [pid] = struck("newcomer", sleepers)  # The one that starts has been there before.
    assert pid not in sleepers.starting
    wait_for(1, sleepers)


def test_of_three_two_are_struck_at_once(sleepers: Sleepers) -> None:
    assert len(struck("two", sleepers)) == 2
    wait_for(1, sleepers)


@pytest.mark.skipif(enclosure.why_not() is not None, reason=f"namespaces: {enclosure.why_not()}")
def test_a_trial_has_its_own_shared_memory_and_disk(tmp_path: Path) -> None:
    place = Enclosure(tmp_path / "disk")
    script = f"touch /dev/shm/mine; until cp /bin/sh {tmp_path}/disk; do sleep 0.05; done; sleep 60"
    process = subprocess.Popen(place.command(["sh", "-c", script]), stderr=subprocess.DEVNULL)
    try:
        seen = Path(f"/proc/{process.pid}/root{tmp_path}/disk/sh")
        gives_up_at = time.monotonic() + 20
        while not seen.exists() and time.monotonic() < gives_up_at:
            time.sleep(0.02)
        assert place.left() == ["mine"]
        with place.full_disk(process.pid):
            with (
                pytest.raises(OSError, match="No space"),
                seen.with_name("more").open("wb") as more,
            ):
                more.write(bytes(1 << 20))
        seen.with_name("more").write_bytes(bytes(1 << 20))
        assert not (tmp_path / "disk" / "sh").exists()
    finally:
        process.kill()
        process.wait()
        place.close()
    assert not Path("/dev/shm/mine").exists()


TRAINS = """
import sys
import torch
from benchmarks.trials.workload import Ledger, Workload
workload = Workload.of(sys.argv[-1])
ledger = Ledger(workload.num_samples)
optim = torch.optim.SGD(ledger.groups())
workload.log("process", 0)
for step in range(workload.num_steps):
    workload.work(0, ledger)
    first = step * workload.global_batch
    last = min(first + workload.global_batch, workload.num_samples)
    ledger(torch.arange(first, last)).backward()
    optim.step()
    optim.zero_grad()
    workload.log("step", 0, step + 1)
workload.finish(0, ledger)
"""


@pytest.fixture
def alone() -> System:
    """A training of one process, which survives nothing."""

    def command(workload: Workload) -> list[str]:
        return [sys.executable, "-c", TRAINS, workload.as_json()]

    return System("alone", command, lambda command, is_root: is_root)


@pytest.mark.slow
def test_a_trial_says_what_came_of_a_training(alone: System) -> None:
    size = Size(workers=1, samples=40, patience_s=30.0)
    quiet = play(alone, 0, (), size)
    assert quiet.is_over and quiet.violations() == [] and quiet.ending is not None
    assert quiet.ending.counted == 40 and quiet.ending.num_steps == 20
    longer = Size(workers=1, samples=200, patience_s=30.0)  # It is not over before it is struck.
    killed = play(alone, 0, [fault("kill")], longer)
    assert killed.violations() == ["ended with status -9, without a result: "]
    told = play(alone, 0, [fault("exception")], longer)
    assert told.has_raised and told.violations() == [] and PLANTED in told.said


@pytest.mark.slow
def test_a_storm_is_cut_off_when_its_time_is_over(alone: System) -> None:
    quiet = storm(alone, 0, 0.0, 1.0, Size(workers=1, patience_s=30.0))
    assert quiet.is_cut and quiet.violations() == [] and quiet.ending is not None
    assert 0.9 < quiet.seconds < 20 and quiet.ending.counted > 4
    assert goodput(quiet, quiet) == 1.0
    struck = storm(alone, 0, 0.5, 2.0, Size(workers=1, patience_s=30.0))
    assert struck.struck == ["kill"] and not struck.is_over


@pytest.mark.slow
@pytest.mark.parametrize("name", SYSTEMS)
def test_every_system_trains_and_is_struck(name: str) -> None:
    if reason := SYSTEMS[name].why_not():
        pytest.skip(reason)
    trial = play(SYSTEMS[name], 0, [Fault("kill", 0.4, 0.9, 0.0, 0.0)], Size(2, 400))
    assert trial.struck == ["kill"] and trial.is_over and trial.next_s, trial
    assert trial.ending is not None and trial.ending.again == 0
    # torchft's samples of a replica that is away are used by nobody.
    assert trial.violations() == [] or "torchft" in name


def test_the_picture_of_a_storm_takes_back_what_a_system_repeats(tmp_path: Path) -> None:
    """Three ranks take four steps; one is killed; two ranks begin at step 2 again."""
    before = [(float(step), "step", rank, rank, step) for step in range(1, 5) for rank in range(3)]
    after = [(float(step + 8), "step", rank, rank, step) for step in (2, 3) for rank in range(2)]
    lines = [*before, (5.0, "struck", -1, 2, 0), *after]
    for name, kept in {"torchrun checkpoints": lines, "quiet": before}.items():
        text = "".join(json.dumps(line) + "\n" for line in kept)
        (tmp_path / f"{name}-0-1764000000.jsonl").write_text(text)
    curves = kept_in(tmp_path)
    assert list(curves) == ["torchrun checkpoints"]
    by_second = dict(curves["torchrun checkpoints"].points)
    assert by_second == {0.0: 6, 1.0: 12, 2.0: 18, 3.0: 24, 9.0: 10, 10.0: 14}
    assert curves["torchrun checkpoints"].kills == [4.0]
    drawn = picture(curves)
    assert ET.fromstring(drawn).tag.endswith("svg") and drawn.count('class="kill"') == 1
    assert ">torchrun</text>" in drawn, "the name that the pages have"
