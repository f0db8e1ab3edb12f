"""Faults at random instants, on stand-in GPUs: no wrong result, no hang, no leak.

A rank is killed, is stopped, aborts, or learns from NCCL that a connection is broken, while all
ranks have operations of every kind in flight. Those that are left see one error within the
deadline, read nothing that is wrong before it, give everything back, and go on in the next
generation. All is drawn from a seed, which the name of a test has.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import time
from dataclasses import dataclass

import pytest
import torch

import chorusline as cl
from chorusline.collectives.contract.work import Work
from tests.harness.ranks import Rank
from tests.harness.stand_in_gpu import memory, nccl, streams
from tests.harness.stand_in_gpu.ranks import StandInRanks, needs_stand_in, seeds

pytestmark = [needs_stand_in, pytest.mark.slow]

KINDS = ("killed", "stopped", "aborts", "connection breaks")
TIMEOUT_S = 3.0
PATIENCE_S = 12.0  # for the store, the roll call, and a machine that has other things to do


@dataclass(frozen=True)
class Fault:
    """kind: of KINDS. victim: the rank. after_s: from the first operation on. abort_s: how long
    NCCL's aborts take at least. jitter_s: of kernels."""

    kind: str
    size: int
    victim: int
    after_s: float
    abort_s: float
    jitter_s: float

    @classmethod
    def of(cls, seed: int) -> Fault:
        draw = random.Random(seed)
        size = draw.choice((2, 3))
        return cls(
            kind=KINDS[seed % len(KINDS)],
            size=size,
            victim=draw.randrange(size),
            after_s=draw.uniform(0.0, 0.4),
            abort_s=draw.choice((0.0, 0.0, 0.3)),
            jitter_s=draw.choice((0.0005, 0.005)),
        )

    @property
    def loses_a_rank(self) -> bool:
        return self.kind in ("killed", "stopped")


def strike(fault: Fault, group: cl.Group) -> None:
    match fault.kind:
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "aborts":
            group.abort("enough of it")
        case _:
            nccl.settings.breaks, nccl.settings.broken = True, 6


def issue(group: cl.Group, number: int) -> list[tuple[Work, torch.Tensor, list[float]]]:
    """One operation of each kind: its work, what it writes, and what has to be there."""
    size, device = group.size, group.device
    mine = torch.full((5,), float(number + group.rank), device=device)
    total = float(sum(number + rank for rank in range(size)))
    every = [float(number + rank) for rank in range(size) for _ in range(5)]
    summed = mine.clone()
    strided = torch.full((4, 3), float(number + group.rank), device=device).t()
    gathered = torch.zeros(5 * size, device=device)
    part = torch.zeros(5, device=device)
    received = [torch.zeros(2, device=device) for _ in range(size)]
    sent = [torch.full((2,), float(number + group.rank), device=device) for _ in range(size)]
    return [
        (group.all_reduce(summed), summed, [total] * 5),
        (group.all_reduce(strided), strided, [total] * 12),
        (group.all_gather(gathered, mine), gathered, every),
        (group.reduce_scatter(part, mine.repeat(size)), part, [total] * 5),
        (
            group.all_to_all(received, sent),
            received[-1],
            [float(number + size - 1)] * 2,
        ),
    ]


def work_until_the_end(group: cl.Group, rounds: int | None = None) -> float:
    """Rounds of operations until one raises; the seconds that the last round took."""
    number = 0
    while number != rounds:
        began_at = time.monotonic()
        try:
            issued = issue(group, number)
            for work, tensor, expected in issued:
                work.wait_on_host()
                assert tensor.flatten().tolist() == expected, f"{work.operation} is wrong"
            total = group.all_gather_object((number, group.rank)).wait()
            assert total == [(number, rank) for rank in range(group.size)]
        except cl.CollectiveError:
            return time.monotonic() - began_at
        number += 1
    return 0.0


def live_through(rank: Rank, fault: Fault) -> float:
    """The seconds that this rank waited for the error."""
    nccl.settings.abort_s = fault.abort_s
    waited_s = go_through(rank, fault)
    nccl.settings.broken, nccl.settings.breaks = 0, False
    go_on(rank, fault)
    assert_nothing_is_left()
    return waited_s


def go_on(rank: Rank, fault: Fault) -> None:
    left = [one for one in range(fault.size) if not (fault.loses_a_rank and one == fault.victim)]
    store = cl.PrefixStore("after", rank.store)
    here = left.index(rank.rank)
    with cl.Group.create(store, here, len(left), "cuda:0", generation=1, timeout_s=30) as group:
        work_until_the_end(group, rounds=2)
        assert group.failure() is None


def go_through(rank: Rank, fault: Fault) -> float:
    group = rank.group(timeout_s=TIMEOUT_S)
    group.barrier().wait()
    if rank.rank == fault.victim:
        threading.Timer(fault.after_s, strike, (fault, group)).start()
    try:
        return work_until_the_end(group)
    finally:
        group.close()


def assert_nothing_is_left() -> None:
    give_up_at = time.monotonic() + PATIENCE_S
    while True:
        gc.collect()
        left = {
            "communicators": len(nccl.living),
            "bytes": memory.allocated(),
            "streams": len(streams.living),
            "threads": [t.name for t in threading.enumerate() if t.name.startswith("chorusline")],
        }
        if not any(left.values()):
            return
        assert time.monotonic() < give_up_at, f"left behind: {left}"
        time.sleep(0.05)


@pytest.mark.parametrize("seed", seeds(50))
def test_a_fault_on_stand_in_gpus_gives_no_wrong_result_no_hang_and_no_leak(seed: int) -> None:
    fault = Fault.of(seed)
    lost = [fault.victim] if fault.loses_a_rank else []
    with StandInRanks(fault.size, seed=seed, jitter_s=fault.jitter_s) as ranks:
        waited_s = ranks.run(live_through, fault, lost=lost)
    assert max(waited_s) < TIMEOUT_S + PATIENCE_S, fault
