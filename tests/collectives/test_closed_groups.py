"""What a group leaves in its process once it is closed: nothing, also before Python's search for
cycles has run."""

from __future__ import annotations

import gc
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from chorusline.collectives.contract.errors import CollectiveError, GroupClosed
from chorusline.collectives.group import Group
from chorusline.collectives.stores.store import HashStore
from tests.harness.open_sockets import descriptors

LARGE = (1 << 20) + 64
"""Elements that the ranks read in place."""


@pytest.fixture
def without_search() -> Iterator[None]:
    gc.collect()
    seen = None
    while (now := held()) != seen:  # Threads of earlier tests' groups may still close theirs.
        seen = now
        time.sleep(0.2)
    gc.disable()
    yield
    gc.enable()


def moves_everything(group: Group) -> None:
    """Tensors, in place too, objects, messages and a subgroup."""
    group.all_reduce(torch.ones(8)).wait()
    group.all_reduce(group.empty_symmetric(LARGE).fill_(1.0)).wait()
    group.all_gather_object("anything").wait()
    tensor = torch.ones(8)
    (group.send(tensor, 1) if group.rank == 0 else group.recv(tensor, 0)).wait()
    child = group.split(0)
    assert child is not None
    child.all_reduce(tensor).wait()


def is_aborted(group: Group) -> None:
    moves_everything(group)
    tensor = group.empty_symmetric(LARGE).fill_(1.0)
    if group.rank == 0:
        group.abort("this rank has found something")
    with pytest.raises(CollectiveError):
        group.all_reduce(tensor).wait()
    with pytest.raises(CollectiveError):
        group.all_gather_object("anything").wait()


def waits_for_a_rank_that_is_late(group: Group) -> None:
    """The one that waits in the memory learns there that the group has ended."""
    tensor = group.empty_symmetric(LARGE).fill_(1.0)
    is_first = group.rank == 0
    work = group.all_reduce(tensor, timeout_s=0.05) if is_first else group.recv(tensor, 0)
    with pytest.raises(CollectiveError):
        work.wait()


def generation(number: int, body: Callable[[Group], None], backend: str | None) -> None:
    store = HashStore()

    def rank(rank: int) -> None:
        with Group.create(store, rank, 2, generation=number, backend=backend) as group:
            body(group)

    with ThreadPoolExecutor(2) as ranks:
        list(ranks.map(rank, range(2)))


def held() -> tuple[int, int]:
    """The descriptors of this process, and what it has mapped of nameless files of ours."""
    return len(descriptors()), Path("/proc/self/maps").read_text().count("/memfd:chorusline")


def more_than(before: tuple[int, int]) -> bool:
    return any(now > then for now, then in zip(held(), before, strict=True))


@pytest.mark.parametrize(("backend", "num_groups"), [(None, 20), ("gloo", 3)])
def test_groups_that_are_made_and_ended_again_and_again_keep_nothing(
    without_search: None, backend: str | None, num_groups: int
) -> None:
    bodies = moves_everything, is_aborted, waits_for_a_rank_that_is_late
    for number, body in enumerate(bodies):  # What a process makes once is made here.
        generation(number, body, backend)
    before = held()
    for number in range(num_groups):
        generation(number, bodies[number % len(bodies)], backend)
    # The threads of an aborted Gloo group end after it, and those of an earlier test's groups.
    deadline = time.monotonic() + 10
    while more_than(before) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not more_than(before)


def test_a_tensor_that_is_kept_stays_readable_and_a_group_that_is_kept_has_no_descriptor(
    without_search: None,
) -> None:
    kept: list[torch.Tensor | Group] = []

    def body(group: Group) -> None:
        tensor = group.empty_symmetric(LARGE).fill_(float(group.rank + 1))
        group.all_reduce(tensor).wait()
        kept.extend([tensor[5:], group])

    before, _ = held()
    generation(0, body, None)
    assert held()[0] == before + 2, "one for each tensor, by which other ranks find it"
    for tensor in kept:
        if isinstance(tensor, torch.Tensor):
            assert tensor.eq(3.0).all()
    kept[:] = [one for one in kept if isinstance(one, Group)]
    del tensor
    assert held()[0] == before


def test_a_group_is_closed_by_a_callback_of_its_own_work() -> None:
    store = HashStore()
    closed = threading.Event()

    def first() -> None:
        group = Group.create(store, 0, 2)
        work = group.all_reduce(torch.ones(4))

        def close() -> None:
            group.close()
            closed.set()

        work.add_done_callback(close)
        assert closed.wait(20)

    def second() -> None:
        with Group.create(store, 1, 2) as group:
            time.sleep(0.2)  # The other rank drives its work by then.
            group.all_reduce(torch.ones(4)).wait()
            assert closed.wait(20)

    with ThreadPoolExecutor(2) as ranks:
        for one in [ranks.submit(first), ranks.submit(second)]:
            one.result()


@pytest.mark.parametrize("way", ["all_reduce", "recv"])
def test_a_signal_handler_closes_the_group_that_its_thread_waits_for(way: str) -> None:
    store = HashStore()
    is_over = threading.Event()

    def late() -> None:
        with Group.create(store, 1, 2):
            assert is_over.wait(20)

    with ThreadPoolExecutor(1) as ranks:
        other = ranks.submit(late)
        group = Group.create(store, 0, 2)
        before = signal.signal(signal.SIGALRM, lambda *_: group.close())
        try:
            tensor = torch.ones(4)
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(GroupClosed):
                (group.all_reduce(tensor) if way == "all_reduce" else group.recv(tensor, 1)).wait()
        finally:
            signal.signal(signal.SIGALRM, before)
            is_over.set()
        other.result()
