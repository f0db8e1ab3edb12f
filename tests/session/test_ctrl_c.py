"""Ctrl-C in a script: a real SIGINT to a real process."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import asyncio, sys, time
import chorusline as cl

def train(ctx):
    while True:
        ctx.report(now=1)
        ctx.barrier()
        time.sleep(0.05)

def show(report):
    print("training", flush=True)

async def main():
    async with cl.Session(2, resources_per_worker={"CPU": 0.1}, on_report=show) as session:
        await session.run(train)

try:
    if sys.argv[1] == "run":
        cl.run(train, num_workers=2, resources_per_worker={"CPU": 0.1}, on_report=show)
    else:
        asyncio.run(main())
except KeyboardInterrupt:
    if sys.argv[1] != "caught":
        raise
    print("caught by the user")
finally:
    print("the user's finally")
"""


@pytest.mark.parametrize(
    "kind", ["run", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("session", "caught"))]
)
def test_ctrl_c_in_a_script_ends_with_one_line_after_what_the_user_does(
    tmp_path: Path, on_cluster: dict[str, str], kind: str
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    shell = f"exec {sys.executable} script.py {kind}"
    with subprocess.Popen(
        ["bash", "-c", shell],
        cwd=tmp_path,
        env=on_cluster,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout and process.stderr
        assert process.stdout.readline() == "training\n"
        process.send_signal(signal.SIGINT)
        # Not communicate(), which loses what is in the buffer: half a line, perhaps.
        said, errors = process.stdout.read(), process.stderr.read()
    last = [line for line in said.splitlines() if line != "training"]
    assert "Traceback" not in errors
    if kind == "caught":
        assert last == ["caught by the user", "the user's finally"]
        assert process.returncode == 0
    else:
        assert last == ["the user's finally"]
        assert errors.splitlines()[-1] == "Interrupted: all ranks were stopped."
        assert process.returncode == 130


@pytest.mark.slow
def test_an_interrupt_of_the_users_own_code_keeps_its_traceback(
    tmp_path: Path, on_cluster: dict[str, str]
) -> None:
    script = "import chorusline as cl\n"
    script += "cl.run(lambda ctx: None, resources_per_worker={'CPU': 0.1})\n"
    script += "raise KeyboardInterrupt\n"
    (tmp_path / "script.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env=on_cluster,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert "Traceback" in done.stderr
    assert 'script.py", line 3' in done.stderr
