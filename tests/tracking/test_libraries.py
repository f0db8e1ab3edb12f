"""Each tracker with its real library: what it has written is read back with that library's reader.

The extra `trackers` installs all four (`make test-real`); a test whose library is missing is
skipped.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import chorusline as cl
from tests.harness.programs import output_of

FIRST = cl.TrackedRun(
    "0123456789abcdef" * 2, "train", 1000.0, {"lr": 0.25, "name": "a", "seed": None, "on": True}
)
RESUMED = cl.TrackedRun(FIRST.id, "train", 2000.0, FIRST.config, "/place/step-3", 3)
LOST = cl.TrackedEvent(
    "ranks lost", 1002.0, 1002.5, 2, 1, 2, (1,), (), (), "rank 1 lost; the run goes on"
)


def follow(tracker: cl.Tracker) -> None:
    """A run of four steps, with a loss; and one that resumes from its third step, and fails."""
    tracker.begin(FIRST)
    for step in range(1, 5):
        tracker.log(step, {"loss": 1 / step, "acc.top1": step / 8}, 1000.0 + step)
        tracker.flush()
        if step == 2:
            tracker.event(LOST)
    tracker.end("finished", "")
    tracker.begin(RESUMED)
    tracker.log(4, {"loss": 0.125}, 2004.0)
    tracker.log(5, {"loss": 0.0625}, 2005.0)
    tracker.flush()
    tracker.end("failed", "ValueError: no")


def test_tensorboard_reads_back_every_step_and_what_resumed_steps_replace(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed (extra tensorboard)")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    follow(cl.TensorBoardTracker(tmp_path))
    (folder,) = tmp_path.iterdir()
    assert folder.name == "train-01234567", "both runs are in one folder"
    seen = EventAccumulator(str(folder)).Reload()
    losses = [(one.step, one.wall_time, one.value) for one in seen.Scalars("loss")]
    assert losses == [
        *((step, 1000.0 + step, pytest.approx(1 / step, rel=1e-6)) for step in (1, 2, 3)),
        (4, 2004.0, 0.125),
        (5, 2005.0, 0.0625),
    ]
    assert [one.step for one in seen.Scalars("acc.top1")] == [1, 2, 3]
    ((at, workers),) = [(one.step, one.value) for one in seen.Scalars("chorusline/num_workers")]
    assert (at, workers) == (2, 2.0)
    texts = {
        tag: [one.tensor_proto.string_val[0].decode() for one in seen.Tensors(tag)]
        for tag in seen.Tags()["tensors"]
    }
    assert texts["chorusline/events/text_summary"] == [LOST.text]
    assert texts["chorusline/end/text_summary"][-1] == "failed: ValueError: no"
    assert "| lr | 0.25 |" in texts["config/text_summary"][0]


def test_tensorboard_drops_the_steps_that_a_run_has_gone_back_behind(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed (extra tensorboard)")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = cl.TensorBoardTracker(tmp_path)
    tracker.begin(FIRST)
    for step in (1, 2, 3, 4, 2, 3):
        tracker.log(step, {"loss": float(step)}, 1000.0)
    tracker.end("finished", "")
    (folder,) = tmp_path.iterdir()
    seen = EventAccumulator(str(folder)).Reload()
    assert [one.step for one in seen.Scalars("loss")] == [1, 2, 3]


class AwayOnce:
    """MLflow's client, of a server that does not answer the first call that sends metrics.

    code: of MLflow's error."""

    def __init__(self, code: str) -> None:
        self.received: list[Any] = []
        self.status = ""
        self._code: str | None = code  # None: the server answers

    def log_batch(self, run_id: str, metrics: list[Any]) -> None:
        if self._code is not None:
            error: Any = OSError("503")
            error.error_code, self._code = self._code, None
            raise error
        self.received += metrics

    def set_terminated(self, run_id: str, status: str) -> None:
        self.status = status


def mlflow_tracker_with(code: str, metrics: list[Any]) -> tuple[cl.MLflowTracker, AwayOnce]:
    tracker, client = cl.MLflowTracker(), AwayOnce(code)
    tracker._client, tracker._metrics = client, metrics  # `begin` and `log` need the library.
    return tracker, client


def test_mlflow_gets_metrics_again_that_its_server_has_missed() -> None:
    tracker, client = mlflow_tracker_with("INTERNAL_ERROR", [*range(1500)])
    with pytest.raises(OSError, match="503"):
        tracker.flush()
    tracker.flush()
    assert client.received == [*range(1500)]


class Refusing(AwayOnce):
    """As MLflow does, it refuses a call as a whole for one name."""

    def log_batch(self, run_id: str, metrics: list[Any]) -> None:
        if any("%" in one.key for one in metrics):
            error: Any = OSError("400")
            error.error_code = "INVALID_PARAMETER_VALUE"
            raise error
        self.received += metrics


def test_a_name_that_mlflow_refuses_takes_no_other_with_it() -> None:
    tracker, client = cl.MLflowTracker(), Refusing("")
    names = ("loss", "acc%", "chorusline/num_workers")
    metrics = [SimpleNamespace(key=name, step=step) for step in range(700) for name in names]
    tracker._client, tracker._metrics = client, [*metrics]
    with pytest.raises(ValueError, match=r"MLflow has refused .* 'acc%' \(400\)"):
        tracker.flush()
    for name in names:
        steps = [one.step for one in client.received if one.key == name]
        assert steps == ([] if "%" in name else [*range(700)])
    tracker.flush()


def test_a_run_has_ended_in_mlflow_though_its_last_metrics_did_not_arrive() -> None:
    tracker, client = mlflow_tracker_with("INTERNAL_ERROR", [1.0])
    with pytest.raises(OSError, match="503"):
        tracker.end("finished", "")
    assert client.status == "FINISHED"


@pytest.mark.parametrize(
    "store",
    [pytest.param("sqlite:///{}/runs.db", marks=pytest.mark.slow), "file://{}/mlruns"],
)
def test_mlflow_reads_back_every_step_of_one_run(
    tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow", reason="mlflow is not installed (extra mlflow)")
    if store.startswith("sqlite"):
        pytest.importorskip("alembic", reason="mlflow's database needs mlflow, not mlflow-skinny")
    import mlflow

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.chdir(tmp_path)
    uri = store.format(tmp_path)
    follow(cl.MLflowTracker("some experiment", uri))
    client = mlflow.MlflowClient(uri)
    experiment = client.get_experiment_by_name("some experiment")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_name == "train-01234567" and run.info.status == "FAILED"
    assert run.data.params == {"lr": "0.25", "name": "a", "seed": "None", "on": "True"}
    history = client.get_metric_history(run.info.run_id, "loss")
    assert sorted((one.step, one.timestamp, one.value) for one in history) == [
        (1, 1001000, 1.0),
        (2, 1002000, 0.5),
        (3, 1003000, 1 / 3),
        (4, 1004000, 0.25),
        (4, 2004000, 0.125),
        (5, 2005000, 0.0625),
    ]
    assert len(client.get_metric_history(run.info.run_id, "acc.top1")) == 4
    workers = client.get_metric_history(run.info.run_id, "chorusline/num_workers")
    assert [(one.step, one.value) for one in workers] == [(2, 2.0)]
    assert run.data.tags["chorusline.event.1"] == LOST.text
    assert run.data.tags["chorusline.error"] == "ValueError: no"


def test_an_argument_that_mlflow_refuses_takes_no_other_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("mlflow", reason="mlflow is not installed (extra mlflow)")
    import mlflow

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.chdir(tmp_path)
    tracker = cl.MLflowTracker(tracking_uri=f"file://{tmp_path}/mlruns")
    config = {f"a{number}": number for number in range(150)} | {"p(x)": 0.1, "b%": 2}
    tracker.begin(cl.TrackedRun("0" * 32, "train", 1000.0, config))
    tracker.end("finished", "")
    (run,) = mlflow.MlflowClient(f"file://{tmp_path}/mlruns").search_runs(["0"])
    assert run.data.params == {f"a{number}": str(number) for number in range(150)}
    assert run.info.status == "FINISHED"
    assert "MLflow has refused the arguments 'p(x)', 'b%' (" in caplog.text


WANDB = """
import sys
import wandb
import chorusline as cl
from tests.tracking.test_libraries import follow
own = wandb.init(project="own", id="own", mode="offline", dir=sys.argv[1])
follow(cl.WandbTracker("some project", mode="offline", dir=sys.argv[1]))
own.log({"later": 1})
own.finish()
"""


@pytest.mark.slow
def test_wandbs_offline_files_have_every_step_and_a_run_of_the_program_continues(
    tmp_path: Path,
) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed (extra wandb)")
    environment = {"WANDB_ERROR_REPORTING": "false", "HOME": str(tmp_path)}
    script = tmp_path / "follow.py"
    script.write_text(WANDB)
    output_of(script, str(tmp_path), timeout_s=100, environment=os.environ | environment)
    runs = []
    for file in tmp_path.glob("wandb/offline-run-*/*.wandb"):
        reader = ("-m", "wandb", "leet", "inspect", "--json", file)
        said = output_of(*reader, timeout_s=100, environment=os.environ | environment)
        runs.append([json.loads(line) for line in said.splitlines()])
    assert len(runs) == 3
    (own,) = (run for run in runs if _of_kind(run, "run")[0]["run_id"] == "own")
    assert [one["item"]["later"] for one in _of_kind(own, "history")] == [1]
    runs.remove(own)
    first, resumed = sorted(runs, key=lambda run: _of_kind(run, "exit")[-1].get("exit_code", 0))
    for run in runs:
        about = _of_kind(run, "run")[0]
        assert about["run_id"] == FIRST.id[:16] and about["project"] == "some project"
        assert about["display_name"] == "train-01234567"
        config = about["config"]["update"]
        assert (config["lr"], config["name"], config["on"]) == (0.25, "a", True)
    assert [_of_kind(run, "exit")[-1]["exit_code"] for run in (first, resumed)] == [0, 1]
    history = [one["item"] for one in _of_kind(first, "history")]
    assert [(one["_step"], one["loss"]) for one in history] == [
        (step, 1 / step) for step in range(1, 5)
    ]
    assert [one["acc.top1"] for one in history] == [1 / 8, 2 / 8, 3 / 8, 4 / 8]
    assert [one.get("chorusline/num_workers") for one in history] == [None, 2, None, None]
    again = [one["item"] for one in _of_kind(resumed, "history")]
    assert [(one["_step"], one["loss"]) for one in again] == [(4, 0.125), (5, 0.0625)]
    summary: dict[str, Any] = {}
    for one in _of_kind(resumed, "summary"):
        summary |= one.get("update", {})
    assert summary["chorusline/end"] == "failed: ValueError: no"


def _of_kind(run: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [record[kind] for record in run if record["type"] == kind]


def test_opentelemetry_has_spans_of_the_run_its_generations_steps_and_recovery() -> None:
    pytest.importorskip("opentelemetry.sdk.trace", reason="opentelemetry-sdk is not installed")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
    from opentelemetry.trace import StatusCode

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with provider.get_tracer("test").start_as_current_span("caller") as caller:
        follow(cl.OpenTelemetryTracker(2, tracer_provider=provider))
    spans = exporter.get_finished_spans()
    first, second = [span for span in spans if span.name == "chorusline.run"]
    for run in (first, second):
        assert run.parent.span_id == caller.get_span_context().span_id
    assert first.start_time == 1000 * 10**9 and first.attributes["chorusline.config.lr"] == 0.25
    assert first.status.status_code is StatusCode.OK
    assert second.status.status_code is StatusCode.ERROR
    assert second.status.description == "ValueError: no"
    assert second.attributes["chorusline.resumed.step"] == 3

    mine = [span for span in spans if span.context.trace_id == first.context.trace_id]
    below = [s for s in mine if s.parent and s.parent.span_id == first.context.span_id]
    before, recovery, after = sorted(below, key=lambda span: span.start_time)
    assert [before.name, recovery.name, after.name] == [
        "chorusline.generation",
        "chorusline.recovery",
        "chorusline.generation",
    ]
    assert recovery.end_time - recovery.start_time == 5 * 10**8
    assert recovery.attributes["chorusline.ranks.lost"] == (1,)
    assert recovery.attributes["chorusline.seconds"] == 0.5
    assert recovery.attributes["chorusline.num_workers"] == 2
    assert before.end_time == recovery.start_time and after.start_time == recovery.end_time
    steps = [
        (
            s.attributes["chorusline.step"],
            s.parent.span_id,
            s.attributes["chorusline.reported.loss"],
        )
        for s in spans
        if s.name == "chorusline.step"
    ]
    assert steps[:2] == [(2, before.context.span_id, 0.5), (4, after.context.span_id, 0.25)]


def test_without_a_tracer_provider_the_user_is_told_where_spans_go(
    caplog: pytest.LogCaptureFixture,
) -> None:
    trace = pytest.importorskip("opentelemetry.trace", reason="opentelemetry is not installed")
    follow(cl.OpenTelemetryTracker(tracer_provider=trace.NoOpTracerProvider()))
    assert "no OpenTelemetry tracer provider is configured" in caplog.text
