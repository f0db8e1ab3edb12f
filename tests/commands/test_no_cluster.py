"""What a person is told who has started no cluster: one line, at once, and a status of 1; and the
cluster of this machine, where it wants a token."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from chorusline.actors.ray_calls.calls import refuses
from chorusline.runtime.session.connecting import no_cluster
from tests.harness.forked_workers import python
from tests.harness.head_node import free_ports, head_node

COMMANDS = {
    "run --detach": ("chorusline", "run", "train.py:train", "--detach"),
    "attach": ("chorusline", "attach", "night"),
    "status": ("chorusline", "status"),
    "stop": ("chorusline", "stop", "night"),
    "run script.py": ("chorusline", "run", "script.py", "attach"),
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

EACH_IN_A_FORK = """
import json, os, pathlib, runpy, subprocess, sys
import chorusline as cl
from chorusline.runtime.commands import command_line
cl.attach, cl.Session  # What each would import.

for number, (environment, words) in enumerate(json.loads(sys.stdin.read())):
    if (child := os.fork()) == 0:
        for fd in 1, 2:
            os.dup2(os.open(f"{number}.{fd}", os.O_WRONLY | os.O_CREAT), fd)
        os.environ.update(environment)
        sys.argv[:] = words
        status = 0
        try:
            if words[0] == "chorusline":
                status = command_line.main(words[1:])
            else:
                runpy.run_path(words[0], run_name="__main__")
        except SystemExit as ends:
            if isinstance(ends.code, str):
                print(ends.code, file=sys.stderr)
            status = int(bool(ends.code))
        except BaseException:
            sys.excepthook(*sys.exc_info())
            status = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # To take apart what was imported is a second of a CPU.
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(json.dumps([status, *(pathlib.Path(f"{number}.{fd}").read_text() for fd in (1, 2))]))
"""

ELSEWHERE = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc")
"""A machine on which no other process runs: Ray's "auto" looks for processes of a cluster."""

Tell = Callable[[str, str], str]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Tell:
    """told(command, place): what this command says, which fails, by RAY_ADDRESS or, where there is
    none, the folder of Ray's files."""
    folder = tmp_path_factory.mktemp("elsewhere")
    try:
        subprocess.run([*ELSEWHERE, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("unshare(1) cannot make a namespace of processes here")
    (folder / "train.py").write_text(TRAIN)
    (folder / "script.py").write_text(SCRIPT)
    (folder / "left/ray").mkdir(parents=True)
    (folder / "left/ray/ray_current_cluster").write_text("127.0.0.1:1")
    cases = [(command, "none") for command in COMMANDS]
    cases += [("run --detach", "127.0.0.1:1"), ("cl.attach", "127.0.0.1:1")]
    cases += [("status", "left"), ("status", "head-node")]
    environments = {"none": {"RAY_TMPDIR": str(folder)}, "left": {"RAY_TMPDIR": f"{folder}/left"}}
    given = [
        (environments.get(place, {"RAY_ADDRESS": place}), COMMANDS[name]) for name, place in cases
    ]
    done = subprocess.run(
        [*ELSEWHERE, sys.executable, "-c", EACH_IN_A_FORK],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(["", *sys.path])},
        input=json.dumps(given),
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    answers = dict(zip(cases, map(json.loads, done.stdout.splitlines()), strict=True))

    def of(command: str, place: str) -> str:
        status, output, errors = answers[command, place]
        assert (status, output) == (1, ""), errors
        return errors

    return of


@pytest.mark.parametrize("command", COMMANDS)
def test_without_a_cluster_one_line_says_what_to_start(told: Tell, command: str) -> None:
    line = told(command, "none")
    assert line == f"{no_cluster('auto', '', may_start=False)}\n"
    assert "no Ray cluster runs on this machine: start one with `ray start --head`" in line


@pytest.mark.parametrize("command", ["run --detach", "cl.attach"])
def test_a_cluster_that_does_not_answer_is_one_line_with_its_address(
    told: Tell, command: str
) -> None:
    line = told(command, "127.0.0.1:1")
    assert line == f"{no_cluster('127.0.0.1:1', 'Connection refused', may_start=False)}\n"


def test_the_address_that_a_killed_cluster_has_left_behind_is_not_tried_for_a_minute(
    told: Tell,
) -> None:
    assert "no Ray cluster runs on this machine" in told("status", "left")


def test_an_address_that_is_none_is_told(told: Tell) -> None:
    line = told("status", "head-node")
    assert "no Ray cluster answers at 'head-node' (an address is host:port)" in line


def test_only_a_program_that_could_start_a_cluster_hears_that_it_could() -> None:
    for address in ("auto", "10.0.0.1:6379"):
        could, could_not = (str(no_cluster(address, "gone", may)) for may in (True, False))
        assert could == f"{could_not}; without an address the session starts a cluster of its own"


def test_a_ray_that_cannot_start_is_one_line_with_what_to_try() -> None:
    program = "import chorusline as cl\ncl.run(print, num_workers=1)"
    command, variables = python()
    ended = subprocess.run(
        [*command, "-c", program],
        env={**os.environ, "RAY_TMPDIR": "/proc/nowhere", "RAY_ADDRESS": "", **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 1
    last = ended.stderr.splitlines()[-1]
    assert (
        last.startswith("Ray cannot start on this machine: [Errno 2]") and "/proc/nowhere" in last
    )
    assert "`chorusline doctor` shows what is wrong here" in last
    assert "Traceback" not in ended.stderr


JOINS = """
import os
from chorusline.runtime.session.connecting import join

join(None)
print(os.environ["RAY_AUTH_MODE"])
"""


def test_the_cluster_of_this_machine_takes_the_token_that_a_local_run_has_left(
    tmp_path: Path,
) -> None:
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray/auth_token").write_text(secrets.token_hex(32))
    gcs, client, agent = free_ports(3)
    (tmp_path / "ray").mkdir()  # What `ray start` writes for "auto" into its folder.
    (tmp_path / "ray/ray_current_cluster").write_text(f"127.0.0.1:{gcs}")
    flags = (
        *(f"--port={gcs}", "--num-cpus=1", "--include-dashboard=false"),
        *(f"--ray-client-server-port={client}", f"--dashboard-agent-listen-port={agent}"),
    )
    home = {"HOME": str(tmp_path)}
    with head_node(
        *flags,
        is_up=lambda: not refuses(f"127.0.0.1:{gcs}", 1.0),
        environment=home | {"RAY_AUTH_MODE": "token"},
    ):
        environment = {**os.environ, **home, "RAY_TMPDIR": str(tmp_path)}
        for unset in ("RAY_AUTH_MODE", "RAY_ADDRESS"):
            environment.pop(unset, None)
        done = subprocess.run(
            [sys.executable, "-c", JOINS],
            env=environment,
            capture_output=True,
            text=True,
            timeout=100,
        )
    assert done.stdout == "token\n", done.stderr
