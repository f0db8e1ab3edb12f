"""What every rank sees when one of them dies, stops, disagrees, gives up or leaves."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from collectives.contract.errors import (
    CollectiveError,
    CollectiveMismatch,
    CollectiveTimeout,
    GroupAborted,
    GroupClosed,
    PeerLost,
    StoreTimeout,
    UnsupportedOperation,
)
from collectives.contract.operation import ReduceOp
from collectives.contract.work import Work
from collectives.group import Group
from collectives.stores.store import HashStore
from tests.harness.ranks import GLOO, SHARED_MEMORY, Rank, Ranks, error_of, run_ranks, transports

PATIENCE_S = {SHARED_MEMORY: 2.0, GLOO: 8.0}
"""For all to know of a failure. Gloo's ranks ask each other through the store; 2.5 s to answer."""


def wait_by_polling(work: Work) -> None:
    while not work.is_completed():
        time.sleep(0.001)
    error = work.error()
    if error is not None:
        raise error


def wait_by_awaiting(work: Work) -> None:
    async def main() -> None:
        await work

    asyncio.run(main())


WAYS: dict[str, Callable[[Work], None]] = {
    "wait": lambda work: work.wait(),
    "await": wait_by_awaiting,
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
            assert f"all_reduce #1 ({numel} float32) in generation 0: ranks [2] are gone" in str(
                error
            )
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
            assert "ranks [2] did not arrive within 1 s; rank 2 " in str(error)
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


def test_ranks_that_try_again_meet_however_often_each_has_tried() -> None:
    """Rank 0 gives up twice, then all come; rank 2 is in the attempt that rank 0 gives up last."""
    store = HashStore()
    found: dict[int, float] = {}

    def join(rank: int, timeout_s: float) -> None:
        with Group.create(store, rank, 3, timeout_s=timeout_s) as group:
            tensor = torch.ones(3)
            group.all_reduce(tensor).wait()
            found[rank] = tensor.sum().item()

    with pytest.raises(StoreTimeout, match=r"ranks \[1, 2\] of 3 did not come") as caught:
        join(0, 0.2)
    assert "ranks that call again meet each other" in str(caught.value)
    patient = threading.Thread(target=join, args=(2, 20))
    patient.start()
    with pytest.raises(StoreTimeout, match=r"ranks \[1\] of 3 did not come"):
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
        rank.store.set(
            f"group/default/0/1/card/{rank.rank}",
            f'{{"host": "elsewhere", "pid": {os.getpid()}}}',
        )
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


# -- a disagreement ------------------------------------------------------------------------------

Issue = Callable[[Group, torch.Tensor], Work]


def reduce_scatter(group: Group, tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM) -> Work:
    return group.reduce_scatter(tensor[: tensor.numel() // group.size], tensor, op)


def all_gather(group: Group, tensor: torch.Tensor) -> Work:
    return group.all_gather(tensor, tensor[: tensor.numel() // group.size].clone())


ONES = torch.ones(12)

MISMATCHES: dict[str, tuple[Issue, torch.Tensor, Issue, torch.Tensor, str, str]] = {
    # What two ranks issue on which tensor, what the third does, and both sides as told.
    "operation": (
        lambda group, t: group.all_reduce(t),
        ONES,
        lambda group, t: group.broadcast(t, 1),
        ONES,
        "all_reduce #0 (12 float32) with SUM",
        "broadcast #0 (12 float32) from rank 1",
    ),
    "length": (
        lambda group, t: group.all_reduce(t),
        ONES,
        lambda group, t: group.all_reduce(t),
        torch.ones(9),
        "all_reduce #0 (12 float32) with SUM",
        "all_reduce #0 (9 float32) with SUM",
    ),
    "number of rounds": (
        lambda group, t: group.all_reduce(t),
        ONES,
        lambda group, t: group.all_reduce(t),
        torch.ones(5_000_000),
        "all_reduce #0 (12 float32) with SUM",
        "all_reduce #0 (5000000 float32) with SUM",
    ),
    "dtype": (
        lambda group, t: group.all_reduce(t),
        ONES,
        lambda group, t: group.all_reduce(t),
        ONES.double(),
        "all_reduce #0 (12 float32) with SUM",
        "all_reduce #0 (12 float64) with SUM",
    ),
    "root": (
        lambda group, t: group.broadcast(t, 0),
        ONES,
        lambda group, t: group.broadcast(t, 1),
        ONES,
        "broadcast #0 (12 float32) from rank 0",
        "broadcast #0 (12 float32) from rank 1",
    ),
    "reduce op": (
        reduce_scatter,
        ONES,
        lambda group, t: reduce_scatter(group, t, ReduceOp.MAX),
        ONES,
        "reduce_scatter #0 (12 float32) with SUM",
        "reduce_scatter #0 (12 float32) with MAX",
    ),
    "barrier": (
        lambda group, t: group.barrier(),
        ONES,
        all_gather,
        ONES,
        "barrier #0",
        "all_gather #0 (12 float32)",
    ),
}


def disagree(rank: Rank) -> list[Any]:
    """In every case rank 1 does something else. (error, whether the tensor is as it was)"""
    found = []
    for generation, name in enumerate(MISMATCHES):
        usual, usual_tensor, other, other_tensor, _, _ = MISMATCHES[name]
        issue, tensor = (other, other_tensor) if rank.rank == 1 else (usual, usual_tensor)
        ours = tensor.clone() * (rank.rank + 1)
        before = ours.clone()
        with rank.group(generation=generation) as group:
            error = error_of(lambda issue=issue, group=group, ours=ours: issue(group, ours).wait())
        found.append((error, torch.equal(ours, before)))
    return found


@transports
def test_ranks_that_disagree_are_told_both_sides_and_keep_their_tensors(
    transport: str, tmp_path: Path
) -> None:
    by_rank = run_ranks(disagree, 3, tmp_path, transport)
    for case, name in enumerate(MISMATCHES):
        usual, other = MISMATCHES[name][-2:]
        for found in by_rank:
            error, is_unchanged = found[case]
            assert isinstance(error, CollectiveMismatch), (name, error)
            assert error.ranks == [1], name
            assert f"ranks [0, 2] issued {usual}, ranks [1] issued {other}" in str(error)
            assert is_unchanged, name
            assert error.args == by_rank[0][case][0].args


@transports
def test_of_two_ranks_that_disagree_both_are_named(transport: str, tmp_path: Path) -> None:
    for found in run_ranks(disagree, 2, tmp_path, transport):
        for error, is_unchanged in found:
            assert isinstance(error, CollectiveMismatch)
            assert error.ranks == [0, 1]
            assert is_unchanged


# -- giving up -----------------------------------------------------------------------------------


def explode() -> None:
    raise ValueError("no more")


def abort_while_all_wait(rank: Rank, aborting_rank_waits: bool) -> Any:
    """Rank 0 aborts, from a thread. Each rank waits in two threads and in a task."""
    group = rank.group(timeout_s=60)
    group.barrier().wait()
    aborts = rank.rank == 0
    errors: list[CollectiveError | None] = []
    threads: list[threading.Thread] = []
    if not aborts or aborting_rank_waits:
        # Rank 2 does not issue these before it is over, so nobody can finish.
        works = [group.all_reduce(torch.ones(n)) for n in (10, 500_000) if rank.rank != 2]
        waits = [work.wait for work in works]
        waits += [lambda work=work: wait_by_awaiting(work) for work in works]
        for wait in waits:
            waiting = threading.Thread(target=lambda wait=wait: errors.append(error_of(wait)))
            waiting.start()
            threads.append(waiting)
    rank.say("waiting")
    aborted_at = 0.0
    if aborts:
        rank.store.wait([f"said/waiting/{r}" for r in range(rank.size)], 60)
        time.sleep(0.05)
        try:
            explode()
        except ValueError as error:
            aborted_at = time.monotonic()
            group.abort(error)
        rank.say("aborted")
    rank.store.wait(["said/aborted/0"], 60)
    for thread in threads:
        thread.join(30)
    freed_at = time.monotonic()
    later = error_of(lambda: group.barrier().wait())
    group.close()
    return errors, later, aborted_at, freed_at


@transports
@pytest.mark.parametrize("aborting_rank_waits", [True, False])
def test_abort_frees_every_waiter_at_once_and_says_where_it_came_from(
    transport: str, aborting_rank_waits: bool, tmp_path: Path
) -> None:
    results = run_ranks(abort_while_all_wait, 3, tmp_path, transport, aborting_rank_waits)
    aborted_at = results[0][2]
    for rank, (errors, later, _, freed_at) in enumerate(results):
        assert len(errors) == (0 if rank == 2 or (rank == 0 and not aborting_rank_waits) else 4)
        for error in (*errors, later):
            assert isinstance(error, GroupAborted)
            assert error.ranks == [0]
            assert error.reason == "ValueError: no more"
            assert "in explode" in error.traceback
        assert freed_at - aborted_at < 1.5


def cancel_a_task(rank: Rank) -> Any:
    group = rank.group()
    if rank.rank == 0:

        async def main() -> None:
            work = group.all_reduce(torch.ones(10))
            rank.store.wait(["said/waiting/1"], 60)
            async with asyncio.timeout(0.05):
                await work

        with pytest.raises(TimeoutError):
            asyncio.run(main())
        error = error_of(lambda: group.barrier().wait())
    elif rank.rank == 1:
        work = group.all_reduce(torch.ones(10))
        rank.say("waiting")
        error = error_of(work.wait)
    else:
        rank.store.wait(["said/waiting/1"], 60)
        time.sleep(0.3)
        error = error_of(lambda: group.all_reduce(torch.ones(10)).wait())
    group.close()
    return error


@transports
def test_a_cancelled_task_ends_the_generation_for_all(transport: str, tmp_path: Path) -> None:
    for error in run_ranks(cancel_a_task, 3, tmp_path, transport):
        assert isinstance(error, GroupAborted)
        assert error.ranks == [0]
        assert "the task that awaited all_reduce #0 (10 float32) was cancelled" in str(error)


def interrupt_a_wait(rank: Rank, another_thread_waits: bool) -> Any:
    """Rank 0 gets SIGINT in wait(), perhaps while another of its threads drives."""
    group = rank.group()
    if rank.rank != 0:
        work = group.all_reduce(torch.ones(500_000)) if rank.rank == 1 else group.barrier()
        return error_of(work.wait) if rank.rank == 1 else None
    signal.signal(signal.SIGINT, signal.default_int_handler)
    works = [group.all_reduce(torch.ones(500_000)) for _ in range(2)]
    thread = threading.Thread(target=lambda: error_of(works[0].wait), daemon=True)
    if another_thread_waits:
        thread.start()
        time.sleep(0.05)
    interrupt = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        works[1].wait()
    return error_of(works[0].wait)


def idle_or_interrupted(rank: Rank, another_thread_waits: bool) -> Any:
    """As above, with the last rank alive and idle."""
    if rank.rank == 2:
        rank.group()
        rank.store.wait(["said/done/0", "said/done/1"], 60)
        return None
    error = interrupt_a_wait(rank, another_thread_waits)
    rank.say("done")
    return error


@transports
@pytest.mark.parametrize("another_thread_waits", [True, False])
def test_an_interrupt_in_wait_frees_the_other_ranks(
    transport: str, another_thread_waits: bool, tmp_path: Path
) -> None:
    arguments = (idle_or_interrupted, 3, tmp_path, transport, another_thread_waits)
    for error in run_ranks(*arguments)[:2]:
        assert isinstance(error, GroupAborted)
        assert error.ranks == [0]
        assert "KeyboardInterrupt during all_reduce" in str(error)


# -- leaving -------------------------------------------------------------------------------------


def leave_early(rank: Rank, with_work_pending: bool) -> Any:
    group = rank.group()
    group.barrier().wait()
    if rank.rank == 0:
        work = group.all_reduce(torch.ones(3_000_000)) if with_work_pending else None
        rank.store.wait(["said/waiting/1", "said/waiting/2"], 60)
        group.close()
        return error_of(work.wait if work is not None else lambda: group.barrier().wait())
    if rank.rank == 1:
        work = group.all_reduce(torch.ones(3_000_000))
        rank.say("waiting")
        error = error_of(work.wait)
    else:
        rank.say("waiting")
        rank.store.wait(["said/over/1"], 60)
        error = error_of(lambda: group.all_reduce(torch.ones(3_000_000)).wait())
    rank.say("over")
    group.close()
    return error


@transports
@pytest.mark.parametrize("with_work_pending", [True, False])
def test_a_rank_that_closes_early_is_lost_to_those_who_wait(
    transport: str, with_work_pending: bool, tmp_path: Path
) -> None:
    closer, *others = run_ranks(leave_early, 3, tmp_path, transport, with_work_pending)
    assert isinstance(closer, GroupClosed)
    assert "is closed on this rank" in str(closer)
    for error in others:
        assert isinstance(error, PeerLost)
        assert error.ranks == [0]
        assert "closed the group" in str(error)


def close_with_work_done(rank: Rank) -> list[float]:
    """Close at once; results that only this rank still holds must reach the others."""
    tensor = torch.ones(100)
    group = rank.group()
    works = [group.all_reduce(tensor) for _ in range(3)]
    time.sleep(0.02 * rank.rank)
    works[-1].wait()
    group.close()
    works[0].wait()
    return [tensor[0].item()]


@transports
def test_closing_after_the_last_operation_takes_nothing_from_others(
    transport: str, tmp_path: Path
) -> None:
    for generation in range(5):
        folder = tmp_path / str(generation)
        folder.mkdir()
        assert run_ranks(close_with_work_done, 3, folder, transport) == [[27.0]] * 3


def close_while_another_thread_waits(rank: Rank) -> Any:
    group = rank.group()
    errors: list[CollectiveError | None] = []
    if rank.rank == 0:
        work = group.all_reduce(torch.ones(10))
        waiting = threading.Thread(target=lambda: errors.append(error_of(work.wait)))
        waiting.start()
        time.sleep(0.1)
        group.close()
        group.close()
        group.abort("too late, and ignored")
        waiting.join(10)
        rank.say("closed")
    else:
        rank.store.wait(["said/closed/0"], 60)
        group.close()
    return errors


@transports
def test_closing_frees_the_threads_that_wait(transport: str, tmp_path: Path) -> None:
    errors, _ = run_ranks(close_while_another_thread_waits, 2, tmp_path, transport)
    assert [type(error) for error in errors] == [GroupClosed]


# -- mistakes of one caller, told before anything is issued ----------------------------------------


def test_a_tensor_on_another_device_is_refused_with_the_remedy(alone: Group) -> None:
    text = r"tensor is on meta, but this group moves tensors on cpu; call .to\('cpu'\) first"
    with pytest.raises(ValueError, match=text):
        alone.all_reduce(torch.ones(3, device="meta"))


def test_a_result_with_several_elements_in_one_place_is_refused(alone: Group) -> None:
    text = r"tensor of shape \(3,\) and strides \(0,\) has several elements in one place.*\.clone"
    with pytest.raises(ValueError, match=text):
        alone.all_reduce(torch.ones(()).expand(3))


def test_a_dtype_outside_the_contract_is_refused_with_the_list(alone: Group) -> None:
    text = r"tensor of dtype torch.uint16 is not supported by the shared-memory backend: use one of"
    with pytest.raises(UnsupportedOperation, match=text):
        alone.all_reduce(torch.ones(3, dtype=torch.uint16))


def test_something_else_than_a_tensor_is_refused(alone: Group) -> None:
    with pytest.raises(TypeError, match=r"tensor must be a torch.Tensor, a numpy.*, got list"):
        alone.all_reduce([1.0])


@pytest.mark.parametrize("root", [-1, 1])
def test_a_root_out_of_range_is_refused(alone: Group, root: int) -> None:
    with pytest.raises(ValueError, match=rf"root must be a rank in \[0, 1\), got {root}"):
        alone.broadcast(torch.ones(3), root)


def test_parts_that_do_not_add_up_are_refused_with_the_numbers(alone: Group) -> None:
    text = r"input has 4 elements, output 3; with 1 ranks input must have 1 \* 3 = 3"
    with pytest.raises(ValueError, match=text):
        alone.reduce_scatter(torch.ones(3), torch.ones(4))
    text = r"all_gather: output is torch.float64 but input is torch.float32"
    with pytest.raises(ValueError, match=text):
        alone.all_gather(torch.ones(3).double(), torch.ones(3))


@pytest.mark.parametrize("timeout_s", [0, -1.5])
def test_a_deadline_in_the_past_is_refused(alone: Group, timeout_s: float) -> None:
    with pytest.raises(ValueError, match=rf"timeout_s must be positive, got {timeout_s}"):
        alone.barrier(timeout_s=timeout_s)
    assert alone.statistics.total_operations() == 0


def test_impossible_groups_are_refused() -> None:
    store = HashStore()
    with pytest.raises(ValueError, match="size must be at least 1, got 0"):
        Group.create(store, 0, 0)
    with pytest.raises(ValueError, match=r"rank must be in \[0, 2\), got 2"):
        Group.create(store, 2, 2)
    with pytest.raises(ValueError, match="timeout_s must be positive, got 0"):
        Group.create(store, 0, 1, timeout_s=0)
    with pytest.raises(ValueError, match="device must be a cpu or cuda device, got meta"):
        Group.create(store, 0, 1, "meta")
