"""What every transport owes to who holds a `Work`, and to groups made of groups.

contracts/group.py lists these together with others.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from chorusline.collectives.contract.operation import Kind
from chorusline.collectives.contract.work import Work
from chorusline.collectives.group import Group


def check_results_and_futures(group: Group) -> None:
    tensor = torch.ones(5, device=group.device)
    work = group.all_reduce(tensor)
    future = work.get_future()
    assert work.get_future() is future
    seen: list[float] = []
    chained = future.then(lambda done: seen.append(done.value()[0][0].item()))
    assert work.wait() is not None
    assert future.done(), "a future is complete before wait() returns"
    assert future.value()[0].tolist() == [group.size] * 5
    chained.wait()
    assert seen == [group.size]
    assert work.result().data_ptr() == tensor.data_ptr()
    late = work.get_future()
    assert late.done()
    for _ in range(20):
        work = group.all_reduce(torch.ones(5, device=group.device))
        future = work.get_future()
        work.wait_on_host()
        assert future.done(), "nor does wait_on_host() return before it"

    with group.coalesce() as block:
        group.all_reduce(tensor)
        group.all_reduce(torch.ones(300_000, device=group.device))
    future = block.get_future()
    block.wait()
    assert future.done() and future.value() is None
    assert tensor.tolist() == [group.size**2] * 5

    part = torch.empty(2, device=group.device)
    scattered = group.reduce_scatter(part, torch.ones(2 * group.size, device=group.device))
    gathered = torch.empty(2 * group.size, device=group.device)
    gathering = group.all_gather(gathered, torch.ones(2, device=group.device))

    async def main() -> None:
        assert (await scattered).data_ptr() == part.data_ptr()
        assert (await gathering).data_ptr() == gathered.data_ptr()
        assert await group.barrier() is None

    asyncio.run(main())
    assert part.tolist() == [group.size] * 2


def check_results_are_what_was_written(group: Group) -> None:
    n, me = group.size, group.rank
    last = n - 1
    one, whole = torch.ones(2, device=group.device), torch.ones(2 * n, device=group.device)
    parts = [torch.ones(2, device=group.device) for _ in range(n)]
    assert group.all_reduce(one).wait() is one
    assert group.reduce(one, last).wait() is one
    assert group.broadcast(one, last).wait() is one
    assert group.reduce_scatter(one, parts).wait() is one
    assert group.all_gather(parts, one).wait() is parts
    assert group.all_gather(whole, one).wait() is whole
    for output in (whole, parts):
        given = output if me == last else None
        assert group.gather(one, given, last).wait() is given
        assert group.scatter(one, given, last).wait() is one
    assert group.all_to_all(whole, whole.clone()).wait() is whole
    assert group.all_to_all(parts, [part.clone() for part in parts]).wait() is parts
    if me == last and n > 1:
        assert group.recv(one, 0).wait() is one
    elif me == 0 and n > 1:
        assert group.send(one, last).wait() is None
    group.barrier().wait()


def check_a_work_in_flight_has_no_result(group: Group) -> None:
    if group.size == 1:
        return
    if group.rank == 0:
        work = group.all_reduce(torch.ones(3, device=group.device))
        with pytest.raises(RuntimeError, match=r"all_reduce #\d+ .* still in flight .* await it"):
            work.result()
        group.all_gather_object("looked").wait()
        work.wait_on_host()  # After wait() alone, a GPU may still be at it.
        assert not work.cancel(), "there is nothing left to cancel"
    else:
        group.all_gather_object("looked").wait()
        group.all_reduce(torch.ones(3, device=group.device)).wait()
    group.barrier().wait()


def check_objects(group: Group) -> None:
    last = group.size - 1
    value = {"rank": group.rank, "text": "ö" * 1000 * group.rank, "tensor": torch.ones(3)}
    everybody = group.all_gather_object(value).wait()
    assert [one["rank"] for one in everybody] == list(range(group.size))
    assert [len(one["text"]) for one in everybody] == [1000 * r for r in range(group.size)]

    objects = [group.rank, None] if group.rank == last else [None, "replaced"]
    work = group.broadcast_object_list(objects, root=last)
    assert work.wait() is objects
    assert objects == [last, None]

    gathered = group.gather_object((group.rank,), root=last).wait()
    assert gathered == ([(r,) for r in range(group.size)] if group.rank == last else None)

    parts = [{"for": r} for r in range(group.size)] if group.rank == last else None
    assert group.scatter_object_list(parts, root=last).wait() == {"for": group.rank}


def check_objects_and_tensors_in_flight_together(group: Group) -> None:
    """In an order that differs between ranks, and awaited in another."""

    async def main() -> None:
        tensor = torch.ones(100_000, device=group.device)
        if group.rank % 2:
            objects, work = group.all_gather_object(group.rank), group.all_reduce(tensor)
        else:
            work, objects = group.all_reduce(tensor), group.all_gather_object(group.rank)
        assert await objects == list(range(group.size))
        assert objects.get_future().value() == list(range(group.size))
        assert (await work)[0].item() == group.size
        firsts = [group.broadcast_object_list([group.rank], root=0) for _ in range(3)]
        assert await asyncio.gather(*(awaited(first) for first in firsts)) == [[0]] * 3

    asyncio.run(main())


def check_objects_between_two(group: Group) -> None:
    """Around a ring, as NCCL wants it too: in the order of issue, the first rank sends first."""
    n, me = group.size, group.rank
    if n == 1:
        return
    right, left = (me + 1) % n, (me - 1) % n
    sent = [{"from": me, "tensor": torch.arange(me)}, "ö" * 300_000]
    received: list[object] = [None, None]

    def send() -> None:
        assert group.send_object_list(sent, right).wait() is None

    def receive() -> None:
        work = group.recv_object_list(received, left)
        assert work.wait() is received
        assert work.source_rank == left and work.is_completed() and work.result() is received

    for step in (send, receive) if me == 0 else (receive, send):
        step()
    assert received[0]["from"] == left  # type: ignore[index]
    assert received[0]["tensor"].tolist() == list(range(left))  # type: ignore[index]
    assert received[1] == sent[1]
    group.barrier().wait()


def check_many_objects_between_two(group: Group) -> None:
    """On hosts: several under way, awaited in another order, from whichever rank."""
    n, me = group.size, group.rank
    if n == 1:
        return

    async def main() -> None:
        if me:
            works = [group.send_object_list([me, k, "x" * 200_000 * k], 0) for k in range(3)]
            for work in works:
                await work
            return
        lists: list[list[object]] = [[None] * 3 for _ in range(3 * (n - 1))]
        works = [group.recv_object_list(one) for one in lists]
        found = await asyncio.gather(*(awaited(work) for work in reversed(works)))
        assert sorted(one[:2] for one in found) == [[r, k] for r in range(1, n) for k in range(3)]
        assert all(len(one[2]) == 200_000 * one[1] for one in found)
        assert [work.source_rank for work in works] == [one[0] for one in lists]

    asyncio.run(main())
    group.barrier().wait()


async def awaited(work: object) -> object:
    return await work  # type: ignore[misc]


def finish(work: Work) -> None:
    """Block the host until `work` has ended."""

    async def wait() -> None:
        await work

    asyncio.run(wait())


def settle(work: Work, way: int) -> None:
    """Wait for it, or await it: the two forms of every operation."""
    if way % 2 and work.operation.kind is not Kind.BARRIER:
        finish(work)
    else:
        work.wait()


def check_subgroups(group: Group) -> None:
    """Several at once, in different orders, each with the right rank's data."""
    size = group.size
    backwards = group.new_group(list(reversed(range(size))))
    assert backwards is not None
    assert (backwards.rank, backwards.size) == (size - 1 - group.rank, size)
    assert backwards.global_rank(0) == size - 1
    assert backwards.group_rank(group.rank) == backwards.rank
    assert backwards.backend == group.backend
    halves = group.split(group.rank % 2, key=-group.rank, name="halves")
    assert halves is not None
    mine = [r for r in reversed(range(size)) if r % 2 == group.rank % 2]
    assert halves.ranks == tuple(mine)
    same = group.split(7)
    assert same is not None and same.ranks == tuple(range(size)), "equal keys keep their order"
    alone = group.new_group([size - 1], name="alone")
    assert (alone is None) == (group.rank != size - 1)

    tensors = [torch.full((3,), group.rank, device=group.device) for _ in range(4)]
    works = [
        group.broadcast(tensors[0], root=0),
        backwards.broadcast(tensors[1], root=0),
        halves.broadcast(tensors[2], root=0),
        halves.all_reduce(tensors[3]),
    ]
    for work in reversed(works):
        work.wait()
    found = [int(tensor[0]) for tensor in tensors]
    assert found == [0, size - 1, mine[0], sum(mine)]
    if alone is not None:
        assert alone.all_gather_object("me").wait() == ["me"]
        grandchild = alone.new_group([0])
        assert grandchild is not None
        assert grandchild.ranks == (size - 1,)
    nobody = group.split(None)
    assert nobody is None
    group.barrier().wait()
    for made in (backwards, halves, same, alone):
        if made is not None:
            made.close()
    group.barrier().wait()


def check_a_monitored_barrier_lets_all_pass(group: Group) -> None:
    group.monitored_barrier(timeout_s=20).wait()
    asyncio.run(_awaited_once(group))


async def _awaited_once(group: Group) -> None:
    await group.monitored_barrier(timeout_s=20, wait_all_ranks=True)


def check_a_future_callback_runs_outside_of_every_lock(group: Group) -> None:
    """It asks, issues, and looks at other works; on another thread too."""
    tensors = [torch.ones(n, device=group.device) for n in (3, 200_000)]
    works = [group.all_reduce(tensor) for tensor in tensors]
    issued: list[object] = []
    called = threading.Event()

    def callback(_: object) -> None:
        works[1].is_completed()
        issued.append(group.all_reduce(torch.ones(2, device=group.device)))
        called.set()

    works[0].get_future().add_done_callback(callback)
    works[0].wait()
    assert called.wait(20)
    for work in (*works, *issued):
        work.wait()  # type: ignore[attr-defined]


def check_an_operation_that_is_done_keeps_no_tensor(group: Group) -> None:
    """The flight recorder keeps hundreds of operations, and none of their memory."""
    right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size

    def exchange(tensor: torch.Tensor) -> Work:
        with group.coalesce() as work:
            group.send(tensor.contiguous(), right)
            group.recv(tensor, left)
        return work

    def coalesced(tensor: torch.Tensor) -> Work:
        with group.coalesce() as work:
            group.all_reduce(tensor)
            group.barrier()
        return work

    issues: list[Callable[[torch.Tensor], Work]] = [
        group.all_reduce,
        lambda tensor: group.broadcast(tensor, 0),
        lambda tensor: group.all_gather(tensor, torch.ones(4, device=group.device)),
        lambda tensor: group.reduce_scatter(
            tensor, torch.ones(tensor.numel() * group.size, device=group.device)
        ),
        lambda tensor: group.all_to_all(tensor, torch.ones(tensor.numel(), device=group.device)),
        coalesced,
        *([exchange] if group.size > 1 else []),
    ]
    for number, issue in enumerate(issues):
        # Strided, so that the result is copied from a staging buffer when it has arrived.
        tensor = torch.ones(4 * group.size, 2, device=group.device)[:, 0]
        storage = StorageWeakRef(tensor.untyped_storage())
        issue(tensor).wait()
        del tensor
        deadline = time.monotonic() + 20
        while not storage.expired():  # A transport's thread may be in its last lines.
            assert time.monotonic() < deadline, f"operation {number} keeps its tensor"
            gc.collect()
            time.sleep(0.01)
    group.barrier().wait()


HANDLE_CONTRACT = (
    check_an_operation_that_is_done_keeps_no_tensor,
    check_results_and_futures,
    check_results_are_what_was_written,
    check_a_work_in_flight_has_no_result,
    check_objects,
    check_objects_and_tensors_in_flight_together,
    check_objects_between_two,
    check_subgroups,
    check_a_monitored_barrier_lets_all_pass,
    check_a_future_callback_runs_outside_of_every_lock,
)
