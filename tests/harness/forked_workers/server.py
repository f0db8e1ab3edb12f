"""A process that has imported torch, and has forks of it import Ray, which fork the workers, and
the programs of tests.

What Ray reads of the environment as it is imported, the job's id among it, no fork can change: so
there is one fork for each such environment, made when a worker first wants it.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any

IDLE_S = 30.0
LARGEST = 1 << 17  # bytes of a request
Request = tuple[dict[str, Any], list[int]]  # fds: stdin, stdout, stderr, and where it is answered


def receive(connection: socket.socket) -> Request | None:
    message, fds, _, _ = socket.recv_fds(connection, LARGEST, 4)
    return (json.loads(message), list(fds)) if message else None


def serve_all(server: socket.socket) -> None:
    """Hand requests on to the fork for their environment. Returns in such a fork, when it is that
    of a worker."""
    forks: dict[str, socket.socket] = {}
    while True:
        ready, _, _ = select.select([server, sys.stdin], [], [])
        if sys.stdin in ready:
            os._exit(0)  # The tests are over.
        connection, _ = server.accept()
        message, fds, _, _ = socket.recv_fds(connection, LARGEST, 3)
        key = json.loads(message)["of_ray"]
        fds = [*fds, connection.fileno()]
        for _ in range(2):
            if key not in forks:
                mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                if os.fork() == 0:
                    for other in (server, connection, mine, *forks.values()):
                        other.close()
                    for fd in fds[:3]:
                        os.close(fd)
                    return serve_one(its, json.loads(message))
                its.close()
                forks[key] = mine
            try:
                socket.send_fds(forks[key], [message], fds)
                break
            except OSError:  # It has been idle and has ended.
                forks.pop(key).close()
        connection.close()
        for fd in fds[:3]:
            os.close(fd)


def serve_one(requests: socket.socket, first: dict[str, Any]) -> None:
    """Fork workers that differ in nothing that Ray reads as it is imported. Returns in a worker."""
    os.environ.clear()
    os.environ.update(first["environment"])

    from tests.harness import preloaded  # noqa: F401

    if first["is_program"]:
        from tests.harness.forked_workers import ray_is_told

        ray_is_told()
    while True:
        # Each job of Ray has workers of an environment of its own, and is over some day.
        ready, _, _ = select.select([requests], [], [], None if first["is_program"] else IDLE_S)
        if not ready:
            if has_children():
                continue
            # Requests from before are answered; a later one is an error, and gets another fork.
            requests.shutdown(socket.SHUT_RD)
        got = receive(requests)
        if got is None:
            os._exit(0)
        request, fds = got
        if (child := os.fork()) == 0:
            requests.close()
            if request["is_program"]:
                watched(fds[3])
            become(request, fds)
            return
        if not request["is_program"]:
            os.write(fds[3], b"%d" % child)
        for fd in fds:
            os.close(fd)


def watched(asking: int) -> None:
    """Returns in a fork, the program's: its id is told, then its status; it is killed where nobody
    waits for that any longer."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if (child := os.fork()) == 0:
        return
    os.write(asking, b"%d" % child)
    ended = os.pidfd_open(child)
    ready, _, _ = select.select([ended, asking], [], [])
    if ended not in ready:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    with contextlib.suppress(OSError):
        os.write(asking, b"%d" % os.waitstatus_to_exitcode(status))
    os._exit(0)


def has_children() -> bool:
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return False
    return True


def become(request: dict[str, Any], fds: list[int]) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
    for mine, given in enumerate(fds[:3]):
        os.dup2(given, mine)
    for fd in fds:
        os.close(fd)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.argv[:] = request["arguments"]
    is_file = not sys.argv[0].startswith("-")
    sys.path.insert(0, str(Path(sys.argv[0]).parent) if is_file else "")
    import numpy

    numpy.random.seed()  # Python's own generator is seeded again by itself.


def run(argv: list[str]) -> None:
    """As `python *argv` does."""
    match argv:
        case ["-c", program, *_]:
            del argv[1]
            main = type(sys)("__main__")
            sys.modules["__main__"] = main
            exec(compile(program, "<string>", "exec"), main.__dict__)
        case ["-m", name, *_]:
            del argv[0]
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        case [path, *_]:
            runpy.run_path(path, run_name="__main__")


if __name__ == "__main__":
    address = sys.argv[1]
    sys.path.pop(0)  # The folder of this file.
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening.bind(f"{address}.bound")
    listening.listen(64)
    Path(f"{address}.bound").rename(address)  # It is there when it can be connected to.
    import torch._dynamo  # The first optimizer imports it: 1.4 s of a CPU.
    import torch.distributed.checkpoint  # noqa: F401

    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # Who has ended is gone at once.
    serve_all(listening)
    status = 0
    try:
        run(sys.argv)
    except SystemExit as ends:  # With any other exception Python ends as usual.
        if not isinstance(ends.code, int | None):
            print(ends.code, file=sys.stderr)
        status = ends.code if isinstance(ends.code, int) else int(ends.code is not None)
    # As Python ends, but for all that was imported: to take it apart is half a second of a CPU.
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
