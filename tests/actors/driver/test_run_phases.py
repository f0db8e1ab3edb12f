"""The table in membership.py: what each event does in each phase of a run; and the pairs of faults
that a new driver finds when it takes a run over."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace

import pytest

from chorusline.actors.driver import events, instructions
from chorusline.actors.driver.arrivals import DryRuns
from chorusline.actors.driver.events import Event
from chorusline.actors.driver.instructions import Instruction
from chorusline.actors.driver.membership import Membership
from chorusline.actors.driver.run_state import Phase, RunState
from chorusline.actors.driver.situation import Situation, assess
from chorusline.actors.messages.messages import (
    Assignment,
    Failure,
    Frozen,
    Loss,
    MemberState,
    OptimizerProgress,
    PlaceInRun,
    RunFailed,
    RunSucceeded,
    Success,
    Waiting,
)
from tests.references.driver_events import GONE, death, request, worker


def froze(rank: int, generation: int = 0, **more: object) -> events.RankFroze:
    word = Frozen(
        rank,
        generation,
        (OptimizerProgress(5, (5.0,)),),
        GONE,
        can_save=True,
    )
    return events.RankFroze(replace(word, **more))  # type: ignore[arg-type]


def returned(rank: int, seat: int | None = None) -> Event:
    info = worker(rank if seat is None else seat)
    return events.RankEnded(Success(rank, b"result", 0), info.worker_id)


def raised(rank: int, seat: int) -> Event:
    failure = Failure(rank, None, "ValueError: no", "", (rank,), False)
    return events.RankEnded(failure, worker(seat).worker_id)


def membership_after(
    *happened: Event, num: int = 3, fewest: int = 2, saves_last: bool = True
) -> Membership:
    membership = Membership()
    for seat in range(num):
        membership.handle(events.WorkerRegistered(worker(seat)))
    membership.handle(events.RunStarted(request(0, fewest, None, saves_last)))
    for event in happened:
        membership.handle(event)
    return membership


def run_of(membership: Membership) -> RunState:
    assert membership._run is not None
    return membership._run


def phase_of(membership: Membership) -> Phase | None:
    return membership._run.phase if membership._run is not None else None


def given_up() -> Membership:
    """Ranks 0 and 1 are in the last generation: three were the fewest."""
    membership = membership_after(death(2), froze(0), froze(1), fewest=3)
    membership.handle(events.PauseEnded(0))
    return membership


def in_phase(phase: Phase) -> Membership:
    """A run that was begun with three ranks, of which the first two are left."""
    match phase:
        case Phase.PAUSED:
            membership = membership_after(death(2), froze(0), froze(1), fewest=3)
        case Phase.SAVING_LAST:
            membership = given_up()
        case Phase.FREEZING_LAST:
            membership = given_up()
            membership.handle(froze(0, 1))
        case Phase.FREEZING:
            membership = membership_after(froze(0))
        case Phase.RELEASED:
            membership = membership_after(*(events.RankFinished(rank, 0) for rank in range(3)))
        case Phase.STOPPING:
            membership = membership_after(events.RunCancelled("enough"))
        case Phase.RUNNING:
            membership = membership_after()
    assert phase_of(membership) is phase
    return membership


STOP, VOID = Phase.STOPPING, None
"""The phase behind an event; VOID: it changes nothing, and nobody is told anything."""

COLUMNS = tuple(Phase)
assert COLUMNS == (
    Phase.RUNNING,
    Phase.FREEZING,
    Phase.PAUSED,
    Phase.SAVING_LAST,
    Phase.FREEZING_LAST,
    Phase.RELEASED,
    Phase.STOPPING,
)

F, P, S, L, R = (
    Phase.FREEZING,
    Phase.PAUSED,
    Phase.SAVING_LAST,
    Phase.FREEZING_LAST,
    Phase.RELEASED,
)
Row = tuple[Callable[[int], Event], tuple[Phase | None, ...]]
TABLE: dict[str, Row] = {
    # The event, made for a generation; the phase behind it, by the phase before it (COLUMNS).
    "a rank is lost": (lambda _: death(1), (F, F, P, L, STOP, STOP, STOP)),
    "a rank froze": (lambda at: froze(1, at), (F, F, P, L, STOP, VOID, VOID)),
    "a newcomer": (
        lambda _: events.WorkerRegistered(worker(3)),
        (Phase.RUNNING, F, Phase.RUNNING, VOID, VOID, VOID, VOID),
    ),
    "ranks are ready": (events.RanksReady, (VOID,) * 7),
    "a notice": (
        lambda _: events.Leaving(worker(1).worker_id, "SIGTERM"),
        (F, VOID, VOID, VOID, VOID, VOID, VOID),
    ),
    "a rank raised": (lambda _: raised(1, 1), (STOP,) * 7),
    "a rank returned": (lambda _: returned(1), (R, STOP, STOP, STOP, STOP, R, STOP)),
    "all finished": (
        lambda at: events.RankFinished(2, at),
        (R, VOID, VOID, VOID, VOID, VOID, VOID),
    ),
    "patience ended": (events.PatienceEnded, (VOID, F, VOID, VOID, L, VOID, VOID)),
    "pause ended": (events.PauseEnded, (VOID, VOID, S, VOID, VOID, VOID, VOID)),
    "last save ended": (events.LastSaveEnded, (VOID, VOID, VOID, STOP, STOP, VOID, VOID)),
    "cancelled": (lambda _: events.RunCancelled("enough"), (STOP,) * 7),
}


@pytest.mark.parametrize("phase", COLUMNS, ids=lambda phase: phase.name)
@pytest.mark.parametrize("name", TABLE)
def test_each_event_does_in_each_phase_what_the_table_says(name: str, phase: Phase) -> None:
    make, expected = TABLE[name]
    after = expected[COLUMNS.index(phase)]
    membership = in_phase(phase)
    if name == "all finished":
        for rank in (0, 1):
            membership.handle(events.RankFinished(rank, membership._generation))
    told = membership.handle(make(membership._generation))
    if after is VOID:
        assert told == [] and phase_of(membership) is phase
    else:
        assert phase_of(membership) is after
    # Ranks are told to freeze, to stop and to end once, by the event that changes the phase.
    kinds = {type(one) for one in told}
    opened = after in (Phase.FREEZING, Phase.FREEZING_LAST) and after is not phase
    assert (instructions.StartPatience in kinds) == opened
    assert (instructions.StartGrace in kinds) == (after is STOP and phase is not STOP)
    assert (instructions.ReleaseRank in kinds) == (after is R and phase is not R)
    assert (instructions.Fence in kinds) == (name == "patience ended" and after is not VOID)


@pytest.mark.parametrize("phase", COLUMNS, ids=lambda phase: phase.name)
def test_the_grace_period_ends_only_a_run_that_stops(phase: Phase) -> None:
    membership = in_phase(phase)
    told = membership.handle(events.GraceEnded())
    assert [type(one) for one in told] == ([instructions.EndRun] if phase is STOP else [])
    assert phase_of(membership) is (None if phase is STOP else phase)


@pytest.mark.parametrize("phase", COLUMNS, ids=lambda phase: phase.name)
def test_what_is_sent_of_another_generation_is_void(phase: Phase) -> None:
    for off in (-1, 1):
        for make in (
            lambda at: froze(1, at),
            lambda at: events.RankFinished(1, at),
            lambda at: events.RankSilent(worker(1).worker_id, at),
            events.PatienceEnded,
            events.PauseEnded,
            events.LastSaveEnded,
        ):
            membership = in_phase(phase)
            assert membership.handle(make(membership._generation + off)) == []
            assert phase_of(membership) is phase


@pytest.mark.parametrize("saves", [True, False], ids=["saves", "saves nothing"])
@pytest.mark.parametrize("situation", Situation, ids=lambda situation: situation.name)
@pytest.mark.parametrize(
    "phase", [Phase.FREEZING, Phase.PAUSED, Phase.FREEZING_LAST], ids=lambda phase: phase.name
)
def test_what_is_decided_follows_from_phase_and_situation(
    phase: Phase, situation: Situation, saves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All cells of the second table. Where a phase cannot meet a situation it is told of it."""
    membership = membership_after(death(2), fewest=2, saves_last=saves)
    membership.handle(froze(0))
    run = run_of(membership)
    if phase is Phase.FREEZING_LAST:
        run.gives_up = Loss(2, worker(2), "SIGKILL")
    run.round.froze(froze(1).frozen)
    seen = assess(run, membership._members.values(), DryRuns())
    assert seen.situation is Situation.READY
    run.phase = phase
    outlook = replace(seen, situation=situation, why="no more losses")
    monkeypatch.setattr(
        "chorusline.actors.driver.membership.assess", lambda run, known, arrivals: outlook
    )
    kinds = {type(one) for one in membership._decide(run)}
    hopeless = (Phase.SAVING_LAST, {instructions.ResumeRank, instructions.StartLastSave})
    stop = (Phase.STOPPING, {instructions.AbortRank, instructions.StartGrace})
    wait: tuple[Phase, set[type]] = (phase, set())
    cells: dict[Situation, tuple[Phase, set[type]]] = {
        Situation.INCOMPLETE: wait,
        Situation.HOPELESS: hopeless if saves else stop,
        Situation.TOO_FEW: wait
        if phase is Phase.PAUSED
        else (Phase.PAUSED, {instructions.StartPause}),
        Situation.READY: (Phase.RUNNING, {instructions.ResumeRank}),
    }
    expected = cells[situation]
    if phase is Phase.FREEZING_LAST and situation is not Situation.INCOMPLETE:
        expected = stop
    assert (phase_of(membership), kinds) == expected


@pytest.mark.parametrize(
    ("words", "newcomer", "fewest", "max_failures", "expected"),
    [
        ({}, False, 2, None, Situation.READY),
        ({"waiting": Waiting.NOWHERE}, False, 2, None, Situation.READY),
        ({}, False, 3, None, Situation.TOO_FEW),
        ({}, True, 3, None, Situation.READY),
        ({"missing": "no model"}, False, 2, None, Situation.READY),
        ({"missing": "no model"}, True, 3, None, Situation.HOPELESS),
        ({"missing": "no model", "waiting": Waiting.NOWHERE}, False, 2, None, Situation.HOPELESS),
        ({"progress": ()}, False, 2, None, Situation.HOPELESS),
        ({}, False, 2, 0, Situation.HOPELESS),
    ],
)
def test_the_situation_follows_from_the_reports_and_to_assess_it_changes_nothing(
    words: dict[str, object],
    newcomer: bool,
    fewest: int,
    max_failures: int | None,
    expected: Situation,
) -> None:
    membership = membership_after(froze(0), death(2))
    if newcomer:
        membership.handle(events.WorkerRegistered(worker(2, incarnation=1)))
    run = run_of(membership)
    run.request = replace(run.request, fewest=fewest, max_failures=max_failures)
    known, nobody = list(membership._members.values()), DryRuns(are_possible=False)
    assert assess(run, known, nobody).situation is Situation.INCOMPLETE
    run.round.froze(froze(1, 0, **words).frozen)
    before = deepcopy(
        (run.num_without_progress, run.achieved, run.takes_newcomers, run.phase, run.losses)
    )
    outlook = assess(run, known, nobody)
    assert outlook.situation is expected
    assert (outlook.plan is not None) == (expected is Situation.READY)
    assert bool(outlook.why) == (expected is Situation.HOPELESS)
    assert assess(run, known, nobody) == outlook
    assert before == (
        run.num_without_progress,
        run.achieved,
        run.takes_newcomers,
        run.phase,
        run.losses,
    )
    if outlook.plan is not None:
        assert [one.info.seat for one in outlook.plan.members] == [0, 1, 2][: 2 + newcomer]
        assert outlook.plan.restarts == (newcomer or "waiting" in words)


def test_the_end_of_a_pause_is_void_when_the_run_stops_already() -> None:
    membership = in_phase(Phase.PAUSED)
    membership.handle(events.RunCancelled("enough"))
    assert membership.handle(events.PauseEnded(0)) == []
    assert membership.handle(events.PauseEnded(0)) == []


# ── A driver dies together with workers ──────────────────────────────────────────────────────────


def taken_over(
    *seats: int, size: int = 3, max_failures: int | None = None
) -> tuple[Membership, list[Instruction]]:
    """Another driver finds only the workers in these seats in a run of `size` ranks."""
    membership = Membership()
    for seat in seats:
        membership.handle(events.WorkerRegistered(worker(seat), 0))
    places = tuple(
        PlaceInRun(worker(seat), Assignment(0, seat, size, seat, size, 0), None) for seat in seats
    )
    return membership, membership.handle(events.RunTakenOver(request(0, 1, max_failures), places))


def called(told: Sequence[Instruction]) -> set[str]:
    """Ids of the workers that instructions are for."""
    ids = (getattr(one, "worker_id", None) for one in told)
    return {worker_id for worker_id in ids if worker_id is not None}


@pytest.mark.parametrize("max_failures", [None, 2, 1, 0])
@pytest.mark.parametrize(
    "left", [seats for num in (1, 2) for seats in itertools.combinations(range(3), num)]
)
def test_no_worker_is_called_that_died_with_the_driver(
    left: tuple[int, ...], max_failures: int | None
) -> None:
    membership, told = taken_over(*left, max_failures=max_failures)
    alive = {worker(seat).worker_id for seat in left}
    assert called(told) == alive
    goes_on = max_failures is None or 3 - len(left) <= max_failures
    assert phase_of(membership) is (Phase.FREEZING if goes_on else Phase.STOPPING)
    for seat in left:
        told += membership.handle(froze(seat) if goes_on else returned(seat))
    told += membership.handle(events.PatienceEnded(0))
    assert called(told) == alive
    if goes_on:
        resumed = [one for one in told if isinstance(one, instructions.ResumeRank)]
        assert {one.worker_id for one in resumed} == alive
        assert {one.resumption.former_ranks for one in resumed} == {left}
        assert phase_of(membership) is Phase.RUNNING
    else:
        (end,) = [one for one in told if isinstance(one, instructions.EndRun)]
        assert isinstance(end.outcome, RunFailed) and isinstance(end.outcome.cause, Loss)
        assert end.outcome.cause.detail == "it died with the driver"


def test_ranks_that_end_after_their_driver_died_are_enough_for_the_others_to_be_released() -> None:
    """The driver before had released rank 0 only, which has ended; 1 and 2 wait still."""
    membership, _ = taken_over(0, 1, 2)
    told = membership.handle(returned(0))
    assert called(told) == {"worker-1-0", "worker-2-0"}
    assert {type(one) for one in told} == {instructions.ReleaseRank}
    # A worker that has ended is idle, and no newcomer to a run that ends.
    assert membership.handle(events.WorkerRegistered(worker(0), 0)) == []
    assert membership.handle(events.RankFinished(1, 0)) == []
    membership.handle(returned(1))
    (end,) = membership.handle(returned(2))
    assert end == instructions.EndRun(RunSucceeded(0, (b"result",) * 3))


@pytest.mark.parametrize("still_wait", [False, True], ids=["all have ended", "one waits"])
def test_a_result_that_died_with_the_driver_ends_the_run_with_the_loss(still_wait: bool) -> None:
    """All had returned, and the driver and rank 1 died before they had said so."""
    membership, told = taken_over(*((0, 2) if still_wait else (0,)), size=3 if still_wait else 2)
    assert called(told) <= {"worker-0-0", "worker-2-0"}
    told = membership.handle(returned(0))
    if still_wait:
        assert called(told) == {"worker-2-0"}
        assert isinstance(told[0], instructions.AbortRank)
        echo = Failure(2, None, "PeerLost", "", (1,), True)
        told = membership.handle(events.RankEnded(echo, "worker-2-0"))
    (end,) = told
    assert isinstance(end, instructions.EndRun) and isinstance(end.outcome, RunFailed)
    assert isinstance(end.outcome.cause, Loss) and end.outcome.cause.rank == 1
    assert end.outcome.cause.detail == (
        "it died with the driver; the function had returned on all ranks, and the result of this "
        "one is lost"
    )
    assert end.outcome.returned == (0,)


def test_a_released_generation_that_a_new_driver_has_ended_is_told_as_such() -> None:
    """A newcomer came before the new driver heard that the function had returned."""
    membership, _ = taken_over(0, 1, size=2)
    membership.handle(events.WorkerRegistered(worker(3)))
    assert called(membership.handle(events.RanksReady(membership._generation))) == {
        "worker-0-0",
        "worker-1-0",
    }
    told = membership.handle(returned(0))
    abort = next(one for one in told if isinstance(one, instructions.AbortRank))
    assert abort.worker_id == "worker-1-0"
    assert "the function had returned on all ranks" in str(abort.error)


def test_a_driver_that_takes_over_asks_the_ranks_though_one_has_died_with_the_one_before() -> None:
    membership, _ = taken_over(0, 1, size=3, max_failures=0)
    late = Failure(0, None, "CollectiveTimeout", "", (1,), False, asks_all=True)
    told = membership.handle(events.RankEnded(late, "worker-0-0"))
    assert [type(one) for one in told] == [instructions.AskRanks]
    states = [state for _, state in membership.snapshot(0).members]
    assert states == [MemberState.READY, MemberState.RUNNING]


def detail_of(told: list[instructions.Instruction]) -> str:
    (end,) = [one for one in told if isinstance(one, instructions.EndRun)]
    assert isinstance(end.outcome, RunFailed) and isinstance(end.outcome.cause, Loss)
    return end.outcome.cause.detail


def test_a_rank_that_dies_between_its_release_and_its_result_is_told_as_such() -> None:
    membership = in_phase(Phase.RELEASED)
    membership.handle(death(1))
    membership.handle(returned(0))
    detail = detail_of(membership.handle(returned(2)))
    assert detail == (
        "SIGKILL; the function had returned on all ranks, and the result of this one is lost"
    )


def test_the_loss_of_the_last_rank_says_that_none_was_left() -> None:
    membership = membership_after(death(0), death(1))
    assert detail_of(membership.handle(death(2))) == "SIGKILL; no other rank was left to continue"
