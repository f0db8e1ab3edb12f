"""Workers that come to a run whose functions go on where they are: the driver's decisions."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace

import pytest

from chorusline.actors.driver import events, instructions
from chorusline.actors.driver.arrivals import MOST_ATTEMPTS
from chorusline.actors.driver.events import Event
from chorusline.actors.driver.instructions import Instruction
from chorusline.actors.driver.membership import Membership
from chorusline.actors.driver.run_state import Phase
from chorusline.actors.messages.admission import ReadyToken
from chorusline.actors.messages.messages import (
    Assignment,
    Failure,
    Frozen,
    MemberState,
    OptimizerProgress,
    PlaceInRun,
    RunSucceeded,
    Success,
    Waiting,
)
from chorusline.collectives.contract.endpoint import Endpoint
from tests.references.driver_events import GONE, death, request, resumptions, worker

HERE = ReadyToken("0/0/steps#0", "objects", 3)


def froze(rank: int, generation: int, *, at_boundary: bool) -> events.RankFroze:
    word = Frozen(rank, generation, (OptimizerProgress(5, (5.0,)),), GONE, generation)
    waiting = Waiting.AT_BOUNDARY if at_boundary else Waiting.IN_STEP
    return events.RankFroze(replace(word, admits=True, waiting=waiting))


def with_newcomers(*seats: int, num: int = 2) -> tuple[Membership, list[Instruction]]:
    """`num` ranks train, and can take workers in; those of `seats` make a dry run."""
    membership = Membership()
    for seat in range(num):
        membership.handle(events.WorkerRegistered(worker(seat)))
    membership.handle(events.RunStarted(request(0, 1, None, False)))
    for seat in seats:
        membership.handle(events.WorkerRegistered(worker(seat)))
    return membership, membership.handle(events.RanksReady(0, True))


def of_kind(told: list[Instruction], kind: type) -> list[Instruction]:
    return [one for one in told if isinstance(one, kind)]


def states(membership: Membership) -> dict[int, MemberState]:
    return {seat: member.state for seat, member in membership._members.items()}


def test_a_dry_run_has_the_place_that_it_will_have_and_nobody_is_interrupted() -> None:
    membership, told = with_newcomers(2)
    [begin] = told
    assert isinstance(begin, instructions.BeginDryRun)
    assert (begin.assignment.rank, begin.assignment.world_size) == (2, 3)
    assert begin.source == worker(0).worker_id
    assert states(membership)[2] is MemberState.DRY_RUN


def test_all_ranks_are_invited_when_all_that_come_wait() -> None:
    membership, _ = with_newcomers(2, 3)
    assert membership.handle(events.DryRunReady(worker(2).worker_id, HERE)) == []
    told = membership.handle(events.DryRunReady(worker(3).worker_id, HERE))
    assert [one.worker_id for one in of_kind(told, instructions.RequestAdmission)] == [  # type: ignore[attr-defined]
        worker(0).worker_id,
        worker(1).worker_id,
    ]
    requests = [one.request for one in told if isinstance(one, instructions.RequestAdmission)]
    assert {(one.generation, one.token) for one in requests} == {(0, HERE)}


def waiting(*seats: int) -> Membership:
    membership, _ = with_newcomers(*seats)
    for seat in seats:
        membership.handle(events.DryRunReady(worker(seat).worker_id, HERE))
    return membership


@pytest.mark.parametrize("seats", [(2,), (2, 3)])
def test_workers_come_in_where_all_ranks_wait_for_them(seats: tuple[int, ...]) -> None:
    membership = waiting(*seats)
    membership.handle(froze(0, 0, at_boundary=True))
    told = resumptions(membership.handle(froze(1, 0, at_boundary=True)))
    assert set(told) == {worker(seat).worker_id for seat in (0, 1, *seats)}
    for resumption in told.values():
        assert resumption.former_ranks == (0, 1, *(-1 for _ in seats))
        assert not resumption.restarts and resumption.assignment.generation == 1
    assert all(state is MemberState.RUNNING for state in states(membership).values())


@pytest.mark.parametrize("room", [3, 2])
def test_who_comes_after_a_dry_run_is_met_where_the_others_meet(room: int) -> None:
    here = [Endpoint("here", 100 + rank, 7, 1, room) for rank in range(3)]
    membership, _ = with_newcomers(2)
    membership.handle(events.DryRunReady(worker(2).worker_id, HERE, here[2]))
    words = [froze(rank, 0, at_boundary=True).frozen for rank in range(2)]
    told = [
        membership.handle(events.RankFroze(replace(word, endpoint=here[word.rank])))
        for word in words
    ]
    expected = tuple(here) if room >= 3 else ()
    assert [one.endpoints for one in resumptions(told[-1]).values()] == [expected] * 3


def test_ranks_that_were_interrupted_in_a_step_go_on_alone_and_the_dry_run_is_repeated() -> None:
    membership = waiting(2)
    membership.handle(froze(0, 0, at_boundary=True))
    told = membership.handle(froze(1, 0, at_boundary=False))
    assert set(resumptions(told)) == {worker(0).worker_id, worker(1).worker_id}
    [stop] = of_kind(told, instructions.AbortRank)
    assert stop.worker_id == worker(2).worker_id  # type: ignore[attr-defined]
    told = membership.handle(ended(2))
    assert of_kind(told, instructions.AwaitReadiness)
    told = membership.handle(events.RanksReady(1, True))
    assert of_kind(told, instructions.BeginDryRun)


def ended(seat: int, rank: int = 2) -> Event:
    failure = Failure(rank, None, "GroupAborted", "", (), True)
    return events.RankEnded(failure, worker(seat).worker_id)


def test_a_rank_that_dies_changes_the_places_so_the_dry_run_is_repeated() -> None:
    membership = waiting(2)
    membership.handle(death(1))
    told = membership.handle(froze(0, 0, at_boundary=True))
    assert set(resumptions(told)) == {worker(0).worker_id}
    membership.handle(ended(2))
    [begin] = membership.handle(events.RanksReady(1, True))
    assert isinstance(begin, instructions.BeginDryRun)
    assert (begin.assignment.rank, begin.assignment.world_size) == (1, 2)


def test_a_worker_that_dies_in_its_dry_run_is_no_loss_of_the_run() -> None:
    membership, _ = with_newcomers(2, 3)
    [stop] = membership.handle(death(2))
    assert isinstance(stop, instructions.AbortRank) and stop.worker_id == worker(3).worker_id
    assert membership._run is not None and membership._run.losses == []
    membership.handle(ended(3))
    [begin] = membership.handle(events.RanksReady(0, True))
    assert isinstance(begin, instructions.BeginDryRun) and begin.assignment.world_size == 3


def test_what_cannot_have_a_dry_run_lets_all_functions_run_again() -> None:
    membership, _ = with_newcomers(2)
    assert of_kind(membership.handle(ended(2)), instructions.AwaitReadiness)
    told = membership.handle(events.RanksReady(0, True))
    assert len(of_kind(told, instructions.FreezeRank)) == 2
    for rank in (0, 1):
        told = membership.handle(froze(rank, 0, at_boundary=False))
    assert of_kind(told, instructions.StartRank)
    assert all(one.restarts for one in resumptions(told).values())


def test_ranks_that_decline_make_it_repeat_its_dry_run_a_few_times_only() -> None:
    membership, told = with_newcomers(2)
    for attempt in range(1, MOST_ATTEMPTS + 1):
        assert of_kind(told, instructions.BeginDryRun), attempt
        membership.handle(events.DryRunReady(worker(2).worker_id, HERE))
        late = events.Declined(0, membership._arrivals.number, "another epoch", False)
        assert of_kind(membership.handle(late), instructions.AbortRank)
        assert membership.handle(late) == []  # The other rank says so, too.
        membership.handle(ended(2))
        told = membership.handle(events.RanksReady(0, True))
    assert of_kind(told, instructions.FreezeRank)


def test_each_worker_that_comes_after_all_functions_ran_again_makes_a_dry_run() -> None:
    """They have made again what the worker before it was declined for. It happens often here."""
    membership, told = with_newcomers(2)
    for generation in range(MOST_ATTEMPTS + 1):
        seat = 2 + generation
        [begin] = told
        assert isinstance(begin, instructions.BeginDryRun), generation
        membership.handle(events.DryRunReady(worker(seat).worker_id, HERE))
        number = membership._arrivals.number
        membership.handle(events.Declined(generation, number, "longer buckets", True))
        membership.handle(ended(seat, seat))
        told = membership.handle(events.RanksReady(generation, True))
        assert len(of_kind(told, instructions.FreezeRank)) == seat
        for rank in range(seat):
            told = membership.handle(froze(rank, generation, at_boundary=False))
        assert all(one.restarts for one in resumptions(told).values())
        membership.handle(events.WorkerRegistered(worker(seat + 1)))
        told = membership.handle(events.RanksReady(generation + 1, True))


def test_a_run_that_ends_ends_the_dry_runs_first() -> None:
    membership = waiting(2)
    for rank in (0, 1):
        told = membership.handle(events.RankFinished(rank, 0))
    assert [one.worker_id for one in of_kind(told, instructions.AbortRank)] == [  # type: ignore[attr-defined]
        worker(2).worker_id
    ]
    for rank in (0, 1):
        told = membership.handle(events.RankEnded(Success(rank, b"", 0), worker(rank).worker_id))
        assert told == []
    [end] = membership.handle(ended(2))
    assert isinstance(end, instructions.EndRun) and isinstance(end.outcome, RunSucceeded)


def test_a_worker_that_does_not_stop_does_not_keep_the_run_from_its_end() -> None:
    membership = waiting(2)
    for rank in (0, 1):
        membership.handle(events.RankFinished(rank, 0))
    for rank in (0, 1):
        membership.handle(events.RankEnded(Success(rank, b"", 0), worker(rank).worker_id))
    [end] = membership.handle(events.GraceEnded())
    assert isinstance(end, instructions.EndRun)
    assert states(membership)[2] is MemberState.STUCK


def test_the_grace_of_dry_runs_ends_no_rank_that_was_told_to_stop_later() -> None:
    membership = waiting(2)
    for rank in (0, 1):
        told = membership.handle(events.RankFinished(rank, 0))
    [grace] = of_kind(told, instructions.StartGrace)
    assert grace == instructions.StartGrace(is_for_ranks=False)
    [*_, of_ranks] = membership.handle(events.RunCancelled("enough"))
    assert of_ranks == instructions.StartGrace()
    assert membership.handle(events.GraceEnded(is_for_ranks=False)) == []
    [end] = membership.handle(events.GraceEnded())
    assert isinstance(end, instructions.EndRun)


def test_a_worker_that_gets_a_notice_in_its_dry_run_does_not_come() -> None:
    membership = waiting(2)
    told = membership.handle(events.Leaving(worker(2).worker_id, "its node is drained"))
    assert [one.worker_id for one in of_kind(told, instructions.AbortRank)] == [  # type: ignore[attr-defined]
        worker(2).worker_id
    ]
    for rank in (0, 1):
        told = membership.handle(froze(rank, 0, at_boundary=True))
    assert set(resumptions(told)) == {worker(0).worker_id, worker(1).worker_id}


def test_an_attempt_for_which_the_ranks_had_no_time_does_not_count() -> None:
    membership, _ = with_newcomers(2)
    for _ in range(MOST_ATTEMPTS + 1):
        late = events.DryRunEnded(worker(2).worker_id, "no answer", counts=False)
        membership.handle(late)
        [begin] = membership.handle(events.RanksReady(0, True))
        assert isinstance(begin, instructions.BeginDryRun)


# -- all orders ------------------------------------------------------------------------------------

HAPPENINGS: dict[str, Callable[[Membership], Event]] = {
    "2 waits": lambda _: events.DryRunReady(worker(2).worker_id, HERE),
    "3 waits": lambda _: events.DryRunReady(worker(3).worker_id, HERE),
    "3 waits elsewhere": lambda _: events.DryRunReady(
        worker(3).worker_id, replace(HERE, iteration="0/1/steps#0")
    ),
    "2 dies": lambda _: death(2),
    "2 ends": lambda _: ended(2),
    "3 ends": lambda _: ended(3),
    "rank 1 dies": lambda _: death(1),
    "0 froze between steps": lambda of: froze(0, of._generation, at_boundary=True),
    "1 froze between steps": lambda of: froze(1, of._generation, at_boundary=True),
    "1 froze in a step": lambda of: froze(1, of._generation, at_boundary=False),
    "declined": lambda of: events.Declined(of._generation, of._arrivals.number, "no", False),
    "ready": lambda of: events.RanksReady(of._generation, True),
    "cancelled": lambda _: events.RunCancelled("enough"),
}


@pytest.mark.parametrize("num_others", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("first", HAPPENINGS)
def test_no_order_of_events_loses_a_worker_or_gives_it_another_place(
    first: str, num_others: int
) -> None:
    """All orders of three and of four events: whoever comes in has made its dry run in that place,
    in the generation of all; and a worker is in its dry run exactly as long as is known."""
    begun, _ = with_newcomers(2, 3)
    others = [one for one in HAPPENINGS if one != first]
    for order in itertools.permutations(others, num_others):
        membership = deepcopy(begun)
        places = {
            worker_id: replace(one.assignment, generation=0)
            for worker_id, one in membership._arrivals.by_id.items()
        }
        for name in (first, *order):
            run = membership._run
            if run is None or (name.startswith("1 ") and 1 not in run.running):
                continue  # It is over, or that rank is gone.
            before = set(membership._arrivals.by_id)
            told = membership.handle(HAPPENINGS[name](membership))
            for one in of_kind(told, instructions.BeginDryRun):
                assert isinstance(one, instructions.BeginDryRun)
                places[one.worker_id] = replace(one.assignment, generation=0)
            resumed = resumptions(told)
            assert len({one.assignment.generation for one in resumed.values()}) <= 1
            for worker_id in before & resumed.keys():
                given = replace(resumed[worker_id].assignment, generation=0)
                assert given == places[worker_id]
                rank = resumed[worker_id].assignment.rank
                assert resumed[worker_id].former_ranks[rank] == -1
            in_dry_run = {
                member.info.worker_id
                for member in membership._members.values()
                if member.state is MemberState.DRY_RUN
            }
            assert in_dry_run == set(membership._arrivals.by_id), (first, order, name)
            if run.phase is Phase.RUNNING:
                assert not set(run.worker_ids) & in_dry_run


def test_a_worker_that_is_registered_before_the_run_is_taken_over_is_asked_for() -> None:
    """The session registers workers while the new driver still asks the ranks where they are."""
    told = []
    for is_early in (True, False):
        membership = Membership()
        came = events.WorkerRegistered(worker(2), 1)
        for rank in range(2):
            membership.handle(events.WorkerRegistered(worker(rank), 1))
        places = tuple(
            PlaceInRun(worker(rank), Assignment(1, rank, 2, rank, 2, 0), None) for rank in range(2)
        )
        taken = events.RunTakenOver(request(0, 1, None, False), places)
        both = [came, taken] if is_early else [taken, came]
        told.append([one for event in both for one in membership.handle(event)])
    assert told[0] == told[1]
    assert len(of_kind(told[0], instructions.AwaitReadiness)) == 1
