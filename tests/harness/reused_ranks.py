"""Ranks that are reused: processes started once per size, and given one function after another.

For tests that leave their group whole. Tests that kill ranks take fresh ones, of ranks.py.
"""

from __future__ import annotations

import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from chorusline.collectives.group import Group
from chorusline.collectives.stores.file_store import FileStore
from tests.harness.ranks import FORKS, SHARED_MEMORY, backend_of, choose

_PATIENCE_S = 60.0


class ReusedRanks:
    """`size` processes with one group. After an error the next call starts new processes."""

    def __init__(self, size: int, transport: str = SHARED_MEMORY) -> None:
        self.size = size
        self.transport = transport
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """function(group, *args) on every rank; the results by rank. Raises the first error."""
        if not self._processes:
            self._start()
        try:
            outcomes = self._exchange(function, args)
        except BaseException:  # A test that timed out, too: what comes late is of no later call.
            self.stop()
            raise
        failures = [(rank, told) for rank, (ok, told) in enumerate(outcomes) if not ok]
        if failures:
            self.stop()
            told = "\n\n".join(f"rank {rank}:\n{text}" for rank, text in failures)
            raise AssertionError(told)
        return [value for _, value in outcomes]

    def _exchange(self, function: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
        for pipe in self._pipes:
            pipe.send((function, args))
        outcomes = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(_PATIENCE_S):
                raise TimeoutError(f"rank {rank} of {self.size} did not answer in {_PATIENCE_S} s")
            outcomes.append(pipe.recv())
        return outcomes

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        path = str(Path(self._folder.name) / "store")
        for rank in range(self.size):
            ours, theirs = FORKS.Pipe()
            process = FORKS.Process(
                target=_serve, args=(theirs, path, rank, self.size, self.transport)
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def stop(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        self._processes, self._pipes = [], []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


_store: FileStore | None = None  # of the pool, in a rank's process


def another_group(group: Group, timeout_s: float = 20.0) -> Group:
    """A second group of the same ranks, for a test that ends its generation. Close it."""
    assert _store is not None
    return Group.create(_store, group.rank, group.size, name="another", timeout_s=timeout_s)


def _serve(pipe: Connection, path: str, rank: int, size: int, transport: str) -> None:
    global _store
    torch.set_num_threads(1)
    _store = FileStore(path)
    choose(transport, rank)
    group = Group.create(_store, rank, size, timeout_s=30)
    assert group.backend == backend_of(transport)
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            group.close()
            return
        try:
            pipe.send((True, function(group, *args)))
        except BaseException as error:
            group.abort(error)
            pipe.send((False, traceback.format_exc()))
