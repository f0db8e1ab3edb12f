"""The seats that are filled during a run, each once for each worker that it loses."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from chorusline.actors.driver.driver import Unfit
from chorusline.actors.messages.messages import RunRequest
from chorusline.actors.ray_calls.calls import ActorGone
from chorusline.actors.worker_group import recruiting
from chorusline.actors.worker_group.news import Listener
from chorusline.actors.worker_group.recruiting import Recruiter
from chorusline.actors.worker_group.spare_workers import SpareWorkers

AFTER_A_DRIVER: dict[str, list[list[Any]]] = {
    "both": [[(1, "worker-1")], []],
    "the session": [[]],
}
"""What a driver that has taken over says of lost workers: one, or none, where it died with the
driver before; and then that the run is over. By who knows of the death."""


class Worker:
    def __init__(self, name: str) -> None:
        self._actor_id = SimpleNamespace(hex=lambda: name)
        self.until_heard = remote(lambda: None)


def remote(reply: Any) -> Any:
    """A method of an actor: its call returns what `reply` does."""

    async def called(*arguments: Any) -> Any:
        return reply(*arguments)

    return SimpleNamespace(remote=called)


async def no_spare(seat: int) -> None:
    return None


def recruiter_of(
    adopt: Any, lost_workers: Any, workers: dict[int, Any], most: int, start: Any, wait_for: Any
) -> Recruiter:
    """adopt, lost_workers: what the driver answers. start, wait_for: of a seat."""
    driver = SimpleNamespace(
        adopt=remote(adopt),
        lost_workers=SimpleNamespace(remote=lost_workers),
        why_waits=remote(lambda run, worker: ""),
    )
    seats: Any = SimpleNamespace(most=most, spare_seats=range(0), wait_for=wait_for)
    return Recruiter(
        driver,
        RunRequest(0, 5.0, keep_reports=False, max_failures=None),
        seats,
        workers,
        start,
        SpareWorkers(seats, start),
        no_spare,
        set(),
        None,
        Listener({}, set()),
    )


@pytest.mark.parametrize("who_knows", AFTER_A_DRIVER)
async def test_a_worker_that_died_with_the_driver_is_replaced_once(who_knows: str) -> None:
    workers: dict[int, Any] = {seat: Worker(f"worker-{seat}") for seat in range(2)}
    started = []
    there_is_room = asyncio.Event()

    def start(seat: int) -> Any:
        started.append(seat)
        workers[seat] = Worker(f"worker-{seat}-again")
        workers[seat].prepare = remote(lambda program: None)
        return workers[seat]

    def adopt(asked: dict[int, Any], timeout_s: float, versions: Any) -> tuple[Unfit, ...]:
        dead = [seat for seat, one in asked.items() if one._actor_id.hex() == "worker-1"]
        return tuple(Unfit(seat, True, "is gone") for seat in dead)

    answers = iter(AFTER_A_DRIVER[who_knows])
    lost_workers = remote(lambda run, known: next(answers)).remote

    async def wait_for(seat: int) -> None:
        await there_is_room.wait()

    recruiter = recruiter_of(adopt, lost_workers, workers, 2, start, wait_for)
    recruiting = asyncio.create_task(recruiter._recruit(has_taken_over=True))
    await asyncio.sleep(0.05)  # Both have been told of it, and there is no room yet.
    there_is_room.set()
    await asyncio.sleep(0.05)
    recruiting.cancel()
    await asyncio.wait([recruiting])
    assert started == [1]


async def test_seats_for_which_there_was_no_room_at_first_are_filled_when_there_is() -> None:
    """As when a node comes to a run that began below its most workers."""
    workers: dict[int, Any] = {0: Worker("worker-0")}
    started: list[int] = []
    rooms = {seat: asyncio.Event() for seat in range(3)}
    is_over = asyncio.Event()

    def start(seat: int) -> Any:
        started.append(seat)
        workers[seat] = Worker(f"worker-{seat}")
        workers[seat].prepare = remote(lambda program: None)
        return workers[seat]

    async def lost_workers(run: int, known: int) -> list[Any]:
        await is_over.wait()
        return []

    async def wait_for(seat: int) -> None:
        await rooms[seat].wait()

    adopted: list[int] = []

    def adopt(asked: dict[int, Any], timeout_s: float, versions: Any) -> tuple[Unfit, ...]:
        adopted.extend(asked)
        return ()

    recruiter = recruiter_of(adopt, lost_workers, workers, 3, start, wait_for)
    filling = asyncio.create_task(recruiter._recruit(has_taken_over=False))
    for seat, known in ((2, [2]), (1, [2, 1])):
        await asyncio.sleep(0.02)
        assert started == known[:-1], "there is no room yet"
        rooms[seat].set()
        async with asyncio.timeout(5):
            while len(adopted) < len(known):
                await asyncio.sleep(0.01)
        assert started == adopted == known
    filling.cancel()
    await asyncio.wait([filling])


async def test_a_worker_that_cannot_take_part_is_told_of_once() -> None:
    """Each attempt to fill the seat finds the same."""
    listener = Listener({}, set())

    def adopt(asked: dict[int, Any], timeout_s: float, versions: Any) -> tuple[Unfit, ...]:
        return (Unfit(1, False, "runs torch 1 (the caller has 2)"),)

    worker: Any = Worker("worker-1")
    worker.prepare = remote(lambda program: None)
    nobody: Any = None
    recruiter = Recruiter(
        SimpleNamespace(adopt=remote(adopt)),
        RunRequest(0, 5.0, keep_reports=False, max_failures=None),
        nobody,
        {},
        nobody,
        nobody,
        nobody,
        set(),
        None,
        listener,
    )
    for _ in range(3):
        assert not await recruiter._has_come(1, worker, is_prepared=False)
    [notice] = (await listener.pull(0, 1.0)).notices
    assert notice == (
        "a new worker runs torch 1 (the caller has 2); it cannot take part, and another one is "
        "started"
    )


async def test_a_worker_that_dies_in_its_dry_run_is_replaced_once() -> None:
    """The new driver tells of its death while the session waits for it to be idle."""
    workers: dict[int, Any] = {seat: Worker(f"worker-{seat}") for seat in range(2)}
    started = []
    is_dead, is_over = asyncio.Event(), asyncio.Event()

    def start(seat: int) -> Any:
        started.append(seat)
        workers[seat] = Worker(f"worker-{seat}-again")

        async def prepare(program: Any) -> None:
            await is_over.wait()

        workers[seat].prepare = SimpleNamespace(remote=prepare)
        return workers[seat]

    def adopt(asked: dict[int, Any], timeout_s: float, versions: Any) -> tuple[Unfit, ...]:
        names = {seat: one._actor_id.hex() for seat, one in asked.items()}
        return tuple(
            Unfit(seat, is_dead.is_set(), "stops", not is_dead.is_set())
            for seat, name in names.items()
            if name == "worker-1"
        )

    async def lost_workers(run: int, known: int) -> list[Any]:
        if known:
            await is_over.wait()
            return []
        await asyncio.sleep(0.05)
        is_dead.set()
        return [(1, "worker-1")]

    async def at_once(seat: int) -> None:
        pass

    recruiter = recruiter_of(adopt, lost_workers, workers, 2, start, at_once)
    recruiting = asyncio.create_task(recruiter._recruit(has_taken_over=True))
    await asyncio.sleep(0.5)
    recruiting.cancel()
    await asyncio.wait([recruiting])
    assert started == [1]


class Spare(Worker):
    """A spare worker on a node."""

    def __init__(self, node_id: str) -> None:
        super().__init__(f"spare on {node_id}")
        self.is_killed = asyncio.Event()
        self.prepare = remote(lambda program: None)
        self.snapshot = remote(lambda: SimpleNamespace(info=SimpleNamespace(node_id=node_id)))
        self.wait_for_seat = SimpleNamespace(remote=self._until_killed)

    async def _until_killed(self) -> None:
        await self.is_killed.wait()
        raise ActorGone("it was killed")


async def test_a_spare_worker_on_a_node_that_leaves_counts_for_no_rank_that_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The run would fall below the fewest for it; another one is started elsewhere."""
    monkeypatch.setattr(recruiting, "nodes_leaving", lambda: {"node-b": "it is drained"})
    monkeypatch.setattr(recruiting, "NODE_WATCH_S", 0.02)
    monkeypatch.setattr(ray, "kill", lambda worker: worker.is_killed.set())
    told: list[Any] = []
    driver = SimpleNamespace(
        has_spares=remote(told.append), leaves=remote(lambda run, node, why: told.append(node))
    )

    async def at_once(seat: int) -> None:
        pass

    seats: Any = SimpleNamespace(most=2, spare_seats=range(2, 3), wait_for=at_once)
    nodes = iter(["node-b", "node-c"])

    def make(seat: int) -> Any:
        return Spare(next(nodes))

    spares = SpareWorkers(seats, make)
    nobody: Any = None
    recruiter = Recruiter(
        driver,
        RunRequest(0, 5.0, keep_reports=False, max_failures=None),
        seats,
        {},
        nobody,
        spares,
        nobody,
        set(),
        None,
        nobody,
    )
    async with spares.kept(None), asyncio.timeout(30):
        await spares.wait_for_one()
        watching = asyncio.create_task(recruiter._watch_nodes())
        while 1 not in told:
            await asyncio.sleep(0.02)
        watching.cancel()
        await asyncio.wait([watching])
    assert told[0] == "node-b" and spares.num_ready == 1
