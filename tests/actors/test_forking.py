"""launch.py and serve.py, without Ray: what a fork is given, and what if there is none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from chorusline.actors.forking import launch

_LAUNCH = launch.__file__
_WITHIN_S = 20.0

_PROGRAM = """
import json, os, sys
loaded = "decimal" in sys.modules
import numpy
random = numpy.random.random()
print(json.dumps([os.getpid(), os.getppid(), sys.argv, os.getcwd(), loaded, random]), flush=True)
print("to stderr", file=sys.stderr)
print(dict(os.environ) == eval(sys.stdin.read()))
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(_PROGRAM)
    return path


@contextmanager
def an_owner() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"]) as owner:
        try:
            yield owner
        finally:
            owner.kill()


class Fork:
    """What one launch has led to. Each test has an environment of its own, and so a server."""

    def __init__(
        self, program: Path, owner: int, mark: str, modules: str = "decimal", once: str = ""
    ) -> None:
        environment = {**os.environ, "MARK": mark}
        done = subprocess.run(
            [
                *(sys.executable, "-S", _LAUNCH, once or uuid.uuid4().hex),
                *(launch.virtual_environment(os.environ), str(owner), "1", modules),
                *(program, "an", "argument"),
            ],
            input=repr(environment),
            env=environment,
            cwd=program.parent,
            text=True,
            capture_output=True,
            check=True,
            timeout=_WITHIN_S,
        )
        first, same_environment = done.stdout.splitlines()
        self.pid, self.parent, argv, folder, self.has_module, self.random = json.loads(first)
        assert (argv, folder) == ([str(program), "an", "argument"], str(program.parent))
        assert same_environment == "True"
        assert done.stderr == "to stderr\n"

    @property
    def server(self) -> Path:
        """Of the process that has forked it."""
        return Path(f"/proc/{self.parent}")

    @property
    def is_forked(self) -> bool:
        return self.parent != os.getpid()


def ends(server: Path) -> bool:
    give_up_at = time.monotonic() + _WITHIN_S
    while server.exists() and time.monotonic() < give_up_at:
        time.sleep(0.05)
    return not server.exists()


def test_forks_of_one_server_differ_in_nothing_but_chance(program: Path) -> None:
    mark = uuid.uuid4().hex
    with an_owner() as owner:
        one, other = (Fork(program, owner.pid, mark) for _ in range(2))
        assert one.is_forked
        assert one.has_module
        assert one.parent == other.parent
        assert one.pid != other.pid
        assert one.random != other.random
        with_another_environment = Fork(program, owner.pid, mark + "2")
        assert with_another_environment.parent != one.parent
    # Their owner has ended.
    assert ends(one.server)
    assert ends(with_another_environment.server)


def test_a_server_without_forks_ends_although_its_owner_lives(program: Path) -> None:
    with an_owner() as owner:
        assert ends(Fork(program, owner.pid, uuid.uuid4().hex).server)


def test_what_a_worker_starts_with_its_environment_is_not_forked(
    program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark, once = uuid.uuid4().hex, uuid.uuid4().hex
    with an_owner() as owner:
        assert Fork(program, owner.pid, mark, once=once).is_forked
        assert not Fork(program, owner.pid, mark, once=once).is_forked
        # Another virtual environment has been activated: its Python is the one that is found.
        python = tmp_path / "bin/python"
        python.parent.mkdir()
        python.write_text('#!/bin/sh\necho "$0"\n')
        python.chmod(0o755)
        words = [sys.executable, "-S", _LAUNCH, "another", "", str(owner.pid), "1", "decimal"]
        monkeypatch.setenv("PATH", f"{python.parent}:{os.environ['PATH']}")
        monkeypatch.setenv("VIRTUAL_ENV", str(tmp_path))
        found = subprocess.check_output([*words, program], text=True)
        assert found.strip() == str(python)


def test_launches_at_once_have_one_server(program: Path) -> None:
    mark = uuid.uuid4().hex
    with an_owner() as owner, ThreadPoolExecutor(8) as threads:
        forks = list(threads.map(lambda _: Fork(program, owner.pid, mark), range(8)))
    assert len({fork.parent for fork in forks}) == 1


def test_a_module_that_cannot_be_imported_is_left_to_the_fork(program: Path) -> None:
    with an_owner() as owner:
        fork = Fork(program, owner.pid, uuid.uuid4().hex, modules="there_is_none,decimal")
    assert fork.is_forked
    assert fork.has_module


def test_without_a_server_the_program_starts_by_itself(program: Path) -> None:
    mark = uuid.uuid4().hex
    with an_owner() as owner:
        pass
    assert not Fork(program, owner.pid, mark).is_forked  # A server ends with its owner.


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
def test_no_server_of_another_user_is_asked(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = uuid.uuid4().hex
    with an_owner() as owner:
        with monkeypatch.context() as patch:
            patch.setenv("MARK", mark)
            taken = launch.address([str(owner.pid), "1", "decimal"])
        # It takes the address, and tells what it has been sent.
        other = (
            "import os, socket, sys\n"
            "os.setuid(65534)\n"
            "listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n"
            "listening.bind(sys.argv[1].replace('@', '\\0')); listening.listen()\n"
            "print(flush=True)\n"
            "connection, _ = listening.accept()\n"
            "print(connection.recv(1000))\n"
        )
        with subprocess.Popen(
            [sys.executable, "-c", other, taken.replace("\0", "@")],
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdout is not None
            process.stdout.readline()
            assert not Fork(program, owner.pid, mark).is_forked
            assert process.stdout.read() == "b''\n"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
def test_another_user_gets_no_fork(program: Path) -> None:
    mark = uuid.uuid4().hex
    with an_owner() as owner:
        forked = Fork(program, owner.pid, mark)
        taken = os.environ | {"MARK": mark}
        asks = (
            "import os, socket, sys\n"
            "sys.path.insert(0, sys.argv.pop(1))\n"
            "import launch\n"
            "at = launch.address(sys.argv[1:])\n"
            "launch.is_ours = lambda connection: True\n"
            "os.setuid(65534)\n"
            "print(launch.asked(at, 'once', ['program']))\n"
        )
        settings = [str(owner.pid), "1", "decimal"]
        answer = subprocess.check_output(
            [sys.executable, "-c", asks, Path(_LAUNCH).parent, *settings], env=taken, text=True
        )
        assert answer == "b''\n"
        assert Fork(program, owner.pid, mark).parent == forked.parent


@pytest.mark.skipif(not os.access("/dev", os.W_OK), reason="a file cannot be made in /dev")
def test_a_server_that_has_initialized_cuda_does_not_fork(
    program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Path(f"/dev/nvidia-of-a-test-{os.getpid()}")
    (tmp_path / "uses_a_gpu.py").write_text(f"kept = open({str(device)!r})")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    device.touch()
    try:
        with an_owner() as owner:
            assert not Fork(program, owner.pid, uuid.uuid4().hex, "uses_a_gpu").is_forked
    finally:
        device.unlink()
