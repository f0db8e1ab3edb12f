"""Which number a tracker gets of a step that the ranks report one after another."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from chorusline.actors.messages.messages import Assignment, Report
from chorusline.actors.messages.run_status import RunStatus
from chorusline.actors.reporting.report_buffer import ReportBuffer
from chorusline.collectives.group import Group
from chorusline.runtime.join.engine import Joinable
from chorusline.runtime.process import between_runs as between_runs_module
from chorusline.runtime.process.between_runs import BetweenRuns
from chorusline.runtime.process.step_boundary import boundary, entered
from chorusline.runtime.program.function_call import FunctionCall
from chorusline.runtime.tracking.step_numbers import Logged, StepNumbers


def report(rank: int, step: int, *, number: int = 0, **values: float) -> Report:
    return Report(rank, number, 100.0 + step, dict(values), step, step)


def status(rank: int, taken: int, *, has_joined: bool = False) -> RunStatus:
    return RunStatus(rank=rank, taken=taken, has_joined=has_joined)


def test_a_step_is_the_mean_of_its_ranks_and_amounts_are_summed_in_any_order_of_arrival() -> None:
    reports = [report(rank, 1, loss=rank + 1.0, tokens=10) for rank in range(3)]
    for order in itertools.permutations(reports):
        numbers = StepNumbers()
        for arrived, one in enumerate(order, start=1):
            assert numbers.settled([status(rank, 1) for rank in range(3)], 0.0) == []
            numbers.add(one, 0.0)
            assert arrived == 3 or numbers.settled([status(0, 1)], 0.0) == []
        assert numbers.settled([status(rank, 2) for rank in range(3)], 0.1) == [
            Logged(1, {"loss": 2.0, "tokens": 30.0}, 101.0)
        ]


def test_a_step_waits_for_the_rank_that_is_behind() -> None:
    numbers = StepNumbers()
    numbers.add(report(0, 1, loss=1), 0.0)
    numbers.add(report(0, 2, loss=2), 0.0)
    assert numbers.settled([status(0, 2), status(1, 1)], 0.0) == []
    numbers.add(report(1, 1, loss=3), 0.3)
    assert numbers.settled([status(0, 2), status(1, 2)], 0.3) == [Logged(1, {"loss": 2}, 101)]
    numbers.add(report(1, 2, loss=4), 0.6)
    assert [one.numbers for one in numbers.rest()] == [{"loss": 3.0}]


def test_a_step_waits_for_no_rank_that_has_joined_or_never_reports() -> None:
    numbers = StepNumbers()
    numbers.add(report(0, 1, loss=1), 0.0)
    numbers.add(report(1, 1, loss=2), 0.0)
    numbers.add(report(0, 2, loss=5), 0.0)
    live = [status(0, 3), status(1, 2, has_joined=True), status(2, 3)]
    assert [one.numbers for one in numbers.settled(live, 0.0)] == [{"loss": 1.5}, {"loss": 5.0}]


def test_without_an_optimizer_a_step_is_the_number_of_the_report_and_goes_when_it_is_quiet() -> (
    None
):
    numbers = StepNumbers()
    ranks = [RunStatus(rank=0), RunStatus(rank=1)]
    numbers.add(Report(0, 0, 5.0, {"found": 3}, 0, 1), 0.0)
    assert numbers.settled(ranks, 1.9) == [], "the other rank may report, too"
    assert numbers.settled(ranks, 2.0) == [Logged(1, {"found": 3}, 5.0)]


def test_a_rank_that_hangs_holds_a_step_back_for_ten_seconds_only() -> None:
    numbers = StepNumbers()
    for rank in (0, 1):
        numbers.add(report(rank, 1, loss=1), 0.0)
    numbers.add(report(0, 2, loss=1), 0.0)
    ranks = [status(0, 2), status(1, 1)]
    assert [one.step for one in numbers.settled([status(0, 2), status(1, 2)], 0.0)] == [1]
    assert numbers.settled(ranks, 9.9) == []
    assert [one.step for one in numbers.settled(ranks, 10.0)] == [2]


def test_a_second_report_of_a_step_adds_its_names_and_a_late_one_is_counted() -> None:
    numbers, both = StepNumbers(), [status(0, 1), status(1, 1)]
    numbers.add(report(0, 1, loss=1), 0.0)
    numbers.add(report(0, 1, number=1, accuracy=0.5), 0.1)
    numbers.add(report(1, 1, loss=3), 0.1)
    assert [one.numbers for one in numbers.settled(both, 5.0)] == [{"loss": 2, "accuracy": 0.5}]
    numbers.add(report(1, 1, number=1, accuracy=0.7, recall=0.1), 6.0)
    assert numbers.num_late == 1
    assert [one.numbers for one in numbers.rest()] == [{"recall": 0.1}]


def test_amounts_that_a_rank_reports_in_each_micro_batch_of_a_step_are_summed() -> None:
    numbers = StepNumbers()
    for number, rank in enumerate((0, 1, 0, 1, 0)):
        numbers.add(report(rank, 1, number=number, loss=number, tokens=10, samples=2), 0.0)
    assert numbers.rest() == [Logged(1, {"loss": 3.5, "tokens": 50.0, "samples": 10.0}, 101.0)]


def test_amounts_of_micro_batches_that_take_seconds_are_summed() -> None:
    numbers, done, sent = StepNumbers(), [], 0
    for half_s in range(60):
        while sent <= half_s // 6:  # One in three seconds, and four in each step.
            numbers.add(report(0, 1 + sent // 4, number=sent, tokens=10), half_s / 2)
            sent += 1
        done += numbers.settled([status(0, 1 + (sent - 1) // 4)], half_s / 2)
    assert [one.numbers["tokens"] for one in done] == [40.0, 40.0]
    assert [one.step for one in numbers.settled([status(0, 3)], 37.0)] == [3]
    assert numbers.num_late == 0


class _Optimizer(Joinable):
    """As much of a session's optimizer as its steps."""

    num_steps = 0

    def __init__(self, group: Group) -> None:
        self.group = group

    join_hook = join_device = join_group = state_dict = load_state_dict = cast("Any", print)


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> FunctionCall:
    monkeypatch.setattr(between_runs_module, "_kept", BetweenRuns())
    group = cast("Group", SimpleNamespace(device=torch.device("cpu")))
    return FunctionCall(Assignment(0, 0, 1, 0, 1, 0), group, ReportBuffer(True), None)


def logged(call: FunctionCall) -> list[Logged]:
    """What a tracker gets of the reports of `call`, which come three seconds apart."""
    numbers, done = StepNumbers(), []
    for number, one in enumerate(call._report_buffer._reports):
        done += numbers.add(one, 3.0 * number)
        done += numbers.settled([RunStatus(rank=0, taken=one.taken)], 3.0 * number + 2.0)
    assert numbers.num_late == 0
    return done + numbers.rest()


@pytest.mark.parametrize("steps_before", [0, 100])
def test_without_an_optimizer_a_run_that_resumes_counts_its_reports_from_there(
    call: FunctionCall, steps_before: int
) -> None:
    call.steps_before = steps_before
    with entered(RunStatus(rank=0)):
        for number in range(5):
            call.report({"loss": number})
    assert [(one.step - steps_before, one.numbers["loss"]) for one in logged(call)] == [
        (number + 1, number) for number in range(5)
    ]


@pytest.mark.parametrize("kind", ["registered", "made", "unknown"])
@pytest.mark.parametrize("steps_before", [0, 100])
def test_reports_of_micro_batches_before_the_first_step_never_go_back(
    call: FunctionCall, steps_before: int, kind: str
) -> None:
    call.steps_before = steps_before
    optimizer = _Optimizer(call.group)
    if kind == "registered":
        call.registry.add("optim", cast("Any", optimizer), per_rank=False)
    elif kind == "made":
        between_runs_module.between_runs().wrap(cast("Any", optimizer))
    with entered(RunStatus(rank=0)):
        for number in range(1, 21):
            boundary().status.taken = number // 4
            call.report({"tokens": 10})
    done = logged(call)
    steps = [one.step - steps_before for one in done]
    assert steps == ([1, 2, 3, 4, 5] if kind == "unknown" else [0, 1, 2, 3, 4, 5])
    assert sum(one.numbers["tokens"] for one in done) == 200.0
    if kind != "unknown":
        assert [one.numbers["tokens"] for one in done] == [30.0, *[40.0] * 4, 10.0]


def test_steps_that_are_taken_again_are_logged_again() -> None:
    numbers, ranks = StepNumbers(), [status(0, 9), status(1, 9)]
    for step in (6, 7, 8):
        for rank in (0, 1):
            numbers.add(report(rank, step, loss=step), 0.0)
    assert [one.step for one in numbers.settled(ranks, 0.0)] == [6, 7, 8]
    # The run has gone back to a checkpoint of step 5.
    steps = [numbers.add(report(rank, 6, number=9, loss=60 + rank), 1.0) for rank in (0, 1)]
    assert steps == [[], []]
    assert [(one.step, one.numbers) for one in numbers.rest()] == [(6, {"loss": 60.5})]
    assert numbers.num_late == 0


def test_numbers_have_the_names_of_the_live_view_and_other_values_are_left_out() -> None:
    numbers = StepNumbers()
    values = {"loss": math.inf, "step": 7, "by": {"top": {"5": 1}}, "text": "x", "list": [1.0]}
    numbers.add(Report(0, 0, 1.0, values, 3, 103), 0.0)
    assert numbers.rest() == [Logged(103, {"loss": math.inf, "step": 7, "by.top.5": 1}, 1.0)]


@pytest.mark.parametrize("seed", range(5))
def test_every_number_of_random_pulls_counts_once(seed: int) -> None:
    import random

    random_ = random.Random(seed)
    numbers, done = StepNumbers(), []
    waiting = [[report(rank, s, loss=10 * s + rank) for s in range(1, 30)] for rank in range(3)]
    at_s = 0.0
    while any(waiting):
        at_s += 0.3
        for rank in random_.sample(range(3), 3):
            for _ in range(random_.randrange(4)):
                # Ranks of a data-parallel run are one step apart at most.
                if waiting[rank] and all(
                    not o or o[0].taken >= waiting[rank][0].taken for o in waiting
                ):
                    assert numbers.add(waiting[rank].pop(0), at_s) == []
        ranks = [status(r, w[0].taken - 1 if w else 29) for r, w in enumerate(waiting)]
        done += numbers.settled(ranks, at_s)
    done += numbers.rest()
    assert [(one.step, one.numbers["loss"]) for one in done] == [
        (step, 10 * step + 1) for step in range(1, 30)
    ]
    assert numbers.num_late == 0
