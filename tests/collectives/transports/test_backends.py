"""Transports by name: ours, and one that a third party registers."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from chorusline.collectives.contract.errors import (
    CollectiveTimeout,
    GroupAborted,
    PeerLost,
    UnsupportedOperation,
)
from chorusline.collectives.group import Group
from chorusline.collectives.objects.messages import Script, ScriptedWork
from chorusline.collectives.shared_memory import robust_list
from chorusline.collectives.shared_memory.layout import key_of, open_memory
from chorusline.collectives.stores.store import HashStore
from chorusline.collectives.transports import host
from chorusline.collectives.transports.backends import register_backend
from chorusline.collectives.transports.host import PreparedEndpoint
from tests.contracts.group import HOST_CONTRACT, name_of
from tests.contracts.handle import check_objects_between_two
from tests.contracts.operations import check_barrier
from tests.harness.in_process import IN_PROCESS, connect, connect_without_tags
from tests.harness.ranks import Rank, run_ranks

register_backend(IN_PROCESS, connect, ["cpu"])
register_backend("without-tags", connect_without_tags, ["cpu"])


def run_threads(
    body: Callable[[Group], Any], size: int, backend: str | None = IN_PROCESS, **options: Any
) -> list[Any]:
    """body(group) on every rank, ranks being threads; the results by rank."""
    store = HashStore()
    found: list[Any] = [None] * size
    failures: list[BaseException] = []

    def main(rank: int) -> None:
        try:
            with Group.create(store, rank, size, backend=backend, **options) as group:
                found[rank] = body(group)
        except BaseException as error:
            failures.append(error)

    threads = [
        threading.Thread(target=main, args=(rank,), name=f"rank {rank}") for rank in range(size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    if failures:
        raise failures[0]
    return found


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("check", HOST_CONTRACT, ids=name_of)
def test_a_registered_backend_keeps_the_contract(check: Callable[[Group], Any], size: int) -> None:
    results = run_threads(check, size, timeout_s=30)
    assert results == [results[0]] * size, "the ranks have different bits"


def test_objects_find_their_lists_by_order_where_messages_have_no_tags() -> None:
    def body(group: Group) -> None:
        check_objects_between_two(group)
        other = 1 - group.rank
        if group.rank == 0:
            for k in range(3):
                group.send_object_list([k], other)
        else:
            lists = [[None], [None], [None]]
            works = [group.recv_object_list(one, other) for one in lists]
            for work in reversed(works):
                work.wait()
            assert lists == [[0], [1], [2]]
        with pytest.raises(UnsupportedOperation, match="name the rank with src"):
            group.recv_object_list([None])
        with group.coalesce(), pytest.raises(RuntimeError, match="move it out of the block"):
            group.recv_object_list([None], other)
        group.barrier().wait()

    run_threads(body, 2, "without-tags", timeout_s=20)


def test_a_step_of_a_script_is_over_when_the_next_work_is_issued_by_whichever_thread() -> None:
    """Without tags, the header of a second list must not be asked for before the first's words."""

    def body(group: Group) -> list[str]:
        if group.rank == 1:
            time.sleep(0.1)  # So this thread ends the first barrier, and goes on for rank 0.
            group.barrier().wait()
            group.barrier().wait()
            return []
        told: list[str] = []
        first = group.barrier()

        def script() -> Script:
            yield first
            told.append(threading.current_thread().name)
            time.sleep(0.2)
            second = group.barrier()
            told.append("issued")
            yield second

        operation = dataclasses.replace(first.operation)
        work = ScriptedWork(operation, group._communicator, group.abort, script())
        work.step()
        assert told == ["rank 1", "issued"]
        work.wait()
        return told

    run_threads(body, 2)


def test_a_barrier_of_a_registered_backend_is_one() -> None:
    times = run_threads(check_barrier, 3)
    assert max(issued_at for issued_at, _ in times) <= min(done_at for _, done_at in times)


def test_a_late_rank_of_a_registered_backend_is_named() -> None:
    over = threading.Event()

    def body(group: Group) -> Any:
        assert group.backend == group.describe().backend == IN_PROCESS
        if group.rank == 1:
            over.wait(20)
            return None
        try:
            group.monitored_barrier(timeout_s=0.2).wait()
        except CollectiveTimeout as error:
            return error.ranks
        finally:
            over.set()

    assert run_threads(body, 2) == [[1], None]


def test_a_rank_of_a_registered_backend_that_closes_is_named() -> None:
    def body(group: Group) -> Any:
        if group.rank == 1:
            return None
        with pytest.raises(PeerLost) as caught:
            group.barrier().wait()
        return caught.value.ranks

    assert run_threads(body, 2) == [[1], None]


def use_gloo_on_one_host(rank: Rank) -> str:
    group = Group.create(rank.store, rank.rank, rank.size, backend="gloo")
    with group:
        tensor = torch.ones(5)
        group.all_reduce(tensor).wait()
        assert tensor.tolist() == [rank.size] * 5
        return group.backend


def test_gloo_can_be_had_on_one_host(tmp_path: Path) -> None:
    assert run_ranks(use_gloo_on_one_host, 2, tmp_path) == ["gloo"] * 2


def ask_for_shared_memory(rank: Rank) -> str:
    with pytest.raises(ValueError) as raised:
        Group.create(rank.store, rank.rank, rank.size, backend="shared-memory")
    return str(raised.value)


def test_shared_memory_between_hosts_is_refused_with_the_hosts(tmp_path: Path) -> None:
    for told in run_ranks(ask_for_shared_memory, 2, tmp_path, "gloo"):
        assert "['host 0', 'host 1']" in told
        assert "choose backend='gloo', or None" in told


def test_ranks_that_choose_different_backends_are_told_both() -> None:
    store = HashStore()
    told: dict[int, str] = {}

    def main(rank: int) -> None:
        try:
            Group.create(
                store, rank, 2, backend="shared-memory" if rank else IN_PROCESS, timeout_s=0.5
            )
        except ValueError as error:
            told[rank] = str(error)

    threads = [
        threading.Thread(target=main, args=(rank,), name=f"rank {rank}") for rank in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert "'in-process' on rank 0, but rank 1 came with 'shared-memory'" in told[0]
    assert "choose the same on all ranks" in told[0]


def test_an_unknown_backend_is_refused_with_the_list() -> None:
    with pytest.raises(ValueError, match=r"'shared-memory', 'gloo', 'nccl'.*got 'mpi'"):
        Group.create(HashStore(), 0, 1, backend="mpi")


def test_a_backend_for_other_devices_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'nccl' moves tensors on cuda, but the device .* cpu"):
        Group.create(HashStore(), 0, 1, backend="nccl")
    with pytest.raises(ValueError, match="no backend is registered for 'meta'"):
        Group.create(HashStore(), 0, 1, "meta")


def test_a_name_is_registered_once() -> None:
    register_backend(IN_PROCESS, connect, ["cpu"])  # The same again is no news.
    with pytest.raises(ValueError, match="'gloo' is registered already"):
        register_backend("gloo", connect, ["cpu"])
    with pytest.raises(TypeError, match="devices must be a list, got str 'cpu'"):
        register_backend("another", connect, "cpu")


# -- network interfaces ----------------------------------------------------------------------------


def test_an_interface_that_does_not_exist_is_refused_with_those_that_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,nosuch0")
    here = ", ".join(name for _, name in socket.if_nameindex())
    with pytest.raises(ValueError, match=f"GLOO_SOCKET_IFNAME names nosuch0, but .* has {here};"):
        Group.create(HashStore(), 0, 1, backend="gloo")


@pytest.mark.parametrize("chosen", ["", "lo"])
def test_a_group_says_which_interface_it_uses(monkeypatch: pytest.MonkeyPatch, chosen: str) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", chosen)
    with Group.create(HashStore(), 0, 1, backend="gloo") as group:
        told = group.describe().network
    assert "GLOO_SOCKET_IFNAME" in told
    assert told.startswith("lo (" if chosen else "the ")
    with Group.create(HashStore(), 0, 1) as group:
        assert group.describe().network == "none: the memory of this host"


def test_ranks_that_know_each_others_endpoints_meet_without_a_store() -> None:
    prepared = [PreparedEndpoint(4) for _ in range(3)]  # One more than they are.
    endpoints = [one.endpoint for one in prepared]
    store = HashStore()

    def meet(rank: int) -> float:
        limits = {"generation": 5, "timeout_s": 30.0}
        with Group._create_prepared(
            prepared[rank], endpoints, lambda: None, store, rank, **limits
        ) as group:
            assert (group.rank, group.size, group.generation) == (rank, 3, 5)
            ones = torch.ones(1000)
            group.all_reduce(ones).wait_on_host()
            return float(ones.sum())

    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(meet, range(3))) == [3000.0] * 3
    assert not store.num_keys()


@pytest.mark.parametrize("number", [errno.EACCES, errno.ENXIO, errno.EISDIR])
def test_a_first_rank_that_ends_while_it_is_met_is_a_lost_one(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of such a process the kernel refuses the descriptors; root is told that they are gone."""

    def refused(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(host, "open_memory", refused)
    mine = PreparedEndpoint(2)
    with pytest.raises(PeerLost, match=r"rank 0 .*process \d+ ended") as caught:
        mine.connect([mine.endpoint, mine.endpoint], 1, 5, 1.0, lambda: None)
    assert caught.value.ranks == [0]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_loses_a_first_rank_that_was_killed() -> None:
    """As above, for real: a process that was killed, and that nobody has waited for."""
    program = """
import ctypes, os, signal
from chorusline.collectives.transports.host import Endpoint, _opened
from chorusline.collectives.shared_memory.layout import key_of, make_memory
from chorusline.collectives.contract.errors import PeerLost
os.setgid(65534)
os.setuid(65534)
ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE, which a change of the user takes away.
reading, writing = os.pipe()
if not (child := os.fork()):
    memory = make_memory(2, 1 << 16)
    os.write(writing, f"{memory} {key_of(memory)}".encode())
    signal.pause()
memory, key = map(int, os.read(reading, 100).split())
root = Endpoint("here", child, memory, key, 2)
os.close(_opened(root, 5))
os.kill(child, signal.SIGKILL)
os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
try:
    _opened(root, 5)
except PeerLost as error:
    print(error)
"""
    said = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert "Permission denied" in said.stdout, said.stderr


def test_what_has_the_descriptor_of_the_memory_and_cannot_be_read_is_closed_again() -> None:
    reading, writing = os.pipe()
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(OSError, match="seek"):
        open_memory(os.getpid(), reading, 1)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    os.close(reading)
    os.close(writing)


def test_a_rank_that_cannot_meet_is_named_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    store.set("card/1", json.dumps({"failed": "Too many open files"}))
    with pytest.raises(PeerLost, match=r"rank 1 .*Too many open files"):
        host.connect(store, 0, 2, 5)


def test_a_rank_that_is_short_of_threads_when_it_meets_is_lost_to_the_others_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    first, second = PreparedEndpoint(2), PreparedEndpoint(0)
    endpoints = [first.endpoint, second.endpoint]
    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="new thread"):
        patched.setattr(robust_list, "mark_at_exit", refuse)
        second.connect(endpoints, 1, 0, 20, lambda: None)
    began_at = time.monotonic()
    with pytest.raises(PeerLost, match="closed the group while others still used it"):
        first.connect(endpoints, 0, 0, 20, lambda: None)
    assert time.monotonic() - began_at < 10


def test_a_rank_that_waits_in_prepared_memory_leaves_it_when_the_rendezvous_is_over() -> None:
    mine, theirs = PreparedEndpoint(2), PreparedEndpoint(2)

    def look() -> None:
        raise GroupAborted(5, [], "a newcomer has come")

    with pytest.raises(GroupAborted, match="a newcomer has come"):
        mine.connect([mine.endpoint, theirs.endpoint], 0, 5, 60.0, look)
    theirs.close()


def test_memory_that_has_the_descriptor_of_another_is_not_entered() -> None:
    first = PreparedEndpoint(2)
    endpoint = first.endpoint
    first.close()
    later = PreparedEndpoint(2)
    assert later.endpoint.descriptor == endpoint.descriptor
    mine = PreparedEndpoint(2)
    with pytest.raises(PeerLost, match="left the rendezvous"):
        mine.connect([endpoint, mine.endpoint], 1, 5, 1.0, lambda: None)
    assert key_of(later.endpoint.descriptor) == later.endpoint.key
    later.close()
