"""What is shown of other processes and checkpoints is text: no markup, no orders to a terminal."""

from __future__ import annotations

import io
import pickle
import threading
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import chorusline as cl
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
from chorusline.runtime.checkpoint.contents import pickled
from chorusline.runtime.checkpoint.export import plain_states, safetensors_of
from chorusline.runtime.checkpoint.format.reader import CheckpointReader
from chorusline.runtime.checkpoint.format.storage import Folder
from chorusline.runtime.commands.command_line import look_at_checkpoints
from chorusline.runtime.commands.status import drawn
from tests.checkpoint.failures.test_forgeries import _entry, _replace, _rewrite, _write

HOSTILE = ["[/data]", "[bold red]gone", "\x1b]0;owned\x07", "\x1b[2J", "line\rover", "a\nb"]


def shown(
    value: object,
    detail: str | None = None,
    changes: tuple[GenerationChange, ...] = (),
    num_lost: int = 0,
    member: MemberState = MemberState.RUNNING,
    **more: int,
) -> str:
    info = WorkerInfo("id", 0, "node", "host", 7, "cpu")
    report = Report(0, 3, time.time(), {"path": value})
    steps = RunStatus(rank=0, generation_changes=changes, num_lost=num_lost, **more)
    word = detail or WorkerSnapshot(info, WorkerState.TRAINING, 0, 0, 1.0, {}, report, status=steps)
    seen = Survey(DriverSnapshot(0, 0, 1, ((info, member),)), (word,))
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


@pytest.mark.parametrize(
    ("member", "state"), [(MemberState.LOST, "lost"), (MemberState.RUNNING, "silent")]
)
def test_a_lost_worker_is_told_from_one_that_only_does_not_answer(
    member: MemberState, state: str
) -> None:
    row = shown(1.0, detail="its process was killed", member=member).splitlines()[-1]
    assert row.split()[:5] == ["7", "on", "host", "cpu", state]


def test_the_losses_of_a_run_are_counted_with_their_steps() -> None:
    gone = Gone(1, 25762, "its node died")
    change = GenerationChange(1, 10.0, 10.2, 1, (1,), step=1456, gone=(gone,))
    counted, line = [one.strip() for one in shown(1.0, changes=(change,)).splitlines()[1:3]]
    assert counted == "lost so far: 1, at step 1456"
    assert line.startswith("step 1456: rank 1 (pid 25762) died (its node died). 1 worker continues")
    assert "lost so far" not in shown(1.0)
    later = shown(1.0, changes=(change,), num_lost=20)
    assert "lost so far: 20, the last ones at step 1456" in later


def test_the_step_of_a_resumed_run_counts_those_before_the_checkpoint() -> None:
    row = shown(1.0, taken=1064, steps_before=300).splitlines()[-1]
    assert " 1,364 " in row


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


def _leave_out(folder: Path, path: list[str], value: object) -> CheckpointReader:
    """The checkpoint, with this object under that path, which no export writes."""

    def change(manifest: dict[str, Any]) -> None:
        _entry(manifest, "state").update(path=path)
        manifest["kinds"].update(model="model")

    _replace(folder, "state", pickled(value))
    _rewrite(folder, change)
    return CheckpointReader(Folder(folder.parent), folder.name)


@pytest.mark.parametrize("text", HOSTILE)
def test_the_names_of_what_an_export_leaves_out_steer_no_terminal(
    text: str, tmp_path: Path
) -> None:
    called = _leave_out(_write(tmp_path, 1), ["state", text], threading.Event)
    no_tensor = _leave_out(_write(tmp_path, 2), ["model", text], 5)
    for export, reader in ((plain_states, called), (safetensors_of, no_tensor)):
        with pytest.warns(UserWarning, match="left out of the export") as caught:
            export(reader)
        (said,) = [str(one.message) for one in caught]
        assert said.isprintable()
        assert not text.isprintable() or text in said


@pytest.mark.parametrize("text", HOSTILE)
def test_the_names_in_an_error_of_a_checkpoint_steer_no_terminal(text: str, tmp_path: Path) -> None:
    reader = _leave_out(_write(tmp_path), ["state", text], threading.Event)
    with pytest.raises(cl.CheckpointUntrusted, match=r"is made of threading\.Event") as caught:
        reader.object(next(entry for entry in reader.manifest.entries if text in entry.path))
    error = pickle.loads(pickle.dumps(caught.value))
    assert str(error) == str(caught.value)
    assert str(error).replace("\n", "").isprintable()
    assert not text.isprintable() or text in str(error)
