"""Every transport keeps the contract of `Group`, in real processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from chorusline.collectives.group import Group
from chorusline.collectives.stores.store import HashStore
from tests.contracts.group import CONTRACT, HOST_CONTRACT, name_of
from tests.contracts.operations import check_all_reduce, check_barrier, check_bits
from tests.harness.ranks import (
    GLOO,
    IN_BOTH,
    IN_PYTHON,
    NCCL,
    SHARED_MEMORY,
    Rank,
    on_gpus,
    run_ranks,
)
from tests.harness.reused_ranks import ReusedRanks

Check = Callable[[Group], Any]

HOST_TRANSPORTS = [
    *((SHARED_MEMORY, size) for size in (1, 2, 3)),
    pytest.param(SHARED_MEMORY, 4, marks=pytest.mark.slow),  # As with 3, on the same branches.
    (IN_BOTH, 3),
    pytest.param(IN_PYTHON, 3, marks=pytest.mark.slow),  # As the second rank of IN_BOTH.
    pytest.param(GLOO, 2, marks=pytest.mark.slow),  # As with 3, and on fewer branches.
    (GLOO, 3),
]


def run_checks(rank: Rank, checks: list[Check]) -> list[Any]:
    """All on one group, one after the other."""
    with rank.group() as group:
        return [check(group) for check in checks]


@pytest.mark.parametrize(("transport", "size"), HOST_TRANSPORTS)
@pytest.mark.parametrize("check", HOST_CONTRACT, ids=name_of)
def test_host_transports_keep_the_contract(
    check: Check, transport: str, size: int, reused_ranks: Callable[[str, int], ReusedRanks]
) -> None:
    results = reused_ranks(transport, size).run(check)
    assert results == [results[0]] * size, "the ranks have different bits"


@pytest.mark.parametrize("size", [on_gpus(2), on_gpus(4)])
@pytest.mark.parametrize("check", CONTRACT, ids=name_of)
def test_nccl_keeps_the_contract(check: Check, size: int, tmp_path: Path) -> None:
    results = run_ranks(run_checks, size, tmp_path, NCCL, [check])
    assert results == [results[0]] * size, "the ranks have different bits"


@pytest.mark.parametrize(("transport", "size"), HOST_TRANSPORTS)
def test_a_barrier_ends_nowhere_before_it_began_everywhere(
    transport: str, size: int, tmp_path: Path
) -> None:
    ranks = run_ranks(run_checks, size, tmp_path, transport, [check_barrier])
    times = [found[0] for found in ranks]
    assert max(issued_at for issued_at, _ in times) <= min(done_at for _, done_at in times)


# Two ranks add on fewer branches than three, and their bits depend on no order.
@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_host_transports_give_the_same_bits(size: int, tmp_path: Path) -> None:
    digests = []
    for transport in (SHARED_MEMORY, IN_PYTHON, IN_BOTH, GLOO):
        folder = tmp_path / transport
        folder.mkdir()
        digests.append(run_ranks(run_checks, size, folder, transport, [check_bits]))
    assert digests == [digests[0]] * 4


def run_one_after_another(rank: Rank) -> None:
    """Groups come and go in one process; two of one name and generation are told apart."""
    for generation in (0, 0, 1, 2, 2):
        with rank.group(generation=generation) as group:
            tensor = torch.ones(10)
            group.all_reduce(tensor).wait()
            assert tensor.tolist() == [rank.size] * 10


@pytest.mark.parametrize("transport", [SHARED_MEMORY, GLOO])
def test_groups_come_and_go_in_the_same_processes(transport: str, tmp_path: Path) -> None:
    run_ranks(run_one_after_another, 3, tmp_path, transport)


def test_threads_of_one_process_can_be_ranks() -> None:
    store = HashStore()
    digests: dict[int, str] = {}

    def main(rank: int) -> None:
        with Group.create(store, rank, 3, timeout_s=30) as group:
            digests[rank] = check_all_reduce(group)

    threads = [threading.Thread(target=main, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(digests) == 3
    assert len(set(digests.values())) == 1
