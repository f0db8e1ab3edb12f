"""For each operation: one of three ranks is killed, is stopped, or raises. The others all raise the
same error within the deadline and two seconds, name the culprit, and go on in the same processes.

The ranks that are stopped, or raise, are forked once and run many operations, a generation each: a
survivor is then also one that has survived the earlier ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from chorusline.collectives.contract.errors import (
    CollectiveError,
    CollectiveTimeout,
    GroupAborted,
    PeerLost,
)
from chorusline.collectives.contract.work import Work
from chorusline.collectives.group import Group
from tests.harness.ranks import GLOO, SHARED_MEMORY, Rank, Ranks, run_ranks

VICTIM = 1
TIMEOUT_S = 0.7
SLACK_S = {SHARED_MEMORY: 2.0, GLOO: 8.0}
"""For all to know. Gloo's ranks ask each other through the store, and have 2.5 s to answer."""

SMALL, LARGE = 9, 3_000_000
"""Elements, multiples of three: one tick, and many. Of objects: nothing connected yet, and all."""

Issue = Callable[[Group, int], Work]


def coalesced(group: Group, numel: int) -> Work:
    with group.coalesce() as work:
        group.all_reduce(torch.ones(numel))
        group.barrier()
    return work


def halves(group: Group, numel: int) -> Work:
    """Blocking, so that it may fail before there is a work."""
    made = group.split(0)
    assert made is not None
    return made.all_reduce(torch.ones(numel))


def other(group: Group) -> int:
    return VICTIM if group.rank != VICTIM else 0


def parts(numel: int) -> list[torch.Tensor]:
    return list(torch.ones(3, numel // 3))


OPERATIONS: dict[str, Issue] = {
    "all_reduce": lambda group, numel: group.all_reduce(torch.ones(numel)),
    "reduce_scatter": lambda group, numel: group.reduce_scatter(
        torch.ones(numel // 3), torch.ones(numel)
    ),
    "all_gather": lambda group, numel: group.all_gather(torch.ones(numel), torch.ones(numel // 3)),
    "broadcast": lambda group, numel: group.broadcast(torch.ones(numel), VICTIM),
    "barrier": lambda group, numel: group.barrier(),
    "reduce": lambda group, numel: group.reduce(torch.ones(numel), 0),
    "gather": lambda group, numel: group.gather(
        torch.ones(numel // 3), parts(numel) if group.rank == 0 else None
    ),
    "scatter": lambda group, numel: group.scatter(
        torch.ones(numel // 3), parts(numel) if group.rank == VICTIM else None, VICTIM
    ),
    "all_to_all": lambda group, numel: group.all_to_all(parts(numel), parts(numel)),
    "monitored_barrier": lambda group, numel: group.monitored_barrier(),
    "coalesced": coalesced,
    # More than a rank takes in before somebody receives it, or it were done.
    "send": lambda group, numel: group.send(torch.ones(LARGE), other(group)),
    "recv": lambda group, numel: group.recv(torch.ones(numel), other(group)),
    "send_object_list": lambda group, numel: group.send_object_list([bytes(LARGE)], other(group)),
    "recv_object_list": lambda group, numel: group.recv_object_list([None], other(group)),
    "broadcast_object_list": lambda group, numel: group.broadcast_object_list([numel], VICTIM),
    "all_gather_object": lambda group, numel: group.all_gather_object(numel),
    "gather_object": lambda group, numel: group.gather_object(numel, 0),
    "scatter_object_list": lambda group, numel: group.scatter_object_list([1, 2, 3], VICTIM),
    "split": halves,
}
TOLD_AS = {"monitored_barrier": "barrier", "coalesced": "all_reduce", "split": "all_gather_object"}

Case = tuple[int, str, int]
"""Number, operation, elements. The number is that of the generation, which is even."""


def cases(numels_of: Callable[[int], tuple[int, ...]]) -> list[Case]:
    """numels_of: the sizes, by the operation's position."""
    named = [
        (name, numel) for position, name in enumerate(OPERATIONS) for numel in numels_of(position)
    ]
    return [(2 * number, name, numel) for number, (name, numel) in enumerate(named)]


ONCE = cases(lambda position: (SMALL, LARGE)[position % 2 :][:1])
TWICE = cases(lambda position: (SMALL, LARGE))


def moves_objects(name: str) -> bool:
    """On the objects' channel, which is a group of its own."""
    return name == "split" or ("object" in name and not name.startswith(("send", "recv")))


def prepared(group: Group, name: str, numel: int) -> None:
    """All ranks are here, in touch if that is part of the case."""
    if numel == LARGE and moves_objects(name):
        group.all_gather_object(None, timeout_s=30).wait()
    group.barrier(timeout_s=30).wait()


def error_of(issue: Callable[[], Any]) -> CollectiveError | None:
    try:
        issue().wait()
    except CollectiveError as raised:
        return raised
    return None


def break_each(rank: Rank, fault: str, some: list[Case]) -> list[Any]:
    """(error, seconds until it was raised, sum in the next generation), by case."""
    found = []
    for number, name, numel in some:
        group = rank.group(generation=number, timeout_s=TIMEOUT_S if fault == "stop" else 30)
        prepared(group, name, numel)
        began_at = time.monotonic()
        if rank.rank == VICTIM and fault == "raise":
            time.sleep(0.05)
            try:
                raise ValueError(f"during {name}")
            except ValueError as mine:
                group.abort(mine)
        if rank.rank == VICTIM and fault == "stop":
            # The parent would have to stop and continue it at the right moments: a helper does.
            helper = subprocess.Popen(
                ["sh", "-c", f"kill -STOP {os.getpid()}; sleep {TIMEOUT_S + 0.5}; "
                 f"kill -CONT {os.getpid()}"]
            )  # fmt: skip
            helper.wait()
        error = error_of(lambda name=name, group=group, numel=numel: OPERATIONS[name](group, numel))
        took_s = time.monotonic() - began_at
        if rank.transport == GLOO:  # Who has left cannot tell the others why.
            rank.say(f"over {number}")
            rank.store.wait([f"said/over {number}/{r}" for r in range(rank.size)], 60)
        group.close()
        with rank.group(generation=number + 1, timeout_s=30) as group:
            tensor = torch.full((5,), float(rank.rank))
            group.all_reduce(tensor).wait()
        found.append((error, took_s, tensor.tolist()))
    return found


def check_each(
    fault: str, transport: str, some: list[Case], folder: Path, num_sets: int = 1
) -> None:
    """num_sets: of ranks, which share the cases, at the same time."""
    kind = CollectiveTimeout if fault == "stop" else GroupAborted
    limit_s = SLACK_S[transport] + (TIMEOUT_S if fault == "stop" else 0)
    with contextlib.ExitStack() as stack:
        sets = []
        for number in range(num_sets):
            mine = folder / str(number)
            mine.mkdir()
            share = some[number::num_sets]
            ranks = Ranks(break_each, 3, mine, transport, fault, share)
            sets.append((share, stack.enter_context(ranks)))
        for share, ranks in sets:
            by_rank = ranks.results(timeout_s=240)
            for case, (_, name, numel) in enumerate(share):
                first = by_rank[0][case][0]
                for rank, found in enumerate(by_rank):
                    error, took_s, total = found[case]
                    assert isinstance(error, kind), (name, numel, rank, error)
                    assert error.ranks == [VICTIM], (name, numel, rank, error)
                    if fault == "raise":
                        assert error.reason.startswith(f"ValueError: during {name}"), error
                        assert "in break_each" in error.traceback
                    elif not moves_objects(name):
                        assert error.operation.startswith(f"{TOLD_AS.get(name, name)} "), error
                    if not moves_objects(name):  # Else each group tells it as its own.
                        assert error.args == first.args, (name, numel)
                    assert rank == VICTIM or took_s < limit_s, (name, numel, rank, took_s)
                    assert total == [3.0] * 5


@pytest.mark.parametrize("transport", [SHARED_MEMORY, GLOO])
def test_when_a_rank_raises_every_operation_ends_for_all_and_all_go_on(
    transport: str, tmp_path: Path
) -> None:
    check_each("raise", transport, ONCE if transport == GLOO else TWICE, tmp_path)


@pytest.mark.slow
def test_when_a_rank_is_stopped_every_operation_ends_for_all_and_all_go_on(tmp_path: Path) -> None:
    check_each("stop", SHARED_MEMORY, ONCE, tmp_path, num_sets=3)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("transport", [SHARED_MEMORY, GLOO])
def test_when_a_rank_is_stopped_every_operation_of_every_size_ends(
    transport: str, tmp_path: Path
) -> None:
    check_each("stop", transport, TWICE, tmp_path)


def outlive(rank: Rank, some: list[Case]) -> Any:
    """(error, when it was raised, sum in the next generation), by case. The victim of a case is a
    process of its own, with rank VICTIM."""
    found = []
    for number, name, numel in some:
        group = rank.group(generation=number)
        prepared(group, name, numel)
        rank.say(f"ready {number}")
        if rank.rank == VICTIM:
            time.sleep(600)
        error = error_of(lambda name=name, group=group, numel=numel: OPERATIONS[name](group, numel))
        ended_at = time.monotonic()
        if rank.transport == GLOO:
            rank.say(f"over {number}")
            rank.store.wait([f"said/over {number}/{r}" for r in (0, 2)], 60)
        group.close()
        # Of either transport: for all that they know, these two are on one host.
        with Group.create(rank.store, rank.rank // 2, 2, generation=number + 1) as group:
            tensor = torch.full((5,), float(rank.rank))
            group.all_reduce(tensor).wait()
        found.append((error, ended_at, tensor.tolist()))
    return found


def check_killed(transport: str, some: list[Case], folder: Path) -> None:
    with Ranks(outlive, 3, folder, transport, some, only=(0, 2)) as ranks:
        killed_at = []
        for case in some:
            ranks.start(VICTIM, [case])
            ranks.wait_for(f"ready {case[0]}")
            killed_at.append(time.monotonic())
            ranks.signal(VICTIM, signal.SIGKILL)
        by_rank = ranks.results(ranks=[0, 2], timeout_s=240)
    for case, (_, name, numel) in enumerate(some):
        for found in by_rank:
            error, ended_at, total = found[case]
            assert isinstance(error, PeerLost), (name, numel, error)
            assert error.ranks == [VICTIM], (name, numel, error)
            if not moves_objects(name):
                assert error.operation.startswith(f"{TOLD_AS.get(name, name)} "), (name, error)
            assert ended_at - killed_at[case] < SLACK_S[transport], (name, numel)
            assert total == [2.0] * 5


def test_when_a_rank_is_killed_every_operation_names_it_and_the_others_go_on(
    tmp_path: Path,
) -> None:
    check_killed(SHARED_MEMORY, TWICE, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_when_a_rank_on_another_host_is_killed_every_operation_names_it(tmp_path: Path) -> None:
    check_killed(GLOO, TWICE, tmp_path)


# -- asking to stop --------------------------------------------------------------------------------


def interrupt_an_await(rank: Rank) -> Any:
    """Ctrl-C while a task awaits: asyncio.run cancels it, and the generation ends for all."""
    group = rank.group()
    group.barrier().wait()
    if rank.rank == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()

        async def main() -> None:
            await group.all_reduce(torch.ones(10))

        with pytest.raises(KeyboardInterrupt):
            asyncio.run(main())
        error = None
    elif rank.rank == 1:
        try:
            group.all_reduce(torch.ones(10)).wait()
        except CollectiveError as raised:
            error = raised
    else:
        rank.store.wait(["said/over/1"], 60)
        error = None
    rank.say("over")
    group.close()
    with rank.group(generation=1) as group:
        tensor = torch.ones(3)
        group.all_reduce(tensor).wait()
    return error, tensor.tolist()


def test_ctrl_c_in_an_awaiting_program_frees_the_others_and_all_go_on(tmp_path: Path) -> None:
    by_rank = run_ranks(interrupt_an_await, 3, tmp_path)
    error, _ = by_rank[1]
    assert isinstance(error, GroupAborted)
    assert error.ranks == [0]
    assert "the task that awaited all_reduce #1 (10 float32) was cancelled" in str(error)
    assert [total for _, total in by_rank] == [[3.0] * 3] * 3


# -- no memory to share ----------------------------------------------------------------------------

FULL = """
    import os, sys, torch
    from chorusline import FileStore, Group
    blocker = os.open("/dev/shm/full", os.O_CREAT | os.O_WRONLY)
    try:
        while os.write(blocker, bytes(1 << 16)):
            pass
    except OSError as error:
        assert error.errno == 28, error
    if os.fork() == 0:
        rank = 1
    else:
        rank = 0
    with Group.create(FileStore(sys.argv[1]), rank, 2, timeout_s=20) as group:
        tensor = torch.ones(1_000_000)
        group.all_reduce(tensor).wait()
    assert tensor.eq(2).all()
    if rank == 1:
        os._exit(0)
    assert os.wait()[1] == 0
    print("moved")
"""


def test_a_full_dev_shm_does_not_matter(tmp_path: Path) -> None:
    """In a mount namespace of its own, with a /dev/shm of one page."""
    unshared = ["unshare", "--mount", "--map-root-user", "sh", "-c"]
    mounted = "mount -t tmpfs -o size=4k tmpfs /dev/shm"
    if subprocess.run([*unshared, mounted], capture_output=True).returncode:
        pytest.skip("this machine allows no mount namespace, so /dev/shm cannot be made small")
    program = f'{mounted} && exec "{sys.executable}" -c "$0" "$1"'
    ran = subprocess.run(
        [*unshared, program, textwrap.dedent(FULL), str(tmp_path / "store")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.stdout == "moved\n", ran.stderr


def limit_files() -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))


def meet_without_memory(rank: Rank) -> str:
    if rank.rank == 0:
        limit_files()
    before = len(list(Path("/proc/self/fd").iterdir()))
    try:
        rank.group(timeout_s=20)
    except (OSError, CollectiveError) as error:
        assert len(list(Path("/proc/self/fd").iterdir())) == before
        return f"{type(error).__name__}: {error}"
    return ""


def test_memory_that_cannot_be_had_is_told_on_all_ranks_at_once(tmp_path: Path) -> None:
    began_at = time.monotonic()
    first, second = run_ranks(meet_without_memory, 2, tmp_path)
    assert first.startswith("OSError")
    assert second.startswith("PeerLost")
    assert "rank 0" in second
    for told in (first, second):
        assert "bytes to share between the 2 ranks of this host: File too large" in told
        assert "ulimit -f" in told
    assert time.monotonic() - began_at < 15
