"""A process that has loaded the stand-in and torch, and is forked for each rank.

`python -m tests.harness.stand_in_gpu.server LIBRARY SOCKET`. A connection to the socket is a rank.
"""

from __future__ import annotations

import ctypes
import gc
import os
import pickle
import signal
import sys
import traceback
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

from tests.harness.stand_in_gpu import guard

_PR_SET_PDEATHSIG = 1


def main(library: str, path: str) -> None:
    _end_with_parent()
    loaded = guard.load(Path(library))  # Before torch.
    import pytest  # noqa: F401

    import tests.contracts.group
    import tests.harness.preloaded
    import tests.harness.stand_in_gpu.installing  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # Nobody waits for ranks.
    with Listener(path, "AF_UNIX", backlog=64) as listener:
        while True:
            connection = listener.accept()
            if os.fork() == 0:
                try:
                    _be_rank(connection, loaded)
                finally:
                    os._exit(0)
            connection.close()


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _be_rank(connection: Connection, loaded: ctypes.CDLL) -> None:
    """Run one function after another, `function(rank, *arguments)`, until the test is over."""
    _end_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    gc.freeze()  # What is imported is no garbage; checks that collect are faster.
    import torch

    from chorusline.collectives.stores.file_store import FileStore
    from tests.harness.ranks import NCCL, Rank
    from tests.harness.stand_in_gpu import streams
    from tests.harness.stand_in_gpu.installing import install

    connection.send(os.getpid())
    number, size, folder, seed, jitter_s = connection.recv()
    torch.set_num_threads(1)
    install(loaded, f"{folder}/hub", seed, jitter_s)
    rank = Rank(number, size, FileStore(f"{folder}/store"), NCCL)
    while True:
        try:
            function, arguments = connection.recv()
        except EOFError:
            return
        outcome: tuple[Any, str]
        try:
            outcome = function(rank, *arguments), ""
        except BaseException:
            outcome = None, traceback.format_exc()
        misuses = streams.machine().misuses
        if misuses:
            outcome = None, "\n".join([outcome[1], "misuses of the GPU:", *misuses[:5]])
        try:
            packed = pickle.dumps(outcome)  # `send` would share the memory of tensors.
        except Exception:
            packed = pickle.dumps((None, traceback.format_exc()))
        connection.send_bytes(packed)


if __name__ == "__main__":
    main(*sys.argv[1:])
