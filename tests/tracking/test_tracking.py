"""Trackers that are slow, raise, or are not there; and what a run tells each of them."""

from __future__ import annotations

import argparse
import asyncio
import contextvars
import json
import logging
import math
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import chorusline as cl
from chorusline.actors.messages.messages import Report
from chorusline.actors.messages.run_status import GenerationChange, RunStatus
from chorusline.runtime.commands.command_line import main
from chorusline.runtime.notebook.view import LiveView, Seen
from chorusline.runtime.session.showing.news_pump import Audience
from chorusline.runtime.tracking import tracking as module
from chorusline.runtime.tracking.configs import LEFT_OUT, plain_config
from chorusline.runtime.tracking.tracker_names import checked_trackers
from chorusline.runtime.tracking.tracking import Tracking


class Kept(cl.Tracker):
    """Keeps what it is told. gate: `log` waits for it."""

    def __init__(self, gate: threading.Event | None = None, *, raises: str = "") -> None:
        self.told: list[tuple[Any, ...]] = []
        self.threads: set[str] = set()
        self._gate, self._raises = gate, raises

    def _note(self, *what: Any) -> None:
        self.threads.add(threading.current_thread().name)
        self.told.append(what)
        if what[0] == self._raises:
            raise OSError("the disk is full")

    def begin(self, run: cl.TrackedRun) -> None:
        self._note("begin", run)

    def log(self, step: int, numbers: Mapping[str, float], time: float) -> None:
        if self._gate is not None:
            self._gate.wait(30)
        self._note("log", step, dict(numbers), time)

    def event(self, event: cl.TrackedEvent) -> None:
        self._note("event", event.kind, event.step)

    def end(self, status: str, error: str) -> None:
        self._note("end", status, error)


def status(taken: int, *changes: GenerationChange) -> dict[int, RunStatus]:
    generation = changes[-1].generation if changes else 0
    one = RunStatus(
        rank=0, taken=taken, generation=generation, origin="f" * 32, generation_changes=changes
    )
    return {0: one}


def report(step: int) -> Report:
    return Report(0, step - 1, float(step), {"loss": 1 / step}, step, step)


def tracking(*trackers: cl.Tracker, **arguments: Any) -> Tracking:
    return Tracking(trackers, "train", arguments, {"num_workers": 1, "seed": 3})


async def test_a_run_is_told_in_order_in_a_thread_of_its_own() -> None:
    kept = Kept()
    run = tracking(kept, lr=0.1)
    run.look([], {0: RunStatus(rank=0)})
    run.look([report(1), report(2)], status(2))
    change = GenerationChange(1, 2.0, 3.0, 1, (1,), step=2)
    run.look([report(3), report(4)], status(5, change))
    await run.end(ValueError("no"))
    (_, begun), *told = kept.told
    assert (begun.id, begun.name, begun.title) == ("f" * 32, "train", "train-ffffffff")
    assert begun.config == {"lr": 0.1, "num_workers": 1, "seed": 3}
    assert told == [
        ("log", 1, {"loss": 1.0}, 1.0),
        ("log", 2, {"loss": 0.5}, 2.0),
        ("event", "ranks lost", 2),
        ("log", 3, {"loss": 1 / 3}, 3.0),
        ("log", 4, {"loss": 0.25}, 4.0),
        ("end", "failed", "ValueError: no"),
    ]
    assert kept.threads == {"tracker-Kept"}


@pytest.mark.parametrize(
    ("error", "ends"),
    [
        (None, ("finished", "")),
        (asyncio.CancelledError(), ("interrupted", "")),
        (KeyboardInterrupt(), ("interrupted", "")),
    ],
)
async def test_a_run_without_reports_has_a_beginning_and_an_end(
    error: BaseException | None, ends: tuple[str, str]
) -> None:
    kept = Kept()
    await tracking(kept).end(error)
    assert [told[0] for told in kept.told] == ["begin", "end"]
    assert kept.told[1][1:] == ends
    assert len(kept.told[0][1].id) == 32


@pytest.mark.parametrize("method", ["log", "event", "end"])
async def test_a_tracker_that_raises_is_told_once_and_gets_what_comes_later(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    broken, other = Kept(raises=method), Kept()
    run = tracking(broken, other)
    run.look(
        [report(1), report(2), report(3)], status(4, GenerationChange(1, 1.0, 2.0, 1, (1,), step=2))
    )
    with caplog.at_level(logging.WARNING, "chorusline"):
        await run.end(None)
    assert broken.told == other.told and len(other.told) == 6
    told = [record.message for record in caplog.records]
    assert told == [
        "tracker Kept raised OSError: the disk is full. Training continues, and it "
        "still receives later steps"
    ]


async def test_a_tracker_that_cannot_begin_does_not_follow_the_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "MOST_WAITING", 5)
    broken, other = Kept(raises="begin"), Kept()
    run = tracking(broken, other)
    for step in range(1, 10):
        run.look([report(step)], status(step + 1))
        while len(other.told) < step + 1:
            await asyncio.sleep(0.01)
    await run.end(None)
    assert [told[0] for told in broken.told] == ["begin"]
    (said,) = [record.message for record in caplog.records]
    assert said.endswith("Training continues, and it does not record this run")


async def test_a_slow_tracker_delays_nobody_and_what_is_left_out_is_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "MOST_WAITING", 5)
    gate = threading.Event()
    slow, fast = Kept(gate), Kept()
    run = tracking(slow, fast)
    run.look([report(1)], status(2))
    while len(fast.told) < 2:
        await asyncio.sleep(0.01)
    for step in range(2, 10):
        run.look([report(step)], status(step + 1))
        while len(fast.told) < step + 1:  # `log` of the slow one waits for the gate meanwhile.
            await asyncio.sleep(0.01)
    assert "Kept is slower than the reports arrive" in caplog.text
    gate.set()
    await run.end(None)
    assert [told[1] for told in fast.told[1:-1]] == [*range(1, 10)]
    steps = [told[1] for told in slow.told[1:-1]]
    assert steps == [*range(1, len(steps) + 1)] and len(steps) < 9
    assert f"{9 - len(steps)} steps or events were left out of the tracker Kept" in caplog.text


async def test_a_tracker_that_hangs_at_the_end_is_left_behind(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "END_S", 0.3)
    gate = threading.Event()
    hangs = Kept(gate)
    run = tracking(hangs)
    run.look([report(1)], status(2))
    began_at = time.monotonic()
    await run.end(None)
    assert time.monotonic() - began_at < 20
    assert "the tracker Kept has not written everything within 0.3 s" in caplog.text
    gate.set()
    while not hangs.told or hangs.told[-1][0] != "end":
        await asyncio.sleep(0.01)


async def test_a_run_begins_in_a_tracker_after_the_run_before_has_ended_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "END_S", 0.3)
    gate = threading.Event()
    hangs = Kept(gate)
    for step in (1, 2):  # one in each run
        run = tracking(hangs)
        run.look([report(step)], status(step + 1))
        await run.end(None)
    gate.set()
    async with asyncio.timeout(20):
        while len(hangs.told) < 6:
            await asyncio.sleep(0.01)
    told = [what[:2] if what[0] == "log" else what[0] for what in hangs.told]
    assert told == ["begin", ("log", 1), "end", "begin", ("log", 2), "end"]


async def test_an_interrupt_while_the_view_draws_its_last_state_leaves_trackers_their_end() -> None:
    asked = asyncio.Event()

    async def ask(timeout_s: float) -> Seen:
        asked.set()
        await asyncio.sleep(30)
        return ()

    kept = Kept()
    audience = Audience(None, LiveView(ask), None, has_output=False, tracking=tracking(kept))
    finishing = asyncio.create_task(audience.finish(asyncio.CancelledError()))
    await asked.wait()
    finishing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await finishing
    assert kept.told[1:] == [("end", "interrupted", "")]


async def test_the_callers_context_variables_are_there_in_the_trackers_thread() -> None:
    variable = contextvars.ContextVar("variable", default=0)
    seen = []

    class Looks(cl.Tracker):
        def begin(self, run: cl.TrackedRun) -> None:
            seen.append(variable.get())

    variable.set(7)
    await tracking(Looks()).end(None)
    assert seen == [7]


def test_a_config_has_what_a_person_would_look_for_and_nothing_heavy() -> None:
    @dataclass
    class Plan:
        width: int
        data: object

    given = {
        "lr": 0.1,
        "name": "x" * 1000,
        "plan": Plan(3, object()),
        "more": {"deep": {"er": True}, 4: None},
        "args": argparse.Namespace(batch=5),
        "dataset": [1.0] * 10,
        "seed": 9,
    }
    assert plain_config(given, {"seed": 1, "num_workers": 2}) == {
        "lr": 0.1,
        "name": "x" * 500,
        "plan.width": 3,
        "more.deep.er": True,
        "more.4": None,
        "args.batch": 5,
        "seed": 9,
        "num_workers": 2,
    }


@pytest.mark.parametrize(
    ("trackers", "kind", "says"),
    [
        ("tensorbord", ValueError, "no tracker 'tensorbord'; the names are jsonl, tensorboard,"),
        (["jsonl:"], ValueError, "'jsonl:' is not complete; write 'jsonl' or 'jsonl:FILE'"),
        (["opentelemetry:x"], ValueError, "write 'opentelemetry' or 'opentelemetry'"),
        (5, TypeError, 'must be a list of names and Trackers, got int; write trackers=\\["tensor'),
        ([print], TypeError, "a name or a Tracker, got builtin_function_or_method"),
        ([cl.JSONLinesTracker], TypeError, r"got the class JSONLinesTracker; make one: JSONLines"),
        ([cl.WandbTracker] * 2, TypeError, r"make one: WandbTracker\(\)"),
    ],
)
def test_what_is_no_tracker_is_refused_before_anything_starts(
    trackers: Any, kind: type[Exception], says: str
) -> None:
    with pytest.raises(kind, match=says):
        cl.Session(trackers=trackers)


def test_the_same_tracker_twice_is_refused() -> None:
    one = cl.JSONLinesTracker()
    with pytest.raises(ValueError, match="the same Tracker twice"):
        cl.Session(trackers=[one, one])


@pytest.mark.parametrize(
    ("name", "made", "library", "extra"),
    [
        ("tensorboard", cl.TensorBoardTracker, "tensorboard", "tensorboard"),
        ("mlflow", cl.MLflowTracker, "mlflow", "mlflow"),
        ("wandb", cl.WandbTracker, "wandb", "wandb"),
        ("opentelemetry", cl.OpenTelemetryTracker, "opentelemetry", "otel"),
    ],
)
def test_a_library_that_is_not_installed_is_named_with_the_mend(
    name: str, made: type[cl.Tracker], library: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module_name in [*sys.modules]:
        if module_name.partition(".")[0] == library:
            monkeypatch.delitem(sys.modules, module_name)
    session = cl.Session  # Loaded when it is first named, and with it what is not of ours.
    monkeypatch.setattr(sys, "path", [str(Path(cl.__file__).parent)])
    for given in (name, made()):
        with pytest.raises(ImportError) as refused:
            session(trackers=[given])
        assert f"needs the library {library}, which is not installed" in str(refused.value)
        assert f"pip install -e '.[{extra}]'" in str(refused.value)


def test_names_make_trackers_with_what_stands_behind_the_colon(tmp_path: Path) -> None:
    (lines,) = checked_trackers(f"jsonl:{tmp_path / 'm.jsonl'}")
    assert isinstance(lines, cl.JSONLinesTracker)
    lines.begin(cl.TrackedRun("0" * 32, "train", 1.0))
    lines.end("finished", "")
    assert (tmp_path / "m.jsonl").exists()
    assert checked_trackers(()) == ()
    with pytest.raises(ValueError, match='mode must be "online" or "offline"'):
        cl.WandbTracker(mode="on")
    with pytest.raises(ValueError, match="every_n_steps must be"):
        cl.OpenTelemetryTracker(-1)


@pytest.mark.parametrize("name", ["nowhere", "jsonl:"])
def test_the_command_line_refuses_a_wrong_tracker_before_it_starts_anything(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text("def main(ctx): ...\n")
    with pytest.raises(SystemExit) as ended:
        main(["run", f"{script}:main", "--tracker", "jsonl", "--tracker", name])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert f"--tracker: the tracker {name!r} is not complete" in said or (
        f"--tracker: there is no tracker {name!r}; the names are jsonl, tensorboard," in said
    )


async def test_json_lines_are_json_of_every_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = tracking(cl.JSONLinesTracker(), lr=math.inf)
    numbers = {"nan": math.nan, "low": -math.inf, "more": {"one": 1}, "step": 7, "time": 0.1}
    run.look(
        [Report(0, 0, 5.0, numbers, 1, 1)],
        status(2, GenerationChange(1, 2.0, 2.5, 1, (1,), step=1)),
    )
    await run.end(RuntimeError("x"))
    (file,) = (tmp_path / "runs").iterdir()
    assert file.name == "train-ffffffff.jsonl"
    begin, step, event, end = [json.loads(line) for line in file.read_text().splitlines()]
    assert begin["run"] == "train" and begin["config"]["lr"] == "Infinity"
    assert step == {"step": 1, "time": 5.0, "nan": "NaN", "low": "-Infinity", "more.one": 1.0}
    assert event["event"] == "ranks lost" and event["lost"] == [1] and event["time"] == 2.5
    assert end["end"] == "failed" and end["error"] == "RuntimeError: x"


@pytest.mark.parametrize(
    ("name", "is_secret"),
    [
        *((name, True) for name in ("api_key", "apikey", "HF_TOKEN", "password", "db.secret")),
        *((name, True) for name in ("accessToken", "dbPassword", "APIKEY", "passwd", "s3Secrets")),
        *((name, False) for name in ("keyboard", "num_tokens", "tokenizer", "monkey", "path")),
    ],
)
def test_a_text_that_is_named_like_a_secret_stays_away_from_trackers(
    name: str, is_secret: bool
) -> None:
    found = plain_config({"options": {name: "abc"}, name: "abc"}, {})
    assert set(found.values()) == {LEFT_OUT if is_secret else "abc"}
    of_several = plain_config({name: {"user": "abc"}, "n": {f"the_{name}": {"user": "abc"}}}, {})
    assert set(of_several.values()) == {LEFT_OUT if is_secret else "abc"}
