"""Messages and exchanges that cannot end well: who is told what, on both host transports.

What goes well is in the contract (contracts/group.py).
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from chorusline.collectives.contract.errors import (
    CollectiveMismatch,
    CollectiveTimeout,
    GroupAborted,
    GroupClosed,
    PeerLost,
)
from chorusline.collectives.group import Group
from tests.harness.ranks import GLOO, Body, Rank, Ranks, error_of, run_ranks, transports


def works_again(rank: Rank) -> None:
    """The same processes form the next generation."""
    with rank.group(generation=1) as group:
        tensor = torch.ones(10)
        group.all_reduce(tensor).wait()
        assert tensor.tolist() == [rank.size] * 10


def all_to_all_of_other_sizes(rank: Rank) -> None:
    """Rank 0 sends one element more to rank 2 than that expects."""
    with rank.group() as group:
        received = torch.full((6,), 7.0)
        to = [2, 2, 3] if rank.rank == 0 else [2, 2, 2]
        with pytest.raises(CollectiveMismatch) as caught:
            group.all_to_all(received, torch.zeros(sum(to)), [2, 2, 2], to).wait()
        assert caught.value.ranks == [0, 2]
        assert "rank 0 sends 3 elements to rank 2, which expects 2" in str(caught.value)
        assert received.tolist() == [7.0] * 6
    works_again(rank)


def other_roots(rank: Rank) -> None:
    with rank.group() as group:
        root = int(rank.rank == 2)
        output = torch.zeros(3, 2) if rank.rank == root else None
        with pytest.raises(CollectiveMismatch) as caught:
            group.gather(torch.zeros(2), output, root).wait()
        told = re.sub(r"#\d+", "#", str(caught.value))
        assert caught.value.ranks == [2]
        assert "ranks [0, 1] issued gather # (float32) to rank 0" in told
        assert "rank 2 issued gather # (float32) to rank 1" in told


def other_operations(rank: Rank) -> None:
    with rank.group() as group:
        tensor = torch.zeros(3, dtype=torch.complex64)
        with pytest.raises(CollectiveMismatch) as caught:
            if rank.rank == 1:
                group.reduce(tensor, 2).wait()
            else:
                group.all_reduce(tensor).wait()
        assert "reduce #0 (3 complex64) with SUM to rank 2" in str(caught.value)


def a_message_of_another_size(rank: Rank) -> None:
    """Rank 2 knows nothing of it, and is told all the same."""
    with rank.group() as group:
        tensor = torch.full((4,), 7.0)
        with pytest.raises(CollectiveMismatch) as caught:
            if rank.rank == 0:
                group.send(torch.zeros(5), 1, tag=2).wait()
            elif rank.rank == 1:
                group.recv(tensor, tag=2).wait()
            group.barrier().wait()
        assert caught.value.ranks == [0, 1]
        assert "rank 0 sent 5 float32 and rank 1 expects 4 float32" in str(caught.value)
        assert "recv from rank 0, tag 2 (4 float32)" in str(caught.value)
        assert tensor.tolist() == [7.0] * 4
    works_again(rank)


def a_message_that_does_not_come(rank: Rank) -> None:
    with rank.group() as group:
        if rank.rank == 1:
            started_at = time.monotonic()
            with pytest.raises(CollectiveTimeout) as caught:
                group.recv(torch.zeros(4), 0, timeout_s=0.5).wait()
            assert time.monotonic() - started_at < 2.5
        else:
            with pytest.raises(CollectiveTimeout) as caught:
                group.barrier().wait()
        assert caught.value.ranks == [0]
        assert "recv from rank 0 (4 float32)" in str(caught.value)
    works_again(rank)


def a_message_nobody_takes(rank: Rank) -> None:
    with rank.group() as group:
        with pytest.raises(CollectiveTimeout) as caught:
            if rank.rank == 0:
                group.send(torch.zeros(1_000_000), 2, timeout_s=0.5).wait()
            group.barrier().wait()
        assert caught.value.ranks == [2]
        assert "send to rank 2 (1000000 float32)" in str(caught.value)


def an_abort(rank: Rank) -> None:
    """Frees those that wait for a message, and leaves no thread in the transport."""
    group = rank.group()
    if rank.rank == 2:
        rank.store.wait([f"said/waiting/{other}" for other in range(2)])
        group.abort(ValueError("no more"))
    else:
        work = group.recv(torch.zeros(4), None if rank.rank else 2)
        rank.say("waiting")
        with pytest.raises(GroupAborted, match="no more"):
            work.wait()
        with pytest.raises(GroupAborted, match="no more"):
            group.send(torch.zeros(4), 2).wait()
    group.close()
    works_again(rank)


def a_close(rank: Rank) -> None:
    """Rank 1 closes; what it sent before is good, what it was still asked for is lost."""
    group = rank.group()
    if rank.rank == 1:
        work = group.send(torch.ones(10), 0)
        if group.backend == GLOO:
            work.wait()
        pending = group.recv(torch.zeros(10), 2)
        group.close()
        rank.say("closed")
        with pytest.raises(GroupClosed):
            pending.wait()
        with pytest.raises(GroupClosed):
            group.send(torch.ones(10), 0).wait()
    elif rank.rank == 0:
        tensor = torch.zeros(10)
        group.recv(tensor, 1).wait()
        assert tensor.tolist() == [1.0] * 10
        with pytest.raises(PeerLost) as caught:
            group.recv(tensor, 1).wait()
        assert caught.value.ranks == [1], caught.value
    else:
        rank.store.wait(["said/closed/1"])  # Else rank 1 may see this one close, and say so.
    group.close()


@transports
@pytest.mark.parametrize(
    "body",
    [
        all_to_all_of_other_sizes,
        other_roots,
        other_operations,
        a_message_of_another_size,
        a_message_that_does_not_come,
        a_message_nobody_takes,
        an_abort,
        a_close,
    ],
)
def test_what_cannot_end_well_is_told_to_all(body: Body, transport: str, tmp_path: Path) -> None:
    run_ranks(body, 3, tmp_path, transport)


def survivors(rank: Rank) -> None:
    group = rank.group()
    group.barrier().wait()
    if rank.rank == 1:
        rank.say("ready")
        time.sleep(60)
    work = group.recv(torch.zeros(4), 1) if rank.rank == 0 else group.barrier()
    rank.say("ready")
    with pytest.raises(PeerLost) as caught:
        work.wait()
    assert caught.value.ranks == [1]
    group.close()


@transports
def test_a_killed_sender_is_named_by_every_survivor(transport: str, tmp_path: Path) -> None:
    with Ranks(survivors, 3, tmp_path, transport) as ranks:
        ranks.wait_for("ready")
        ranks.signal(1, signal.SIGKILL)
        ranks.results(ranks=[0, 2], timeout_s=20)


def many_messages(rank: Rank) -> None:
    """All to all by hand, from many tasks of one loop, in an order of its own on each rank."""

    async def one(group: Group, peer: int, tag: int) -> None:
        into = torch.zeros(20_000)
        work = group.recv(into, peer, tag)
        await group.send(torch.full((20_000,), rank.rank + 10.0 * tag), peer, tag)
        await work
        assert into.tolist() == [peer + 10.0 * tag] * 20_000

    async def main() -> None:
        pairs = [(p, t) for p in range(rank.size) if p != rank.rank for t in range(5)]
        random.Random(rank.rank).shuffle(pairs)
        with rank.group() as group:
            await asyncio.gather(*(one(group, *pair) for pair in pairs))
            await group.barrier()

    asyncio.run(main())


def outlive_a_wait(rank: Rank) -> list[str]:
    """Rank 0 waits for rank 2, which never sends, and gives up after rank 1 has gone."""
    group = rank.group()
    group.barrier().wait()
    if rank.rank == 0:
        rank.say("ready")
        rank.store.wait(["rank 1 is gone"], 60)
        threading.Timer(0.3, group.abort, ["enough"]).start()
        with pytest.raises(GroupAborted):
            group.recv(torch.ones(3), 2).wait()
        give_up_at = time.monotonic() + 5
        while (left := message_threads()) and time.monotonic() < give_up_at:
            time.sleep(0.02)
        rank.say("over")
        return left
    if rank.rank == 1:
        rank.say("ready")
        time.sleep(600)
    rank.say("ready")
    os.kill(os.getpid(), signal.SIGSTOP)
    return []


def message_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if "_receive_all" in t.name]


def test_between_hosts_no_thread_stays_in_a_wait_when_it_is_over(tmp_path: Path) -> None:
    with Ranks(outlive_a_wait, 3, tmp_path, GLOO) as ranks:
        ranks.wait_for("ready")
        ranks.signal(1, signal.SIGKILL)
        ranks.store.set("rank 1 is gone", "")
        assert ranks.results(ranks=[0]) == [[]]


@transports
def test_messages_of_many_tags_cross_in_any_order(transport: str, tmp_path: Path) -> None:
    run_ranks(many_messages, 3, tmp_path, transport)


def asked_only(rank: Rank) -> None:
    """Nobody waits: asking is enough, and a long message moves on by itself."""
    with rank.group() as group:
        peer = 1 - rank.rank
        into = torch.zeros(500_000)
        works = [group.send(torch.full((500_000,), float(rank.rank)), peer), group.recv(into, peer)]
        give_up_at = time.monotonic() + 20
        while not all(work.is_completed() for work in works):
            assert time.monotonic() < give_up_at
            time.sleep(0.002)
        assert works[1].error() is None
        assert into.tolist() == [float(peer)] * 500_000
        group.barrier().wait()


@transports
def test_messages_move_without_being_waited_for(transport: str, tmp_path: Path) -> None:
    run_ranks(asked_only, 2, tmp_path, transport)


def a_message_beside_a_collective(rank: Rank) -> None:
    """Rank 1 is late for both, so two threads of rank 0 look whether it lives."""

    async def main() -> None:
        with rank.group(timeout_s=10) as group:
            into, tensor = torch.zeros(4), torch.ones(4)
            for number in range(50):
                if rank.rank == 1:
                    await asyncio.sleep(0.03)
                    message = group.send(torch.full((4,), float(number)), 0)
                else:
                    message = group.recv(into, 1)
                await asyncio.gather(message, group.all_reduce(tensor.fill_(1)))
                assert tensor.tolist() == [2.0] * 4
                assert rank.rank == 1 or into.tolist() == [float(number)] * 4

    asyncio.run(main())


@transports
def test_a_message_and_a_collective_are_awaited_together(transport: str, tmp_path: Path) -> None:
    run_ranks(a_message_beside_a_collective, 2, tmp_path, transport)


def a_message_waited_for_in_a_callback(rank: Rank) -> None:
    """The first message's callback runs in the thread that drives, which drives on within it."""
    group = rank.group(timeout_s=10)
    with group:
        group.barrier().wait()
        if rank.rank == 0:
            first, second = torch.zeros(4), torch.zeros(4)
            called = threading.Event()
            work = group.recv(first, 1, tag=1)

            def wait_for_another() -> None:
                group.recv(second, 1, tag=2).wait()
                called.set()

            work.add_done_callback(wait_for_another)
            work.wait()
            assert called.wait(10)
            assert (first.tolist(), second.tolist()) == ([1.0] * 4, [2.0] * 4)
        else:
            time.sleep(0.1)
            group.send(torch.ones(4), 0, tag=1).wait()
            time.sleep(0.1)
            group.send(torch.full((4,), 2.0), 0, tag=2).wait()
        group.barrier().wait()


def test_a_callback_of_a_message_waits_for_another_one(tmp_path: Path) -> None:
    run_ranks(a_message_waited_for_in_a_callback, 2, tmp_path)


def a_receive_that_cannot_be_written(rank: Rank) -> None:
    with rank.group() as group:
        tensor = torch.zeros(2, 3).t()
        if rank.rank == 1:
            rank.store.wait(["said/resized/0"], 60)
            work = group.send(torch.ones(6), 0)
            tensor = torch.zeros(1)
            work = group.recv(tensor, 0)
        else:
            work = group.recv(tensor, 1)
            tensor.resize_(0)
            rank.say("resized")
        # The thread that moves the message has the error itself, which may be this one.
        error_of(work.wait, RuntimeError, GroupAborted)
        error = error_of(work.wait)
        assert isinstance(error, GroupAborted)
        assert error.ranks == [0]
        assert "RuntimeError during the messages" in str(error)
    works_again(rank)


def test_a_message_that_cannot_be_written_ends_the_generation(tmp_path: Path) -> None:
    run_ranks(a_receive_that_cannot_be_written, 2, tmp_path)


def an_interrupt_within_a_message(rank: Rank) -> None:
    group = rank.group()
    if rank.rank == 0:
        messages = group._communicator._messages
        channel = messages._channel_from(1)
        skip = channel.skip_header

        def interrupted() -> None:
            skip()
            raise KeyboardInterrupt

        channel.skip_header = interrupted
        rank.store.wait(["said/sent/1"], 60)
        with pytest.raises(KeyboardInterrupt):
            group.recv(torch.zeros(4), 1)
    else:
        group.send(torch.ones(4), 0).wait()
        rank.say("sent")
    with pytest.raises(GroupAborted, match="KeyboardInterrupt during"):
        group.recv(torch.zeros(4), 1 - rank.rank).wait()
    group.close()
    works_again(rank)


def test_an_interrupt_within_a_message_ends_the_generation(tmp_path: Path) -> None:
    run_ranks(an_interrupt_within_a_message, 2, tmp_path)


def receive_among_other_bells(rank: Rank) -> None:
    group = rank.group()
    if rank.rank == 0:
        communicator: Any = group._communicator
        segment = communicator._segment
        began_at = time.monotonic()

        def ring(seen: int, slice_s: float) -> None:
            """As if another message came in each slice."""
            time.sleep(slice_s / 2)
            if time.monotonic() - began_at < 8:
                segment.ring_bell(0)

        segment.sleep_on_bell = ring
        with pytest.raises(CollectiveTimeout):
            group.recv(torch.zeros(4), 1, timeout_s=0.5).wait()
        assert time.monotonic() - began_at < 6
        rank.say("over")
    else:
        rank.store.wait(["said/over/0"], 60)
    group.close()


def test_a_deadline_holds_while_other_messages_come(tmp_path: Path) -> None:
    run_ranks(receive_among_other_bells, 2, tmp_path)
