"""A rank of a plain script is killed from outside, at a random instant: the script begins again
from the step before that, and ends with the digits of a run that nobody has disturbed."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import ray

from tests import ROOT
from tests.harness.forked_workers import python

SCRIPTS = ROOT / "tests/commands/plain_scripts"
STEPS, SAVED_AT, RANKS = 50, 20, 3
"""The script saves by itself every 20 steps, so that one that is killed would lose up to 19."""


@dataclass
class Run:
    told: list[str]
    errors: str
    steps: list[list[int]]
    """By rank, those that it has ended, in their order."""


def taken(folder: Path, rank: int) -> list[int]:
    file = folder / f"steps-{rank}"
    return [int(line.split()[0]) for line in file.read_text().splitlines()] if file.exists() else []


def latest_of(folder: Path) -> list[int]:
    return [max(taken(folder, rank), default=0) for rank in range(RANKS)]


def pids_of(folder: Path) -> list[str]:
    """By rank, of those that have begun last."""
    files = [folder / f"pid-{rank}" for rank in range(RANKS)]
    return [file.read_text() if file.exists() else "" for file in files]


def run(
    script: str,
    folder: Path,
    pace_s: float,
    victims: list[int],
    chance: random.Random,
    save_s: float = 0.0,
) -> Run:
    """victims: ranks that are killed, one after another, the first soon after step 20 and each of
    the others soon after the script has begun again."""
    folder.mkdir()
    interpreter, variables = python()
    command = "-m chorusline.runtime.commands.command_line run --workers 3 --max-restarts 5"
    command += f" --env SAVE_S={save_s}"
    process = subprocess.Popen(
        [*interpreter, *command.split(), SCRIPTS / script, folder, str(STEPS), str(pace_s)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ
        | variables
        | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
        | {"RAY_ADDRESS": ray.get_runtime_context().gcs_address},
    )
    pids = [""] * RANKS
    latest = SAVED_AT
    for victim in victims:
        latest += chance.randrange(1, 5)
        while latest > min(latest_of(folder)) or not {*pids}.isdisjoint(pids_of(folder)):
            assert process.poll() is None, process.communicate()
            time.sleep(0.002)
        time.sleep(chance.random() * 2 * pace_s)
        pids = pids_of(folder)
        os.kill(int(pids[victim]), signal.SIGKILL)
        time.sleep(2 * pace_s)  # The others have met with the loss.
        latest = max(latest_of(folder))
    out, errors = process.communicate(timeout=300)
    assert process.returncode == 0, out + errors
    told = [line.removeprefix("[rank 0] ") for line in out.splitlines()]
    return Run(told[-2:], errors, [taken(folder, rank) for rank in range(RANKS)])


def check(script: str, folder: Path, victims: list[int], save_s: float = 0.0) -> None:
    seed, pace_s = random.randrange(10**6), 0.1
    print("seed", seed)  # Of a test that fails, pytest shows it.
    whole = run(script, folder / "whole", 0.0, [], random.Random(seed))
    assert whole.told[0] == "begun 0"
    killed = run(script, folder / "killed", pace_s, victims, random.Random(seed), save_s)
    # Without rank 0 its statistics of BatchNorm are lost; they are no part of a step.
    told = 3 if 0 in victims else 4
    assert killed.told[1].split()[:told] == whole.told[1].split()[:told]
    begun = int(killed.told[0].removeprefix("begun "))
    assert re.search(f"last completed step is written down: .*[-( ]{begun}\\b", killed.errors)
    assert f"restart {len(victims)} of 5" in killed.errors
    for steps in killed.steps:
        assert len(steps) - len({*steps}) <= len(victims), f"steps taken again: {steps}"
    assert {*killed.steps[0], *killed.steps[1], *killed.steps[2]} == {*range(1, STEPS + 1)}
    assert begun >= SAVED_AT + len(victims)  # Each is killed after one more step, or several.


@pytest.mark.timeout(240)
def test_a_loop_with_one_line_more_loses_at_most_the_step_in_flight(
    cluster: None, tmp_path: Path
) -> None:
    check("last_step.py", tmp_path, [2])


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("victims", [[0], [1, 0], [2, 2, 1]])
def test_ranks_of_a_loop_are_killed_one_after_another(
    cluster: None, tmp_path: Path, victims: list[int]
) -> None:
    check("last_step.py", tmp_path, victims)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_survivor_has_the_time_that_its_checkpoint_takes(cluster: None, tmp_path: Path) -> None:
    """Longer than the others have to stop, and than a rank is left alone before an interrupt."""
    check("last_step.py", tmp_path, [2], save_s=8.0)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("victims", [[2], [0], [1, 0]])
def test_an_unmodified_trainer_loses_at_most_the_step_in_flight(
    cluster: None, tmp_path: Path, victims: list[int]
) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    check("hf_last_step.py", tmp_path, victims)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("victims", [[2], [0], [1, 0]])
def test_an_unmodified_trainer_of_lightning_loses_at_most_the_step_in_flight(
    cluster: None, tmp_path: Path, victims: list[int]
) -> None:
    pytest.importorskip("lightning", reason="lightning is not installed")
    check("lightning_last_step.py", tmp_path, victims)
