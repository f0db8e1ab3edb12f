"""benchmarks/faults/collectives.py runs, and would see what it looks for."""

from __future__ import annotations

import pytest

from benchmarks.faults.collectives import Outcome, Plan, Report, draw, judge
from chorusline.collectives.contract.errors import CollectiveTimeout, GroupAborted, PeerLost
from tests.harness.programs import figures_of


@pytest.mark.slow
def test_a_few_seeds_leave_nothing_to_complain_about() -> None:
    flags = ("--seeds", "6", "--transport", "shared-memory")
    # Its processes send it objects of its own module, which in a forked program has another name.
    figures = figures_of("faults.collectives", *flags, timeout_s=100, is_forked=False)
    assert figures["seeds"] == 6
    assert figures["hangs"] == figures["wrong"] == figures["leaks"] == 0


def test_a_seed_draws_the_same_plan_again() -> None:
    assert draw(7, "both") == draw(7, "both")
    assert draw(7, "both") != draw(8, "both")
    assert {draw(seed, "both").fault for seed in range(60)} == {
        "kill", "stop", "raise", "cancel", "abort", "none",
    }  # fmt: skip


def plan(fault: str) -> Plan:
    return Plan(0, "shared-memory", 3, fault, 1, 0, 0.0, ())


@pytest.mark.parametrize(
    ("reports", "kind", "text"),
    [
        ([Report(0, error=PeerLost("a", 0, [2], ""))], "wrong", "rank 0 raised PeerLost"),
        ([Report(0, error=GroupAborted(0, [1], ""))], "wrong", "rank 0 raised GroupAborted"),
        (
            [Report(rank, error=PeerLost(f"{rank}", 0, [1], "")) for rank in (0, 2)],
            "wrong",
            "the ranks disagree",
        ),
        ([Report(0, error=PeerLost("a", 0, [1], ""), late_s=2.5)], "late", "knew after 2.5 s"),
        ([Report(0, leaks=["descriptor of anon_inode"])], "leaks", "rank 0: descriptor"),
        ([Report(0, wrong=["the result of x"])], "wrong", "rank 0: the result of x"),
    ],
)  # fmt: skip
def test_what_goes_wrong_is_counted(reports: list[Report], kind: str, text: str) -> None:
    outcome = Outcome(plan("kill"))
    judge(outcome, reports)
    (told,) = getattr(outcome, kind)
    assert text in told


@pytest.mark.parametrize("starved_s", [0.1, 0.8])
def test_a_rank_without_a_core_for_half_of_the_deadline_is_late_in_fact(starved_s: float) -> None:
    error = CollectiveTimeout("a", 0, [1, 2], 1.0, "")
    outcome = Outcome(plan("stop"))
    judge(outcome, [Report(0, error=error), Report(2, error=error, starved_s=starved_s)])
    assert bool(outcome.starved) == (starved_s > 0.5)
    assert bool(outcome.wrong) == (starved_s < 0.5)


def test_time_without_a_core_is_not_late() -> None:
    for starved_s, late in ((0.1, 1), (2.0, 0)):
        outcome = Outcome(plan("kill"))
        error = PeerLost("a", 0, [1], "")
        judge(outcome, [Report(0, error=error, late_s=3.8, starved_s=starved_s)])
        assert (len(outcome.late), len(outcome.starved)) == (late, 1 - late)


def test_an_error_that_names_the_victim_in_time_is_what_we_want() -> None:
    outcome = Outcome(plan("kill"))
    judge(outcome, [Report(rank, error=PeerLost("a", 0, [1], "")) for rank in (0, 2)])
    assert outcome.struck
    assert not (outcome.wrong or outcome.late or outcome.leaks or outcome.hangs)
