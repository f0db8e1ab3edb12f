"""A barrier of messages, which tells who is missing while other ranks hang in a collective."""

from __future__ import annotations

import time

import torch

from ..contract.errors import CollectiveError, CollectiveTimeout
from ..group import Group

_TAG = (1 << 29) - 1  # the last one that a group takes; those of programs begin at 0
_LOOK_S = 0.001


class BarrierNotPassed(CollectiveTimeout):
    """What `monitored_barrier` of a process group raises: `CollectiveTimeout`, in torch's words."""

    def __str__(self) -> str:
        return (
            f"{self.whereabouts} ({self.operation} in generation {self.generation}, "
            f"{self.timeout_s:g} s). The generation has ended; form a new process group of those "
            "that are left."
        )


def monitored_barrier(group: Group, timeout_s: float, wait_all_ranks: bool) -> None:
    """Every rank sends a message to rank 0, which answers when it has those of all.

    1. Rank 0 receives from all; whoever's message does not come in time is missing. It names the
       first of them, or with wait_all_ranks all, and ends the generation.
    2. It answers all.

    Unlike `Group.monitored_barrier`, a collective, it passes by ranks that hang in one.
    """
    token = torch.zeros(1, dtype=torch.int64)
    began_at = time.monotonic()
    if group.size == 1:
        return
    if group.rank != 0:
        try:
            group.send(token, 0, _TAG, timeout_s=max(timeout_s, _LOOK_S)).wait()
            # Rank 0's verdict comes after its deadline, which may have begun later than ours.
            group.recv(token, 0, _TAG, timeout_s=2 * timeout_s + 1).wait()
        except CollectiveError as error:
            told = (
                f"Rank {group.rank} successfully reached monitoredBarrier, but received errors "
                f"while waiting for send/recv from rank 0: {error}"
            )
            raise BarrierNotPassed(
                "monitored_barrier", group.generation, error.ranks, timeout_s, told
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
        told = "Rank 0 timed out in monitoredBarrier: it had no time to hear from"
        told = f"{told} ranks {missing}"
    elif len(missing) == 1:
        told = f"Rank {missing[0]} failed to pass monitoredBarrier in {timeout_s * 1e3:g} ms"
    else:
        ranks = ", ".join(map(str, missing))
        told = f"Ranks {ranks} failed to pass monitoredBarrier in {timeout_s * 1e3:g} ms"
    error = BarrierNotPassed("monitored_barrier", group.generation, missing, timeout_s, told)
    group.abort(CollectiveTimeout("monitored_barrier", group.generation, missing, timeout_s, told))
    return error
