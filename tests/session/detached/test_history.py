"""What a session host holds of a run: all of its end, a little of its beginning, and no more."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from chorusline.actors.messages.messages import Report
from chorusline.actors.messages.run_status import GenerationChange, Gone, RunStatus
from chorusline.actors.ray_calls.calls import ENDED, KILLED
from chorusline.actors.reporting.worker_logs import OUT, Position, Printed, PrintedPiece
from chorusline.actors.worker_group.news import News
from chorusline.runtime.session.detached import history as module
from chorusline.runtime.session.detached.history import Bookmark, RunHistory
from chorusline.runtime.tracking.run_events import RunEvents


def report(rank: int, step: int) -> Report:
    return Report(rank, step, float(step), {"loss": 1.0 / (step + 1)})


def printed(text: bytes) -> tuple[int, Printed]:
    return 0, Printed((PrintedPiece(OUT, text, 0),), Position(), 0, False, ("", ""), "")


def test_whoever_reads_in_time_gets_every_report_once_and_in_order() -> None:
    history, place, got = RunHistory("a"), Bookmark(host="a"), []
    for step in range(70_000):
        history.add(News([report(0, step), report(1, step)]))
        if step % 7_000 == 6_999:
            news, place = history.since(place)
            got += [(one.rank, one.step) for one in news.reports]
    news, place = history.since(place)
    assert news.reports == [] and place.reports == 140_000
    assert got == [(rank, step) for step in range(70_000) for rank in (0, 1)]


def test_a_long_run_keeps_its_beginning_thinly_and_its_end_whole() -> None:
    history = RunHistory()
    num_steps = 150_000
    for first in range(0, num_steps, 1000):
        history.add(News([report(rank, s) for s in range(first, first + 1000) for rank in (0, 1)]))
    kept = history.reports()
    assert len(kept) <= module.MOST_RECENT + module.MOST_OLDER
    assert kept == history.since(history.beginning())[0].reports
    assert [one.step for one in kept if one.rank == 0] == [
        one.step for one in kept if one.rank == 1
    ], "the curves of all ranks have the same points"
    older = [one.step for one in kept[: -module.MOST_RECENT] if one.rank == 0]
    gaps = Counter(b - a for a, b in pairwise(older))
    assert older[0] == 0 and max(gaps) <= 3 * min(gaps), "spread from the beginning on"
    recent = [one.step for one in kept[-module.MOST_RECENT :] if one.rank == 0]
    assert recent == list(range(num_steps - module.MOST_RECENT // 2, num_steps))


@pytest.mark.parametrize("period", [2, 10, 64])
def test_a_name_of_each_nth_report_keeps_its_beginning(period: int) -> None:
    history, num_reports = RunHistory(), 200_000
    for step in range(num_reports):
        name = "accuracy" if step % period == period - 1 else "loss"
        history.add(News([Report(0, step, float(step), {name: 1.0})]))
    kept = [one.step for one in history.reports() if "accuracy" in one.values]
    older = [step for step in kept if step < num_reports - module.MOST_RECENT]
    assert len(older) > module.MOST_OLDER / period / 4
    assert older[0] < num_reports / 10


def test_a_newcomer_is_shown_the_end_of_the_output_and_a_reader_all_of_it() -> None:
    history = RunHistory("a")
    place = history.beginning()
    for number in range(100):
        history.add(News(printed=[printed(b"%4d" % number * 1024)]))  # 4 KiB each
    assert len(history.since(place)[0].printed) == 100
    tail = history.since(history.beginning())[0].printed
    assert len(tail) == module.TAIL_BYTES // 4096
    assert tail[-1][1].pieces[0].data == b"  99" * 1024
    history.add(News(printed=[printed(b"long" * module.TAIL_BYTES)]))
    assert len(history.since(history.beginning())[0].printed) == 1, "the newest, of any length"


def test_output_that_nobody_reads_does_not_grow() -> None:
    history = RunHistory()
    piece = bytes(1 << 20)
    for _ in range(40):
        history.add(News(printed=[printed(piece)]))
    news, _ = history.since(Bookmark(0, 0, ""))
    assert len(news.printed) == module.MOST_PRINTED_BYTES >> 20


def test_the_place_of_another_host_is_none() -> None:
    history = RunHistory("second")
    history.add(News([report(0, step) for step in range(5)]))
    news, place = history.since(Bookmark(100, 100, "first"))
    assert [one.step for one in news.reports] == list(range(5))
    assert place == Bookmark(5, 0, "second")


def test_one_who_looks_late_hears_of_all_losses_and_of_each_notice_once() -> None:
    history = RunHistory("a")
    for generation in range(1, 40):
        changes = tuple(
            GenerationChange(one, 1.0, 2.0, 1, (1,), step=one)
            for one in range(max(1, generation - 2), generation + 1)
        )
        status = RunStatus(rank=0, generation=generation, generation_changes=changes)
        history.add(News([report(0, generation)], statuses={0: status}, notices=[f"n{generation}"]))
    news, place = history.since(history.beginning())
    told = RunEvents().look(news.statuses.values())
    assert [event.step for event in told] == list(range(1, 40))
    assert len(news.notices) == 39
    later, _ = history.since(place)
    assert later.notices == [] and len(later.statuses[0].generation_changes) == 3


def test_who_looks_later_hears_the_reason_that_came_after_a_loss() -> None:
    history = RunHistory("a")
    for why in (ENDED, KILLED):
        change = GenerationChange(1, 1.0, 2.0, 1, (1,), gone=(Gone(1, 5, why),))
        status = RunStatus(rank=0, generation=1, generation_changes=(change,))
        history.add(News([], statuses={0: status}))
    news, _ = history.since(history.beginning())
    (event,) = RunEvents().look(news.statuses.values())
    assert "rank 1 (pid 5) was killed or crashed. " in event.text
