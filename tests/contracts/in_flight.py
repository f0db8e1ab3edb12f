"""What every transport owes to operations in flight: their order, their end, and their counts."""

from __future__ import annotations

import asyncio
import random
import time

import numpy as np
import pytest
import torch

from chorusline.collectives.contract.operation import ReduceOp
from chorusline.collectives.group import Group
from tests.contracts.handle import awaited, finish
from tests.contracts.numbers import assert_equal


def check_many_in_flight(group: Group) -> None:
    """Issued in one order, waited for in another, which differs between ranks."""
    numels = [1, 300_000, 10, 0, 70_000, 1_000_003, 3] * 3
    tensors = [
        torch.full((n,), i, dtype=torch.int64).to(group.device) for i, n in enumerate(numels)
    ]
    works = [group.all_reduce(tensor) for tensor in tensors]
    order = list(range(len(works)))
    random.Random(group.rank).shuffle(order)
    for i in order:
        works[i].wait()
        assert_equal(tensors[i], np.full(numels[i], float(i * group.size)))
        finish(works[i])
        assert works[i].is_completed()
        assert works[i].error() is None


def check_awaiting(group: Group) -> None:
    async def main() -> None:
        tensors = [torch.ones(n, device=group.device) for n in (4, 400_000, 2)]
        works = [group.all_reduce(tensor) for tensor in tensors]
        await asyncio.gather(*(awaited(work) for work in reversed(works)))
        for tensor in tensors:
            assert_equal(tensor, np.full(tensor.numel(), float(group.size)))
        await works[0]

    asyncio.run(main())


def check_asking_is_enough(group: Group) -> None:
    """Nobody waits; the operations go on, and callbacks come once each."""
    tensors = [torch.ones(n, device=group.device) for n in (2, 500_000, 2)]
    works = [group.all_reduce(tensor) for tensor in tensors]
    called: list[int] = []
    for i, work in enumerate(works):
        # A callback may look at other works: nothing is locked.
        work.add_done_callback(lambda i=i: called.append(i) or works[-1].is_completed())
    give_up_at = time.monotonic() + 20
    while not all(work.is_completed() for work in works) or len(called) < 3:
        assert time.monotonic() < give_up_at, called
        time.sleep(0.001)
    works[0].add_done_callback(lambda: called.append(3))
    assert called == [0, 1, 2, 3]
    for tensor in tensors:
        assert_equal(tensor, np.full(tensor.numel(), float(group.size)))


def check_a_slow_rank_is_waited_for(group: Group) -> None:
    """Longer than anybody waits before looking what the others do."""
    for numel in (10, 400_000):
        tensor = torch.ones(numel, device=group.device)
        if group.rank == group.size - 1:
            time.sleep(0.8)
        group.all_reduce(tensor).wait()
        assert_equal(tensor, np.full(numel, float(group.size)))


def check_statistics(group: Group) -> None:
    n, others = group.size, group.size - 1
    before = group.statistics.snapshot()
    tensor = torch.zeros(8 * n, device=group.device)
    part_ = torch.zeros(8, device=group.device)
    works = [group.all_reduce(tensor), group.all_reduce(tensor)]
    works += [group.reduce_scatter(part_, tensor), group.all_gather(tensor, part_)]
    works += [group.broadcast(tensor, root=n - 1), group.barrier()]
    for work in works:
        work.wait()
    added = group.statistics.since(before)
    assert added.operations == {
        "all_reduce": 2,
        "reduce_scatter": 1,
        "all_gather": 1,
        "broadcast": 1,
        "barrier": 1,
    }
    assert added.total_operations() == 6
    elements = {"all_reduce": 32 * others, "reduce_scatter": 8 * others, "all_gather": 8 * others}
    if group.rank == n - 1:
        elements["broadcast"] = 8 * n
    assert +added.elements_sent == {kind: count for kind, count in elements.items() if count}


def check_coalesced(group: Group) -> None:
    n = group.size
    before = group.statistics.snapshot()
    tensors = [torch.ones(k, device=group.device) for k in (3, 300_000, 0)]
    whole = torch.zeros(2 * n, device=group.device)
    with group.coalesce() as work:
        inside = [group.all_reduce(tensor) for tensor in tensors]
        group.all_gather(whole, torch.full((2,), float(group.rank), device=group.device))
        assert not work.is_completed()
        with pytest.raises(RuntimeError, match="wait after it"):
            work.wait()
        with pytest.raises(RuntimeError, match="outer block"):
            group.coalesce()
    assert all(one is work for one in inside)
    called: list[int] = []
    work.add_done_callback(lambda: called.append(1))
    finish(work)
    work.wait()
    assert work.is_completed() and work.error() is None
    give_up_at = time.monotonic() + 20
    while not called:  # The thread that ended the last operation calls back, maybe a moment later.
        assert time.monotonic() < give_up_at
        time.sleep(0.001)
    assert called == [1]
    for tensor in tensors:
        assert_equal(tensor, np.full(len(tensor), float(n)))
    assert_equal(whole, np.repeat(np.arange(n), 2))
    added = group.statistics.since(before)
    assert added.operations == {"all_reduce": 3, "all_gather": 1}

    async def main() -> None:
        async with group.coalesce(timeout_s=20):
            for tensor in tensors:
                group.all_reduce(tensor)
        for tensor in tensors:
            assert_equal(tensor, np.full(len(tensor), float(n * n)))
        async with group.coalesce():
            pass

    asyncio.run(main())
    # What was issued before an error in the body is under way on all ranks, and is not lost.
    with pytest.raises(KeyError), group.coalesce() as broken:
        group.all_reduce(tensors[0])
        raise KeyError
    broken.wait()
    assert_equal(tensors[0], np.full(3, float(n**3)))


def check_inference_mode(group: Group) -> None:
    """As an evaluation issues them; and what it left in the group serves the training after it."""
    n, me, device = group.size, group.rank, group.device
    numbers = torch.arange(n * 50_000 + 3, dtype=torch.float32, device=device)

    def issue_and_check(tensor: torch.Tensor) -> None:
        everybody = [torch.empty_like(tensor) for _ in range(n)]
        swapped = tensor.clone().view(-1, 1)[::2].T  # not in one piece
        arriving = torch.full_like(tensor, -1)
        parts = [torch.full((2,), me, device=device) for _ in range(n)]
        works = [group.all_gather(everybody, tensor), group.all_to_all(parts, parts)]
        with group.coalesce() as block:
            group.all_reduce(swapped)
            group.broadcast(tensor, n - 1)
            if n > 1:
                group.send(numbers, (me + 1) % n)
                group.recv(arriving, (me - 1) % n)
        works += [block, group.all_reduce(tensor, ReduceOp.MAX)]
        works[-1].add_done_callback(lambda: None)  # Somebody else drives them.
        for work in reversed(works):
            work.wait()
        assert torch.equal(tensor, numbers)
        assert torch.equal(swapped, n * numbers[::2].view(1, -1))
        assert torch.equal(everybody[n - 1], numbers)
        assert n == 1 or torch.equal(arriving, numbers)
        assert [int(part[0]) for part in parts] == list(range(n))

    for is_evaluation in (True, False):
        with torch.inference_mode(is_evaluation):
            issue_and_check(numbers.clone())
            numbers = numbers.clone()


def check_statistics_of_uneven_operations(group: Group) -> None:
    """What a rank hands to the others; a complex number is one element."""
    n, me = group.size, group.rank
    before = group.statistics.snapshot()
    tensor = torch.zeros(4, dtype=torch.complex64, device=group.device)
    whole = torch.zeros(4 * n, dtype=torch.complex64, device=group.device)
    root = n - 1
    group.reduce(tensor, root).wait()
    group.gather(tensor, whole if me == root else None, root).wait()
    group.scatter(tensor, whole if me == root else None, root).wait()
    group.all_to_all(torch.zeros_like(whole), whole).wait()
    sizes = [4 + r for r in range(n)]
    parts = [tensor.new_zeros(size) for size in sizes]
    group.all_gather(parts, tensor.new_zeros(sizes[me])).wait()
    elements = {
        "reduce": 0 if me == root else 4,
        "gather": 0 if me == root else 4,
        "scatter": 4 * (n - 1) if me == root else 0,
        "all_to_all": 4 * (n - 1),
        "all_gather": sizes[me] * (n - 1) if n > 1 else 0,
    }
    added = group.statistics.since(before)
    assert +added.elements_sent == {kind: count for kind, count in elements.items() if count}
