"""`python program.py FOLDER *arguments`: `python *arguments` in a fork of the server in FOLDER.

It stands for the program: what it is sent (SIGINT, SIGTERM, SIGHUP) it sends on, and it ends as the
program does. Where it is killed, the program is.
"""

# ruff: noqa: PTH109, PTH110  (pathlib takes as long to import as all of this)

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time


def main() -> None:
    folder, *arguments = sys.argv[1:]
    of_ray = sorted(
        item
        for item in os.environ.items()
        if item[0].startswith("RAY_") and item[0] != "RAY_ADDRESS"  # Read when it connects.
    )
    request = {
        "arguments": arguments,
        "environment": dict(os.environ),
        "of_ray": json.dumps(of_ray),
        "folder": os.getcwd(),
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "status": True,
    }
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asked:
        while not os.path.exists(f"{folder}/0"):
            time.sleep(0.01)
        asked.connect(f"{folder}/0")
        socket.send_fds(asked, [json.dumps(request).encode()], [0, 1, 2])
        program = int(asked.recv(64))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda number, _: os.kill(program, number))
        status = int(asked.recv(64))
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


main()
