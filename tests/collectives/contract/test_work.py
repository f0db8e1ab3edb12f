"""The handle of an operation: cancelled, failed, awaited; and groups used where they cannot be."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from chorusline.collectives.contract.errors import (
    CollectiveTimeout,
    GroupAborted,
    GroupClosed,
    name_ranks,
)
from chorusline.collectives.contract.work import Work
from chorusline.collectives.group import Group
from chorusline.collectives.stores.store import HashStore
from tests.harness.ranks import GLOO, SHARED_MEMORY, Rank, Ranks, error_of, run_ranks, transports


def cancel_one(rank: Rank) -> Any:
    group = rank.group()
    group.barrier().wait()
    work = group.all_reduce(torch.ones(3)) if rank.rank != 1 else None
    if rank.rank == 1:
        rank.store.wait(["said/cancelled/0"], 60)
        return error_of(lambda: group.barrier().wait())
    if rank.rank == 0:
        time.sleep(0.1)
        assert work is not None
        assert work.cancel()
        rank.say("cancelled")
    assert work is not None
    future = work.get_future()
    error = error_of(work.wait)
    assert future.done()
    with pytest.raises(GroupAborted):
        future.wait()
    with pytest.raises(GroupAborted):
        work.result()
    assert not work.cancel()
    return error


@transports
def test_cancel_ends_the_generation_and_says_who_and_where(transport: str, tmp_path: Path) -> None:
    for error in run_ranks(cancel_one, 3, tmp_path, transport):
        assert isinstance(error, GroupAborted)
        assert error.ranks == [0]
        assert "all_reduce #1 (3 float32) was cancelled at" in str(error)
        assert "test_work.py:" in str(error)


def miss_barriers(rank: Rank, wait_all_ranks: bool) -> Any:
    group = rank.group()
    if rank.rank in (1, 3):
        rank.store.wait(["said/over/0", "said/over/2"], 60)
        return None
    error = error_of(lambda: group.monitored_barrier(0.5, wait_all_ranks).wait())
    rank.say("over")
    return error


@transports
@pytest.mark.parametrize(("wait_all_ranks", "missing"), [(False, [1]), (True, [1, 3])])
def test_a_monitored_barrier_names_the_missing(
    transport: str, wait_all_ranks: bool, missing: list[int], tmp_path: Path
) -> None:
    errors = run_ranks(miss_barriers, 4, tmp_path, transport, wait_all_ranks)
    for error in errors[::2]:
        assert isinstance(error, CollectiveTimeout)
        assert error.ranks == missing
        assert f"{name_ranks(missing)} did not arrive" in str(error)
        assert "nothing" in error.whereabouts
        assert wait_all_ranks or "rank 3 " not in error.whereabouts


def wait_in_a_callback(rank: Rank) -> list[float]:
    """As PowerSGD does: the second collective is issued, and waited for, in a callback."""
    group = rank.group()
    tensors = [torch.ones(5), torch.ones(300_000), torch.ones(7)]
    first, second = (group.all_reduce(t) for t in tensors[:2])

    def callback(_: object) -> float:
        group.all_reduce(tensors[2]).wait()
        return float(tensors[2][0])

    chained = first.get_future().then(callback)
    first.wait()
    second.wait()
    return [chained.wait(), float(tensors[1][-1])]


def test_a_callback_may_wait_for_another_work_of_the_group(tmp_path: Path) -> None:
    assert run_ranks(wait_in_a_callback, 3, tmp_path) == [[3.0, 3.0]] * 3


def wait_in_a_callback_of_gloo(rank: Rank) -> str:
    with rank.group() as group:  # A process that ends without it may break the other's barrier.
        tensor = torch.ones(3)

        def callback(_: object) -> None:
            group.all_reduce(tensor).wait()

        chained = group.all_reduce(torch.ones(5)).get_future().then(callback)
        try:
            chained.wait()
        except RuntimeError as error:
            group.barrier().wait()
            return str(error)
        return ""


def test_where_a_callback_cannot_wait_it_is_told_instead_of_hanging(tmp_path: Path) -> None:
    for told in run_ranks(wait_in_a_callback_of_gloo, 2, tmp_path, GLOO):
        assert "a callback waits for all_reduce #1 (3 float32) in a thread that" in told


def wait_for_a_message_in_a_callback_of_gloo(rank: Rank) -> str:
    """For one that the thread of the callback would have to receive."""
    with rank.group(timeout_s=10) as group:
        peer = 1 - rank.rank
        first = group.recv(torch.zeros(3), peer)
        chained = first.get_future().then(lambda _: group.recv(torch.zeros(3), peer).wait())
        group.barrier().wait()
        for _ in range(2):
            group.send(torch.ones(3), peer)
        error = error_of(chained.wait, RuntimeError)
        group.barrier().wait()
        return str(error)


def test_a_callback_of_a_message_cannot_wait_for_the_next_one(tmp_path: Path) -> None:
    body = wait_for_a_message_in_a_callback_of_gloo
    for rank, told in enumerate(run_ranks(body, 2, tmp_path, GLOO)):
        assert f"a callback waits for recv from rank {1 - rank} (3 float32) in a thread" in told


def await_with_a_callback_that_raises(rank: Rank) -> list[Any]:
    group = rank.group(timeout_s=10)
    told: list[Any] = []
    threading.excepthook = lambda given: told.append(given.exc_type)
    if rank.rank == 1:
        rank.store.wait(["said/awaits/0"], 60)
        for _ in range(2):
            time.sleep(0.1)
            group.barrier().wait()
        return [ZeroDivisionError]
    first, second = group.barrier(), group.barrier()
    first.add_done_callback(lambda: 1 / 0)

    async def main() -> None:
        rank.say("awaits")
        await asyncio.wait_for(asyncio.gather(*map(awaited, (first, second))), 8)

    async def awaited(work: Any) -> None:
        await work

    asyncio.run(main())
    return told


@transports
def test_a_callback_that_raises_is_told_and_holds_up_nothing(
    transport: str, tmp_path: Path
) -> None:
    for told in run_ranks(await_with_a_callback_that_raises, 2, tmp_path, transport):
        assert told == [ZeroDivisionError]


def abort_with_a_callback(rank: Rank) -> bool:
    """Whether another thread could use the group while a callback of the aborted work ran."""
    group = rank.group()
    over = threading.Event()
    stuck: list[bool] = []

    def use() -> None:
        communicator: Any = group._communicator
        communicator.abort(GroupAborted(0, [0], "once more"))
        assert isinstance(error_of(lambda: group.barrier().wait()), GroupAborted)

    def call_back() -> None:
        user = threading.Thread(target=use, daemon=True)
        user.start()
        user.join(5)
        stuck.append(user.is_alive())
        over.set()

    if rank.rank == 0:
        work = group.barrier()
        work.add_done_callback(call_back)
        group.abort("over")
        assert over.wait(20)
        rank.say("over")
        return stuck == [False]
    rank.store.wait(["said/over/0"], 60)
    return True


@transports
def test_a_callback_of_an_aborted_work_holds_no_lock(transport: str, tmp_path: Path) -> None:
    assert run_ranks(abort_with_a_callback, 2, tmp_path, transport) == [True, True]


def issue_with_less_time(rank: Rank) -> str:
    with rank.group(timeout_s=60) as group:
        group.barrier().wait()
        if rank.rank == 1:
            rank.store.wait(["said/raised/0"], 50)
            return ""
        works = [group.all_reduce(torch.ones(3)), group.barrier(timeout_s=1)]
        began_at = time.monotonic()
        errors = [error_of(work.wait, CollectiveTimeout) for work in works]
        took_s = time.monotonic() - began_at
        rank.say("raised")
        assert took_s < 20
        assert [error.ranks for error in errors] == [[1], [1]]
        return str(errors[0])


@transports
def test_a_deadline_counts_while_an_operation_waits_for_one_with_more_time(
    transport: str, tmp_path: Path
) -> None:
    told, _ = run_ranks(issue_with_less_time, 2, tmp_path, transport)
    assert "barrier #2 in generation 0: rank 1 did not arrive within 1 s" in told


def deadlines_of_calls(group: Group) -> list[str]:
    """The operations whose deadline is not the one that their call gave."""
    one, whole, parts = torch.ones(2), torch.ones(4), [torch.ones(2), torch.ones(2)]
    uneven = [torch.ones(1), torch.ones(2)]
    mine, is_first, other = uneven[group.rank], group.rank == 0, 1 - group.rank
    has: dict[str, Any] = {"timeout_s": 17.0}
    works: list[Work] = [
        *(group.all_reduce(one, **has), group.reduce(one, 1, **has)),
        *(group.broadcast(one, 1, **has), group.barrier(**has), group.monitored_barrier(17.0)),
        *(group.reduce_scatter(one, whole, **has), group.reduce_scatter(one, parts, **has)),
        *(group.reduce_scatter(mine.clone(), uneven, **has), group.all_gather(whole, one, **has)),
        *(group.all_gather(parts, one, **has), group.all_gather(uneven, mine, **has)),
        group.gather(one, parts if is_first else None, **has),
        group.scatter(one, parts if is_first else None, **has),
        group.all_to_all(whole, whole.clone(), **has),
        *(group.send(one, other, **has), group.recv(one, other, **has)),
        *(group.broadcast_object_list([1], **has), group.all_gather_object(1, **has)),
        *(group.gather_object(1, **has), group.scatter_object_list([1, 2], **has)),
        *(group.send_object_list([1], other, **has), group.recv_object_list([1], other, **has)),
    ]
    for work in works:
        work.wait()
    return [str(work.operation) for work in works if work.operation.timeout_s != 17.0]


def test_every_operation_has_the_deadline_of_its_call(ranks_of: Any) -> None:
    assert ranks_of(2).run(deadlines_of_calls) == [[], []]


def miss_a_block(rank: Rank) -> Any:
    group = rank.group()
    if rank.rank == 1:
        rank.store.wait(["said/over/0"], 60)
        return None
    with group.coalesce(timeout_s=0.5) as work:
        group.all_reduce(torch.ones(3))
    error = error_of(work.wait)
    rank.say("over")
    return error


@transports
def test_the_operations_of_a_coalesced_block_have_its_deadline(
    transport: str, tmp_path: Path
) -> None:
    error, _ = run_ranks(miss_a_block, 2, tmp_path, transport)
    assert isinstance(error, CollectiveTimeout)
    assert (error.ranks, error.timeout_s) == ([1], 0.5)


def await_a_late_rank(rank: Rank) -> tuple[float, int]:
    """CPU seconds and turns of the loop while a peer lets it wait for half a second."""
    group = rank.group()

    async def main() -> tuple[float, int]:
        if rank.rank == 1:
            time.sleep(0.6)
        turns = 0

        async def tick() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0.01)
                turns += 1

        ticking = asyncio.create_task(tick())
        before = time.process_time()
        await group.all_reduce(torch.ones(3))
        spent = time.process_time() - before
        ticking.cancel()
        return spent, turns

    return asyncio.run(main())


@transports
def test_awaiting_a_late_rank_neither_blocks_nor_spins_the_loop(
    transport: str, tmp_path: Path
) -> None:
    (spent_s, turns), _ = run_ranks(await_a_late_rank, 2, tmp_path, transport)
    assert turns > 4, "blocked, it would turn once or twice; a loaded machine turns it seldom"
    assert spent_s < 0.2


def leave_works_alone(rank: Rank) -> list[float]:
    """Rank 1 waits for some works, which stops its timer, and never for the ones behind them."""
    group = rank.group()
    found = []
    for turn in range(20):
        first, whole, last = torch.ones(3), torch.ones(1 << 20), torch.ones(5)
        parts = torch.ones(2 * rank.size)
        works = [group.all_reduce(first)]
        if rank.rank == 1 and turn % 2:
            works[0].wait()
        works.append(group.all_reduce(whole))
        works.append(group.all_to_all(torch.empty_like(parts), parts))
        works.append(group.all_reduce(last))
        if rank.rank == 1:
            waiter = threading.Thread(target=works[turn % 2].wait)
            waiter.start()
            rank.store.wait([f"said/turn {turn}/0"], 60)
            waiter.join()
        else:
            for work in works:
                work.wait()
            rank.say(f"turn {turn}")
        works[-1].wait()
        found += [float(whole[-1]), float(last[-1])]
    return found


def test_works_that_a_rank_does_not_wait_for_hold_up_no_other_rank(tmp_path: Path) -> None:
    started = time.monotonic()
    assert run_ranks(leave_works_alone, 2, tmp_path) == [[2.0] * 40] * 2
    assert time.monotonic() - started < 40


# -- where it cannot be used -----------------------------------------------------------------------


def test_a_closed_group_says_so_at_once(alone: Group) -> None:
    done = alone.all_reduce(torch.ones(2))
    alone.close()
    with pytest.raises(GroupClosed, match=r"broadcast: this group .* is closed on this rank; make"):
        alone.broadcast(torch.ones(2))
    with pytest.raises(GroupClosed, match="all_gather_object: this group"):
        alone.all_gather_object(1)
    assert done.result().tolist() == [1, 1]


def fork_and_use(rank: Rank) -> str:
    group = rank.group()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            with group:  # Closing it here must not close it there.
                group.barrier()
        except RuntimeError as error:
            os.write(writer, str(error).encode())
        group.abort("nor may this abort it")
        os._exit(0)
    os.waitpid(child, 0)
    told = os.read(reader, 4000).decode()
    group.barrier().wait()
    return told


@transports
def test_a_fork_is_refused_and_leaves_the_group_alone(transport: str, tmp_path: Path) -> None:
    for told in run_ranks(fork_and_use, 2, tmp_path, transport):
        assert "barrier: this group belongs to process" in told
        assert "call Group.create after the fork" in told


def end_in_a_signal_handler(rank: Rank, ends: str, of_messages: bool) -> None:
    group = rank.group()
    communicator: Any = group._communicator
    queue = communicator._messages if of_messages else communicator._lane
    end = group.close if ends == "close" else lambda: group.abort("preempted")
    signal.signal(signal.SIGUSR1, lambda *_: end())
    # As between two lines of an operation.
    with queue.lock:
        signal.raise_signal(signal.SIGUSR1)
    error = error_of(group.barrier().wait if ends == "abort" else group.barrier)
    assert isinstance(error, GroupClosed if ends == "close" else GroupAborted)
    for work_queue in (communicator._messages, communicator._lane):
        give_up_at = time.monotonic() + 20
        while work_queue._end is None and time.monotonic() < give_up_at:
            time.sleep(0.01)
        assert work_queue._end is not None
    group.close()


@pytest.mark.parametrize("of_messages", [False, True], ids=["collectives", "messages"])
@pytest.mark.parametrize("ends", ["abort", "close"])
def test_a_signal_handler_may_end_a_group_within_an_operation(
    ends: str, of_messages: bool, tmp_path: Path
) -> None:
    with Ranks(end_in_a_signal_handler, 1, tmp_path, SHARED_MEMORY, ends, of_messages) as ranks:
        ranks.results(timeout_s=40)


def end_within_an_abort(rank: Rank, ends: str) -> None:
    group = rank.group()
    communicator: Any = group._communicator
    record = communicator._segment._record
    end = group.close if ends == "close" else lambda: group.abort("preempted")
    signal.signal(signal.SIGUSR1, lambda *_: end())
    exclude_others = record._exclude_others

    def interrupted() -> None:
        exclude_others()
        signal.raise_signal(signal.SIGUSR1)

    record._exclude_others = interrupted
    group.abort("over")
    assert ends == "close" or "over" in str(error_of(lambda: group.barrier().wait()))
    group.close()
    give_up_at = time.monotonic() + 20
    while record._descriptor >= 0 and time.monotonic() < give_up_at:
        time.sleep(0.01)
    assert record._descriptor < 0


@pytest.mark.parametrize("ends", ["abort", "close"])
def test_a_signal_handler_may_end_a_group_within_an_abort(ends: str, tmp_path: Path) -> None:
    with Ranks(end_within_an_abort, 1, tmp_path, SHARED_MEMORY, ends) as ranks:
        ranks.results(timeout_s=40)


def fork_in_flight(rank: Rank) -> list[str]:
    group = rank.group()
    told: list[str] = []
    tensor = torch.ones(1 << 20)
    if rank.rank == 0:
        reader, writer = os.pipe()
        works = [group.all_reduce(tensor), group.recv(torch.zeros(3), 1)]
        child = os.fork()
        if child == 0:

            async def main() -> None:
                await works[0]

            for work in works:
                for wait in (
                    work.wait,
                    work.is_completed,
                    lambda: asyncio.run(main()),
                    work.cancel,
                ):
                    error = error_of(wait, RuntimeError)
                    os.write(writer, f"{error}\n".encode())
            os._exit(0)
        os.waitpid(child, 0)
        told = os.read(reader, 10_000).decode().splitlines()
        rank.say("forked")
    else:
        rank.store.wait(["said/forked/0"], 60)
        works = [group.all_reduce(tensor), group.send(torch.ones(3), 0)]
    for work in works:
        work.wait()
    assert tensor[0] == rank.size
    return told


@transports
def test_a_work_in_flight_is_refused_in_a_fork(transport: str, tmp_path: Path) -> None:
    told, _ = run_ranks(fork_in_flight, 2, tmp_path, transport)
    assert len(told) == 8
    assert all("its group belongs to the process that issued it" in line for line in told)


def test_tensors_on_several_devices_are_refused_with_the_way_to_go(alone: Group) -> None:
    tensors = [torch.ones(2), torch.ones(2, device="meta")]
    with pytest.raises(ValueError, match=r"holds tensors on cpu, meta, but .* docs/collectives.md"):
        alone.all_reduce(tensors)  # type: ignore[arg-type]


def test_a_background_thread_that_could_not_start_is_started_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with Group.create(HashStore(), 0, 1) as group:
        communicator: Any = group._communicator
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuse)
            with pytest.raises(RuntimeError, match="new thread"):
                communicator._lane.call_background()
        communicator._lane.call_background()
        assert communicator._lane._thread.is_alive()
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuse)
            with pytest.raises(RuntimeError, match="new thread"):
                communicator._messages.call_background()


def issue_short_of_threads(rank: Rank, how: str) -> str:
    """No other rank may take this operation for the next one, or wait for it."""
    group = rank.group(timeout_s=10)
    group.barrier().wait()
    if rank.rank == 1:
        rank.store.wait(["said/refused/0"], 30)
        return str(error_of(lambda: group.all_reduce(torch.ones(1 << 22)).wait()))

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        if how == "abort":
            communicator: Any = group._communicator
            publish = communicator._roll_call.publish

            def publish_without_lock(error: Any) -> Any:
                assert not communicator._tensors._is_owned()
                return publish(error)

            patched.setattr(communicator._roll_call, "publish", publish_without_lock)
            group.abort("RuntimeError during a test: can't start new thread")
        else:
            with pytest.raises(RuntimeError, match="new thread"):
                if how == "recv":
                    group.recv(torch.zeros(3), 1)
                elif how == "send":
                    group.send(torch.zeros(3), 1)
                else:
                    group.all_reduce(torch.ones(1 << 22))
    rank.say("refused")
    return str(error_of(lambda: group.barrier().wait()))


@pytest.mark.parametrize(
    ("transport", "how"),
    [
        (SHARED_MEMORY, "all_reduce"),
        (SHARED_MEMORY, "recv"),
        *((GLOO, how) for how in ("send", "recv", "abort")),
    ],
)
def test_an_operation_that_was_refused_for_lack_of_threads_is_not_left_in_the_queue(
    transport: str, how: str, tmp_path: Path
) -> None:
    for told in run_ranks(issue_short_of_threads, 2, tmp_path, transport, how):
        assert "generation 0 was aborted by rank 0: " in told
        assert "can't start new thread" in told


def look_short_of_threads(rank: Rank) -> bool:
    group = rank.group()
    group.barrier().wait()
    if rank.rank == 1:
        rank.store.wait(["said/looked/0"], 30)
    work = group.all_reduce(torch.ones(3))
    if rank.rank == 0:

        def refuse(thread: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuse)
            assert not work.is_completed()
        rank.say("looked")
    return bool((work.wait() == 2).all())


def test_asking_for_the_end_of_a_work_needs_no_thread(tmp_path: Path) -> None:
    assert run_ranks(look_short_of_threads, 2, tmp_path) == [True, True]
