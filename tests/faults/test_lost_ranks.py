"""What every rank sees when one of them dies, stops, is late or does not come."""

from __future__ import annotations

import itertools
import json
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from chorusline.collectives.contract.endpoint import Endpoint
from chorusline.collectives.contract.errors import (
    CollectiveError,
    CollectiveTimeout,
    PeerLost,
    StoreTimeout,
)
from chorusline.collectives.contract.work import Work
from chorusline.collectives.group import Group
from chorusline.collectives.stores.store import HashStore
from tests.contracts.handle import finish
from tests.harness.ranks import GLOO, SHARED_MEMORY, Rank, Ranks, error_of, run_ranks, transports

PATIENCE_S = {SHARED_MEMORY: 2.0, GLOO: 8.0}
"""For all to know of a failure. Gloo's ranks ask each other through the store; 2.5 s to answer."""


def wait_by_polling(work: Work) -> None:
    while not work.is_completed():
        time.sleep(0.001)
    error = work.error()
    if error is not None:
        raise error


WAYS: dict[str, Callable[[Work], None]] = {
    "wait": lambda work: work.wait(),
    "await": finish,
    "is_completed": wait_by_polling,
}


# -- a death -----------------------------------------------------------------------------------


def lose_the_last(rank: Rank, way: str, numel: int) -> Any:
    """The last rank issues nothing. The others: their error, and that of a later operation."""
    group = rank.group(timeout_s=60)
    group.barrier().wait()
    if rank.rank == rank.size - 1:
        rank.say("ready")
        time.sleep(600)
    work = group.all_reduce(torch.ones(numel))
    rank.say("ready")
    error = error_of(lambda: WAYS[way](work))
    later = error_of(lambda: group.barrier().wait())
    group.close()
    return error, later, time.monotonic()


@transports
@pytest.mark.parametrize(
    ("way", "numel"),
    [
        ("wait", 10),
        ("await", 10),
        pytest.param("wait", 3_000_000, marks=pytest.mark.slow),
        pytest.param("is_completed", 10, marks=pytest.mark.slow),
    ],
)
def test_a_killed_rank_is_named_by_every_survivor(
    transport: str, way: str, numel: int, tmp_path: Path
) -> None:
    with Ranks(lose_the_last, 3, tmp_path, transport, way, numel) as ranks:
        ranks.wait_for("ready")
        killed_at = time.monotonic()
        ranks.signal(2, signal.SIGKILL)
        for error, later, ended_at in ranks.results(ranks=[0, 1]):
            assert isinstance(error, PeerLost)
            assert error.ranks == [2]
            assert f"all_reduce #1 ({numel} float32) in generation 0: rank 2 is gone" in str(error)
            assert later is not None
            assert later.args == error.args
            assert ended_at - killed_at < PATIENCE_S[transport]


def go_on_without_the_last(rank: Rank) -> Any:
    group = rank.group()
    if rank.rank == rank.size - 1:
        rank.say("ready")
        time.sleep(600)
    work = group.all_reduce(torch.ones(10))
    rank.say("ready")
    error = error_of(work.wait)
    assert isinstance(error, PeerLost)
    left = [r for r in range(rank.size) if r not in error.ranks]
    group.close()
    survivors = Rank(left.index(rank.rank), len(left), rank.store, rank.transport)
    with survivors.group(generation=1) as group:
        tensor = torch.full((5,), float(rank.rank))
        group.all_reduce(tensor).wait()
        return group.generation, tensor.tolist()


@transports
def test_survivors_form_the_next_generation_in_the_same_processes(
    transport: str, tmp_path: Path
) -> None:
    with Ranks(go_on_without_the_last, 3, tmp_path, transport) as ranks:
        ranks.wait_for("ready")
        ranks.signal(2, signal.SIGKILL)
        assert ranks.results(ranks=[0, 1]) == [(1, [1.0] * 5)] * 2


def allocate_and_sleep(rank: Rank) -> None:
    group = rank.group()
    group.all_reduce(torch.ones(1_000_000)).wait()
    rank.say("ready")
    time.sleep(600)


@transports
def test_when_all_ranks_are_killed_nothing_stays_in_shared_memory(
    transport: str, tmp_path: Path
) -> None:
    before = set(Path("/dev/shm").iterdir())
    with Ranks(allocate_and_sleep, 3, tmp_path, transport) as ranks:
        ranks.wait_for("ready")
        for rank in range(3):
            ranks.signal(rank, signal.SIGKILL)
    assert set(Path("/dev/shm").iterdir()) <= before


def stream(group: Group, peer: int, begun: Callable[[], None]) -> None:
    """Send and receive, six messages each way in flight, for as long as a test may take."""
    works: deque[Work] = deque()
    give_up_at = time.monotonic() + 40
    for number in itertools.count():
        works += group.send(torch.ones(16384), peer), group.recv(torch.empty(16384), peer)
        while len(works) > 12:
            works.popleft().wait()
        if number == 20:
            begun()
        if time.monotonic() > give_up_at:
            return


def die_beside_a_stream(rank: Rank) -> Any:
    """Rank 0 dies, rank 1 waits for its message, and the others stream messages to each other."""
    group = rank.group(timeout_s=60)
    group.barrier().wait()
    if rank.rank > 1:
        return error_of(lambda: stream(group, 5 - rank.rank, lambda: rank.say("ready")))
    if rank.rank == 1:
        work = group.recv(torch.empty(10), 0)
        rank.say("ready")
        return error_of(work.wait)
    rank.store.wait([f"said/ready/{other}" for other in (1, 2, 3)], 60)
    os.kill(os.getpid(), signal.SIGKILL)
    return None


@transports
def test_ranks_that_stream_messages_are_not_taken_for_dead_and_hear_who_is(
    transport: str, tmp_path: Path
) -> None:
    with Ranks(die_beside_a_stream, 4, tmp_path, transport) as ranks:
        for error in ranks.results(ranks=[1, 2, 3]):
            assert isinstance(error, PeerLost)
            assert error.ranks == [0]


def die_after_one_has_closed(rank: Rank) -> Any:
    group = rank.group()
    rank.say("here")
    rank.store.wait([f"said/here/{other}" for other in range(rank.size)], 60)
    if rank.rank == 3:
        group.close()
        rank.say("closed")
        return None
    rank.store.wait(["said/closed/3"], 60)
    if rank.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    error = error_of(group.recv(torch.empty(3), 2).wait) if rank.rank == 0 else None
    rank.say("over")
    rank.store.wait(["said/over/0"], 60)
    return error


@transports
def test_a_rank_that_has_closed_is_not_blamed_for_a_later_death(
    transport: str, tmp_path: Path
) -> None:
    with Ranks(die_after_one_has_closed, 4, tmp_path, transport) as ranks:
        error, *_ = ranks.results(ranks=[0, 1, 3])
    assert isinstance(error, PeerLost)
    assert error.ranks == [2]


# -- a rank that does not come -------------------------------------------------------------------


def outwait_the_last(rank: Rank) -> Any:
    group = rank.group()
    group.barrier().wait()
    rank.say("ready")
    if rank.rank == rank.size - 1:
        time.sleep(600)
    rank.store.wait(["go"], 60)
    began_at = time.monotonic()
    error = error_of(lambda: group.all_reduce(torch.ones(10), timeout_s=1).wait())
    took_s = time.monotonic() - began_at
    group.close()
    return error, took_s


@transports
def test_a_stopped_rank_is_a_timeout_that_says_where_it_is(transport: str, tmp_path: Path) -> None:
    with Ranks(outwait_the_last, 3, tmp_path, transport) as ranks:
        ranks.wait_for("ready")
        if transport == GLOO:  # A rank with nothing to do says so after half a second.
            ranks.store.wait(["group/default/0/1/position/2"], 20)
        ranks.signal(2, signal.SIGSTOP)
        ranks.store.set("go", "")
        for error, took_s in ranks.results(ranks=[0, 1]):
            assert isinstance(error, CollectiveTimeout)
            assert error.ranks == [2]
            assert "rank 2 did not arrive within 1 s; rank 2 " in str(error)
            assert "barrier #0" in error.whereabouts
            assert "raise the timeout (timeout_s)" in str(error)
            assert 0.9 < took_s < 1 + PATIENCE_S[transport]


def be_late(rank: Rank) -> Any:
    """The last rank is only slow, and learns from its own next operation that it is over."""
    group = rank.group()
    group.barrier().wait()
    if rank.rank == rank.size - 1:
        rank.store.wait(["said/over/0", "said/over/1"], 60)
    error = error_of(lambda: group.all_reduce(torch.ones(10), timeout_s=0.5).wait())
    rank.say("over")
    group.close()
    return error


@transports
def test_a_late_rank_gets_the_error_that_names_it(transport: str, tmp_path: Path) -> None:
    errors = run_ranks(be_late, 3, tmp_path, transport)
    for error in errors:
        assert isinstance(error, CollectiveTimeout)
        assert error.ranks == [2]
        assert error.args == errors[0].args


def test_a_rank_missing_at_the_rendezvous_is_named() -> None:
    store = HashStore()
    text = r"ranks \[1, 2\] of 3 did not come to generation 4 of group 'default'. Check"
    with pytest.raises(StoreTimeout, match=text) as caught:
        Group.create(store, 0, 3, generation=4, timeout_s=0.2)
    assert caught.value.waited_s == 0.2


def test_ranks_of_two_generations_do_not_meet() -> None:
    store = HashStore()

    def meet(rank: int) -> str:
        create = partial(Group.create, store, rank, 2, generation=rank, timeout_s=0.3)
        return str(error_of(create, StoreTimeout))

    with ThreadPoolExecutor(2) as threads:
        for rank, told in enumerate(threads.map(meet, range(2))):
            assert f"rank {1 - rank} of 2 did not come to generation {rank} of group" in told


@transports
def test_ranks_that_try_again_meet_however_often_each_has_tried(transport: str) -> None:
    """Rank 0 gives up twice, then all come; rank 2 is in the attempt that rank 0 gives up last."""
    store = HashStore()
    found: dict[int, float] = {}

    def join(rank: int, timeout_s: float) -> None:
        with Group.create(store, rank, 3, backend=transport, timeout_s=timeout_s) as group:
            tensor = torch.ones(3)
            group.all_reduce(tensor).wait()
            found[rank] = tensor.sum().item()

    # Gloo asks for one rank after the other.
    with pytest.raises(StoreTimeout, match=r"(ranks \[1, 2\]|rank 1) of 3 did not come") as caught:
        join(0, 0.2)
    assert "ranks that call again meet each other" in str(caught.value)
    patient = threading.Thread(target=join, args=(2, 20))
    patient.start()
    with pytest.raises(StoreTimeout, match=r"rank 1 of 3 did not come"):
        join(0, 0.5)
    threads = [threading.Thread(target=join, args=(rank, 20)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in (*threads, patient):
        thread.join(30)
    assert found == {0: 9.0, 1: 9.0, 2: 9.0}


def test_who_gives_up_first_is_not_blamed_by_those_who_do_so_next() -> None:
    store = HashStore()
    told: dict[int, list[str]] = {}

    def join(rank: int) -> None:
        try:
            Group.create(store, rank, 3, timeout_s=0.4 + 0.3 * rank)
        except StoreTimeout as error:
            told[rank] = error.keys

    threads = [threading.Thread(target=join, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert [[key.rsplit("/")[-1] for key in told[rank]] for rank in (0, 1)] == [["2"], ["2"]]


def never_connect(rank: Rank) -> Any:
    """The last rank says its name and comes no further."""
    if rank.rank == rank.size - 1:
        endpoint = Endpoint("elsewhere", os.getpid(), -1, 0, 0)
        card = json.dumps(asdict(endpoint))
        rank.store.set(f"group/default/0/1/card/{rank.rank}", card)
        time.sleep(600)
    try:
        rank.group(timeout_s=2)
    except (StoreTimeout, CollectiveError) as error:
        return error
    return None


def test_a_gloo_rank_that_comes_halfway_does_not_hang_the_others(tmp_path: Path) -> None:
    with Ranks(never_connect, 3, tmp_path, GLOO) as ranks:
        for error in ranks.results(ranks=[0, 1], timeout_s=30):
            assert isinstance(error, StoreTimeout | PeerLost), repr(error)
            assert "2" in str(error)
