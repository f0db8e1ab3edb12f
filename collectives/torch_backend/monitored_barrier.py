"""A barrier of messages, which names missing ranks even while they hang in a collective."""

from __future__ import annotations

import time

import torch

from ..contract.errors import CollectiveError, CollectiveTimeout
from ..group import Group

_TAG = (1 << 29) - 1  # the highest tag that a group accepts; programs count from 0
_LOOK_S = 0.001


class BarrierNotPassed(CollectiveTimeout):
    """The CollectiveTimeout of a process group's `monitored_barrier`, in torch's words."""

    def __str__(self) -> str:
        return (
            f"{self.whereabouts} ({self.operation} in generation {self.generation}, "
            f"{self.timeout_s:g} s). The generation has ended; make a new process group of the "
            "ranks that are left."
        )


def monitored_barrier(group: Group, timeout_s: float, wait_all_ranks: bool) -> None:
    """Every rank sends a message to rank 0, which answers when it has received all of them.

    1. Rank 0 receives from all ranks. If messages do not come in time, it names the first missing
       rank, or all missing ranks with wait_all_ranks, and ends the generation.
    2. Rank 0 answers all ranks.

    `Group.monitored_barrier` is a collective; this one works while ranks hang in a collective.
    """
    token = torch.zeros(1, dtype=torch.int64, device="cpu")
    began_at = time.monotonic()
    if group.size == 1:
        return
    if group.rank != 0:
        try:
            group.send(token, 0, _TAG, timeout_s=max(timeout_s, _LOOK_S)).wait()
            # Rank 0 answers until its deadline, which may have begun later than this rank's.
            group.recv(token, 0, _TAG, timeout_s=2 * timeout_s + 1).wait()
        except CollectiveError as error:
            text = (
                f"Rank {group.rank} successfully reached monitoredBarrier, but received errors "
                f"while waiting for send/recv from rank 0: {error}"
            )
            raise BarrierNotPassed(
                "monitored_barrier", group.generation, error.ranks, timeout_s, text
            ) from error
        return
    coming = {  # 1
        rank: group.recv(torch.empty_like(token), rank, _TAG, timeout_s=2 * timeout_s + 1)
        for rank in range(1, group.size)
    }
    while missing := [rank for rank, work in coming.items() if not work.is_completed()]:
        if time.monotonic() - began_at >= timeout_s:
            raise _ended(group, missing if wait_all_ranks else missing[:1], timeout_s)
        time.sleep(_LOOK_S)
    for work in coming.values():
        work.wait()
    for rank in range(1, group.size):  # 2
        group.send(token, rank, _TAG, timeout_s=max(timeout_s, _LOOK_S)).wait()


def _ended(group: Group, missing: list[int], timeout_s: float) -> BarrierNotPassed:
    if timeout_s <= 0:
        text = (
            "Rank 0 timed out in monitoredBarrier: it ran out of time before it heard from ranks "
            f"{missing}"
        )
    elif len(missing) == 1:
        text = f"Rank {missing[0]} failed to pass monitoredBarrier in {timeout_s * 1e3:g} ms"
    else:
        ranks = ", ".join(map(str, missing))
        text = f"Ranks {ranks} failed to pass monitoredBarrier in {timeout_s * 1e3:g} ms"
    error = BarrierNotPassed("monitored_barrier", group.generation, missing, timeout_s, text)
    group.abort(CollectiveTimeout("monitored_barrier", group.generation, missing, timeout_s, text))
    return error
