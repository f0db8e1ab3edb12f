"""Runs that go on without the workers that they lose: the driver's decisions, over all orders."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from chorusline.actors.driver.departures import MAX_ATTEMPTS
from chorusline.actors.driver.events import (
    Event,
    Leaving,
    PatienceEnded,
    PauseEnded,
    RankEnded,
    RankFinished,
    RankFroze,
    RankSilent,
    RanksReady,
    RunStarted,
    RunTakenOver,
    WorkerDied,
    WorkerRegistered,
)
from chorusline.actors.driver.instructions import (
    AbortRank,
    AttachRank,
    AwaitReadiness,
    DismissRank,
    EndRun,
    ExplainLoss,
    Fence,
    FreezeRank,
    ReleaseRank,
    ResumeRank,
    StartPatience,
    StartPause,
    StartRank,
)
from chorusline.actors.driver.membership import Membership
from chorusline.actors.driver.situation import MAX_WITHOUT_PROGRESS
from chorusline.actors.messages.messages import (
    Assignment,
    FormerRanks,
    Frozen,
    Loss,
    OptimizerProgress,
    PlaceInRun,
    Resumption,
    RunFailed,
    RunSucceeded,
    Success,
    Waiting,
    WorkerInfo,
)
from chorusline.actors.ray_calls.calls import ENDED
from chorusline.collectives.contract.endpoint import Endpoint
from chorusline.collectives.contract.errors import CollectiveTimeout, GroupAborted
from tests.references.driver_events import GONE, death, request, resumptions, worker


def running(
    *workers: WorkerInfo, fewest: int = 1, max_failures: int | None = None
) -> tuple[Membership, list[Assignment]]:
    membership = Membership()
    for info in workers:
        membership.handle(WorkerRegistered(info))
    starts = membership.handle(RunStarted(request(0, fewest, max_failures)))
    return membership, [one.assignment for one in starts if isinstance(one, StartRank)]


def froze(rank: int, ballots: int = 0, generation: int = 0, **more: object) -> RankFroze:
    progress = (OptimizerProgress(ballots, (float(ballots),)),)
    word = Frozen(rank, generation, progress, GONE, generation, missing="no model is registered")
    return RankFroze(replace(word, **more))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "events",
    list(itertools.permutations([death(1), froze(0, 4), froze(2, 5)])),
    ids=lambda events: "-".join(type(event).__name__ for event in events),
)
def test_survivors_go_on_with_the_last_ballot_that_anybody_saw(events: tuple[Event, ...]) -> None:
    membership, _ = running(worker(0), worker(1), worker(2))
    told = [one for event in events for one in membership.handle(event)]
    resumed = resumptions(told)
    assert set(resumed) == {"worker-0-0", "worker-2-0"}
    for word in resumed.values():
        assert word.progress == (OptimizerProgress(5, (5.0,)),)
        assert word.former_ranks == (0, 2)
        assert word.assignment.generation == 1
        assert not word.restarts
    assert [resumed[f"worker-{seat}-0"].assignment.rank for seat in (0, 2)] == [0, 1]
    # Everybody who had not frozen by itself is told to, once.
    freezes = [one.worker_id for one in told if isinstance(one, FreezeRank)]
    assert len(freezes) == len(set(freezes))


@pytest.mark.parametrize("order", list(itertools.permutations([0, 2, 3])))
@pytest.mark.parametrize("who_saw", [(0,), (2,), (0, 2, 3)])
@pytest.mark.parametrize("rays_word", range(4))
def test_a_death_that_a_frozen_rank_has_seen_counts_before_ray_reports_it(
    order: tuple[int, ...], who_saw: tuple[int, ...], rays_word: int
) -> None:
    """rays_word: after how many reports it comes. The survivors do not wait for it."""
    membership, _ = running(*map(worker, range(4)))
    reports: list[Event] = [froze(rank, ended=(1,) if rank in who_saw else ()) for rank in order]
    events = [*reports[:rays_word], death(1), *reports[rays_word:]]
    told = [membership.handle(event) for event in events]
    resumed = {who: word for one in told for who, word in resumptions(one).items()}
    assert set(resumed) == {"worker-0-0", "worker-2-0", "worker-3-0"}
    assert resumptions(told[2 if rays_word == 3 else 3])
    comes_last = rays_word > min(order.index(rank) for rank in who_saw)
    explained = [one for one in told[rays_word] if isinstance(one, ExplainLoss)]
    running_now = ["worker-0-0", "worker-2-0", "worker-3-0"] if comes_last else []
    assert [(one.worker_id, one.pid, one.why) for one in explained] == [
        (who, 101, "SIGKILL") for who in running_now
    ]
    for word in resumed.values():
        (gone,) = word.gone
        assert (gone.rank, gone.why) == (1, ENDED if rays_word == 3 else "SIGKILL")
    # The next run has the group of the survivors: Ray's word does not undo it.
    for seat in (0, 2, 3):
        ended = Success(max(0, seat - 1), b"", collectives=0)
        membership.handle(RankFinished(ended.rank, 1))
        membership.handle(RankEnded(ended, f"worker-{seat}-0"))
    starts = membership.handle(RunStarted(request(1)))
    assert {one.assignment.generation for one in starts if isinstance(one, StartRank)} == {1}


def test_a_loss_that_ends_the_run_waits_for_the_reason_that_ray_has() -> None:
    membership, _ = running(worker(0), worker(1), worker(2), max_failures=0)
    told = membership.handle(froze(0, ended=(1,)))
    assert not any(isinstance(one, AbortRank) for one in told)
    stopped = membership.handle(death(1))
    assert [one.worker_id for one in stopped if isinstance(one, AbortRank)]


def test_the_report_of_a_rank_that_is_lost_names_no_deaths() -> None:
    membership, _ = running(*map(worker, range(4)))
    membership.handle(death(3))
    membership.handle(froze(0))
    membership.handle(froze(2))
    assert membership.handle(froze(3, ended=(0, 1, 2))) == []
    assert len(resumptions(membership.handle(death(1)))) == 2


def test_two_deaths_that_one_rank_has_seen_are_one_change() -> None:
    membership, _ = running(*map(worker, range(4)))
    membership.handle(froze(0))
    resumed = resumptions(membership.handle(froze(3, ended=(1, 2))))
    assert {word.former_ranks for word in resumed.values()} == {(0, 3)}
    assert {word.num_lost for word in resumed.values()} == {2}


def test_nothing_is_decided_before_all_who_live_are_frozen() -> None:
    membership, _ = running(worker(0), worker(1), worker(2))
    assert not resumptions(membership.handle(death(1)))
    assert not resumptions(membership.handle(froze(0)))
    # A report of an earlier generation does not count either.
    assert membership.handle(froze(2, generation=-1)) == []
    assert len(resumptions(membership.handle(froze(2)))) == 2


@pytest.mark.parametrize(
    "silence", [RankSilent("worker-2-0", 0), PatienceEnded(0)], ids=["silent", "late"]
)
def test_who_does_not_freeze_is_killed_and_the_death_awaited(silence: Event) -> None:
    membership, _ = running(worker(0), worker(1), worker(2))
    membership.handle(death(1))
    membership.handle(froze(0))
    (fence,) = membership.handle(silence)
    assert isinstance(fence, Fence)
    assert fence.worker_id == "worker-2-0"
    resumed = resumptions(membership.handle(death(2)))
    assert [word.former_ranks for word in resumed.values()] == [(0,)]
    ended = [one for one in membership.handle(death(0)) if isinstance(one, EndRun)]
    assert ended  # Nobody is left.


def test_the_loss_of_a_worker_that_was_killed_says_why_it_was() -> None:
    membership, _ = running(worker(0), worker(1), max_failures=0)
    membership.handle(RankFroze(froze(0).frozen))
    membership.handle(RankSilent("worker-1-0", 0))
    (abort,) = [one for one in membership.handle(death(1)) if isinstance(one, AbortRank)]
    assert "because its control loop does not answer" in str(abort.error)


@pytest.mark.parametrize(
    ("event", "why"),
    [
        (RankSilent("worker-1-0", 0), "its control loop does not answer"),
        (PatienceEnded(0), "its function did not stop in time"),
    ],
    ids=["silent", "late"],
)
def test_a_worker_that_was_killed_for_its_delay_is_told_with_the_operation(
    event: Event, why: str
) -> None:
    membership, _ = running(worker(0), worker(1), max_failures=0)
    late = CollectiveTimeout("all_reduce #7 (float32)", 0, [1], 5.0)
    membership.handle(RankFroze(replace(froze(0).frozen, error=late)))
    assert membership.handle(event)
    (abort,) = [one for one in membership.handle(death(1)) if isinstance(one, AbortRank)]
    missed = "because it did not come to all_reduce #7 (float32) within 5 s, and "
    assert missed + why in str(abort.error)


def test_a_run_that_is_given_up_without_a_loss_says_why_it_cannot_go_on() -> None:
    membership, _ = running(worker(0), worker(1), worker(2))
    assert membership.handle(Leaving("worker-1-0", "it is drained"))
    drained = GroupAborted(0, [], "ranks leave: it is drained")
    told = []
    for rank in range(3):
        told += membership.handle(froze(rank, error=drained, waiting=Waiting.NOWHERE))
    errors = {str(one.error) for one in told if isinstance(one, AbortRank)}
    assert all("it is drained; and the run cannot continue: ranks" in e for e in errors)
    assert errors and all("because no model is registered" in error for error in errors)


def test_only_who_has_had_its_time_is_asked_for_a_quick_answer() -> None:
    late = CollectiveTimeout("all_reduce #7", 0, [2], 5.0, "")
    for error, expected in ((late, {1: False, 2: True}), (GONE, {1: False, 2: False})):
        membership, _ = running(worker(0), worker(1), worker(2))
        told = membership.handle(RankFroze(replace(froze(0).frozen, error=error)))
        freezes = [one for one in told if isinstance(one, FreezeRank)]
        assert {int(one.worker_id.split("-")[1]): one.is_late for one in freezes} == expected


def test_who_has_frozen_is_not_killed_for_being_late() -> None:
    membership, _ = running(worker(0), worker(1), worker(2))
    membership.handle(death(1))
    membership.handle(froze(0))
    fences = membership.handle(PatienceEnded(0))
    assert [one.worker_id for one in fences if isinstance(one, Fence)] == ["worker-2-0"]


@pytest.mark.parametrize("opener", ["death", "newcomer", "notice"])
def test_ranks_that_all_compute_are_not_killed_and_have_their_time_from_the_first_report(
    opener: str,
) -> None:
    membership, _ = running(*map(worker, range(3)))
    if opener == "death":
        told = membership.handle(death(2))
    elif opener == "newcomer":
        membership.handle(WorkerRegistered(worker(3)))
        told = membership.handle(RanksReady(0, False))
    else:
        told = membership.handle(Leaving("worker-2-0", "it is drained"))
    assert StartPatience(0) in told
    assert membership.handle(PatienceEnded(0)) == [], "no rank waits for another one"
    assert StartPatience(0) in membership.handle(froze(0)), "the others get their time now"
    fences = membership.handle(PatienceEnded(0))
    late = ["worker-1-0"] if opener == "death" else ["worker-1-0", "worker-2-0"]
    assert [one.worker_id for one in fences if isinstance(one, Fence)] == late


def test_a_newcomer_that_the_driver_before_had_not_called_is_no_loss() -> None:
    membership = Membership()
    for seat in range(3):
        membership.handle(WorkerRegistered(worker(seat), 2))
    decided = Resumption(
        Assignment(2, 0, 3, 0, 3, 0), FormerRanks.of((0, 1, -1)), (OptimizerProgress(5),), 1
    )
    places = (
        place_in_run(0, decided.assignment, decided),
        place_in_run(1, Assignment(1, 1, 2, 1, 2, 0)),
    )
    told = membership.handle(RunTakenOver(request(0, 1, 1), places))
    assert not [one for one in told if isinstance(one, AbortRank)]
    for rank in (0, 1):
        told = membership.handle(froze(rank, 5, generation=2, missing=""))
    assert {one.worker_id for one in told if isinstance(one, ResumeRank | StartRank)} == {
        "worker-0-0",
        "worker-1-0",
        "worker-2-0",
    }
    membership.handle(death(2))
    told = membership.handle(death(1))
    assert [one for one in told if isinstance(one, AbortRank)], "no loss is left to allow"


def test_a_second_death_in_the_next_generation_is_an_ordinary_case() -> None:
    membership, _ = running(worker(0), worker(1), worker(2))
    for event in (death(1), froze(0), froze(2)):
        membership.handle(event)
    membership.handle(death(2))
    resumed = resumptions(membership.handle(froze(0, 1, generation=1)))
    assert resumed["worker-0-0"].assignment == Assignment(2, 0, 1, 0, 1, 0)
    assert resumed["worker-0-0"].former_ranks == (0,)


def test_one_loss_more_than_allowed_ends_the_run() -> None:
    membership, _ = running(worker(0), worker(1), worker(2), max_failures=1)
    for event in (death(1), froze(0), froze(2)):
        membership.handle(event)
    told = membership.handle(death(2))
    assert [one.worker_id for one in told if isinstance(one, AbortRank)] == ["worker-0-0"]


def test_ranks_end_together_and_a_finished_one_takes_part_until_then() -> None:
    membership, _ = running(worker(0), worker(1), worker(2))
    assert membership.handle(RankFinished(0, 0)) == []
    membership.handle(death(1))
    assert not resumptions(membership.handle(froze(0)))
    assert len(resumptions(membership.handle(froze(2)))) == 2
    # It says so again in the new generation; its word of the old one is void.
    assert membership.handle(RankFinished(1, 1)) == []
    released = membership.handle(RankFinished(0, 1))
    assert [type(one) for one in released] == [ReleaseRank, ReleaseRank]
    membership.handle(RankEnded(Success(0, b"a", 1), "worker-0-0"))
    (end,) = membership.handle(RankEnded(Success(1, b"b", 1), "worker-2-0"))
    assert end == EndRun(RunSucceeded(1, (b"a", b"b"), leaves_all_idle=False))


def test_a_rank_outside_a_step_ends_the_run_if_nothing_is_registered() -> None:
    membership, _ = running(worker(0), worker(1))
    membership.handle(death(1))
    told = membership.handle(froze(0, waiting=Waiting.NOWHERE))
    assert [one.worker_id for one in told if isinstance(one, AbortRank)] == ["worker-0-0"]


def test_a_rank_outside_a_step_has_all_run_again_if_everything_is_registered() -> None:
    membership, _ = running(worker(0), worker(1), worker(2))
    membership.handle(death(1))
    membership.handle(froze(0, waiting=Waiting.NOWHERE, missing=""))
    resumed = resumptions(membership.handle(froze(2, missing="")))
    assert all(word.restarts for word in resumed.values())


def test_a_newcomer_is_taken_in_with_a_rank_of_its_seat() -> None:
    membership, _ = running(worker(0), worker(1), worker(2))
    for event in (death(1), froze(0, missing=""), froze(2, missing="")):
        membership.handle(event)
    (ask,) = membership.handle(WorkerRegistered(worker(1, incarnation=1)))
    assert ask == AwaitReadiness(("worker-0-0", "worker-2-0"), 1)
    told = membership.handle(RanksReady(1))
    assert sum(isinstance(one, FreezeRank) for one in told) == 2
    membership.handle(froze(0, 1, generation=1, missing=""))
    told = membership.handle(froze(1, 1, generation=1, missing=""))
    (start,) = [one for one in told if isinstance(one, StartRank)]
    assert start.worker_id == "worker-1-1"
    assert start.assignment.rank == 1
    assert start.resumption is not None
    assert start.resumption.former_ranks == (0, -1, 1)
    assert all(word.restarts for word in resumptions(told).values())


def test_a_worker_on_a_node_that_is_told_to_go_is_not_taken_in() -> None:
    """It would have to leave again: each of the two changes interrupts all ranks."""
    membership, _ = running(worker(0), worker(1))
    for seat in (2, 3):
        told = membership.handle(WorkerRegistered(worker(seat, f"node-{seat}")))
    assert membership.handle(Leaving("node-2", "preempted")) == []
    membership.handle(RanksReady(0))
    for rank in (0, 1):
        told = membership.handle(froze(rank, missing=""))
    (start,) = [one for one in told if isinstance(one, StartRank)]
    assert start.worker_id == "worker-3-0"
    assert {one.assignment.world_size for one in resumptions(told).values()} == {3}


def test_no_generation_is_ended_for_a_newcomer_before_all_functions_can_run_again() -> None:
    membership, _ = running(worker(0), worker(1))
    (ask,) = membership.handle(WorkerRegistered(worker(2)))
    assert ask == AwaitReadiness(("worker-0-0", "worker-1-0"), 0)
    assert membership.handle(WorkerRegistered(worker(3))) == [], "they are asked once"
    told = membership.handle(RanksReady(0))
    assert sum(isinstance(one, FreezeRank) for one in told) == 2
    for rank in (0, 1):
        told = membership.handle(froze(rank, missing=""))
    starts = [one.worker_id for one in told if isinstance(one, StartRank)]
    assert starts == ["worker-2-0", "worker-3-0"]
    assert membership.handle(RanksReady(0)) == [], "that was another generation"


def test_a_newcomer_that_died_before_the_ranks_were_ready_ends_nothing() -> None:
    membership, _ = running(worker(0), worker(1))
    membership.handle(WorkerRegistered(worker(2)))
    membership.handle(WorkerDied("worker-2-0", "SIGKILL"))
    assert membership.handle(RanksReady(0)) == []
    (ask,) = membership.handle(WorkerRegistered(worker(2, incarnation=1)))
    assert ask == AwaitReadiness(("worker-0-0", "worker-1-0"), 0), "the next one is asked for anew"
    told = membership.handle(RanksReady(0))
    assert sum(isinstance(one, FreezeRank) for one in told) == 2


def test_ranks_that_could_not_go_on_now_keep_those_that_are_to_leave() -> None:
    """In the constructors of its function a rank has registered nothing yet, so a round would end
    the run. The notice comes again; a round that others open counts it."""
    membership, _ = running(worker(0), worker(1), worker(2))
    assert membership.handle(Leaving("worker-2-0", "SIGTERM", can_end=False)) == []
    membership.handle(death(1))
    membership.handle(froze(0, spare=2))
    told = membership.handle(froze(2, spare=2))
    assert set(resumptions(told)) == {"worker-0-0"}
    assert [one.worker_id for one in told if isinstance(one, DismissRank)] == ["worker-2-0"]


@pytest.mark.parametrize(
    ("ranks", "stretches"),
    [
        ((0, 1, 2), ((0, 3),)),
        ((0, 2, 3), ((0, 1), (2, 2))),
        ((0, -1, -1, 1), ((0, 1), (-1, 2), (1, 1))),
        ((-1, 0, 2, 1), ((-1, 1), (0, 1), (2, 1), (1, 1))),
    ],
)
def test_former_ranks_are_told_as_stretches(
    ranks: tuple[int, ...], stretches: tuple[tuple[int, int], ...]
) -> None:
    former = FormerRanks.of(ranks)
    assert former.stretches == stretches
    assert former.ranks() == ranks and len(former) == len(ranks)


def test_a_worker_that_is_registered_twice_is_no_newcomer() -> None:
    membership, _ = running(worker(0), worker(1))
    assert membership.handle(WorkerRegistered(worker(1))) == []
    told = membership.handle(death(1))
    assert [one.worker_id for one in told if isinstance(one, FreezeRank)] == ["worker-0-0"]


def test_a_newcomer_waits_for_the_next_run_where_functions_cannot_run_again() -> None:
    membership, _ = running(worker(0), worker(1), worker(2))
    for event in (death(1), froze(0), froze(2)):
        membership.handle(event)
    assert membership.handle(WorkerRegistered(worker(1, incarnation=1))) == []


def test_with_too_few_left_the_run_waits_and_goes_on_when_one_comes() -> None:
    membership, _ = running(worker(0), worker(1), fewest=2)
    membership.handle(death(1))
    (pause,) = membership.handle(froze(0, missing=""))
    assert isinstance(pause, StartPause)
    told = membership.handle(WorkerRegistered(worker(1, incarnation=1)))
    assert {type(one) for one in told} == {ResumeRank, StartRank}


def test_a_run_that_waits_in_vain_ends_with_the_loss() -> None:
    membership, _ = running(worker(0), worker(1), fewest=2)
    membership.handle(death(1))
    membership.handle(froze(0, missing=""))
    told = membership.handle(PauseEnded(0))
    assert any(isinstance(one, AbortRank) for one in told)
    ended = RankEnded(Success(0, b"", 0), "worker-0-0")
    (end,) = membership.handle(ended)
    assert isinstance(end, EndRun)
    assert isinstance(end.outcome, RunFailed)
    assert isinstance(end.outcome.cause, Loss)
    assert "no new workers started" in end.outcome.cause.detail


def test_ranks_that_do_not_meet_again_and_again_are_given_up() -> None:
    membership, _ = running(worker(0), worker(1))
    for generation in range(MAX_WITHOUT_PROGRESS):
        assert not any(
            isinstance(one, AbortRank) for one in membership.handle(froze(0, 0, generation))
        )
        told = membership.handle(froze(1, 0, generation))
        assert len(resumptions(told)) == 2
    membership.handle(froze(0, 0, MAX_WITHOUT_PROGRESS))
    told = membership.handle(froze(1, 0, MAX_WITHOUT_PROGRESS))
    assert sum(isinstance(one, AbortRank) for one in told) == 2


def test_ranks_that_take_steps_of_plain_optimizers_in_between_are_not_given_up() -> None:
    membership, _ = running(worker(0), worker(1))
    for generation in range(MAX_WITHOUT_PROGRESS + 3):
        word = {"waiting": Waiting.NOWHERE, "missing": ""}
        membership.handle(froze(0, 0, generation, plain_steps=generation, **word))
        told = membership.handle(froze(1, 0, generation, plain_steps=generation + 1, **word))
        assert len(resumptions(told)) == 2, "one of them has taken a step since the last time"


@pytest.mark.parametrize("fewest", [1, 2], ids=["enough are left", "too few are left"])
def test_what_keeps_functions_from_running_again_is_named(fewest: int) -> None:
    membership, _ = running(worker(0), worker(1), worker(2), fewest=fewest + 1)
    membership.handle(death(1))
    membership.handle(froze(0, missing="", waiting=Waiting.NOWHERE))
    told = membership.handle(froze(2, missing="no registered optimizer has parameter weight"))
    assert any(isinstance(one, AbortRank) for one in told)
    for rank in (0, 2):
        told = membership.handle(RankEnded(Success(rank, b"", 0), f"worker-{rank}-0"))
    (end,) = told
    assert isinstance(end, EndRun) and isinstance(end.outcome, RunFailed)
    assert isinstance(end.outcome.cause, Loss)
    assert "no registered optimizer has parameter weight" in end.outcome.cause.detail


@pytest.mark.parametrize(("spare", "stays"), [(1, False), (0, True)])
def test_ranks_leave_a_node_that_goes_if_their_state_is_elsewhere(spare: int, stays: bool) -> None:
    membership, _ = running(worker(0), worker(1, "node-b"), worker(2))
    told = membership.handle(Leaving("node-b", "preempted"))
    assert sum(isinstance(one, FreezeRank) for one in told) == 3
    # Ranks of one node are adjacent: seats 0 and 2 have ranks 0 and 1.
    for rank in (0, 1):
        membership.handle(froze(rank, spare=spare))
    told = membership.handle(froze(2, spare=spare))
    assert ("worker-1-0" in resumptions(told)) == stays
    left = [one for one in told if isinstance(one, DismissRank)]
    assert ["preempted" in str(one.error) for one in left] == ([] if stays else [True])
    assert membership.handle(Leaving("node-b", "preempted")) == []


def test_a_worker_that_left_a_run_and_lives_takes_part_in_the_next_one() -> None:
    membership, _ = running(worker(0), worker(1, "node-b"))
    membership.handle(Leaving("node-b", "preempted"))
    membership.handle(froze(0, spare=1))
    membership.handle(froze(1, spare=1))
    membership.handle(RankFinished(0, 1))
    (end,) = membership.handle(RankEnded(Success(0, b"", 0), "worker-0-0"))
    assert isinstance(end, EndRun) and isinstance(end.outcome, RunSucceeded)
    membership.handle(WorkerRegistered(worker(1, "node-b"), 1))
    told = membership.handle(RunStarted(request(1, 1, None)))
    assert [one.worker_id for one in told if isinstance(one, StartRank)] == [
        "worker-0-0",
        "worker-1-0",
    ]


@pytest.mark.parametrize(("num_ready", "leaves"), [(0, False), (1, True), (2, True)])
def test_a_rank_that_is_missed_leaves_where_a_spare_worker_takes_its_seat(
    num_ready: int, leaves: bool
) -> None:
    membership, _ = running(worker(0), worker(1), worker(2), fewest=3)
    notice = Leaving("worker-1-0", "was much slower", num_ready=num_ready)
    told = membership.handle(notice)
    assert bool(told) == leaves
    if not leaves:
        return
    for rank in (0, 1, 2):
        told = membership.handle(froze(rank, spare=1, missing=""))
    assert set(resumptions(told)) == {"worker-0-0", "worker-2-0"}
    assert [one.worker_id for one in told if isinstance(one, DismissRank)] == ["worker-1-0"]
    # It is not missed because it leaves; another loss is.
    membership.handle(WorkerDied("worker-2-0", "SIGKILL"))
    told = membership.handle(froze(0, generation=1, spare=1, missing=""))
    assert [type(one) for one in told] == [StartPause]


def handing_over() -> Membership:
    """Rank 2, on a node of its own, hands over in generation 1."""
    membership, _ = running(worker(0), worker(1, "node-b"), worker(2))
    membership.handle(Leaving("node-b", "preempted"))
    for rank in (0, 1, 2):
        told = membership.handle(froze(rank))
    assert {one.leaving for one in resumptions(told).values()} == {(2,)}
    return membership


@pytest.mark.parametrize("knows", [0, 1, 2], ids=lambda rank: f"rank {rank} knows")
def test_without_replicas_a_rank_leaves_when_it_has_handed_over(knows: int) -> None:
    membership = handing_over()
    for rank in (0, 1, 2):
        told = membership.handle(froze(rank, 0, 1, handed_over=rank == knows))
    assert set(resumptions(told)) == {"worker-0-0", "worker-2-0"}
    assert {one.leaving for one in resumptions(told).values()} == {()}
    (left,) = [one for one in told if isinstance(one, DismissRank)]
    assert left.worker_id == "worker-1-0" and "has left: preempted" in str(left.error)


def test_a_rank_that_was_not_heard_out_hands_over_again() -> None:
    membership = handing_over()
    for rank in (0, 1, 2):
        told = membership.handle(froze(rank, 0, 1))
    assert {one.leaving for one in resumptions(told).values()} == {(2,)}


def test_who_was_handed_something_and_died_has_taken_it_along() -> None:
    membership = handing_over()
    membership.handle(froze(1, 0, 1, handed_over=True))
    membership.handle(froze(2, 0, 1, handed_over=True))
    told = membership.handle(death(0))
    assert set(resumptions(told)) == {"worker-1-0", "worker-2-0"}
    assert {one.leaving for one in resumptions(told).values()} == {(1,)}, "it does so again"


def test_nobody_leaves_while_functions_run_again_and_the_notice_comes_again() -> None:
    membership, _ = running(worker(0), worker(1, "node-b"), worker(2))
    for generation in range(MAX_ATTEMPTS):
        told = membership.handle(Leaving("node-b", "preempted"))
        assert sum(isinstance(one, FreezeRank) for one in told) == 3
        for rank in (0, 1, 2):
            word = {
                "waiting": Waiting.IN_STEP if rank != 1 else Waiting.NOWHERE,
                "missing": "",
            }
            told = membership.handle(froze(rank, generation, generation, **word))
        assert all(one.restarts and not one.leaving for one in resumptions(told).values())
    assert membership.handle(Leaving("node-b", "preempted")) == [], "it costs the run too much"


def place_in_run(seat: int, assignment: Assignment, told: Resumption | None = None) -> PlaceInRun:
    return PlaceInRun(worker(seat), assignment, told)


def test_another_driver_takes_a_run_over_where_the_workers_are() -> None:
    membership = Membership()
    for seat in range(2):
        membership.handle(WorkerRegistered(worker(seat), 3))
    places = tuple(place_in_run(seat, Assignment(3, seat, 2, seat, 2, 0)) for seat in range(2))
    told = membership.handle(RunTakenOver(request(0, 1, None), places))
    assert told == [AttachRank("worker-0-0"), AttachRank("worker-1-0")]
    membership.handle(death(1))
    assert len(resumptions(membership.handle(froze(0, generation=3)))) == 1


def test_another_driver_tells_those_who_have_not_heard_of_the_decision() -> None:
    """The first driver died when it had told only one of two."""
    membership = Membership()
    for seat in (0, 2):
        membership.handle(WorkerRegistered(worker(seat), 1))
    decided = Resumption(
        Assignment(1, 0, 2, 0, 2, 0), FormerRanks.of((0, 2)), (OptimizerProgress(5),), 0
    )
    places = (
        place_in_run(0, decided.assignment, decided),
        place_in_run(2, Assignment(0, 2, 3, 2, 3, 0)),
    )
    told = membership.handle(RunTakenOver(request(0, 1, None), places))
    assert sum(isinstance(one, AttachRank) for one in told) == 2
    resumed = resumptions(told)
    assert set(resumed) == {"worker-2-0"}
    assert resumed["worker-2-0"].assignment == Assignment(1, 1, 2, 1, 2, 0)
    assert resumed["worker-2-0"].progress == (OptimizerProgress(5),)


def test_another_driver_counts_the_losses_of_the_one_before() -> None:
    """One worker may be lost: the second loss ends the run, whoever drives it then."""
    first, _ = running(*map(worker, range(3)), max_failures=1)
    first.handle(death(2))
    first.handle(froze(0))
    decided = resumptions(first.handle(froze(1)))
    membership = Membership()
    for seat in (0, 1):
        membership.handle(WorkerRegistered(worker(seat), 1))
    places = [place_in_run(seat, one.assignment, one) for seat, one in enumerate(decided.values())]
    membership.handle(RunTakenOver(request(0, 1, 1), tuple(places)))
    told = membership.handle(death(1))
    assert [one.worker_id for one in told if isinstance(one, AbortRank)] == ["worker-0-0"]


def test_a_worker_that_has_left_the_run_is_not_taken_for_the_rank_that_has_its_number_now() -> None:
    """Its node is drained, and not gone yet."""
    membership = Membership()
    for seat in range(4):
        membership.handle(WorkerRegistered(worker(seat), 3))
    told_last = Resumption(
        Assignment(3, 0, 3, 0, 3, 0), FormerRanks.of((0, 1, -1)), (OptimizerProgress(5),), 2
    )
    places = (
        place_in_run(0, Assignment(1, 0, 3, 0, 3, 0)),
        *(place_in_run(r + 1, Assignment(3, r, 3, r, 3, 0), told_last) for r in range(3)),
    )
    told = membership.handle(RunTakenOver(request(0, 1, None), places))
    ranks = [AttachRank(f"worker-{seat}-0") for seat in (1, 2, 3)]
    assert told[:3] == ranks and not resumptions(told)
    assert {one.worker_id for one in told[3:]} == {"worker-0-0"}, "it may not have ended yet"


def test_a_worker_that_died_with_the_driver_is_lost() -> None:
    membership = Membership()
    membership.handle(WorkerRegistered(worker(0), 0))
    places = (place_in_run(0, Assignment(0, 0, 2, 0, 2, 0)),)
    told = membership.handle(RunTakenOver(request(0, 1, None), places))
    [freeze] = [one for one in told if isinstance(one, FreezeRank)]
    assert freeze.worker_id == "worker-0-0"
    # Not the seat and the process of another one.
    assert "rank 1" in str(freeze.error) and "a worker that was lost" in str(freeze.error)
    [resumed] = resumptions(membership.handle(froze(0))).values()
    assert [one.pid for one in resumed.gone] == [0]


def at(rank: int, host: str = "here", size: int = 6) -> Endpoint:
    return Endpoint(host, 100 + rank, 7, 1, size)


@pytest.mark.parametrize(
    ("of_the_last", "can_meet"),
    [(at(2), True), (None, False), (at(2, host="there"), False)],
    ids=["here", "it-has-none", "elsewhere"],
)
def test_ranks_of_one_host_are_told_where_they_meet(
    of_the_last: Endpoint | None, can_meet: bool
) -> None:
    membership, _ = running(worker(0), worker(1), worker(2))
    membership.handle(death(1))
    membership.handle(froze(2, 5, endpoint=of_the_last))
    resumed = resumptions(membership.handle(froze(0, 5, endpoint=at(0))))
    expected = (at(0), at(2)) if can_meet else ()
    assert [one.endpoints for one in resumed.values()] == [expected] * 2
