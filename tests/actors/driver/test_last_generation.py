"""The last generation of a run that is given up: the driver's decisions, over all orders."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from chorusline.actors.driver.events import (
    Event,
    LastSaveEnded,
    Leaving,
    PauseEnded,
    RankEnded,
    RankFroze,
    RunCancelled,
    RunStarted,
    RunTakenOver,
    WorkerRegistered,
)
from chorusline.actors.driver.instructions import (
    AbortRank,
    AttachRank,
    EndRun,
    FreezeRank,
    Instruction,
    StartLastSave,
    StartPause,
    StartRank,
)
from chorusline.actors.driver.membership import Membership
from chorusline.actors.driver.situation import MAX_WITHOUT_PROGRESS
from chorusline.actors.messages.messages import (
    NOWHERE,
    Cancellation,
    Failure,
    Frozen,
    Loss,
    OptimizerProgress,
    PlaceInRun,
    RunFailed,
    Success,
    Waiting,
)
from chorusline.collectives.contract.errors import GroupAborted
from tests.references.driver_events import GONE, death, request, resumptions, worker

SAVED = GroupAborted(1, [], "it is saved")
PLACE = "/place/step-00000005-0123abcd-0"


def froze(rank: int, ballots: int = 5, generation: int = 0, **more: object) -> RankFroze:
    progress = (OptimizerProgress(ballots, (float(ballots),)),)
    word = Frozen(rank, generation, progress, GONE, 0, can_save=True)
    return RankFroze(replace(word, **more))  # type: ignore[arg-type]


def saved(rank: int) -> RankFroze:
    return froze(rank, generation=1, error=SAVED, saved=PLACE, waiting=Waiting.NOWHERE)


def running(num: int, *, max_failures: int | None = None, saves: bool = True) -> Membership:
    membership = Membership()
    for seat in range(num):
        membership.handle(WorkerRegistered(worker(seat)))
    membership.handle(RunStarted(request(0, num, max_failures, saves)))
    return membership


def aborted(told: list[Instruction]) -> list[str]:
    return sorted(one.worker_id for one in told if isinstance(one, AbortRank))


def giving_up(**words: object) -> tuple[Membership, list[Instruction]]:
    """Of three, rank 1 is lost, none comes, and the other two are in the last generation."""
    membership = running(3)
    for event in (death(1), froze(0, 4), froze(2, 5, waiting=Waiting.NOWHERE, **words)):
        told = membership.handle(event)
    assert [type(one) for one in told] == [StartPause]
    return membership, membership.handle(PauseEnded(0))


def cause_of(membership: Membership, *seats: int) -> Loss | Failure | Cancellation:
    """What the run ends with, when all who live have stopped."""
    told: list[Instruction] = []
    for rank, seat in enumerate(seats):
        told = membership.handle(RankEnded(Success(rank, b"", 0), worker(seat).worker_id))
    (end,) = told
    assert isinstance(end, EndRun) and isinstance(end.outcome, RunFailed)
    return end.outcome.cause


def test_the_survivors_leave_their_functions_and_save_up_to_the_last_step_that_counts() -> None:
    _, told = giving_up()
    words = resumptions(told)
    assert set(words) == {"worker-0-0", "worker-2-0"}
    for word in words.values():
        assert word.restarts and word.progress == (OptimizerProgress(5, (5.0,)),)
        assert word.former_ranks == (0, 2)
        assert isinstance(word.gives_up, Loss)
        assert "no new workers started, and fewer than 3 are left" in word.gives_up.detail
    assert StartLastSave(1) in told


@pytest.mark.parametrize("order", list(itertools.permutations([0, 1])))
def test_the_run_ends_with_the_loss_and_says_where_the_checkpoint_is(
    order: tuple[int, ...],
) -> None:
    membership, _ = giving_up()
    told = membership.handle(saved(order[0]))
    assert not aborted(told), "the other one may still be at it"
    assert len([one for one in told if isinstance(one, FreezeRank)]) == 1
    assert aborted(membership.handle(saved(order[1]))) == ["worker-0-0", "worker-2-0"]
    cause = cause_of(membership, 0, 2)
    assert isinstance(cause, Loss) and cause.rank == 1
    assert f"saved as of the last step that counts, in {PLACE}" in cause.detail


@pytest.mark.parametrize(
    "events",
    list(itertools.permutations([death(2), saved(0), saved(1)])),  # A word may arrive late.
    ids=lambda events: "-".join(type(event).__name__ for event in events),
)
def test_a_death_behind_the_manifest_takes_nothing_away(events: tuple[Event, ...]) -> None:
    membership, _ = giving_up()
    told = [one for event in events for one in membership.handle(event)]
    assert not resumptions(told), "there is no generation behind the last"
    cause = cause_of(membership, 0)
    assert isinstance(cause, Loss) and PLACE in cause.detail


def test_a_death_in_the_last_generation_ends_the_run_without_another_attempt() -> None:
    membership, _ = giving_up()
    assert not resumptions(membership.handle(death(2)))
    told = membership.handle(froze(0, generation=1))
    assert not resumptions(told) and aborted(told) == ["worker-0-0"]
    cause = cause_of(membership, 0)
    assert isinstance(cause, Loss) and cause.rank == 1, "what it was given up for"
    assert "could not be saved: all_reduce #7" in cause.detail


def test_the_last_generation_ends_at_its_deadline() -> None:
    membership, _ = giving_up()
    assert membership.handle(LastSaveEnded(0)) == [], "that of another generation"
    assert aborted(membership.handle(LastSaveEnded(1))) == ["worker-0-0", "worker-2-0"]
    assert membership.handle(LastSaveEnded(1)) == []
    cause = cause_of(membership, 0, 2)
    assert isinstance(cause, Loss) and "was not saved in time" in cause.detail


def test_who_comes_into_the_last_generation_waits_for_the_next_run() -> None:
    membership, _ = giving_up()
    assert membership.handle(WorkerRegistered(worker(1, incarnation=1))) == []
    assert membership.handle(Leaving("node-a", "drained")) == []
    membership.handle(saved(0))
    assert membership.handle(WorkerRegistered(worker(1, incarnation=2))) == []
    told = membership.handle(saved(1))
    assert not any(isinstance(one, StartRank) for one in told)


def test_who_comes_during_the_pause_lets_the_run_go_on() -> None:
    membership = running(3)
    for event in (death(1), froze(0), froze(2)):
        membership.handle(event)
    told = membership.handle(WorkerRegistered(worker(1, incarnation=1)))
    assert {word.gives_up for word in resumptions(told).values()} == {None}
    assert membership.handle(PauseEnded(0)) == [], "and the deadline of the pause is void"


def test_a_cancelled_last_generation_ends_as_any_run() -> None:
    membership, _ = giving_up()
    told = membership.handle(RunCancelled("enough"))
    assert aborted(told) == ["worker-0-0", "worker-2-0"]
    assert membership.handle(saved(0)) == []
    assert cause_of(membership, 0, 2) == Cancellation("enough")


@pytest.mark.parametrize(
    ("saves", "words"),
    [(False, {}), (True, {"can_save": False}), (True, {"progress": ()})],
    ids=["no place", "not all is registered", "another program"],
)
def test_what_cannot_be_saved_ends_as_before(saves: bool, words: dict[str, object]) -> None:
    membership = running(3, saves=saves)
    for event in (death(1), froze(0, 4), froze(2, 5, **words)):
        membership.handle(event)
    told = membership.handle(PauseEnded(0))
    assert aborted(told) == ["worker-0-0", "worker-2-0"]
    assert not resumptions(told)


def test_who_has_not_begun_does_not_stand_against_it() -> None:
    _, told = giving_up(can_save=False, entered=NOWHERE, progress=())
    assert set(resumptions(told)) == {"worker-0-0", "worker-2-0"}


@pytest.mark.parametrize("saves", [True, False])
def test_a_loss_more_than_allowed_is_saved_up_to_as_well(saves: bool) -> None:
    membership = Membership()
    for seat in range(3):
        membership.handle(WorkerRegistered(worker(seat)))
    membership.handle(RunStarted(request(0, 1, 1, saves)))
    for event in (death(1), froze(0), froze(2)):
        membership.handle(event)
    told = membership.handle(death(2))
    assert aborted(told) == ([] if saves else ["worker-0-0"])
    if not saves:
        return
    assert any(isinstance(one, FreezeRank) for one in told)
    (word,) = resumptions(membership.handle(froze(0, generation=1))).values()
    assert isinstance(word.gives_up, Loss)
    assert "max_failures=1 does not allow more lost workers" in word.gives_up.detail


def test_a_run_that_survives_no_loss_ends_with_it_at_once() -> None:
    membership = running(2, max_failures=0)
    assert aborted(membership.handle(death(1))) == ["worker-0-0"]


def test_ranks_that_do_not_meet_save_what_they_have_and_the_failure_tells_where() -> None:
    membership = running(2)
    for generation in range(MAX_WITHOUT_PROGRESS + 1):
        membership.handle(froze(0, generation=generation))
        told = membership.handle(froze(1, generation=generation))
    assert all(isinstance(word.gives_up, Failure) for word in resumptions(told).values())
    last = MAX_WITHOUT_PROGRESS + 1
    for rank in (0, 1):
        membership.handle(froze(rank, generation=last, error=SAVED, saved=PLACE))
    membership.handle(RankEnded(Success(0, b"", 0), "worker-0-0"))
    (end,) = membership.handle(RankEnded(Success(1, b"", 0), "worker-1-0"))
    assert isinstance(end, EndRun) and isinstance(end.outcome, RunFailed)
    assert PLACE in end.outcome.story


@pytest.mark.parametrize("late", [False, True])
def test_another_driver_sees_the_last_generation_to_its_end(late: bool) -> None:
    """late: the first driver died when it had told only one of two."""
    _, told = giving_up()
    words = resumptions(told)
    membership = Membership()
    for seat in (0, 2):
        membership.handle(WorkerRegistered(worker(seat), 1))
    first, second = words["worker-0-0"], words["worker-2-0"]
    before = replace(second.assignment, generation=0, rank=2, world_size=3, local_world_size=3)
    places = (
        PlaceInRun(worker(0), first.assignment, first),
        PlaceInRun(worker(2), before, None)
        if late
        else PlaceInRun(worker(2), second.assignment, second),
    )
    told = membership.handle(RunTakenOver(request(0, 3, None, True), places))
    assert [type(one) for one in told[:2]] == [AttachRank, AttachRank]
    assert StartLastSave(1) in told, "its deadline begins anew"
    assert resumptions(told) == ({"worker-2-0": second} if late else {})
    membership.handle(saved(0))
    membership.handle(saved(1))
    cause = cause_of(membership, 0, 2)
    assert isinstance(cause, Loss) and PLACE in cause.detail
