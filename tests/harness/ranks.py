"""Ranks as processes: started in a moment, killed, stopped, and asked what they found.

A process that has imported torch is forked for each rank (multiprocessing's forkserver; nothing has
run in it yet), so a test can have fresh ranks for itself.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from chorusline.collectives.contract.errors import CollectiveError
from chorusline.collectives.group import Group
from chorusline.collectives.stores.file_store import FileStore

SHARED_MEMORY, GLOO, NCCL = "shared-memory", "gloo", "nccl"
IN_PYTHON = "shared-memory in Python"  # without the C library
IN_BOTH = "shared-memory in C and in Python"  # every second rank without it

transports = pytest.mark.parametrize("transport", [SHARED_MEMORY, GLOO])

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["pytest", "tests.harness.preloaded"])


def why_no_nccl() -> str:
    """Why ranks cannot use NCCL on this machine; empty if they can. Ranks may share a GPU."""
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if importlib.util.find_spec("cupy") is None:
        return "CuPy is not installed: pip install -e '.[cuda13]'"
    return ""


def on_gpus(value: int | str) -> Any:
    """`value` as a parameter of a test that needs NCCL."""
    reason = why_no_nccl()
    return pytest.param(
        value, marks=[pytest.mark.gpu, pytest.mark.skipif(reason != "", reason=reason)]
    )


def error_of(call: Callable[[], object], *kinds: type[Exception]) -> Any:
    """What `call` raises, of `kinds` (CollectiveError if none is given); None if nothing."""
    wanted = kinds or (CollectiveError,)
    try:
        call()
    except wanted as error:
        return error
    return None


@dataclass
class Rank:
    """What the function of a rank is given. said: keys for the other ranks and for the test."""

    rank: int
    size: int
    store: FileStore
    transport: str

    def group(self, *, generation: int = 0, timeout_s: float = 30) -> Group:
        """Meet the other ranks."""
        device = (
            f"cuda:{self.rank % torch.cuda.device_count()}" if self.transport == NCCL else "cpu"
        )
        group = Group.create(
            self.store, self.rank, self.size, device, generation=generation, timeout_s=timeout_s
        )
        assert group.backend == backend_of(self.transport)
        return group

    def say(self, word: str) -> None:
        self.store.set(f"said/{word}/{self.rank}", "")


Body = Callable[..., Any]


class Ranks:
    """Processes that run `body(rank, *arguments)`; body is a function of a module.

    only: those that are started at once, instead of all.
    """

    def __init__(
        self,
        body: Body,
        size: int,
        folder: Path,
        transport: str = SHARED_MEMORY,
        *arguments: Any,
        only: Collection[int] | None = None,
    ) -> None:
        self.size = size
        folder.mkdir(parents=True, exist_ok=True)
        self.store = FileStore(folder / "store")
        self._body = body
        self._path = folder / "store"
        self._transport = transport
        self._pipes: dict[int, Connection] = {}
        self._processes: dict[int, Any] = {}
        for rank in range(size) if only is None else only:
            self.start(rank, *arguments)

    def start(self, rank: int, *arguments: Any) -> None:
        """A process for `rank`, in the place of the one that it had."""
        self._end(rank)
        here, there = FORKS.Pipe(duplex=False)
        process = FORKS.Process(
            target=_main,
            args=(self._body, rank, self.size, self._path, self._transport, arguments, there),
            daemon=True,
        )
        process.start()
        there.close()
        self._pipes[rank] = here
        self._processes[rank] = process

    def wait_for(self, word: str, ranks: Collection[int] | None = None) -> None:
        """Until `ranks` (all) have said `word`."""
        saying = range(self.size) if ranks is None else ranks
        self.store.wait([f"said/{word}/{rank}" for rank in saying], 60)

    def signal(self, rank: int, number: signal.Signals) -> None:
        pid = self._processes[rank].pid
        assert pid is not None
        os.kill(pid, number)

    def results(self, *, ranks: Collection[int] | None = None, timeout_s: float = 100) -> list[Any]:
        """What the bodies of `ranks` (all) return; fails with the tracebacks of those that fail."""
        give_up_at = time.monotonic() + timeout_s
        found: list[Any] = []
        failures: list[str] = []
        for rank in range(self.size) if ranks is None else ranks:
            pipe = self._pipes[rank]
            if not pipe.poll(max(0.0, give_up_at - time.monotonic())):
                failures.append(f"rank {rank} has not ended within {timeout_s:g} s")
                continue
            try:
                value, failure = pickle.loads(pipe.recv_bytes())
            except EOFError:
                value, failure = None, "its process ended"
            found.append(value)
            if failure:
                failures.append(f"rank {rank}: {failure}")
        assert not failures, "\n".join(failures)
        return found

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            process.join(0.1)
            process.kill()
        for rank in list(self._processes):
            self._end(rank)
        self.store.close()

    def _end(self, rank: int) -> None:
        if rank in self._processes:
            process = self._processes.pop(rank)
            process.kill()
            process.join(10)
            assert not process.is_alive()
            process.close()
            self._pipes.pop(rank).close()


def choose(transport: str, rank: int) -> None:
    """Set what lets a group of this process have `transport`."""
    if transport == GLOO:
        os.environ["CHORUSLINE_HOST_ID"] = f"host {rank % 2}"  # Two hosts, as far as we know.
    if transport == IN_PYTHON or (transport == IN_BOTH and rank % 2):
        os.environ["CHORUSLINE_COMPILED"] = "0"


def backend_of(transport: str) -> str:
    return transport.partition(" ")[0]


def run_ranks(
    body: Body, size: int, folder: Path, transport: str = SHARED_MEMORY, *arguments: Any
) -> list[Any]:
    """The results of `body`, by rank."""
    with Ranks(body, size, folder, transport, *arguments) as ranks:
        return ranks.results()


def _main(
    body: Body,
    rank: int,
    size: int,
    path: Path,
    transport: str,
    arguments: tuple[Any, ...],
    pipe: Connection,
) -> None:
    torch.set_num_threads(1)
    choose(transport, rank)
    # By value: the pipe's own pickler leaves a tensor in memory that this process has to hand over
    # when it is asked for, and it may have ended by then.
    try:
        result = body(Rank(rank, size, FileStore(path), transport), *arguments)
        pipe.send_bytes(pickle.dumps((result, "")))
    except BaseException:
        pipe.send_bytes(pickle.dumps((None, traceback.format_exc())))
