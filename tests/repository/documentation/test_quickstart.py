"""The program of docs/getting-started.md, typed from the page into an empty folder."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import ROOT
from tests.harness.head_node import BIN, ENVIRONMENT, dashboard_of_head

PAGE = (ROOT / "docs/getting-started.md").read_text()
(PROGRAM,) = re.findall(r'```python title="train.py"\n(.*?)```', PAGE, re.DOTALL)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
"""Each test starts clusters of its own, as the page does."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("empty")
    (folder / "train.py").write_text(PROGRAM)
    return folder


def typed(folder: Path, line: str) -> str:
    """What a line of the page prints in the folder, with the environment activated."""
    assert line in PAGE, "the page says something else to type"
    ran = subprocess.run(
        line,
        shell=True,
        cwd=folder,
        env=ENVIRONMENT | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout + ran.stderr


def test_it_trains_and_goes_on_when_it_is_run_again(folder: Path) -> None:
    first = typed(folder, "python train.py")
    accuracies = [float(found) for found in re.findall(r"step \d+: accuracy ([\d.]+)", first)]
    assert len(accuracies) == 4 and accuracies[-1] > 0.9
    assert "164 steps; written: " in first
    again = typed(folder, "python train.py --epochs 6")
    assert re.search(r"the run resumes from \S+/step-00000160-\S+, of step 160", again)
    assert "epoch 2" not in again and "epoch 5, step 246: accuracy" in again
    records = [json.loads(line) for line in (folder / "out/metrics.jsonl").open()]
    losses = [record for record in records if "loss" in record]
    taken = {rank: [r["step"] for r in losses if r["rank"] == rank] for rank in (0, 1)}
    # Rank 1 has a batch less in each epoch. Steps 161 to 164 are taken again after the resume.
    assert set(taken[0]) == set(range(1, 247))
    assert set(range(1, 247)) - set(taken[1]) == {41 * epoch for epoch in range(1, 7)}


def test_the_other_lines_that_launch_it_do_so(folder: Path) -> None:
    assert "epoch 5, step 246" in typed(folder, "chorusline run train.py --epochs 6")
    function = typed(folder, "chorusline run train.py:train --workers 2 -- --epochs 2")
    assert "[rank 0] returned 82" in function and "[rank 1] returned 82" in function
    line = "chorusline run train.py:train --workers 2 --checkpoint out/checkpoints -- --epochs 8"
    goes_on = typed(folder, line)
    assert "step-00000240-" in goes_on and "[rank 1] returned 328" in goes_on


@pytest.fixture(scope="module")
def dashboard() -> Iterator[str]:
    with dashboard_of_head({"PYTHONPATH": str(ROOT)}) as address:
        yield address


def test_it_runs_as_a_job(folder: Path, dashboard: str, tmp_path: Path) -> None:
    line = 'ray job submit --working-dir . -- python train.py --out "$PWD/job"'
    assert line in PAGE
    submit, entrypoint = line.split(" -- ")
    ran = subprocess.run(
        [BIN / "ray", *submit.split()[1:], "--", *entrypoint.split()[:-1], str(tmp_path / "job")],
        cwd=folder,
        env=ENVIRONMENT | {"RAY_ADDRESS": dashboard},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "epoch 3, step 164: accuracy" in ran.stdout
    assert (tmp_path / "job/digits.pt").exists()
