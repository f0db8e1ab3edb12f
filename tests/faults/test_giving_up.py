"""What every rank sees when one of them gives up, is interrupted, or leaves."""

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
    CollectiveError,
    GroupAborted,
    GroupClosed,
    PeerLost,
)
from tests.contracts.handle import finish
from tests.harness.ranks import GLOO, Rank, error_of, run_ranks, transports

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
        waits += [lambda work=work: finish(work) for work in works]
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


def receive_from_any_without_the_last(rank: Rank, served: bool) -> float:
    """The last rank closes: one of those that rank 0 first receives from."""
    group = rank.group()
    tensor = torch.zeros(3)
    if rank.rank == 2:
        rank.store.wait(["said/asked/0"], 60)
        group.close()
        rank.say("closed")
        return 0.0
    if rank.rank == 0:
        work = group.recv(tensor)
        if served:
            work.wait()
        rank.say("asked")
    elif served:
        group.send(torch.ones(3), 0).wait()
    rank.store.wait(["said/closed/2"], 60)
    if rank.transport == GLOO:
        time.sleep(3.5)  # Longer than a roll call, which would find that rank 2 does not answer.
    if rank.rank == 1:
        group.send(torch.full((3,), 2.0), 0).wait()
    else:
        (group.recv(tensor, 1) if served else work).wait()
    group.close()
    return float(tensor.sum())


@transports
@pytest.mark.parametrize("served", [True, False])
def test_a_rank_that_closes_takes_nothing_from_a_receive_that_others_can_serve(
    transport: str, served: bool, tmp_path: Path
) -> None:
    arguments = (receive_from_any_without_the_last, 3, tmp_path, transport, served)
    assert run_ranks(*arguments) == [6.0, 0.0, 0.0]


def receive_from_one_that_closes(rank: Rank) -> CollectiveError | None:
    """The first operation in flight on rank 0 is another receive, from a rank that stays."""
    group = rank.group()
    error: CollectiveError | None = None
    if rank.rank == 0:
        works = [group.recv(torch.zeros(3), peer) for peer in (2, 1)]
        rank.say("asked")
        error = error_of(works[1].wait)
        rank.say("over")
    if rank.rank == 1:
        rank.store.wait(["said/asked/0"], 60)
        group.close()
    rank.store.wait(["said/over/0"], 60)  # A process that ends would be named as one.
    group.close()
    return error


@transports
def test_a_receive_from_a_rank_that_closes_says_so(transport: str, tmp_path: Path) -> None:
    error, *_ = run_ranks(receive_from_one_that_closes, 3, tmp_path, transport)
    assert isinstance(error, PeerLost)
    assert error.ranks == [1]
    assert "closed the group" in str(error)


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


def close_slowly_in_an_operation(rank: Rank) -> list[CollectiveError | None]:
    """The store of rank 0 is slow to return from the line that says that it closed."""
    append = rank.store.append

    def append_slowly(key: Any, value: Any) -> None:
        append(key, value)
        time.sleep(1.2)  # Longer than two looks at the store.

    rank.store.append = append_slowly  # type: ignore[method-assign]
    group = rank.group()
    errors: list[CollectiveError | None] = []
    if rank.rank == 0:
        work = group.all_reduce(torch.ones(10))
        waiting = threading.Thread(target=lambda: errors.append(error_of(work.wait)))
        waiting.start()
        group.close()
        waiting.join(10)
        rank.say("closed")
        return errors
    rank.store.wait(["said/closed/0"], 60)
    time.sleep(1.2)
    tensor = torch.ones(3)
    (group.send(tensor, 2) if rank.rank == 1 else group.recv(tensor, 1)).wait()
    group.close()
    return errors


def test_a_rank_that_closes_in_an_operation_does_not_take_itself_for_lost(tmp_path: Path) -> None:
    errors, *others = run_ranks(close_slowly_in_an_operation, 3, tmp_path, GLOO)
    assert [type(error) for error in errors] == [GroupClosed]
    assert others == [[], []]


def message_with_a_rank_that_closes(rank: Rank, sends: bool) -> float:
    """The message ends, and rank 1 closes, while rank 0 looks what holds the message up."""
    set_key = rank.store.set

    def set_slowly(key: Any, value: Any) -> None:
        set_key(key, value)
        if "is at" in str(value):
            rank.say("looks")
            rank.store.wait(["said/closed/1"], 60)

    if rank.rank == 0:
        rank.store.set = set_slowly  # type: ignore[method-assign]
    group = rank.group()
    tensor = torch.full((3,), float(rank.rank))
    if rank.rank == 0:
        (group.send(tensor, 1) if sends else group.recv(tensor, 1)).wait()
        rank.store.wait(["said/closed/1"], 60)
        time.sleep(1.2)  # Longer than two looks at the store.
        group.send(tensor, 2).wait()
    elif rank.rank == 1:
        rank.store.wait(["said/looks/0"], 60)
        (group.recv(tensor, 0) if sends else group.send(tensor, 0)).wait()
    else:
        group.recv(tensor, 0).wait()
    group.close()
    if rank.rank == 1:
        rank.say("closed")
    return float(tensor.sum())


@pytest.mark.parametrize("sends", [True, False])
def test_a_peer_that_closes_after_its_last_message_has_taken_part_in_it(
    sends: bool, tmp_path: Path
) -> None:
    arguments = (message_with_a_rank_that_closes, 3, tmp_path, GLOO, sends)
    assert run_ranks(*arguments) == ([0.0] * 3 if sends else [3.0] * 3)
