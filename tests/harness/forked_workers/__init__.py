"""Ray's workers, forked from a process that has imported torch, Ray and Chorusline.

A worker that Ray starts imports Ray twice and torch once: four seconds of a CPU, of which this
leaves a tenth. Each node of a cluster starts its workers by a program that is given as a path;
`launcher.py` is that program here, and asks one of the servers (`server.py`) for a fork.

`CHORUSLINE_TESTS_START_WORKERS=1` leaves it out: workers start as they do for users.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ray._private.parameter import RayParams

_HERE = Path(__file__).parent
OFF = "CHORUSLINE_TESTS_START_WORKERS"
SERVERS = "CHORUSLINE_TESTS_FORK_SERVERS"  # Where their sockets lie, for launchers.
# What one fork shares with the next is the seed of Python's hashes, by which sets are in order:
# ranks that rely on it would agree. With two servers, some do not.
NUM_SERVERS = 2
# `env_vars` of a session whose workers start as they do for users, in a cluster that forks others.
STARTED_BY_RAY = {"PYTHONUNBUFFERED": "1"}
starts: Counter[str] = Counter()  # of workers that Ray has asked for: "forked" and "started"


@functools.cache
def servers() -> str:
    """Where their sockets lie. They start when they are first needed, and end with this process."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="forks"))
        for index in range(NUM_SERVERS):
            server = subprocess.Popen(
                [sys.executable, _HERE / "server.py", f"{folder}/{index}"],
                stdin=subprocess.PIPE,
                # As Ray has it for workers of less than two CPUs, before they import torch.
                env=os.environ
                | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
            stack.callback(server.wait, 20)
            assert server.stdin is not None
            stack.callback(server.stdin.close)  # It ends with this.
        os.environ[SERVERS] = folder
        atexit.register(stack.pop_all().close)
    return folder


def python(*, is_forked: bool = True) -> tuple[list[str | Path], dict[str, str]]:
    """What stands for `python` in a command, and variables that it needs: a program that asks for a
    fork, in which clusters fork their workers, or Python itself."""
    if not is_forked or os.environ.get(OFF) == "1":
        return [sys.executable], {}
    folder = servers()
    return [sys.executable, "-ES", _HERE / "program.py", folder], {SERVERS: folder}


@contextlib.contextmanager
def forked_workers(**options: Any) -> Iterator[None]:
    """Clusters that start in this block fork their workers. options: of RayParams, for them."""
    if os.environ.get(OFF) == "1":
        yield
        return
    folder = servers()
    ray_is_told(**options)
    yield
    with contextlib.suppress(FileNotFoundError):
        starts.update((Path(folder) / "starts").read_text().split())


def ray_is_told(**more: Any) -> None:
    """Nodes that this process starts use the launcher, where there are servers. more: options."""
    plain = RayParams.__init__

    @functools.wraps(plain)
    def init(self: RayParams, *arguments: Any, **options: Any) -> None:
        if SERVERS in os.environ:
            options = {"setup_worker_path": str(_HERE / "launcher.py"), **more, **options}
        plain(self, *arguments, **options)

    RayParams.__init__ = init
