"""What `chorusline status` shows of other processes is text: no markup, no orders to a terminal."""

from __future__ import annotations

import io
import time
from argparse import Namespace
from pathlib import Path

import pytest
from rich.console import Console

from chorusline.actors.messages.messages import (
    DriverSnapshot,
    MemberState,
    Report,
    Survey,
    WorkerInfo,
    WorkerSnapshot,
    WorkerState,
)
from chorusline.actors.messages.run_status import GenerationChange, Gone, RunStatus
from chorusline.runtime.commands.command_line import look_at_checkpoints
from chorusline.runtime.commands.status import drawn
from tests.checkpoint.failures.test_forgeries import _rewrite, _write

HOSTILE = ["[/data]", "[bold red]gone", "\x1b]0;owned\x07", "\x1b[2J", "line\rover", "a\nb"]


def shown(
    value: object, detail: str | None = None, changes: tuple[GenerationChange, ...] = ()
) -> str:
    info = WorkerInfo("id", 0, "node", "host", 7, "cpu", 1.0)
    report = Report(0, 3, time.time(), {"path": value})
    steps = RunStatus(rank=0, generation_changes=changes)
    word = detail or WorkerSnapshot(info, WorkerState.TRAINING, 0, 0, 1.0, {}, report, status=steps)
    seen = Survey(DriverSnapshot(0, 0, 1, ((info, MemberState.RUNNING),)), (word,))
    printed = io.StringIO()
    Console(file=printed, width=200, force_terminal=True, color_system=None).print(
        drawn({"night": seen})
    )
    return printed.getvalue()


@pytest.mark.parametrize("text", HOSTILE)
def test_a_reported_text_is_shown_as_it_is_and_steers_nothing(text: str) -> None:
    for found in (shown(text), shown(1.0, detail=text)):
        assert "\x1b]" not in found and "\x1b[2J" not in found and "\r" not in found
        if "[" in text and "\x1b" not in text:
            assert text in found


def test_the_losses_of_a_run_are_counted_with_their_steps() -> None:
    gone = Gone(1, 25762, "its node died")
    change = GenerationChange(1, 10.0, 10.2, 1, (1,), step=1456, gone=(gone,))
    counted, line = [one.strip() for one in shown(1.0, changes=(change,)).splitlines()[1:3]]
    assert counted == "lost so far: 1, at step 1456"
    assert line.startswith("step 1456: rank 1 (pid 25762) died (its node died). 1 worker continues")
    assert "lost so far" not in shown(1.0)


@pytest.mark.parametrize("value", [1e300, 10**300], ids=["float", "int"])
def test_a_reported_number_is_short_whatever_its_size(value: float) -> None:
    assert "path 1e+300  (" in shown(value)


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("is_whole", [True, False])
def test_the_names_in_a_checkpoint_steer_no_terminal(
    text: str, is_whole: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def change(manifest: dict[str, object]) -> None:
        manifest["kinds"] |= {text: "state"}  # type: ignore[operator]
        if not is_whole:
            manifest["files"] = {text: 1}

    _rewrite(_write(tmp_path), change)
    options = Namespace(action="list", place=tmp_path)
    assert look_at_checkpoints(options) == 0
    printed = capsys.readouterr().out
    assert printed.count("\n") == 1 and printed.rstrip("\n").isprintable()
    assert (": whole" in printed) == is_whole
    if text.isprintable():
        assert text in printed
