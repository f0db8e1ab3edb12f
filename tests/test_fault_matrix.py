"""For each operation: one of three ranks is killed, is stopped, or raises. The others all raise the
same error within the deadline and two seconds, name the culprit, and go on in the same processes.

The ranks are forked once for a fault and run all operations, a generation each: a survivor is then
also one that has survived the earlier ones.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import GLOO, SHARED_MEMORY, Rank, Ranks, run_ranks

from collectives.errors import CollectiveError, CollectiveTimeout, GroupAborted, PeerLost
from collectives.group import Group
from collectives.work import Work

VICTIM = 1
TIMEOUT_S = 0.7
SLACK_S = 2.0

Issue = Callable[[Group, int], Work]

OPERATIONS: dict[str, Issue] = {
    # numel is a multiple of three.
    "all_reduce": lambda group, numel: group.all_reduce(torch.ones(numel)),
    "reduce_scatter": lambda group, numel: group.reduce_scatter(
        torch.ones(numel // 3), torch.ones(numel)
    ),
    "all_gather": lambda group, numel: group.all_gather(torch.ones(numel), torch.ones(numel // 3)),
    "broadcast": lambda group, numel: group.broadcast(torch.ones(numel), VICTIM),
    "barrier": lambda group, numel: group.barrier(),
}
NUMELS = (9, 3_000_000)  # one tick, and many


def cases(fault: str) -> Iterator[tuple[int, str, int]]:
    """number, operation, elements; the number is that of the generation, which is even."""
    number = 0
    for position, name in enumerate(OPERATIONS):
        # A deadline takes its time, so it is awaited once for each operation.
        for numel in NUMELS if fault != "stop" else NUMELS[position % 2 :][:1]:
            yield number, name, numel
            number += 2


def break_each(rank: Rank, fault: str) -> list[Any]:
    """(error, seconds until it was raised, sum in the next generation), by case."""
    found = []
    for number, name, numel in cases(fault):
        group = rank.group(generation=number, timeout_s=TIMEOUT_S if fault == "stop" else 30)
        group.barrier(timeout_s=30).wait()
        began_at = time.monotonic()
        error: CollectiveError | None = None
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
        try:
            OPERATIONS[name](group, numel).wait()
        except CollectiveError as raised:
            error = raised
        took_s = time.monotonic() - began_at
        group.close()
        with rank.group(generation=number + 1, timeout_s=30) as group:
            tensor = torch.full((5,), float(rank.rank))
            group.all_reduce(tensor).wait()
        found.append((error, took_s, tensor.tolist()))
    return found


@pytest.mark.parametrize(
    ("fault", "transport"), [("stop", SHARED_MEMORY), ("raise", SHARED_MEMORY), ("raise", GLOO)]
)
def test_every_operation_ends_for_all_and_all_go_on(
    fault: str, transport: str, tmp_path: Path
) -> None:
    by_rank = run_ranks(break_each, 3, tmp_path, transport, fault)
    kind = CollectiveTimeout if fault == "stop" else GroupAborted
    limit_s = SLACK_S + (TIMEOUT_S if fault == "stop" else 0)
    for case, (_, name, numel) in enumerate(cases(fault)):
        for rank, found in enumerate(by_rank):
            error, took_s, total = found[case]
            assert isinstance(error, kind), (name, numel, error)
            assert error.ranks == [VICTIM], (name, numel, error)
            assert error.args == by_rank[0][case][0].args, (name, numel)
            if fault == "stop":
                assert error.operation.startswith(f"{name} #1")
            else:
                assert error.reason == f"ValueError: during {name}"
                assert "in break_each" in error.traceback
            assert rank == VICTIM or took_s < limit_s, (name, numel, took_s)
            assert total == [3.0] * 5


def outlive(rank: Rank, name: str, numel: int) -> Any:
    group = rank.group()
    group.barrier().wait()
    if rank.rank == VICTIM:
        rank.say("ready")
        time.sleep(600)
    rank.say("ready")
    try:
        OPERATIONS[name](group, numel).wait()
    except CollectiveError as raised:
        error = raised
    ended_at = time.monotonic()
    group.close()
    survivors = Rank(rank.rank // 2, 2, rank.store, rank.transport)
    with survivors.group(generation=1) as group:
        tensor = torch.full((5,), float(rank.rank))
        group.all_reduce(tensor).wait()
    return error, ended_at, tensor.tolist()


@pytest.mark.parametrize("numel", NUMELS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_names_a_killed_rank_and_the_others_go_on(
    name: str, numel: int, tmp_path: Path
) -> None:
    with Ranks(outlive, 3, tmp_path, SHARED_MEMORY, name, numel) as ranks:
        ranks.wait_for("ready")
        killed_at = time.monotonic()
        ranks.signal(VICTIM, signal.SIGKILL)
        for error, ended_at, total in ranks.results(ranks=[0, 2]):
            assert isinstance(error, PeerLost), error
            assert error.ranks == [VICTIM]
            assert error.operation.startswith(f"{name} #1")
            assert ended_at - killed_at < SLACK_S
            assert total == [2.0] * 5


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
    from collectives import FileStore, Group
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
    assert "ranks [0]" in second
    for told in (first, second):
        assert "bytes to share between the 2 ranks of this host: File too large" in told
        assert "ulimit -f" in told
    assert time.monotonic() - began_at < 15
