"""`serve.py OWNER THREADS MODULES SOCKET`: a process that imports modules, and forks.

launch.py starts it, and asks it. It ends when it has had no fork for a while, and at once after the
last one if the process OWNER has ended, to which the workers belong.
"""

# ruff: noqa: PTH115, PTH208  (the paths are the kernel's)

from __future__ import annotations

import contextlib
import gc
import importlib.util
import json
import math
import os
import runpy
import select
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

_IDLE_S = 10.0
"""Seconds without a fork until the server ends: a lost worker's successor mostly asks before."""

_ORPHANED_S = 60.0
"""Seconds after the end of their owner until forks are killed. Ray ends its workers sooner; but not
one that hangs before Ray knows it."""

_LOOK_S = 0.5
_REQUEST_S = 5.0  # A launch that was stopped keeps others waiting so long.
_LARGEST = 1 << 17  # bytes of a request
_NICENESS = "RAY_worker_niceness"
_OF_GPUS = ("/dev/nvidia", "/dev/kfd")


def this_package() -> None:
    """The package whose file this is has the name: another may be installed."""
    folder = Path(__file__).parents[2]
    spec = importlib.util.spec_from_file_location(folder.name, folder / "__init__.py")
    assert spec is not None and spec.loader is not None
    sys.modules[folder.name] = package = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)


def has_ended(owner: int) -> bool:
    return bool(select.select([owner], [], [], 0)[0])


def load(threads: str, modules: str, owner: int) -> None:
    """Import what workers need, at their priority, which Ray lowers in each fork again: so on a
    thread, which has one of its own."""

    def load_all() -> None:
        with contextlib.suppress(OSError, ValueError):  # A sandbox without the call.
            lower = int(os.environ.get(_NICENESS, "15"))
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.nice(0) + lower)
        for name in modules.split(","):
            with contextlib.suppress(Exception):  # A worker that needs it says what is wrong.
                importlib.import_module(name)

    is_told = "OMP_NUM_THREADS" in os.environ
    os.environ.setdefault("OMP_NUM_THREADS", threads)  # As Ray does in a worker.
    thread = threading.Thread(target=load_all)
    thread.start()
    while thread.is_alive():
        thread.join(_LOOK_S)
        if has_ended(owner):
            os._exit(0)
    if not is_told:
        del os.environ["OMP_NUM_THREADS"]
    # A collection in a fork would write to the pages that all share.
    gc.collect()
    gc.freeze()


def has_a_gpu() -> bool:
    """Whether this process has initialized a GPU, which no fork of it could use then."""
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{descriptor}").startswith(_OF_GPUS):
                return True
    return False


def received(connection: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """What launch.py asks; None if it is another user's program, or is gone."""
    with contextlib.suppress(OSError, ValueError):
        if is_ours(connection):
            connection.settimeout(_REQUEST_S)
            connection.send(READY)
            message, fds, _, _ = socket.recv_fds(connection, _LARGEST, 3)
            if message:
                return json.loads(message), list(fds)
    return None


def living(forks: set[int]) -> set[int]:
    return {fork for fork in forks if Path(f"/proc/{fork}").exists()}


def serve(listening: socket.socket, owner: int) -> None:
    """Answer requests. Returns in a fork."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # Who has ended is gone at once.
    # A lock that another thread holds would never be released in a fork.
    refuses = has_a_gpu() or threading.active_count() > 1
    forks: set[int] = set()
    answered: set[str] = set()
    idle_since = time.monotonic()
    orphaned_at = math.inf
    while True:
        ready, _, _ = select.select([listening], [], [], _LOOK_S)
        now = time.monotonic()
        if orphaned_at == math.inf and has_ended(owner):
            orphaned_at = now
        if forks := living(forks):
            idle_since = now
            if now - orphaned_at > _ORPHANED_S:
                for fork in forks:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(fork, signal.SIGKILL)
        elif not ready and (orphaned_at <= now or now - idle_since > _IDLE_S):
            sys.exit()
        if not ready:
            continue
        connection, _ = listening.accept()
        with connection:
            if refuses:
                send(connection, REFUSED)
                continue
            if (got := received(connection)) is None:
                continue
            request, fds = got
            answer = REFUSED
            if request["once"] not in answered:
                answered.add(request["once"])
                with contextlib.suppress(OSError):  # No memory for it, or no process.
                    if (fork := os.fork()) == 0:
                        break
                    forks.add(fork)
                    answer = b"%d" % fork
            for fd in fds:
                os.close(fd)
            send(connection, answer)
    listening.close()
    os.close(owner)
    become(request, fds)


def send(connection: socket.socket, answer: bytes) -> None:
    with contextlib.suppress(OSError):  # Who asked is gone.
        connection.send(answer)


def become(request: dict[str, Any], fds: list[int]) -> None:
    """What Ray would have started."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
    os.setpgid(0, 0)  # Ray ends what is in the group of a worker that has died.
    for own, given in enumerate(fds):
        os.dup2(given, own)
        os.close(given)
    with contextlib.suppress(OSError):  # It was deleted; Python starts there nevertheless.
        os.chdir(request["folder"])
    sys.argv[:] = request["arguments"]
    if not sys.flags.safe_path:
        sys.path.insert(0, str(Path(sys.argv[0]).parent))
    import numpy

    numpy.random.seed()  # Python's own generator is seeded again by itself.


if __name__ == "__main__":
    owner, threads, modules, descriptor = sys.argv[1:]
    os.set_inheritable(int(descriptor), False)
    watched = os.pidfd_open(int(owner))
    if not sys.flags.safe_path:
        sys.path.pop(0)  # The folder of this file.
    this_package()
    from chorusline.actors.forking.launch import READY, REFUSED, is_ours

    load(threads, modules, watched)
    serve(socket.socket(fileno=int(descriptor)), watched)
    runpy.run_path(sys.argv[0], run_name="__main__")
