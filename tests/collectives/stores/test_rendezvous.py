"""Processes that are not our actors meet by URL; and what they are told when they cannot."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from chorusline.collectives.contract.errors import PeerLost, StaleStore, StoreLost, StoreTimeout
from chorusline.collectives.group import Group
from chorusline.collectives.stores.file_store import FileStore
from chorusline.collectives.stores.rendezvous import store_from_url
from chorusline.collectives.stores.store import HashStore, Store
from tests.harness.programs import output_of
from tests.harness.ranks import FORKS, error_of
from tests.harness.torch_groups import tcp_store


class Processes:
    """One per rank, each with its own environment."""

    def __init__(self) -> None:
        self._started: list[tuple[Any, Connection]] = []

    def start(self, body: Callable[..., Any], *arguments: Any, **environment: str) -> None:
        ours, theirs = FORKS.Pipe(duplex=False)
        process = FORKS.Process(
            target=_main, args=(body, arguments, environment, theirs), daemon=True
        )
        process.start()
        theirs.close()
        self._started.append((process, ours))

    def start_on_hosts(self, body: Callable[..., Any], port: int, size: int) -> None:
        """Ranks that share only a port: each has a host of its own, as far as it knows."""
        url = f"tcp://127.0.0.1:{port}?world_size={size}"
        for rank in range(size):
            self.start(body, url, rank, CHORUSLINE_HOST_ID=f"host {rank}")

    def results(self) -> list[Any]:
        found = []
        for process, pipe in self._started:
            assert pipe.poll(40), "no answer"
            value, failure = pipe.recv()
            assert not failure, failure
            found.append(value)
            process.join(10)
            assert process.exitcode == 0
        return found

    def stop(self) -> None:
        for process, pipe in self._started:
            process.kill()
            process.join()
            pipe.close()


def _main(
    body: Callable[..., Any],
    arguments: tuple[Any, ...],
    environment: dict[str, str],
    pipe: Connection,
) -> None:
    torch.set_num_threads(1)
    os.environ.update(environment)
    try:
        pipe.send((body(*arguments), ""))
    except BaseException:
        pipe.send((None, traceback.format_exc()))


@pytest.fixture
def processes() -> Iterator[Processes]:
    started = Processes()
    yield started
    started.stop()


def sum_of_ranks(url: str, rank: int | None = None, size: int | None = None) -> list[float]:
    with Group.from_url(url, rank, size, timeout_s=30) as group:
        assert group.timeout_s == 30
        tensor = torch.tensor([float(group.rank), 1.0])
        group.all_reduce(tensor).wait()
        return tensor.tolist()


def test_ranks_meet_at_a_tcp_url_in_any_order(processes: Processes, port: int) -> None:
    for rank in (2, 1, 0):
        processes.start(sum_of_ranks, f"tcp://127.0.0.1:{port}?rank={rank}&world_size=3")
    assert processes.results() == [[3.0, 3.0]] * 3


def test_ranks_meet_in_a_file_and_leave_none(processes: Processes, tmp_path: Path) -> None:
    path = tmp_path / "a store"
    for rank in range(3):
        processes.start(sum_of_ranks, f"file://{str(path).replace(' ', '%20')}", rank, 3)
    assert processes.results() == [[3.0, 3.0]] * 3
    assert not path.exists()


def test_ranks_meet_by_their_environment(processes: Processes, port: int) -> None:
    place = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    processes.start(sum_of_ranks, "env://", RANK="1", **place)
    processes.start(sum_of_ranks, "env://", RANK="0", **place)
    assert processes.results() == [[1.0, 2.0]] * 2


def through_gloo(url: str, rank: int) -> list[Any]:
    store, rank, size = store_from_url(url, rank, timeout_s=30)
    found: list[Any] = []
    for generation in range(2):
        with Group.create(store, rank, size, generation=generation, timeout_s=30) as group:
            tensor = torch.tensor([rank + 1.0])
            group.all_reduce(tensor).wait()
            found += [group.backend, tensor.item()]
    return found


def test_hosts_that_share_only_a_port_meet_for_several_generations(
    processes: Processes, port: int
) -> None:
    processes.start_on_hosts(through_gloo, port, 2)
    assert processes.results() == [["gloo", 3.0] * 2] * 2


def lose_the_host(url: str, rank: int) -> tuple[str, list[int], str]:
    store, rank, size = store_from_url(url, rank, timeout_s=30)
    group = Group.create(store, rank, size, timeout_s=30)

    def sum_once_or_twice() -> None:  # The host may be dead before all ranks have left the first.
        group.all_reduce(torch.ones(1)).wait()
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        group.all_reduce(torch.ones(1)).wait()

    error = error_of(sum_once_or_twice, PeerLost)
    return type(error).__name__, error.ranks, str(error)


def test_ranks_whose_store_dies_with_its_host_do_not_blame_themselves(
    processes: Processes, port: int
) -> None:
    processes.start_on_hosts(lose_the_host, port, 3)
    for found, failure in (pipe.recv() for _, pipe in processes._started[1:]):
        assert not failure, failure
        kind, ranks, told = found
        assert kind == "PeerLost" and ranks in ([], [0])
        assert "can no longer be reached" in told or "rank 0 is gone" in told


def test_who_does_not_come_is_named(processes: Processes, port: int, tmp_path: Path) -> None:
    for url in (f"tcp://127.0.0.1:{port}", f"file://{tmp_path}/store"):
        with pytest.raises(StoreTimeout, match=r"ranks \[1, 2\] of 3 did not come"):
            Group.from_url(url, 0, 3, timeout_s=0.5)


def test_a_rank_whose_host_does_not_come_says_who_hosts(port: int) -> None:
    began_at = time.monotonic()
    with pytest.raises(
        StoreLost,
        match=rf"rank 1 has no store at 127.0.0.1:{port}: .* rank 0 hosts it: check that it runs",
    ):
        Group.from_url(f"tcp://127.0.0.1:{port}", 1, 2, timeout_s=1)
    assert time.monotonic() - began_at < 10


@pytest.fixture
def stranger() -> Iterator[int]:
    """The port of somebody who listens and never says a word."""
    with socket.socket() as listening:
        listening.bind(("", 0))
        listening.listen()
        yield int(listening.getsockname()[1])


def test_a_port_that_is_taken_is_an_error_on_rank_0(stranger: int) -> None:
    with pytest.raises(StoreLost, match=r"Address already in use.* Choose a port that is free"):
        store_from_url(f"tcp://127.0.0.1:{stranger}", 0, 2, timeout_s=1)


def test_a_stranger_at_the_port_does_not_hold_a_rank_for_ever(stranger: int) -> None:
    with pytest.raises(StoreLost, match=r"it did not answer within 3.3 s. rank 0 hosts it"):
        store_from_url(f"tcp://127.0.0.1:{stranger}", 1, 2, timeout_s=0.3)


def die_holding(path: str) -> None:
    store = FileStore(path)
    store.set("key", "1")
    os._exit(0)


def test_the_file_of_an_earlier_run_is_reported_at_once(tmp_path: Path) -> None:
    path = tmp_path / "store"
    process = FORKS.Process(target=die_holding, args=(str(path),))
    process.start()
    process.join(10)
    for rank in range(2):
        with pytest.raises(StaleStore, match=rf"Remove it \(rm {path}\) and start all ranks again"):
            Group.from_url(f"file://{path}", rank, 2)


BAD = {
    "nonsense": "url 'nonsense' is of an unknown kind; write tcp://host:port, file:///abs",
    "http://host:1": "is of an unknown kind",
    "tcp://host:no": "cannot be read: Port could not be cast",
    "tcp://host?rank=0&world_size=1": "lacks a host or a port; write tcp://host:port",
    "tcp://:80?rank=0&world_size=1": "lacks a host or a port",
    "tcp://host:0?rank=0&world_size=1": "port must be in [1, 65535], got 0; all ranks need the",
    "tcp://host:80?world_size=1": "rank is missing: pass rank=..., or set the parameter rank of",
    "tcp://host:80?rank=0": "size is missing: pass size=..., or set the parameter world_size of",
    "tcp://host:80?rank=x&world_size=1": "rank must be a whole number, got 'x'",
    "tcp://host:80?rank=1&world_size=1": "rank must be in [0, 1), got 1",
    "tcp://host:80?rank=0&world_size=0": "size must be at least 1, got 0",
    "tcp://host:80?rank=0&worldsize=2": "has the parameter 'worldsize'; known: rank, world_size",
    "tcp://host:80?rank=0&rank=1": "names a parameter twice",
    "file://store?rank=0&world_size=1": "has no absolute path; write file:///absolute/path",
    "file:///?rank=0&world_size=1": "cannot be opened: Is a directory; name a file in a folder",
    "file:///no/such?rank=0&world_size=1": "No such file or directory; name a file in a folder",
    "env://": "needs the environment variable MASTER_ADDR, which is not set. Set MASTER_ADDR,",
}


@pytest.mark.parametrize("url", BAD)
def test_a_bad_url_is_answered_with_the_mend(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match=re.escape(BAD[url])):
        store_from_url(url)


def test_what_the_environment_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "eighty")
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"rank is missing: .* the environment variable RANK"):
        store_from_url("env://")
    with pytest.raises(ValueError, match="MASTER_PORT must be a whole number, got 'eighty'"):
        store_from_url("env://", 0)
    with pytest.raises(ValueError, match="size=3 is given, but url 'env://' says 2; leave one"):
        store_from_url("env://", 0, 3)
    with pytest.raises(TypeError, match="url must be a string, got int"):
        store_from_url(80)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="timeout_s must be positive"):
        store_from_url("env://", timeout_s=0)


def test_what_a_url_says_counts_more_than_the_environment(
    port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "1", "WORLD_SIZE": "5"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    meeting = store_from_url("env://?rank=0&world_size=2", timeout_s=1)
    assert (meeting.rank, meeting.size) == (0, 2)
    in_a_file = store_from_url(f"file://{tmp_path}/store", 0, 2, timeout_s=1)
    assert meeting.store.timeout_s == in_a_file.store.timeout_s == 1


def test_the_agent_of_torchrun_hosts_the_store_and_attempts_do_not_meet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agents = tcp_store()
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")

    def of_attempt(number: int) -> Store:
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(number))
        return store_from_url(f"tcp://127.0.0.1:{agents.port}", 0, 2, timeout_s=10).store

    first = of_attempt(0)
    first.set("left over", "1")
    assert not of_attempt(1).check(["left over"])
    assert of_attempt(0).check(["left over"]), "a rank of the same attempt"


PROGRAM = r"""
import os, sys
import torch
from chorusline import Group, store_from_url

store, rank, size = store_from_url("env://", timeout_s=30)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    store.set("left over", "1")
    store.add("group/default/0/created_by/0", 1)  # As a rank that came alone.
    sys.exit(rank)
assert not store.check(["left over"])
with Group.create(store, rank, size, timeout_s=30) as group:
    tensor = torch.tensor([rank + 1.0])
    group.all_reduce(tensor).wait()
    sys.stdout.write(f"sum {tensor.item()}\n")  # In one piece: the ranks share the pipe.
"""


@pytest.mark.slow
def test_torchrun_hosts_the_store_and_its_second_attempt_starts_anew(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    options = ["--standalone", "--nproc-per-node=2", "--max-restarts=1", "--monitor-interval=0.1"]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    launcher = ("-m", "torch.distributed.run")
    said = output_of(*launcher, *options, program, timeout_s=100, environment=one_thread)
    assert said.count("sum 3.0") == 2


def test_many_ranks_that_did_not_come_are_counted_and_not_all_named() -> None:
    with pytest.raises(StoreTimeout) as caught:
        Group.create(HashStore(), 0, 5_000, timeout_s=0.1)
    assert len(caught.value.keys) == 4_999
    assert "ranks [1, 2, 3, " in str(caught.value) and "and 4,983 more]" in str(caught.value)
    assert len(str(caught.value)) < 1_500
