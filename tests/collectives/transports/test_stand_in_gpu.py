"""The contract of transports on a stand-in GPU: NCCL's transport, streams and memory, on a CPU."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from chorusline.collectives.group import Group
from tests.contracts.group import CONTRACT, name_of
from tests.harness.stand_in_gpu import nccl, streams
from tests.harness.stand_in_gpu.ranks import StandInRanks, needs_stand_in, seeds

pytestmark = needs_stand_in

Check = Callable[[Group], Any]

BETWEEN_THREE = ("all_to_all", "gather_and_scatter", "a_slow_rank_is_waited_for")
"""Checks of which the fast suite has also one with a rank in the middle."""
CASES = [
    pytest.param(
        check,
        2 + (seed + 1) % 3,
        seed,
        marks=[]
        if seed == 2 or (seed == 3 and name_of(check) in BETWEEN_THREE)
        else pytest.mark.slow,
        id=f"{name_of(check)}-{2 + (seed + 1) % 3}-{seed}",
    )
    for seed in range(1, max(4, len(seeds(11))))
    for check in CONTRACT
]
"""A check, ranks, and the seed of the jitter of their kernels."""


@pytest.fixture(scope="module")
def reused_ranks() -> Iterator[Callable[[int, int], StandInRanks]]:
    """reused_ranks(size, seed): ranks with one group, kept from one check to the next."""
    started: dict[tuple[int, int], StandInRanks] = {}

    def of(size: int, seed: int) -> StandInRanks:
        key = size, seed
        if key not in started:
            started[key] = StandInRanks(size, seed=seed)
        return started[key]

    yield of
    for ranks in started.values():
        ranks.stop()


@pytest.mark.parametrize(("check", "size", "seed"), CASES)
def test_nccl_keeps_the_contract_on_a_stand_in(
    check: Check, size: int, seed: int, reused_ranks: Callable[[int, int], StandInRanks]
) -> None:
    results = reused_ranks(size, seed).check(check)
    assert results == [results[0]] * size, "the ranks have different bits"


def check_launches(group: Group) -> None:
    """What NCCL is asked to launch: the calls of each kernel."""
    n, me, device = group.size, group.rank, group.device
    rows = [torch.ones(3, device=device) for _ in range(n)]
    whole, part = torch.zeros(3 * n, device=device), torch.ones(3, device=device)

    def block() -> None:
        with group.coalesce() as work:
            for row in rows:
                group.all_reduce(row)
            group.all_reduce(torch.empty(0, device=device))  # nothing to launch
            group.all_gather(whole, part)
            group.reduce_scatter(part, whole)
            group.broadcast(whole, 0)
        work.wait()

    def messages() -> None:
        # Each rank receives first: alone, no recv would end before its launch does.
        with group.coalesce() as work:
            group.recv(rows[0], (me - 1) % n)
            group.send(part, (me + 1) % n)
        work.wait()

    together = {"allReduce": n, "allGather": 1, "reduceScatter": 1, "broadcast": 1}
    bodies: list[tuple[Callable[[], Any], dict[str, int]]] = [
        (block, together),
        (lambda: group.all_reduce(part).wait(), {"allReduce": 1}),
        (lambda: group.all_to_all(rows, [part] * n).wait(), {"send": n - 1, "recv": n - 1}),
        (messages, {"send": 1, "recv": 1}),
    ]
    for body, calls in bodies:
        before = len(nccl.settings.calls)
        body()
        assert [Counter(kernel) for kernel in nccl.settings.calls[before:]] == [calls]


def test_a_coalesced_block_and_an_exchange_are_each_one_launch_of_nccl(
    reused_ranks: Callable[[int, int], StandInRanks],
) -> None:
    reused_ranks(3, 3).check(check_launches)


def fill_on_another_stream(group: Group) -> list[Any]:
    """Each tensor of a block is filled late, on a stream that is not the one at the block's end."""
    whole, strided, of_thread = (torch.zeros(4, 2, device=group.device) for _ in range(3))

    def fill(tensor: torch.Tensor) -> None:
        torch.cuda.set_device(group.device)
        with torch.cuda.stream(torch.cuda.Stream(group.device)):
            streams.launch(lambda: time.sleep(0.1))  # As long as computing it may take.
            tensor.fill_(5)
            group.all_reduce(tensor)

    with group.coalesce() as work:
        fill(whole)
        fill(strided[:, 1])
        thread = threading.Thread(target=fill, args=(of_thread,))
        thread.start()
        thread.join()
    work.wait_on_host()
    return [tensor.tolist() for tensor in (whole, strided[:, 1], of_thread)]


def test_a_coalesced_block_waits_for_each_stream_on_which_its_operations_were_issued(
    reused_ranks: Callable[[int, int], StandInRanks],
) -> None:
    for found in reused_ranks(2, 1).check(fill_on_another_stream):
        assert found == [[[10.0] * 2] * 4, [10.0] * 4, [[10.0] * 2] * 4]


def exchange_and_read_on_another_stream(group: Group) -> list[float]:
    """The stream of the caller is busy with what it was given after the launch."""
    library: Any = group._communicator._library  # type: ignore[attr-defined]
    end_group, side = library.groupEnd, torch.cuda.Stream(group.device)
    whole = torch.zeros(2 * group.size, device=group.device)

    def end_late() -> None:
        end_group()
        streams.launch(lambda: time.sleep(1))

    group.barrier().wait_on_host()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "groupEnd", end_late)
        work = group.all_to_all(whole, torch.ones_like(whole))
    with torch.cuda.stream(side):
        work.wait()
        found = whole.clone()
    torch.cuda.synchronize(group.device)
    return found.tolist()  # type: ignore[no-any-return]


def test_a_stream_that_waits_for_an_exchange_finds_this_ranks_own_part_as_well(
    reused_ranks: Callable[[int, int], StandInRanks],
) -> None:
    assert reused_ranks(2, 1).check(exchange_and_read_on_another_stream) == [[1.0] * 4] * 2
