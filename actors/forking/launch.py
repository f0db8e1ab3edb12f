"""`launch.py ONCE ENVIRONMENT OWNER THREADS MODULES PROGRAM *ARGUMENTS`: `python PROGRAM ...`, in a
fork of a process that has imported MODULES.

Ray runs it for a worker. It ends when the fork lives; where none is to be had it becomes Python
itself. Ray also runs it for the tasks and actors that the worker starts, which have its runtime
environment: a fork is made for each ONCE only once, and for another virtual environment not at all.

It imports nothing that costs, and nothing of this package.
"""

# ruff: noqa: PTH109, PTH120  (pathlib takes as long to import as all of this)

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

READY = b"ready"
REFUSED = b"refused"
_TRIES = 3
"""A server that has been idle may end before it answers."""

_PATIENCE_S = 15.0
"""Ray gives a worker a minute."""


def address(settings: list[str]) -> str:
    """Of the server for this environment. What Python, Ray and libraries read of it as they start
    no fork can change: workers of another job, or with other variables, have another server."""
    key = [__file__, sys.executable, settings, os.getuid(), sorted(os.environ.items())]
    return "\0chorusline-" + hashlib.sha256(json.dumps(key).encode()).hexdigest()


def is_ours(connection: socket.socket) -> bool:
    """Whether the process at the other end is of this user. Anybody can take an address; also root
    of a container, whose processes have no id here."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    pid, uid, _ = struct.unpack("3i", credentials)
    return bool(pid and uid == os.getuid())


def serve(settings: list[str]) -> None:
    """Start a server, unless another process has just done so."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        try:
            listening.bind(address(settings))
        except OSError:
            return
        listening.listen(64)
        program = f"{os.path.dirname(__file__)}/serve.py"
        subprocess.Popen(
            [sys.executable, program, *settings, str(listening.fileno())],
            pass_fds=[listening.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # Ray ends what is in the group of a worker that has died. A session of its own would
            # have a share of the CPU of its own, too, whatever its priority.
            process_group=0,
        )


def virtual_environment(variables: Mapping[str, str]) -> str:
    """In which Python starts; empty for none."""
    return variables.get("VIRTUAL_ENV", "") or variables.get("CONDA_PREFIX", "")


def asked(at: str, once: str, arguments: list[str]) -> bytes:
    """What a server answers: the fork's id, or REFUSED; nothing if there is none."""
    request = {
        "once": once,
        "arguments": arguments,
        "folder": os.getcwd(),
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    }
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        try:
            connection.settimeout(_PATIENCE_S)
            connection.connect(at)
            if not is_ours(connection):
                return REFUSED
            # Only then: a fork for a launch that has given up would be a second worker.
            if (answer := connection.recv(16)) == READY:
                connection.settimeout(None)
                socket.send_fds(connection, [json.dumps(request).encode()], [0, 1, 2])
                answer = connection.recv(16)
            return answer
        except TimeoutError:
            return REFUSED
        except OSError:
            return b""


def is_forked(once: str, settings: list[str], arguments: list[str]) -> bool:
    for left in reversed(range(_TRIES)):
        answer = asked(address(settings), once, arguments)
        if answer:
            return answer != REFUSED
        if left:
            serve(settings)
    return False


def main() -> None:
    once, environment, *settings = sys.argv[1:6]
    arguments = sys.argv[6:]
    if virtual_environment(os.environ) != environment:
        os.execvp("python", ["python", *arguments])
    # Whatever it is: without a fork the worker starts as well.
    with contextlib.suppress(Exception):
        if is_forked(once, settings, arguments):
            return
    os.execv(sys.executable, [sys.executable, *arguments])


if __name__ == "__main__":
    main()
