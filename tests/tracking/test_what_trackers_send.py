"""What each tracker gives its library, which need not be installed: one that notes its calls is in
its place. test_libraries.py reads back what the real ones have made of it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import chorusline as cl
from tests.tracking.test_libraries import FIRST, LOST, follow

LOGGED = [[(1, 1.0), (2, 0.5), (3, 1 / 3), (4, 0.25)], [(4, 0.125), (5, 0.0625)]]
"""By run, what `follow` logs as loss at which steps."""


def install(monkeypatch: pytest.MonkeyPatch, name: str, **names: object) -> None:
    module = ModuleType(name)
    vars(module).update(names)
    monkeypatch.setitem(sys.modules, name, module)


def test_wandb_gets_each_number_at_its_step_and_the_run_that_it_continues(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs: list[Any] = []

    def init(**given: Any) -> Any:
        run = SimpleNamespace(given=given, logged=[], summary={}, exit_code=None)
        run.log = lambda numbers, step=None: run.logged.append((step, numbers))
        run.finish = lambda exit_code: setattr(run, "exit_code", exit_code)
        runs.append(run)
        return run

    install(monkeypatch, "wandb", init=init, Settings=dict)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    follow(cl.WandbTracker("mine", mode="offline"))
    for run, logged in zip(runs, LOGGED, strict=True):
        assert [(step, one["loss"]) for step, one in run.logged if "loss" in one] == logged
        wanted = {"id": FIRST.id[:16], "resume": "allow", "project": "mine", "mode": "offline"}
        assert wanted.items() <= run.given.items() and run.given["config"] == FIRST.config
        assert run.given["reinit"] == "create_new"
    first, second = runs
    assert (2, {"chorusline/num_workers": 2}) in first.logged
    assert first.summary["chorusline/events"] == [f"step 2: {LOST.text}"]
    assert (first.exit_code, second.exit_code) == (0, 1)
    assert second.summary["chorusline/end"] == "failed: ValueError: no"


def test_tensorboard_gets_each_number_at_its_step_and_what_is_void_after_a_resume(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    writers: list[Any] = []

    class Writer:
        def __init__(self, folder: str, purge_step: int | None) -> None:
            self.place, self.purge_step = Path(folder), purge_step
            self.scalars: list[tuple[Any, ...]] = []
            self.texts: dict[str, str] = {}
            self.is_closed = False
            writers.append(self)

        def add_scalar(self, *scalar: Any) -> None:
            assert not self.is_closed
            self.scalars.append(scalar)

        def add_text(self, tag: str, text: str, step: int, at: float = 0.0) -> None:
            self.texts[tag] = text

        def flush(self) -> None:
            pass

        def close(self) -> None:
            self.is_closed = True

    install(monkeypatch, "torch.utils.tensorboard", SummaryWriter=Writer)
    follow(cl.TensorBoardTracker(tmp_path))
    assert [one.purge_step for one in writers] == [None, 4]
    assert {one.place for one in writers} == {tmp_path / "train-01234567"}
    for writer, logged, at in zip(writers, LOGGED, (1000.0, 2000.0), strict=True):
        expected = [("loss", number, step, at + step) for step, number in logged]
        assert [one for one in writer.scalars if one[0] == "loss"] == expected
        assert writer.is_closed
    assert ("chorusline/num_workers", 2, 2, 1002.5) in writers[0].scalars
    assert writers[0].texts["chorusline/events"] == LOST.text
    assert writers[1].texts["chorusline/end"] == "failed: ValueError: no"
    # A run that has gone back begins another file, in which later steps are void.
    tracker = cl.TensorBoardTracker(tmp_path)
    tracker.begin(FIRST)
    for step in (1, 2, 1):
        tracker.log(step, {"loss": 0.5}, 1000.0)
    assert [one.purge_step for one in writers[2:]] == [None, 1]


class Server:
    """MLflow's client and its server."""

    def __init__(self, tracking_uri: str | None) -> None:
        self.uri, self.metrics, self.params, self.statuses = tracking_uri, [], {}, []  # type: ignore[var-annotated]
        self.run: Any = None

    def get_experiment_by_name(self, name: str) -> Any:
        return SimpleNamespace(experiment_id="7") if name == "mine" and self.run else None

    def create_experiment(self, name: str) -> str:
        return "7"

    def search_runs(self, experiments: list[str], query: str) -> list[Any]:
        assert experiments == ["7"] and f"'{FIRST.id}'" in query
        return [self.run]

    def create_run(self, number: str, tags: dict[str, str], **more: Any) -> Any:
        assert self.run is None, "a run that resumes continues in the run before"
        info = SimpleNamespace(run_id="r", **more)
        self.run = SimpleNamespace(info=info, data=SimpleNamespace(tags=tags))
        return self.run

    def log_batch(self, run_id: str, metrics: Any = (), params: Any = ()) -> None:
        assert run_id == "r"
        self.metrics += metrics
        self.params.update((one.key, one.value) for one in params)

    def set_tag(self, run_id: str, name: str, value: str) -> None:
        self.run.data.tags[name] = value

    def update_run(self, run_id: str, status: str) -> None:
        self.statuses.append(status)

    def set_terminated(self, run_id: str, status: str) -> None:
        self.statuses.append(status)


def test_mlflow_gets_each_number_at_its_step_and_the_run_that_it_continues(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = Server("here")

    def entity(*names: str) -> Any:
        return lambda *values: SimpleNamespace(**dict(zip(names, values, strict=True)))

    install(monkeypatch, "mlflow", MlflowClient=lambda tracking_uri: server)
    entities = {"Metric": entity("key", "value", "at", "step"), "Param": entity("key", "value")}
    install(monkeypatch, "mlflow.entities", **entities)
    variable = SimpleNamespace(get=lambda: None)
    install(monkeypatch, "mlflow.environment_variables", MLFLOW_EXPERIMENT_NAME=variable)
    follow(cl.MLflowTracker("mine", "here"))
    losses = [(one.step, one.value) for one in server.metrics if one.key == "loss"]
    assert losses == [*LOGGED[0], *LOGGED[1]]
    assert [one.at for one in server.metrics if one.key == "loss"][-1] == 2005000
    [workers] = [one for one in server.metrics if one.key == "chorusline/num_workers"]
    assert (workers.step, workers.value) == (2, 2.0)
    assert server.params == {"lr": "0.25", "name": "a", "seed": "None", "on": "True"}
    assert server.statuses == ["FINISHED", "RUNNING", "FAILED"]
    tags = server.run.data.tags
    assert tags["chorusline.event.1"] == LOST.text
    assert tags["chorusline.error"] == "ValueError: no"
