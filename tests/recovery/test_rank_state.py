"""Where a rank stands and what it reports: every order of events, also before the driver's half."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast

import pytest

from chorusline.actors.driver.events import (
    Event,
    RankFroze,
    RunStarted,
    WorkerDied,
    WorkerRegistered,
)
from chorusline.actors.driver.instructions import EndRun, ResumeRank
from chorusline.actors.driver.membership import Membership
from chorusline.actors.messages.messages import (
    NOWHERE,
    Assignment,
    FormerRanks,
    Frozen,
    OptimizerProgress,
    Readiness,
    Resumption,
    WorkerInfo,
)
from chorusline.collectives.contract.errors import PeerLost
from chorusline.runtime.recovery.from_the_top import FromTheTop
from chorusline.runtime.recovery.live_objects import LiveObjects
from chorusline.runtime.recovery.rank_state import Facts, RankState, Stage, Where
from tests import ROOT
from tests.references.driver_events import request, resumptions

GONE = PeerLost("all_reduce #7", 0, [1], "gone")


def began(rank: int = 0, generation: int = 0) -> Frozen:
    """The beginnings of a report, as the lifeline makes them."""
    return Frozen(rank, generation, (), GONE, NOWHERE)


def facts(ballots: int = 1, **more: object) -> Facts:
    """Of a function whose sharded optimizer has seen so many ballots."""
    progress = (OptimizerProgress(ballots, (float(ballots),)),)
    return replace(Facts(progress, spare=1, keeps_checkpoints=True), **more)  # type: ignore[arg-type]


def test_it_needs_no_torch() -> None:
    program = "import sys, chorusline.runtime.recovery.rank_state; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=60)


# -- every order of events -----------------------------------------------------------------------

NEXT = {
    Stage.FRESH: {
        "step": Stage.RUNNING,
        "in place": Stage.RUNNING,
        "left": Stage.LEFT,
        "new": Stage.NEWCOMER,
        "nothing is left": Stage.FRESH,
    },
    Stage.RUNNING: {"step": Stage.RUNNING, "in place": Stage.RUNNING, "left": Stage.LEFT},
    Stage.LEFT: {
        "left": Stage.LEFT,  # The ranks have not met.
        "again": Stage.RESTARTED,
        "nothing is left": Stage.FRESH,
        "saved": Stage.SAVED,
    },
    Stage.RESTARTED: {
        "step": Stage.RUNNING,
        "in place": Stage.RESTARTED,
        "left": Stage.LEFT,
        "nothing is left": Stage.FRESH,
    },
    Stage.NEWCOMER: {
        "step": Stage.RUNNING,
        "in place": Stage.NEWCOMER,
        "left": Stage.NEWCOMER,
        "again": Stage.NEWCOMER,
        "nothing is left": Stage.FRESH,
        "saved": Stage.SAVED,
    },
    Stage.SAVED: {},
}
"""What may happen to a rank, and where it then stands."""


def tell(state: RankState, event: str, number: int) -> None:
    """number: of the event; what happens in place or again is in the generation of that number."""
    match event:
        case "step":
            state.step_counts()
        case "in place":
            state.entered_in_place(number)
        case "left":
            state.left(facts(number, plain_steps=number))
        case "again":
            state.runs_again(number)
        case "new":
            state.is_new()
        case "nothing is left":
            state.begins_afresh(number)
        case "saved":
            state.saved(f"checkpoint {number}")


def histories(length: int) -> Iterator[list[str]]:
    """Every list of events that may happen to a rank, of this length at most."""
    todo: list[tuple[Stage, list[str]]] = [(Stage.FRESH, [])]
    while todo:
        stage, events = todo.pop()
        yield events
        if len(events) < length:
            todo += [(after, [*events, event]) for event, after in NEXT[stage].items()]


def last(events: list[str], *names: str) -> int:
    """The number of the last of these events, from 1; 0 if there was none."""
    return max((n for n, event in enumerate(events, 1) if event in names), default=0)


def test_in_every_order_of_events_a_report_says_what_was_left_since_the_last_step() -> None:
    now = facts(100, plain_steps=100, missing="a model is not registered", spare=None, copies=2)
    num_histories = 0
    for events in histories(6):
        num_histories += 1
        state, stage = RankState(0), Stage.FRESH
        for number, event in enumerate(events, 1):
            tell(state, event, number)
            stage = NEXT[stage][event]
        assert state.stage is stage, events
        # Told from the history alone, without any stage.
        settled = last(events, "step", "nothing is left")
        since = events[settled:]
        is_new, is_saved = "new" in since, "saved" in since
        kept = settled + since.index("left") + 1 if "left" in since and not is_new else 0
        assert state.has_kept == (is_new or kept > 0), events
        assert state.is_newcomer == (is_new and not is_saved), events

        entered = last(events, "in place", "again", "nothing is left")
        report = state.report(began(0, entered), now, Where.OUTSIDE)
        assert report.entered == entered, events
        assert report.saved == (f"checkpoint {len(events)}" if is_saved else ""), events
        assert report.can_restart == state.has_kept, events
        assert report.missing == ("" if report.can_restart else now.missing), events
        assert report.plain_steps == (0 if is_new else kept or 100), events
        assert report.can_save == state.has_kept, events
        assert report.spare == (0 if is_new and not is_saved else 2), events
        # Of shards the kept ones count, which may have lost a copy.
        sharded = state.report(began(0, entered), facts(100), Where.OUTSIDE)
        assert sharded.spare == (0 if state.has_kept and not is_saved else 1), events
        for of_objects in (now, facts(100)):
            before = state.report(began(0, entered + 1), of_objects, Where.OUTSIDE)
            assert before.spare == 0, "it has not entered the generation that ends"
        # The optimizers that a new call has not made yet are where they were.
        unmade = state.report(began(), replace(now, progress=()), Where.OUTSIDE)
        assert [one.ballots for one in unmade.progress] == ([kept] if kept else []), events
        # Those that it has made again have no more to tell, and those of a newcomer nothing.
        expected = -1 if is_new and not is_saved else kept or 100
        assert [one.ballots for one in report.progress] == [expected], events
    assert num_histories > 4000


def test_only_a_rank_that_has_not_begun_reports_that_it_is_nowhere() -> None:
    state, unregistered = RankState(3), Facts(missing="nothing is registered yet")
    assert not state.can_run_again(unregistered, Where.OUTSIDE)
    assert state.can_run_again(unregistered, Where.NOT_BEGUN)
    report = state.report(began(), unregistered, Where.NOT_BEGUN)
    assert (report.entered, report.can_restart, report.is_parked) == (NOWHERE, True, False)
    for where in (Where.IN_STEP, Where.AT_END, Where.OUTSIDE):
        report = state.report(began(), unregistered, where)
        assert (report.entered, report.missing) == (3, "nothing is registered yet")


@pytest.mark.parametrize("has_plain_steps", [False, True])
@pytest.mark.parametrize("follows_groups", [False, True])
@pytest.mark.parametrize("where", Where)
def test_a_rank_is_parked_where_its_function_can_go_on(
    where: Where, follows_groups: bool, has_plain_steps: bool
) -> None:
    now = facts(has_plain_steps=has_plain_steps, follows_groups=follows_groups)
    in_steps = where in (Where.IN_STEP, Where.AT_BOUNDARY)
    waits = where is Where.AT_END or (in_steps and not has_plain_steps)
    expected = waits and not follows_groups
    assert RankState(0).report(began(), now, where).is_parked == expected


def test_a_step_after_its_loop_runs_from_the_top_unless_shards_have_no_copy() -> None:
    """Without a copy a leaving rank hands over in a step, and in no other place."""
    for spare, missing, is_parked in [(1, "", False), (0, "", True), (1, "the model", True)]:
        now = facts(spare=spare, missing=missing, awaits_step=True)
        assert RankState(0).report(began(), now, Where.IN_STEP).is_parked == is_parked


@pytest.mark.parametrize("keeps_checkpoints", [False, True])
@pytest.mark.parametrize(("ballots", "plain_steps"), [(0, 0), (1, 0), (0, 1)])
def test_only_a_step_is_worth_a_checkpoint(
    ballots: int, plain_steps: int, keeps_checkpoints: bool
) -> None:
    expected = keeps_checkpoints and (ballots or plain_steps) > 0
    now = facts(ballots, plain_steps=plain_steps, keeps_checkpoints=keeps_checkpoints)
    state = RankState(0)
    assert state.report(began(), now, Where.IN_STEP).can_save == expected
    unregistered = replace(now, missing="a model is not registered")
    assert not state.report(began(), unregistered, Where.IN_STEP).can_save
    state.left(now)
    # What has been left is known to be whole; what a new call has done so far does not matter.
    assert state.report(began(), Facts(), Where.OUTSIDE).can_save == expected


def test_ranks_are_followed_through_generations_that_did_not_come_about() -> None:
    state = RankState(0)
    followed = []
    for former_ranks in ((0, 2, 3), (1, 2)):
        state.formed(former_ranks)
        followed.append(state.former_ranks)
    assert followed == [(0, 2, 3), (2, 3)]
    state.entered_in_place(2)
    state.formed((1,))
    assert state.former_ranks == (1,)


def test_a_hand_over_is_reported_in_its_generation_only() -> None:
    state = RankState(0)
    assert not state.report(began(), facts(), Where.IN_STEP).handed_over
    state.handed_over(1)
    assert state.report(began(0, 1), facts(), Where.IN_STEP).handed_over
    assert not state.report(began(0, 2), facts(), Where.IN_STEP).handed_over


def test_a_function_that_has_to_be_left_is_left_once() -> None:
    state = RankState(0)
    assert state.take_restart() is None
    told = Resumption(Assignment(1, 0, 1, 0, 1, 0), FormerRanks.of([0]), (), restarts=True)
    leaving = []
    for _ in range(2):
        state.has_to_leave(told)
        leaving.append(state.is_leaving)
        assert state.take_restart() is told
        leaving.append(state.is_leaving)
    assert leaving == [True, False] * 2


# -- and the driver's half -----------------------------------------------------------------------


def worker(seat: int) -> WorkerInfo:
    return WorkerInfo(f"worker-{seat}", seat, "node-a", "node-a", 100 + seat, "cpu")


Stood = tuple[RankState, Facts, Where]


def fresh() -> Stood:
    return RankState(0), Facts(missing="nothing is registered yet"), Where.NOT_BEGUN


def in_a_step() -> Stood:
    state = RankState(0)
    state.step_counts()
    return state, facts(4), Where.IN_STEP


def behind_a_step() -> Stood:
    state = RankState(0)
    state.step_counts()
    return state, facts(5), Where.OUTSIDE


def newcomer() -> Stood:
    state = RankState(0)
    state.is_new()
    return state, Facts(), Where.OUTSIDE


def restarted() -> Stood:
    """Its function runs again, and has not made its optimizer yet."""
    state = RankState(0)
    state.step_counts()
    state.left(facts(4))
    state.runs_again(0)
    return state, Facts(missing="nothing is registered yet"), Where.OUTSIDE


PLACES: list[Callable[[], Stood]] = [fresh, in_a_step, behind_a_step, newcomer, restarted]

BALLOTS = {in_a_step: 4, behind_a_step: 5, restarted: 4}
"""Those that it has seen, or has kept."""


@pytest.mark.parametrize("dies", [False, True], ids=["all-live", "one-dies"])
@pytest.mark.parametrize("places", list(itertools.combinations_with_replacement(PLACES, 3)))
def test_wherever_ranks_stand_the_driver_has_them_go_on_from_the_last_step(
    places: tuple[Callable[[], Stood], ...], dies: bool
) -> None:
    ranks = [place() for place in places]
    living = ranks[:2] if dies else ranks
    events_of_all: list[Event] = [
        RankFroze(state.report(began(rank), now, where))
        for rank, (state, now, where) in enumerate(living)
    ]
    if dies:
        events_of_all.append(WorkerDied("worker-2", "SIGKILL"))
    for events in itertools.permutations(events_of_all):
        membership = Membership()
        for seat in range(3):
            membership.handle(WorkerRegistered(worker(seat)))
        membership.handle(RunStarted(request(0, 1, None)))
        told = [one for event in events for one in membership.handle(event)]
        assert not [one for one in told if isinstance(one, EndRun)], events
        words = [one.resumption for one in told if isinstance(one, ResumeRank)]
        assert len(words) == len(living), events
        stood = places[: len(living)]
        for word in words:
            assert word.restarts == any(place is not in_a_step for place in stood)
            seen = max(BALLOTS.get(place, 0) for place in stood)
            assert [one.ballots for one in word.progress] == ([seen] if seen else [])
            assert word.entered == (NOWHERE if set(stood) == {fresh} else 0)


# -- optimizers that were made again, and have not got their state yet ----------------------------


def again(ballots: int) -> RankState:
    """A rank that was left after so many ballots, and whose function runs again."""
    state = RankState(0)
    state.step_counts()
    state.left(facts(ballots))
    state.runs_again(1)
    return state


@pytest.mark.parametrize("num_made", [0, 1])
def test_an_optimizer_that_was_made_again_is_where_the_kept_one_was(num_made: int) -> None:
    """Before it is registered it has seen no ballot, and a failure may come in between."""
    made = Facts((OptimizerProgress(0),) * num_made, missing="it is not registered", spare=1)
    word = again(5).report(began(), made, Where.OUTSIDE)
    assert word.progress == (OptimizerProgress(5, (5.0,)),)
    assert word.can_restart


@pytest.mark.parametrize("ballots", [1, 5])
def test_ranks_that_are_interrupted_at_different_places_of_their_constructors_go_on(
    ballots: int,
) -> None:
    membership = Membership()
    for seat in range(3):
        membership.handle(WorkerRegistered(worker(seat)))
    membership.handle(RunStarted(request(0, 1, None)))
    newcomer = RankState(0)
    newcomer.is_new()
    made = Facts((OptimizerProgress(0),), missing="it is not registered", spare=1)
    words = [
        again(ballots).report(began(0), Facts(missing="nothing is registered"), Where.OUTSIDE),
        again(ballots).report(began(1), made, Where.OUTSIDE),
        newcomer.report(began(2), made, Where.OUTSIDE),
    ]
    for word in words:
        told = membership.handle(RankFroze(word))
    resumed = resumptions(told)
    assert len(resumed) == 3
    assert all(one.restarts for one in resumed.values())
    assert {one.progress for one in resumed.values()} == {
        (OptimizerProgress(ballots, (float(ballots),)),)
    }


def test_a_rank_is_ready_for_the_end_of_its_generation_when_it_could_go_on() -> None:
    state = RankState(0)
    nothing = Facts(missing="it is not registered")
    assert state.readiness(nothing) is Readiness.NOT_YET
    assert state.readiness(facts(0)) is Readiness.RUNS_AGAIN
    assert state.readiness(facts(0, missing="the model")) is Readiness.NOT_YET
    state.step_counts()
    assert state.readiness(facts(missing="the model")) is Readiness.PARKS
    behind = facts(missing="the model", is_after_loop=True)
    assert state.readiness(behind) is Readiness.NOT_YET, "what comes there cannot be repeated"
    plain = facts(missing="the model", has_plain_steps=True)
    assert state.readiness(plain) is Readiness.NOT_YET
    assert again(5).readiness(nothing) is Readiness.RUNS_AGAIN, "all that it needs is kept"


def test_what_has_no_copy_is_handed_over_before_a_rank_leaves_and_only_in_a_step() -> None:
    state = RankState(0)
    registered, behind = facts(spare=0), facts(spare=0, is_after_loop=True)
    assert state.readiness(registered, for_departure=True) is Readiness.NOT_YET
    state.step_counts()
    assert state.readiness(registered, for_departure=True) is Readiness.PARKS
    assert state.readiness(behind, for_departure=True) is Readiness.NOT_YET
    assert state.readiness(behind) is Readiness.RUNS_AGAIN, "where a worker comes"
    copied = facts(spare=1, is_after_loop=True)
    assert state.readiness(copied, for_departure=True) is Readiness.RUNS_AGAIN
    assert again(5).readiness(registered, for_departure=True) is Readiness.NOT_YET


def test_a_newcomer_that_loses_a_peer_before_its_first_call_has_nothing_to_keep() -> None:
    """It met the others, and one of them died before the function was called here."""
    newcomer = RankState(0)
    newcomer.is_new()
    unused = cast("Any", None)
    FromTheTop(unused, newcomer, LiveObjects(unused, unused)).retain()
    assert newcomer.stage is Stage.NEWCOMER
    assert newcomer.report(began(1), Facts(), Where.OUTSIDE).generation == 0
