"""The driver's decisions, over all orders of what can happen to two and three workers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import pytest

from chorusline.actors.driver.events import (
    Event,
    GraceEnded,
    RankEnded,
    RunCancelled,
    RunStarted,
    SeatEmptied,
    WorkerDied,
    WorkerRegistered,
)
from chorusline.actors.driver.instructions import (
    AbortRank,
    EndRun,
    Instruction,
    StartGrace,
    StartRank,
)
from chorusline.actors.driver.membership import Membership
from chorusline.actors.messages.messages import (
    Assignment,
    Cancellation,
    Failure,
    Loss,
    MemberState,
    RunFailed,
    RunRequest,
    RunSucceeded,
    Success,
    WorkerInfo,
)
from chorusline.collectives.contract.errors import GroupAborted, PeerLost
from tests.references.driver_events import death, request, worker


def with_workers(*workers: WorkerInfo) -> Membership:
    membership = Membership()
    for info in workers:
        assert membership.handle(WorkerRegistered(info)) == []
    return membership


def started(membership: Membership, run: int = 0) -> list[Assignment]:
    starts = membership.handle(RunStarted(request(run)))
    assert all(isinstance(start, StartRank) for start in starts)
    return [start.assignment for start in starts if isinstance(start, StartRank)]


def success(rank: int, collectives: int = 7) -> RankEnded:
    return RankEnded(Success(rank, b"result", collectives))


def failure(rank: int) -> RankEnded:
    return RankEnded(Failure(rank, b"", f"ValueError: {rank}", "Traceback", (rank,), False))


def echo(rank: int, of: int) -> RankEnded:
    return RankEnded(Failure(rank, b"", "PeerLost: gone", "Traceback", (of,), True))


def succeed(membership: Membership, run: int, num_ranks: int) -> int:
    """One run in which all is well; its generation."""
    (generation,) = {assignment.generation for assignment in started(membership, run)}
    for rank in range(num_ranks):
        instructions = membership.handle(success(rank))
    (end,) = instructions
    assert isinstance(end, EndRun)
    assert isinstance(end.outcome, RunSucceeded)
    return generation


# ── All orders ───────────────────────────────────────────────────────────────────────────────────


def endings_of(rank: int, num_ranks: int) -> list[Event]:
    return [success(rank), failure(rank), echo(rank, (rank + 1) % num_ranks), death(rank)]


def all_orders(num_ranks: int) -> Iterator[tuple[Event, ...]]:
    """Every ending of every rank in every order, with a cancellation or without, and the end of
    the grace period at every place behind it or never."""
    for endings in itertools.product(*(endings_of(rank, num_ranks) for rank in range(num_ranks))):
        for extra in ((), (RunCancelled("interrupt"),)):
            for order in itertools.permutations((*endings, *extra)):
                yield order
                for at in range(1, len(order) + 1):
                    yield (*order[:at], GraceEnded(), *order[at:])


def is_primary(event: Event) -> bool:
    match event:
        case RankEnded(Failure() as ending):
            return not ending.is_echo
        case WorkerDied() | RunCancelled():
            return True
    return False


def rank_of(event: Event) -> int | None:
    match event:
        case RankEnded(ending):
            return ending.rank
        case WorkerDied(worker_id):
            return int(worker_id.split("-")[1])
    return None


def play(events: Sequence[Event], num_ranks: int) -> tuple[list[Event], list[Instruction]]:
    """The events up to the end of the run, and all instructions."""
    membership = with_workers(*(worker(seat) for seat in range(num_ranks)))
    started(membership)
    said: list[Instruction] = []
    for at, event in enumerate(events):
        said += membership.handle(event)
        if any(isinstance(instruction, EndRun) for instruction in said):
            for late in events[at + 1 :]:
                assert membership.handle(late) == [], "what comes after the end changes nothing"
            assert membership.snapshot(0).run is None
            return list(events[: at + 1]), said
    return list(events), said


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_every_order_of_events_ends_once_with_the_first_failure(num_ranks: int) -> None:
    num_orders = 0
    for order in all_orders(num_ranks):
        num_orders += 1
        seen, said = play(order, num_ranks)
        (end,) = [instruction for instruction in said if isinstance(instruction, EndRun)]
        outcome = end.outcome
        stopped = [rank for rank in map(rank_of, seen) if rank is not None]
        grace_was_over = isinstance(seen[-1], GraceEnded)

        # It ends when the last rank has stopped, or with the grace period; not before, not later.
        assert (len(stopped) == num_ranks) != grace_was_over, order

        failures = [event for event in seen if not isinstance(event, GraceEnded)]
        failures = [
            event
            for event in failures
            if not (isinstance(event, RankEnded) and isinstance(event.ending, Success))
        ]
        if not failures:
            assert isinstance(outcome, RunSucceeded), order
            assert len(outcome.results) == num_ranks
            continue

        assert isinstance(outcome, RunFailed), order
        first = next(filter(is_primary, failures), failures[0])
        match first, outcome.cause:
            case RankEnded(ending), Failure() as cause:
                assert cause is ending, order
            case WorkerDied(), Loss() as cause:
                assert cause.worker.worker_id == first.worker_id, order
            case RunCancelled(), Cancellation():
                pass
            case _:
                pytest.fail(f"{outcome.cause} is not {first} in {order}")
        assert outcome.stuck == tuple(sorted(set(range(num_ranks)) - set(stopped))), order
        returned = [e.ending.rank for e in seen if isinstance(e, RankEnded) and e not in failures]
        assert outcome.returned == tuple(sorted(returned)), order

        # Everyone who still ran at the first failure was told, once; and no one else.
        at = seen.index(failures[0])
        ran_on = set(range(num_ranks)) - {rank_of(event) for event in seen[: at + 1]}
        told = [abort.worker_id for abort in said if isinstance(abort, AbortRank)]
        assert sorted(told) == sorted(worker(rank).worker_id for rank in ran_on), order
        assert sum(isinstance(s, StartGrace) for s in said) == bool(ran_on), order
    assert num_orders > 400


# ── Single decisions ─────────────────────────────────────────────────────────────────────────────


def test_a_healthy_generation_serves_the_next_run() -> None:
    membership = with_workers(worker(0), worker(1))
    assert [succeed(membership, run, 2) for run in range(3)] == [0, 0, 0]


@pytest.mark.parametrize("ending", [failure(1), death(1), RunCancelled("interrupt")])
def test_a_failure_ends_the_generation(ending: Event) -> None:
    membership = with_workers(worker(0), worker(1))
    assert succeed(membership, 0, 2) == 0
    started(membership, 1)
    membership.handle(ending)
    membership.handle(echo(0, 1))
    membership.handle(echo(1, 0))
    membership.handle(WorkerRegistered(worker(1, incarnation=1)))
    assert succeed(membership, 2, 2) == 1


def test_a_run_that_left_collectives_in_flight_ends_the_generation() -> None:
    membership = with_workers(worker(0), worker(1))
    started(membership, 0)
    membership.handle(success(0, collectives=3))
    (end,) = membership.handle(success(1, collectives=4))
    assert isinstance(end, EndRun)
    assert isinstance(end.outcome, RunSucceeded)
    assert succeed(membership, 1, 2) == 1


def test_a_run_that_ends_says_whether_a_worker_has_died_when_its_rank_had_returned() -> None:
    for dies in (False, True):
        membership = with_workers(worker(0), worker(1))
        started(membership)
        membership.handle(success(0))
        if dies:
            assert membership.handle(death(0)) == []
        (end,) = membership.handle(success(1))
        assert isinstance(end, EndRun) and isinstance(end.outcome, RunSucceeded)
        assert end.outcome.leaves_all_idle is not dies


def test_a_new_member_ends_the_generation_and_keeps_the_ranks_of_the_others() -> None:
    membership = with_workers(worker(0), worker(1))
    assert succeed(membership, 0, 2) == 0
    membership.handle(WorkerRegistered(worker(0, incarnation=1)))
    starts = membership.handle(RunStarted(request(1)))
    assert [s.worker_id for s in starts if isinstance(s, StartRank)] == ["worker-0-1", "worker-1-0"]
    assert all(s.assignment.generation == 1 for s in starts if isinstance(s, StartRank))


def test_a_new_driver_counts_on_from_the_generation_that_workers_know() -> None:
    membership = Membership()
    membership.handle(WorkerRegistered(worker(0), generation=4))
    membership.handle(WorkerRegistered(worker(1), generation=5))
    assert succeed(membership, 0, 2) == 6


def test_ranks_of_one_node_are_adjacent() -> None:
    nodes = ["b", "a", "b", "c", "a"]
    membership = with_workers(*(worker(seat, node) for seat, node in enumerate(nodes)))
    starts = [s for s in membership.handle(RunStarted(request(0))) if isinstance(s, StartRank)]
    seats = [int(start.worker_id.split("-")[1]) for start in starts]
    parts = [start.assignment for start in starts]
    assert seats == [0, 2, 1, 4, 3]
    assert [part.rank for part in parts] == [0, 1, 2, 3, 4]
    assert [part.node_rank for part in parts] == [0, 0, 1, 1, 2]
    assert [part.local_rank for part in parts] == [0, 1, 0, 1, 0]
    assert [part.local_world_size for part in parts] == [2, 2, 2, 2, 1]
    assert {part.world_size for part in parts} == {5}


def test_the_others_are_told_who_began_it_and_where() -> None:
    membership = with_workers(worker(0), worker(1))
    started(membership)
    abort = membership.handle(failure(1))[0]
    assert isinstance(abort, AbortRank)
    assert abort.error.ranks == [1]
    assert isinstance(abort.error, GroupAborted)
    assert (abort.error.reason, abort.error.traceback) == ("ValueError: 1", "Traceback")


def test_the_others_are_told_of_a_death_as_peer_lost() -> None:
    membership = with_workers(worker(0), worker(1))
    started(membership)
    abort = membership.handle(death(1))[0]
    assert isinstance(abort, AbortRank)
    assert isinstance(abort.error, PeerLost)
    assert abort.error.ranks == [1]
    assert "pid 101 on node-a" in str(abort.error)


def test_a_stuck_worker_keeps_the_next_run_from_starting_until_it_is_replaced() -> None:
    membership = with_workers(worker(0), worker(1))
    started(membership)
    membership.handle(failure(0))
    membership.handle(GraceEnded())
    states = [state for _, state in membership.snapshot(0).members]
    assert states == [MemberState.READY, MemberState.STUCK]
    with pytest.raises(RuntimeError, match=r"seat 1 .* is stuck"):
        membership.handle(RunStarted(request(1)))
    membership.handle(WorkerRegistered(worker(1, incarnation=1)))
    assert succeed(membership, 1, 2) == 1


def test_a_death_between_runs_is_remembered_and_the_others_begin_if_they_are_enough() -> None:
    membership = with_workers(worker(0), worker(1))
    assert succeed(membership, 0, 2) == 0
    assert membership.handle(death(0)) == []
    with pytest.raises(RuntimeError, match=r"seat 0 .* is lost"):
        membership.handle(RunStarted(request(1, fewest=2)))
    (start,) = membership.handle(RunStarted(request(1, fewest=1)))
    assert isinstance(start, StartRank)
    assert (start.worker_id, start.assignment.generation) == (worker(1).worker_id, 1)


def has_not_begun(rank: int) -> RankEnded:
    return RankEnded(
        Failure(rank, b"", "PeerLost: gone", "Traceback", (2,), True, nobody_began=True)
    )


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_who_died_while_idle_ends_a_run_that_nobody_began_whatever_is_told_first(
    order: Sequence[int],
) -> None:
    membership = with_workers(worker(0), worker(1), worker(2))
    started(membership)
    events = [has_not_begun(0), has_not_begun(1), death(2)]
    told = [one for which in order for one in membership.handle(events[which])]
    (outcome,) = [one.outcome for one in told if isinstance(one, EndRun)]
    assert isinstance(outcome, RunFailed) and outcome.nobody_began
    assert isinstance(outcome.cause, Loss) and outcome.cause.rank == 2


def test_a_run_that_nobody_began_for_another_reason_is_not_begun_again() -> None:
    for cause in (failure(2), RunCancelled("the caller was cancelled")):
        membership = with_workers(worker(0), worker(1), worker(2))
        started(membership)
        membership.handle(cause)
        for rank in range(2):
            told = membership.handle(has_not_begun(rank))
        if isinstance(cause, RunCancelled):
            told = membership.handle(echo(2, of=0))
        (end,) = told
        assert isinstance(end, EndRun) and isinstance(end.outcome, RunFailed)
        assert not end.outcome.nobody_began


def test_a_seat_that_was_emptied_between_runs_is_not_waited_for() -> None:
    membership = with_workers(worker(0), worker(1))
    assert succeed(membership, 0, 2) == 0
    assert membership.handle(SeatEmptied(1)) == []
    (start,) = membership.handle(RunStarted(request(1)))
    assert isinstance(start, StartRank)
    assert start.assignment == Assignment(1, 0, 1, 0, 1, 0)


def test_a_second_run_is_refused_while_one_is_in_progress() -> None:
    membership = with_workers(worker(0))
    started(membership)
    with pytest.raises(RuntimeError, match="run 0 is still in progress"):
        membership.handle(RunStarted(request(1)))


def test_messages_are_checked_when_they_are_made() -> None:
    with pytest.raises(ValueError, match=r"rank must be in \[0, 2\), got 2"):
        Assignment(0, 2, 2, 0, 1, 0)
    with pytest.raises(ValueError, match="generation must be at least 0"):
        Assignment(-1, 0, 1, 0, 1, 0)
    with pytest.raises(ValueError, match="timeout_s must be positive"):
        RunRequest(0, 0.0, False)
    with pytest.raises(ValueError, match="worker_id and node_id"):
        WorkerInfo("", 0, "node", "host", 1, "cpu")


def test_snapshots_can_be_read() -> None:
    membership = with_workers(worker(0), worker(1))
    started(membership, 3)
    membership.handle(death(1))
    assert str(membership.snapshot(incarnation=2)) == (
        "driver 2: generation 0, run 3 in progress\n"
        "  worker in seat 0 (pid 100 on node-a, cpu): running\n"
        "  worker in seat 1 (pid 101 on node-a, cpu): lost"
    )
