"""What every transport owes to `Group`: one function per operation, checked against numpy.

Each takes a Group and runs on all of its ranks. Most return a digest of the results, which must be
the same on all ranks.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from collectives.contract.dtypes import DTYPES
from collectives.contract.errors import UnsupportedOperation
from collectives.contract.operation import Kind, ReduceOp
from collectives.contract.work import Work
from collectives.group import Group
from tests.contracts.handle import *  # noqa: F403  # Ranks look checks up by name, in here.
from tests.contracts.handle import HANDLE_CONTRACT, awaited, check_many_objects_between_two
from tests.references.reductions import UFUNCS

SMALL_SIZES = (0, 1, 10)
LARGE_SIZE = 600_007
LARGE_DTYPES = (torch.float32, torch.int64, torch.complex64)
LARGE_CASES = (
    (torch.float32, ReduceOp.SUM),
    (torch.bfloat16, ReduceOp.AVG),
    (torch.float16, ReduceOp.MIN),
    (torch.float64, ReduceOp.PRODUCT),
    (torch.int32, ReduceOp.AVG),
    (torch.int64, ReduceOp.MAX),
    (torch.complex64, ReduceOp.SUM),
    (torch.uint8, ReduceOp.BXOR),
)
BITWISE = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)


def can(group: Group, dtype: torch.dtype, op: ReduceOp) -> bool:
    """What the contract promises; everything else is refused."""
    if group.backend == "nccl" and (dtype is torch.int16 or op is ReduceOp.BXOR):
        return False
    if dtype is torch.bool:
        return op not in (ReduceOp.AVG, ReduceOp.PREMUL_SUM)
    if group.backend == "nccl" and op in BITWISE:
        return False
    if dtype.is_complex:
        return op in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PREMUL_SUM)
    return not (dtype.is_floating_point and op in BITWISE)


def cases(group: Group) -> Iterator[tuple[int, torch.dtype, ReduceOp]]:
    every = [(dtype, op) for dtype in DTYPES for op in ReduceOp if can(group, dtype, op)]
    for numel in SMALL_SIZES:
        for dtype, op in every:
            yield numel, dtype, op
    for dtype, op in LARGE_CASES:
        if (dtype, op) in every:
            yield LARGE_SIZE, dtype, op


def part(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """What `rank` brings: from -3 to 3, so that sums and products are exact in every dtype."""
    generator = np.random.default_rng([rank, numel])
    numbers = torch.from_numpy(generator.integers(-3, 4, numel))
    if dtype.is_complex:
        return torch.complex(numbers.double(), numbers.flip(0).double()).to(dtype)
    return numbers.clamp(min=0).to(dtype) if dtype is torch.bool else numbers.to(dtype)


def factor_of(rank: int, dtype: torch.dtype, op: ReduceOp) -> complex | None:
    """Another one on each rank."""
    if op is not ReduceOp.PREMUL_SUM:
        return None
    if dtype.is_complex:
        return 0.5 * (rank + 1) + 1j
    return 0.5 * (rank + 1) if dtype.is_floating_point else rank + 2


def wide(tensor: torch.Tensor) -> NDArray[Any]:
    """As numpy has it, without loss."""
    tensor = tensor.detach().cpu()
    if tensor.is_complex():
        return np.asarray(tensor.to(torch.complex128).numpy())
    return np.asarray((tensor.double() if tensor.is_floating_point() else tensor.long()).numpy())


def reduced(parts: list[torch.Tensor], op: ReduceOp) -> NDArray[Any]:
    """The reduction in numpy, in float64, int64 or complex128."""
    dtype = parts[0].dtype
    stack: NDArray[Any] = np.stack([wide(p) for p in parts])
    if op is ReduceOp.PREMUL_SUM:
        factors = [factor_of(rank, dtype, op) for rank in range(len(parts))]
        return np.asarray(sum(row * f for row, f in zip(stack, factors, strict=True)))
    if op is ReduceOp.AVG:
        total = np.asarray(stack.sum(0))
        if dtype.is_complex:  # numpy's complex division rounds twice.
            return total.real / len(parts) + 1j * (total.imag / len(parts))
        mean = total / len(parts)
        return mean if dtype.is_floating_point else np.trunc(mean)
    if dtype is torch.bool:
        stack = stack.astype(bool)
    if dtype is torch.bool and op in (ReduceOp.SUM, ReduceOp.PRODUCT):
        return np.asarray(stack.any(0) if op is ReduceOp.SUM else stack.all(0))
    return np.asarray(UFUNCS[op].reduce(stack, axis=0))


def assert_equal(tensor: torch.Tensor, expected: NDArray[Any]) -> None:
    """Equal to `expected`, rounded once to the tensor's dtype."""
    rounded = torch.from_numpy(np.asarray(expected)).to(tensor.dtype)
    np.testing.assert_array_equal(wide(tensor), wide(rounded))


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
    for numel, dtype, op in cases(group):
        parts = [part(rank, numel, dtype) for rank in range(group.size)]
        tensor = parts[group.rank].to(group.device, copy=True)
        group.all_reduce(tensor, op, factor=factor_of(group.rank, dtype, op)).wait()
        assert_equal(tensor, reduced(parts, op))
        results.append(tensor)
    return digest(results)


def check_reduce_scatter(group: Group) -> None:
    for numel, dtype, op in cases(group):
        numel = numel if numel < LARGE_SIZE else LARGE_SIZE // group.size
        wholes = [part(rank, group.size * numel, dtype) for rank in range(group.size)]
        whole = wholes[group.rank].to(group.device, copy=True)
        output = torch.full((numel,), 7, dtype=dtype, device=group.device)
        factor = factor_of(group.rank, dtype, op)
        group.reduce_scatter(output, whole, op, factor=factor).wait()
        mine = slice(group.rank * numel, (group.rank + 1) * numel)
        assert_equal(output, reduced(wholes, op)[mine])
        assert_equal(whole, wide(wholes[group.rank]))


def check_all_gather(group: Group) -> str:
    results = []
    for numel in (*SMALL_SIZES, LARGE_SIZE):
        for dtype in LARGE_DTYPES if numel == LARGE_SIZE else DTYPES:
            whole = part(0, group.size * numel, dtype)
            mine = slice(group.rank * numel, (group.rank + 1) * numel)
            apart = torch.full((group.size * numel,), 7, dtype=dtype, device=group.device)
            group.all_gather(apart, whole[mine].to(group.device)).wait()
            assert_equal(apart, wide(whole))
            in_place = torch.full_like(apart, 7)
            in_place[mine] = whole[mine].to(group.device)
            group.all_gather(in_place, in_place[mine]).wait()
            assert_equal(in_place, wide(whole))
            results.append(in_place)
    return digest(results)


def check_broadcast(group: Group) -> str:
    results = []
    for numel in (*SMALL_SIZES, LARGE_SIZE):
        for dtype in LARGE_DTYPES if numel == LARGE_SIZE else DTYPES:
            root = len(results) % group.size
            tensor = part(group.rank, numel, dtype).to(group.device)
            group.broadcast(tensor, root).wait()
            assert_equal(tensor, wide(part(root, numel, dtype)))
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
            for op in (op for op in ReduceOp if op not in (*BITWISE, ReduceOp.PREMUL_SUM)):
                generator = torch.Generator().manual_seed(group.rank)
                tensor = torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)
                group.all_reduce(tensor, op).wait()
                whole = torch.cat([tensor] * group.size)
                scattered = torch.empty_like(tensor)
                group.reduce_scatter(scattered, whole, op).wait()
                results += [tensor, scattered]
    return digest(results)


def settle(work: Work, way: int) -> None:
    """Wait for it, or await it: the two forms of every operation."""
    if way % 2 and work.operation.kind is not Kind.BARRIER:
        finish(work)
    else:
        work.wait()


def moved_cases() -> Iterator[tuple[int, torch.dtype]]:
    for numel in (0, 1, 7):
        for dtype in DTYPES:
            yield numel, dtype
    for dtype in LARGE_DTYPES:
        yield 150_001, dtype


def message(source: int, to: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """What `source` has for rank `to`."""
    return part(100 * source + to, numel, dtype)


def empty(group: Group, numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((numel,), 7, dtype=torch.int64).to(dtype).to(group.device)


def check_reduce(group: Group) -> None:
    for i, (numel, dtype, op) in enumerate(cases(group)):
        dst = i % group.size
        parts = [part(rank, numel, dtype) for rank in range(group.size)]
        tensor = parts[group.rank].to(group.device, copy=True)
        factor = factor_of(group.rank, dtype, op)
        settle(group.reduce(tensor, dst, op, factor=factor), i)
        expected = reduced(parts, op) if group.rank == dst else wide(parts[group.rank])
        assert_equal(tensor, expected)


def check_gather_and_scatter(group: Group) -> None:
    """From and to one tensor, and lists of tensors of other sizes on every rank."""
    n, me = group.size, group.rank
    for i, (numel, dtype) in enumerate(moved_cases()):
        root = i % n
        mine = message(me, root, numel, dtype).to(group.device)
        whole = empty(group, n * numel, dtype) if me == root else None
        settle(group.gather(mine, whole, root), i)
        everything = torch.cat([message(r, root, numel, dtype) for r in range(n)])
        if whole is not None:
            assert_equal(whole, wide(everything))
        back = empty(group, numel, dtype)
        settle(group.scatter(back, whole, root), i)
        assert_equal(back, wide(message(me, root, numel, dtype)))

        sizes = [numel * r for r in range(n)]
        mine = message(me, root, sizes[me], dtype).to(group.device)
        parts = [empty(group, size, dtype) for size in sizes] if me == root else None
        settle(group.gather(mine, parts, root), i + 1)
        for r, tensor in enumerate(parts or ()):
            assert_equal(tensor, wide(message(r, root, sizes[r], dtype)))
        back = empty(group, sizes[me], dtype)
        settle(group.scatter(back, parts, root), i + 1)
        assert_equal(back, wide(message(me, root, sizes[me], dtype)))


def check_all_to_all(group: Group) -> None:
    n, me = group.size, group.rank
    for i, (numel, dtype) in enumerate(moved_cases()):
        sent = torch.cat([message(me, r, numel, dtype) for r in range(n)]).to(group.device)
        received = empty(group, n * numel, dtype)
        settle(group.all_to_all(received, sent), i)
        assert_equal(received, wide(torch.cat([message(r, me, numel, dtype) for r in range(n)])))

        # Rank s sends (s + 2 r) % 3 rows of `numel` elements to rank r.
        to = [(me + 2 * r) % 3 for r in range(n)]
        of = [(r + 2 * me) % 3 for r in range(n)]
        outgoing = [
            message(me, r, rows * numel, dtype).to(group.device) for r, rows in enumerate(to)
        ]
        incoming = [wide(message(r, me, rows * numel, dtype)) for r, rows in enumerate(of)]
        into = [empty(group, rows * numel, dtype) for rows in of]
        settle(group.all_to_all(into, outgoing), i)
        for tensor, expected in zip(into, incoming, strict=True):
            assert_equal(tensor, expected)
        table = empty(group, sum(of) * numel, dtype).view(sum(of), numel)
        sent = torch.cat(outgoing).view(sum(to), numel)
        settle(group.all_to_all(table, sent, of, to), i + 1)
        assert_equal(table.reshape(-1), np.concatenate(incoming))
    same = torch.arange(3 * n, device=group.device)
    group.all_to_all(same, same).wait()  # In place: staged.
    assert_equal(same, np.concatenate([np.arange(3 * me, 3 * me + 3)] * n))


def check_lists(group: Group) -> None:
    """all_gather and reduce_scatter of lists, with parts of one size and of several."""
    n, me = group.size, group.rank
    for i, (numel, dtype) in enumerate(moved_cases()):
        for sizes in ([numel] * n, [numel + r for r in range(n)]):
            outputs = [empty(group, size, dtype) for size in sizes]
            settle(group.all_gather(outputs, part(me, sizes[me], dtype).to(group.device)), i)
            for r, tensor in enumerate(outputs):
                assert_equal(tensor, wide(part(r, sizes[r], dtype)))
            for op in ReduceOp if numel == 7 else (ReduceOp.SUM,):
                if not can(group, dtype, op):
                    continue
                inputs = [
                    message(me, r, size, dtype).to(group.device) for r, size in enumerate(sizes)
                ]
                output = empty(group, sizes[me], dtype)
                factor = factor_of(me, dtype, op)
                settle(group.reduce_scatter(output, inputs, op, factor=factor), i + 1)
                addends = [message(r, me, sizes[me], dtype) for r in range(n)]
                assert_equal(output, reduced(addends, op))
                assert_equal(inputs[0], wide(message(me, 0, sizes[0], dtype)))


def check_messages_around_a_ring(group: Group) -> None:
    """Every rank sends to the right and receives from the left, as one coalesced work."""
    n, me = group.size, group.rank
    if n == 1:
        return
    right, left = (me + 1) % n, (me - 1) % n
    for i, (numel, dtype) in enumerate(moved_cases()):
        into = empty(group, numel, dtype)
        with group.coalesce() as both:
            group.send(message(me, right, numel, dtype).to(group.device), right)
            group.recv(into, left)
        settle(both, i)
        assert_equal(into, wide(message(left, me, numel, dtype)))


def check_messages_beside_collectives(group: Group) -> None:
    """On hosts: no rank but the two sees them; tags are matched in any order, sources found."""
    n, me = group.size, group.rank
    if n == 1:
        return
    big = 300_007  # several times what fits into a channel at once
    if me == 0:
        works = [group.send(torch.full((big,), 1.0 * tag), 1, tag) for tag in (1, 2, 3)]
    group.all_reduce(torch.ones(10)).wait()
    if me == 1:
        for tag in (3, 1, 2):
            tensor = torch.zeros(big)
            work = group.recv(tensor, 0, tag)
            settle(work, tag)
            assert work.source_rank == 0
            assert_equal(tensor, np.full(big, float(tag)))
    group.barrier().wait()
    if me == 0:
        for work in works:
            work.wait()
        tensors = [torch.zeros(3, dtype=torch.int32) for _ in range(2 * (n - 1))]
        receives = [group.recv(tensor) for tensor in tensors]
        for i, work in enumerate(receives):
            settle(work, i)
        found = sorted((w.source_rank, t.tolist()) for w, t in zip(receives, tensors, strict=True))
        assert found == [(r, [r, k, 7]) for r in range(1, n) for k in (0, 1)]
    else:
        for k in (0, 1):
            group.send(torch.tensor([me, k, 7], dtype=torch.int32), 0).wait()
    for k in range(50):  # In the order of sending.
        if me == 0:
            group.send(torch.tensor([k]), 1).wait()
        elif me == 1:
            tensor = torch.zeros(1, dtype=torch.int64)
            group.recv(tensor, 0).wait()
            assert tensor.item() == k
    group.barrier().wait()


class Foreign:
    """Something that is no tensor and speaks DLPack, as a CuPy array does."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __dlpack__(self, **arguments: Any) -> object:
        return self.tensor.__dlpack__(**arguments)

    def __dlpack_device__(self) -> object:
        return self.tensor.__dlpack_device__()


def check_arrays_and_strides(group: Group) -> None:
    """Results are in the caller's memory, whatever it is; what is between its elements stays."""
    n, me = group.size, group.rank
    for i in range(2):
        foreign = torch.arange(5.0, device=group.device)
        settle(group.all_reduce(Foreign(foreign)), i)
        assert_equal(foreign, np.arange(5.0) * n)

        field = torch.zeros(6, 8, device=group.device)
        columns = field[:, 1::3]
        columns.copy_(torch.arange(18.0).view(6, 3))
        settle(group.all_reduce(columns), i)
        assert_equal(columns, np.arange(18.0).reshape(6, 3) * n)
        assert field.sum() == columns.sum()

        table = torch.zeros(3, 2 * n, device=group.device).t()  # row-major only when transposed
        mine = torch.full((3, 2), float(me), device=group.device).t()
        settle(group.all_gather(table, mine), i)
        assert_equal(table, np.repeat(np.arange(n), 2)[:, None] * np.ones((1, 3)))
        spread = torch.zeros(2, 3, device=group.device).t()
        settle(group.reduce_scatter(spread.t(), table), i)
        assert_equal(spread, np.full((3, 2), float(n * me)))

        lazy = torch.tensor([1 + 2j, 3 - 1j], device=group.device).conj()
        settle(group.broadcast(lazy, 0), i)
        assert_equal(lazy, np.array([1 - 2j, 3 + 1j]))
        settle(group.all_reduce(lazy), i)
        assert_equal(lazy, n * np.array([1 - 2j, 3 + 1j]))

        parts = [torch.zeros(2, 2, device=group.device).t() for _ in range(n)]
        settle(group.all_gather(parts, torch.tensor([[1.0, 2], [3, 4]], device=group.device)), i)
        for tensor in parts:
            assert_equal(tensor, np.array([[1.0, 2], [3, 4]]))
        ones = torch.ones((), device=group.device).expand(4)  # read, never written
        gathered = torch.zeros(4 * n, device=group.device)
        settle(group.all_gather(gathered, ones), i)
        assert_equal(gathered, np.ones(4 * n))


def check_numpy(group: Group) -> None:
    n, me = group.size, group.rank
    array = np.arange(6, dtype=np.int16).reshape(2, 3)
    group.all_reduce(array).wait()
    np.testing.assert_array_equal(array, np.arange(6).reshape(2, 3) * n)
    strided = np.zeros((4, 4))
    group.broadcast(strided[:, 1] if me else np.ones(4), 0).wait()
    if me:
        assert strided.sum() == strided[:, 1].sum() == 4
    field = np.zeros((3, 4))
    backwards = field[::-1, ::-2]
    backwards[:] = np.arange(6.0).reshape(3, 2)
    assert_equal(group.all_reduce(backwards).wait(), np.arange(6.0).reshape(3, 2) * n)
    np.testing.assert_array_equal(field[:, [3, 1]][::-1], np.arange(6.0).reshape(3, 2) * n)
    assert not field[:, ::2].any()
    rows = np.zeros((n, 3))
    outputs = [row[::-1] for row in rows]
    group.all_gather(outputs, np.arange(3.0)[::-1] + me).wait()
    np.testing.assert_array_equal(rows, np.arange(3.0) + np.arange(n)[:, None])
    for tiny in (np.ones(1)[::-1], np.ones(0)[::-1], np.ones((2, 0))[::-1]):
        group.all_reduce(tiny).wait()
        np.testing.assert_array_equal(tiny, np.full(tiny.shape, n))
    read_only = np.ones(3, dtype=np.complex64)
    read_only.flags.writeable = False
    whole = np.zeros(3 * n, dtype=np.complex64)
    group.all_gather(whole, read_only).wait()
    np.testing.assert_array_equal(whole, np.ones(3 * n))
    flags = np.array([me == 0, True])
    group.all_reduce(flags, ReduceOp.BAND).wait()
    assert flags.tolist() == [n == 1, True]
    for unfit, error, told in (
        (read_only, ValueError, "read-only"),
        (np.ones(3, dtype=np.uint16), UnsupportedOperation, "uint16"),
        (np.array(["a"]), TypeError, "tensor"),
        ([1.0], TypeError, "must be a torch.Tensor"),
    ):
        with pytest.raises(error, match=told):
            group.all_reduce(unfit)


def check_narrow_averages_do_not_overflow(group: Group) -> None:
    for dtype, value in ((torch.int8, -100), (torch.uint8, 200), (torch.int16, 30_000)):
        tensor = torch.full((9,), value, dtype=dtype)
        group.all_reduce(tensor, ReduceOp.AVG).wait()
        assert_equal(tensor, np.full(9, value))


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
    assert work.is_completed() and work.error() is None and called == [1]
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


def check_refusals(group: Group) -> None:
    """Each is a sentence, before anything is enqueued: the group works on."""
    n, me, backend = group.size, group.rank, group.backend
    one = torch.ones(2 * n, device=group.device)
    many = [torch.ones(2, device=group.device) for _ in range(n)]
    short, long = many[0], torch.ones(2 * n + 1, device=group.device)
    other = (me + 1) % n
    before = group.statistics.snapshot()
    refused: list[tuple[type[Exception], str, Callable[[], object]]] = [
        (ValueError, rf"dst must be a rank in \[0, {n}\)", lambda: group.reduce(one, n)),
        (ValueError, "src must be a rank", lambda: group.scatter(short, many, -1)),
        (ValueError, "this rank itself", lambda: group.send(one, me)),
        (ValueError, "this rank itself", lambda: group.recv(one, me)),
        (ValueError, f"output has {n + 1} tensors", lambda: group.gather(short, [*many, one], me)),
        (ValueError, "output is missing on rank", lambda: group.gather(short, None, me)),
        (ValueError, "make them equal", lambda: group.all_gather(many, one if n > 1 else long)),
        (ValueError, "input_split_sizes", lambda: group.all_to_all(one, one, None, [1] * n)),
        (ValueError, "part . of input, which", lambda: group.all_to_all(one, one[:n])),
        (ValueError, "sum", lambda: group.all_to_all(one, one, None, [n + 2] * n)),
        (TypeError, "two lists", lambda: group.all_to_all(many, one)),
        (ValueError, "split sizes are for tensors", lambda: group.all_to_all(many, many, [2] * n)),
        (ValueError, "of one operation have one dtype", lambda: group.all_gather(
            [*many[:-1], many[0].int()], short) if n > 1 else group.reduce(one, n, ReduceOp.SUM)),
        (ValueError, "torch.int32", lambda: group.reduce_scatter(short, one.int())),
        (ValueError, "several elements in one place",
         lambda: group.all_reduce(torch.ones((), device=group.device).expand(3))),
        (ValueError, "timeout_s must be positive", lambda: group.reduce(one, 0, timeout_s=0)),
        (ValueError, "factor belongs to", lambda: group.all_reduce(one, factor=2)),
        (ValueError, "factor belongs to", lambda: group.all_reduce(one, ReduceOp.PREMUL_SUM)),
        (ValueError, "must be an int",
         lambda: group.all_reduce(one.int(), ReduceOp.PREMUL_SUM, factor=0.5)),
        (ValueError, "is complex", lambda: group.all_reduce(one, ReduceOp.PREMUL_SUM, factor=1j)),
        (TypeError, "op must be a ReduceOp", lambda: group.all_reduce(one, "sum")),
        (UnsupportedOperation, f"BAND is not supported by the {backend}",
         lambda: group.all_reduce(one, ReduceOp.BAND)),
        (UnsupportedOperation, "complex", lambda: group.reduce(one + 0j, 0, ReduceOp.MAX)),
        (UnsupportedOperation, "bool", lambda: group.all_reduce(one.bool(), ReduceOp.AVG)),
        (ValueError, "tag must be in", lambda: group.send(one, other, -1) if n > 1
         else group.reduce(one, n)),
    ]  # fmt: skip
    for error, told, call in refused:
        if n == 1 and told in ("of one operation have one dtype", "tag must be in"):
            continue
        with pytest.raises(error, match=told):
            call()
    assert group.statistics.snapshot() == before
    assert_equal(one, np.ones(2 * n))
    if n == 1:
        with pytest.raises(ValueError, match="nobody can send"):
            group.recv(one)
    elif backend == "nccl":
        with pytest.raises(UnsupportedOperation, match="recv from any rank"):
            group.recv(one)
        with pytest.raises(UnsupportedOperation, match="tag 3"):
            group.send(one, other, 3)
        with pytest.raises(UnsupportedOperation, match="int32"):
            group.all_reduce(one.short())
    group.barrier().wait()


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


def name_of(check: object) -> str:
    """What a case is called in the name of its test."""
    return check.__name__.removeprefix("check_") if callable(check) else str(check)


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
    check_reduce,
    check_gather_and_scatter,
    check_all_to_all,
    check_lists,
    check_messages_around_a_ring,
    check_arrays_and_strides,
    check_coalesced,
    check_refusals,
    check_statistics_of_uneven_operations,
    check_inference_mode,
)
"""What holds on every transport, on devices of every kind."""

HOST_CONTRACT = (
    *CONTRACT,
    check_halves_round_once,
    check_messages_beside_collectives,
    check_many_objects_between_two,
    check_numpy,
    check_narrow_averages_do_not_overflow,
)
