"""What a GPU may get wrong when ranks are lost, on a stand-in: no wrong result, no hang, no leak.

Kernels that are stopped run on here and post garbage, as NCCL's do; an abort takes as long as it
likes; the first message between two ranks blocks the thread that launches it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence

import pytest
import torch

import chorusline as cl
from chorusline.collectives.contract.errors import (
    CollectiveTimeout,
    GroupAborted,
    PeerLost,
    UnsupportedOperation,
)
from chorusline.collectives.torch_backend.torch_work import TorchWork
from chorusline.runtime.process.agreement import Vote, check_votes, vote_numel
from chorusline.runtime.process.leftovers import LeftoverVote
from chorusline.runtime.zero.ballot import Ballot, ShardedVote
from tests.collectives.contract.test_work import abort_with_a_callback, miss_barriers
from tests.harness.ranks import Rank, error_of
from tests.harness.stand_in_gpu import nccl, streams
from tests.harness.stand_in_gpu.ranks import StandInRanks, needs_stand_in

LOST = "driver: rank 1 is gone"


def lose_rank_1_soon(group: cl.Group) -> None:
    """As the control loop of a worker does it, in its own thread."""
    error = GroupAborted(group.generation, [1], LOST)
    threading.Timer(0.3, lambda: group.abort(error)).start()


# -- the host reads nothing that was stopped ---------------------------------------------------


def hold_a_ballot(rank: Rank, step: int) -> None:
    with rank.group() as group:
        group.barrier().wait()
        ballot = Ballot(group, 1, counts_samples=False)
        vote = Vote(LeftoverVote(True), has_next=True, used=[True] * 3, weight=None, stop=False)
        sharded = ShardedVote(step, vote, add_squared_norm=None, loss_scale=0.0, options=[0.1])
        if rank.rank == 1:
            rank.store.wait(["said/raised/0"], 30)
            return
        lose_rank_1_soon(group)
        with pytest.raises(GroupAborted, match=LOST):
            ballot.hold(sharded)
        rank.say("raised")


@needs_stand_in
@pytest.mark.parametrize("step", [0, 5])
def test_a_ballot_that_was_stopped_is_no_outcome(step: int) -> None:
    with StandInRanks(2) as ranks:
        ranks.run(hold_a_ballot, step)


def go_backward(rank: Rank) -> None:
    with rank.group() as group:
        torch.manual_seed(0)
        model = cl.DistributedDataParallel(torch.nn.Linear(4, 2).to(group.device), group)
        x = torch.ones(8, 4).to(group.device)
        model(x).sum().backward()
        if rank.rank == 1:
            rank.store.wait(["said/raised/0"], 30)
            return
        loss = model(x).sum()
        lose_rank_1_soon(group)
        with pytest.raises(GroupAborted, match=LOST):
            loss.backward()
        rank.say("raised")


@needs_stand_in
def test_a_backward_pass_whose_sums_were_stopped_does_not_go_through() -> None:
    with StandInRanks(2) as ranks:
        ranks.run(go_backward)


def read_objects(rank: Rank) -> None:
    with rank.group() as group:
        group.barrier().wait()
        if rank.rank == 1:
            rank.store.wait(["said/raised/0"], 30)
            return
        lose_rank_1_soon(group)
        with pytest.raises(GroupAborted, match=LOST):
            group.all_gather_object("mine").wait()
        rank.say("raised")


@needs_stand_in
def test_objects_whose_lengths_were_stopped_are_not_unpickled() -> None:
    with StandInRanks(2) as ranks:
        ranks.run(read_objects)


def norm_forward(rank: Rank) -> None:
    with rank.group() as group:
        net = torch.nn.Sequential(torch.nn.Linear(6, 8), cl.SyncBatchNorm(8)).to(group.device)
        model = cl.DistributedDataParallel(net, group)
        x = torch.arange(24.0).view(4, 6).to(group.device)
        model(x).sum().backward()
        if rank.rank == 1:
            rank.store.wait(["said/raised/0"], 30)
            return
        lose_rank_1_soon(group)
        loss = model(x).sum()
        with pytest.raises(GroupAborted, match=LOST):
            loss.backward()
        with pytest.raises(GroupAborted, match=LOST):  # One value: the host reads the count.
            model(x[:1])
        rank.say("raised")


@needs_stand_in
def test_statistics_that_were_stopped_make_no_gradients() -> None:
    with StandInRanks(2) as ranks:
        ranks.run(norm_forward)


def await_garbage(rank: Rank, late_s: float) -> str:
    """Rank 0 gives up early: its kernel lets rank 1's complete, on garbage."""
    group = rank.group()
    group.barrier().wait()
    if rank.rank == 2:
        rank.store.wait(["said/raised/0", "said/raised/1"], 30)
        return "late on purpose"
    tensor = torch.ones(1000, device=group.device)
    if rank.rank == 1:
        time.sleep(late_s)
    work = group.all_reduce(tensor, timeout_s=0.6 if rank.rank == 0 else 20)

    async def wait() -> None:
        await work

    try:
        asyncio.run(wait())
    except (CollectiveTimeout, GroupAborted) as error:
        rank.say("raised")
        return type(error).__name__
    return f"went through, with {tensor[:2].tolist()}"


@needs_stand_in
@pytest.mark.parametrize("late_s", [0.0, 1.5])
def test_a_kernel_that_completes_because_another_rank_gave_up_is_no_success(late_s: float) -> None:
    with StandInRanks(3) as ranks:
        found = ranks.run(await_garbage, late_s)
    assert found == ["CollectiveTimeout", "CollectiveTimeout", "late on purpose"]


def test_a_vector_without_every_vote_is_no_agreement() -> None:
    """Zeros are what a stopped collective leaves most often."""
    store = cl.HashStore()
    for total in ([0.0] * vote_numel(1, 3), [77.0] * vote_numel(1, 3)):
        with cl.Group.create(store, 0, 1) as group:
            with pytest.raises(GroupAborted, match="votes of 1 ranks, although its sum went"):
                check_votes(total, group)
    vote = Vote(LeftoverVote(False), has_next=False, used=[False] * 3, weight=None, stop=False)
    with cl.Group.create(store, 0, 1) as group:
        check_votes(vote.numbers(0, 1), group)


# -- nothing hangs -----------------------------------------------------------------------------


def send_to_nobody(rank: Rank) -> float:
    """The first messages between two ranks connect them, inside the launch."""
    group = rank.group()
    group.barrier().wait()
    if rank.rank == 1:
        rank.store.wait(["said/raised/0"], 60)
        return 0.0
    began_at = time.monotonic()
    outputs = [torch.zeros(3, device=group.device) for _ in range(2)]
    inputs = [torch.ones(3, device=group.device) for _ in range(2)]
    with pytest.raises(CollectiveTimeout, match=r"all_to_all #1 .*within 1 s") as caught:
        group.all_to_all(outputs, inputs, timeout_s=1).wait_on_host()
    assert caught.value.ranks == [1]
    rank.say("raised")
    return time.monotonic() - began_at


@needs_stand_in
def test_the_deadline_holds_for_a_launch_that_connects() -> None:
    with StandInRanks(2) as ranks:
        took_s, _ = ranks.run(send_to_nobody)
    assert took_s < 12, "1 s, the looks at the store, and a second for the launch to return"


def read_in_a_callback(rank: Rank, coalesces: bool) -> list[float]:
    """The program's stream waits for an operation that rank 1 never issues."""
    with rank.group() as group:
        tensor = torch.ones(3, device=group.device)
        group.barrier().wait_on_host()
        raised, read = threading.Event(), threading.Event()
        sums: list[float] = []

        def look(future: torch.futures.Future[list[torch.Tensor]]) -> None:
            sums.append(tensor.sum().item())
            read.set()
            assert raised.wait(20)

        streams.launch(lambda: time.sleep(0.2))  # The sum ends after the next lines.
        with group.coalesce() if coalesces else contextlib.nullcontext() as block:
            work = group.all_reduce(tensor)
        chained = (block or work).get_future().then(look)
        if rank.rank == 0:
            late = group.all_reduce(torch.ones(3, device=group.device), timeout_s=2)
            late.wait()
            with pytest.raises(CollectiveTimeout, match=r"all_reduce #2 .*within 2 s"):
                late.wait_on_host()
            rank.say("raised")
        rank.store.wait(["said/raised/0"], 30)
        assert read.wait(20)
        raised.set()
        chained.wait()
        return sums


@needs_stand_in
@pytest.mark.parametrize("coalesces", [False, True])
def test_a_futures_callback_that_reads_a_tensor_keeps_no_deadline(coalesces: bool) -> None:
    with StandInRanks(2) as ranks:
        assert ranks.run(read_in_a_callback, coalesces) == [[6.0]] * 2


def ask_for_a_future_without_streams(rank: Rank, aborts: bool) -> None:
    """The GPU of rank 0 has failed, and makes no stream any more. aborts: rank 1 does."""
    with rank.group() as group, pytest.MonkeyPatch.context() as patch:
        group.barrier().wait_on_host()
        if rank.rank == 1:
            rank.store.wait(["said/asked/0"], 30)
            if aborts:
                group.abort("no more")
            else:
                group.all_reduce(torch.ones(3, device=group.device))
            rank.store.wait(["said/raised/0"], 30)
            return
        future = group.all_reduce(torch.ones(3, device=group.device)).get_future()
        patch.setattr(torch.cuda, "Stream", lambda *_: fail("the GPU has failed"))
        rank.say("asked")
        give_up_at = time.monotonic() + 20
        while not future.done() and time.monotonic() < give_up_at:
            time.sleep(0.01)
        assert future.done()
        with pytest.raises(Exception, match="no more" if aborts else "the GPU has failed"):
            future.value()
        rank.say("raised")


@needs_stand_in
@pytest.mark.parametrize("aborts", [True, False])
def test_a_future_ends_although_its_callbacks_get_no_stream(aborts: bool) -> None:
    with StandInRanks(2) as ranks:
        ranks.run(ask_for_a_future_without_streams, aborts)


def fail(text: str) -> None:
    raise RuntimeError(text)


def call_back_on_the_device(rank: Rank) -> list[torch.device]:
    """The device that the thread of the callbacks chooses: the stand-in has only one."""
    chosen: list[torch.device] = []
    with rank.group() as group, pytest.MonkeyPatch.context() as patch:
        choose = torch.cuda.set_device

        def set_device(device: torch.device) -> None:
            if "callbacks" in threading.current_thread().name:
                chosen.append(device)
            choose(device)

        patch.setattr(torch.cuda, "set_device", set_device)
        streams.launch(lambda: time.sleep(1))  # The future is asked for before the sum ends.
        work = group.all_reduce(torch.ones(3, device=group.device))
        work.get_future().then(lambda _: None).wait()
        for _ in range(1000):
            if chosen:
                break
            time.sleep(0.01)
        return chosen


@needs_stand_in
def test_the_thread_of_callbacks_chooses_the_groups_gpu() -> None:
    with StandInRanks(2) as ranks:
        assert ranks.run(call_back_on_the_device) == [[torch.device("cuda", 0)]] * 2


def block_with_nobody(rank: Rank) -> None:
    with rank.group() as group:
        if rank.rank == 0:
            with group.coalesce() as work:
                group.all_reduce(torch.ones(3, device=group.device), timeout_s=2)
                group.all_reduce(torch.ones(5, device=group.device))
            with pytest.raises(CollectiveTimeout, match=r"all_reduce #0 .*within 2 s"):
                work.wait_on_host()
            rank.say("raised")
        rank.store.wait(["said/raised/0"], 30)


@needs_stand_in
def test_each_deadline_in_a_coalesced_block_holds() -> None:
    with StandInRanks(2) as ranks:
        ranks.run(block_with_nobody)


@needs_stand_in
@pytest.mark.parametrize(("wait_all_ranks", "missing"), [(False, [1]), (True, [1, 3])])
def test_a_monitored_barrier_of_nccl_names_the_missing_from_wait(
    wait_all_ranks: bool, missing: list[int]
) -> None:
    with StandInRanks(4) as ranks:
        for error in ranks.run(miss_barriers, wait_all_ranks)[::2]:
            assert isinstance(error, CollectiveTimeout)
            assert (error.ranks, error.timeout_s) == (missing, 0.5)
            assert wait_all_ranks or "rank 3 " not in error.whereabouts


def wait_for_a_barrier_in_a_block(rank: Rank) -> None:
    with rank.group() as group:
        if rank.rank == 0:
            with group.coalesce(timeout_s=1) as work:
                group.all_reduce(torch.ones(3, device=group.device))
                group.barrier()
                group.all_reduce(torch.ones(3, device=group.device))
            with pytest.raises(CollectiveTimeout, match="within 1 s"):
                work.wait()
            rank.say("raised")
        rank.store.wait(["said/raised/0"], 30)


@needs_stand_in
def test_wait_of_a_block_with_a_barrier_blocks_the_host_as_that_of_a_barrier_does() -> None:
    with StandInRanks(2) as ranks:
        ranks.run(wait_for_a_barrier_in_a_block)


def issue_after_abort(rank: Rank) -> float:
    nccl.settings.abort_s = 8
    group = rank.group()
    group.barrier().wait()
    rank.say("ready")
    rank.store.wait(["said/ready/0", "said/ready/1"], 30)
    began_at = time.monotonic()
    group.abort("over")
    time.sleep(0.4)  # NCCL's abort is under way.
    with pytest.raises(GroupAborted, match="over"):
        group.all_reduce(torch.ones(3, device=group.device)).wait()
    group._communicator.failure()
    return time.monotonic() - began_at


@needs_stand_in
def test_nobody_waits_behind_an_abort_of_nccl() -> None:
    with StandInRanks(2) as ranks:
        took_s = ranks.run(issue_after_abort)
    assert max(took_s) < 4


@needs_stand_in
def test_a_callback_of_an_aborted_work_of_nccl_holds_no_lock() -> None:
    with StandInRanks(2) as ranks:
        assert ranks.run(abort_with_a_callback) == [True, True]


def abort_short_of_threads(rank: Rank, refused: str) -> str:
    """Of the thread that would publish it and that which would abort NCCL, or of the latter."""
    group = rank.group()
    group.barrier().wait()
    rank.say("met")
    rank.store.wait(["said/met/1"], 60)  # Its barrier would hear of the abort.
    if rank.rank == 1:
        rank.store.wait(["said/aborted/0"], 60)
        give_up_at = time.monotonic() + 20
        while group._communicator.failure() is None and time.monotonic() < give_up_at:
            time.sleep(0.05)
        return str(group._communicator.failure())
    called = threading.Event()
    work = group.all_reduce(torch.ones(3, device=group.device))
    work.add_done_callback(called.set)
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith(refused):
            raise RuntimeError("can't start new thread")
        start(thread)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        group.abort("over")
    assert called.is_set()
    rank.say("aborted")
    group.close()
    assert group._communicator._comm is None
    return "over"


@needs_stand_in
@pytest.mark.parametrize("refused", ["chorusline-abort-nccl", "chorusline-abort-"])
def test_an_abort_of_nccl_short_of_threads_calls_back_and_is_ended_by_close(refused: str) -> None:
    with StandInRanks(2) as ranks:
        assert all("over" in told for told in ranks.run(abort_short_of_threads, refused))


def abort_two_launches(rank: Rank) -> float:
    """One connects to a rank that never does, and the other waits behind it."""
    group = rank.group()
    group.barrier().wait()
    if rank.rank == 1:
        rank.store.wait(["said/raised/0"], 60)
        return 0.0
    tensor = torch.ones(3, device=group.device)
    issues = [lambda: group.send(tensor, 1), lambda: group.all_reduce(tensor.clone())]
    threads = [
        threading.Thread(target=lambda issue=issue: error_of(issue), daemon=True)
        for issue in issues
    ]
    for thread in threads:
        thread.start()
        time.sleep(0.3)
    began_at = time.monotonic()
    group.abort("over")
    for thread in threads:
        thread.join(15)
    rank.say("raised")
    return time.monotonic() - began_at


@needs_stand_in
def test_an_abort_frees_a_launch_and_who_waits_behind_it() -> None:
    with StandInRanks(2) as ranks:
        took_s, _ = ranks.run(abort_two_launches)
    assert took_s < 8


def wait_behind_a_busy_driver(rank: Rank) -> float:
    """The longest time for which no thread of Python could run, while a work is in flight."""
    group = rank.group()
    group.barrier().wait()
    longest_s = 0.0
    if rank.rank == 0:
        work = group.all_reduce(torch.ones(3, device=group.device))
        time.sleep(0.2)  # It is launched, and waits for rank 1.
        streams.machine().guard.stand_in_keep_driver_busy(1.0)
        began_at = seen_at = time.monotonic()
        while seen_at - began_at < 1.0:
            time.sleep(0.01)
            now = time.monotonic()
            longest_s, seen_at = max(longest_s, now - seen_at), now
        rank.say("seen")
    rank.store.wait(["said/seen/0"], 30)
    if rank.rank == 1:
        work = group.all_reduce(torch.ones(3, device=group.device))
    work.wait_on_host()
    group.barrier().wait()
    group.close()
    return longest_s


@needs_stand_in
def test_a_question_to_a_busy_driver_holds_up_no_other_thread() -> None:
    """Else none could abort what keeps the driver busy."""
    with StandInRanks(2) as ranks:
        longest_s, _ = ranks.run(wait_behind_a_busy_driver)
    assert longest_s < 0.5


_released = threading.Event()


def wait_until_released() -> None:
    _released.wait()


class Slow:
    """Takes long to be unpickled."""

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return wait_until_released, ()


def receive_beside_a_late_rank(rank: Rank, slow: bool) -> list[str]:
    """Objects arrive while the program's stream waits, or take long to be unpickled."""
    group = rank.group()
    group.barrier().wait()
    if rank.rank == 1:
        group.send_object_list([Slow() if slow else "mine"], 0).wait()
        rank.store.wait(["said/raised/0"], 60)
        return []
    nccl.settings.kernel_s = 0.3  # What is below comes before the objects.
    objects, has_failed = [None], threading.Event()
    received = group.recv_object_list(objects, 1)
    late = group.all_reduce(torch.ones(3, device=group.device), timeout_s=3)
    late.add_done_callback(has_failed.set)
    streams.launch(wait_until_released)
    assert has_failed.wait(20), "nobody has looked at the deadline"
    assert isinstance(late.error(), CollectiveTimeout), late.error()
    if not slow:
        received.wait()
        assert objects == ["mine"]
    _released.set()
    rank.say("raised")
    return sorted(streams.machine().unchosen)


@needs_stand_in
@pytest.mark.parametrize("slow", [False, True])
def test_the_deadline_holds_while_objects_are_read(slow: bool) -> None:
    with StandInRanks(2) as ranks:
        assert ranks.run(receive_beside_a_late_rank, slow) == [[], []]


def fill_the_queue(rank: Rank) -> float:
    """Launch more than the driver's queue holds behind a rank that never comes."""
    group = rank.group()
    group.barrier().wait()
    if rank.rank == 1:
        rank.store.wait(["said/raised/0"], 60)
        return 0.0
    tensor = torch.ones(3, device=group.device)
    began_at = time.monotonic()
    with pytest.raises(CollectiveTimeout, match=r"did not arrive within 2 s"):
        for _ in range(2 * streams.DEPTH):
            group.all_reduce(tensor, timeout_s=2).wait()
    assert sum(streams.machine().launches.values()) > streams.DEPTH / 4, "it has been full"
    rank.say("raised")
    return time.monotonic() - began_at


@needs_stand_in
def test_the_deadline_holds_when_the_queue_of_the_gpu_is_full() -> None:
    """The thread that launches is blocked, and the one that watches goes on."""
    with StandInRanks(2) as ranks:
        took_s, _ = ranks.run(fill_the_queue)
    assert took_s < 20


def lose_a_peer(rank: Rank) -> str:
    """NCCL's threads find a broken connection; the store tells whose."""
    group = rank.group()
    group.barrier().wait()
    if rank.rank == 2:
        rank.say("dying")
        os.kill(os.getpid(), signal.SIGKILL)
    rank.store.wait(["said/dying/2"], 30)
    nccl.settings.broken = 6
    error = error_of(lambda: group.all_reduce(torch.ones(3, device=group.device)).wait_on_host())
    assert isinstance(error, PeerLost), error
    assert "NCCL_ERROR_REMOTE_ERROR: stand-in (NCCL 2.32.3)" in str(error)
    rank.say("raised")
    rank.store.wait(["said/raised/0", "said/raised/1"], 30)
    return str(error.ranks)


@needs_stand_in
def test_an_error_of_nccl_calls_the_roll_instead_of_blaming_this_rank() -> None:
    with StandInRanks(3) as ranks:
        with pytest.raises(AssertionError, match="rank 2: its process ended") as caught:
            ranks.run(lose_a_peer)
    assert "rank 0" not in str(caught.value) and "rank 1:" not in str(caught.value)


def lose_a_peer_beside_a_stream(rank: Rank) -> str:
    """Rank 0 dies, rank 1 finds that out, and rank 2 sends to rank 3 meanwhile."""
    group = rank.group()
    group.barrier().wait_on_host()
    if rank.rank == 0:
        rank.store.wait(["said/streams/2", "said/streams/3"], 30)
        rank.say("dying")
        os.kill(os.getpid(), signal.SIGKILL)
    if rank.rank == 1:
        rank.store.wait(["said/dying/0"], 30)
        nccl.settings.broken = 6

    def use() -> None:
        if rank.rank == 1:
            group.all_reduce(torch.ones(3, device=group.device)).wait_on_host()
        give_up_at = time.monotonic() + 20
        for number in itertools.count():
            tensor = torch.ones(3, device=group.device)
            work = group.send(tensor, 3) if rank.rank == 2 else group.recv(tensor, 2)
            work.wait_on_host()
            if number == 20:
                rank.say("streams")
            if time.monotonic() > give_up_at:
                return

    error = error_of(use)
    assert isinstance(error, PeerLost), error
    assert error.ranks == [0], error
    return str(error)


@needs_stand_in
def test_ranks_that_stream_messages_answer_the_roll_call_of_another() -> None:
    with StandInRanks(4) as ranks:
        with pytest.raises(AssertionError, match="rank 0: its process ended") as caught:
            ranks.run(lose_a_peer_beside_a_stream)
    assert "PeerLost" not in str(caught.value) and "rank 1:" not in str(caught.value)


def die(rank: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def wait_for_ever(rank: int) -> None:
    threading.Event().wait()


def fail_in_nccl(rank: int) -> None:
    raise nccl.NcclError(2)


def meet_without(rank: Rank, entering: dict[int, Callable[[int], None]], kind: str) -> str:
    """All ranks have met in the store, and one does not get through NCCL's own connecting."""
    if rank.rank in entering:
        nccl.settings.entering = entering[rank.rank]
    began_at = time.monotonic()
    error = error_of(lambda: rank.group(timeout_s=1.5))
    assert type(error).__name__ == kind, repr(error)
    assert time.monotonic() - began_at < 10
    nccl.settings.entering = lambda rank: None
    others = [one for one in range(rank.size) if one not in error.ranks]
    if rank.rank in others:  # And those that are left go on, in the same processes.
        store = cl.PrefixStore("those that are left", rank.store)
        where = others.index(rank.rank)
        with cl.Group.create(store, where, len(others), "cuda:0", generation=1) as group:
            total = torch.ones(3, device=group.device)
            group.all_reduce(total).wait()
            assert total.tolist() == [float(len(others))] * 3
    return str(error)


@needs_stand_in
def test_a_rank_that_dies_while_nccl_connects_is_named_at_the_deadline() -> None:
    with StandInRanks(3) as ranks:
        with pytest.raises(AssertionError, match="rank 1: its process ended") as caught:
            ranks.run(meet_without, {1: die}, "PeerLost")
    assert "rank 0" not in str(caught.value) and "rank 2" not in str(caught.value)


@needs_stand_in
def test_a_rank_that_nccl_keeps_for_ever_is_no_hang_of_the_others() -> None:
    with StandInRanks(2) as ranks:
        for told in ranks.run(meet_without, {1: wait_for_ever}, "CollectiveTimeout"):
            assert "connecting by NCCL in generation 0" in told and "within 1.5 s" in told
            assert "all ranks answer, and NCCL has not connected them" in told
            assert "NCCL_DEBUG=INFO" in told


class Ended(cl.PrefixStore):
    """As the store of a session that ends the meeting: every later call raises its error."""

    error: GroupAborted | None = None

    def check(self, keys: Sequence[str | bytes]) -> bool:
        if self.error is not None:
            raise self.error
        return super().check(keys)


def meet_until_told(rank: Rank) -> float:
    store = Ended("the session's", rank.store)
    nccl.settings.entering = lambda number: number == 1 and wait_for_ever(1)
    told = GroupAborted(0, [1], LOST)
    threading.Timer(0.5, lambda: setattr(store, "error", told)).start()
    began_at = time.monotonic()
    with pytest.raises(GroupAborted, match=LOST):
        cl.Group.create(store, rank.rank, rank.size, "cuda:0", timeout_s=30)
    return time.monotonic() - began_at


@needs_stand_in
def test_a_session_ends_the_meeting_while_nccl_connects() -> None:
    with StandInRanks(2) as ranks:
        assert max(ranks.run(meet_until_told)) < 4


@needs_stand_in
def test_an_error_of_nccl_while_it_connects_ends_the_meeting_of_all_ranks() -> None:
    with StandInRanks(2) as ranks:
        for told in ranks.run(meet_without, {1: fail_in_nccl}, "GroupAborted"):
            assert "by rank 1: connecting by NCCL failed: NCCL could not connect" in told
            assert "NCCL_ERROR_SYSTEM_ERROR: stand-in (NCCL 2.32.3)" in told


def fail_at_an_id(rank: Rank) -> str:
    sys.modules["cupy.cuda.nccl"].get_unique_id = lambda: fail_in_nccl(rank.rank)
    began_at = time.monotonic()
    error = error_of(lambda: rank.group())
    assert time.monotonic() - began_at < 10
    return f"{type(error).__name__}: {error}"


@needs_stand_in
def test_an_error_of_nccl_before_it_connects_is_one_of_all_ranks() -> None:
    """As with an NCCL_SOCKET_IFNAME that names no interface."""
    with StandInRanks(2) as ranks:
        for told in ranks.run(fail_at_an_id):
            assert told.startswith("GroupAborted: ") and "by rank 0" in told
            assert "NCCL_ERROR_SYSTEM_ERROR: stand-in (NCCL 2.32.3)" in told


def fail_at_a_launch(rank: Rank) -> str:
    group = rank.group()
    group.barrier().wait_on_host()
    # The barrier of the other rank is over when that has read that nothing was aborted.
    rank.say("through")
    rank.store.wait([f"said/through/{other}" for other in range(rank.size)], 60)
    nccl.NcclCommunicator.launch = lambda self, calls: fail_in_nccl(rank.rank)  # type: ignore
    work = group.all_reduce(torch.ones(3, device=group.device))
    return str(error_of(work.wait_on_host))


@needs_stand_in
def test_an_error_of_nccl_at_a_launch_names_its_version() -> None:
    with StandInRanks(2) as ranks:
        for told in ranks.run(fail_at_a_launch):
            assert "could not be launched: NcclError: NCCL_ERROR_SYSTEM_ERROR" in told
            assert "(NCCL 2.32.3)" in told


def interrupt_a_launch(rank: Rank) -> str:
    group = rank.group()
    group.barrier().wait()
    tensor = torch.ones(3, device=group.device)
    if rank.rank == 0:

        def interrupted(*_: object) -> None:
            raise KeyboardInterrupt

        group._communicator._enqueue = interrupted
        with pytest.raises(KeyboardInterrupt):
            group.all_reduce(tensor)
    return str(error_of(lambda: group.all_reduce(tensor, timeout_s=10).wait_on_host()))


@needs_stand_in
def test_an_interrupt_of_a_launch_ends_the_generation() -> None:
    with StandInRanks(2) as ranks:
        for told in ranks.run(interrupt_a_launch):
            assert "by rank 0: all_reduce #1 (3 float32) could not be launched: Keyboard" in told


# -- nothing leaks, nothing is used after it was given back -------------------------------------


def drop_outputs(rank: Rank) -> None:
    """An abort ends works, and the caller drops their tensors, while the kernels run on. Strided
    tensors and lists are written last, by copies on the communicator's stream."""
    nccl.settings.abort_s = 0.5
    group = rank.group()
    group.barrier().wait()
    if rank.rank == 0:
        group.all_reduce(torch.zeros(8, 4, device=group.device).t())
        group.all_gather(
            [torch.zeros(5, device=group.device) for _ in range(group.size)],
            torch.ones(5, device=group.device),
        )
        group.reduce_scatter(
            torch.zeros(6, device=group.device)[::2],
            [torch.ones(3, device=group.device) for _ in range(group.size)],
        )
        group.all_reduce(torch.ones(7, device=group.device))
        group.abort("over")
        gc.collect()
        streams.Stream(number=0).synchronize()  # Another tensor may be in their memory by now.
        group._communicator._ending.join()
        torch.cuda.synchronize()
        rank.say("over")
    rank.store.wait(["said/over/0"], 30)


@needs_stand_in
def test_memory_that_is_dropped_stays_until_the_communicators_stream_has_left_it() -> None:
    with StandInRanks(2) as ranks:
        ranks.run(drop_outputs)  # Fails with each use of memory that was given back.


class Forgetful(set[int]):
    """What `record_stream` does to memory that is not of torch's allocator: nothing."""

    def add(self, _: int) -> None:
        pass


def as_of_cupy(tensor: torch.Tensor) -> torch.Tensor:
    tensor.block.allocation.recorded = Forgetful()  # type: ignore[attr-defined]
    return tensor


def drop_inputs_of_cupy(rank: Rank, ends: str) -> None:
    """Both before the kernels start, and before an abort ends them."""
    nccl.settings.kernel_s = 0.3
    group = rank.group()
    group.barrier().wait_on_host()
    total, whole = torch.zeros(3, device=group.device), torch.zeros(6, device=group.device)
    given = as_of_cupy(torch.ones(6, device=group.device))
    block = weakref.ref(given.block)  # type: ignore[attr-defined]
    works = [group.reduce_scatter(total, given)]
    with group.coalesce() as work:
        group.all_gather(whole, as_of_cupy(torch.ones(3, device=group.device)))
    works.append(work)
    del given
    streams.Stream(number=0).synchronize()  # Another array may be in their memory by now.
    for work in works:
        work.wait_on_host()
    assert total.tolist() == [2.0] * 3 and whole.tolist() == [1.0] * 6
    assert block() is None, "a work that is over, and still held, keeps it"
    nccl.settings.kernel_s, nccl.settings.abort_s = 0.0, 0.5
    if rank.rank == 0:
        for _ in range(2):
            group.reduce_scatter(
                as_of_cupy(torch.zeros(6, device=group.device))[::2],
                as_of_cupy(torch.ones(6, device=group.device)),
            )
        group.abort("over") if ends == "abort" else group.close()
        streams.Stream(number=0).synchronize()
        torch.cuda.synchronize()
        rank.say("over")
    rank.store.wait(["said/over/0"], 30)


@needs_stand_in
@pytest.mark.parametrize("ends", ["abort", "close"])
def test_arrays_of_cupy_that_are_dropped_stay_until_their_kernels_have_ended(ends: str) -> None:
    with StandInRanks(2) as ranks:
        ranks.run(drop_inputs_of_cupy, ends)  # Fails with each use of memory that was given back.


def use_every_thread(rank: Rank) -> set[str]:
    with rank.group() as group:
        work = group.all_reduce(torch.ones(3, device=group.device))
        called = threading.Event()
        work.add_done_callback(called.set)
        assert called.wait(20)
        group.abort("over")
        group._communicator._ending.join()
    other = rank.group(generation=1)
    other.all_reduce(torch.ones(3, device=other.device)).wait()
    closing = threading.Thread(target=other.close, name="closing")  # as the control loop does
    closing.start()
    closing.join()
    return streams.machine().unchosen


@needs_stand_in
def test_every_thread_of_the_transport_chooses_its_gpu() -> None:
    with StandInRanks(2) as ranks:
        assert ranks.run(use_every_thread) == [set(), set()]


def make_futures(rank: Rank) -> list[list[str]]:
    """The GPUs that futures name, in a process that sees eight and uses one."""
    named: list[list[str]] = []

    plain = torch.futures.Future.__init__

    def note(self: object, *, devices: Sequence[torch.device]) -> None:
        named.append([str(device) for device in devices])
        plain(self, devices=list(devices))

    with rank.group() as group, pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "device_count", lambda: 8)
        patch.setattr(torch.futures.Future, "__init__", note)
        tensor = torch.ones(3, device=group.device)
        with group.coalesce() as block:
            group.all_reduce(torch.ones(3, device=group.device))
        total = torch.ones(3, device=group.device)
        for work in (group.all_reduce(total), group.barrier(), block):
            doubled = work.get_future().then(lambda _: tensor * 2)
            work.wait()
            assert doubled.wait().tolist() == [2.0] * 3
        assert work.get_future().wait() is None and total.tolist() == [2.0] * 3
    return named


@needs_stand_in
def test_a_future_names_the_gpu_of_its_group_only() -> None:
    """Its callbacks would open a context on each other one."""
    with StandInRanks(2) as ranks:
        assert ranks.run(make_futures) == [[["cuda:0"]] * 3] * 2


def wait_after_a_future(rank: Rank) -> list[float]:
    """Of a work of torch.distributed whose outputs are complete only after copies."""
    with rank.group() as group:
        staged, output = torch.ones(3, device=group.device), torch.zeros(3, device=group.device)

        def copy() -> None:
            streams.launch(lambda: time.sleep(0.2))  # As long as the copies may take.
            output.copy_(staged)

        with group.coalesce() as block:
            group.all_reduce(staged)
        work = TorchWork(block, [output], "coalesced", copy, ranks=(0, 1))
        future = work.get_future()
        while not future.done():  # The copies are launched, on the stream of the callbacks' thread.
            time.sleep(0.001)
        work.wait()
        return output.tolist()  # type: ignore[no-any-return]


@needs_stand_in
def test_wait_comes_after_copies_that_a_future_has_begun_on_another_stream() -> None:
    with StandInRanks(2) as ranks:
        assert ranks.run(wait_after_a_future) == [[2.0] * 3] * 2


def follow_a_block(rank: Rank) -> list[float]:
    """The work of a coalesced block of torch.distributed has no outputs."""
    with rank.group() as group:
        tensor = torch.ones(3, device=group.device)
        group.barrier().wait_on_host()
        if rank.rank == 1:
            rank.store.wait(["said/computed/0"], 30)
        with group.coalesce() as block:
            group.all_reduce(tensor)
        doubled = (
            TorchWork(block, [], "coalesced", ranks=(0, 1)).get_future().then(lambda _: tensor * 2)
        )
        if rank.rank == 0:
            time.sleep(0.2)
            streams.Stream(number=0).synchronize()  # Does not wait for rank 1.
            rank.say("computed")
        return doubled.wait().tolist()  # type: ignore[no-any-return]


@needs_stand_in
def test_the_future_of_a_coalesced_block_leaves_the_programs_stream_alone() -> None:
    with StandInRanks(2) as ranks:
        assert ranks.run(follow_a_block) == [[4.0] * 3] * 2


def capture(rank: Rank) -> None:
    with rank.group() as group:
        tensor = torch.ones(3, device=group.device)
        streams.machine().capturing = True
        for issue in (
            lambda: group.all_reduce(tensor),
            lambda: group.barrier(),
            lambda: group.send(tensor, 1 - group.rank),
        ):
            with pytest.raises(UnsupportedOperation, match=r"in a CUDA graph .* replays"):
                issue()
        streams.machine().capturing = False
        group.all_reduce(tensor).wait()
        assert tensor.tolist() == [2.0] * 3


@needs_stand_in
def test_a_collective_in_a_cuda_graph_is_refused_and_the_group_goes_on() -> None:
    with StandInRanks(2) as ranks:
        ranks.run(capture)


def wait_beside_a_capture(rank: Rank) -> bool:
    """A graph is captured while a work is in flight, which the watcher and this thread query."""
    guard = streams.machine().guard
    with rank.group() as group:
        if rank.rank == 1:
            rank.store.wait(["said/captured/0"], 30)
            group.all_reduce(torch.ones(3, device=group.device)).wait_on_host()
            return True
        work = group.all_reduce(torch.ones(3, device=group.device))
        guard.stand_in_begin_capture()
        time.sleep(0.1)
        assert not work.is_completed()
        is_valid = bool(guard.stand_in_end_capture())
        rank.say("captured")
        work.wait_on_host()
        guard.stand_in_begin_capture()
        assert guard.cuEventQuery(work.ended.cuda_event) == 900, "the mode is as before"
        guard.stand_in_end_capture()
        return is_valid


@needs_stand_in
def test_works_in_flight_leave_the_capture_of_a_cuda_graph_valid() -> None:
    with StandInRanks(2) as ranks:
        assert ranks.run(wait_beside_a_capture) == [True, True]


def train_with_one_step_in_a_capture(rank: Rank, tries: bool) -> list[torch.Tensor]:
    with rank.group() as group:
        torch.manual_seed(0)
        model = cl.DistributedDataParallel(torch.nn.Linear(4, 2).to(group.device), group)
        optimizer = cl.ZeroRedundancyOptimizer(model, torch.optim.AdamW, lr=1e-2)
        for step in range(3):
            optimizer.zero_grad()
            batch = torch.full((3, 4), rank.rank + step + 1.0)
            model(batch.to(group.device)).square().mean().backward()
            if tries and step == 1:
                streams.machine().capturing = True
                with pytest.raises(UnsupportedOperation, match=r"in a CUDA graph .* replays"):
                    optimizer.step()
                streams.machine().capturing = False
            optimizer.step()
        return [parameter.detach().cpu() for parameter in model.parameters()]


@needs_stand_in
def test_a_sharded_step_in_a_cuda_graph_is_refused_and_can_be_taken_afterwards() -> None:
    with StandInRanks(2) as ranks:
        expected = ranks.run(train_with_one_step_in_a_capture, False)
        found = ranks.run(train_with_one_step_in_a_capture, True)
    for mine, as_without in zip(found, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, as_without, strict=True))
