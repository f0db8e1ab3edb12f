"""What every transport owes to `Group`: each operation gives what numpy gives."""

from __future__ import annotations

import time

import numpy as np
import torch

from chorusline.collectives.contract.dtypes import DTYPES
from chorusline.collectives.contract.operation import ReduceOp
from chorusline.collectives.group import Group
from tests.contracts.handle import settle
from tests.contracts.numbers import (
    BITWISE,
    LARGE_DTYPES,
    LARGE_SIZE,
    SMALL_SIZES,
    assert_equal,
    can,
    cases,
    digest,
    empty,
    factor_of,
    message,
    moved_cases,
    part,
    reduced,
    wide,
)


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


def check_an_input_in_another_part_of_the_output(group: Group) -> None:
    """What arrives there first must not be sent on instead of it."""
    size, rank = group.size, group.rank
    for numel in (3, 400_001):  # The latter in several turns of the memory between ranks.
        wanted = torch.arange(float(size), device=group.device).repeat_interleave(numel)
        for place in range(size):
            whole = torch.zeros(size * numel, device=group.device)
            mine = whole[place * numel : (place + 1) * numel].fill_(float(rank))
            group.all_gather(whole, mine).wait_on_host()
            assert torch.equal(whole, wanted)
            mine.fill_(float(rank))
            group.gather(mine, whole if rank == place else None, place).wait_on_host()
            assert rank != place or torch.equal(whole, wanted)
            last = size - 1
            mine = whole[last * numel :].fill_(float(rank))
            group.gather(mine, whole if rank == place else None, place).wait_on_host()
            assert rank != place or torch.equal(whole, wanted)


def check_an_output_across_parts_of_the_input(group: Group) -> None:
    """What is written there must not be read as input that is still to come."""
    size, rank = group.size, group.rank
    for numel in (3, 400_001):  # The latter in several turns of the memory between ranks.
        numbers = torch.arange(size * numel, dtype=torch.float64) % 1000
        wanted = numbers.numpy()[rank * numel :][:numel] * size + sum(range(size))
        for place in range(size):
            # One element later, so that it reaches into what a later turn reads.
            at = min(place * numel + 1, (size - 1) * numel)
            whole = (numbers + rank).to(group.device)
            mine = whole[at : at + numel]
            group.reduce_scatter(mine, whole).wait_on_host()
            assert_equal(mine, wanted)


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


def check_narrow_averages_do_not_overflow(group: Group) -> None:
    for dtype, value in ((torch.int8, -100), (torch.uint8, 200), (torch.int16, 30_000)):
        tensor = torch.full((9,), value, dtype=dtype)
        group.all_reduce(tensor, ReduceOp.AVG).wait()
        assert_equal(tensor, np.full(9, value))
