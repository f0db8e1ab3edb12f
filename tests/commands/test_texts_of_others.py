"""What `chorusline status` shows of other processes is text: no markup, no orders to a terminal."""

from __future__ import annotations

import io
import time

import pytest
from rich.console import Console

from chorusline.actors.messages import (
    DriverSnapshot,
    MemberState,
    Report,
    Survey,
    WorkerInfo,
    WorkerSnapshot,
    WorkerState,
)
from chorusline.runtime.commands.status import drawn

HOSTILE = ["[/data]", "[bold red]gone", "\x1b]0;owned\x07", "\x1b[2J", "line\rover", "a\nb"]


def shown(value: object, detail: str | None = None) -> str:
    info = WorkerInfo("id", 0, "node", "host", 7, "cpu", 1.0)
    report = Report(0, 3, time.time(), {"path": value})
    word = detail or WorkerSnapshot(info, WorkerState.TRAINING, 0, 0, 1.0, {}, report)
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
