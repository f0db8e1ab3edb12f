"""Which workers a session has before a run begins."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from chorusline.actors.worker_group.worker_group import WorkerGroup


def group_of_one(vacant: list[int]) -> Any:
    """Two workers, of which the first is there. vacant: the seats that there is room for."""
    seats: Any = SimpleNamespace(most=2, has_all=False, vacant=lambda taken: vacant)
    group: Any = WorkerGroup(
        seats,
        fewest=1 if vacant else 2,
        use_gpu=False,
        driver_options={},
        environment={},
        modules=(),
        detached=None,
    )
    group._driver, group._workers[0] = "driver", "worker 0"
    group.is_assembled = group._was_assembled = True
    return group


async def test_a_spare_worker_takes_a_seat_that_there_is_no_room_for() -> None:
    """Its own node is another one: the seat's may have gone."""
    group = group_of_one(vacant=[])
    spares = ["spare"]
    adopted: dict[int, Any] = {}

    async def take(seat: int) -> Any:
        return spares.pop() if spares else None

    async def adopt(workers: Mapping[int, Any], timeout_s: float) -> tuple[()]:
        adopted.update(workers)
        return ()

    group._spares, group._adopt = SimpleNamespace(take=take), adopt
    await group.assemble(0.0)
    assert adopted == {1: "spare"} and group.num_workers == 2


async def test_a_worker_that_starts_as_the_session_is_interrupted_is_asked_again() -> None:
    group = group_of_one(vacant=[1])
    is_asked = asyncio.Event()

    async def adopt(workers: Mapping[int, Any], timeout_s: float) -> tuple[()]:
        is_asked.set()
        await asyncio.Event().wait()
        return ()

    group._adopt, group._made = adopt, lambda seat: f"worker {seat}"
    assembling = asyncio.create_task(group.assemble(5.0))
    await is_asked.wait()
    assembling.cancel()
    await asyncio.wait([assembling])
    assert group._starting == {1} and not group.is_assembled
