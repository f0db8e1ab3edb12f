"""What the driver asks the ranks before some of them leave on notice."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from chorusline.actors.driver.driver import Driver, _InstructionTasks
from chorusline.actors.driver.events import (
    Leaving,
    RankEnded,
    RankFroze,
    RunStarted,
    WorkerRegistered,
)
from chorusline.actors.driver.instructions import DismissRank
from chorusline.actors.driver.membership import Membership
from chorusline.actors.messages.admission import Readiness
from chorusline.actors.messages.messages import Failure, Frozen
from chorusline.collectives.contract.errors import GroupAborted
from tests.references.driver_events import GONE, death, request, worker


def test_a_worker_that_has_left_hears_that_it_has_no_rank() -> None:
    """It lives for a while, and says where it is: as a rank it would hold back what is said of the
    others."""
    tasks: Any = object.__new__(_InstructionTasks)
    called = []
    tasks._generation = 0
    tasks._call = lambda *of_call: called.append(of_call)
    tasks._start = lambda work, name: None
    left = GroupAborted(0, [], "its node is drained")
    assert tasks.carry_out([DismissRank("worker-0-0", left)]) is None
    assert called == [("worker-0-0", "rest", left)]


class Rank:
    """A worker, as the driver asks it how ready it is. meanwhile: what happens as it says so."""

    def __init__(
        self,
        meanwhile: Callable[[], None] = lambda: None,
        answer: Readiness = Readiness.RUNS_AGAIN,
    ) -> None:
        self._meanwhile = meanwhile
        self._answer = answer
        self.readiness = SimpleNamespace(remote=self._readiness)

    async def _readiness(self, run: int, for_departure: bool) -> Readiness:
        self._meanwhile()
        return self._answer


def driver_of(*nodes: str) -> Any:
    """In a run that continues, with a worker on each of these nodes."""
    driver: Any = object.__new__(Driver)
    driver._membership = membership = Membership()
    driver._run, driver._events, driver._num_ready = 0, asyncio.Queue(), 0
    driver._holds, driver._lost, driver._has_lost = Counter(), [], asyncio.Event()
    for seat, node in enumerate(nodes):
        membership.handle(WorkerRegistered(worker(seat, node)))
    membership.handle(RunStarted(request(0, 1, None)))
    return driver


@pytest.mark.parametrize("has_ended", [False, True])
async def test_a_second_node_is_left_before_the_seat_of_the_first_is_filled(
    has_ended: bool,
) -> None:
    driver = driver_of("a", "b", "c")
    membership = driver._membership
    membership.handle(Leaving("b", "it is drained"))
    told = []
    for rank in range(3):
        told += membership.handle(RankFroze(Frozen(rank, 0, (), GONE, spare=1)))
    assert [one.worker_id for one in told if isinstance(one, DismissRank)] == ["worker-1-0"]
    driver._note_losses(RankFroze(Frozen(2, 0, (), GONE, spare=1)), told)
    if has_ended:
        left = Failure(1, b"", "GroupAborted: it has left", "Traceback", (), True)
        membership.handle(RankEnded(left, "worker-1-0"))
    # One that is in no run, or has no process any more, is ready for nothing.
    driver._workers = {
        "worker-0-0": Rank(),
        "worker-1-0": Rank(answer=Readiness.NOT_YET),
        "worker-2-0": Rank(),
    }
    await driver.leaves(0, "c", "it is drained")
    assert driver._events.get_nowait().can_end
    assert [one.worker_id for one in membership.handle(Leaving("c", "it is drained"))[:2]] == [
        "worker-0-0",
        "worker-2-0",
    ]
    assert driver.idle() == [], "the session ends the one that has left: it is not lost"


@pytest.mark.parametrize("dies", [False, True])
async def test_ranks_that_were_asked_in_the_generation_before_are_asked_again(dies: bool) -> None:
    driver = driver_of("node-a", "node-a", "node-a")
    membership = driver._membership

    def others_recover() -> None:
        if dies:
            membership.handle(death(2))
            for rank in (0, 1):
                membership.handle(RankFroze(Frozen(rank, 0, (), GONE)))

    ranks = (Rank(lambda: None), Rank(others_recover))
    driver._workers = {f"worker-{seat}-0": rank for seat, rank in enumerate(ranks)}
    await driver.leaves(0, "worker-0-0", "SIGTERM")
    notice = driver._events.get_nowait()
    assert isinstance(notice, Leaving)
    assert notice.can_end is not dies
