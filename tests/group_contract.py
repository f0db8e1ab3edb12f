"""What every transport owes to `Group`: one function per operation, checked against numpy.

Each takes a Group and runs on all of its ranks. Most return a digest of the results, which must be
the same on all ranks.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
from collections.abc import Iterator

import numpy as np
import torch
from handle_contract import *  # noqa: F403  # Ranks look checks up by name, in here.
from handle_contract import HANDLE_CONTRACT
from numpy.typing import NDArray

from collectives.group import Group
from collectives.operation import DTYPES
from collectives.reduce_op import ReduceOp
from collectives.work import Work

SMALL_SIZES = (0, 1, 10)
LARGE_SIZE = 1_000_003
LARGE_CASES = (
    (torch.float32, ReduceOp.SUM),
    (torch.bfloat16, ReduceOp.AVG),
    (torch.float16, ReduceOp.MIN),
    (torch.float64, ReduceOp.PRODUCT),
    (torch.int32, ReduceOp.AVG),
    (torch.int64, ReduceOp.MAX),
)


def cases() -> Iterator[tuple[int, torch.dtype, ReduceOp]]:
    for numel in SMALL_SIZES:
        for dtype in DTYPES:
            for op in ReduceOp:
                yield numel, dtype, op
    for dtype, op in LARGE_CASES:
        yield LARGE_SIZE, dtype, op


def part(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """What `rank` brings: from -3 to 3, so that sums and products are exact in every dtype."""
    numbers = np.random.default_rng([rank, numel]).integers(-3, 4, numel)
    return torch.from_numpy(numbers).to(dtype)


def reduced(parts: list[torch.Tensor], op: ReduceOp) -> NDArray[np.float64]:
    """The reduction in numpy, in float64."""
    stack: NDArray[np.float64] = np.stack([p.double().numpy() for p in parts])
    if op is ReduceOp.AVG:
        mean = np.asarray(stack.sum(0) / len(parts))
        return mean if parts[0].dtype.is_floating_point else np.trunc(mean)
    reduce = {
        ReduceOp.SUM: np.add,
        ReduceOp.PRODUCT: np.multiply,
        ReduceOp.MIN: np.minimum,
        ReduceOp.MAX: np.maximum,
    }
    return np.asarray(reduce[op].reduce(stack, axis=0))


def assert_equal(tensor: torch.Tensor, expected: NDArray[np.float64]) -> None:
    """Equal to `expected`, rounded once to the tensor's dtype."""
    rounded = torch.from_numpy(np.asarray(expected)).to(tensor.dtype)
    np.testing.assert_array_equal(tensor.cpu().double().numpy(), rounded.double().numpy())


def digest(tensors: list[torch.Tensor]) -> str:
    """Of the bits."""
    hashed = hashlib.sha256()
    for tensor in tensors:
        copy = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
        hashed.update(copy.view(-1).view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()


def finish(work: Work) -> None:
    """Block the host until `work` has ended."""

    async def wait() -> None:
        await work

    asyncio.run(wait())


def check_all_reduce(group: Group) -> str:
    results = []
    for numel, dtype, op in cases():
        parts = [part(rank, numel, dtype) for rank in range(group.size)]
        tensor = parts[group.rank].to(group.device, copy=True)
        group.all_reduce(tensor, op).wait()
        assert_equal(tensor, reduced(parts, op))
        results.append(tensor)
    return digest(results)


def check_reduce_scatter(group: Group) -> None:
    for numel, dtype, op in cases():
        wholes = [part(rank, group.size * numel, dtype) for rank in range(group.size)]
        whole = wholes[group.rank].to(group.device, copy=True)
        output = torch.full((numel,), 7, dtype=dtype, device=group.device)
        group.reduce_scatter(output, whole, op).wait()
        mine = slice(group.rank * numel, (group.rank + 1) * numel)
        assert_equal(output, reduced(wholes, op)[mine])
        assert_equal(whole, wholes[group.rank].double().numpy())


def check_all_gather(group: Group) -> str:
    results = []
    for numel in (*SMALL_SIZES, LARGE_SIZE):
        for dtype in DTYPES:
            whole = part(0, group.size * numel, dtype)
            mine = slice(group.rank * numel, (group.rank + 1) * numel)
            apart = torch.full((group.size * numel,), 7, dtype=dtype, device=group.device)
            group.all_gather(apart, whole[mine].to(group.device)).wait()
            assert_equal(apart, whole.double().numpy())
            in_place = torch.full_like(apart, 7)
            in_place[mine] = whole[mine].to(group.device)
            group.all_gather(in_place, in_place[mine]).wait()
            assert_equal(in_place, whole.double().numpy())
            results.append(in_place)
    return digest(results)


def check_broadcast(group: Group) -> str:
    results = []
    for numel in (*SMALL_SIZES, LARGE_SIZE):
        for dtype in DTYPES:
            root = len(results) % group.size
            tensor = part(group.rank, numel, dtype).to(group.device)
            group.broadcast(tensor, root).wait()
            assert_equal(tensor, part(root, numel, dtype).double().numpy())
            results.append(tensor)
    return digest(results)


def check_barrier(group: Group) -> tuple[float, float]:
    """When this rank issued it and when it was done: time.monotonic(), one clock for a host."""
    group.barrier().wait()
    time.sleep(0.03 * group.rank)
    issued_at = time.monotonic()
    group.barrier().wait()
    return issued_at, time.monotonic()


def check_shapes_and_views(group: Group) -> None:
    matrix = torch.ones(3, 5, device=group.device, requires_grad=True)
    group.all_reduce(matrix).wait()
    assert_equal(matrix.detach(), np.full((3, 5), float(group.size)))
    scalar = torch.tensor(2.0, device=group.device)
    group.broadcast(scalar).wait()
    whole = torch.zeros(12, device=group.device)
    group.all_reduce(whole[3:6].fill_(1)).wait()
    assert_equal(whole, np.repeat([0.0, group.size, 0.0], [3, 3, 6]))


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
        await asyncio.gather(*(_awaited(work) for work in reversed(works)))
        for tensor in tensors:
            assert_equal(tensor, np.full(tensor.numel(), float(group.size)))
        await works[0]

    asyncio.run(main())


async def _awaited(work: Work) -> None:
    await work


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


def check_halves_round_once(group: Group) -> None:
    """2048 + 1 rounds to 2048 in float16, 256 + 1 to 256 in bfloat16: add three and see."""
    for dtype, big in ((torch.float16, 2048.0), (torch.bfloat16, 256.0)):
        tensor = torch.full((100,), big if group.rank == 0 else 1.0, dtype=dtype)
        group.all_reduce(tensor).wait()
        assert_equal(tensor, np.full(100, big + group.size - 1))
    huge = torch.full((100,), 60_000.0, dtype=torch.float16)
    group.all_reduce(huge, ReduceOp.AVG).wait()
    assert_equal(huge, np.full(100, 60_000.0))


def check_bits(group: Group) -> str:
    """Of sums whose order matters. Host transports all add in rank order."""
    results = []
    for numel in (10, 5_000, 300_001):
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            for op in ReduceOp:
                generator = torch.Generator().manual_seed(group.rank)
                tensor = torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)
                group.all_reduce(tensor, op).wait()
                whole = torch.cat([tensor] * group.size)
                scattered = torch.empty_like(tensor)
                group.reduce_scatter(scattered, whole, op).wait()
                results += [tensor, scattered]
    return digest(results)


CONTRACT = (
    check_all_reduce,
    check_reduce_scatter,
    check_all_gather,
    check_broadcast,
    check_shapes_and_views,
    check_many_in_flight,
    check_awaiting,
    check_asking_is_enough,
    check_a_slow_rank_is_waited_for,
    check_statistics,
    *HANDLE_CONTRACT,
)
"""What holds on every transport, on devices of every kind."""

HOST_CONTRACT = (*CONTRACT, check_halves_round_once)
