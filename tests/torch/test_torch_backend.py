"""torch.distributed's operations over our groups, against what each of them has to give."""

import contextlib
import inspect
import os
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

import chorusline as cl
from chorusline.collectives.torch_backend.options import Options
from tests.harness.torch_groups import all_gather_single, reduce_scatter_single, with_torch


def on(ranks_of, size, body, *args):
    return ranks_of(size).run(with_torch, "chorusline", body, *args)


def row(rank, numel, dtype=torch.float32):
    """What rank `rank` brings."""
    return (torch.arange(numel) + 100 * rank).to(dtype)


# -- one tensor ------------------------------------------------------------------------------------


def reductions(rank, size):
    rows = [row(r, 5) for r in range(size)]
    wanted = {
        dist.ReduceOp.SUM: sum(rows),
        dist.ReduceOp.AVG: sum(rows) / size,
        dist.ReduceOp.MAX: rows[-1],
        dist.ReduceOp.MIN: rows[0],
        dist.ReduceOp.PRODUCT: torch.stack(rows).prod(0),
    }
    for op, expected in wanted.items():
        tensor = row(rank, 5)
        dist.all_reduce(tensor, op)
        torch.testing.assert_close(tensor, expected)
    scaled = row(rank, 5)
    dist.all_reduce(scaled, dist._make_nccl_premul_sum(0.5))
    torch.testing.assert_close(scaled, sum(rows) / 2)
    bits = torch.tensor([1 << rank])
    dist.all_reduce(bits, dist.ReduceOp.BOR)
    assert bits.item() == (1 << size) - 1
    root = size - 1
    tensor = row(rank, 5)
    dist.reduce(tensor, root)
    torch.testing.assert_close(tensor, sum(rows) if rank == root else rows[rank])
    tensor = row(rank, 5)
    dist.broadcast(tensor, root)
    assert torch.equal(tensor, rows[root])


@pytest.mark.parametrize("size", [2, 3])
def test_reductions_and_broadcasts_are_those_of_torch(ranks_of, size):
    on(ranks_of, size, reductions)


def of_every_dtype(rank, size):
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
    ):
        tensor = torch.full((7,), rank + 1, dtype=dtype)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [3] * 7, dtype
    number = torch.tensor([complex(1, rank)])
    dist.all_reduce(number)
    assert number.item() == complex(2, 1)
    # Without a sum, but moved all the same.
    unsigned = torch.uint16, torch.uint32, torch.uint64
    for dtype in unsigned:
        number = torch.tensor(rank + 5, dtype=dtype)
        dist.broadcast(number, 1)
        assert number.item() == 6, dtype
        columns = torch.full((2, 4), rank + 5).to(dtype)[:, ::2]
        dist.broadcast(columns, 1)
        assert columns.tolist() == [[6, 6]] * 2, dtype
        mine, theirs = torch.full((3,), rank + 5).to(dtype), torch.zeros(3, dtype=dtype)
        splits = [1, 2] if rank == 0 else [2, 1]
        dist.all_to_all_single(theirs, mine, [1, 2] if rank == 0 else [2, 1], splits)
        assert theirs.tolist() == ([5, 6, 6] if rank == 0 else [5, 5, 6]), dtype
    for dtype in (torch.bool, *unsigned, torch.float8_e4m3fn, torch.complex64):
        tensor = torch.tensor([rank, 0, 1]).to(dtype)
        parts = [torch.empty_like(tensor) for _ in range(size)]
        dist.all_gather(parts, tensor)
        assert [part.to(torch.complex64)[0].real.item() for part in parts] == [0, 1], dtype


def test_every_dtype_that_gloo_moves_is_moved_and_more(ranks_of):
    on(ranks_of, 2, of_every_dtype)


def sparse_sum(rank, size):
    # Ranks have different numbers of elements, one of them twice.
    indices = torch.tensor([[0, rank + 1, 0][: rank + 1]])
    mine = torch.sparse_coo_tensor(indices, torch.ones(rank + 1, 2), (5, 2))
    total = mine.clone()
    dist.all_reduce(total)
    parts = [None] * size
    dist.all_gather_object(parts, mine.to_dense())
    assert torch.equal(total.to_dense(), sum(parts))
    with pytest.raises(ValueError, match="only SUM is defined"):
        dist.group.WORLD.allreduce([mine], dist.ReduceOp.MAX)


def test_sparse_tensors_of_different_numbers_of_elements_are_summed(ranks_of):
    on(ranks_of, 3, sparse_sum)


# -- parts of all ranks ----------------------------------------------------------------------------


def parts(rank, size):
    rows = [row(r, 4) for r in range(size)]
    whole = torch.empty(4 * size)
    all_gather_single(whole, row(rank, 4))
    assert torch.equal(whole, torch.cat(rows))

    if hasattr(dist, "gather_single"):  # It came with torch 2.14.
        at_root = torch.empty(size, 4) if rank == 1 % size else None
        dist.gather_single(row(rank, 4), at_root, dst=1 % size)
        assert at_root is None or torch.equal(at_root, torch.stack(rows))

    uneven = [torch.empty(r + 1) for r in range(size)]
    dist.all_gather(uneven, row(rank, rank + 1))
    assert all(torch.equal(part, row(r, r + 1)) for r, part in enumerate(uneven))

    mine = torch.empty(3)
    source = torch.cat([row(rank, 3) + r for r in range(size)])
    reduce_scatter_single(mine, source)
    torch.testing.assert_close(mine, sum(row(r, 3) + rank for r in range(size)))
    mine = torch.empty(rank + 1)
    dist.reduce_scatter(mine, [row(rank, r + 1) for r in range(size)])
    torch.testing.assert_close(mine, sum(row(r, rank + 1) for r in range(size)))

    # Rank r sends r + 1 rows to each rank, and so gets s + 1 rows from rank s.
    sent = row(rank, size * (rank + 1))
    got = torch.empty(sum(range(1, size + 1)))
    dist.all_to_all_single(got, sent, list(range(1, size + 1)), [rank + 1] * size)
    wanted = [row(s, size * (s + 1)).split(s + 1)[rank] for s in range(size)]
    assert torch.equal(got, torch.cat(wanted))

    gathered = [torch.empty(4) for _ in range(size)] if rank == 1 else None
    dist.gather(row(rank, 4), gathered, dst=1)
    assert rank != 1 or torch.equal(torch.stack(gathered), torch.stack(rows))
    dealt = torch.empty(4)
    dist.scatter(dealt, rows if rank == 1 else None, src=1)
    assert torch.equal(dealt, rows[rank])

    others = [torch.empty(2) for _ in range(size)]
    dist.all_to_all(others, [row(rank, 2) + r for r in range(size)])
    assert all(torch.equal(part, row(s, 2) + rank) for s, part in enumerate(others))


@pytest.mark.parametrize("size", [2, 3])
def test_parts_of_equal_and_different_sizes_arrive_where_they_belong(ranks_of, size):
    on(ranks_of, size, parts)


def coalesced(rank, size):
    tensors = [row(rank, 3), row(rank, 5)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    for tensor, numel in zip(tensors, (3, 5), strict=True):
        torch.testing.assert_close(tensor, sum(row(r, numel) for r in range(size)))
    with dist._coalescing_manager(device=torch.device("cpu")):
        for tensor in tensors:
            dist.broadcast(tensor, 0)
        dist.group.WORLD.allreduce_coalesced([torch.ones(1), torch.ones(2)])
    wholes, scattered = [torch.empty(size), torch.empty(2 * size)], [torch.empty(1), torch.empty(2)]
    with dist._coalescing_manager():
        for whole, numel in zip(wholes, (1, 2), strict=True):
            all_gather_single(whole, row(rank, numel))
    assert torch.equal(wholes[1], torch.cat([row(r, 2) for r in range(size)]))
    with dist._coalescing_manager():
        for part, whole in zip(scattered, wholes, strict=True):
            reduce_scatter_single(part, whole)
    assert torch.equal(scattered[1], size * row(rank, 2))


def test_coalesced_operations_give_what_single_ones_give(ranks_of):
    on(ranks_of, 2, coalesced)


def functionally(rank, size):
    everybody = dist.group.WORLD
    total = functional.all_reduce(row(rank, 4), "sum", everybody)
    torch.testing.assert_close(total.wait(), sum(row(r, 4) for r in range(size)))
    whole = functional.all_gather_tensor(row(rank, 4).view(2, 2), 1, everybody)
    wanted = torch.cat([row(r, 4).view(2, 2) for r in range(size)], 1)
    assert torch.equal(whole + 0, wanted)
    part = functional.reduce_scatter_tensor(torch.ones(size, 3) * (rank + 1), "avg", 0, everybody)
    torch.testing.assert_close(part + 0, torch.full((1, 3), (size + 1) / 2))
    swapped = functional.all_to_all_single(row(rank, size), None, None, everybody)
    assert (swapped + 0).tolist() == [100 * s + rank for s in range(size)]
    several = functional.all_reduce_coalesced([row(rank, 2), row(rank, 3)], "max", everybody)
    assert torch.equal(several[1] + 0, row(size - 1, 3))
    copied = functional.broadcast(row(rank, 2), 1, everybody)
    assert torch.equal(copied + 0, row(1, 2))


def test_functional_collectives_run_on_it(ranks_of):
    on(ranks_of, 2, functionally)


# -- between two ranks, and objects ----------------------------------------------------------------


def messages(rank, size):
    if rank == 0:
        dist.send(row(0, 3), 1, tag=7)
        dist.send(row(5, 3), 1, tag=8)
        late = torch.empty(3)
        assert dist.recv(late) == 1  # from whoever sends
        assert torch.equal(late, row(1, 3))
    else:
        second, first = torch.empty(3), torch.empty(3)
        dist.recv(second, 0, tag=8)
        dist.recv(first, 0, tag=7)
        assert torch.equal(first, row(0, 3)) and torch.equal(second, row(5, 3))
        dist.send(row(1, 3), 0)
    there, back = row(rank, 2), torch.empty(2)
    operations = [dist.P2POp(dist.isend, there, 1 - rank), dist.P2POp(dist.irecv, back, 1 - rank)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert torch.equal(back, row(1 - rank, 2))
    with pytest.raises(ValueError, match="tag must be in"):
        dist.send(there, 1 - rank, tag=-1)


def test_messages_are_matched_by_tag_and_the_source_is_told(ranks_of):
    on(ranks_of, 2, messages)


def objects(rank, size):
    told = [None] * size
    dist.all_gather_object(told, {"rank": rank})
    assert told == [{"rank": r} for r in range(size)]
    sent = ["a", rank] if rank == 1 else [None, None]
    dist.broadcast_object_list(sent, src=1)
    assert sent == ["a", 1]
    dealt = [None]
    dist.scatter_object_list(dealt, list(range(size)) if rank == 0 else None, src=0)
    assert dealt == [rank]
    gathered = [None] * size if rank == 0 else None
    dist.gather_object(rank, gathered, dst=0)
    assert rank != 0 or gathered == list(range(size))


def test_objects_travel(ranks_of):
    on(ranks_of, 3, objects)


# -- groups ----------------------------------------------------------------------------------------


def reversed_group(rank, size):
    order = list(reversed(range(size)))
    group = dist.new_group(order, sort_ranks=False)
    assert dist.get_rank(group) == order.index(rank)
    tensor = row(rank, 3)
    dist.broadcast(tensor, src=size - 1, group=group)
    assert torch.equal(tensor, row(size - 1, 3))
    whole = torch.empty(size, dtype=torch.int64)
    all_gather_single(whole, torch.tensor([rank]), group=group)
    assert whole.tolist() == order
    assert dist.get_rank(dist.new_group(order)) == rank  # torch sorts, unless it is told not to
    pair = dist.new_group([0, 2])
    if rank != 1:
        dist.all_reduce(tensor, group=pair)
        assert torch.equal(tensor, 2 * row(size - 1, 3))
    mine, _ = dist.new_subgroups_by_enumeration([[0], [1, 2]])
    assert dist.get_world_size(mine) == (1 if rank == 0 else 2)
    dist.destroy_process_group(mine)
    dist.barrier()


@pytest.mark.skipif(
    "sort_ranks" not in inspect.signature(dist.new_group).parameters,
    reason="this torch sorts the ranks of every new group",
)
def test_a_new_group_of_reversed_ranks_counts_them_backwards(ranks_of):
    on(ranks_of, 3, reversed_group)


def split_groups(rank, size):
    world = dist.group.WORLD
    mine = world.split_group([0, 2] if rank != 1 else [1], group_desc="columns")
    assert (mine.size(), mine.group_desc) == ((1, "columns") if rank == 1 else (2, "columns"))
    tensor = torch.tensor([rank])
    mine.allreduce([tensor]).wait()
    assert tensor.item() == (1 if rank == 1 else 2)
    assert world.split_group([0]) is None or rank == 0
    with pytest.raises(cl.UnsupportedOperation, match="initialise a new one of all ranks"):
        world.merge_remote_group()
    assert (world.rank(), world.size(), world.name()) == (rank, size, "chorusline")
    assert dist.get_backend() == "chorusline" and world.group.describe().is_open


def test_a_process_group_is_split(ranks_of):
    on(ranks_of, 3, split_groups)


# -- futures ---------------------------------------------------------------------------------------


def callbacks_in_order(rank, size):
    """Callbacks issue collectives of equal sizes: in another order on a rank, sums would mix."""
    futures = []

    def another_sum(number):
        def callback(future):
            tensor = future.value()[0] * (number + 1)
            inner = dist.all_reduce(tensor, async_op=True).get_future()
            return inner.then(lambda done: done.value()[0] + 1).wait()

        return callback

    for number in range(6):
        work = dist.all_reduce(torch.full((2,), float(number)), async_op=True)
        if rank == number % size:
            time.sleep(0.01)  # Here the sum is complete before the callback is there; elsewhere not
        futures.append(work.get_future().then(another_sum(number)))
        dist.barrier()
    for number, future in enumerate(futures):
        assert future.wait().tolist() == [size * size * number * (number + 1) + 1.0] * 2


def test_callbacks_that_issue_collectives_run_in_one_order_on_all_ranks(ranks_of):
    on(ranks_of, 3, callbacks_in_order)


def future_before_wait(rank, size):
    for _ in range(200):
        work = dist.all_reduce(torch.ones(1), async_op=True)
        future = work.get_future()
        assert work.wait() is True
        assert future.done() and work.is_completed() and work.is_success()
        assert future.value()[0].item() == size

    def fails(future):
        raise KeyError("mine")

    failed = dist.all_reduce(torch.ones(1), async_op=True).get_future().then(fails)
    with pytest.raises(KeyError, match="mine"):
        failed.wait()
    with pytest.raises(KeyError, match="mine"):
        failed.then(lambda future: future.value()).wait()


def test_a_future_is_complete_before_wait_returns_and_keeps_what_a_callback_raised(ranks_of):
    on(ranks_of, 2, future_before_wait)


def wait_beside_a_receive(rank, size, way):
    """Rank 0 ends a sum while a receive of its own, issued before, is still to come."""
    late, sum_ = torch.zeros(1), torch.ones(1)
    profiling = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    with profiling if way == "profiler" else contextlib.nullcontext():
        if rank == 0:
            receive = dist.irecv(late, 1)
            if way == "future":
                received = receive.get_future()
            work = dist.all_reduce(sum_, async_op=True)
            if way == "future":
                summed = work.get_future()
                summed.wait()
            work.wait()
            assert sum_.item() == size
            if way == "future":
                assert summed.done() and not received.done()
            dist.send(torch.ones(1), 1)
            receive.wait()
            assert late.item() == 7
        else:
            dist.all_reduce(sum_)
            dist.recv(torch.zeros(1), 0)
            dist.send(torch.full((1,), 7.0), 0)


@pytest.mark.parametrize("way", ["future", "profiler"])
def test_a_receive_that_is_still_to_come_holds_up_no_wait_for_a_later_work(ranks_of, way):
    on(ranks_of, 2, wait_beside_a_receive, way)


def completed_meanwhile(rank, size):
    """Another thread completes the future between two questions of this one."""
    work = dist.all_reduce(torch.ones(1), async_op=True)
    future = work.get_future()
    work._inner.wait()
    asked = []

    def done():
        asked.append(None)
        if len(asked) == 1:
            other = threading.Thread(target=work._complete, args=(None,))
            other.start()
            other.join()
            return False
        return torch.futures.Future.done(future)

    future.done = done
    work._complete(None)
    assert future.wait()[0].item() == size


def test_a_future_is_completed_once_by_two_threads(ranks_of):
    on(ranks_of, 1, completed_meanwhile)


def wait_in_a_callback_of_torchs(rank, size):
    """torch's C++ calls it in the thread that completes the last future."""
    if rank == 1:
        time.sleep(0.3)
    works = [dist.all_reduce(torch.ones(1), async_op=True) for _ in range(3)]
    all_of_them = torch.futures.collect_all([work.get_future() for work in works])
    waited = all_of_them.then(lambda _: [work.wait() for work in works])
    assert works[-1].wait() and waited.wait() == [True] * 3


def test_a_callback_of_torchs_may_wait_for_the_works_whose_futures_it_collects(ranks_of):
    on(ranks_of, 2, wait_in_a_callback_of_torchs)


def callback_without_a_stream(rank, size):
    """A GPU that has failed gives the thread of the callbacks no stream."""

    def completed(future):
        give_up_at = time.monotonic() + 10
        while not future.done():
            assert time.monotonic() < give_up_at
            time.sleep(0.01)
        return future

    def fails(devices):
        raise RuntimeError("the GPU has failed")

    future = dist.all_reduce(torch.ones(1), async_op=True).get_future()
    future.wait()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(future._callbacks, "streams", fails)
        failed = completed(future.then(lambda done: done.value()))
        work = dist.all_reduce(torch.ones(1), async_op=True)
        assert completed(work.get_future().then(lambda done: done.value()))
    with pytest.raises(RuntimeError, match="the GPU has failed"):
        failed.wait()
    assert completed(future.then(lambda done: done.value()[0])).wait().item() == size


def test_a_callback_that_gets_no_stream_fails_alone(ranks_of):
    on(ranks_of, 1, callback_without_a_stream)


def future_in_a_child(rank, size):
    """A child that is forked after the parent has completed futures completes its own."""

    def complete_one():
        dist.all_reduce(torch.ones(1), async_op=True).get_future().wait()

    complete_one()
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)  # A future that is never completed ends the child, too.
        try:
            dist.destroy_process_group()
            dist.init_process_group("chorusline", store=dist.HashStore(), rank=0, world_size=1)
            complete_one()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0


def test_futures_are_completed_in_a_forked_child(ranks_of):
    on(ranks_of, 1, future_in_a_child)


# -- deadlines -------------------------------------------------------------------------------------


def nobody_else_comes(rank, size, how):
    """Only rank 0 issues the operation. What it is told; the other rank is told the same."""
    began_at = time.monotonic()
    try:
        if how == "monitored_barrier":
            if rank == 0:
                dist.group.WORLD.monitored_barrier(timedelta(seconds=0.3), wait_all_ranks=True)
        elif how == "wait":
            if rank == 0:
                dist.all_reduce(torch.ones(1), async_op=True).wait(timedelta(seconds=0.3))
        else:
            dist.group.WORLD.set_timeout(timedelta(seconds=0.3))
            if rank == 0:
                dist.all_reduce(torch.ones(1))
        assert rank != 0
        while dist.group.WORLD.group.failure() is None and time.monotonic() - began_at < 10:
            time.sleep(0.01)
        return str(dist.group.WORLD.group.failure())
    except RuntimeError as error:  # as scripts written for torch catch it
        assert time.monotonic() - began_at < 5
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("monitored_barrier", "Ranks 1, 2 failed to pass monitoredBarrier in 300 ms"),
        ("set_timeout", "ranks [1, 2] did not arrive within 0.3 s"),
        ("wait", "was given up after wait()'s timeout of 0.3 s"),
    ],
)
def test_a_deadline_names_who_is_missing_and_ends_the_generation(ranks_of, how, told):
    for text in on(ranks_of, 3, nobody_else_comes, how):
        assert told in text


# -- beginnings ------------------------------------------------------------------------------------


def init_by(group, method, place):
    options = {"rank": group.rank, "world_size": group.size}
    if method == "env":
        host, port = place.split(":")
        os.environ |= {"MASTER_ADDR": host, "MASTER_PORT": port}
        os.environ |= {"RANK": str(group.rank), "WORLD_SIZE": str(group.size)}
        method, options = "env://", {}
    else:
        method = f"{method}://{place}"
    for _ in range(2):  # and again, in the same process
        dist.init_process_group("chorusline", init_method=method, **options)
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        dist.destroy_process_group()
        assert tensor.item() == group.size
        group.barrier().wait()


@pytest.mark.parametrize("method", ["file", "tcp", "env"])
def test_torchs_own_ways_to_meet_are_enough(ranks_of, tmp_path, unused_tcp_port, method):
    place = str(tmp_path / "store") if method == "file" else f"localhost:{unused_tcp_port}"
    ranks_of(2).run(init_by, method, place)


def test_options_of_another_backend_are_refused():
    with pytest.raises(TypeError, match="cannot use the options of other backends"):
        dist.init_process_group(
            "chorusline", store=dist.HashStore(), rank=0, world_size=1, pg_options=object()
        )
    dist.init_process_group(
        "chorusline", store=dist.HashStore(), rank=0, world_size=1, pg_options=Options()
    )
    dist.destroy_process_group()
