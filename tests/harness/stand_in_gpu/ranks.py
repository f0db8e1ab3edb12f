"""Ranks on the stand-in GPU, for tests: `with StandInRanks(2) as ranks: ranks.run(body)`."""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

import pytest

from chorusline.collectives.group import Group
from tests import ROOT
from tests.harness.ranks import Rank
from tests.harness.stand_in_gpu import guard
from tests.harness.stand_in_gpu.hub import Hub

WHY_NOT = guard.why_not()
needs_stand_in = pytest.mark.skipif(WHY_NOT != "", reason=WHY_NOT)


def seeds(usual: int) -> range:
    """Seeds of jitter or of faults, of which all but the first few are for the slow suite: `usual`
    many, or as many as the environment's STAND_IN_SEEDS says."""
    return range(int(os.environ.get("STAND_IN_SEEDS", usual)))


_START_S = 100.0


class Server:
    """The process that ranks are forked from: one for a run of the tests, started when needed."""

    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.path = f"{self.folder.name}/server"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.harness.stand_in_gpu.server", guard.build(), self.path],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        atexit.register(self.stop)

    def connect(self) -> Connection:
        give_up_at = time.monotonic() + _START_S
        while True:
            try:
                connection = Client(self.path, "AF_UNIX")
            except (FileNotFoundError, ConnectionRefusedError):  # It is there, and not listened to.
                assert self.process.poll() is None, "the process of the stand-in GPU has ended"
                assert time.monotonic() < give_up_at, "the stand-in GPU does not start"
                time.sleep(0.02)
            else:
                assert isinstance(connection, Connection)
                return connection

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        self.folder.cleanup()


_servers: list[Server] = []


def _server() -> Server:
    if not _servers:
        _servers.append(Server())
    return _servers[0]


class StandInRanks:
    """`size` processes, each with a stand-in GPU.

    seed, jitter_s: of the delays of kernels.
    """

    def __init__(self, size: int, *, seed: int = 0, jitter_s: float = 0.0005) -> None:
        self.size = size
        self._settings = seed, jitter_s
        self._pipes: list[Connection] = []
        self._pids: list[int] = []

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._hub = Hub(Path(self._folder.name) / "hub")
        for number in range(self.size):
            pipe = _server().connect()
            self._pids.append(pipe.recv())
            pipe.send((number, self.size, self._folder.name, *self._settings))
            self._pipes.append(pipe)

    def run(
        self,
        body: Callable[..., Any],
        *arguments: Any,
        timeout_s: float = 60,
        lost: Collection[int] = (),
    ) -> list[Any]:
        """What `body(rank, *arguments)` returns, by rank; fails with the tracebacks, and with what
        was undefined on a GPU. After a failure the next call starts new processes.

        lost: ranks that are killed, or stopped for good, and return nothing.
        """
        if not self._pipes:
            self._start()
        for pipe in self._pipes:
            pipe.send((body, arguments))
        give_up_at = time.monotonic() + timeout_s
        found, failures = [], []
        for number, pipe in enumerate(self._pipes):
            if number in lost:
                continue
            if not pipe.poll(max(0.0, give_up_at - time.monotonic())):
                failures.append(f"rank {number} has not ended within {timeout_s:g} s")
                continue
            try:
                value, failure = pickle.loads(pipe.recv_bytes())
            except EOFError:
                value, failure = None, "its process ended"
            found.append(value)
            if failure:
                failures.append(f"rank {number}: {failure}")
        if failures or lost:
            self.stop()
        if failures:
            raise AssertionError("\n".join(failures))
        return found

    def check(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """`function(group, *arguments)` on a group that stays from one call to the next."""
        return self.run(_on_reused_group, function, arguments)

    def __enter__(self) -> StandInRanks:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        for pid, pipe in zip(self._pids, self._pipes, strict=True):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            pipe.close()
        if self._pipes:
            self._hub.close()
            self._folder.cleanup()
        self._pipes, self._pids = [], []


_reused: list[Group] = []  # in a rank's process


def _on_reused_group(rank: Rank, function: Callable[..., Any], arguments: Any) -> Any:
    if not _reused:
        _reused.append(rank.group(timeout_s=60))
    return function(_reused[0], *arguments)
