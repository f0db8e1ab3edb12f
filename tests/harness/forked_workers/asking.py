"""Asks a server for a fork. It imports nothing that costs, for launcher.py and program.py."""

# ruff: noqa: PTH109  (pathlib takes as long to import as all of this)

from __future__ import annotations

import json
import os
import signal
import socket


def asked(
    address: str,
    arguments: list[str],
    environment: dict[str, str],
    *,
    apart: tuple[str, ...] = (),
    is_program: bool = False,
) -> socket.socket:
    """Where the answers come: the process, and of a program its status when it has ended.

    apart: variables of Ray that it does not read as it is imported.
    """
    of_ray = [
        item
        for item in sorted(environment.items())
        if item[0].startswith("RAY_") and item[0] not in apart
    ]
    request = {
        "arguments": arguments,
        "environment": environment,
        "of_ray": json.dumps(of_ray),
        "folder": os.getcwd(),
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "is_program": is_program,
    }
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(address)
    socket.send_fds(connection, [json.dumps(request).encode()], [0, 1, 2])
    return connection
