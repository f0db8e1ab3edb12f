"""What the live view draws: axes, lines that break, rates, tables; no kernel and no Ray."""

from __future__ import annotations

import math
import sys

import pytest
from hypothesis import given, strategies as st

from chorusline.actors.messages.messages import (
    Report,
    RunPause,
    WorkerInfo,
    WorkerSnapshot,
    WorkerState,
)
from chorusline.actors.messages.run_status import RunStatus
from chorusline.actors.worker_group.news import News
from chorusline.runtime.notebook.history import History
from chorusline.runtime.notebook.plots import COLORS, Line, chart, ticks, with_ends
from chorusline.runtime.notebook.view import LiveView, ranks_as_html, run_as_html
from chorusline.runtime.session.showing.news_pump import Audience
from chorusline.runtime.tracking.tracker import TrackedEvent


def report(rank: int, taken: int, at: float, **values: float) -> Report:
    return Report(rank, taken - 1, at, {"loss": 1 / taken, **values}, taken, taken)


def snapshot(rank: int, **steps: object) -> WorkerSnapshot:
    info = WorkerInfo(f"id-{rank}", rank, "node", "<host>", 40 + rank, "cpu")
    return WorkerSnapshot(
        info,
        WorkerState.TRAINING,
        0,
        status=RunStatus(rank=rank, **steps),  # type: ignore[arg-type]
        memory_bytes=3 * 2**20,
    )


def test_the_headline_says_what_a_paused_run_waits_for() -> None:
    view = LiveView(ask=lambda _: pytest.fail("nobody looks"))
    audience = Audience(None, view, None, has_output=False)
    audience.deliver(News(pause=RunPause(2, 3, 40.4, 300.0)))
    waits = "waiting for 2 more workers of at least 3, 40 s of 300 s"
    assert view._doing(61.0) == f"running for 61 s, paused, {waits}"
    audience.deliver(News())
    assert view._doing(62.0) == "running for 62 s"


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 10, [0, 2, 4, 6, 8, 10]),
        (0.013, 0.021, [0.014, 0.016, 0.018, 0.02]),
        (-3, 3, [-3, -2, -1, 0, 1, 2, 3]),
        (7, 7, [7]),
        (1e6, 3e6, [1e6, 1.5e6, 2e6, 2.5e6, 3e6]),
        (0, 5e-324, [0]),
        (-1e308, 1e308, [-1e308, -5e307, 0, 5e307, 1e308]),
        (3, -3, [3]),
    ],
)
def test_ticks_are_round_and_inside(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(expected)


def test_a_chart_of_nothing_or_of_one_point_is_empty() -> None:
    assert chart("loss", "step", []) == ""
    assert chart("loss", "step", [Line("a", [(0.0, 1.0)])]) == ""
    assert chart("loss", "step", [Line("a", [(0.0, 1.0), (1.0, float("nan"))])]) == ""


def test_a_flat_line_and_values_that_are_not_finite_are_drawn() -> None:
    points = [(0.0, 1.0), (1.0, float("inf")), (2.0, 1.0), (3.0, 1.0)]
    drawn = chart("a < b", "step", [Line("x", points)])
    assert "nan" not in drawn and "inf" not in drawn and "a &lt; b" in drawn
    path = drawn.split('<path d="')[1].split('"')[0]
    assert path.count("M") == 2 and path.count("L") == 1, "broken where there is no value"


EXTREMES = [1e308, -1e308, 0.0, 5e-324, -5e-324, 1e16, 1.0, sys.float_info.max]


@given(st.lists(st.sampled_from(EXTREMES) | st.floats(), min_size=2, max_size=4))
def test_a_line_of_any_numbers_is_drawn(values: list[float]) -> None:
    drawn = chart("loss", "step", [Line("x", [*enumerate(values)])])
    known = [value for value in values if math.isfinite(value)]
    assert bool(drawn) == (len(known) > 1) and "nan" not in drawn and "inf" not in drawn


def test_the_line_of_a_rank_is_broken_where_it_had_joined() -> None:
    history = History()
    for taken in (1, 2, 3, 4, 20, 21):
        history.add(report(0, taken, float(taken)))
    line = history.lines()[0]
    assert line.index(None) == 4 and len(line) == 7
    assert [point[0] for point in line if point] == [1, 2, 3, 4, 20, 21]


@pytest.mark.parametrize("num_reports", [50, 8000, 40000])
def test_rates_are_even_where_training_was(num_reports: int) -> None:
    history = History()
    for taken in range(1, num_reports + 1):
        history.add(report(taken % 2, taken, 100 + taken / 50, tokens=32.0))
    rates = history.rates()
    assert history.unit == "tokens" and min(8, num_reports // 200) <= len(rates) <= 60
    assert rates[-1][0] == pytest.approx(num_reports / 50, rel=0.15)
    for _, rate in rates:
        assert rate == pytest.approx(1600, rel=0.2)
    for line in history.lines().values():
        assert len(line) <= 480 and None not in line


def test_a_rate_without_amounts_counts_steps_however_often_they_are_reported() -> None:
    """Steps of 10 ms of two ranks, each tenth one reported, with two calls; the run has resumed at
    step 300, and goes back there once."""
    history, number = History(), 0
    for began_at in (100.0, 160.0):
        for tenth in range(1, 601):
            for rank in range(2):
                for values in ({"loss": 1.0}, {"accuracy": 0.5}):
                    number += 1
                    at_step = 300 + 10 * tenth
                    at = began_at + 0.1 * tenth
                    history.add(Report(rank, number, at, values, number, at_step))
    assert history.unit == "steps"
    for _, rate in history.rates():
        assert rate == pytest.approx(100, rel=0.1)
    assert history.lines()[0][0] == (310, 1.0)
    html = run_as_html("x", [], history)
    assert 'aria-label="steps/s"' in html and ">optimizer step<" in html


def test_ranks_whose_functions_run_again_one_after_another_count_each_step_once() -> None:
    history = History()
    for at, (rank, step) in enumerate([(0, 110), (1, 110), (0, 100), (0, 101), (1, 100), (0, 102)]):
        history.add(Report(rank, at, float(at), {}, at, step))
    [(_, rate)] = history.rates()
    assert rate * 5 == 2  # in as many seconds


def test_the_table_says_where_every_rank_is() -> None:
    seen = [
        snapshot(0, taken=7, steps_before=300, epoch=2, batches_left=3),
        snapshot(1, taken=7, epoch=2, batches_left=0, has_joined=True),
        "did not answer within 1 s",
        "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR",
    ]
    rows = ranks_as_html(seen).split("<tr>")[2:]
    assert all(part in rows[0] for part in ("training", ">307<", ">2<", ">3<", "3 MiB", "pid 40"))
    assert "&lt;host&gt;" in rows[0] and "; step 307" in str(seen[0])
    assert "joined: shadows the others" in rows[1] and ">0<" in rows[1]
    assert "did not answer" in rows[2] and "seat 2" in rows[2]
    assert "<b>gone</b>" in rows[3] and 'title="The actor is dead' in rows[3]


def test_many_ranks_are_counted_after_the_first_few() -> None:
    seen = [snapshot(rank, has_joined=rank % 2 == 0) for rank in range(40)]
    html = ranks_as_html([*seen, "did not answer within 1 s"])
    assert html.count("<tr>") == 18, "a head, sixteen ranks, and the rest"
    assert "and 25 more: 12 have joined, 1 did not answer" in html
    history = History()
    for rank in range(40):
        history.add(report(rank, 1, 0.0))
        history.add(report(rank, 2, 1.0))
    html = run_as_html("x", seen, history)
    assert html.count("<title>rank ") == 8
    assert ">optimizer step, the first 8 of 40 ranks<" in html


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(1, 227, [1, 50, 100, 150, 200, 227]), (0, 100, [0, 20, 40, 60, 80, 100]), (3, 3, [3])],
)
def test_an_axis_has_numbers_at_both_ends(low: float, high: float, expected: list[float]) -> None:
    assert with_ends(ticks(low, high), low, high) == pytest.approx(expected)


def test_the_number_at_the_right_end_of_an_axis_is_inside_the_picture() -> None:
    drawn = chart("batches/s", "seconds", [Line("x", [(0.12, 1.0), (12.84, 2.0)])])
    assert ' text-anchor="end">12.84</text>' in drawn and 'x="440.0"' in drawn
    drawn = chart("loss", "step", [Line("x", [(3.0, 1.0), (3.0, 2.0)])])
    assert ' text-anchor="middle">3</text>' in drawn, "the only number is not at the right end"


@pytest.mark.parametrize(("num_ranks", "has_names"), [(2, True), (5, True), (6, False)])
def test_the_names_of_many_ranks_are_not_drawn_over_the_title(
    num_ranks: int, has_names: bool
) -> None:
    """The table of the ranks has their colours, too."""
    lines = [Line(f"rank {rank}", [(0, 1.0), (1, 2.0)]) for rank in range(num_ranks)]
    drawn = chart("loss", "step", lines)
    assert (">rank 1</text>" in drawn) == has_names and "<title>rank 1</title>" in drawn


def brightness(color: str) -> float:
    """The relative luminance of `#rrggbb`, as WCAG 2 has it."""
    parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [x / 12.92 if x <= 0.03928 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("color", COLORS)
def test_the_line_of_each_rank_can_be_seen_on_a_black_page_and_on_a_white_one(color: str) -> None:
    black, white = brightness("#111111"), brightness("#ffffff")
    assert (brightness(color) + 0.05) / (black + 0.05) > 4.5
    assert (white + 0.05) / (brightness(color) + 0.05) > 2.2


def test_a_loss_is_a_line_below_the_table_and_a_mark_in_both_plots() -> None:
    history = History()
    for step in range(1, 30):
        history.add(Report(0, step, 100.0 + step, {"loss": 1.0 / step}, step, 300 + step))
    text = "step 312: rank 1 (pid 7) was killed or crashed. 1 worker continues"
    event = TrackedEvent("ranks lost", 112.0, 112.2, 312, 1, 1, lost=(1,), text=text)
    resumed = snapshot(0, taken=29, steps_before=300)
    html = run_as_html("x", [resumed], history, [event], [text])
    assert html.count(f"<title>{text}</title>") == 2
    assert f"<div>{text}</div>" in html
