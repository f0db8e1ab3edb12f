"""`python program.py FOLDER *arguments`: `python *arguments` in a fork of the server in FOLDER.

It stands for the program: what it is sent (SIGINT, SIGTERM, SIGHUP) it sends on, and it ends as the
program does. Where it is killed, the program is.
"""

# ruff: noqa: PTH110  (pathlib takes as long to import as all of this)

from __future__ import annotations

import os
import signal
import sys
import time

from asking import asked


def main() -> None:
    folder, *arguments = sys.argv[1:]
    while not os.path.exists(f"{folder}/0"):
        time.sleep(0.01)
    environment, address = dict(os.environ), ("RAY_ADDRESS",)  # Ray reads it when it connects.
    with asked(f"{folder}/0", arguments, environment, apart=address, is_program=True) as answers:
        program = int(answers.recv(64))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda number, _: os.kill(program, number))
        status = int(answers.recv(64))
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


main()
