"""What trackers are told about the workers, out of what the ranks say."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from chorusline.actors.messages.messages import Report
from chorusline.actors.messages.run_status import GenerationChange, Gone, RunStatus
from chorusline.actors.ray_calls.calls import ENDED, FOR_MEMORY, KILLED
from chorusline.actors.worker_group.news import News
from chorusline.runtime.session.detached.history import RunHistory
from chorusline.runtime.session.showing.news_pump import Audience
from chorusline.runtime.session.showing.progress import Progress
from chorusline.runtime.session.showing.progress_model import in_the_end
from chorusline.runtime.tracking.run_events import RunEvents, event_of


def status(rank: int, generation: int, *changes: GenerationChange) -> RunStatus:
    return RunStatus(rank=rank, generation=generation, generation_changes=changes)


def test_a_loss_is_told_once_when_all_ranks_have_gone_on() -> None:
    events = RunEvents()
    early = GenerationChange(1, 10.0, 10.5, 2, (1,), step=21)
    late = GenerationChange(1, 10.2, 11.5, 2, (1,), step=21)
    assert events.look([status(0, 1, early), status(1, 0)]) == []
    both = [status(0, 1, early), status(1, 1, late)]
    (event,) = events.look(both)
    assert (event.kind, event.lost, event.left, event.came) == ("ranks lost", (1,), (), ())
    assert (event.began_at, event.ended_at, event.seconds) == (10.0, 11.5, 1.5)
    assert (event.step, event.generation, event.num_workers) == (21, 1, 2)
    assert event.text == "step 21: rank 1 died. 2 workers continue after 1.5 s; no step is lost"
    assert events.look(both) == events.look(both, is_over=True) == []


def test_a_loss_is_told_when_its_reason_is_known_or_does_not_come() -> None:
    def ranks(why: str) -> list[RunStatus]:
        change = GenerationChange(1, 10.0, 11.0, 2, (1,), gone=(Gone(1, 5, why),))
        return [status(0, 1, change), status(1, 1, change)]

    events = RunEvents()
    assert events.look(ranks(ENDED)) == []
    (event,) = events.look(ranks(KILLED))
    assert event.text.startswith("step 0: rank 1 (pid 5) was killed or crashed. 2 workers")
    events = RunEvents()
    told = [event for _ in range(9) for event in events.look(ranks(ENDED))]
    assert [one.text.partition(".")[0] for one in told] == [
        "step 0: rank 1 (pid 5) died (its process has ended)"
    ]


def test_leaving_and_coming_have_names_of_their_own() -> None:
    events = RunEvents()
    leaves = GenerationChange(2, 1.0, 2.0, 1, (1,), (1,))
    comes = GenerationChange(3, 5.0, 6.0, 3, (), (), (1, 2), runs_again=True)
    told = events.look([status(0, 3, leaves, comes), status(1, 3), status(2, 3)])
    assert [one.kind for one in told] == ["ranks left", "workers came"]
    assert [one.text for one in told] == [
        "step 0: rank 1 has left. 1 worker continues after 1.0 s; no step is lost",
        "step 0: new workers are rank 1, rank 2; 3 workers",
    ]
    assert (told[0].lost, told[0].left) == ((), (1,))


def test_a_change_that_not_all_have_told_is_told_at_the_end() -> None:
    events = RunEvents()
    change = GenerationChange(1, 10.0, 10.5, 1, (1,))
    assert events.look([status(0, 1, change), status(1, 0)]) == []
    assert len(events.look([status(0, 1, change)], is_over=True)) == 1


KILLED_AT_1456 = GenerationChange(
    1, 10.0, 10.2, 1, (1,), step=1456, gone=(Gone(1, 25762, KILLED),), dealt_again=432
)
NEW_AT_1790 = GenerationChange(2, 30.0, 30.1, 2, came=(1,), step=1790, pids=(26984,))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            KILLED_AT_1456,
            "step 1456: rank 1 (pid 25762) was killed or crashed. 1 worker continues after 0.2 s; "
            "no step is lost, 432 batches are dealt again",
        ),
        (
            replace(KILLED_AT_1456, gone=(Gone(1, 5, KILLED + FOR_MEMORY),), dealt_again=0),
            "step 1456: rank 1 (pid 5) was killed or crashed, perhaps for lack of memory: the "
            "kernel of its machine has just killed a process for that. 1 worker continues after "
            "0.2 s; no step is lost",
        ),
        (NEW_AT_1790, "step 1790: a new worker is rank 1 (pid 26984); 2 workers"),
        (
            replace(KILLED_AT_1456, gone=(Gone(1, 5, "its node died"),), repeated=2, dealt_again=1),
            "step 1456: rank 1 (pid 5) died (its node died). 1 worker continues after 0.2 s; "
            "2 steps will be repeated, 1 batch is dealt again",
        ),
        (
            replace(KILLED_AT_1456, left=(1,), gone=(Gone(1, 5, "it is drained"),), dealt_again=0),
            "step 1456: rank 1 (pid 5) has left (it is drained). 1 worker continues after 0.2 s; "
            "no step is lost",
        ),
        (
            replace(KILLED_AT_1456, num_workers=2, came=(0,), pids=(7,), dealt_again=0),
            "step 1456: rank 1 (pid 25762) was killed or crashed. 2 workers continue after 0.2 s; "
            "no step is lost. A new worker is rank 0 (pid 7); 2 workers",
        ),
    ],
)
def test_a_line_names_the_process_and_what_its_loss_costs(
    change: GenerationChange, text: str
) -> None:
    assert event_of([change]).text == text


@pytest.mark.parametrize("is_attached", [False, True], ids=["", "attached"])
@pytest.mark.parametrize("is_terminal", [True, False], ids=["terminal", "log"])
def test_a_kill_is_one_whole_line_wherever_a_run_is_shown(
    is_terminal: bool, is_attached: bool
) -> None:
    """is_attached: one who looks only when it has happened."""
    news = News(
        [Report(0, 1457, 1.0, {"loss": 0.5})],
        statuses={0: status(0, 1, KILLED_AT_1456)},
        num_lost=1,
    )
    if is_attached:
        host = RunHistory("host")
        host.add(news)
        news, _ = host.since(host.beginning())
    shown = io.StringIO()
    console = Console(file=shown, width=40, force_terminal=is_terminal, color_system=None)
    progress = Progress(console=console)
    audience = Audience(None, None, progress, has_output=False)
    with progress:
        audience.deliver(news)
        audience.deliver(replace(news, reports=[]))
        audience.end()
    lines = re.split(r"\r|\n|\x1b\[[\d;?]*[a-zA-Z]", shown.getvalue())
    text = event_of([KILLED_AT_1456]).text
    assert [line for line in lines if "rank 1" in line] == [text]
    assert [line for line in lines if line][-1] == in_the_end([event_of([KILLED_AT_1456])])


def test_the_sum_of_a_run_counts_losses_arrivals_and_repeated_steps() -> None:
    events = [event_of([KILLED_AT_1456]), event_of([NEW_AT_1790])]
    assert in_the_end(events) == "2 workers at the end, 1 lost and replaced; 0 steps repeated"
    assert in_the_end(events[:1]) == "1 worker at the end, 1 lost; 0 steps repeated"
    once = event_of([replace(KILLED_AT_1456, repeated=1)])
    assert in_the_end([once]) == "1 worker at the end, 1 lost; 1 step repeated"
    assert in_the_end([]) == ""
