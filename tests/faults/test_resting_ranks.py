"""A collective that waits for ranks whose function has returned fails before its deadline."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

import chorusline as cl
from chorusline.collectives.contract.errors import CollectiveError, CollectiveMismatch
from tests.harness.ranks import Rank, error_of, run_ranks, transports


def rest_in_the_second_task(rank: Rank, level: str) -> CollectiveError | None:
    cl.set_debug_level(cl.DebugLevel[level])
    group = rank.group()
    group.all_reduce(torch.ones(2)).wait()
    if rank.rank:
        group.rest()
        time.sleep(0.7)  # Rank 0 turns to the next task while the others still rest.
    group.meet().wait()
    group.all_reduce(torch.ones(2)).wait()
    if rank.rank == 1:
        group.rest()
        while group.failure() is None:
            time.sleep(0.02)
        return group.failure()
    error: CollectiveError | None = error_of(group.all_reduce(torch.ones(2)).wait)
    return error


@transports
@pytest.mark.parametrize("level", ["OFF", "DETAIL"])
def test_a_rank_that_rests_fails_the_others_collectives_until_it_turns(
    tmp_path: Path, transport: str, level: str
) -> None:
    for error in run_ranks(rest_in_the_second_task, 3, tmp_path, transport, level):
        assert isinstance(error, CollectiveMismatch)
        assert error.ranks == [1]
        assert "their function has returned" in str(error)


def rest_while_one_is_on_its_way(rank: Rank) -> float:
    """Issued, and not waited for: the rank still takes part."""
    group = rank.group()
    tensor = torch.ones(4)
    if rank.rank == 1:
        work = group.all_reduce(tensor)
        group.rest()
        time.sleep(0.5)
        work.wait()
    else:
        time.sleep(0.2)
        group.all_reduce(tensor).wait()
    return float(tensor.sum())


@transports
def test_what_a_resting_rank_has_issued_it_takes_part_in(tmp_path: Path, transport: str) -> None:
    assert run_ranks(rest_while_one_is_on_its_way, 2, tmp_path, transport) == [8.0, 8.0]


def reduce_on_rank_0(ctx: cl.Context, alone: bool) -> float:
    mean = ctx.reduce(float(ctx.rank))
    if alone and ctx.rank == 0:
        ctx.reduce(1.0)
    return float(mean)


@pytest.mark.parametrize("num_workers", [2, (2, 2), (1, 2)], ids=["fixed", "goes on", "elastic"])
async def test_what_one_rank_does_alone_fails_before_its_deadline_and_the_session_goes_on(
    cluster: None, num_workers: int | tuple[int, int]
) -> None:
    few = {"CPU": 0.1}
    async with cl.Session(num_workers, resources_per_worker=few, timeout_s=60) as session:
        for _ in range(2):
            before = await session.run(reduce_on_rank_0, alone=False)
            with pytest.raises(CollectiveMismatch, match=r"if ctx\.rank == 0:") as raised:
                await session.run(reduce_on_rank_0, alone=True)
            assert raised.value.ranks == [1]
            assert await session.run(reduce_on_rank_0, alone=False) == before
