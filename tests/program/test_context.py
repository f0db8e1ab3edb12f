"""What a function asks of its context: to wait for all ranks, and for an object of one of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

import chorusline as cl
from tests.references.checkpoint_runs import in_run


def meet(ctx: cl.Context) -> tuple[float, float]:
    """When this rank has come, and when it goes on."""
    time.sleep(0.3 * ctx.rank)
    came_at = time.monotonic()
    ctx.barrier()
    return came_at, time.monotonic()


def test_nobody_leaves_a_barrier_before_the_last_rank_has_come(
    ranks_of: Callable[[int], Any],
) -> None:
    times = ranks_of(2).run(in_run, meet, None)
    assert max(came for came, _ in times) <= min(left for _, left in times)


def take(ctx: cl.Context) -> tuple[bool, dict[str, Any]]:
    own = {"rank": ctx.rank, "values": torch.full((2,), float(ctx.rank))}
    taken = ctx.broadcast(own, root=1)
    return taken is own, taken


def test_the_root_of_a_broadcast_gets_its_own_object_back(ranks_of: Callable[[int], Any]) -> None:
    (is_own, first), (is_roots, second) = ranks_of(2).run(in_run, take, None)
    assert (is_own, is_roots) == (False, True)
    for taken in first, second:
        assert taken["rank"] == 1 and taken["values"].tolist() == [1.0, 1.0]
