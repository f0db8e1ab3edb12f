"""benchmarks/faults/soak.py runs, draws its picture, and names what grows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.faults.soak import QUANTITIES, ROLES, SLACK, Soak, picture


def _soak(folder: Path, keys_per_hour: float) -> Soak:
    """An hour in which nothing but the keys of the store may grow."""
    soak = Soak(folder, 0)
    for second in range(0, 3600, 5):
        found = {
            role: {"memory": 100.0 + second % 3, "descriptors": 40.0, "threads": 20.0}
            for role in ROLES
        }
        found["driver"]["keys"] = 12 + second * keys_per_hour / 3600
        soak.samples.append((float(second), found))
    return soak


@pytest.mark.parametrize(("keys_per_hour", "is_named"), [(0.0, False), (3600.0, True)])
def test_what_grows_is_named_and_what_does_not_is_not(tmp_path, keys_per_hour, is_named):
    soak = _soak(tmp_path, keys_per_hour)
    assert [line.partition(":")[0] for line in soak.grown()] == ["keys of the driver"] * is_named
    assert soak.figures().keys() == QUANTITIES.keys() == SLACK.keys()


def test_the_picture_has_a_line_for_each_role_of_each_quantity(tmp_path):
    drawn = ElementTree.fromstring(picture(_soak(tmp_path, 0.0), "an hour < two hours"))
    lines = drawn.findall("{http://www.w3.org/2000/svg}polyline")
    assert len(lines) == 3 * len(ROLES) + 1


@pytest.mark.slow  # It lasts a minute, and as long as three workers take to start.
@pytest.mark.timeout(450)
def test_a_minute_with_a_loss_every_ten_seconds_leaves_nothing_that_grows(tmp_path):
    plot = tmp_path / "soak.svg"
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "benchmarks.faults.soak",
            "--minutes",
            "1",
            "--json",
            "--plot",
            str(plot),
        ],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["losses"] > 0 and told["grown"] == [] and len(set(told["steps"])) == 1
    assert told["figures"]["keys"].keys() == {"driver"}
    ElementTree.fromstring(plot.read_text())
