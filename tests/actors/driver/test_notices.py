"""What the driver asks the ranks before some of them leave on notice."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from chorusline.actors.driver.driver import Driver, _InstructionTasks
from chorusline.actors.driver.events import Leaving, RankFroze, RunStarted, WorkerRegistered
from chorusline.actors.driver.instructions import DismissRank
from chorusline.actors.driver.membership import Membership
from chorusline.actors.messages.admission import Readiness
from chorusline.actors.messages.messages import Frozen
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
    """A worker that is ready for the end of its generation. meanwhile: what happens as it says
    so."""

    def __init__(self, meanwhile: Callable[[], None]) -> None:
        self._meanwhile = meanwhile
        self.readiness = SimpleNamespace(remote=self._readiness)

    async def _readiness(self, run: int, for_departure: bool) -> Readiness:
        self._meanwhile()
        return Readiness.RUNS_AGAIN


@pytest.mark.parametrize("dies", [False, True])
async def test_ranks_that_were_asked_in_the_generation_before_are_asked_again(dies: bool) -> None:
    driver: Any = object.__new__(Driver)
    driver._membership = membership = Membership()
    driver._run, driver._events, driver._num_ready = 0, asyncio.Queue(), 0
    driver._holds, driver._lost, driver._has_lost = Counter(), [], asyncio.Event()
    for seat in range(3):
        membership.handle(WorkerRegistered(worker(seat)))
    membership.handle(RunStarted(request(0, 1, None)))

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
