"""A generation that ends while its ranks still meet: each rank hears of it wherever it waits."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

import chorusline as cl
from chorusline.actors.ray_calls.actor_store import ActorStore
from chorusline.actors.worker_group.spare_workers import SpareWorkers
from chorusline.collectives.stores.store import Data, encoded, key_of_rank
from tests.harness.arrivals import FEW, ready, spares_ready


class CancelledBeforeItsCards(ActorStore):
    """The store of a rank that is told that the generation is over when it has shown its card,
    before it reads those of the others, and so before it maps the memory."""

    def gather(
        self, name: Data, rank: int, size: int, value: Data, timeout_s: float | None = None
    ) -> list[bytes]:
        self.set(key_of_rank(encoded(name, "name"), rank), value)
        self.is_there.set()
        self.may_read.wait(30)
        self.cancel(cl.GroupAborted(0, [], "a newcomer has come"))
        return super().gather(name, rank, size, value, timeout_s)


def test_a_rank_that_waits_in_the_memory_of_its_host_leaves_it_when_its_store_is_cancelled(
    cluster: None,
) -> None:
    began_at = time.monotonic()
    mine = ActorStore.start()
    theirs = CancelledBeforeItsCards(mine._actor, mine.secret)
    theirs.is_there, theirs.may_read = threading.Event(), threading.Event()
    errors: dict[int, BaseException] = {}

    def meet(rank: int, store: ActorStore) -> None:
        try:
            cl.Group.create(store, rank, 2, timeout_s=60)
        except cl.CollectiveError as error:
            errors[rank] = error

    ranks = [threading.Thread(target=meet, args=one) for one in ((0, mine), (1, theirs))]
    for one in ranks:
        one.start()
    assert theirs.is_there.wait(30)
    mine.wait(["group/default/0/1/card/1"], 30)
    time.sleep(0.2)  # Rank 0 has both cards, and waits for rank 1 in the memory.
    mine.cancel(cl.GroupAborted(0, [], "a newcomer has come"))
    ranks[0].join(30)
    theirs.may_read.set()
    ranks[1].join(30)
    assert {rank: type(error) for rank, error in errors.items()} == dict.fromkeys(
        (0, 1), cl.GroupAborted
    )
    ray.kill(mine._actor)
    assert time.monotonic() - began_at < 30, "nobody has waited for the deadline"


@contextmanager
def shows_its_group_late(generation: int, folder: Path, rank: int) -> Iterator[None]:
    """In the body, this rank has the group of `generation` and has not shown it to its control loop
    when that is told that the generation is over."""
    create = cl.Group._create_prepared

    def created(
        one: Any, endpoints: Any, look: Any, store: ActorStore, *args: Any, **kwargs: Any
    ) -> cl.Group:
        group = create(one, endpoints, look, store, *args, **kwargs)
        if kwargs["generation"] == generation:
            (folder / f"met-{rank}").touch()
            give_up_at = time.monotonic() + 30
            while store._cancelled_by is None:
                assert time.monotonic() < give_up_at
                time.sleep(0.01)
        return group

    cl.Group._create_prepared = created  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        cl.Group._create_prepared = create  # type: ignore[method-assign]


def train(ctx: cl.Context, folder: Path) -> tuple[int, int, list[list[float]]]:
    """Rank 2 is killed before the third step, when a spare worker is ready. It comes when the two
    others have made the group of the next generation."""
    torch.manual_seed(0)
    model = cl.DistributedDataParallel(torch.nn.Linear(4, 2))
    optim = cl.ZeroRedundancyOptimizer(model, torch.optim.AdamW, lr=0.1, replicas=2)
    ctx.register("model", model)
    ctx.register("optim", optim)
    with shows_its_group_late(ctx.broadcast(ctx.generation) + 1, folder, ctx.rank):
        for _ in ctx.epochs(1):
            with cl.Join([model, optim]):
                for batch in ctx.shard(torch.arange(800.0).view(200, 4), 1):
                    if optim.num_steps == 2 and not (folder / "killed").exists():
                        ready(folder / "has_spares")
                        if ctx.rank == 2:
                            (folder / "killed").touch()
                            os.kill(os.getpid(), signal.SIGKILL)
                    if ctx.world_size == 2:
                        time.sleep(0.5)  # They would be there for long.
                    model(batch).square().mean().backward()
                    optim.step()
                    optim.zero_grad()
    return ctx.world_size, optim.num_steps, model.module.weight.tolist()


async def test_a_generation_that_ends_when_its_ranks_have_just_met_is_left_by_all(
    cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sit = SpareWorkers._seat_worker

    async def sit_later(self: SpareWorkers, worker: Any, seat: int) -> None:
        await asyncio.to_thread(lambda: [ready(tmp_path / f"met-{rank}") for rank in (0, 1)])
        await sit(self, worker, seat)

    monkeypatch.setattr(SpareWorkers, "_seat_worker", sit_later)
    async with cl.Session((1, 3), spares=1, resources_per_worker=FEW, timeout_s=60) as session:
        run = asyncio.create_task(session.run(train, folder=tmp_path))
        await spares_ready(session, 1)
        (tmp_path / "has_spares").touch()
        told = await asyncio.wait_for(run, 45)  # Well below the deadline of 60 s.
    assert [size for size, _, _ in told] == [3, 3, 3], "the spare worker has come"
    assert len({steps for _, steps, _ in told}) == 1
    assert all(weight == told[0][2] for _, _, weight in told)
