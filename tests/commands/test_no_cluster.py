"""What a person is told who has started no cluster: one line, at once, and a status of 1."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from chorusline.runtime.session.connecting import no_cluster

COMMANDS = {
    "run --detach": (
        "-m",
        "chorusline.runtime.commands.command_line",
        "run",
        "train.py:train",
        "--detach",
    ),
    "attach": ("-m", "chorusline.runtime.commands.command_line", "attach", "night"),
    "status": ("-m", "chorusline.runtime.commands.command_line", "status"),
    "stop": ("-m", "chorusline.runtime.commands.command_line", "stop", "night"),
    "run script.py": (
        "-m",
        "chorusline.runtime.commands.command_line",
        "run",
        "script.py",
        "attach",
    ),
    "cl.attach": ("script.py", "attach"),
    "detached=True": ("script.py", "session"),
}

TRAIN = "def train(ctx):\n    return ctx.rank\n"

SCRIPT = """
import asyncio, sys
import chorusline as cl

async def main():
    if sys.argv[1] == "attach":
        await cl.attach("night")
    else:
        await cl.Session(2, name="night", detached=True)

asyncio.run(main())
"""

ELSEWHERE = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc")
"""A machine on which no other process runs: Ray's "auto" looks for processes of a cluster."""


def told(folder: Path, *arguments: str, **environment: str) -> str:
    """What `python *arguments` says, which fails."""
    (folder / "train.py").write_text(TRAIN)
    (folder / "script.py").write_text(SCRIPT)
    alone = () if "RAY_ADDRESS" in environment else ELSEWHERE
    done = subprocess.run(
        [*alone, sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=50,  # Ray would try for 60 s.
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert done.stdout == ""
    return done.stderr


@pytest.fixture
def elsewhere() -> None:
    try:
        subprocess.run([*ELSEWHERE, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("unshare(1) cannot make a namespace of processes here")


@pytest.mark.parametrize("arguments", COMMANDS.values(), ids=COMMANDS)
def test_without_a_cluster_one_line_says_what_to_start(
    elsewhere: None, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    line = told(tmp_path, *arguments, RAY_TMPDIR=str(tmp_path))
    assert line == f"{no_cluster('auto', '', may_start=False)}\n"
    assert "no Ray cluster runs on this machine: start one with `ray start --head`" in line


@pytest.mark.parametrize("kind", ["run --detach", "cl.attach"])
def test_a_cluster_that_does_not_answer_is_one_line_with_its_address(
    tmp_path: Path, kind: str
) -> None:
    line = told(tmp_path, *COMMANDS[kind], RAY_ADDRESS="127.0.0.1:1")
    assert line == f"{no_cluster('127.0.0.1:1', 'Connection refused', may_start=False)}\n"


def test_the_address_that_a_killed_cluster_has_left_behind_is_not_tried_for_a_minute(
    elsewhere: None, tmp_path: Path
) -> None:
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray/ray_current_cluster").write_text("127.0.0.1:1")
    line = told(tmp_path, *COMMANDS["status"], RAY_TMPDIR=str(tmp_path))
    assert "no Ray cluster runs on this machine" in line


def test_an_address_that_is_none_is_told(tmp_path: Path) -> None:
    line = told(tmp_path, *COMMANDS["status"], RAY_ADDRESS="head-node")
    assert "no Ray cluster answers at 'head-node' (an address is host:port)" in line


def test_only_a_program_that_could_start_a_cluster_hears_that_it_could() -> None:
    for address in ("auto", "10.0.0.1:6379"):
        could, could_not = (str(no_cluster(address, "gone", may)) for may in (True, False))
        assert could == f"{could_not}; without an address the session starts a cluster of its own"
